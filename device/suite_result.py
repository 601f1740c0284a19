"""The files and the result of one device suite run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from device import chain, report
from device.record import COUNTS, Record, counted
from toolchain import files
from toolchain.errors import ChainBroken, DeviceTestsFailed, UserError


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The result of a run. ``seconds`` includes the boot time; ``device.evidence`` defines ``execution``."""

    passed: int
    failed: int
    errors: int
    skipped: int
    seconds: float
    execution: str
    label: str
    without: tuple[str, ...]
    left_out: tuple[str, ...]
    """Pockets that are missing from the image because their index could not be verified."""
    broken: tuple[str, ...]
    """Links of the chain that do not hold: the tested files are not the files that were built."""
    warnings: tuple[str, ...]
    """Links that do not hold, possibly intentionally."""
    junit: Path
    evidence: Path
    report: Path

    @property
    def ok(self) -> bool:
        """Whether at least one test passed, no test failed, and the tested files are those that were built."""
        return self.passed > 0 and self.clean

    @property
    def clean(self) -> bool:
        """Whether no test failed and the tested files are those that were built."""
        return not self.failed and not self.errors and not self.broken

    def summary(self) -> str:
        """Return the text that the task prints."""
        lines = [f"device suite: {counted(vars(self))} in {self.seconds:.0f} s", f"    ran on:   {self.label}"]
        if self.without:
            lines.append(f"    WITHOUT:  {', '.join(self.without)} (not in the image, so not tested)")
        if self.left_out:
            lines.append(f"    WITHOUT:  the updates from {', '.join(self.left_out)} (index not verified in the build)")
        lines += [f"    BROKEN:   {text}" for text in self.broken]
        lines += [f"    WARNING:  {text}" for text in self.warnings]
        lines += [f"    report:   {self.report}", f"    evidence: {self.evidence}", f"    JUnit:    {self.junit}"]
        return "\n".join(lines)


class Paths:
    """The files that a run writes."""

    def __init__(self, *, folder: Path) -> None:
        self.folder = folder
        self.junit = folder / "junit.xml"
        self.evidence = folder / "evidence.json"
        self.report = folder / "index.html"
        self.results = (self.junit, self.evidence, self.report)  # replaced together
        self.console = folder / "console.log"  # the output of the serial console
        self.events = folder / "events.jsonl"  # the board's events during the last runs (toolchain.board_events)
        self.log = folder / "suite.log"  # the output of the suite on the board
        self.record = folder / "record.jsonl"  # the lines that the board sent
        self.environment = folder / "environment.yaml"  # the labgrid environment that describes the board
        self.checksums = folder / "deployed.sha256"  # the files deployed to the board, for sha256sum --check
        self.lock = folder / ".lock"

    @property
    def staging(self) -> Paths:
        """The folder for the results of a run in progress."""
        return Paths(folder=self.folder / ".results")


def label_junit(path: Path, document: Mapping[str, Any]) -> None:
    """Add properties to the JUnit file, or remove the file if it is incomplete.

    The properties state the machine, the tested commit and image, and the links of the chain (``device.chain``) that do
    not hold.
    """
    try:
        tree = ElementTree.parse(path)  # noqa: S314 - written by pytest on this PC
    except FileNotFoundError:
        return
    except ElementTree.ParseError:
        path.unlink()  # pytest was killed while it wrote the file
        return
    for suite in tree.getroot().iter("testsuite"):
        properties = suite.find("properties")
        if properties is None:
            properties = ElementTree.Element("properties")
            suite.insert(0, properties)
        for name, value in (
            ("execution", document["device"]["execution"]),
            ("execution_label", report.execution_label(document)),
            ("through", document["device"]["through"]),
            ("model", document["device"].get("model", "")),
            ("cpu", document["device"].get("cpu", "")),
            ("kernel", document["device"].get("kernel", "")),
            ("commit", document["source"]["commit"]),
            ("image_id", document["image"]["id"]),
            ("rootfs_sha256", document["rootfs"]["sha256"]),
            ("without", ", ".join(document["without"])),
            ("left_out", ", ".join(document["image"]["left_out"])),
            ("image_commit", document["image"]["source"].get("commit", "")),
            ("broken", "; ".join(chain.broken_links(document, "error"))),
        ):
            ElementTree.SubElement(properties, "property", name=name, value=str(value))
    with files.replacing(path) as staged:
        tree.write(staged, encoding="utf-8", xml_declaration=True)


def result_of(document: Mapping[str, Any], paths: Paths, seconds: float) -> SuiteResult:
    """Return the result of a run from its evidence."""
    return SuiteResult(
        **{name: document["results"][name] for name in COUNTS},
        seconds=seconds,
        execution=document["device"]["execution"],
        label=report.execution_label(document),
        without=tuple(document["without"]),
        left_out=tuple(document["image"]["left_out"]),
        broken=tuple(chain.broken_links(document, "error")),
        warnings=tuple(chain.broken_links(document, "warning")),
        junit=paths.junit,
        evidence=paths.evidence,
        report=paths.report,
    )


def error_of(result: SuiteResult, record: Record) -> UserError:
    """Return the error for a run that did not pass."""
    bad = [test for test in record.tests if test.outcome in ("failed", "error")]
    if result.broken and result.passed and not bad:
        return ChainBroken(
            f"{result.passed} tests passed, but the tested files are not the files that were built",
            expected="a board that runs the exported tree, in which all files are identical to those of the last build",
            found="; ".join(result.broken),
            fix="run ./inv build-image and ./inv export-nfsroot, or run ./inv deploy; then restart the board and run "
            f"the suite again; {result.report} lists every link from the commit to the board",
        )
    named = ", ".join(test.nodeid for test in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return DeviceTestsFailed(
        "the device suite did not pass" if bad else "no test of the device suite ran",
        expected="every test to pass, or to be skipped for a stated reason",
        found=counted(vars(result)) + (f": {named}" if named else ""),
        fix=f"open {result.report}, which contains the text of each failure",
    )
