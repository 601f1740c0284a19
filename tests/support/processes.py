"""Find processes that tests started."""

from __future__ import annotations

import contextlib
from pathlib import Path

from toolchain import process


def command_lines() -> dict[int, str]:
    """Return the command lines of all processes by process ID, with spaces between the arguments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def in_group(group: int) -> set[str]:
    """Return the processes of a group except zombies, whose status is read later."""
    return set(process.output_of(["pgrep", "--runstates=D,R,S,T", "-g", str(group)]).split())
