"""Small ELF files and wheels, valid or damaged."""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from toolchain.errors import PlatformMismatch, WheelUnusable

EM_ARM, EM_AARCH64, EM_X86_64 = 40, 183, 62
EABI5 = 0x05000000
HARD, SOFT = EABI5 | 0x400, EABI5 | 0x200


def elf(machine: int, *, bits: int = 32, flags: int = 0, big: bool = False, vfp_args: int | None = None) -> bytes:
    """Make a minimal shared object; with ``vfp_args``, it has an ARM attribute section."""
    order = ">" if big else "<"
    ident = b"\x7fELF" + bytes([1 if bits == 32 else 2, 2 if big else 1, 1]) + bytes(9)
    names = b"\0.shstrtab\0.ARM.attributes\0"
    attributes = b""
    if vfp_args is not None:
        pairs = bytes([28, vfp_args])
        block = bytes([1]) + struct.pack(order + "I", 5 + len(pairs)) + pairs
        attributes = b"A" + struct.pack(order + "I", 4 + 6 + len(block)) + b"aeabi\0" + block
    size = 52 if bits == 32 else 64
    sections = size + len(names) + len(attributes)
    word = "I" if bits == 32 else "Q"
    entry = 40 if bits == 32 else 64

    def section(name: int, kind: int, offset: int, length: int) -> bytes:
        return struct.pack(
            f"{order}II{word}{word}{word}{word}II{word}{word}", name, kind, 0, 0, offset, length, 0, 0, 1, 0
        )

    table = section(0, 0, 0, 0) + section(1, 3, size, len(names))
    if vfp_args is not None:
        table += section(11, 0x70000003, size + len(names), len(attributes))
    header = struct.pack(
        f"{order}HHI{word}{word}{word}IHHHHHH",
        *(3, machine, 1, 0, 0, sections, flags, size, 0, 0, entry, len(table) // entry, 1),
    )
    return ident + header + names + attributes + table


FOR_OTHER_MACHINES: list[tuple[dict[str, bytes], str, type[Exception], str]] = [
    ({}, "cp313-cp313-linux_armv7l", WheelUnusable, "it has no library"),
    ({"a.so": elf(EM_ARM, flags=HARD)}, "cp312-cp312-linux_armv7l", WheelUnusable, "its tag is cp312"),
    ({"a.so": elf(EM_ARM, flags=HARD)}, "cp313-cp313-linux_armv7l", WheelUnusable, "does not have .ARM.attributes"),
    ({"a.so": elf(EM_AARCH64, bits=64)}, "cp313-cp313-linux_armv7l", PlatformMismatch, "EM_AARCH64"),
]
"""Wheels that the audit of an armhf recipe rejects: their contents and tag, the error, and a part of its message."""


def digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def make_wheel(
    folder: Path,
    contents: Mapping[str, bytes | str] | None = None,
    *,
    name: str = "thing",
    version: str = "1.0",
    tag: str = "cp313-cp313-linux_armv7l",
    record: Callable[[str], str] = lambda text: text,
    purelib: bool = False,
    requires: str = "",
) -> Path:
    """Make a wheel, whose RECORD is correct unless ``record`` modifies it."""
    info = f"{name}-{version}.dist-info"
    files: dict[str, bytes] = {
        key: value.encode() if isinstance(value, str) else value for key, value in (contents or {}).items()
    }
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {str(purelib).lower()}\nTag: {tag}\n".encode()
    )
    listed = "".join(f"{key},{digest(value)},{len(value)}\n" for key, value in files.items())
    files[f"{info}/RECORD"] = record(listed + f"{info}/RECORD,,\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, value in files.items():
            member = zipfile.ZipInfo(key)
            member.external_attr = (0o100755 if "/scripts/" in key else 0o100644) << 16
            archive.writestr(member, value, zipfile.ZIP_DEFLATED)
    return path


def torch_wheel(
    folder: Path, contents: Mapping[str, bytes | str] | None = None, *, version: str = "2.6.0", python: str = "cp313"
) -> Path:
    """Make a wheel with the name and tag of torch's wheel."""
    library = {"torch/lib/libtorch_cpu.so": elf(EM_ARM, flags=HARD, vfp_args=1)}
    tag = f"{python}-{python}-linux_armv7l"
    return make_wheel(folder, library if contents is None else contents, name="torch", version=version, tag=tag)
