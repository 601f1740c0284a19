"""What a worker tells the task that started it: one JSON object a line, marked, on standard output.

``{"stage": NAME, "limit_s": S}`` begins a stage, ``{"fault": KIND, "found": TEXT}`` ends the run, anything else is a
result. Lines without the mark are what TVM or a kernel's file printed: they belong to the log.

A stage that is still going on after ``limit_s`` seconds ends the worker by SIGALRM. Its default action is left in
place: calls into TVM hold Python's lock while they wait for a board, so no handler would run.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

MARK = "\x1epitorch:"
FAULT_STATUS = 3
"""Exit status of a worker that has told its fault."""


class Fault(Exception):
    """What ends a worker's run: ``kind`` as ``profiling`` knows it, ``found`` in words."""

    def __init__(self, kind: str, found: str) -> None:
        super().__init__(f"{kind}: {found}")
        self.kind = kind
        self.found = found


def tell(**facts: Any) -> None:
    """Write one line."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


def fail(fault: Fault) -> NoReturn:
    """Tell a fault and end."""
    tell(fault=fault.kind, found=fault.found)
    sys.stderr.flush()
    raise SystemExit(FAULT_STATUS)


@contextlib.contextmanager
def stage(name: str, limit_s: float) -> Iterator[None]:
    """Name what is being done, and end the process should it take longer than ``limit_s`` seconds."""
    tell(stage=name, limit_s=limit_s)
    signal.alarm(max(1, math.ceil(limit_s)))
    try:
        yield
    finally:
        signal.alarm(0)


def heard(line: str) -> dict[str, Any] | None:
    """The object of a marked line; None for others."""
    _, mark, text = line.partition(MARK)
    return dict(json.loads(text)) if mark else None
