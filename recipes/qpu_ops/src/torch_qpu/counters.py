"""Count launches, copies and CPU fallbacks, and record them for Perfetto."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch_qpu import _C


class Count(NamedTuple):
    """Statistics for one kernel, one operator or one kind of copy."""

    calls: int
    bytes: int
    """Bytes read and written; 0 for a fallback, which runs torch's kernels."""


def launches() -> dict[str, Count]:
    """Return statistics of the launched QPU kernels, by name."""
    return {name: Count(*count) for name, count in _C.counts("launch").items()}


def copies() -> dict[str, Count]:
    """Return statistics of copies between tensors, by source and destination device."""
    return {name: Count(*count) for name, count in _C.counts("copy").items()}


def fallbacks() -> dict[str, int]:
    """Return how often the CPU computed each operator for tensors of the device."""
    return {name: calls for name, (calls, _) in _C.counts("fallback").items()}


def reset_counters() -> None:
    """Reset all three counters."""
    _C.reset_counts()


def report() -> str:
    """Return the counters as a human-readable table."""
    lines = []
    for title, rows in (
        ("on the QPUs", launches()),
        ("copied", copies()),
        ("on the CPU", {name: Count(calls, 0) for name, calls in fallbacks().items()}),
    ):
        total = sum(row.calls for row in rows.values())
        lines.append(f"{title}: {total} calls")
        for name, row in sorted(rows.items(), key=lambda item: -item[1].calls):
            size = f"{row.bytes / 1024:12.1f} KiB" if row.bytes else ""
            lines.append(f"  {name:40} {row.calls:8}{size}")
    return "\n".join(lines)


class Event(NamedTuple):
    """One launch, copy or fallback."""

    kind: str
    name: str
    thread: int
    start_ns: int
    duration_ns: int
    bytes: int
    clocks: int
    """Clocks of V3D according to the emulator's model of a board; -1 on other backends."""


@dataclass
class Profile:
    """The events that ``profile()`` recorded."""

    events: list[Event] = field(default_factory=list)
    backend: str = ""

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a file for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        rows: list[dict[str, object]] = [
            {"ph": "M", "pid": os.getpid(), "name": "process_name", "args": {"name": f"qpu ({self.backend})"}}
        ]
        for event in self.events:
            arguments: dict[str, object] = {"bytes": event.bytes}
            if event.clocks >= 0:
                arguments["V3D clocks (model, not measured on hardware)"] = event.clocks
            rows.append(
                {
                    "ph": "X",
                    "pid": os.getpid(),
                    "tid": event.thread,
                    "cat": event.kind,
                    "name": event.name,
                    "ts": event.start_ns / 1000,
                    "dur": event.duration_ns / 1000,
                    "args": arguments,
                }
            )
        document = {"traceEvents": rows, "displayTimeUnit": "ns"}
        target = Path(path)
        aside = target.with_name(f"{target.name}.{os.getpid()}.{time.monotonic_ns()}")
        aside.write_text(json.dumps(document))
        aside.replace(target)


class profile:  # noqa: N801 (used like a function, like torch.profiler.profile)
    """Record every launch, copy and CPU fallback of the process inside the ``with`` block. Recordings cannot overlap.

    with torch_qpu.profile() as record:
        model(x)
    record.export_chrome_trace("trace.json")
    """

    def __enter__(self) -> Profile:
        """Start recording."""
        self._profile = Profile(backend=_C.backend()[0])
        _C.start_record()
        return self._profile

    def __exit__(self, *_: object) -> None:
        """Stop recording and make the events available."""
        self._profile.events.extend(Event(*event) for event in _C.stop_record())
