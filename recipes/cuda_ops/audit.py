"""Audit a CUDA operator wheel: the CPU and GPU architectures of its code, and what it requires from the system.

GPU code is in the section ``.nv_fatbin``, which is a sequence of containers. Each container has a header (magic
0xba55ed50, version, size of the header, size of the content) and entries. Each entry has a kind (1 for PTX, 2 for
machine code), the size of its header, the size of its content and, at offset 28, the compute capability. This layout is
not documented. ``cuobjdump`` prints the same values that this module reads, and a test compares these values with
nvcc's arguments.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

from toolchain.architecture import Architecture
from toolchain.errors import WheelUnusable
from wheels import find as wheels

LIBRARY = "cuda_ops/libcuda_ops.so"
SYSTEM_LIBRARIES = ("ld-linux", "libc.", "libdl.", "libgcc_s.", "libm.", "libpthread.", "librt.", "libstdc++.")
"""Libraries that the wheel may require in addition to torch's. Every Linux system with glibc has them."""

_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The result of the audit."""

    machine_code: tuple[str, ...]
    """The compute capabilities without the decimal point, such as ``75``."""
    ptx: tuple[str, ...]
    needs: tuple[str, ...]
    """The sonames of the required libraries."""
    glibc: str
    """The version of the oldest glibc that provides all required symbols."""
    libstdcxx: str
    """The newest required symbol version of libstdc++ (GLIBCXX_…)."""

    def text(self) -> str:
        """Return the contents as one line of text."""
        ptx = f", PTX {' '.join(self.ptx)}" if self.ptx else ""
        return f"machine code {' '.join(self.machine_code)}{ptx}; needs glibc {self.glibc}, GLIBCXX {self.libstdcxx}"


def audit(wheel: Path, target: Architecture, architectures: tuple[str, ...]) -> Contents:
    """Check that a wheel contains code for exactly the requested architectures; return the result of the audit.

    Raises PlatformMismatch if the wheel was built for another CPU architecture. Raises WheelUnusable if the wheel is
    damaged, requires a specific Python or uncommon libraries, or does not contain exactly the requested GPU code.
    """
    wheels.audit(wheel, target)
    tag = f"py3-none-{target.wheel_platform}"
    if not wheel.stem.endswith(f"-{tag}"):
        raise _unusable(wheel, f"the tag {tag} (any Python 3)", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        if names != [LIBRARY]:
            raise _unusable(wheel, f"one library, {LIBRARY}", ", ".join(names) or "none")
        elf = ELFFile(io.BytesIO(archive.read(LIBRARY)))
    found = contents(elf)
    wanted_code = {item.removesuffix("+PTX").rstrip("af") for item in architectures}
    wanted_ptx = {item.removesuffix("+PTX").rstrip("af") for item in architectures if item.endswith("+PTX")}
    if set(found.machine_code) != wanted_code or set(found.ptx) != wanted_ptx:
        expected = f"machine code for {sorted(wanted_code)} and PTX for {sorted(wanted_ptx)}"
        raise _unusable(wheel, expected, f"machine code for {list(found.machine_code)} and PTX for {list(found.ptx)}")
    foreign = [name for name in found.needs if name != "libtorch.so" and not name.startswith(SYSTEM_LIBRARIES)]
    if foreign or "libtorch.so" not in found.needs:
        raise _unusable(wheel, "only libtorch.so and libraries that every system has", ", ".join(found.needs))
    if paths := wheels.dynamic(elf)[1]:
        raise _unusable(wheel, "no search path for libraries", ", ".join(paths))
    return found


def contents(elf: ELFFile) -> Contents:
    """Return which GPU code a library contains, and what it requires from the system."""
    section = elf.get_section_by_name(".nv_fatbin")
    newest: dict[str, tuple[int, ...]] = {"GLIBC": (0,), "GLIBCXX": (0,)}
    for kind, version in wheels.needed_versions(elf):
        newest[kind] = max(newest[kind], version)
    code = set(gpu_code(section.data())) if section is not None else set()
    return Contents(
        machine_code=tuple(sorted((name for kind, name in code if kind == _MACHINE_CODE), key=int)),
        ptx=tuple(sorted((name for kind, name in code if kind == _PTX), key=int)),
        needs=tuple(sorted(wheels.dynamic(elf)[0])),
        glibc=".".join(map(str, newest["GLIBC"])),
        libstdcxx=".".join(map(str, newest["GLIBCXX"])),
    )


def gpu_code(fatbin: bytes) -> Iterator[tuple[int, str]]:
    """Yield the kind and compute capability of each entry in the GPU code.

    Raises WheelUnusable for an unknown layout.
    """
    at = 0
    while at + 16 <= len(fatbin):
        magic, _, header, size = struct.unpack_from("<IHHQ", fatbin, at)
        if magic == 0:
            at += 8
            continue
        if magic != _MAGIC or header < 16 or at + header + size > len(fatbin):
            raise WheelUnusable("the library's GPU code cannot be read", found=f"{magic:#x} at byte {at} of .nv_fatbin")
        entry, end = at + header, at + header + size
        while entry + 32 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", fatbin, entry)
            (capability,) = struct.unpack_from("<I", fatbin, entry + 28)
            yield kind, str(capability)
            if entry_header + entry_size == 0:
                break
            entry += entry_header + entry_size
        at = end


def _unusable(wheel: Path, expected: str, found: str) -> WheelUnusable:
    return WheelUnusable(
        f"{wheel.name} does not match the requested wheel",
        expected=expected,
        found=found,
        fix="run ./inv build-cuda-wheel again",
    )
