"""Small ARM programs that check whether a machine can execute ARM code. No compiler is needed.

The source of the 32-bit program is probe.S next to this file; a test assembles it and compares the bytes.
"""

from __future__ import annotations

import struct

MESSAGE = b"32-bit ARM code runs\n"
"""The output of the 32-bit program if it is run without arguments."""

LISTED_AT_LEAST = 66
"""The minimum number of directory entries for exit status 0: 64 files, and the entries ``.`` and ``..``."""

EOVERFLOW = 75
"""The exit status if an entry does not fit the 32-bit fields of readdir(3)."""

CODE = bytes.fromhex(
    "00409de5020054e3060000aa0100a0e3b8108fe21520a0e30470a0e3000000ef0000a0e3270000ea08009de50119a0e3"
    "0020a0e30570a0e3000000ef000050e30200a0b31f0000ba0050a0e100a0a0e301da4de20500a0e10d10a0e1012aa0e3"
    "d970a0e3000000ef000050e30300a0b3140000ba1000000a0d60a0e100808de0041096e5000051e30900001a081096e5"
    "0c2096e5c10f52e10500001a01a08ae2b011d6e1016086e0080056e1f3ffff3ae7ffffea4b00a0e3020000ea42005ae3"
    "0000a0a30400a0b30170a0e3000000ef33322d6269742041524d20636f64652072756e730a000000"
)

_ADDRESS = 0x10000
_HEADERS = struct.Struct("<16sHHIIIIIHHHHHH8I")


def elf() -> bytes:
    """Return the 32-bit program as a static ELF executable: one header, one loadable segment, no sections.

    e_flags specifies version 5 of the ARM EABI with hard-float calls (ELF for the Arm Architecture, aaelf32).
    """
    size = _HEADERS.size + len(CODE)
    entry = _ADDRESS + _HEADERS.size
    ident = b"\x7fELF\x01\x01\x01" + bytes(9)
    header = (ident, 2, 40, 1, entry, 52, 0, 0x05000400, 52, 32, 1, 40, 0, 0)
    segment = (1, 0, _ADDRESS, _ADDRESS, size, size, 5, 0x10000)
    return _HEADERS.pack(*header, *segment) + CODE


CODE_64 = bytes.fromhex("000080d2 a80b80d2 010000d4")
"""The machine code for: mov x0, #0; mov x8, #93 (exit); svc #0."""

_HEADERS_64 = struct.Struct("<16sHHIQQQIHHHHHHIIQQQQQQ")


def elf_64() -> bytes:
    """Return a static 64-bit ARM executable without ELF sections that exits with status 0."""
    size = _HEADERS_64.size + len(CODE_64)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = (ident, 2, 183, 1, _ADDRESS + _HEADERS_64.size, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = (1, 5, 0, _ADDRESS, _ADDRESS, size, size, 0x10000)
    return _HEADERS_64.pack(*header, *segment) + CODE_64


PROGRAMS = {"armhf": elf, "arm64": elf_64}
"""The programs by Debian's architecture name."""
