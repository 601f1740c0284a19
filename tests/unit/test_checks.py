"""Tests of ``./inv test`` and of the CI configuration and scripts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import eventually

from toolchain import checks, completion
from toolchain.config import ROOT
from toolchain.errors import ChecksFailed

INITRAMFS = "images/overlay/bootable/etc/initramfs-tools"


def program(*, status: int, says: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({says!r}); raise SystemExit({status})")


def test_all_checks_run_before_failures_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChecksFailed, match=r"2 of 3 checks failed: first \(exit status 3\), third") as caught:
        checks.run_all(
            [
                checks.Check("first", program(status=3)),
                checks.Check("second", program(status=0, says="1 passed in 0.01s")),
                checks.Check("third", program(status=1)),
            ]
        )
    assert caught.value.exit_code == 50
    assert "1 passed in 0.01s" in capfd.readouterr().out


INTERRUPTED = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1], "started").touch()
    time.sleep(600)
finally:
    time.sleep(float(sys.argv[2]))
    pathlib.Path(sys.argv[1], "cleaned").touch()
"""


@pytest.mark.parametrize("seconds", ["1", "0"])
def test_ctrl_c_waits_until_a_check_has_cleaned_up(tmp_path: Path, seconds: str) -> None:
    """Ctrl-C reaches only the task, as from kill."""
    task = """
import sys
from toolchain import checks
try:
    checks.run_all([checks.Check("endless", tuple(sys.argv[1:]))])
except KeyboardInterrupt:
    print("interrupted")
"""
    words = [sys.executable, "-c", task, sys.executable, "-c", INTERRUPTED, str(tmp_path), seconds]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        eventually((tmp_path / "started").exists, task=running)
        running.send_signal(signal.SIGINT)
        printed, _ = running.communicate(timeout=60)
    assert printed.endswith("interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_ctrl_c_just_before_a_check_ends_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def interrupted(ended: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.undo()  # only once
        wait(ended, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checks.run_all([checks.Check("short", program(status=0))])


def test_passing_checks_raise_nothing() -> None:
    checks.run_all([checks.Check("one", program(status=0))])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the linters and pytest with programs that exit immediately."""
    monkeypatch.setattr(checks, "linters", lambda: (checks.Check("linter", program(status=0, says="linted")),))
    tests = checks.Check("tests", program(status=0, says="1 passed, 1 skipped"))
    monkeypatch.setattr(checks, "all_tests", lambda *_: tests)


@pytest.mark.parametrize("select", ["", "some"])
def test_missing_programs_are_an_error_unless_partial(
    few: None, select: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks, "BUILDERS", ("sh", "no-such-builder"))
    assert checks.missing_for_builds() == ("root privileges", "the program no-such-builder")
    with pytest.raises(ChecksFailed) as caught:
        checks.run_tests(select=select)
    assert caught.value.exit_code == 50
    assert caught.value.found == "this machine lacks root privileges, the program no-such-builder"
    assert "sudo ./inv test" in caught.value.fix
    assert "./inv --set-up" in caught.value.fix
    assert "--partial" in caught.value.fix
    assert "linted" not in capfd.readouterr().out, "the error must come before the first check"
    checks.run_tests(select=select, partial=True)
    said = capfd.readouterr()
    assert "1 passed, 1 skipped" in said.out
    last = (said.out + said.err).strip().splitlines()[-1]
    assert (
        "SKIPPED: the tests of the main job, because this machine lacks root privileges, the program no-such-builder"
        in last
    )


def test_a_failed_partial_run_reports_skipped_tests(
    few: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "BUILDERS", ("no-such-builder",))
    monkeypatch.setattr(checks, "all_tests", lambda *_: checks.Check("tests", program(status=1)))
    with pytest.raises(ChecksFailed, match="1 of 2 checks failed"):
        checks.run_tests(partial=True)
    said = capfd.readouterr()
    assert "SKIPPED" in said.out + said.err


def test_quick_runs_linters_and_unit_tests_without_root(
    few: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks, "unit_tests", lambda _: checks.Check("unit", program(status=0, says="2 passed")))
    checks.run_tests(quick=True)
    printed = capfd.readouterr().out
    assert "linted" in printed
    assert "2 passed" in printed
    assert "1 passed, 1 skipped" not in printed


def test_linters_run_without_root(
    few: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(checks, "BUILDERS", ("sh",))
    checks.run_tests()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    checks.run_tests(checks_only=True)
    said = capfd.readouterr()
    assert said.out.count("1 passed, 1 skipped") == 2, "expected the text in the printed command line and in the output"
    assert "SKIPPED" not in said.out + said.err


@pytest.fixture
def project() -> tuple[Path, ...]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return checks.files_of_the_project()


def test_files_with_special_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, the checkout belongs to another user."""
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("größe.sh", 'a "quoted"\tname', "ignored"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(".gitignore")
    if os.geteuid() == 0:
        for path in (tmp_path, tmp_path / ".git"):
            os.chown(path, 1234, 1234)
    found = {path.name for path in checks.files_of_the_project()}
    assert found == {".gitignore", "größe.sh", 'a "quoted"\tname'}


@pytest.mark.parametrize(
    ("name", "text", "is_shell"),
    [
        ("run", "#!/bin/sh\n", True),
        ("run", "#!/bin/bash -e\n", True),
        ("run", "#!/usr/bin/env bash\n", True),
        ("run", "#!/usr/bin/env python3\n", False),
        ("run", "# shellcheck shell=sh\n", True),
        ("run", "# a list\n", False),
        ("run", "", False),
        ("run.sh", "# sourced\n", True),
        ("run.bash", "complete inv\n", True),
        ("run.zsh", "#compdef inv\n", False),
        ("run.py", "#!/bin/sh\n", False),
    ],
)
def test_shell_scripts_are_recognised(tmp_path: Path, name: str, text: str, is_shell: bool) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert checks.is_shell_script(path) == is_shell


def test_the_projects_shell_scripts_are_found(project: tuple[Path, ...]) -> None:
    found = {str(path.relative_to(ROOT)) for path in checks.shell_scripts()}
    assert {"inv", ".ci/run", ".ci/bare-machine", "nfsroot/enter-nfsroot", "completions/inv.bash"} <= found
    assert f"{INITRAMFS}/scripts/nfs4" in found


def test_shellcheck_reads_every_script(project: tuple[Path, ...]) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; ./inv installs it")
    (check,) = [check for check in checks.linters() if check.name == "shellcheck"]
    assert {ROOT / word for word in check.argv[1:]} == set(checks.shell_scripts())


def test_mypy_reads_every_test(project: tuple[Path, ...]) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; ./inv installs it")
    folders = [ROOT / check.argv[-1] for check in checks.linters() if check.name.startswith("mypy ")]
    tests = [path for path in project if path.suffix in (".py", ".pyi") and path.is_relative_to(ROOT / "tests")]
    assert tests
    assert [path for path in tests if not any(path.is_relative_to(folder) for folder in folders)] == []
    assert all(ROOT.joinpath(script) in project for script in checks.SCRIPTS)


def test_pytest_gets_expression_and_lanes() -> None:
    assert checks.all_tests("a or b").argv[-2:] == ("-k", "a or b")
    assert not {"-k", "-n"} & set(checks.all_tests().argv)
    assert "-n" in checks.all_tests(lanes=3).argv


def test_bare_machine_prints_its_usage() -> None:
    ended = subprocess.run([ROOT / ".ci/bare-machine"], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "usage: .ci/bare-machine SUITE" in ended.stderr


def test_the_workflow_runs_ci_run() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert {"run": ".ci/run"} in job["steps"]
    assert job["timeout-minutes"] <= 90
    assert "./inv test" in Path(ROOT / ".ci/run").read_text()


def test_expensive_tests_run_weekly() -> None:
    document = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    (when,) = document[True]["schedule"]  # YAML reads the key "on" as true
    minute, hour, day, month, weekday = when["cron"].split()
    assert (day, month) == ("*", "*")
    assert all(field.isdecimal() for field in (minute, hour, weekday))
    (step,) = [step for step in document["jobs"]["expensive"]["steps"] if "expensive" in step.get("run", "")]
    assert step["run"] == ".ci/run expensive"
    assert document["jobs"]["expensive"]["timeout-minutes"] < 360, "on a hosted runner, a job is limited to 360 minutes"


def test_expensive_tests_run_after_the_set_up(tmp_path: Path) -> None:
    """The script runs in a temporary folder with substitutes for ./inv and Python, which print their arguments."""
    for name, says in (("inv", "inv"), (".venv/bin/python", "python")):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {says} "$@"\n')
        program.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")

    def lines(*words: str) -> list[str]:
        said = subprocess.run([tmp_path / ".ci/run", *words], check=True, capture_output=True, text=True).stdout
        return said.splitlines()

    assert lines() == ["inv test", "inv down"]
    prepared, tested, ended = lines("expensive")
    assert prepared == "inv --set-up"
    assert tested.startswith("python -m pytest -m expensive")
    assert ended == "inv down"


def test_the_workflow_tests_every_shells_completion() -> None:
    """Bash is always installed. The workflow installs the other shells, because tests of missing shells are skipped."""
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    (step,) = [step for step in steps if "test_completion.py" in step.get("run", "")]
    install, test = step["run"].splitlines()
    assert {*completion.SHELLS} - {"bash"} <= set(install.split())
    assert install.startswith("apt-get install")
    assert test.startswith(".venv/bin/python -m pytest")


# ------------------------------------------------------------------------------------------- before each commit


@pytest.fixture
def hooks() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return [hook for repo in document["repos"] for hook in repo["hooks"]]


def linter_of(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the program, and ruff's subcommand or mypy's folder."""
    words = argv[2:] if argv[1] == "-m" else argv
    name = Path(words[0]).name
    return (name, *(word for word in words[1:2] if word and name in ("ruff", "mypy")))


def test_the_linters_are_those_that_run_before_each_commit(hooks: list[dict[str, Any]]) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; ./inv installs it")
    wanted = {linter_of(check.argv) for check in checks.linters()}
    assert {linter_of([*shlex.split(hook["entry"]), ""]) for hook in hooks} == wanted
    assert {check.name for check in checks.linters()} <= {hook["name"] for hook in hooks}
    assert {hook["language"] for hook in hooks} == {"system"}, "each hook must run the linter that is installed here"


def test_shellcheck_reads_the_same_scripts_before_a_commit(
    hooks: list[dict[str, Any]], project: tuple[Path, ...]
) -> None:
    identify = pytest.importorskip("identify.identify")
    read = set()
    for hook in hooks:
        if linter_of([hook["entry"], ""]) == ("shellcheck",):
            for path in project:
                name, tags = str(path.relative_to(ROOT)), identify.tags_from_path(str(path))
                if (
                    tags >= set(hook["types"])
                    and not tags & set(hook.get("exclude_types", ()))
                    and re.search(hook.get("files", ""), name)
                    and not re.search(hook.get("exclude", "^$"), name)
                ):
                    read.add(path)
    assert read == set(checks.shell_scripts())
