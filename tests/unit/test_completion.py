"""Tests of shell completion in bash, fish and zsh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolchain import completion
from toolchain.config import ROOT
from toolchain.errors import UserError


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Make a replacement for ./inv that runs Invoke on the real tasks."""
    path = tmp_path / "inv"
    path.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m invoke "$@"\n')
    path.chmod(0o755)
    return path


def complete_in_bash(program: Path, *words: str) -> list[str]:
    """Return the completions that bash offers for the last word."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    line = " ".join(shlex.quote(word) for word in (str(program), *words))
    script = (
        f"{completion.script('bash')}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
        f'_pitorch_inv {shlex.quote(str(program))} {shlex.quote(words[-1])}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    ended = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_bash_completes_tasks(program: Path) -> None:
    assert complete_in_bash(program, "doc") == ["doctor"]
    assert "down" in complete_in_bash(program, "do")
    assert complete_in_bash(program, "upstream") == ["upstream-tests"]


def test_bash_completes_a_tasks_options(program: Path) -> None:
    assert complete_in_bash(program, "doctor", "--j") == ["--json"]


def test_bash_completes_for_a_checkout_below_the_home_folder(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(program.parent))
    assert complete_in_bash(Path("~/inv"), "upstream") == ["upstream-tests"]


def test_bash_offers_nothing_for_an_unknown_task(program: Path) -> None:
    assert complete_in_bash(program, "no-such-task") == []


def test_bash_registers_the_completion_for_inv() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = f"{completion.script('bash')}\ncomplete -p ./inv"
    ended = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert "_pitorch_inv" in ended.stdout


def test_fish_completes_tasks_and_options(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    monkeypatch.setenv("HOME", str(program.parent))
    for line, word in ((f"{program} doc", "doctor"), ("~/inv doctor --j", "--json")):
        script = f"{completion.script('fish')}\ncomplete --do-complete {shlex.quote(line)}"
        ended = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
        assert word in ended.stdout.split()


def test_zsh_completes_tasks(program: Path, tmp_path: Path) -> None:
    """The test runs zsh in a terminal, because zsh completes only there."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    pexpect = pytest.importorskip("pexpect")
    setup = tmp_path / "completion.zsh"
    setup.write_text(completion.script("zsh"))
    shell = pexpect.spawn(
        "zsh", ["-f"], env={"PATH": "/usr/bin:/bin", "TERM": "dumb", "PS1": "> "}, encoding="utf-8", timeout=60
    )
    try:
        shell.sendline(f"autoload -U compinit; compinit -D -u; source {setup}; cd {program.parent}; echo rea'dy'")
        shell.expect("ready")
        shell.send("./inv docto\t")
        shell.expect("doctor")
    finally:
        shell.close(force=True)


@pytest.mark.parametrize(("shell", "near"), [("bsh", "bash"), ("ksh", "bash"), ("FISH", "bash"), ("fsh", "fish")])
def test_an_unknown_shell_is_refused_with_a_suggestion(shell: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        completion.script(shell)
    assert caught.value.found == repr(shell)
    assert caught.value.fix.startswith("run ./inv completion ")
    if shell != "ksh":
        assert caught.value.fix.endswith(near)
