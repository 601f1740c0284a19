"""Print the progress: steps with their durations, progress bars, warnings and the final table.

On a terminal, the bars are updated in place (rich); in a log, they are plain lines. Progress is printed to stderr;
stdout contains only a task's result.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from toolchain.manifest import Artefact
from toolchain.text import printable


def make_console(**options: Any) -> Console:
    """Return a console that prints text verbatim, without interpreting markup (``[x]``) or emoji codes (``:b:``)."""
    return Console(highlight=False, markup=False, emoji=False, **options)


console = make_console(stderr=True)
_subject: ContextVar[str] = ContextVar("subject", default="")


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """Print the subject, such as a board, at the start of each title and line that this thread prints."""
    token = _subject.set(f"{subject}: ")
    try:
        yield
    finally:
        _subject.reset(token)


class Bar(Protocol):
    """A progress bar."""

    def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        """Set the completed amount and a note about the current item."""


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        self._progress.update(self._task, completed=completed, total=total, note=note)


class _LineBar:
    """A bar for logs, which prints the progress every 10 s."""

    _EVERY_S = 10.0

    def __init__(self, title: str, total: float | None) -> None:
        self._title, self._total, self._printed = title, total, time.monotonic()

    def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        self._total = self._total if total is None else total
        now = time.monotonic()
        if now - self._printed < self._EVERY_S:
            return
        self._printed = now
        share = f"{100 * completed / self._total:.0f} %" if self._total else f"{completed:.0f}"
        say(f"    {self._title}: {share} {note}".rstrip())


class _Where(ProgressColumn):
    """A column that is shown either only for bars that count bytes (``in_bytes``) or only for other bars."""

    def __init__(self, column: ProgressColumn, *, in_bytes: bool) -> None:
        super().__init__()
        self._column, self._in_bytes = column, in_bytes

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.fields["in_bytes"] == self._in_bytes else Text("")


_live: Progress | None = None
_bars = 0
_lock = threading.Lock()


def _display() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        _Where(TimeElapsedColumn(), in_bytes=False),
        *(_Where(column, in_bytes=True) for column in (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())),
        console=console,
        transient=True,
    )


@contextlib.contextmanager
def bar(title: str, *, total: float | None = None, in_bytes: bool = False) -> Iterator[Bar]:
    """Show a progress bar; with ``in_bytes``, also show the amount, the rate and the remaining time.

    Bars of all threads share one display, which is removed together with the last bar.
    """
    global _live, _bars
    if not console.is_terminal:
        yield _LineBar(title, total)
        return
    with _lock:
        if _live is None:
            _live = _display()
            _live.start()
        progress = _live
        _bars += 1
        task = progress.add_task(f"{_subject.get()}{title}", total=total, in_bytes=in_bytes, note="")
    try:
        yield _RichBar(progress, task)
    finally:
        with _lock:
            progress.remove_task(task)
            _bars -= 1
            if _bars == 0:
                progress.stop()
                _live = None


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title of a step when it starts, and its duration when it ends or fails."""
    title = f"{_subject.get()}{title}"
    console.print(Text.assemble(("==>", "bold"), " ", title), soft_wrap=True)
    began = time.monotonic()
    try:
        yield
    except BaseException:
        message = f"==> {title}: failed after {time.monotonic() - began:.1f} s"
        console.print(Text(message, style="bold red"), soft_wrap=True)
        raise
    seconds = f"{time.monotonic() - began:.1f} s"
    console.print(Text.assemble(f"    {title}: ", (seconds, "green")), soft_wrap=True)


def say(text: str) -> None:
    """Print a line without wrapping it, so that commands in it can be copied."""
    words = text.lstrip(" ")
    console.print(printable(f"{text[: len(text) - len(words)]}{_subject.get()}{words}"), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning."""
    _warn(console, f"{_subject.get()}{text}")


def _warn(out: Console, text: str) -> None:
    out.print(Text.assemble(("WARNING", "bold yellow"), " ", (printable(text), "yellow")), soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """A row of the final table. ``digest`` is a SHA-256 or an image ID; ``size`` is in bytes."""

    name: str
    size: int
    digest: str
    seconds: float
    note: str = ""


def row_of(name: str, artefact: Artefact, seconds: float, note: str = "") -> Row:
    """Return the table row for a file."""
    return Row(name, artefact.size, artefact.sha256, seconds, note)


def human_size(size: float) -> str:
    """Return a number of bytes as text in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def summary(title: str, rows: Iterable[Row], *, warnings: Sequence[str] = ()) -> None:
    """Print a task's final table to stdout, then repeat all warnings."""
    out = make_console()
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("artefact", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("SHA-256", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        digest = row.digest.removeprefix("sha256:")
        shown = digest if out.width >= 140 else digest[:12]
        table.add_row(row.name, human_size(row.size), shown, f"{row.seconds:.1f}", row.note)
    out.print(table)
    for warning in warnings:
        _warn(out, warning)
