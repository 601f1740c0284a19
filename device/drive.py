"""A pytest plugin that runs the device suite on a board through a labgrid target and reports the results locally.

    pytest --lg-env ENVIRONMENT tests/device

``tests/device/conftest.py`` registers the plugin if an environment is passed to labgrid's plugin. The host does not
import the suite, because torch and the extension modules exist only on the board. The strategy boots the board and logs
in. The suite is sent to the board as one tar archive, and ``device.onboard`` runs the tests there in one process. Each
result that the board prints becomes an ordinary test report, so ``-v``, ``-k`` and ``--junit-xml`` work as usual. If
the board stops responding, the current test fails and the earlier results are kept. If pytest exits early on the board
(because of an internal error or ``pytest.exit``), every test without a result counts as an error.

The environment's ``options`` configure a run:

``private_network``  whether the server and the virtual machine run in a separate network namespace
``chroot``           the tree to enter: ``ADDRESS:/path``, or ``served`` for the tree that this run serves
``chroot_address``   the server's address as seen from the board; ``chroot_port`` is the server's port
``architecture``     the architecture of the tree to enter
``checksums``        a file for ``sha256sum --check`` that lists the files deployed to the tree of the running board
``suite``            a folder of tests to run instead of ``tests/device``; ``test_files`` selects test files by name
``suite_limit_s``    the time limit for the tests
``timing``           arguments for timing.py; ``timing_limit_s`` is its time limit, or 0 to skip the timing
``record``           a file for the JSON lines that the board prints; ``log`` is a file for the suite's output
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import json
import shlex
import signal
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pytest
from labgrid.pytestplugin.hooks import LABGRID_ENV_KEY
from labgrid.strategy import StrategyError

from device import onboard
from device.record import BOARD_LOST, COUNT_PREFIX, PYTEST_ENDED
from device.strategy import cause_of
from nfsroot.private_network import private_network
from toolchain.errors import ChainBroken, CommandFailed, CommandTimedOut, DeviceTestsFailed, UserError

_COMPLETED = (0, 1, 5)
"""pytest's exit statuses for a completed run: all passed, some failed, no tests collected."""

_USAGE_ERROR = 4
"""pytest's exit status for invalid arguments."""

_EARLY_ENDS = {2: "interrupted", 3: "internal error", _USAGE_ERROR: "usage error"}
"""pytest's exit statuses for an incomplete run, with their meanings."""

_ATTRIBUTES_LIMIT_S = 90.0
"""The maximum time until a board sees deployed files. NFS clients cache a folder's attributes for 60 s (acdirmax)."""

_CHECK_LIMIT_S = 300.0
_PAUSE_S = 2.0

_HELPER = Path(__file__).resolve().parent.parent / "nfsroot" / "enter-nfsroot"
_UNPACK = (
    "set -e; d=; trap 'rm -rf \"$d\"' EXIT; trap 'exit 129' HUP INT PIPE TERM; "
    "d=$(mktemp -d /tmp/pitorch-suite.XXXXXX); "
    'cd "$d"; tar -xf -; set +e; '
)


class DeviceSession:
    """One run of the suite on one board."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.default_suite = Path(__file__).resolve().parent.parent / "tests" / "device"
        self.current = ""
        self.last_lines: collections.deque[str] = collections.deque(maxlen=25)
        self.collected: tuple[str, ...] = ()
        self.reported: set[str] = set()
        self.began = time.monotonic()
        self.status: int | None = None
        self.fault = self.fix = ""
        self.ran = False
        self.session: pytest.Session
        self.record: TextIO | None = None

    @property
    def environment(self) -> Any:
        """Labgrid's environment, which labgrid's pytest plugin reads before the session starts."""
        return self.config.stash[LABGRID_ENV_KEY]

    @property
    def suite(self) -> Path:
        """The folder with the tests to run."""
        return Path(self._option("suite", self.default_suite))

    def pytest_sessionstart(self) -> None:
        """Open the record."""
        if record := self._option("record", ""):
            self.record = Path(record).open("w", buffering=1)  # noqa: SIM115 - closed in pytest_unconfigure

    def _option(self, name: str, default: Any) -> Any:
        return self.environment.config.data.get("options", {}).get(name, default)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Skip the local collection of tests, because the board collects them."""
        self.session = session
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        """Boot the board, run the suite, report the results and switch the board off."""
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            strategy = self._strategy()
        except UserError as fault:
            self._exit(fault)
        with contextlib.ExitStack() as network:
            try:
                if self._option("private_network", False):
                    network.enter_context(private_network())
                strategy.transition("shell")
                self._note("booted", seconds=round(time.monotonic() - self.began, 3), **self._boot_facts(strategy))
                self._wait_for_deployed_files(strategy)
                self._run(strategy)
                self.ran = True
                strategy.transition("off")
            except StrategyError as fault:
                self._exit(cause_of(fault))
            except UserError as fault:
                self._exit(fault)
            finally:
                strategy.abandon()
        return True

    def _strategy(self) -> Any:
        """Return the strategy of the board. Raises UserError if labgrid's coordinator does not provide the board."""
        try:
            return self.environment.get_target("main").get_driver("Strategy", activate=False)
        except Exception as fault:
            coordinator = self._option("coordinator_address", "")
            if not coordinator:
                raise
            raise UserError(
                "labgrid does not give this run access to the board",
                expected=f"a board that this run has acquired from the coordinator {coordinator}, and whose resources "
                "are exported",
                found=f"{type(fault).__name__}: {fault}",
                fix="run ./inv lab status; if resources are MISSING, run ./inv lab up on the PC that the board is "
                "connected to",
            ) from fault

    def pytest_unconfigure(self) -> None:
        """Close the record."""
        if self.record is not None:
            self.record.close()

    def _boot_facts(self, strategy: Any) -> dict[str, Any]:
        board = strategy.board
        if board is None or board.machine is None:
            return {"access": str(strategy.ssh.access)}
        return {"boot_seconds": round(board.machine.boot_seconds or 0.0, 2), "init": board.init, "cpu": board.cpu}

    def _wait_for_deployed_files(self, strategy: Any) -> None:
        """Wait until the board sees the deployed files. An NFS client may use cached attributes for up to a minute.

        Raises ChainBroken if the board still does not see the deployed files after ``_ATTRIBUTES_LIMIT_S`` seconds, or
        if the files differ and the board has no NFS file system.
        """
        if not (listed := self._option("checksums", "")):
            return
        checksums = Path(listed).read_bytes()
        command = "sha256sum --quiet --check -; s=$?; grep -E ' / | nfs4? ' /proc/mounts; exit $s"
        deadline = time.monotonic() + _ATTRIBUTES_LIMIT_S
        while (done := strategy.ssh.stream(command, stdin=checksums, limit_s=_CHECK_LIMIT_S, check=False)).returncode:
            if done.returncode != 1:
                raise CommandFailed(
                    "the deployed files cannot be checked on the board",
                    returncode=done.returncode,
                    expected="a connection to the board, and the program sha256sum on the board",
                    found=f"exit status {done.returncode}",
                    fix="check that the board is still on and connected, and that sha256sum is installed on it",
                )
            if " nfs" not in done.output or time.monotonic() > deadline:
                lines = done.output.splitlines()
                different = [line for line in lines if line.endswith((": FAILED", ": FAILED open or read"))]
                root = "; ".join(line for line in lines if " / " in line)
                shown = ", ".join(different[:2])
                raise ChainBroken(
                    "the board is not using the files that were deployed to the exported tree",
                    expected=f"a board whose root filesystem contains the files listed in {listed}",
                    found=f"files that differ or are missing: {len(different)} (for example, {shown}); "
                    f"the board's root: {root}",
                    fix="restart the board so that it boots the exported tree; a deployment cannot update a system "
                    "that boots from a card (docs/lab.md)",
                )
            time.sleep(_PAUSE_S)
        self._note("deployed", sha256=hashlib.sha256(checksums).hexdigest())

    def _run(self, strategy: Any) -> None:
        command = _UNPACK + shlex.join(["python3", "onboard.py", *self._arguments()])
        source = self._option("chroot", "")
        if source:
            command = self._through_chroot(strategy, source, command)
        limit_s = float(self._option("suite_limit_s", 3600.0))
        log = self._option("log", "")
        try:
            done = strategy.ssh.stream(
                command,
                stdin=archive(self.suite),
                on_line=self._handle_line,
                limit_s=limit_s,
                log=Path(log) if log else None,
                check=False,
            )
        except CommandTimedOut:
            self._abort(f"the suite was still running after {limit_s:.0f} s", BOARD_LOST)
            return
        if self.fault:
            raise DeviceTestsFailed("the suite did not start on the board", found=self.fault, fix=self.fix)
        if self.status is None:
            if not self.collected:
                raise CommandFailed(
                    "the suite did not start on the board",
                    returncode=done.returncode,
                    expected="sh, tar and python3 on the board"
                    + (", and mount.nfs to mount the exported tree" if source else ""),
                    found=f"exit status {done.returncode}",
                    tail="\n".join(self.last_lines),
                    fix=f"find the cause in the output below{f', or in the complete output in {log}' if log else ''}",
                )
            self._abort(f"the connection was closed (status {done.returncode}) before the suite finished", BOARD_LOST)
        elif self.status == _USAGE_ERROR and not self.current and self.reported.isdisjoint(self.collected):
            raise CommandFailed(
                "pytest on the board rejected the selection of tests",
                returncode=self.status,
                expected="test names, or an expression that the board's pytest accepts for -k",
                found=next(
                    (line for line in self.last_lines if line.startswith("ERROR: ")), f"exit status {self.status}"
                ),
                tail="\n".join(self.last_lines),
                fix="correct the expression: --select has the syntax of pytest -k, for example 'ops and not large'",
            )
        elif self.status not in _COMPLETED:
            cause = _EARLY_ENDS.get(self.status, "exit requested")
            self._abort(f"pytest exited early on the board: {cause} (status {self.status})", PYTEST_ENDED)
        else:
            self._fail_tests_without_result(PYTEST_ENDED)

    def _arguments(self) -> list[str]:
        words = list(_targets(self.default_suite, self.config.args, self.config.invocation_params.dir))
        words += self._option("test_files", [])
        if keyword := self.config.option.keyword:
            words.append(f"--keyword={keyword}")
        timing_limit_s = float(self._option("timing_limit_s", 0.0))
        if timing_limit_s:
            words.append(f"--timing-limit={timing_limit_s:g}")
            words += [f"--timing={word}" for word in self._option("timing", [])]
        return words

    def _through_chroot(self, strategy: Any, source: str, command: str) -> str:
        """Copy enter-nfsroot to the board and return the command that runs ``command`` inside the mounted tree."""
        options = ["-a", self._option("architecture", "armhf")]
        port = int(self._option("chroot_port", 2049))
        if source == "served":
            source, port = strategy.server.source(self._option("chroot_address", ""))
        if port != 2049:
            options += ["-o", f"port={port}"]
        made = strategy.ssh.stream(
            'f=$(mktemp /tmp/enter-nfsroot.XXXXXX) && cat > "$f" && echo "$f"', stdin=_HELPER.read_bytes(), limit_s=120
        )
        helper = made.output.strip().splitlines()[-1]
        privilege = [] if strategy.ssh.access.user == "root" else ["sudo", "-n"]
        words = [*privilege, "sh", helper, *options, source, "--", "sh", "-c", command]
        return f"{shlex.join(words)}; s=$?; rm -f {shlex.quote(helper)}; exit $s"

    def _handle_line(self, line: str) -> None:
        """Process one line of the board's output."""
        if not line.startswith('{"pitorch": '):
            self.last_lines.append(line)
            return
        try:
            event = json.loads(line)
        except ValueError:
            return
        if self.record is not None:
            self.record.write(line + "\n")
        kind = event["pitorch"]
        if kind == "collected":
            self.collected = tuple(event["nodeids"])
            self.session.testscollected += len(self.collected)
            if (terminal := self.config.pluginmanager.get_plugin("terminalreporter")) is not None:
                terminal.ensure_newline()
                terminal.write_line(f"{COUNT_PREFIX} {len(self.collected)}")
        elif kind == "start":
            self.current = event["nodeid"]
            self.config.hook.pytest_runtest_logstart(nodeid=self.current, location=_location(self.current))
        elif kind == "result":
            self._report(event)
        elif kind == "fault":
            self.fault, self.fix = event["summary"], event["fix"]
        elif kind == "end":
            self.status = int(event["status"])

    def _report(self, event: dict[str, Any]) -> None:
        nodeid, outcome, text = event["nodeid"], event["outcome"], event["text"]
        report = make_report(nodeid, outcome, event["seconds"], text)
        self.config.hook.pytest_runtest_logreport(report=report)
        self.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=_location(nodeid))
        if nodeid not in self.collected:
            self.session.testscollected += 1
        self.reported.add(nodeid)
        self.current = ""

    def _abort(self, reason: str, not_run: str) -> None:
        """Report an error for the current test and for each test without a result.

        If no test is running, the first error is reported for the whole suite. ``reason`` is the text of the first
        error; ``not_run`` is the text of all other errors.
        """
        tail = "\n".join(["", "--- last lines of the board's output ---", *self.last_lines]) if self.last_lines else ""
        self._fail(self.current or "device::suite", reason + tail)
        self._fail_tests_without_result(not_run)

    def _fail_tests_without_result(self, not_run: str) -> None:
        for nodeid in self.collected:
            if nodeid not in self.reported:
                self._fail(nodeid, not_run)

    def _fail(self, nodeid: str, reason: str) -> None:
        event: dict[str, Any] = {"nodeid": nodeid, "outcome": "error", "seconds": 0.0, "text": reason}
        self._note("result", **event)
        self._report(event)

    def _note(self, pitorch: str, **content: Any) -> None:
        if self.record is not None:
            self.record.write(json.dumps({"pitorch": pitorch, **content}) + "\n")

    def _exit(self, fault: BaseException) -> NoReturn:
        """Record a UserError and end pytest with the error's exit code. Any other exception is raised again."""
        if not isinstance(fault, UserError):
            raise fault
        self._note(
            "error",
            kind=type(fault).__name__,
            after_tests=self.ran,
            summary=fault.summary,
            expected=fault.expected,
            found=fault.found,
            fix=fault.fix,
            tail=fault.tail if isinstance(fault, CommandFailed) else "",
        )
        pytest.exit(f"\n{fault}", returncode=fault.exit_code)


def archive(suite: Path) -> bytes:
    """Return a tar archive of the suite and its runner, without a top-level folder."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as packed:
        packed.add(onboard.__file__, arcname="onboard.py")
        for path in sorted(suite.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                packed.add(path, arcname=str(path.relative_to(suite)))
    return sink.getvalue()


def make_report(nodeid: str, outcome: str, seconds: float, text: str) -> pytest.TestReport:
    """Return a report like the one that pytest creates for a local test."""
    path, line, _ = _location(nodeid)
    longrepr: Any = None
    if outcome == "skipped":
        longrepr = (path, line or 0, f"Skipped: {text}")
    elif outcome in ("failed", "error"):
        longrepr = text or "no reason given"
    return pytest.TestReport(
        nodeid=nodeid,
        location=_location(nodeid),
        keywords={},
        outcome="failed" if outcome == "error" else outcome,  # type: ignore[arg-type]
        longrepr=longrepr,
        when="setup" if outcome in ("error", "skipped") else "call",
        duration=seconds,
    )


def _location(nodeid: str) -> tuple[str, int | None, str]:
    path, _, name = nodeid.partition("::")
    return path, None, name or path


def _targets(suite: Path, arguments: Sequence[str], invoked_in: Path) -> Iterator[str]:
    """Yield the arguments as paths relative to the suite, for use on the board.

    An argument that is the suite's folder itself is omitted.
    """
    for argument in arguments:
        path, mark, name = str(argument).partition("::")
        absolute = (invoked_in / path).resolve()
        if not absolute.is_relative_to(suite):
            raise pytest.UsageError(f"{argument}: with --lg-env, only tests in {suite} can be selected")
        if absolute != suite:
            yield f"{absolute.relative_to(suite)}{mark}{name}"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
