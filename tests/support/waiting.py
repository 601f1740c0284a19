"""Wait until another process or thread has done something."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

LIMIT_S = 90.0
"""The time limit, on a busy machine, for a program to start or to detect that another one has ended."""


def eventually(
    condition: Callable[[], Any],
    failure: Callable[[], object] | str = "the condition did not become true",
    *,
    limit_s: float = LIMIT_S,
    interval_s: float = 0.1,
    task: subprocess.Popen[Any] | psutil.Popen | None = None,
) -> Any:
    """Wait until a condition is true, and return its value.

    Fail with the given text or value after the time limit, or if ``task`` ends before the condition is true.
    """
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        ended = task is not None and task.poll() is not None
        if ended or time.monotonic() > deadline:
            output = task.communicate() if ended and task else None
            shown = failure() if callable(failure) else failure
            raise AssertionError("the process ended too early" if ended else f"{limit_s:g} s", shown, output)
        time.sleep(interval_s)
    return found
