"""Identify a process, even in a later run of this program, by its ID, its start time and the ID of the boot.

The kernel reuses process IDs, so only the three values together identify a process. The start time is the value that
the kernel reports, in clock ticks since the boot. Unlike psutil's creation time, it does not change when the system
clock is adjusted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_ENDED = -1
"""The start time of a process that has ended."""


def running(process: psutil.Process) -> bool:
    """Return whether the process is running.

    A zombie counts as running if it has other threads, which keep its files and ports open.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def find(pid: int) -> psutil.Process | None:
    """Return the running process with this ID, or None if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        process = psutil.Process(pid)
        return process if running(process) else None
    return None


def record(process: psutil.Process) -> dict[str, int | str]:
    """Return the process's identity as JSON values, for ``find_recorded``."""
    return {"pid": process.pid, "boot": _boot(), "ticks": _start_ticks(process.pid)}


def find_recorded(identity: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process that ``record`` describes, if it is still running.

    Returns None if the process has ended. Raises KeyError, TypeError or ValueError for an invalid record.
    """
    pid, boot, ticks = int(identity["pid"]), identity["boot"], int(identity["ticks"])
    process = find(pid)
    return process if process is not None and (boot, ticks) == (_boot(), _start_ticks(pid)) else None


def _boot() -> str:
    """Return the kernel's random ID of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since the boot, or ``_ENDED``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return _ENDED
    # The start time is field 22 (proc(5)). Field 2, the name, is in parentheses and may itself contain spaces and
    # parentheses.
    return int(stat.rpartition(b")")[2].split()[19])
