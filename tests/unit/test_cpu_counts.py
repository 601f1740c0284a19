"""Tests of instruction classes, the plugin's output, and the tables of the ``cpu`` benchmark, on small cases."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import suite
from benchmarks.cpu import compare, counts, model
from benchmarks.cpu.compare import Row
from benchmarks.workspace import Workspace
from toolchain.config import load_config
from toolchain.errors import ArtefactMissing, CommandFailed, PlatformMismatch, UserError

OUTPUT = """\
region 1 2048
executed 0 3
region 2 4096
executed 0 1
executed 7 100
block 0 10754
code 00df svc #0
block 7 1036a
code 540d42f2 vmla.f32 q8, q1, q2
code 0133 adds r3, #1
code fbd1 bne #0x1036a
end
"""


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("NEON", ["vmla.f32 q8, q1, q2", "veor d0, d1, d2", "vadd.i8 d0, d1, d2", "vmov.i32 d16, #0"]),
        ("VFP", ["vmov d0, r0, r1", "vmla.f32 s8, s0, s4", "vcvt.s32.f64 s0, d0", "vmrs apsr_nzcv, fpscr"]),
        ("SIMD load/store", ["vld1.32 {d4, d5}, [r0]!", "vst4.8 {d0, d1, d2, d3}, [r0]", "vpush {d8, d9}"]),
        ("SIMD load/store", ["vldmia r5!, {s0, s1, s2, s3}", "vldr s0, [fp, #-0x118]"]),
        ("integer", ["add r0, r1, r2", "bic r0, r0, #3", "cmp.w r3, #0x3e8", "it ne", "movs r0, #0"]),
        ("multiply", ["mul r0, r1, r2", "muls r0, r1, r0", "mla r0, r1, r2, r3", "udiv r0, r1, r2"]),
        ("multiply", ["umull r0, r1, r2, r3", "smlabb r0, r1, r2, r3", "smmul r0, r1, r2"]),
        ("load/store", ["ldr.w r2, [pc, #0x50]", "strexb r0, r1, [r2]", "ldm r0!, {r1, r2}", "pop {r4, pc}"]),
        ("load/store", ["ldrdeq r0, r1, [sp]", "pld [r5, #0x60]"]),
        ("branch", ["b.w #0x10750", "bls #0x10750", "bleq #0x10750", "blx r3", "bxne lr", "cbnz r2, #0x21eb4"]),
        ("branch", ["tbb [pc, r1]"]),
    ],
)
def test_instructions_have_a_class(kind: str, texts: list[str]) -> None:
    assert {text: counts.class_of(text) for text in texts} == dict.fromkeys(texts, kind)
    assert kind in counts.CLASSES


def test_the_plugins_output_is_read(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text(OUTPUT)
    found = counts.read(tmp_path / "counts")
    assert {number: region.resident_kib for number, region in found.items()} == {1: 2048, 2: 4096}
    assert found[1].by_class == {"integer": 3}
    assert found[2].by_class == {"integer": 101, "NEON": 100, "branch": 100}
    assert found[2].instructions == 301
    ((block, times),) = found[2].hottest(1)
    assert (block.address, times, len(block.instructions)) == (0x1036A, 100, 3)
    assert block.instructions[1].code == bytes.fromhex("0133")


@pytest.mark.parametrize("text", ["", OUTPUT.removesuffix("end\n"), OUTPUT[:-30]])
def test_an_incomplete_output_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "counts").write_text(text)
    with pytest.raises(CommandFailed, match="exited before"):
        counts.read(tmp_path / "counts")
    with pytest.raises(CommandFailed, match="exited before"):
        counts.read(tmp_path / "missing")


def test_branches_stay_inside_the_modelled_block(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text(OUTPUT)
    ((block, _),) = counts.read(tmp_path / "counts")[2].hottest(1)
    assert model.assembly(block) == "vmla.f32 q8, q1, q2\nadds r3, #1\nbne .\n"


def test_the_model_ignores_the_conditions_of_instructions() -> None:
    block = counts.Block(0, [counts.Instruction(b"", text) for text in ("it eq", "mov r0, r1")])
    assert model.assembly(block) == "nop\nmov r0, r1\n"


def test_modelled_cycles_are_scaled_to_all_instructions() -> None:
    assert model.Modelled(cycles=30.0, share=0.5).total == 60.0


def rows(factor: int) -> list[Row]:
    """Return the rows for a wheel that executes ``factor`` million vector instructions in most workloads."""
    names = [compare.IMPORT, "mm 256³", "conv 3×3, 64→64 on 56×56", "linear 1×1024×1024", "MobileNetV2 224×224"]
    cycles = model.Modelled(cycles=1e6 * factor, share=0.5)
    made = [Row(name, "", Counter({"NEON": factor * 1_000_000, "branch": 1_000_000}), 1000 * factor) for name in names]
    return [
        *(dataclasses.replace(row, cycles=None if row.name == compare.IMPORT else cycles) for row in made),
        Row("linear 1×1024×1024, int8", "no qnnpack"),
    ]


def test_the_table_shows_both_wheels_and_their_ratio() -> None:
    text = compare.tables(rows(1), rows(3), ["2.6.0", "old.whl"])
    (line,) = [line for line in text.splitlines() if "mm 256³" in line and "0.50" in line]
    assert [cell.strip() for cell in line.split("│")[2:-1]] == [
        "2.000",
        "4.000",
        "0.50",
        "2.000",
        "6.000",
        "0.33",
        "50 %",
    ]
    assert "2.6.0 against old.whl" in text
    assert "not run: linear 1×1024×1024, int8: no qnnpack" in text
    assert "(model)" in text
    (line,) = [line for line in text.splitlines() if "mm 256³" in line and "50.0" in line]
    assert line.count("0.0") >= 5


def test_a_single_wheel_has_no_ratios() -> None:
    text = compare.tables(rows(1), None, ["2.6.0"])
    assert "ratio" not in text
    assert [figure.name for figure in compare.figures(rows(1), None) if figure.goal] == []


def test_goals_compare_with_the_other_wheel() -> None:
    found = {figure.name: figure for figure in compare.figures(rows(1), rows(5))}
    goal = found["mm 256³: instructions, this / other wheel"]
    assert (round(goal.value, 3), goal.met) == (0.333, True)
    assert found["mm 256³: cycles (model), this / other wheel"].met
    assert found["import torch: memory, this / other wheel"].value == 0.2
    assert not any("int8" in name for name in found), "a workload that was not run has no goal"


def test_results_of_the_model_are_labelled() -> None:
    found = compare.result(rows(1), rows(2), ["2.6.0", "old.whl"])
    assert "MODEL" in found.rule
    assert "not measured on hardware" in found.rule
    assert found.facts["against"][1]["by class"] == {"NEON": 2_000_000, "branch": 1_000_000}


def test_only_the_benchmark_cpu_compares_wheels() -> None:
    with pytest.raises(UserError) as caught:
        suite.bench(load_config({}), "export", against="a.whl")
    assert caught.value.fix == "run ./inv bench --name=cpu --against=a.whl"


def test_a_missing_wheel_is_reported_before_anything_is_built(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    with pytest.raises(ArtefactMissing, match="to compare with is missing"):
        compare.measure(Workspace.of(config, against=str(tmp_path / "no.whl")))
    assert list(tmp_path.iterdir()) == []


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}, "image": {"architecture": "arm64"}})
    with pytest.raises(PlatformMismatch, match="the benchmark 'cpu'") as caught:
        compare.measure(Workspace.of(config))
    assert (caught.value.expected, caught.value.found) == ("image.architecture: armhf", "arm64")
