"""Determine which of an arm64 program's instructions a CPU cannot execute, according to LLVM's tables."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolchain import process

Words = npt.NDArray[np.uint32]
_LLVM = "usr/lib/llvm-19"
# If no line matches, grep exits with 1. grep filters the lines, because most are decoded instructions that Python need
# not read.
_FILTER = 'set -o pipefail; "$@" | { grep -F "<unknown>" || [ $? = 1 ]; }'
_OFFSET = re.compile(r"\s*([0-9a-f]+):")


@dataclass(frozen=True)
class Disassembler:
    """LLVM's programs in the folder ``root``, which contains extracted native packages."""

    root: Path

    def command(self, program: str) -> list[str | Path]:
        """Return the first words of a command that runs an LLVM program with the libraries in ``root``."""
        (loader,) = self.root.glob("usr/lib*/ld-linux*.so.*")
        folders = [*self.root.glob("usr/lib/*-linux-gnu"), self.root / _LLVM / "lib"]
        return [loader, "--library-path", ":".join(map(str, folders)), self.root / _LLVM / "bin" / program]

    def undecoded(self, words: Words, *options: str) -> Words:
        """Return the words that llvm-objdump, called with ``options``, cannot decode. Raises CommandFailed."""
        if not words.size:
            return words
        with tempfile.TemporaryDirectory(prefix="pitorch-gate-") as scratch:
            raw, program = Path(scratch) / "words", Path(scratch) / "words.o"
            raw.write_bytes(words.astype("<u4").tobytes())
            made = [*self.command("llvm-objcopy"), "--input-target=binary", "--output-target=elf64-littleaarch64"]
            process.run([*made, "--rename-section=.data=.text,code", raw, program], limit_s=300)
            objdump = [*self.command("llvm-objdump"), "--disassemble", "--no-show-raw-insn", *options, program]
            listing = process.run(["bash", "-c", _FILTER, "bash", *objdump], merge_stderr=False, limit_s=1800).output
        offsets = [int(match[1], 16) for match in map(_OFFSET.match, listing.splitlines()) if match]
        return words[np.array(offsets, dtype=np.int64) // 4]

    def demangled(self, names: Sequence[str]) -> list[str]:
        """Return demangled C++ names."""
        text = "".join(f"{name}\n" for name in names).encode()
        return process.run(self.command("llvm-cxxfilt"), stdin=text, limit_s=60).output.splitlines()


def unsupported(
    disassembler: Disassembler, words: Words, cpu: str, *, without: Iterable[str], extensions: Sequence[str]
) -> Mapping[str, Words]:
    """Return the instruction words that other CPUs can execute but ``cpu`` cannot, grouped by extension.

    ``words`` contains each of the program's 32-bit words once. Words that no CPU can decode are data and are omitted.
    """
    removed = [f"-{name}" for name in without]
    base = [f"--mcpu={cpu}"]
    left = disassembler.undecoded(words, *base, *([f"--mattr={','.join(removed)}"] if removed else []))
    left = np.setdiff1d(left, disassembler.undecoded(left, "--mattr=+all"))
    found: dict[str, Words] = {}
    for name in extensions:
        rest = disassembler.undecoded(
            left, *base, f"--mattr={','.join([*removed, *(f'+{item}' for item in name.split(','))])}"
        )
        if rest.size < left.size:
            found[name] = np.setdiff1d(left, rest)
        left = rest
    if left.size:
        found["other"] = left
    return found
