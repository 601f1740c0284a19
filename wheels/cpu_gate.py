"""Find the instructions in a wheel that a CPU does not support, and determine which of them run only after a CPU check.

LLVM decodes 64-bit files. Each function with unsupported instructions has one of these states:

- *checked*: a sign shows that the function runs only on CPUs that have the instructions. Signs are the outline-atomics
  helpers, the function's name, a call to a function that reads the CPU's capabilities, or callers that are all checked;
- *unchecked*: there is no such sign, and all of the function's unsupported instructions are of kinds that compilers
  emit for ordinary C++, such as LSE atomics. The file was compiled for a newer CPU and will crash;
- *unproven*: there is no such sign, and the function contains vector or cryptographic instructions. Libraries call
  such functions after a CPU check, often through pointers. The verdict therefore depends on the result of running
  the wheel.

The signs are defined in cpu_gate.toml. For 32-bit files, the build attributes are checked instead.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section
from packaging.utils import parse_wheel_filename

from toolchain.errors import ConfigError, WheelUnusable
from wheels import find as wheels
from wheels.instructions import Disassembler, Words, unsupported

CHECKED, UNCHECKED, UNPROVEN = "checked", "unchecked", "unproven"
_HERE = Path(__file__).parent
_FUNCTION, _IFUNC = 2, 10
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_JUMP_SLOT, _RELATIVE, _IRELATIVE = 1026, 1027, 1032
_NEAR = 16
"""The maximum distance in words between the instructions that load an address's page and add its offset."""
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cpu:
    """The CPU of a supported board."""

    name: str
    architecture: str
    """Debian's name."""
    boards: str
    without: tuple[str, ...]
    """Extensions that LLVM assumes but the boards' chips lack."""
    attributes: Mapping[str, int]
    """The highest build attributes of 32-bit files that the CPU executes."""
    lacks: tuple[int, int, str]
    """A capability that the CPU does not have: entry in the auxiliary vector, bit and name."""


@dataclass(frozen=True)
class Function:
    """A function with instructions that the CPU does not have."""

    file: str
    name: str
    """The function's symbol, or its section and offset."""
    instructions: Mapping[str, int]
    """The number of unsupported instructions by extension."""
    state: str
    """``CHECKED``, ``UNCHECKED`` or ``UNPROVEN``."""
    reason: str
    """The sign that the CPU is checked; empty if there is none."""


@dataclass(frozen=True)
class Static:
    """The result of the static check of a wheel."""

    files: int
    functions: tuple[Function, ...]

    def count(self, state: str) -> int:
        """Return the number of functions that are in the given state."""
        return sum(item.state == state for item in self.functions)


@functools.cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads((_HERE / "cpu_gate.toml").read_text())


def load_cpu(name: str) -> Cpu:
    """Return the CPU called ``name``. Raises ConfigError if there is no such CPU."""
    row = _data()["cpus"].get(name)
    if row is None:
        raise ConfigError([f"--cpu: expected one of {', '.join(_data()['cpus'])}, found {name!r}"])
    return Cpu(
        name, row["architecture"], row["boards"], tuple(row["without"]), row.get("attributes", {}), tuple(row["lacks"])
    )


def probe_of(wheel: Path) -> list[tuple[str, str]]:
    """Return the probe's steps for a wheel, each with its name and Python code; the first step imports the package."""
    row = _data()["probes"].get(parse_wheel_filename(wheel.name)[0])
    if row is None:
        row = {"import": f"import {', '.join(_modules(wheel))}", "steps": {}}
    return [(row["import"], f"{row.get('before', '')}\n{row['import']}".strip()), *row["steps"].items()]


def _modules(wheel: Path) -> list[str]:
    """Return the top-level modules and packages in a wheel. Raises WheelUnusable if the wheel has none."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [PurePosixPath(name) for name in archive.namelist()]
    found = {path.parts[0] for path in paths if len(path.parts) == 2 and path.name == "__init__.py"}
    found |= {path.name.partition(".")[0] for path in paths if len(path.parts) == 1 and path.suffix in (".py", ".so")}
    if names := sorted(name for name in found if name.isidentifier()):
        return names
    raise WheelUnusable(
        f"{wheel.name} contains no importable module",
        expected="a top-level package or module in the wheel",
        found="none",
        fix="add a table for the wheel to [probes] in wheels/cpu_gate.toml",
    )


def examine(wheel: Path, cpu: Cpu, disassembler: Disassembler) -> Static:
    """Examine a wheel's ELF files. Raises CommandFailed, or the same exceptions as ``find.elf_members``."""
    count = 0
    found: list[Function] = []
    with zipfile.ZipFile(wheel) as archive:
        for name, content in wheels.elf_members(archive):
            count += 1
            elf = ELFFile(content)
            if elf.elfclass == 32:
                found += _by_attributes(name, elf, cpu)
            else:
                found += _functions(name, _Program.read(elf), cpu, disassembler)
    return Static(count, tuple(found))


def _by_attributes(file: str, elf: ELFFile, cpu: Cpu) -> list[Function]:
    """Return an entry for each build attribute that has a higher value in a 32-bit file than the CPU supports."""
    beyond = {
        tag.removeprefix("TAG_"): value
        for tag, value in wheels.arm_attributes(elf).items()
        if value > cpu.attributes.get(tag, value)
    }
    detecting = PurePosixPath(file).name.startswith(tuple(_data()["attributes"]["detecting_libraries"]))
    state = UNPROVEN if detecting else UNCHECKED
    return [Function(file, f"build attribute {tag}={value}", {tag: 1}, state, "") for tag, value in beyond.items()]


@dataclass(frozen=True)
class _Code:
    """An executable section."""

    name: str
    address: int
    words: Words


@dataclass(frozen=True)
class _Program:
    """The data that the examination reads from an ELF file."""

    code: tuple[_Code, ...]
    starts: Addresses
    """The start addresses of all known functions, sorted."""
    names: Mapping[int, str]
    """The functions' names by start address."""
    stubs: Mapping[int, str]
    """The imported functions' names by the address of their stub in the procedure linkage table."""
    data: tuple[tuple[int, int], ...]
    """The address ranges of data in code, from mapping symbols."""
    resolvers: frozenset[int]
    """The start addresses of functions that select an implementation when the file is loaded (ifunc)."""
    referenced: frozenset[int]
    """The addresses in tables of pointers."""
    exported: frozenset[int]
    """The start addresses of functions that other files can call."""

    @classmethod
    def read(cls, elf: ELFFile) -> _Program:
        """Read an arm64 file."""
        sections = {item.name: item for item in elf.iter_sections()}
        code = tuple(
            _Code(name, item["sh_addr"], np.frombuffer(item.data()[: item["sh_size"] // 4 * 4], "<u4"))
            for name, item in sections.items()
            if item["sh_flags"] & 4 and item["sh_type"] == "SHT_PROGBITS"
        )
        names: dict[int, str] = {}
        starts = [_frame_starts(sections.get(".eh_frame_hdr"))]
        resolvers: set[int] = set()
        exported: set[int] = set()
        data: tuple[tuple[int, int], ...] = ()
        for table in (".dynsym", ".symtab"):
            if table not in sections or sections[table]["sh_type"] == "SHT_NOBITS":
                continue
            symbols, texts = _symbols(elf, sections[table])
            kinds = symbols["info"] & 15
            functions = symbols[np.isin(kinds, (_FUNCTION, _IFUNC)) & (symbols["section"] != 0)]
            starts.append(functions["value"].astype(np.int64))
            names |= {int(row["value"]): _text(texts, int(row["name"])) for row in functions}
            resolvers |= {int(row["value"]) for row in functions if row["info"] & 15 == _IFUNC}
            if table == ".dynsym":
                exported = set(names)
            else:
                data = _data_ranges(symbols, texts)
        relocations = [
            np.frombuffer(item.data(), _RELOCATION) for item in sections.values() if item["sh_type"] == "SHT_RELA"
        ]
        every = np.concatenate(relocations) if relocations else np.zeros(0, _RELOCATION)
        resolvers |= {int(item) for item in every["addend"][every["kind"] == _IRELATIVE]}
        return cls(
            code,
            np.unique(np.concatenate(starts)),
            names,
            _stubs(elf, code, sections, every),
            data,
            frozenset(resolvers),
            frozenset(every["addend"][every["kind"] == _RELATIVE].tolist()),
            frozenset(exported),
        )

    def start_of(self, addresses: Addresses) -> Addresses:
        """Return, for each address, the start of the function that contains it; -1 if there is none."""
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        return np.where(index >= 0, self.starts[np.maximum(index, 0)], -1) if self.starts.size else index


def _symbols(elf: ELFFile, section: Section) -> tuple[npt.NDArray[Any], bytes]:
    return np.frombuffer(section.data(), _SYMBOL), elf.get_section(section["sh_link"]).data()


def _text(texts: bytes, offset: int) -> str:
    return texts[offset : texts.index(b"\0", offset)].decode(errors="replace")


def _data_ranges(symbols: npt.NDArray[Any], texts: bytes) -> tuple[tuple[int, int], ...]:
    """Return the address ranges of data: from each mapping symbol ``$d`` to the next ``$x`` (Arm IHI 0056)."""
    marks = sorted(
        (int(row["value"]), text[:2])
        for row in symbols[(symbols["info"] == 0) & (symbols["section"] != 0)]
        if (text := _text(texts, int(row["name"]))).startswith(("$d", "$x"))
    )
    marks.append((1 << 62, ""))
    return tuple((start, end) for (start, kind), (end, _) in itertools.pairwise(marks) if kind == "$d")


def _frame_starts(header: Section | None) -> Addresses:
    """Return function starts from the table in .eh_frame_hdr, which stripped files also have."""
    if header is None:
        return np.zeros(0, np.int64)
    content = header.data()
    if content[:4] != b"\x01\x1b\x03\x3b":  # version 1; pcrel|sdata4, udata4, datarel|sdata4: as linkers write it
        return np.zeros(0, np.int64)
    count = int.from_bytes(content[8:12], "little")
    table = np.frombuffer(content, "<i4", count * 2, 12)
    return table[::2].astype(np.int64) + header["sh_addr"]


def _pages(words: Words, addresses: Addresses) -> Addresses:
    """Return the address of the page that each ``adrp`` instruction loads."""
    offset = ((words >> 29 & 3) | (words >> 5 & 0x7FFFF) << 2).astype(np.int64)
    return (addresses & ~0xFFF) + (np.where(offset & 1 << 20, offset - (1 << 21), offset) << 12)


def _stubs(
    elf: ELFFile, code: Sequence[_Code], sections: Mapping[str, Section], relocations: npt.NDArray[Any]
) -> Mapping[int, str]:
    """Map each stub's address to the name of the imported function.

    A stub is ``[bti c;] adrp x16, PAGE; ldr x17, [x16, #OFFSET]``.
    """
    plt = next((item for item in code if item.name == ".plt"), None)
    if plt is None or ".dynsym" not in sections:
        return {}
    symbols, texts = _symbols(elf, sections[".dynsym"])
    by_slot = {
        int(row["offset"]): int(row["symbol"]) for row in relocations if row["symbol"] and row["kind"] == _JUMP_SLOT
    }
    at = np.flatnonzero((plt.words[:-1] & 0x9F00001F == 0x90000010) & (plt.words[1:] & 0xFFC003FF == 0xF9400211))
    addresses = plt.address + at * 4
    slots = _pages(plt.words[at], addresses) + ((plt.words[at + 1] >> 10 & 0xFFF) * 8)
    found: dict[int, str] = {}
    for address, slot in zip(addresses.tolist(), slots.tolist(), strict=True):
        if slot in by_slot:
            name = _text(texts, int(symbols[by_slot[slot]]["name"]))
            found |= {address: name, address - 4: name}
    return found


def _functions(file: str, program: _Program, cpu: Cpu, disassembler: Disassembler) -> list[Function]:
    """Return the functions in a file that contain instructions that the CPU does not have."""
    extensions, general = _data()["extensions"], set(_data()["general"]["extensions"])
    beyond = unsupported(
        disassembler,
        np.unique(np.concatenate([np.zeros(0, np.uint32), *(np.unique(item.words) for item in program.code)])),
        cpu.name,
        without=cpu.without,
        extensions=list(extensions),
    )
    if not beyond:
        return []
    words = np.concatenate(list(beyond.values()))
    kinds = np.repeat(np.arange(len(beyond)), [item.size for item in beyond.values()])
    order = np.argsort(words)
    words, kinds = words[order], kinds[order]
    labels = [extensions.get(name, name) for name in beyond]
    is_general = [name in general for name in beyond]
    counts: dict[int, Counter[str]] = {}
    direct: set[int] = set()
    vector: set[int] = set()
    sections: dict[int, str] = {}
    for code in program.code:
        index = np.minimum(np.searchsorted(words, code.words), words.size - 1)
        at = np.flatnonzero(words[index] == code.words)
        addresses = code.address + at * 4
        keep = ~_inside(addresses, program.data) & ~_inside(addresses, _texts(code))
        at, addresses = at[keep], addresses[keep]
        behind = _behind_flag(code.words, at)
        for start, kind, is_behind in zip(
            program.start_of(addresses).tolist(), kinds[index[at]].tolist(), behind.tolist(), strict=True
        ):
            counts.setdefault(start, Counter())[labels[kind]] += 1
            sections[start] = f"{code.name}+{max(start, code.address) - code.address:#x}"
            if not is_behind:
                direct.add(start)
            if not is_general[kind]:
                vector.add(start)
    reasons = _reasons(program, counts, direct)
    return [
        Function(
            file,
            program.names.get(start, sections[start]),
            dict(counter),
            CHECKED if start in reasons else UNPROVEN if start in vector else UNCHECKED,
            reasons.get(start, ""),
        )
        for start, counter in sorted(counts.items())
    ]


def _inside(addresses: Addresses, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    if not ranges:
        return np.zeros(addresses.shape, bool)
    starts, ends = np.array(ranges, dtype=np.int64).T
    index = np.searchsorted(starts, addresses, side="right") - 1
    found: npt.NDArray[np.bool_] = (index >= 0) & (addresses < ends[np.maximum(index, 0)])
    return found


def _texts(code: _Code) -> list[tuple[int, int]]:
    """Return the address ranges of text that is embedded in code, such as the credits in OpenSSL's assembly code.

    Text is a run of at least four words that consist of printable ASCII characters.
    """
    octets = code.words.view("u1").reshape(-1, 4)
    printable = np.concatenate(([False], ((octets >= 0x20) & (octets < 0x7F)).all(axis=1), [False]))
    edges = np.flatnonzero(printable[1:] != printable[:-1]).reshape(-1, 2)
    return [(code.address + 4 * start, code.address + 4 * end) for start, end in edges.tolist() if end - start >= 4]


def _behind_flag(words: Words, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return, for each position, whether the instructions just before it test a flag that is set by a CPU check."""
    found = np.zeros(at.shape, bool)
    for flag in _data()["flag"]:
        length = len(flag["words"])
        matches = at >= length
        for number, (mask, value) in enumerate(flag["words"]):
            matches &= words[np.maximum(at - length + number, 0)] & mask == value
        found |= matches
    return found


def _reasons(program: _Program, functions: Mapping[int, object], direct: set[int]) -> dict[int, str]:
    """Map the start address of each *checked* function to the sign that shows the CPU check.

    The functions in ``direct`` contain unsupported instructions that no flag test precedes.
    """
    patterns = [(row["reason"], re.compile(row["pattern"])) for row in _data()["names"]]
    found: dict[int, str] = {}

    def named(start: int) -> str:
        name = program.names.get(start, "")
        return next((reason for reason, pattern in patterns if pattern.search(name)), "")

    for start in functions:
        if reason := named(start) if start in direct else _data()["flag"][0]["reason"]:
            found[start] = reason
    if len(found) == len(functions):
        return found
    checks = re.compile(_data()["checks"]["pattern"])
    names = {**program.names, **program.stubs}
    checking = {address: name for address, name in names.items() if checks.search(name)}
    callers = _callers(program, np.unique(np.fromiter([*checking, *functions], np.int64)))
    after = dict.fromkeys(program.resolvers, "ifunc resolver")
    for address, name in checking.items():
        after |= dict.fromkeys(callers.get(address, ()), f"calls {name}")
    found |= {start: reason for start, reason in after.items() if start in functions and start not in found}
    hidden = [start for start in functions if start not in found and start not in program.referenced | program.exported]
    for caller in {caller for start in hidden for caller in callers.get(start, ())} - after.keys() - found.keys():
        if reason := named(caller):
            after[caller] = reason
    while True:
        checked = found.keys() | after.keys()
        new = [start for start in hidden if start not in found and callers.get(start) and callers[start] <= checked]
        if not new:
            return found
        for start in new:
            is_resolved = any(after.get(caller) == "ifunc resolver" for caller in callers[start])
            found[start] = "chosen by an ifunc resolver" if is_resolved else "all callers are checked"


def _callers(program: _Program, targets: Addresses) -> dict[int, set[int]]:
    """Map each target address to the start addresses of other functions that call, jump to or load this address."""
    found: dict[int, set[int]] = {}
    for code in program.code:
        jumps = np.flatnonzero(code.words & 0x7C000000 == 0x14000000)  # b, bl
        offsets = (code.words[jumps] & 0x3FFFFFF).astype(np.int64)
        reached = code.address + 4 * (jumps + np.where(offsets & 1 << 25, offsets - (1 << 26), offsets))
        pairs = [(jumps, reached)]
        pages = np.flatnonzero(code.words & 0x9F000000 == 0x90000000)  # adrp
        loaded = _pages(code.words[pages], code.address + pages * 4)
        register = code.words[pages] & 31
        padded = np.concatenate([code.words, np.zeros(_NEAR, np.uint32)])
        is_kept = np.ones(pages.shape, bool)
        for distance in range(1, _NEAR + 1):
            following = padded[pages + distance]
            # add (immediate, 64 bits) to the same register
            fits = is_kept & (following & 0xFFC00000 == 0x91000000) & (following >> 5 & 31 == register)
            pairs.append((pages[fits], loaded[fits] + (following[fits] >> 10 & 0xFFF)))
            # Only instructions that certainly write the register are considered: arithmetic with a constant or
            # registers, and loads with bit 22 (Arm ARM, C4.1). If such an instruction is missed, the only effect is an
            # additional caller of the function.
            writes = (following & 0x1C000000 == 0x10000000) | (following & 0x0E000000 == 0x0A000000)
            writes |= following & 0x0E400000 == 0x08400000
            is_kept &= ~writes | (following & 31 != register)
        for at, addresses in pairs:
            index = np.minimum(np.searchsorted(targets, addresses), targets.size - 1)
            hit = targets[index] == addresses
            sources = program.start_of(code.address + at[hit] * 4)
            for source, target in zip(sources.tolist(), addresses[hit].tolist(), strict=True):
                if source != target:
                    found.setdefault(target, set()).add(source)
    return found
