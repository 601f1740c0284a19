"""Merge the results of several boards into one JUnit file, one evidence file and one HTML page.

On the page, each board has a column in the table of tests and a line in the chart. Tests whose results differ between
boards come first.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from device import report
from device.record import BOARD_LOST, COUNTS, PYTEST_ENDED, counted
from device.suite_result import Paths
from toolchain import files, templates
from toolchain.config import Config
from toolchain.errors import DeviceTestsFailed
from toolchain.text import printable

_TEMPLATE = Path(__file__).resolve().parent.parent / "templates" / "lab.html.j2"
_BAD = ("failed", "error")
_NOT_RUN = (BOARD_LOST, PYTEST_ENDED)
_SHOWN = 10
"""The maximum number of tests without a result that a message lists."""
_COLOURS = 8
"""The number of colours in the template. The lines of further boards have the same colours, but are dashed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result on one board.

    ``document`` is the board's evidence. If ``document`` is empty, the suite did not run on the board, and ``error``
    says why. If ``document`` and ``error`` are both set, the suite ran, but a test failed or another error occurred;
    for example, the board had files that were not built on this PC.
    """

    board: str
    paths: Paths
    error: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    evidence_sha256: str = ""
    suites: tuple[ElementTree.Element, ...] = ()
    """The test suites in the board's JUnit file, which is read only once, because the board's next run replaces it.

    Empty if pytest was killed before it wrote this file.
    """
    files: tuple[str, ...] = ()
    """The test files (or tests) that were assigned to the board; empty if the board had to run the whole suite."""
    turn: int = 1
    """The turn in which the board ran. After turn 1, boards run tests that had no result on another board."""
    moved: bool = False
    """Whether the tests without a result were run on other boards in the next turn."""

    @classmethod
    def of(cls, board: str, paths: Paths, error: str, files: tuple[str, ...] = (), turn: int = 1) -> Outcome:
        """The outcome of a run that has just ended, even if the run wrote no evidence."""
        made = cls(board=board, paths=paths, error=error, files=files, turn=turn)
        if not paths.evidence.is_file():
            return made
        content = paths.evidence.read_bytes()
        suites: tuple[ElementTree.Element, ...] = ()
        if paths.junit.is_file():
            suites = tuple(ElementTree.parse(paths.junit).getroot().iter("testsuite"))  # noqa: S314 - a file of this program
        return replace(
            made, document=json.loads(content), evidence_sha256=hashlib.sha256(content).hexdigest(), suites=suites
        )

    @property
    def label(self) -> str:
        """The board's name, followed by the turn unless this is the first turn."""
        return self.board if self.turn == 1 else f"{self.board}, turn {self.turn}"

    @property
    def folder(self) -> str:
        """The board's report folder, relative to the folder of the merged report."""
        return folder_of(self.board, self.turn)

    @property
    def reason(self) -> str:
        """The first line of the error; empty if a test failed or ended with an error."""
        counts = self.counts
        return "" if counts["failed"] or counts["errors"] else self.error.partition("\n")[0]

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests for each result, excluding tests that were moved to other boards."""
        results = self.document.get("results", {})
        counts = {name: int(results.get(name, 0)) for name in COUNTS}
        if self.document and self.moved:
            counts["errors"] -= len(self.without_result)
        return counts

    @property
    def tests(self) -> dict[str, Mapping[str, Any]]:
        """The board's tests by node ID, excluding those that were moved to other boards."""
        found = self.document["results"]["tests"] if self.document else []
        return {test["nodeid"]: test for test in found if not (self.moved and test["text"] in _NOT_RUN)}

    @property
    def without_result(self) -> list[str]:
        """The tests that did not run on this board.

        If the board has no evidence, these are all tests assigned to it.
        """
        if not self.document:
            return list(self.files)
        return [test["nodeid"] for test in self.document["results"]["tests"] if test["text"] in _NOT_RUN]

    @property
    def not_run(self) -> list[str]:
        """The tests that ran neither on this board nor on another one."""
        return [] if self.moved else self.without_result

    @property
    def image(self) -> str:
        """The tag of the board's image, such as ``trixie-arm64``; empty if the image is not known."""
        return str(self.document["image"].get("reference") or "").rpartition(":")[2]

    def row(self) -> dict[str, Any]:
        """The board's entry in the merged evidence."""
        made: dict[str, Any] = {"board": self.board, "error": self.error}
        if self.files:
            made |= {"turn": self.turn, "test_files": list(self.files), "not_run": self.not_run}
            made["moved"] = self.without_result if self.moved else []
        if self.document:
            device = self.document["device"]
            made |= {key: device.get(key, "") for key in ("model", "kernel", "execution", "execution_reason")}
            made["image"] = {key: self.document["image"].get(key, "") for key in ("reference", "id")}
            made["results"] = self.counts
            made["evidence"] = {
                "path": f"{self.folder}/{self.paths.evidence.name}",
                "sha256": self.evidence_sha256,
            }
        return made


def folder_of(board: str, turn: int) -> str:
    """The path of a board's report folder for one turn, relative to the folder of the merged report."""
    return board if turn == 1 else f"{board}/turn{turn}"


class Row(NamedTuple):
    """A test and its outcome on each board, which is None if the test did not run there."""

    nodeid: str
    cells: tuple[Mapping[str, Any] | None, ...]
    differs: bool
    """Whether the outcome differs between boards."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The merged result."""

    outcomes: tuple[Outcome, ...]
    paths: Paths

    @property
    def sharded(self) -> bool:
        """Whether each board ran only a part of the suite."""
        return any(outcome.files for outcome in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests for each result, summed over all boards."""
        return {name: sum(outcome.counts[name] for outcome in self.outcomes) for name in COUNTS}

    @property
    def boards(self) -> int:
        """The number of boards."""
        return len({outcome.board for outcome in self.outcomes})

    @property
    def ok(self) -> bool:
        """True if no board reported an error, and at least one test passed on at least one board."""
        return self.counts["passed"] > 0 and not any(outcome.error for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """One line of text for each board."""
        found = []
        for outcome in self.outcomes:
            if outcome.document:
                text = counted(outcome.counts) + (f" ({outcome.reason})" if outcome.reason else "")
            else:
                text = f"did not run: {outcome.reason}"
            if outcome.files and (missing := outcome.without_result):
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                where = "run on another board" if outcome.moved else "without a result"
                text += f"; {where}: {', '.join(missing[:_SHOWN])}{more}"
            found.append(f"{outcome.label}: {text}")
        return found

    def summary(self) -> str:
        """The task's output."""
        title = f"device suite on {self.boards} boards"
        if self.sharded:
            title = f"device suite, split between {self.boards} boards: {counted(self.counts)}"
        lines = [title, *(f"    {line}" for line in self.lines())]
        lines += [f"    report:   {self.paths.report}", f"    evidence: {self.paths.evidence}"]
        return "\n".join([*lines, f"    JUnit:    {self.paths.junit}"])

    def error(self) -> DeviceTestsFailed:
        """The error to raise if the run did not pass."""
        return DeviceTestsFailed(
            "the device suite did not pass" + ("" if self.sharded else " on every board"),
            expected="every board to boot, and every test to pass or to be skipped",
            found="; ".join(self.lines()),
            fix=f"open {self.paths.report}; each board's report is in {self.paths.folder}/NAME",
        )


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """All tests: first those whose results differ between boards, then those that failed, then all others.

    Boards on which the suite did not run are ignored. If each board ran only a part of the suite, the boards' results
    are not compared.
    """
    tests = [outcome.tests for outcome in outcomes if outcome.document]
    sharded = any(outcome.files for outcome in outcomes)
    found = []
    for name in dict.fromkeys(name for item in tests for name in item):
        cells = tuple(item.get(name) for item in tests)
        results = {cell["outcome"] if cell else None for cell in cells}
        found.append(Row(name, cells, differs=not sharded and len(results) > 1))
    return sorted(
        found, key=lambda row: (not row.differs, not any(cell and cell["outcome"] in _BAD for cell in row.cells))
    )


def write(config: Config, outcomes: Sequence[Outcome], folder: Path) -> Merged:
    """Write ``junit.xml``, ``evidence.json`` and ``index.html`` into ``folder``."""
    merged = Merged(outcomes=tuple(outcomes), paths=Paths(folder=folder))
    files.write_text_atomically(merged.paths.evidence, json.dumps(evidence(config, outcomes), indent=2) + "\n")
    with files.replacing(merged.paths.junit) as staged:
        ElementTree.ElementTree(junit(outcomes)).write(staged, encoding="utf-8", xml_declaration=True)
    page = templates.render(
        _TEMPLATE,
        {
            "target": config.image.label,
            "merged": merged,
            "ran": [outcome for outcome in outcomes if outcome.document],
            "rows": rows(outcomes),
            "marks": report.MARKS,
            "chart": chart(outcomes),
            "evidence_sha256": files.sha256_of(merged.paths.evidence),
        },
        trim_blocks=True,
        html=True,
    )
    files.write_text_atomically(merged.paths.report, page)
    return merged


def evidence(config: Config, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The merged evidence, schema 1.

    ``schema``  1
    ``made``    the time at which the run ended (UTC, ISO 8601)
    ``target``  the image's label
    ``boards``  one entry for each board and turn, with ``board`` (the name) and ``error``. If the suite ran on
                the board, the entry also contains ``model``, ``kernel``, ``execution``, ``execution_reason``, ``image``
                (``reference`` and ``id``), ``results`` (counts), and ``evidence`` (``path`` and ``sha256`` of the
                board's own evidence). If the board had to run only a part of the suite, the entry also contains
                ``turn``, ``test_files``, ``not_run`` (tests that ran on no board) and ``moved`` (tests that ran on
                another board in the next turn).
    """
    return {
        "schema": 1,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": config.image.label,
        "boards": [outcome.row() for outcome in outcomes],
    }


def chart(outcomes: Sequence[Outcome]) -> str:
    """One SVG element with a chart per multiplication method and a line per board; empty if there is no timing data."""
    charts: dict[str, list[report.Series]] = {}
    timed = [outcome for outcome in outcomes if outcome.document and outcome.document["timing"].get("rows")]
    for number, outcome in enumerate(timed):
        name = f"{outcome.board}: {report.execution_label(outcome.document)}"
        css, dashed = f"--line{number % _COLOURS}", number >= _COLOURS
        for line in report.series_of(outcome.document["timing"]):
            if not line.published:
                charts.setdefault(line.name, []).append(report.Series(name, css, line.points, dashed=dashed))
    return report.svg(charts, height=timed[0].document["timing"]["height"], legend_columns=1) if charts else ""


def junit(outcomes: Sequence[Outcome]) -> ElementTree.Element:
    """Return the merged JUnit document, in which each board has a test suite.

    Each class name begins with a board's name, so that tests are counted per board.
    """
    top = ElementTree.Element("testsuites", name="lab")
    for outcome in outcomes:
        if not outcome.suites:
            suite = ElementTree.SubElement(top, "testsuite", name=outcome.label, tests="0", failures="0", errors="0")
            _add_error(suite, outcome, "run" if outcome.document else "boot")
            for name in outcome.not_run:
                _add_error(suite, outcome, name)
            continue
        for suite in copy.deepcopy(outcome.suites):
            suite.set("name", outcome.label)
            for case in suite.findall("testcase"):
                if outcome.moved and case.findtext("error") in _NOT_RUN:
                    suite.remove(case)
                    _count(suite, -1)
                case.set("classname", f"{outcome.board}.{case.get('classname', '')}")
            if outcome.reason:
                _add_error(suite, outcome, "run")
            top.append(suite)
    return top


def _add_error(suite: ElementTree.Element, outcome: Outcome, name: str) -> None:
    """Add a failed test case that contains the board's error."""
    case = ElementTree.SubElement(suite, "testcase", classname=outcome.board, name=name)
    # XML cannot contain control characters, such as those in a program's output.
    fault = ElementTree.SubElement(case, "error", message=printable(outcome.reason) or "no result")
    fault.text = printable(outcome.error)
    _count(suite, 1)


def _count(suite: ElementTree.Element, errors: int) -> None:
    """Add ``errors`` to a suite's number of tests and to its number of errors."""
    for counter in ("tests", "errors"):
        suite.set(counter, str(int(suite.get(counter, "0")) + errors))
