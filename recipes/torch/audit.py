"""Audit a torch wheel before it is accepted: check the target CPU and the other requirements of its ELF files."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.sections import SymbolTableSection
from packaging.utils import parse_wheel_filename

from images.flavour import Suite
from recipes.recipe import load
from toolchain.architecture import Architecture
from toolchain.errors import WheelUnusable
from wheels import find as wheels

GOAL_MB = 60
_OF_PYTHON = ("Py", "_Py")
_BUILD_PATHS = (b"/usr/src/torch", b"/usr/src/recipe")
"""The paths of the build tree and the recipe in the builder's container."""
_ARCHITECTURES = {10: "ARMv7", 6: "ARMv6", 14: "ARMv8"}
"""The values of Tag_CPU_arch (ARM IHI 0045, 3.3.5.2) that compilers use for the A profile."""
_ADVANCED_SIMD = "TAG_ADVANCED_SIMD_ARCH"
_FP = {1: "VFPv1", 2: "VFPv2", 3: "VFPv3", 4: "VFPv3-D16", 5: "VFPv4", 6: "VFPv4-D16", 7: "FPv8", 8: "FPv8-D16"}
"""The values of Tag_FP_arch (ARM IHI 0045, 3.3.5.2)."""
_FP_OF_ARMHF = ("VFPv2", "VFPv3-D16")
"""Floating-point units with at most 16 double-precision registers, which every armhf CPU has."""
_FP_OF_NEON = (*_FP_OF_ARMHF, "VFPv3", "VFPv4", "VFPv4-D16")
_KERNELS = "torch/lib/libtorch_cpu.so"
_FIX = "correct the recipe in recipes/torch, and run ./inv build-torch to build the wheel again"


@dataclass(frozen=True)
class Examined:
    """The number of ELF files in the wheel, and the newest GLIBC and GLIBCXX symbol versions that they require."""

    elf_files: int
    newest: Mapping[str, str]
    warnings: tuple[str, ...]


@dataclass
class _Sums:
    newest: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    count: int = 0
    defined: set[str] = field(default_factory=set)
    """The symbols that the wheel's files define."""
    required: dict[str, str] = field(default_factory=dict)
    """The unversioned symbols that the files require, each with the first file that requires it."""


def examine(
    wheel: Path, target: Architecture, suite: Suite, *, flags: str, extends: Sequence[Path] = (), fix: str = _FIX
) -> Examined:
    """Audit a wheel for a target.

    Raises PlatformMismatch if the wheel is for another machine, or WheelUnusable, which lists all faults.

    ``extends`` lists libraries that are loaded before the wheel's, such as torch's libraries for a wheel that extends
    torch.

    The following are faults: a wrong tag, RECORD, machine or float ABI (wheels.find.audit); a CPU architecture,
    floating-point unit or use of NEON that contradicts the compiler's ``flags``, except in libraries that select their
    code for the CPU at run time; GLIBC or GLIBCXX symbols newer than the release's; required libraries that are neither
    in the wheel nor in a minimal system; undefined symbols; RPATHs that leave the wheel; and paths from the build in
    any file.
    A size of more than 60 MB causes a warning.
    """
    wheels.audit(wheel, target)
    sums = _Sums()
    tags = parse_wheel_filename(wheel.name)[3]
    if not tags & wheels.tags_for(target, suite):
        sums.faults.append(f"its tag is {', '.join(sorted(str(tag) for tag in tags))}")
    for path in extends:
        with path.open("rb") as stream:
            sums.defined |= _defined_symbols(ELFFile(stream))
    with zipfile.ZipFile(wheel) as archive:
        inside = {PurePosixPath(name).name for name in archive.namelist()} | {path.name for path in extends}
        for name, content in wheels.elf_members(archive):
            sums.count += 1
            _examine(name, ELFFile(content), inside, sums, flags if target.debian == "armhf" else None)
        # Headers, CMake files and scripts may contain paths too.
        for name in archive.namelist():
            with archive.open(name) as stream:
                sums.faults += [f"{name} contains a path from its build"] if _holds(stream, _BUILD_PATHS) else []
    sums.faults += [
        f"{name} requires the symbol {symbol}, which no library in the wheel defines"
        for symbol, name in sorted(sums.required.items())
        if symbol not in sums.defined and not symbol.startswith(_OF_PYTHON)
    ]
    limits = {"GLIBC": suite.glibc, "GLIBCXX": suite.glibcxx}
    for kind, found in sorted(sums.newest.items()):
        if found > tuple(map(int, limits[kind].split("."))):
            sums.faults.append(f"it requires {kind}_{'.'.join(map(str, found))}, and {suite.name} has {limits[kind]}")
    if sums.faults:
        raise WheelUnusable(
            f"{wheel.name} cannot be used",
            expected=f"a self-contained wheel for {suite.name} {target.debian}",
            found="; ".join(sums.faults),
            fix=fix,
        )
    size = wheel.stat().st_size / 1e6
    warnings = (f"the size of {wheel.name} is {size:.1f} MB; the goal is {GOAL_MB}",) if size > GOAL_MB else ()
    newest = {kind: ".".join(map(str, found)) for kind, found in sorted(sums.newest.items())}
    return Examined(sums.count, newest, warnings)


def examine_stripped(
    wheel: Path, target: Architecture, suite: Suite, *, flags: str, home: str, extends: Sequence[Path] = (), fix: str
) -> Examined:
    """Audit a wheel as ``examine`` does; also require that its libraries are stripped and do not contain ``home``.

    ``home`` is the path of the folder in which the wheel was built.
    """
    seen = examine(wheel, target, suite, flags=flags, extends=extends, fix=fix)
    faults = [] if seen.elf_files else ["it has no library"]
    with zipfile.ZipFile(wheel) as archive:
        for name, content in wheels.elf_members(archive):
            if ELFFile(content).get_section_by_name(".symtab") is not None:
                faults.append(f"{name} has a symbol table")
            content.seek(0)
            if home.encode() in content.read():
                faults.append(f"{name} contains a path from its build")
    if faults:
        raise WheelUnusable(
            f"{wheel.name} cannot be used",
            expected="stripped libraries that do not contain the path of the build folder",
            found="; ".join(faults),
            fix=fix,
        )
    return seen


def _examine(name: str, elf: ELFFile, inside: set[str], sums: _Sums, flags: str | None) -> None:
    if flags is not None and not PurePosixPath(name).name.startswith(_prefixes("detecting_libraries")):
        sums.faults += [f"{name}: {fault}" for fault in _cpu_faults(elf, flags, kernels=name.endswith(_KERNELS))]
    _note_symbols(name, elf, sums)
    for kind, version in wheels.needed_versions(elf):
        sums.newest[kind] = max(sums.newest.get(kind, ()), version)
    needed, paths = wheels.dynamic(elf)
    unknown = [item for item in needed if item not in inside and not item.startswith(_prefixes("system_libraries"))]
    sums.faults += [f"{name} requires {item}, which a minimal system does not have" for item in unknown]
    for path in paths:
        folder = PurePosixPath(name).parent
        depth = len(folder.parts)
        ups = [part for part in PurePosixPath(path).parts if part == ".."]
        if not path.startswith("$ORIGIN") or len(ups) > depth:
            sums.faults.append(f"{name} searches for libraries in {path}")


def _note_symbols(name: str, elf: ELFFile, sums: _Sums) -> None:
    """Record the symbols that a file defines, and the unversioned symbols that it requires.

    Required symbols with a version are not recorded, because the system's libraries define them.
    """
    symbols, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    if not isinstance(symbols, SymbolTableSection):
        return
    for number, symbol in enumerate(symbols.iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF":
            sums.defined.add(symbol.name)
        elif symbol.name and symbol["st_info"]["bind"] != "STB_WEAK":
            versioned = isinstance(versions, GNUVerSymSection) and isinstance(versions.get_symbol(number)["ndx"], int)
            if not versioned:
                sums.required.setdefault(symbol.name, name)


def _defined_symbols(elf: ELFFile) -> set[str]:
    """Return the symbols that a library defines.

    The symbol table is read directly, because pyelftools would take many seconds for torch's libraries.
    """
    table = elf.get_section_by_name(".dynsym")
    if not isinstance(table, SymbolTableSection):
        return set()
    # An entry starts with st_name. In 32-bit files, st_shndx is the last field; in 64-bit files, it follows st_info and
    # st_other.
    entries = struct.iter_unpack("<I10xH" if elf.elfclass == 32 else "<I2xH16x", table.data())
    names = elf.get_section(table["sh_link"]).data()
    return {names[start : names.index(b"\0", start)].decode() for start, section in entries if section}


def _prefixes(setting: str) -> tuple[str, ...]:
    """Return the prefixes of library names in the torch recipe's table ``wheel``, under the key ``setting``."""
    return tuple(str(load("torch").tables["wheel"][setting]).split())


def _cpu_faults(elf: ELFFile, flags: str, *, kernels: bool) -> Iterator[str]:
    found = wheels.arm_attributes(elf)
    if not found:
        yield "it does not have .ARM.attributes"
        return
    architecture = found.get("TAG_CPU_ARCH", 0)
    if _ARCHITECTURES.get(architecture) not in ("ARMv7", "ARMv6"):
        yield f"it was compiled for {_ARCHITECTURES.get(architecture, f'CPU architecture {architecture}')}"
    if found.get(_ADVANCED_SIMD, 0) and "neon" not in flags:
        yield "it uses NEON, which the variant does not permit"
    if kernels and "neon" in flags and not found.get(_ADVANCED_SIMD, 0):
        yield "it was compiled without NEON, which the variant requires"
    if unit := found.get("TAG_FP_ARCH", 0):
        name = _FP.get(unit, f"floating-point unit {unit}")
        if name not in (_FP_OF_NEON if "neon" in flags else _FP_OF_ARMHF):
            yield f"it uses {name}, which some CPUs of the variant do not have"


def _holds(stream: IO[bytes], wanted: Sequence[bytes]) -> bool:
    rest = b""
    while block := stream.read(1 << 20):
        if any(item in rest + block for item in wanted):
            return True
        rest = block[-max(map(len, wanted)) :]
    return False
