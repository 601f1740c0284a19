"""Estimate the cycles of the hottest blocks with llvm-mca.

LLVM has no scheduling model that llvm-mca can use for 32-bit code on the Cortex-A53 or the Cortex-A7. LLVM's model of
the similar Cortex-R52 lacks NEON instructions. The estimates therefore use LLVM's model of the Cortex-A57, which LLVM
also uses for the Cortex-A72 of the Raspberry Pi 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu.counts import Block, Region, class_of
from toolchain import process

CPU = "cortex-a57"
BLOCKS = 20
"""The number of blocks per workload that are modelled."""
_TARGET = re.compile(r"#-?(?:0x)?[0-9a-f]+$")
_IT = re.compile(r"it[te]{0,3} ")
_ENCODINGS = ("thumbv7", "armv7")


@dataclass(frozen=True)
class Modelled:
    """The estimated cycles of the modelled blocks, and these blocks' share of all executed instructions."""

    cycles: float
    share: float
    per_block: tuple[float, ...] = ()
    """The cycles of one execution of each block, the hottest first; 0 for a block that is not modelled."""

    @property
    def total(self) -> float:
        """The estimated cycles of all instructions.

        Instructions outside the modelled blocks are assumed to take as many cycles on average as those in the blocks.
        """
        return self.cycles / self.share


def modelled(tools: Path, region: Region) -> Modelled | None:
    """Model the hottest blocks of a region; return None if llvm-mca supports none of them. Raises CommandFailed."""
    hottest = region.hottest(BLOCKS)
    per_run = cycles_of(tools, [block for block, _ in hottest])
    known = [(cycles, block, times) for cycles, (block, times) in zip(per_run, hottest, strict=True) if cycles]
    covered = sum(times * len(block.instructions) for _, block, times in known)
    if not covered:
        return None
    return Modelled(sum(times * cycles for cycles, _, times in known), covered / region.instructions, tuple(per_run))


def cycles_of(tools: Path, blocks: Sequence[Block]) -> list[float]:
    """Estimate how many cycles each block takes on average if it is executed many times in a row.

    The estimate is 0 for a block with an unsupported instruction.
    """
    found = [0.0] * len(blocks)
    for encoding in _ENCODINGS:
        left = [number for number, cycles in enumerate(found) if not cycles]
        if not left:
            break
        text = "".join(f"# LLVM-MCA-BEGIN {number}\n{assembly(blocks[number])}# LLVM-MCA-END\n" for number in left)
        # If llvm-mca cannot assemble an instruction, it writes an error to stderr and continues.
        options = [f"-mtriple={encoding}-linux-gnueabihf", f"-mcpu={CPU}", "-json"]
        done = process.run(
            ["chroot", tools, "llvm-mca-19", *options, "-skip-unsupported-instructions=any"],
            stdin=text.encode(),
            merge_stderr=False,
            check=False,
            limit_s=120,
        )
        for row in json.loads(done.output)["CodeRegions"] if done.output.strip() else []:
            number, summary = int(row["Name"]), row["SummaryView"]
            if len(row["Instructions"]) == len(blocks[number].instructions):
                found[number] = summary["TotalCycles"] / summary["Iterations"]
    return found


def assembly(block: Block) -> str:
    """Return the block in assembly language.

    The target of a branch is outside the block, so each branch is written as a jump to itself. QEMU disassembles each
    instruction separately, and therefore prints the instructions of an IT block without their conditions. NOP replaces
    IT itself.
    """
    lines = []
    for item in block.instructions:
        if _IT.match(item.text):
            lines.append("nop")
        else:
            lines.append(_TARGET.sub(".", item.text) if class_of(item.text) == "branch" else item.text)
    return "\n".join(lines) + "\n"
