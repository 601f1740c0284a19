"""Tests that run device suites with this machine as the board. Everything else is the same as with a remote board."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import here_board
import pytest
from device_parts import DEVICE_PYTEST, write_suite
from http_parts import answering

from device import record
from toolchain import files, process
from toolchain.config import ROOT
from toolchain.errors import ChainBroken, CommandFailed, UserError


@dataclass(frozen=True)
class Run:
    """The results of running the suite."""

    status: int
    output: str
    record: record.Record
    junit: Path
    log: Path

    def outcomes(self) -> dict[str, str]:
        """Return the outcome of each test in the record."""
        return {test.nodeid.partition("::")[2]: test.outcome for test in self.record.tests}

    def junit_failures(self) -> set[str | None]:
        """Return the tests that did not pass in the JUnit file."""
        return {case.get("name") for case in ElementTree.parse(self.junit).iter("testcase") if len(case)}  # noqa: S314


def drive(
    folder: Path,
    *,
    user: str = "root",
    keyword: str = "",
    served: tuple[Path, int] | None = None,
    switch: str = "",
    **options: Any,
) -> Run:
    """Run the suite in ``folder``/suite with labgrid and ``device.drive`` in a separate process.

    ``served`` contains a tree, which is served over NFS during the run, and the server's port. ``switch`` is the URL of
    the board's power switch.
    """
    options |= {"suite": str(folder / "suite"), "record": str(folder / "record"), "log": str(folder / "log")}
    resources: dict[str, Any] = {"NetworkService": {"address": "here", "username": user}}
    drivers: dict[str, Any] = {}
    if served is not None:
        resources["ExportedTree"] = {"folder": str(served[0])}
        drivers["TreeServerDriver"] = {"port": served[1]}
    if switch:
        resources["NetworkPowerPort"] = {"model": "simplerest", "host": switch, "index": "1"}
        drivers["NetworkPowerDriver"] = {"delay": 0.0}
    drivers |= {"HereDriver": {}, "BoardStrategy": {}}  # last, because the strategy binds to the preceding drivers
    target = {"resources": resources, "drivers": drivers}
    imports = ["device.target", "device.strategy", here_board.__file__]
    environment = folder / "environment.yaml"
    environment.write_text(json.dumps({"imports": imports, "targets": {"main": target}, "options": options}))
    words = [f"--junit-xml={folder / 'junit.xml'}", f"--lg-env={environment}", *(["-k", keyword] if keyword else [])]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = process.run([*DEVICE_PYTEST, *words], cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": path}, check=False)
    found = record.Record.read(folder / "record")
    return Run(done.returncode, done.output, found, folder / "junit.xml", folder / "log")


def test_complete_suite_reports_each_outcome(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", a="def test_good(): pass\ndef test_bad(): assert 1 == 2, 'one is not two'")
    run = drive(tmp_path)
    assert run.status == 1
    assert run.outcomes() == {"test_good": "passed", "test_bad": "failed"}
    assert run.junit_failures() == {"test_bad"}
    assert "1 failed, 1 passed" in run.output


@pytest.mark.network_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces")
def test_private_network_has_only_a_loopback(tmp_path: Path) -> None:
    ours = Path("/proc/self/ns/net").readlink()
    write_suite(
        tmp_path / "suite",
        a=f"""
            import pathlib, socket
            def test_apart(): assert str(pathlib.Path("/proc/self/ns/net").readlink()) != "{ours}"
            def test_interfaces(): assert {{name for _, name in socket.if_nameindex()}} >= {{"lo", "pitorch"}}
            def test_routes(): assert "00000000\t" not in pathlib.Path("/proc/self/net/route").read_text()
            def test_loopback():
                with socket.create_server(("127.0.0.1", 0)) as here:
                    socket.create_connection(here.getsockname()).close()
        """,
    )
    run = drive(tmp_path, private_network=True)
    assert set(run.outcomes().values()) == {"passed"}, run.output
    assert len(run.outcomes()) == 4
    assert run.status == 0


EARLY_ENDS = {
    "pytest.exit": ("import pytest\ndef test_second(): pytest.exit('enough')", "", "test_second", "status 2"),
    "pytest.exit(0)": ("import pytest\ndef test_second(): pytest.exit('enough', returncode=0)", "", "", ""),
    "pytest.exit(77)": ("import pytest\ndef test_second(): pytest.exit('x', returncode=77)", "", "test_second", "77"),
    "Ctrl-C": ("def test_second(): raise KeyboardInterrupt", "", "test_second", "interrupted (status 2)"),
    "INTERNALERROR": (
        "def test_second(): pass",
        "def pytest_runtest_logfinish(nodeid):\n    if 'second' in nodeid: broken_plugin",
        "test_second",
        "internal error (status 3)",
    ),
}


@pytest.mark.parametrize("way", EARLY_ENDS)
def test_suite_that_ends_early_does_not_pass(tmp_path: Path, way: str) -> None:
    """Tests that did not run are recorded as errors in the evidence and in the JUnit file."""
    second, plugin, named, reason = EARLY_ENDS[way]
    write_suite(tmp_path / "suite", a="def test_first(): pass", b=second, c="def test_third(): pass")
    (tmp_path / "suite" / "conftest.py").write_text(plugin)
    run = drive(tmp_path)
    assert run.status == 1
    assert run.outcomes() == {"test_first": "passed", "test_second": "error", "test_third": "error"}
    assert record.count(run.record.tests) == {"passed": 1, "failed": 0, "errors": 2, "skipped": 0}
    assert run.junit_failures() == {"test_second", "test_third"}
    texts = {test.nodeid.partition("::")[2]: test.text for test in run.record.tests}
    assert texts["test_third"] == record.PYTEST_ENDED
    if named:
        assert reason in texts[named]
        assert "last lines of the board's output" in texts[named]
    if way == "INTERNALERROR":
        assert "broken_plugin" in texts[named]


def test_the_suite_starts_if_the_board_reads_the_deployed_files(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", a="def test_first(): pass")
    (tmp_path / "new").write_text("deployed")
    listed = tmp_path / "deployed.sha256"
    listed.write_text(f"{files.sha256_of(tmp_path / 'new')}  {tmp_path / 'new'}\n")
    run = drive(tmp_path, checksums=str(listed))
    assert run.outcomes() == {"test_first": "passed"}
    assert run.record.deployed_sha256 == files.sha256_of(listed)


@pytest.mark.parametrize("content", ["older", None])
def test_a_board_that_reads_other_files_is_an_error(tmp_path: Path, content: str | None) -> None:
    """If the board's root is not on NFS but, for example, on a card, the board never receives the deployed files."""
    write_suite(tmp_path / "suite", a="def test_first(): pass")
    (tmp_path / "deployed.sha256").write_text(f"{'0' * 64}  {tmp_path / 'new'}\n")
    if content:
        (tmp_path / "new").write_text(content)
    run = drive(tmp_path, checksums=str(tmp_path / "deployed.sha256"))
    assert run.status == ChainBroken.exit_code
    assert run.outcomes() == {}
    assert run.record.error is not None
    assert run.record.error["kind"] == "ChainBroken"
    assert f"(for example, {tmp_path / 'new'}: FAILED" in run.record.error["found"]
    assert " / " in run.record.error["found"], "the message must show the board's root"


def test_error_outside_the_tests_fails_the_suite(tmp_path: Path) -> None:
    """All tests keep their results, and the error is reported for the suite as a whole."""
    write_suite(tmp_path / "suite", a="def test_first(): pass\ndef test_second(): pass")
    (tmp_path / "suite" / "conftest.py").write_text("def pytest_sessionfinish(session): broken_plugin")
    run = drive(tmp_path)
    assert run.status == 1
    assert run.outcomes()["test_second"] == "passed"
    errors = [test for test in run.record.tests if test.outcome == "error"]
    assert [test.nodeid for test in errors] == ["device::suite"]
    assert "broken_plugin" in errors[0].text


def test_switch_that_fails_after_the_tests_keeps_their_results(tmp_path: Path) -> None:
    """The switch works when the board is switched off and on, but not when it is switched off at the end."""
    requests = itertools.count(1)

    class Switch(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if next(requests) < 3 else 500)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    write_suite(tmp_path / "suite", a="def test_first(): pass")
    with answering(Switch) as port:
        run = drive(tmp_path, switch=f"http://127.0.0.1:{port}/{{index}}/{{value}}")
    assert run.status == UserError.exit_code, run.output
    assert run.outcomes() == {"test_first": "passed"}
    assert run.junit_failures() == set()
    assert run.record.error is not None
    assert run.record.error["after_tests"] is True
    assert run.record.error["summary"] == "the power switch of the board does not work"


def test_lost_board_fails_the_remaining_tests(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", a="import os\ndef test_dies(): os._exit(9)\ndef test_after(): pass")
    run = drive(tmp_path)
    assert run.status == 1
    texts = {test.nodeid.partition("::")[2]: test.text for test in run.record.tests if test.outcome == "error"}
    assert "closed (status 9) before the suite finished" in texts["test_dies"]
    assert texts["test_after"] == record.BOARD_LOST
    assert run.junit_failures() == {"test_dies", "test_after"}


def test_a_selection_rejected_by_pytest_is_reported(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", a="def test_first(): pass")
    run = drive(tmp_path, keyword="first and")
    assert run.status == CommandFailed.exit_code
    assert run.record.error is not None
    assert run.record.error["after_tests"] is False
    assert "rejected the selection of tests" in run.record.error["summary"]
    assert "Wrong expression passed to '-k': first and" in run.record.error["found"]
    assert "--select" in run.record.error["fix"]


@pytest.mark.parametrize(
    ("selected", "status", "timed"), [("first", 0, True), ("nothing_like_it", 5, False), ("first or leaves", 1, False)]
)
def test_timing_runs_only_after_a_complete_suite(tmp_path: Path, selected: str, status: int, timed: bool) -> None:
    tests = "import pytest\ndef test_first(): pass\ndef test_leaves(): pytest.exit('enough')\ndef test_last(): pass"
    write_suite(tmp_path / "suite", a=tests)
    (tmp_path / "suite" / "timing.py").write_text("print('{}')")
    run = drive(tmp_path, keyword=selected, timing_limit_s=60)
    reason = "pitorch-qpu-ops is not installed" if timed else "no test ran, or some of the"
    assert reason in run.record.timing["reason"]
    assert run.record.error is None
    assert run.status == status


@pytest.mark.parametrize(("user", "privilege"), [("root", []), ("pi", ["sudo", "-n"])])
def test_tree_is_entered_as_root_for_every_user(tmp_path: Path, user: str, privilege: list[str]) -> None:
    """The sudo command must not prompt for a password. The helper script fails, because no server exports the tree."""
    write_suite(tmp_path / "suite", a="def test_first(): pass")
    run = drive(tmp_path, user=user, chroot="127.0.0.1:/no where", chroot_port=1)
    (started,) = (line for line in run.log.read_text().splitlines() if line.startswith("$ "))
    shell, dash_c, command = shlex.split(started.removeprefix("$ "))
    assert (shell, dash_c) == ("sh", "-c")
    entering, _, rest = command.rpartition("; s=$?; ")
    words = shlex.split(entering)
    assert words[: len(privilege)] == privilege
    interpreter, helper, *others = words[len(privilege) :]
    assert (interpreter, Path(helper).parent) == ("sh", Path("/tmp"))
    assert others[:8] == ["-a", "armhf", "-o", "port=1", "127.0.0.1:/no where", "--", "sh", "-c"]
    assert "python3 onboard.py" in others[8]
    assert rest == f"rm -f {helper}; exit $s"
    assert not Path(helper).exists(), "the helper must be removed"
    assert run.status == CommandFailed.exit_code
    assert run.record.error is not None
    assert run.record.error["summary"] == "the suite did not start on the board"
    assert "mount.nfs" in run.record.error["expected"]
    assert "Traceback" not in run.output
