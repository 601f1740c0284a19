"""Run the device suite and report the results (``./inv test-on-pi``).

    exported tree → labgrid environment → pytest (device.drive) → record → JUnit XML, evidence, HTML report

pytest runs in a separate process, so its plugins cannot interfere with this program. The pytest process writes each
line from the board to the record. If a run is interrupted, the record is complete up to that point.

Only one run at a time writes to a report folder. The results (JUnit XML, evidence, HTML report) are
written to a staging folder and replace the earlier ones together at the end, so an interrupted run leaves the earlier
results intact. The logs are from the last run that was started.
"""

# ruff: noqa: PT028 - test_on_pi is named after its task and is not a test

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from device import evidence, report
from device.labgrid_client import client_environment
from device.labgrid_environment import (
    LOGIN_LIMIT_S,
    SUITE_LIMIT_S,
    TIMING_BUDGET_S,
    RemoteBoard,
    prepare,
)
from device.record import COUNT_PREFIX, Record
from device.suite_result import Paths, SuiteResult, error_of, label_junit, result_of
from toolchain import caller, errors, files, process, progress
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed, InUse, RootNeeded, UserError

_MARGIN_S = 600.0
_REPORT = "the report of the device suite"
_COMPLETED, _INTERNAL_ERROR = (0, 1, 5), 3  # pytest.ExitCode
_RAISED_IN_PYTEST = re.compile(r"^INTERNALERROR> (OSError: .*)", re.MULTILINE)
_RAISED_AT_EXIT = re.compile(r"^(OSError: .*)\Z", re.MULTILINE)
"""Patterns for an OSError that ended pytest on this PC. Output from the board can also match the first pattern."""


def test_on_pi(
    config: Config,
    *,
    host: str | None = None,
    qemu: bool = False,
    chroot: bool = False,
    init: str | None = None,
    cpu: str | None = None,
    keyword: str | None = None,
    timing: bool = True,
    suite: Path | None = None,
    place: RemoteBoard | None = None,
    folder: Path | None = None,
    test_files: Sequence[str] = (),
    checksums: str = "",
) -> SuiteResult:
    """Run the device suite on a board, or in a virtual machine that boots the exported tree, and report the results.

    ``host`` ([USER@]HOST[:PORT]) is a running board; the default is ``device.host``. If neither ``host`` nor
    ``device.host`` is set, or if ``qemu`` is set, the suite runs in a virtual machine. With ``chroot``, the board
    enters the exported tree with enter-nfsroot and runs the suite there. A ``host`` enters the tree from its own
    system, and the virtual machine enters the tree from a bare system (nfsroot.bare_system). ``init`` (lean or systemd)
    and ``cpu`` (a CPU model that QEMU supports) apply to the virtual machine only. ``keyword`` selects tests, like
    pytest's ``-k``. ``suite`` is a folder of tests to run instead of ``tests/device``. ``place`` is a board in a lab
    that this user holds; it replaces ``host``. ``folder`` replaces the report folder. ``test_files`` selects the test
    files that this board runs. With ``test_files``, a run without failures is successful even if no test passed.
    ``checksums`` lists the files that the caller has deployed to the board's tree, as input for ``sha256sum --check``;
    the board must read these files.

    The report is written even if tests fail, or if the board cannot be switched off after the tests. Raises
    DeviceTestsFailed if a test failed or none ran. Raises ChainBroken if all tests passed but the tested files are not
    the files that were built, or if the board does not read the deployed files. Raises InUse if another run writes to
    the same report, and DiskFull if the disk is too full for the report. Raises ArtefactMissing if there is no exported
    tree, and RootNeeded if the tree must be served but the user is not root. Raises CommandFailed if pytest fails on
    this PC, before or after the tests. Also raises BoardSilent and AccessDenied, and UserError if ``keyword`` is not a
    valid expression.
    """
    if host is not None and qemu:
        raise UserError(
            "--host and --qemu are mutually exclusive",
            expected="either --host or --qemu",
            found=f"--host {host} --qemu",
            fix="omit one of the two options",
        )
    host = None if qemu or place else host or config.device.host or None
    if keyword:
        _require_expression(keyword)
    if init is not None:
        config = replace(config, device=replace(config.device, init=_checked_init(init)))
    if cpu is not None:
        config = replace(config, device=replace(config.device, cpu=cpu))
    paths = Paths(folder=folder or config.target_root / "report")
    with files.room_for(_REPORT, paths.folder), _exclusive(paths):
        for stale in (paths.record, paths.log, paths.console, paths.checksums):
            files.remove(stale)
        if checksums:
            files.write_text_atomically(paths.checksums, checksums)
        prepare(config, paths, host=host, chroot=chroot, timing=timing, suite=suite, place=place, test_files=test_files)
        began = time.monotonic()
        access = place.name if place else host or "QEMU"
        where = f"in QEMU ({config.device.init} init)" if access == "QEMU" else f"on {access}"
        with progress.step(f"device suite {where}{' through enter-nfsroot' if chroot else ''}"):
            variables = client_environment(place.coordinator) if place else {}
            done = _run_pytest(config, paths, keyword or "", variables)
        raised = _RAISED_IN_PYTEST if done.returncode == _INTERNAL_ERROR else _RAISED_AT_EXIT
        found = raised.search(done.output.rstrip())
        if found and (full := files.full_disk(found[1], _REPORT, paths.folder)):
            raise full
        record = Record.read(paths.record)
        if record.error is not None and not record.error["after_tests"]:
            raise _error_from_record(record.error)
        if not record.tests and not record.facts:
            raise CommandFailed(
                "the device suite exited before the board sent any result",
                returncode=done.returncode,
                found=process.explain_exit(done.returncode),
                tail=done.output[-4000:],
            )
        document = evidence.collect(
            config,
            record,
            started_by_us=access == "QEMU",
            access=access,
            through="enter-nfsroot" if chroot else "boot",
            checksums=checksums,
        )
        staging = paths.staging
        evidence.write(document, staging.evidence)
        label_junit(staging.junit, document)
        report.write(document, staging.report, evidence_file=staging.evidence)
        _replace_results(paths)
    result = result_of(document, paths, time.monotonic() - began)
    fault = _error_after_tests(record, done)
    if not (result.clean if test_files else result.ok):
        if fault is not None:
            progress.warn(str(fault))
        raise error_of(result, record)
    if fault is not None:
        raise fault
    return result


@contextlib.contextmanager
def _exclusive(paths: Paths) -> Iterator[None]:
    """Lock the report folder and create an empty staging folder. Raises InUse, RootNeeded."""
    taken = InUse(
        f"another run of the device suite is writing to {paths.folder}",
        expected=f"no lock on {paths.lock}",
        found="a lock",
        fix="wait until the other run ends, stop it, or set build.folder to another folder",
    )
    with contextlib.ExitStack() as stack:
        try:
            paths.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.held(paths.lock, taken))
        except PermissionError as fault:
            raise RootNeeded(
                f"{paths.folder} belongs to another user",
                expected="write permission for the report folder",
                found=str(fault),
                fix=f"run the task as the owner of the folder ({caller.as_root('./inv test-on-pi')}), "
                "or set build.folder to your own folder",
            ) from fault
        files.remove(paths.staging.folder)  # The folder was left by a run that was killed.
        paths.staging.folder.mkdir()
        try:
            yield
        finally:
            files.remove(paths.staging.folder)


def _replace_results(paths: Paths) -> None:
    """Replace the earlier results with the new ones.

    The earlier results are removed first. After a power failure, results may be missing, but old and new results are
    never mixed.
    """
    with files.swapping():
        for old in paths.results[1:]:
            files.remove(old)
        for new, old in zip(paths.staging.results, paths.results, strict=True):
            if new.is_file():
                os.replace(new, old)
            else:
                files.remove(old)


def _run_pytest(config: Config, paths: Paths, keyword: str, variables: Mapping[str, str]) -> process.Completed:
    process.require_program("setpriv", "to stop the run when this program ends")
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
        f"--confcutdir={ROOT / 'tests' / 'device'}",  # Ignore conftest.py in parent folders.
        "-p",
        "no:cacheprovider",
        "-rfE",
    ]
    words += ["--color=no", "--tb=short", f"--junit-xml={paths.staging.junit}", "-o", "junit_suite_name=device"]
    words += ["-v", f"--lg-env={paths.environment}"]
    if keyword:
        words += ["-k", keyword]
    limit_s = config.device.boot_timeout_s + LOGIN_LIMIT_S + SUITE_LIMIT_S + 5 * TIMING_BUDGET_S + _MARGIN_S
    with progress.bar("device suite") as bar:
        return process.run(
            [*words, str(ROOT / "tests" / "device")],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "COLUMNS": "160", **variables},
            limit_s=limit_s,
            check=False,
            on_line=_Progress(bar).handle_line,
        )


class _Progress:
    """Shows the number of finished tests, and each test that did not pass."""

    def __init__(self, bar: progress.Bar) -> None:
        self._bar = bar
        self._total: float | None = None
        self._done = 0

    def handle_line(self, line: str) -> None:
        """Process one line of pytest's output."""
        if line.startswith(COUNT_PREFIX):
            self._total = float(line.removeprefix(COUNT_PREFIX))
            progress.say(f"    the board is running {self._total:.0f} tests")
            return
        found = re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(.*?)(?:\s+\[\s*\d+%\])?$", line)
        if found is None:
            return
        self._done += 1
        self._bar.update(self._done, total=self._total and max(self._total, self._done), note=found[1])
        if found[2] != "PASSED":
            progress.say(f"    {found[1]} {found[2]}{found[3]}")


def _error_after_tests(record: Record, done: process.Completed) -> UserError | None:
    """Return the error that ended pytest on this PC although the board sent results; None if pytest ended normally."""
    if record.error is not None:
        return _error_from_record(record.error)
    if done.returncode in _COMPLETED:
        return None
    return CommandFailed(
        "pytest failed on this PC",
        returncode=done.returncode,
        expected="exit status 0, 1 or 5",
        found=process.explain_exit(done.returncode),
        tail=done.output[-4000:],
        fix="find the cause in the output below; the report contains the results of the tests",
    )


def _error_from_record(recorded: Mapping[str, Any]) -> UserError:
    """Return the error that ended the run in the pytest process."""
    kind = getattr(errors, str(recorded["kind"]), UserError)
    texts = {key: str(recorded[key]) for key in ("expected", "found", "fix")}
    if issubclass(kind, CommandFailed):
        texts["tail"] = str(recorded["tail"])
    error: UserError = kind(str(recorded["summary"]), **texts)
    return error


def _require_expression(keyword: str) -> None:
    """Raise UserError for an invalid -k expression, which the board's pytest would reject only after the boot.

    pytest has no public function for this check. A private function can be used, because the version of pytest is
    pinned.
    """
    from _pytest.mark.expression import Expression

    try:
        Expression.compile(keyword)
    except SyntaxError as fault:
        raise UserError(
            f"{keyword!r} is not a valid expression for selecting tests",
            expected="names combined with and, or, not and parentheses, as in pytest -k",
            found=f"at column {fault.offset}: {fault.msg}",
            fix="pass, for example, --select='ops and not large'",
        ) from fault


def _checked_init(init: str) -> str:
    if init not in ("lean", "systemd"):
        raise UserError(
            f"there is no init system {init!r}",
            expected="lean or systemd",
            found=repr(init),
            fix="pass --init=lean (the default) or --init=systemd",
        )
    return init
