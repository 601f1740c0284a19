"""Run measurements, compare the results with the goals, and print the results."""

from __future__ import annotations

import datetime
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine
from toolchain import process
from toolchain.config import ROOT
from toolchain.errors import CommandFailed
from toolchain.files import write_text_atomically

SCHEMA = 1
IDLE_LOAD = 0.3
"""A machine with more runnable tasks per core than this (one-minute load average) does not count as idle."""

_WIDTH = 118


@dataclass(frozen=True)
class Goal:
    """A limit for a figure: a maximum, or a minimum if ``at_most`` is false."""

    limit: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Return whether a value meets the goal."""
        return value <= self.limit if self.at_most else value >= self.limit

    def text(self, unit: str) -> str:
        """Return the goal as text, such as ``≤ 5 s``."""
        return f"{'≤' if self.at_most else '≥'} {quantity(self.limit, unit)}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value, or the median of ``samples`` if there are any. ``unit`` is s, ms, µs, MB, MB/s, M, % or ×."""

    name: str
    value: float
    unit: str = "s"
    samples: tuple[float, ...] = ()
    goal: Goal | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if there is no goal."""
        return None if self.goal is None else self.goal.met(self.value)

    @property
    def spread(self) -> str:
        """The smallest and the largest sample, and the sample count; empty for a single sample."""
        if len(self.samples) < 2:
            return ""
        return f"{min(self.samples):.2f}–{max(self.samples):.2f} ({len(self.samples)})"

    def as_json(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        document: dict[str, Any] = {"name": self.name, "value": round(self.value, 4), "unit": self.unit}
        if self.samples:
            document["samples"] = [round(item, 4) for item in self.samples]
        if self.goal is not None:
            document |= {"goal": self.goal.text(self.unit), "met": self.met}
        return document | ({"note": self.note} if self.note else {})


def quantity(value: float, unit: str) -> str:
    """Return a value with three significant digits and its unit."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    shown = f"{value:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {unit}"


def median_of(name: str, samples: Sequence[float], *, goal: Goal | None = None, note: str = "") -> Figure:
    """Return the median of several timings, in seconds."""
    return Figure(name=name, value=statistics.median(samples), samples=tuple(samples), goal=goal, note=note)


def ratio(name: str, longer: Figure, shorter: Figure, *, goal: Goal | None = None) -> Figure:
    """Return the ratio of ``longer`` to ``shorter``."""
    note = f"{quantity(longer.value, longer.unit)} / {quantity(shorter.value, shorter.unit)}"
    return Figure(name=name, value=longer.value / shorter.value, unit="×", goal=goal, note=note)


def timed(action: Callable[[], object], *, times: int, warm_up: int = 0) -> tuple[float, ...]:
    """Call a function ``warm_up`` times, and then measure ``times`` further calls.

    Return their durations in seconds.
    """
    samples = []
    for number in range(warm_up + times):
        began = time.monotonic()
        action()
        if number >= warm_up:
            samples.append(time.monotonic() - began)
    return tuple(samples)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A task that ran in a separate process. ``peak_mb`` is the peak resident memory of its Python process in MB."""

    seconds: float
    peak_mb: float
    output: str


def observe(
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    cwd: Path = ROOT,
    program: str = "benchmarks.observed",
) -> Observed:
    """Run a task as a user would, and measure it.

    Raises CommandFailed, with the last lines of the task's output, if the task fails.

    The peak is VmHWM (proc(5)) of the Python process alone, without the programs that it starts.
    """
    report = log.with_suffix(".observed.json")
    report.unlink(missing_ok=True)
    done = process.run(
        [sys.executable, "-m", program, str(report), *words], cwd=cwd, env=environment, log=log, limit_s=3600.0
    )
    try:
        peak_kib = int(json.loads(report.read_text())["peak_kib"])
    except (FileNotFoundError, ValueError, KeyError) as fault:
        raise CommandFailed(
            f"{' '.join(words)} did not record its memory use", found=str(fault), tail=done.output[-2000:]
        ) from fault
    return Observed(seconds=done.seconds, peak_mb=peak_kib * 1024 / 1e6, output=done.output)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a benchmark. ``rule`` describes warm-up, repetitions and excluded times."""

    name: str
    title: str
    rule: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    tables: str = ""
    """Additional tables as text, which are printed before the figures."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def figure(self, name: str) -> Figure:
        """Return the figure with this name."""
        return next(item for item in self.figures if item.name == name)


def titled_table(title: str) -> Table:
    """Return an empty table with this title, in the style that all benchmarks use."""
    return Table(title=title, title_justify="left", title_style="bold", padding=(0, 1))


def text_of(*parts: Table | str) -> str:
    """Return tables and lines as plain text."""
    sink = io.StringIO()
    console = Console(file=sink, width=_WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)
    return sink.getvalue()


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark's result, and a description of the machine on which the benchmark ran."""

    result: Result
    machine: Machine
    load_after: tuple[float, float, float]
    started: datetime.datetime
    seconds: float
    commit: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning if the machine was not idle."""
        load = self.machine.load[0] / self.machine.cores
        if load <= IDLE_LOAD:
            return ()
        return (
            f"the machine was already BUSY (load {self.machine.load[0]:.1f} on {self.machine.cores} cores): "
            "times are inflated, and ratios are valid only within this run",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the result file."""
        return {
            "schema": SCHEMA,
            "benchmark": self.result.name,
            "title": self.result.title,
            "rule": self.result.rule,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "commit": self.commit,
            "machine": self.machine.as_json(),
            "load_after": list(self.load_after),
            "warnings": list(self.warnings),
            "notes": list(self.result.notes),
            "facts": dict(self.result.facts),
            "figures": [item.as_json() for item in self.result.figures],
        }

    def write(self, folder: Path) -> Path:
        """Write the result file atomically and return its path."""
        path = folder / f"{self.result.name}.json"
        write_text_atomically(path, json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n")
        return path

    def text(self) -> str:
        """Return the table of figures with the rule, the notes and the warnings, as plain text."""
        table = titled_table(self.result.title)
        table.add_column("figure", overflow="fold")
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("min–max (n)", justify="right", no_wrap=True)
        table.add_column("goal", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("", overflow="fold")
        for item in self.result.figures:
            table.add_row(
                item.name,
                quantity(item.value, item.unit),
                item.spread,
                item.goal.text(item.unit) if item.goal else "",
                {None: "", True: "met", False: "NOT MET"}[item.met],
                item.note,
            )
        warnings = [f"WARNING: {text}" for text in self.warnings]
        return self.result.tables + text_of(table, f"rule: {self.result.rule}", *self.result.notes, *warnings)
