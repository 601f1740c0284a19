"""Tests that the plugin of the benchmark ``cpu`` counts instructions exactly, and that llvm-mca models loops."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine import needs_the_machine

from benchmarks.cpu import counts, model
from flow import extracted_tools, pipelines
from flow.context import Context
from toolchain import files, process
from toolchain.config import Config
from toolchain.errors import CommandFailed

PROGRAM = """
.syntax unified
.arch armv7-a
.fpu neon
.macro mark region
    mov r7, #6                  @ close
    movw r0, #\\region
    movt r0, #0x4350
    svc #0
.endm
.macro work
    vmla.f32 q0, q1, q2
    vld1.32 {d4, d5}, [sp]
    vadd.f32 s0, s0, s1
    vmul.f64 d0, d0, d1
    ldr r1, [sp]
    mul r1, r1, r1
    add r1, r1, #1
    subs r4, r4, #1
    bne 1b
.endm
.arm
.global _start
_start:
    mark 1
    mov r4, #100
1:  work
    mark 0
    mov r4, #50                 @ outside a region: not counted
1:  work
    adr r1, thumb + 1
    bx r1
.thumb
thumb:
    mark 2
    mov r4, #200
1:  work
    mark 0
    mov r7, #1                  @ exit
    mov r0, #0
    svc #0
"""

PROGRAM_64 = """
.macro mark region
    mov x8, #57                 // close
    movz w0, #\\region
    movk w0, #0x4350, lsl #16
    svc #0
.endm
.global _start
_start:
    mark 1
    mov x1, #100
1:  subs x1, x1, #1
    b.ne 1b
    mark 0
    mov x8, #93                 // exit
    mov x0, #0
    svc #0
"""


@dataclass(frozen=True)
class Parts:
    """The benchmark's tools, with the compiled plugin and program in ``folder``, which is inside the tools' root."""

    tools: Path
    folder: Path

    def run(self, *words: str, out: str = "counts", emulator: str = "qemu-arm") -> process.Completed:
        """Run a program in the emulator with the plugin."""
        inside = f"/{self.folder.name}"
        plugin = f"{inside}/count.so,out={inside}/{out}"
        return process.run(["chroot", self.tools, emulator, "-plugin", plugin, *words], check=False, limit_s=60)


@pytest.fixture(scope="module")
def parts(product_config: Config) -> Iterator[Parts]:
    needs_the_machine()
    with files.locked(product_config.build_root / "for-the-tests"), Context(product_config) as context:
        tools = extracted_tools.cpu_tools(product_config)
        pipeline = pipelines.main_job(context)
        pipeline.execute(pipeline.plan(only=("tools",)))
        builder = context.tools
    with files.scratch_folder(tools, "test") as folder, files.scratch_folder(builder, "test") as made:
        counts.compile_plugin(tools, folder / "count.so")
        inside = f"/{made.name}"
        compiler = f"{product_config.image.target.gnu}-gcc"
        process.run(
            ["chroot", builder, compiler, "-nostdlib", "-static", "-x", "assembler", "-", "-o", f"{inside}/program"],
            env={"TMPDIR": inside},
            stdin=PROGRAM.encode(),
        )
        shutil.copy2(made / "program", folder)
        yield Parts(tools, folder)


@pytest.mark.emulation
def test_a_small_program_is_counted_exactly(parts: Parts) -> None:
    done = parts.run(f"/{parts.folder.name}/program")
    assert done.returncode == 0, done.output
    found = counts.read(parts.folder / "counts")
    assert set(found) == {1, 2}
    for number, times in ((1, 100), (2, 200)):
        kinds = found[number].by_class
        for kind in ("NEON", "SIMD load/store", "load/store", "multiply", "branch"):
            assert kinds[kind] == times, (kind, kinds)
        assert kinds["VFP"] == 2 * times
        # The remaining instructions are the overhead of the markers, and those that load the loop counter.
        assert 0 < kinds["integer"] - 2 * times <= 8
        assert found[number].instructions == kinds.total()


@pytest.mark.emulation
def test_a_64_bit_program_is_counted_exactly(parts: Parts) -> None:
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("aarch64-linux-gnu-gcc is missing; ./inv installs it")
    program = parts.folder / "program64"
    process.run([compiler, "-nostdlib", "-static", "-x", "assembler", "-", "-o", program], stdin=PROGRAM_64.encode())
    done = parts.run(f"/{parts.folder.name}/program64", out="counts64", emulator="qemu-aarch64")
    assert done.returncode == 0, done.output
    (region,) = counts.read(parts.folder / "counts64").values()
    # The remaining instructions are the overhead of the markers, and those that load the loop counter.
    assert 0 < region.instructions - 2 * 100 <= 8


@pytest.mark.emulation
def test_both_encodings_are_modelled(parts: Parts) -> None:
    parts.run(f"/{parts.folder.name}/program", out="modelled")
    for region in counts.read(parts.folder / "modelled").values():
        ((loop, _),) = region.hottest(1)
        (cycles,) = model.cycles_of(parts.tools, [loop])
        assert 3 < cycles < 60, "the loop contains a chain of floating-point operations"
        found = model.modelled(parts.tools, region)
        assert found is not None
        assert found.share > 0.9


@pytest.mark.emulation
def test_an_instruction_that_the_model_lacks_is_left_out(parts: Parts) -> None:
    known = counts.Instruction(b"", "add r0, r0, r1")
    blocks = [counts.Block(0, [known]), counts.Block(0, [known, counts.Instruction(b"", "no such instruction")])]
    cycles = model.cycles_of(parts.tools, blocks)
    assert cycles[0] > 0
    assert cycles[1] == 0


@pytest.mark.emulation
def test_a_killed_program_gives_no_counts(parts: Parts) -> None:
    assert parts.run("/no-such-program", out="none").returncode != 0
    with pytest.raises(CommandFailed, match="exited before"):
        counts.read(parts.folder / "none")
