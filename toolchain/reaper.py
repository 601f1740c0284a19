"""Stop the programs that a killed task left running. This module runs as a separate process.

The task starts this process in a separate session. Through a pipe, the task writes to this process's standard input:
``+ID`` when the leader of session ``ID`` has started, ``-ID`` when the leader has exited. The kernel closes the pipe
when the task exits for any reason, including SIGKILL. The remaining processes in those sessions are then sent SIGTERM
and, after ``POLITE_S`` seconds, SIGKILL. A parent-death signal would stop the programs, but not their children. The
module is run with ``python -I -S`` and does not import other modules of this project.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

POLITE_S = 5.0


def running() -> Iterator[tuple[int, int, int]]:
    """Yield the ID, group and session of each running process (/proc/PID/stat, proc(5)), except zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # Field 2, the command's name, may contain spaces and brackets, so split after the last bracket.
                text = (entry / "stat").read_text(errors="replace")
                state, _, group, session = text.rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    yield int(entry.name), int(group), int(session)


def end(sessions: Collection[int]) -> None:
    """Stop all processes in these sessions: send SIGTERM and, after ``POLITE_S`` seconds, SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + POLITE_S
        for pid, _, session in running():
            if session in sessions:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        while time.monotonic() < deadline and any(session in sessions for _, _, session in running()):
            time.sleep(0.05)


def main() -> None:
    """Read standard input until the task has exited; then stop the remaining processes."""
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        (sessions.add if line[0] == "+" else sessions.discard)(session)
    if sessions:
        end(sessions)


if __name__ == "__main__":
    main()
