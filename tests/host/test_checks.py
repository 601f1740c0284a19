"""The run of all checks, and the files of continuous integration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toolchain import checks
from toolchain.config import ROOT
from toolchain.errors import ChecksFailed


def program(*, status: int, says: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({says!r}); raise SystemExit({status})")


def test_all_are_run_before_the_verdict(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_nothing_is_raised_when_all_are_content() -> None:
    checks.run_all([checks.Check("one", program(status=0))])


def test_the_wrapper_and_the_helpers_are_among_the_shell_scripts() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    found = {str(path.relative_to(ROOT)) for path in checks.shell_scripts()}
    assert {"inv", ".ci/run", ".ci/bare-machine"} <= found


def test_pytest_gets_the_expression() -> None:
    assert checks.host_tests("a or b").argv[-2:] == ("-k", "a or b")
    assert not {"-k", "-n"} & set(checks.host_tests().argv)
    assert "-n" in checks.host_tests(lanes=2).argv


@pytest.mark.parametrize("name", [".ci/run", ".ci/bare-machine"])
def test_the_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_the_bare_machine_says_how_it_is_called() -> None:
    ended = subprocess.run([ROOT / ".ci/bare-machine"], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "usage: .ci/bare-machine SUITE" in ended.stderr


def test_the_workflow_runs_what_a_desk_runs() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert {"run": ".ci/run"} in job["steps"]
    assert job["timeout-minutes"] <= 90
    assert "./inv test" in Path(ROOT / ".ci/run").read_text()
