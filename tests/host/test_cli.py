"""The command line: what users type becomes what Invoke understands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolchain.cli import spelt_out
from toolchain.config import ROOT


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        (["build-image", "--plan"], ["build-image", "--plan"]),
        (["mirror"], ["mirror"]),
        (["mirror", "https://a", "https://b"], ["mirror", "--url", "https://a", "--url", "https://b"]),
        (["mirror", "--remove", "https://a"], ["mirror", "--remove", "--url", "https://a"]),
        (["mirror", "--url", "https://a"], ["mirror", "--url", "https://a"]),
        (["mirror", "https://a", "doctor", "--json"], ["mirror", "--url", "https://a", "doctor", "--json"]),
        (["mirror", "a.example", "b:5000"], ["mirror", "--url", "a.example", "--url", "b:5000"]),
        (["mirror", "--remove", "a.example", "doctor"], ["mirror", "--remove", "--url", "a.example", "doctor"]),
        (["verify", "--help"], ["--help", "verify"]),
        (["push", "-h"], ["--help", "push"]),
        (["--help", "verify"], ["--help", "verify"]),
        (["--list"], ["--list"]),
        ([], []),
        (["chroot", "--command", "-h"], ["chroot", "--command", "-h"]),
    ],
)
def test_what_is_typed_is_spelt_out_for_invoke(typed: list[str], understood: list[str]) -> None:
    assert spelt_out(typed) == understood


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "toolchain.cli", *words]
    env = {**os.environ, **variables}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_every_task_has_help_with_its_options() -> None:
    listed = run("--list", "--list-format=flat")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ") and line.strip()]
    names = [name for name in names if name.replace("-", "").isalpha() and name.islower()]
    assert {"build-image", "export-nfsroot", "test-on-pi", "push", "shell", "doctor", "test"} <= set(names)
    for name in ("build-image", "export-nfsroot", "test-on-pi", "push", "shell", "verify", "build-wheel"):
        told = run(name, "--help")
        assert told.returncode == 0
        assert told.stdout == run("--help", name).stdout
        assert "Docstring:\n" in told.stdout
        assert "Docstring:\n  none" not in told.stdout


@pytest.mark.parametrize("words", [["registry", "sideways"], ["share-internet", "maybe"]])
def test_a_wrong_word_is_refused_with_the_right_ones(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "expected" in done.stderr
    assert "status" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_configuration_is_reported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVOKE_IMAGE_SUITE", "trixi")
    monkeypatch.setenv("INVOKE_NFS_PORT", "0")
    done = run("build-image", "--plan")
    assert done.returncode == 11
    assert "2 faults" in done.stderr
    assert "image.suite: expected one of trixie, bookworm; did you mean 'trixie'?" in done.stderr
    assert "nfs.port" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image: trixie\n", "image: expected a section with keys, found 'trixie'"),
        ("image: [suite]\n", "image: expected a section with keys"),
        ("image: {suite: trixie\n", "not YAML: "),
        ("- image\n", "expected sections with settings, found ['image']"),
        ("1: 2\n", "1: expected the name of a section; YAML reads it as int"),
        ("image:\n  on: trixie\n", "image.True: expected the name of a setting; YAML reads it as bool"),
        ("image:\n  suite: {name: trixie}\n", "image.suite: expected a value, found {'name': 'trixie'}"),
        ("run: 5\n", "run: expected Invoke's own settings"),
    ],
)
def test_a_settings_file_of_another_form_is_refused_without_a_traceback(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_text(text)
    done = run(f"--config={path}", "completion", "bash")
    assert said in done.stderr
    assert "edit invoke.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 11


def test_a_settings_file_of_another_encoding_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_bytes("image:\n  suite: trixié\n".encode("latin-1"))
    done = run(f"--config={path}", "completion", "bash")
    assert (done.returncode, "Traceback" in done.stderr) == (11, False)
    assert f"{path}: not YAML: " in done.stderr


@pytest.mark.parametrize("text", ["", "# nothing\n", "image:\n  # suite: bookworm\n"])
def test_an_empty_section_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_text(text)
    done = run(f"--config={path}", "completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------ --config


def test_the_file_wins_over_variables_and_they_over_all_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("image:\n  suite: trixie\n  flavour: ubuntu\n")
    variables = {"INVOKE_IMAGE_SUITE": "sid", "INVOKE_IMAGE_FLAVOUR": "debian", "INVOKE_NFS_PORT": "0"}
    done = run(f"--config={path}", "build-image", "--plan", **variables)
    assert done.returncode == 11
    assert "2 faults" in done.stderr
    assert "image.flavour: expected one of debian, raspbian, found 'ubuntu'" in done.stderr, "of the file"
    assert "nfs.port: expected 1 to 65535, found '0'" in done.stderr, "of a variable of which the file says nothing"
    path.write_text("qpu:\n  library: local\n")
    done = run(f"--config={path}", "build-image", "--plan", "--qpulib=nobodys", INVOKE_QPU_LIBRARY="upstream")
    assert "qpu.library: expected one of local, upstream, found 'nobodys'" in done.stderr, "a task's option wins"


@pytest.mark.parametrize("form", ["yaml", "yml", "json"])
def test_the_file_is_from_the_callers_folder(tmp_path: Path, form: str) -> None:
    (tmp_path / f"mine.{form}").write_text('{"image": {"suite": "sid"}}')
    for path in (f"mine.{form}", str(tmp_path / f"mine.{form}"), f"~/mine.{form}"):
        words = ("--config", path, "build-image", "--plan")
        done = run(*words, PITORCH_CALLER_CWD=str(tmp_path), HOME=str(tmp_path), SUDO_UID="")
        assert done.returncode == 11, path
        assert "image.suite: expected one of trixie, bookworm, found 'sid'" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.yaml", "/absent.yaml: No such file or directory"),
        ("folder.yaml", "/folder.yaml: Is a directory"),
        ("x.conf", "expected a file whose name ends in one of .yaml, .yml, .json, .py, found 'x.conf'"),
        ("x", "expected a file whose name ends in one of .yaml, .yml, .json, .py, found 'x'"),
        ("x.json", "not JSON: "),
        ("list.json", "expected sections with settings, found []"),
        ("x.yml", "not YAML: "),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_with_its_name(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for torn in ("x.conf", "x", "x.json", "x.yml"):
        (tmp_path / torn).write_text("{")
    (tmp_path / "list.json").write_text("[]")
    done = run("--config", name, "completion", "bash", PITORCH_CALLER_CWD=str(tmp_path))
    assert said in done.stderr
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (11, "", False)


def test_without_a_file_nothing_is_read() -> None:
    assert run("completion", "bash", INVOKE_RUNTIME_CONFIG="").returncode == 0
