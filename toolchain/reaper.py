"""A process that ends what a task has started, should the task be killed before it can do so itself.

The task starts it in a session of its own and writes to its standard input: ``+ID`` when a program has started that
leads session ID, ``-ID`` when it has ended. The kernel closes that pipe whatever ends the task, SIGKILL included. Who
is then left in those sessions gets SIGTERM and, after ``POLITE_S`` seconds, SIGKILL. A parent-death signal would reach
the programs themselves alone, and not what they have started.

It is run by ``python -I -S``, and imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

POLITE_S = 5.0


def members(sessions: Iterable[int]) -> Iterator[int]:
    """Processes of these sessions that run: field 6 of /proc/PID/stat (proc(5)); zombies do not count."""
    wanted = set(sessions)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The command's name, field 2, may itself hold spaces and brackets: split behind its last one.
                state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
                if int(session) in wanted and state not in "ZX":
                    yield int(entry.name)


def end(sessions: Iterable[int]) -> None:
    """End all processes of these sessions."""
    left = set(sessions)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + POLITE_S
        for pid in members(left):
            with contextlib.suppress(OSError):
                os.kill(pid, sign)
        while any(members(left)) and time.monotonic() < deadline:
            time.sleep(0.05)


def main() -> None:
    """Read until the task has ended; then end what it left."""
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        (sessions.add if line[0] == "+" else sessions.discard)(session)
    if sessions:
        end(sessions)


if __name__ == "__main__":
    main()
