"""Find a wheel that fits the target, audit it, and unpack it as pip on the target would.

No function in this module requires emulation.
"""

from __future__ import annotations

import configparser
import errno
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import ARMAttributesSection
from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.exceptions import InstallerError
from installer.records import InvalidRecordEntry
from installer.sources import WheelFile
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from images.flavour import Suite
from toolchain.architecture import Architecture
from toolchain.errors import PlatformMismatch, WheelUnusable

_EF_ARM_ABI_FLOAT_HARD = 0x400
"""The flag in e_flags of hard-float ARM programs: ELF for the Arm Architecture (IHI 0044), table 4-2."""
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(NotImplementedError, RuntimeError, UnicodeDecodeError),
)
"""The exceptions, in addition to OSError, that zipfile raises for damaged, encrypted or unsupported archives."""
_REJECTED = (InstallerError, InvalidRecordEntry, configparser.Error, AssertionError)
"""The exceptions that installer raises for an invalid RECORD or entry_points.txt."""
_MACHINES = {"armhf": ("EM_ARM", 32), "arm64": ("EM_AARCH64", 64), "amd64": ("EM_X86_64", 64)}
_TEXTS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
"""The attributes with the texts of pyelftools' dynamic tags."""


_OLDEST_GLIBC = {"amd64": 5}
"""The minor version of the oldest glibc 2 that pip supports, per machine; 17 for other machines."""
_EARLIER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Legacy tag names by glibc version (PEP 599, 571, 513)."""


@dataclass(frozen=True)
class Candidate:
    """A wheel file whose name fits the target."""

    path: Path
    version: Version


def platforms_for(target: Architecture, suite: Suite) -> list[str]:
    """Return the wheel platform tags for a machine, most specific first: manylinux (PEP 600), then linux.

    The manylinux tags range from the release's glibc down to the oldest that pip supports, including legacy names.
    """
    machine = target.wheel_platform.removeprefix("linux_")
    newest = int(suite.glibc.removeprefix("2."))
    glibcs = range(newest, _OLDEST_GLIBC.get(target.debian, 17) - 1, -1)
    return [
        *(f"manylinux_2_{glibc}_{machine}" for glibc in glibcs),
        *(f"{name}_{machine}" for glibc, name in _EARLIER_NAMES.items() if glibc in glibcs),
        target.wheel_platform,
    ]


def tags_for(target: Architecture, suite: Suite) -> frozenset[Tag]:
    """Return the wheel tags that the target's Python supports (PEP 425), with all platform tags."""
    python, platforms = suite.python_tag, platforms_for(target, suite)
    version = tuple(map(int, suite.python.split(".")))
    return frozenset((*cpython_tags(version, [python], platforms), *compatible_tags(version, python, platforms)))


def candidates(
    wheelhouses: Sequence[Path], distribution: str, tags: frozenset[Tag]
) -> tuple[list[Candidate], list[str]]:
    """Return the wheels of a package that fit the target, best first, and the reasons why its other wheels do not fit.

    An earlier wheelhouse takes precedence over a later one; within a wheelhouse, newer versions come first.
    """
    fitting: list[Candidate] = []
    refused: list[str] = []
    for folder in wheelhouses:
        here: list[Candidate] = []
        for path in sorted(item for item in folder.glob("*.whl") if item.is_file()):
            try:
                name, version, _, found = parse_wheel_filename(path.name)
            except InvalidWheelFilename as fault:
                refused.append(f"{path}: {fault}")
                continue
            if name != canonicalize_name(distribution):
                continue
            if found & tags:
                here.append(Candidate(path, version))
            else:
                refused.append(f"{path.name} is for {', '.join(sorted(str(tag) for tag in found))}")
        fitting += sorted(here, key=lambda item: item.version, reverse=True)
    return fitting, refused


def audit(wheel: Path, target: Architecture) -> int:
    """Check the archive and every ELF file in it; return the number of ELF files.

    Raises WheelUnusable if the archive is damaged or renamed, or if its name is invalid. Raises PlatformMismatch if the
    archive contains an ELF file for another machine or float ABI.
    """
    count = 0
    try:
        parse_wheel_filename(wheel.name)
        # This reads every byte, so it also verifies the archive's own checksums.
        with WheelFile.open(wheel) as source:
            source.validate_record(validate_contents=True)
        with zipfile.ZipFile(wheel) as archive:
            for name, content in elf_members(archive):
                _check_elf(f"{wheel.name}: {name}", content, target)
                count += 1
    except InvalidWheelFilename as fault:
        raise WheelUnusable(
            f"{wheel.name} is not a valid wheel name",
            expected="NAME-VERSION-PYTHON-ABI-PLATFORM.whl, with a version as defined in PEP 440",
            found=str(fault),
            fix="restore the file's original name; if the package's version is invalid, use another version",
        ) from fault
    except (*UNREADABLE, InstallerError, ValueError, OSError) as fault:  # ValueError: the name of the file
        if isinstance(fault, OSError) and fault.errno not in (errno.EINVAL, None):
            raise  # not caused by the archive, unlike EINVAL (an invalid offset) and None (a bzip2 error)
        raise WheelUnusable(
            f"{wheel.name} is damaged",
            expected="a zip archive whose RECORD matches its files",
            found=str(fault).splitlines()[0] if str(fault) else type(fault).__name__,
            fix="copy or build the wheel again, and keep its file name",
        ) from fault
    return count


def elf_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the archive's ELF files as seekable temporary files, so that a library of 80 MB is not kept in memory."""
    for member in archive.infolist():
        if member.is_dir():
            continue
        with archive.open(member) as stream:
            magic = stream.read(4)
            if magic != b"\x7fELF":
                continue
            with tempfile.TemporaryFile() as aside:
                aside.write(magic)
                shutil.copyfileobj(stream, aside, 1 << 20)
                yield member.filename, aside


def _check_elf(name: str, content: IO[bytes], target: Architecture) -> None:
    machine, bits = _MACHINES[target.debian]
    try:
        elf = ELFFile(content)
        seen = (elf["e_machine"], elf.elfclass, elf.little_endian)
        fits = seen == (machine, bits, True)
        soft = fits and target.debian == "armhf" and not _is_hard_float(elf)
        dynamic(elf)  # raises ELFError if the sections cannot be read
    except (ELFError, UnicodeDecodeError) as fault:
        found = str(fault) or "truncated file"
        raise WheelUnusable(f"{name} is not a readable ELF file", found=found, fix="build the wheel again") from fault
    if not fits or soft:
        raise PlatformMismatch(
            f"{name} is not for the image's architecture",
            expected=f"{machine}, {bits} bit" + (", hard float" if target.debian == "armhf" else ""),
            found=f"{seen[0]}, {seen[1]} bit"
            + ("" if elf.little_endian else ", big-endian")
            + (", soft float" if soft else ""),
            fix=f"use a wheel that was built for {target.wheel_platform}",
        )


def _is_hard_float(elf: ELFFile) -> bool:
    """Return whether floats are passed in VFP registers, according to the header's flag or the attributes.

    Older linkers do not set the flag; Tag_ABI_VFP_args (ARM IHI 0045) is 1 for the hard-float variant.
    """
    if int(elf["e_flags"]) & _EF_ARM_ABI_FLOAT_HARD:
        return True
    return arm_attributes(elf).get("TAG_ABI_VFP_ARGS") == 1


def arm_attributes(elf: ELFFile) -> dict[str, int]:
    """Return the numeric attributes of a 32-bit ARM file, by name (ARM IHI 0045)."""
    section = elf.get_section_by_name(".ARM.attributes")
    if not isinstance(section, ARMAttributesSection):
        return {}
    return {
        attribute.tag: attribute.value
        for part in section.iter_subsections()
        for block in part.iter_subsubsections()
        for attribute in block.iter_attributes()
        if isinstance(attribute.value, int)
    }


def needed_versions(elf: ELFFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the symbol versions of glibc and libstdc++ that a file requires, such as ("GLIBC", (2, 34))."""
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, needs in section.iter_versions():
            for item in needs:
                kind, _, version = item.name.partition("_")
                if kind in ("GLIBC", "GLIBCXX") and re.fullmatch(r"[\d.]+", version):
                    yield kind, tuple(map(int, version.split(".")))


def dynamic(elf: ELFFile) -> tuple[list[str], list[str]]:
    """Return the libraries that a file requires, and the paths (RPATH, RUNPATH) in which it searches for libraries."""
    needed: list[str] = []
    paths: list[str] = []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                text = str(getattr(tag, _TEXTS.get(tag.entry.d_tag, ""), ""))
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(text)
                elif text:
                    paths += [path for path in text.split(":") if path]
    return needed, paths


def unpack(wheel: Path, root: Path, suite: Suite, *, overwrite: bool = False) -> None:
    """Install a wheel under the folder ``root``, in Debian's path for locally installed Python packages.

    Scripts use the target's interpreter. Raises WheelUnusable if the wheel cannot be used or, unless ``overwrite`` is
    true, if one of its files already exists.
    """
    packages = f"/usr/local/lib/python{suite.python}/dist-packages"
    destination = SchemeDictionaryDestination(
        {
            "purelib": packages,
            "platlib": packages,
            "headers": f"/usr/local/include/python{suite.python}",
            "scripts": "/usr/local/bin",
            "data": "/usr/local",
        },
        interpreter="/usr/bin/python3",
        script_kind="posix",
        destdir=str(root),
        overwrite_existing=overwrite,
    )
    try:
        with WheelFile.open(wheel) as source:
            install(source=source, destination=destination, additional_metadata={"INSTALLER": b"pitorch\n"})
    except (*UNREADABLE, *_REJECTED, KeyError, ValueError, FileExistsError) as fault:
        fix = "build the wheel again"
        found = str(fault) or "an invalid entry point"  # installer's assertion has no text
        raise WheelUnusable(f"{wheel.name} cannot be unpacked", found=found, fix=fix) from fault
