"""Messages from a worker to the task that started it: one marked JSON object per line, on standard output.

``{"stage": NAME, "limit_s": S}`` begins a stage, ``{"fault": KIND, "found": TEXT}`` ends the run, and all other objects
are results. A line without the mark is output from TVM or from the kernel file, and is written to the log.

If a stage takes longer than ``limit_s`` seconds, SIGALRM ends the worker. The signal keeps its default action, because
a Python handler would not run while a call into TVM waits for a board and holds Python's global interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

MARK = "\x1epitorch:"
FAULT_STATUS = 3
"""The exit status of a worker that has reported a fault."""


class Fault(Exception):
    """An error that ends a worker. ``kind`` is a key in ``faults.TABLE``, and ``found`` is a description."""

    def __init__(self, kind: str, found: str) -> None:
        super().__init__(f"{kind}: {found}")
        self.kind = kind
        self.found = found


def tell(**facts: Any) -> None:
    """Write one message."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


def serve(run: Callable[[Mapping[str, Any]], None]) -> None:
    """Read a request from standard input and pass it to ``run``. If ``run`` raises a Fault, report it and exit."""
    request = json.load(sys.stdin)
    try:
        run(request)
    except Fault as fault:
        fail(fault)


def fail(fault: Fault) -> NoReturn:
    """Report a fault and exit."""
    tell(fault=fault.kind, found=fault.found)
    sys.stderr.flush()
    raise SystemExit(FAULT_STATUS)


@contextlib.contextmanager
def stage(name: str, limit_s: float) -> Iterator[None]:
    """Report the start of a stage, and end the process if the stage takes longer than ``limit_s`` seconds."""
    tell(stage=name, limit_s=limit_s)
    signal.alarm(max(1, math.ceil(limit_s)))
    try:
        yield
    finally:
        signal.alarm(0)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Tell the user when a step starts, and how long it took when it has ended."""
    tell(text=f"==> {title}")
    began = time.monotonic()
    yield
    tell(text=f"    {title}: {time.monotonic() - began:.1f} s")


def parse(line: str) -> dict[str, Any] | None:
    """The object in a marked line, or None for a line without the mark."""
    _, mark, text = line.partition(MARK)
    return dict(json.loads(text)) if mark else None
