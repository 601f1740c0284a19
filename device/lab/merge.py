"""One JUnit file, one evidence file and one HTML page for a run on several boards.

The page has a column per board, with the tests that differ first, and a chart with a line per board.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from device import report
from device.record import BOARD_LOST, PYTEST_ENDED
from device.suite_result import Paths
from toolchain import files, templates
from toolchain.config import Config
from toolchain.errors import DeviceTestsFailed

_TEMPLATE = Path(__file__).resolve().parent.parent / "templates" / "lab.html.j2"
_BAD = ("failed", "error")
_COUNTS = ("passed", "failed", "errors", "skipped")
_SHOWN = 10
"""How many tests without a result a message names."""
_COLOURS = 8
"""The colours in the template. The ninth and later boards get the same ones with dashed lines."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one board. Without ``document`` (its evidence) the suite did not run there, for ``error``.

    With both, a test failed, or the error has another cause, such as a board with files that were not built here.
    """

    board: str
    paths: Paths
    error: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    evidence_sha256: str = ""
    suites: tuple[ElementTree.Element, ...] = ()
    """The suites in its JUnit file. The files are read once, because a later run on the board replaces them."""
    files: tuple[str, ...] = ()
    """The test files of a board that had to run only a part of the suite."""

    @classmethod
    def of(cls, board: str, paths: Paths, error: str, files: tuple[str, ...] = ()) -> Outcome:
        """The outcome of a run that has just ended, with or without evidence."""
        if not paths.evidence.is_file():
            return cls(board=board, paths=paths, error=error, files=files)
        content = paths.evidence.read_bytes()
        return cls(
            board=board,
            paths=paths,
            error=error,
            document=json.loads(content),
            evidence_sha256=hashlib.sha256(content).hexdigest(),
            suites=tuple(ElementTree.parse(paths.junit).getroot().iter("testsuite")),  # noqa: S314 - our own file
            files=files,
        )

    @property
    def reason(self) -> str:
        """The first line of the error; empty if tests that failed are the reason."""
        counted = self.document.get("results", {})
        return "" if counted.get("failed") or counted.get("errors") else self.error.partition("\n")[0]

    @property
    def tests(self) -> dict[str, Mapping[str, Any]]:
        """Its tests by node ID."""
        return {test["nodeid"]: test for test in self.document["results"]["tests"]} if self.document else {}

    @property
    def not_run(self) -> list[str]:
        """The tests without a result; of a board without evidence, the test files of its part."""
        if not self.document:
            return list(self.files)
        return [name for name, test in self.tests.items() if test["text"] in (BOARD_LOST, PYTEST_ENDED)]

    def row(self) -> dict[str, Any]:
        """Its entry in the merged evidence."""
        made: dict[str, Any] = {"board": self.board, "error": self.error}
        if self.files:
            made |= {"test_files": list(self.files), "not_run": self.not_run}
        if self.document:
            device = self.document["device"]
            made |= {key: device.get(key, "") for key in ("model", "kernel", "execution", "execution_reason")}
            made["image"] = {key: self.document["image"].get(key, "") for key in ("reference", "id")}
            made["results"] = {key: self.document["results"][key] for key in _COUNTS}
            made["evidence"] = {
                "path": f"{self.board}/{self.paths.evidence.name}",
                "sha256": self.evidence_sha256,
            }
        return made


@dataclass(frozen=True, kw_only=True)
class TestRow:
    """One test, with its outcome on each board (None where it did not run)."""

    __test__ = False

    nodeid: str
    cells: tuple[Mapping[str, Any] | None, ...]
    differs: bool
    """Whether the boards disagree."""

    @property
    def bad(self) -> bool:
        """Whether it failed on a board."""
        return any(cell and cell["outcome"] in _BAD for cell in self.cells)


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
        """The results of all boards together."""
        ran = [outcome.document["results"] for outcome in self.outcomes if outcome.document]
        return {name: sum(counted[name] for counted in ran) for name in _COUNTS}

    @property
    def ok(self) -> bool:
        """Whether every board passed. A part of a suite passes without any test that passed; a suite does not."""
        return self.counts["passed"] > 0 and not any(outcome.error for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """One line per board."""
        found = []
        for outcome in self.outcomes:
            if outcome.document:
                text = _counted(outcome.document["results"]) + (f" ({outcome.reason})" if outcome.reason else "")
            else:
                text = f"did not run: {outcome.reason}"
            if outcome.files and (missing := outcome.not_run):
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                text += f"; without a result: {', '.join(missing[:_SHOWN])}{more}"
            found.append(f"{outcome.board}: {text}")
        return found

    def summary(self) -> str:
        """The text that the task prints."""
        title = f"device suite on {len(self.outcomes)} boards"
        if self.sharded:
            title = f"device suite, split between {len(self.outcomes)} boards: {_counted(self.counts)}"
        lines = [title, *(f"    {line}" for line in self.lines())]
        lines += [f"    report:   {self.paths.report}", f"    evidence: {self.paths.evidence}"]
        return "\n".join([*lines, f"    JUnit:    {self.paths.junit}"])

    def error(self) -> DeviceTestsFailed:
        """The error for a run that did not pass."""
        return DeviceTestsFailed(
            "the device suite did not pass" + ("" if self.sharded else " on every board"),
            expected="every board to boot, and every test to pass or to be skipped",
            found="; ".join(self.lines()),
            fix=f"open {self.paths.report}; the report of each board is in {self.paths.folder}/NAME",
        )


def _counted(results: Mapping[str, Any]) -> str:
    return ", ".join(f"{results[name]} {name}" for name in _COUNTS)


def rows(outcomes: Sequence[Outcome]) -> list[TestRow]:
    """All tests: those that differ between boards first, then those that failed, then the others.

    A board on which the suite did not run differs from none; nor do boards that ran different parts of the suite.
    """
    tests = [outcome.tests for outcome in outcomes if outcome.document]
    sharded = any(outcome.files for outcome in outcomes)
    found = []
    for name in dict.fromkeys(name for item in tests for name in item):
        cells = tuple(item.get(name) for item in tests)
        results = {cell["outcome"] if cell else None for cell in cells}
        found.append(TestRow(nodeid=name, cells=cells, differs=not sharded and len(results) > 1))
    return sorted(found, key=lambda row: (not row.differs, not row.bad))


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
    ``made``    the time when the run ended, UTC, ISO 8601
    ``target``  the label of the image
    ``boards``  ``board`` and ``error`` of each board; if the suite ran there, ``model``, ``kernel``, ``execution`` and
                ``execution_reason``, the ``image``'s ``reference`` and ``id``, the counts of the ``results``, and
                ``path`` and ``sha256`` of its own ``evidence``. If it ran only a part of the suite, its ``test_files``
                and the tests that did ``not_run``, see ``Outcome.not_run``.
    """
    return {
        "schema": 1,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": config.image.label,
        "boards": [outcome.row() for outcome in outcomes],
    }


def chart(outcomes: Sequence[Outcome]) -> str:
    """A chart per way to multiply, with a line per board, as one SVG element; empty without timing."""
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
    """One test suite per board. The class names begin with the board, so that every test is counted once per board."""
    top = ElementTree.Element("testsuites", name="lab")
    for outcome in outcomes:
        if not outcome.document:
            suite = ElementTree.SubElement(top, "testsuite", name=outcome.board, tests="0", failures="0", errors="0")
            _add_error(suite, outcome, "boot")
            for name in outcome.files:
                _add_error(suite, outcome, name)
            continue
        for suite in copy.deepcopy(outcome.suites):
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
