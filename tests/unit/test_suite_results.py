"""Tests that only one run of the device suite at a time writes results, and replaces all of them or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from exports import mark_as_export
from waiting import eventually

from device import suite
from device.suite_result import Paths
from nfsroot.layout import Layout
from toolchain import files, process
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import BoardSilent, CommandFailed, DeviceTestsFailed, InUse, UserError

NOBODY = "root@127.0.0.1:1"

RUN = """
import json, signal, sys
from device import suite
from toolchain.config import load_config
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background processes
suite.test_on_pi(load_config(json.loads(sys.argv[1])), host=sys.argv[2])
"""


def settings(folder: Path) -> dict[str, dict[str, str]]:
    return {"nfs": {"folder": str(folder / "nfsroot")}, "build": {"folder": str(folder / "build")}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Make the parts of an export that a run on a board needs."""
    made = load_config(settings(tmp_path))
    layout = Layout.of(made)
    mark_as_export(layout)
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", layout.client_key])
    layout.known_hosts.write_text(f"* {layout.client_key.with_suffix('.pub').read_text()}")
    return made


@pytest.fixture
def paths(config: Config) -> Paths:
    """Make a report folder with the results of an earlier run."""
    made = Paths(folder=config.target_root / "report")
    made.folder.mkdir(parents=True)
    for path in made.results:
        path.write_text("earlier")
    return made


@pytest.fixture
def running(config: Config, paths: Paths, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run that waits for its board."""
    argv = [sys.executable, "-c", RUN, json.dumps(settings(tmp_path)), NOBODY]
    started = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    try:
        eventually(paths.environment.is_file, task=started)
        yield started
    finally:
        started.kill()
        started.wait()


def test_only_one_run_and_an_interrupted_one_keeps_the_results(
    config: Config, paths: Paths, running: subprocess.Popen[bytes]
) -> None:
    environment = paths.environment.stat().st_mtime_ns
    with pytest.raises(InUse) as caught:
        suite.test_on_pi(config, host=NOBODY)
    assert caught.value.exit_code == 29
    assert str(paths.lock) in caught.value.expected
    assert paths.environment.stat().st_mtime_ns == environment, "the second run changed a file of the first run"
    assert running.poll() is None
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(60) != 0
    assert [path.read_text() for path in paths.results] == ["earlier"] * 3
    assert not paths.staging.folder.exists()


def test_unreachable_board_keeps_the_earlier_results(config: Config, paths: Paths) -> None:
    paths.staging.folder.mkdir()
    paths.staging.junit.write_text("left by a killed run")
    with pytest.raises(BoardSilent):
        suite.test_on_pi(replace(config, device=replace(config.device, boot_timeout_s=2.0)), host=NOBODY)
    assert [path.read_text() for path in paths.results] == ["earlier"] * 3
    assert not paths.staging.folder.exists()


def run_that_ends(monkeypatch: pytest.MonkeyPatch, status: int, *lines: dict[str, object], outcome: str) -> None:
    """Replace pytest by a run of one test that leaves these further lines in the record and this exit status."""
    result = {"pitorch": "result", "nodeid": "test_a.py::test_x", "outcome": outcome, "seconds": 1.0, "text": ""}
    facts = {"pitorch": "facts", "model": "Raspberry Pi 3"}
    events = (facts, {"pitorch": "collected", "nodeids": ["test_a.py::test_x"]}, result, *lines)

    def run_pytest(_config: Config, paths: Paths, *_: object) -> process.Completed:
        paths.record.write_text("".join(json.dumps(event) + "\n" for event in events))
        paths.staging.junit.write_text("<testsuites><testsuite/></testsuites>")
        return process.Completed(("pytest",), status, "INTERNALERROR> ValueError: odd", 1.0)

    monkeypatch.setattr(suite, "_run_pytest", run_pytest)


POWER = {
    "pitorch": "error",
    "kind": "UserError",
    "summary": "the power switch of the board does not work",
    **dict.fromkeys(("expected", "found", "fix", "tail"), ""),
}


@pytest.mark.parametrize(
    ("outcome", "error", "warning"),
    [("passed", UserError, ""), ("failed", DeviceTestsFailed, "the power switch of the board does not work")],
)
def test_error_after_the_tests_does_not_prevent_the_report(
    config: Config,
    paths: Paths,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
    error: type[UserError],
    warning: str,
) -> None:
    run_that_ends(monkeypatch, 10, {**POWER, "after_tests": True}, outcome=outcome)
    with pytest.raises(UserError) as caught:
        suite.test_on_pi(config, host=NOBODY)
    assert type(caught.value) is error
    assert json.loads(paths.evidence.read_text())["results"][outcome] == 1
    assert all(path.read_text() != "earlier" for path in paths.results)
    assert warning in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("outcome", "error"), [("passed", CommandFailed), ("failed", DeviceTestsFailed)])
def test_internal_error_after_the_tests_is_not_a_success(
    config: Config,
    paths: Paths,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
    error: type[UserError],
) -> None:
    run_that_ends(monkeypatch, 3, outcome=outcome)
    with pytest.raises(UserError) as caught:
        suite.test_on_pi(config, host=NOBODY)
    assert type(caught.value) is error
    assert "ValueError: odd" in f"{caught.value}{capsys.readouterr().err}"
    assert json.loads(paths.evidence.read_text())["results"][outcome] == 1


def test_error_before_the_end_of_the_tests_keeps_the_results(
    config: Config, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_that_ends(monkeypatch, 10, {**POWER, "after_tests": False}, outcome="passed")
    with pytest.raises(UserError, match="the power switch of the board does not work"):
        suite.test_on_pi(config, host=NOBODY)
    assert [path.read_text() for path in paths.results] == ["earlier"] * 3


@pytest.mark.parametrize("made", [("junit", "evidence", "report"), ("evidence", "report")])
def test_results_are_replaced_together(paths: Paths, made: tuple[str, ...]) -> None:
    """An earlier result that the new run did not produce is removed."""
    paths.staging.folder.mkdir()
    for name in made:
        getattr(paths.staging, name).write_text("new")
    suite._replace_results(paths)
    assert {path.read_text() for path in paths.results if path.exists()} == {"new"}
    assert [path for path in paths.results if path.exists()] == [getattr(paths, name) for name in made]


@pytest.mark.parametrize("steps", range(6))
def test_power_failure_never_mixes_old_and_new_results(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The power fails after ``steps`` file operations."""
    paths.staging.folder.mkdir()
    for path in paths.staging.results:
        path.write_text("new")
    remaining = iter(range(steps))

    def stopping(act: object) -> object:
        def step(*places: Path) -> None:
            if next(remaining, None) is None:
                raise SystemExit
            act(*places)  # type: ignore[operator]

        return step

    monkeypatch.setattr(os, "replace", stopping(os.replace))
    monkeypatch.setattr(files, "remove", stopping(files.remove))
    if steps < 5:
        with pytest.raises(SystemExit):
            suite._replace_results(paths)
    else:
        suite._replace_results(paths)
    assert len({path.read_text() for path in paths.results if path.exists()}) == 1
