"""Pytest plugin for the target's container: it selects the tests to run and writes the tests' names to a file.

On 32-bit systems, it also occupies the lower half of the address space before torch is imported. A board's kernel
places most objects in the upper half, but qemu-user places them in the lower one, which masks errors in code that
treats addresses as signed.
"""

from __future__ import annotations

import ctypes
import fnmatch
import json
import mmap
import sys
from pathlib import Path

import pytest

_HALF = 1 << 31


def occupy_lower_half() -> None:
    """Map all free address space below 2**31, without access rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    size = _HALF // 8
    while size >= mmap.PAGESIZE:
        place = libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if place >= _HALF:  # this includes -1, which indicates an error
            libc.munmap(place, size)
            size //= 2


if sys.maxsize < _HALF:
    occupy_lower_half()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("upstream")
    group.addoption("--leave-out", action="append", default=[], metavar="PATTERN", help="exclude these tests (fnmatch)")
    group.addoption(
        "--part", default="1/1", metavar="K/N", help="run every Nth test in name order, starting with the Kth"
    )
    group.addoption(
        "--tell-collected",
        metavar="FILE",
        help="JSON file to write: the names of all tests, and the names of the tests in the selected part",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the part's tests that no pattern excludes; write the names of all tests and of the part's tests."""
    patterns: list[str] = config.getoption("--leave-out")
    part, parts = map(int, config.getoption("--part").split("/"))
    whole = sorted(item.nodeid for item in items)
    mine = whole[part - 1 :: parts]
    wanted = {name for name in mine if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
    if place := config.getoption("--tell-collected"):
        Path(place).write_text(json.dumps({"whole": whole, "part": mine}))
