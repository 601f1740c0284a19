"""Identify a process across program runs by its ID and its creation time.

The kernel reuses process IDs; only the ID and the creation time together identify a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import psutil

_TOLERANCE_S = 2.0
"""The tolerance in seconds. psutil computes creation times from the boot time, which clock adjustments shift."""


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


def record(process: psutil.Process) -> dict[str, int | float]:
    """Return the process's identity as JSON values, for ``find_recorded``."""
    return {"pid": process.pid, "created": process.create_time()}


def find_recorded(identity: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process that ``record`` describes, if it is still running.

    Returns None if the process has ended. Raises KeyError, TypeError or ValueError for an invalid record.
    """
    process = find(int(identity["pid"]))
    if process is not None and abs(process.create_time() - float(identity["created"])) < _TOLERANCE_S:
        return process
    return None
