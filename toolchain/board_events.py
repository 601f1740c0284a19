"""Record a board's events as JSON lines with time stamps. ``./inv lab log`` shows them in chronological order.

A file that would exceed ``LIMIT_BYTES`` is renamed to ``FILE.1``, and a new file is started.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolchain import progress
from toolchain.config import Config

LIMIT_BYTES = 1 << 20

TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>].?")

_POLL_S = 0.2
_writing = threading.Lock()
_warn_once = functools.cache(progress.warn)


@dataclass(frozen=True)
class Event:
    """An event. ``time`` is in Unix seconds; ``source`` is power, console, dhcp, tftp, nfs or ssh."""

    time: float
    source: str
    text: str

    def line(self) -> str:
        """Return the event as a line of text with the local time, without control characters."""
        when = datetime.datetime.fromtimestamp(self.time).astimezone().isoformat(" ", "milliseconds")
        text = "".join(filter(str.isprintable, TERMINAL_CODES.sub("", self.text.replace("\t", " "))))
        return f"{when}  {self.source:<7}  {text}"


def of_netboot(config: Config, name: str) -> Path:
    """Return the path of the file in which ``./inv netboot`` records a board's events."""
    return config.build_root / "netboot" / f"{name}.jsonl"


def append(path: Path | None, source: str, *texts: str, when: float | None = None) -> None:
    """Append events to the file ``path``, unless it is None.

    The time of the events is ``when`` (Unix seconds) or, if it is None, the current time. If the file cannot be
    written, print a warning.
    """
    if path is None or not texts:
        return
    now = time.time() if when is None else when
    lines = "".join(json.dumps({"time": now, "source": source, "text": text}) + "\n" for text in texts)
    try:
        with _writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and path.stat().st_size + len(lines) > LIMIT_BYTES:
                os.replace(path, _earlier(path))
            with path.open("a") as stream:
                stream.write(lines)
    except OSError as fault:
        _warn_once(f"the board's events are not recorded: {fault}")


def read(path: Path) -> list[Event]:
    """Return the recorded events, including those in ``FILE.1``; incomplete lines are ignored."""
    found = []
    for part in (_earlier(path), path):
        with contextlib.suppress(FileNotFoundError), part.open(errors="replace") as stream:
            for line in stream:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    document = json.loads(line)
                    found.append(Event(float(document["time"]), str(document["source"]), str(document["text"])))
    return found


@contextlib.contextmanager
def following(log: Path, path: Path | None, source: str) -> Iterator[None]:
    """Record each line that another program appends to a log while the block runs."""
    ended = threading.Event()

    def follow() -> None:
        rest = ""
        with log.open(errors="replace") as stream:
            last = False
            while not last:
                last = ended.wait(_POLL_S)
                *lines, rest = (rest + stream.read()).split("\n")
                append(path, source, *lines)
        append(path, source, *filter(None, [rest]))

    follower = threading.Thread(target=follow, name=f"follow-{source}", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
