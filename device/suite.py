"""Run the device suite and report it: what ``./inv test-on-pi`` does.

    exported tree → environment for labgrid → pytest (device.drive) → record → JUnit XML, evidence, HTML report

pytest runs in a process of its own, so that its plugins and this program do not meet; what it saw comes back in the
record, line by line, and is there even when the run breaks off.

One run at a time writes to a build folder's report. The results (JUnit XML, evidence, HTML report) are written aside
and take the places of the earlier ones together, at the end: a run that breaks off leaves those whole. The logs beside
them are of the run that was started last.
"""

# ruff: noqa: PT028 - test_on_pi is named after its task; it is not a test

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from _pytest.mark.expression import Expression

from device import evidence, report
from device.drive import ANNOUNCED
from nfsroot import access
from nfsroot import bare_system as own_system
from nfsroot.layout import Layout, require_export
from nfsroot.qemu import HOST_SEEN_FROM_GUEST
from toolchain import caller, errors, files, process, progress, templates
from toolchain.addresses import server_address, subnet_of
from toolchain.config import ROOT, Config
from toolchain.errors import (
    ArtefactMissing,
    ChainBroken,
    CommandFailed,
    DeviceTestsFailed,
    InUse,
    RootNeeded,
    UserError,
)

SUITE_LIMIT_S = 5400.0
"""For the tests on the board; a starved emulated machine needs a hundred times what a Pi does."""

TIMING_BUDGET_S = 120.0
"""What timing.py plans with; widths that would not fit are left out and listed."""

_MARGIN_S = 600.0
_LOGIN_LIMIT_S = 300.0

_TEMPLATE = Path(__file__).resolve().parent / "templates" / "environment.yaml.j2"


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """How a run ended. ``seconds`` is the whole run, the boot included; ``execution`` as in ``device.evidence``."""

    passed: int
    failed: int
    errors: int
    skipped: int
    seconds: float
    execution: str
    label: str
    without: tuple[str, ...]
    left_out: tuple[str, ...]
    """Pockets that the image lacks, because their index could not be verified."""
    broken: tuple[str, ...]
    """Links of the chain whose failing means that what was tested is not what was built."""
    warnings: tuple[str, ...]
    """Links that do not hold and may be so on purpose."""
    junit: Path
    evidence: Path
    report: Path

    @property
    def ok(self) -> bool:
        """Whether something ran, nothing failed, and it ran on what was built."""
        return self.passed > 0 and not self.failed and not self.errors and not self.broken

    def summary(self) -> str:
        """What the task prints."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.errors} errors, {self.skipped} skipped"
        lines = [f"device suite: {counts} in {self.seconds:.0f} s", f"    ran on:   {self.label}"]
        if self.without:
            lines.append(f"    WITHOUT:  {', '.join(self.without)} (not in the image, so not tested)")
        if self.left_out:
            lines.append(f"    WITHOUT:  the updates of {', '.join(self.left_out)} (index not verified at the build)")
        lines += [f"    BROKEN:   {text}" for text in self.broken]
        lines += [f"    WARNING:  {text}" for text in self.warnings]
        lines += [f"    report:   {self.report}", f"    evidence: {self.evidence}", f"    JUnit:    {self.junit}"]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where a run leaves what it makes."""

    folder: Path

    @property
    def junit(self) -> Path:
        """Results as JUnit XML."""
        return self.folder / "junit.xml"

    @property
    def evidence(self) -> Path:
        """The evidence file."""
        return self.folder / "evidence.json"

    @property
    def report(self) -> Path:
        """The report for people."""
        return self.folder / "index.html"

    @property
    def console(self) -> Path:
        """Serial console of the virtual machine."""
        return self.folder / "console.log"

    @property
    def log(self) -> Path:
        """All that the suite printed on the board."""
        return self.folder / "suite.log"

    @property
    def record(self) -> Path:
        """The board's lines."""
        return self.folder / "record.jsonl"

    @property
    def environment(self) -> Path:
        """The board, described for labgrid."""
        return self.folder / "environment.yaml"

    @property
    def lock(self) -> Path:
        """Held by a run, so that there is one at a time."""
        return self.folder / ".lock"

    @property
    def aside(self) -> Paths:
        """Where a run writes its results; gone when none runs."""
        return Paths(folder=self.folder / ".results")

    @property
    def results(self) -> tuple[Path, ...]:
        """What belongs together."""
        return self.junit, self.evidence, self.report


def test_on_pi(
    config: Config,
    *,
    host: str | None = None,
    qemu: bool = False,
    chroot: bool = False,
    init: str | None = None,
    keyword: str | None = None,
    timing: bool = True,
    suite: Path | None = None,
) -> SuiteResult:
    """Run the device suite on a board, or in a virtual machine that boots the exported tree, and report it.

    ``host`` ([USER@]HOST[:PORT]) is a board that is up; without it ``device.host`` counts, and without that, or with
    ``qemu``, a virtual machine. ``chroot`` runs the suite through enter-nfsroot: on a ``host`` from the system that it
    has, in the virtual machine from a bare one (nfsroot.bare_system). ``init`` is lean or systemd
    (virtual machine only), ``keyword`` selects tests as pytest's ``-k``. ``suite`` is a folder of tests to run in place
    of ``tests/device``.

    The report is written whatever the tests say. Raises DeviceTestsFailed when a test failed or none ran, ChainBroken
    when all passed, but not on what was built, InUse while another run writes to the same report, ArtefactMissing
    without an exported tree, RootNeeded where it is to be served, BoardSilent, AccessDenied, AccessDenied,
    UserError; UserError at once where ``keyword`` is no expression.
    """
    if host is not None and qemu:
        raise UserError(
            "a board and a virtual machine were asked for at once",
            expected="--host or --qemu",
            found=f"--host {host} --qemu",
            fix="leave one of them out",
        )
    host = None if qemu else host or config.device.host or None
    if keyword:
        _require_expression(keyword)
    if init is not None:
        config = replace(config, device=replace(config.device, init=_known_init(init)))
    paths = Paths(folder=config.target_root / "report")
    with _alone(paths):
        for stale in (paths.record, paths.log, paths.console):
            files.remove(stale)
        prepare(config, paths, host=host, chroot=chroot, timing=timing, suite=suite)
        began = time.monotonic()
        where = f"on {host}" if host else f"in QEMU ({config.device.init} init)"
        with progress.step(f"device suite {where}{' through enter-nfsroot' if chroot else ''}"):
            done = _run_pytest(config, paths, keyword or "")
        record = evidence.Record.read(paths.record)
        if record.error is not None:
            raise _raised_again(record.error)
        if not record.tests and not record.facts:
            raise CommandFailed(
                "the device suite broke off before the board said anything",
                returncode=done.returncode,
                found=process.explain_exit(done.returncode),
                tail=done.output[-4000:],
            )
        document = evidence.collect(
            config,
            record,
            started_by_us=host is None,
            access=host or "QEMU",
            through="enter-nfsroot" if chroot else "boot",
        )
        aside = paths.aside
        evidence.write(document, aside.evidence)
        label_junit(aside.junit, document)
        report.write(document, aside.report, evidence_file=aside.evidence)
        _swap_in(paths)
    result = _result(document, paths, time.monotonic() - began)
    if not result.ok:
        raise _failed(result, record)
    return result


@contextlib.contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """Be the only run that writes there, with an empty folder for its results. Raises InUse, RootNeeded."""
    taken = InUse(
        f"another run of the device suite writes to {paths.folder}",
        expected=f"nobody holds {paths.lock}",
        found="a lock",
        fix="wait for the other run, or end it, or set build.folder to another folder",
    )
    with contextlib.ExitStack() as stack:
        try:
            paths.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.held(paths.lock, taken))
        except PermissionError as fault:
            raise RootNeeded(
                f"{paths.folder} belongs to another user",
                expected="a folder for the report that you may write to",
                found=str(fault),
                fix=f"as whatever tested there: {caller.as_root('./inv test-on-pi')}; "
                "or set build.folder to a folder of your own",
            ) from fault
        files.remove(paths.aside.folder)  # a run that was killed leaves it
        paths.aside.folder.mkdir()
        try:
            yield
        finally:
            files.remove(paths.aside.folder)


def _swap_in(paths: Paths) -> None:
    """Put the results in place.

    Should the power fail between them, something is missing: old and new ones never stand side by side.
    """
    with files.swapping():
        for old in paths.results[1:]:
            files.remove(old)
        for new, place in zip(paths.aside.results, paths.results, strict=True):
            if new.is_file():
                os.replace(new, place)
            else:
                files.remove(place)


def prepare(
    config: Config, paths: Paths, *, host: str | None, chroot: bool, timing: bool, suite: Path | None = None
) -> None:
    """Write labgrid's environment for this run, and export the system that is booted to enter the tree.

    Raises ArtefactMissing without an exported tree, RootNeeded where it is to be served, and what that export raises.
    """
    again = "./inv test-on-pi" + (f" --host={host}" if host else "") + (" --chroot" if chroot else "")
    served = host is None
    if served:
        process.require_root("to serve the exported tree to the virtual machine", again)
    layout = Layout.of(config)
    values: dict[str, Any] = {
        "tree": "",
        "architecture": config.image.architecture,
        "machine": None,
        "server_address": "127.0.0.1",
        "server_port": 0,
        "server_clients": ["127.0.0.1"],
        "server_log": str(paths.folder / "nfs-server.log"),
        "also": "",
        "login_timeout_s": min(config.device.boot_timeout_s, _LOGIN_LIMIT_S),
        "key": "",
        "known_hosts": "",
    }
    options: dict[str, Any] = {
        "record": str(paths.record),
        "log": str(paths.log),
        "suite_limit_s": SUITE_LIMIT_S,
        "timing_limit_s": 5 * TIMING_BUDGET_S if timing else 0.0,
        "timing": [f"--budget-s={TIMING_BUDGET_S:g}"],
    }
    if suite is not None:
        options["suite"] = str(suite.resolve())
    require_export(layout)
    values["tree"] = str(layout.tree)
    booted = layout
    if host is None and chroot:
        booted = _own_system(config)
        values["also"] = str(booted.tree) if booted != layout else ""
    if host is None or not chroot:
        values["key"] = str(booted.client_key)
        values["known_hosts"] = str(access.pin(booted.known_hosts, paths.folder / "known_hosts"))
    if host is None:
        values["machine"] = {
            "console": str(paths.console),
            "init": config.device.init,
            "memory_mib": config.device.memory_mib,
            "cpus": config.device.cpus,
            "boot_timeout_s": config.device.boot_timeout_s,
            "extra_arguments": "",
        }
        options["private_network"] = True
        user, address, port = "root", "127.0.0.1", 22
        if chroot:
            options |= {"chroot": "served", "chroot_address": HOST_SEEN_FROM_GUEST}
    else:
        user, address, port = access.parse_host(host)
        if chroot:
            ours = server_address(config)
            if _answers(ours, config.nfs.port):
                progress.say(f"    an NFS server answers on {ours}:{config.nfs.port} already and is used")
                options["chroot"] = f"{ours}:{layout.tree}"
                options["chroot_port"] = config.nfs.port
            else:
                process.require_root("to serve the exported tree to the board", again)
                served = True
                values |= {
                    "server_address": ours,
                    "server_port": config.nfs.port,
                    "server_clients": [str(subnet_of(config)), *_addresses(address)],
                }
                options |= {"chroot": "served", "chroot_address": ours}
    text = templates.render(
        _TEMPLATE,
        {**values, "served": served, "user": user, "address": address, "port": port, "options": options},
        trim_blocks=True,
    )
    files.write_text_atomically(paths.environment, text)


def _own_system(config: Config) -> Layout:
    """What the virtual machine boots to enter the tree; the tree itself where the image for another is not here."""
    try:
        return own_system.ready(config)
    except ArtefactMissing as fault:
        progress.warn(
            f"{fault.summary}: the exported tree is booted, and entered once more (./inv build-image makes that image)"
        )
        return Layout.of(config)


def _run_pytest(config: Config, paths: Paths, keyword: str) -> process.Completed:
    process.require_program("setpriv", "to end the run together with this program")
    words = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        f"--rootdir={ROOT}",
        f"--confcutdir={ROOT / 'tests' / 'device'}",  # no conftest.py of a parent folder
        "-p",
        "no:cacheprovider",
        "-rfE",
    ]
    words += ["--color=no", "--tb=short", f"--junit-xml={paths.aside.junit}", "-o", "junit_suite_name=device"]
    words += ["-v", f"--lg-env={paths.environment}"]
    if keyword:
        words += ["-k", keyword]
    limit_s = config.device.boot_timeout_s + _LOGIN_LIMIT_S + SUITE_LIMIT_S + 5 * TIMING_BUDGET_S + _MARGIN_S
    with progress.bar("device suite") as bar:
        return process.run(
            [*words, str(ROOT / "tests" / "device")],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "COLUMNS": "160"},
            limit_s=limit_s,
            check=False,
            on_line=_Display(bar).show,
        )


class _Display:
    """What of pytest's lines the user sees: how far it is, and every test that did not pass."""

    def __init__(self, bar: progress.Bar) -> None:
        self._bar = bar
        self._total: float | None = None
        self._done = 0

    def show(self, line: str) -> None:
        """One line of pytest's output."""
        if line.startswith(ANNOUNCED):
            self._total = float(line.removeprefix(ANNOUNCED))
            progress.say(f"    the board is up and runs {self._total:.0f} tests")
            return
        found = re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(.*?)(?:\s+\[\s*\d+%\])?$", line)
        if found is None:
            return
        self._done += 1
        self._bar.update(self._done, total=self._total and max(self._total, self._done), note=found[1])
        if found[2] != "PASSED":
            progress.say(f"    {found[1]} {found[2]}{found[3]}")


def _raised_again(said: Mapping[str, Any]) -> UserError:
    """The error that ended the run in the other process."""
    kind = getattr(errors, str(said["kind"]), UserError)
    texts = {key: str(said[key]) for key in ("expected", "found", "fix")}
    if issubclass(kind, CommandFailed):
        texts["tail"] = str(said["tail"])
    made: UserError = kind(str(said["summary"]), **texts)
    return made


def label_junit(path: Path, document: Mapping[str, Any]) -> None:
    """Say in the JUnit file what it ran on: results without that are not evidence of anything."""
    if not path.is_file():
        return
    tree = ElementTree.parse(path)  # noqa: S314 - written by our own pytest
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
            ("kernel", document["device"].get("kernel", "")),
            ("commit", document["source"]["commit"]),
            ("image_id", document["image"]["id"]),
            ("rootfs_sha256", document["rootfs"]["sha256"]),
            ("without", ", ".join(document["without"])),
            ("left_out", ", ".join(document["image"]["left_out"])),
            ("image_commit", document["image"]["source"].get("commit", "")),
            ("broken", "; ".join(evidence.failing(document, "error"))),
        ):
            ElementTree.SubElement(properties, "property", name=name, value=str(value))
    with files.replacing(path) as aside:
        tree.write(aside, encoding="utf-8", xml_declaration=True)


def _result(document: Mapping[str, Any], paths: Paths, seconds: float) -> SuiteResult:
    counted = document["results"]
    return SuiteResult(
        passed=counted["passed"],
        failed=counted["failed"],
        errors=counted["errors"],
        skipped=counted["skipped"],
        seconds=seconds,
        execution=document["device"]["execution"],
        label=report.execution_label(document),
        without=tuple(document["without"]),
        left_out=tuple(document["image"]["left_out"]),
        broken=tuple(evidence.failing(document, "error")),
        warnings=tuple(evidence.failing(document, "warning")),
        junit=paths.junit,
        evidence=paths.evidence,
        report=paths.report,
    )


def _failed(result: SuiteResult, record: evidence.Record) -> UserError:
    bad = [test for test in record.tests if test.outcome in ("failed", "error")]
    if result.broken and result.passed and not bad:
        return ChainBroken(
            f"{result.passed} tests passed, but not on what was built",
            expected="the board runs the exported tree, and the tree holds what was built last",
            found="; ".join(result.broken),
            fix="run ./inv export-nfsroot (after ./inv build-image) or ./inv deploy, start the board anew, and test "
            f"again; {result.report} has every link",
        )
    named = ", ".join(test.nodeid for test in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    counts = f"{result.passed} passed, {result.failed} failed, {result.errors} errors, {result.skipped} skipped"
    return DeviceTestsFailed(
        "the device suite did not pass" if bad else "no test of the device suite ran",
        expected="every test passed, or skipped for a stated reason",
        found=f"{counts}" + (f": {named}" if named else ""),
        fix=f"open {result.report}, which has each failure's text",
    )


def _require_expression(keyword: str) -> None:
    """Refuse what is no expression of pytest's -k: the board's pytest would do so, after a boot.

    pytest has no public way to ask; its release is pinned.
    """
    try:
        Expression.compile(keyword)
    except SyntaxError as fault:
        raise UserError(
            f"{keyword!r} selects no tests",
            expected="words joined by and, or, not and parentheses, as pytest's -k takes them",
            found=f"at column {fault.offset}: {fault.msg}",
            fix="for example --select='ops and not large'",
        ) from fault


def _known_init(init: str) -> str:
    if init not in ("lean", "systemd"):
        raise UserError(
            f"there is no init {init!r}", expected="lean or systemd", found=repr(init), fix="--init=lean (the default)"
        )
    return init


def _answers(address: str, port: int) -> bool:
    with socket.socket() as trial:
        trial.settimeout(2)
        return trial.connect_ex((address, port)) == 0


def _addresses(host: str) -> list[str]:
    """IPv4 addresses of a host; none when the name is unknown here (ssh may still know it)."""
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(host, None, socket.AF_INET)})
    except OSError:
        return []
