"""One JUnit file and one HTML page for a run on several boards: a column per board, tests that differ first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from device.report import MARKS
from device.suite_result import Paths
from toolchain import files, templates
from toolchain.config import Config
from toolchain.errors import DeviceTestsFailed

_TEMPLATE = Path(__file__).resolve().parent.parent / "templates" / "lab.html.j2"
_BAD = ("failed", "error")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one board. Without ``document`` (its evidence) the suite did not run there, for ``error``.

    With both, a test failed, or the error has another cause, such as a board with files that were not built here.
    """

    board: str
    paths: Paths
    error: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, board: str, paths: Paths, error: str) -> Outcome:
        """The outcome of a run that has just ended, with or without evidence."""
        document = json.loads(paths.evidence.read_text()) if paths.evidence.is_file() else {}
        return cls(board=board, paths=paths, error=error, document=document)

    @property
    def reason(self) -> str:
        """The first line of the error; empty if tests that failed are the reason."""
        counted = self.document.get("results", {})
        return "" if counted.get("failed") or counted.get("errors") else self.error.partition("\n")[0]

    @property
    def tests(self) -> dict[str, Mapping[str, Any]]:
        """Its tests by node ID."""
        return {test["nodeid"]: test for test in self.document["results"]["tests"]} if self.document else {}


@dataclass(frozen=True, kw_only=True)
class TestRow:
    """One test, with its outcome on each board (None where it did not run)."""

    __test__ = False

    nodeid: str
    cells: tuple[Mapping[str, Any] | None, ...]

    @property
    def differs(self) -> bool:
        """Whether the boards disagree."""
        return len({cell["outcome"] if cell else None for cell in self.cells}) > 1

    @property
    def bad(self) -> bool:
        """Whether it failed on a board."""
        return any(cell and cell["outcome"] in _BAD for cell in self.cells)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The merged result."""

    outcomes: tuple[Outcome, ...]
    junit: Path
    report: Path

    @property
    def ok(self) -> bool:
        """Whether every board passed."""
        return not any(outcome.error for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """One line per board."""
        found = []
        for outcome in self.outcomes:
            if outcome.document:
                counted = outcome.document["results"]
                text = ", ".join(f"{counted[name]} {name}" for name in ("passed", "failed", "errors", "skipped"))
                text += f" ({outcome.reason})" if outcome.reason else ""
            else:
                text = f"did not run: {outcome.reason}"
            found.append(f"{outcome.board}: {text}")
        return found

    def summary(self) -> str:
        """The text that the task prints."""
        lines = [f"device suite on {len(self.outcomes)} boards", *(f"    {line}" for line in self.lines())]
        return "\n".join([*lines, f"    report:   {self.report}", f"    JUnit:    {self.junit}"])

    def error(self) -> DeviceTestsFailed:
        """The error for a run that did not pass."""
        return DeviceTestsFailed(
            "the device suite did not pass on every board",
            expected="every board to boot, and every test to pass or to be skipped",
            found="; ".join(self.lines()),
            fix=f"open {self.report}; the report of each board is in {self.report.parent}/NAME",
        )


def rows(outcomes: Sequence[Outcome]) -> list[TestRow]:
    """All tests: those that differ between boards first, then those that failed, then the others.

    A board on which the suite did not run differs from none.
    """
    ran = [outcome for outcome in outcomes if outcome.document]
    names = list(dict.fromkeys(name for outcome in ran for name in outcome.tests))
    tests = [outcome.tests for outcome in ran]
    found = [TestRow(nodeid=name, cells=tuple(item.get(name) for item in tests)) for name in names]
    return sorted(found, key=lambda row: (not row.differs, not row.bad))


def write(config: Config, outcomes: Sequence[Outcome], folder: Path) -> Merged:
    """Write ``junit.xml`` and ``index.html`` into ``folder``."""
    merged = Merged(outcomes=tuple(outcomes), junit=folder / "junit.xml", report=folder / "index.html")
    with files.replacing(merged.junit) as staged:
        ElementTree.ElementTree(junit(outcomes)).write(staged, encoding="utf-8", xml_declaration=True)
    page = templates.render(
        _TEMPLATE,
        {
            "target": config.image.label,
            "merged": merged,
            "ran": [outcome for outcome in outcomes if outcome.document],
            "rows": rows(outcomes),
            "marks": MARKS,
        },
        trim_blocks=True,
        html=True,
    )
    files.write_text_atomically(merged.report, page)
    return merged


def junit(outcomes: Sequence[Outcome]) -> ElementTree.Element:
    """One test suite per board. The class names begin with the board, so that every test is counted once per board."""
    top = ElementTree.Element("testsuites", name="lab")
    for outcome in outcomes:
        if not outcome.document or not outcome.paths.junit.is_file():
            suite = ElementTree.SubElement(top, "testsuite", name=outcome.board, tests="0", failures="0", errors="0")
            _add_error(suite, outcome, "boot")
            continue
        for suite in ElementTree.parse(outcome.paths.junit).getroot().iter("testsuite"):  # noqa: S314 - our own file
            suite.set("name", outcome.board)
            for case in suite.iter("testcase"):
                case.set("classname", f"{outcome.board}.{case.get('classname', '')}")
            if outcome.reason:
                _add_error(suite, outcome, "run")
            top.append(suite)
    return top


def _add_error(suite: ElementTree.Element, outcome: Outcome, name: str) -> None:
    """Add a case that failed with the error of the board."""
    case = ElementTree.SubElement(suite, "testcase", classname=outcome.board, name=name)
    fault = ElementTree.SubElement(case, "error", message=outcome.reason or "no result")
    fault.text = outcome.error
    for counter in ("tests", "errors"):
        suite.set(counter, str(int(suite.get(counter, "0")) + 1))
