"""Read the record of a run: the lines that the board sent, and the test results in them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTS = ("passed", "failed", "errors", "skipped")
"""The names under which the outcomes of tests are counted."""

COUNT_PREFIX = "tests on the board:"
"""The prefix of the line with the number of collected tests."""

BOARD_LOST = "not run: the connection to the board was closed earlier"
PYTEST_ENDED = "not run: pytest exited earlier"
"""The reasons why a collected test has no result."""

_ABSENT = re.compile(r"the image is built without (.+)")


@dataclass(frozen=True)
class Test:
    """A test of the suite.

    ``outcome`` is passed, failed, error or skipped; ``text`` is the reason if the test did not pass.
    """

    nodeid: str
    outcome: str
    seconds: float
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The lines that the board sent during a run.

    ``error`` is an error that ended the run, not a failed test. Its value ``after_tests`` is true if the error occurred
    after the last test, when the board was switched off.
    """

    facts: Mapping[str, Any]
    booted: Mapping[str, Any]
    tests: tuple[Test, ...]
    timing: Mapping[str, Any]
    seconds: float
    error: Mapping[str, Any] | None
    deployed_sha256: str = ""
    """The SHA-256 of the list of deployed files, if the board has read these files."""

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record. Invalid lines are ignored; tests without a result count as errors."""
        others: dict[str, dict[str, Any]] = {}
        tests: dict[str, Test] = {}
        collected: list[str] = []
        for event in _events(path):
            kind = event.pop("pitorch")
            if kind == "result":
                tests[event["nodeid"]] = Test(event["nodeid"], event["outcome"], event["seconds"], event["text"])
            elif kind == "collected":
                collected = event["nodeids"]
            else:
                others[kind] = event
        not_run = PYTEST_ENDED if "end" in others else BOARD_LOST
        for nodeid in collected:
            tests.setdefault(nodeid, Test(nodeid, "error", 0.0, not_run))
        return cls(
            facts=others.get("facts", {}),
            booted=others.get("booted", {}),
            tests=tuple(tests.values()),
            timing=others.get("timing", {}).get("document", {"reason": "no timing was requested"}),
            seconds=others.get("end", {}).get("seconds", 0.0),
            error=others.get("error"),
            deployed_sha256=others.get("deployed", {}).get("sha256", ""),
        )


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "pitorch" in event:
                yield event


def count(tests: Sequence[Test]) -> dict[str, int]:
    """Return the number of tests by outcome."""
    ended = [test.outcome for test in tests]
    return {name: ended.count("error" if name == "errors" else name) for name in COUNTS}


def counted(numbers: Mapping[str, Any]) -> str:
    """Return the number of tests by outcome as a string."""
    return ", ".join(f"{numbers[name]} {name}" for name in COUNTS)


def missing_components(tests: Sequence[Test]) -> list[str]:
    """Return the components that are missing from the image, according to the skipped tests."""
    absent: dict[str, None] = {}
    for test in tests:
        if test.outcome == "skipped" and (found := _ABSENT.search(test.text)):
            for part in re.split(r" and |, ", found[1].partition(":")[0]):
                absent[part.strip()] = None
    return sorted(absent)
