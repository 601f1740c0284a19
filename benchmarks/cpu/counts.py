"""Compile the plugin ``count.c``, and read the counts that it writes."""

from __future__ import annotations

import functools
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolchain import files, process
from toolchain.errors import CommandFailed

SOURCE = Path(__file__).resolve().parent / "count.c"
CLASSES = ("NEON", "SIMD load/store", "VFP", "integer", "multiply", "load/store", "branch")
"""Classes of instructions: *NEON* and *VFP* process data in the floating-point registers, *SIMD load/store* moves these
registers to and from memory, *multiply* includes division, and *integer* is everything else."""

_CONDITION = "(?:eq|ne|cs|hs|cc|lo|mi|pl|vs|vc|hi|ls|ge|lt|gt|le|al)?"
_BRANCH = re.compile(rf"(?:(?:b|bl|bx|blx){_CONDITION}|cbz|cbnz|tbb|tbh)")
_MULTIPLY = re.compile(r"(?:mul|mla|mls|[us]m(?:ul|la|ls|ml|mu|aal|us)|[us]div)")
_MEMORY = re.compile(r"(?:ldr|str|ldm|stm|push|pop|pld|pli)")
_SIMD_MEMORY = re.compile(r"(?:vld|vst|vpush|vpop)")
_OPTIONS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-fvisibility=hidden", "-shared", "-fPIC")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its bytes in memory order, and its text in QEMU's disassembly."""

    code: bytes
    text: str


@dataclass(eq=False)
class Block:
    """A QEMU translation block: instructions that are executed in sequence."""

    address: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """The blocks that were executed between two marks."""

    resident_kib: int
    executions: Mapping[Block, int]

    @property
    def by_class(self) -> Counter[str]:
        """The number of executed instructions of each class."""
        counts: Counter[str] = Counter()
        for block, times in self.executions.items():
            for instruction in block.instructions:
                counts[class_of(instruction.text)] += times
        return counts

    def hottest(self, number: int) -> list[tuple[Block, int]]:
        """Return the blocks in which the most instructions were executed, and how often each block was executed."""
        return sorted(self.executions.items(), key=lambda item: -item[1] * len(item[0].instructions))[:number]

    @property
    def instructions(self) -> int:
        """The number of executed instructions."""
        return sum(len(block.instructions) * times for block, times in self.executions.items())


@functools.cache
def class_of(text: str) -> str:
    """Determine an instruction's class from its disassembly."""
    mnemonic, _, operands = text.partition(" ")
    name, _, kind = mnemonic.partition(".")
    if name.startswith("v"):
        if _SIMD_MEMORY.match(name):
            return "SIMD load/store"
        is_vector = re.search(r"\bq\d", operands) or (
            re.search(r"\bd\d", operands) and "f64" not in kind and (kind or not name.startswith("vmov"))
        )
        return "NEON" if is_vector else "VFP"
    if _BRANCH.fullmatch(name):
        return "branch"
    if _MULTIPLY.match(name):
        return "multiply"
    return "load/store" if _MEMORY.match(name) else "integer"


def compile_plugin(tools: Path, plugin: Path) -> None:
    """Compile the plugin with the compiler in the tools folder. Raises CommandFailed."""
    with files.scratch_folder(tools, "plugin") as scratch:
        inside = f"/{scratch.name}"
        process.run(
            ["chroot", tools, "gcc", *_OPTIONS, "-o", f"{inside}/count.so", "-x", "c", "-"],
            env={"TMPDIR": inside},
            stdin=SOURCE.read_bytes(),
            limit_s=120,
        )
        shutil.move(scratch / "count.so", plugin)


def read(path: Path) -> dict[int, Region]:
    """Return the regions in the plugin's output file, by number. Raises CommandFailed if the file is incomplete."""
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines or lines[-1] != "end":
        raise CommandFailed(
            "the program exited before it had written its complete list of translation blocks",
            expected=f"a complete list of blocks in {path}",
            found=f"{len(lines)} lines, without 'end' as the last line",
            fix="read the program's output in benchmarks/logs in the build folder",
        )
    executed: dict[int, dict[int, int]] = {}
    resident: dict[int, int] = {}
    blocks: dict[int, Block] = {}
    region: dict[int, int] = {}
    block = Block(0)
    for line in lines[:-1]:
        kind, first, second = line.split(" ", 2)
        if kind == "executed":
            region[int(first)] = int(second)
        elif kind == "code":
            block.instructions.append(Instruction(bytes.fromhex(first), second))
        elif kind == "block":
            block = blocks[int(first)] = Block(int(second, 16))
        else:
            region = executed[int(first)] = {}
            resident[int(first)] = int(second)
    return {
        number: Region(resident[number], {blocks[name]: times for name, times in region.items()})
        for number, region in executed.items()
    }
