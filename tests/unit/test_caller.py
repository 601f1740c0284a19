"""Tests that paths on the command line are relative to the caller's folder, although tasks run in the repository."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolchain import caller
from toolchain.config import ROOT

# Replaces the function that each task calls with one that prints the paths. This runs in a separate process, because
# tasks.py removes the INVOKE_* variables from the environment.
PRINT_PATHS = """
import importlib, json, sys
from invoke.context import Context
import tasks
printed = []
def tell(*given, **named):
    printed.extend(str(item) for item in (*given[1:], *named.values()))
    raise tasks.UserError("printed")
for module, name in (
    ("benchmarks.suite", "bench"),
    ("device.remote.models", "profile"),
    ("flow.audit_wheel", "audit"),
    ("flow.main_job", "open_shell"),
    ("nfsroot.difference", "compare"),
    ("nfsroot.export", "export"),
    ("device.remote.profiling", "profile"),
    ("flow.build_wheel", "build_wheel"),
):
    setattr(importlib.import_module(module), name, tell)
task, options = getattr(tasks, sys.argv[1]), json.loads(sys.argv[2])
try:
    task.body(Context(tasks.namespace.configuration()), **options)
except tasks.Exit as ended:
    assert str(ended) == "printed", ended
print(json.dumps(printed))
"""


def paths(here: Path, task: str, **options: object) -> list[str]:
    """Return the arguments that a task passes on when it is called from a folder."""
    env = {**os.environ, "PITORCH_CALLER_CWD": str(here)}
    argv = [sys.executable, "-c", PRINT_PATHS, task, json.dumps(options)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("task", "options", "found"),
    [
        ("shell", {"folder": "work"}, {"work"}),
        ("shell", {}, {""}),
        ("export_nfsroot", {"folder": "some/dir", "tarball": "../root.tar"}, {"some/dir", "../root.tar"}),
        ("profile_remote", {"kernel": "mine.py", "target": "armv7", "keep": "kept.so"}, {"mine.py", "kept.so"}),
        ("build_wheel", {"what": "project", "package": [], "constraint": [], "env": []}, {""}),
        ("bench", {"name": "cpu", "against": "old.whl"}, {"old.whl"}),
    ],
)
def test_paths_are_from_the_callers_folder(
    tmp_path: Path, task: str, options: dict[str, object], found: set[str]
) -> None:
    assert {str(tmp_path / path) for path in found} <= set(paths(tmp_path, task, **options))


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("shell", {"folder": "~/work"}),
        ("export_nfsroot", {"folder": "~/dir", "tarball": "~/root.tar"}),
        ("profile_remote", {"kernel": "~/mine.py", "target": "armv7", "keep": "~/kept.so"}),
        ("profile_remote", {"model": "~/mine.pt2", "target": "armv7", "export": "~/exported"}),
        ("diff", {"old": "~/a.tar", "new": "~/b.tar"}),
        ("build_wheel", {"what": "~/project", "package": [], "constraint": ["~/limits.txt"], "env": []}),
        ("audit_wheel", {"what": "~/a.whl", "cpu": "cortex-a53"}),
        ("bench", {"name": "cpu", "against": "~/a.whl"}),
    ],
)
def test_tilde_in_an_option_is_the_callers_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, options: dict[str, object]
) -> None:
    """Bash does not expand ``~`` in ``--folder=~/nfs``."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "limits.txt").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SUDO_UID", raising=False)
    printed = " ".join(paths(tmp_path, task, **options))
    assert "~" not in printed
    assert printed.count(f"{home}/") == json.dumps(options).count("~/")


def test_absolute_paths_and_kernel_names_are_unchanged(tmp_path: Path) -> None:
    assert "/srv/pi" in paths(tmp_path, "export_nfsroot", folder="/srv/pi")
    printed = paths(tmp_path, "profile_remote", kernel="gemm", target="armv7")
    assert "gemm" in printed
    assert not [text for text in printed if text.startswith(str(tmp_path))]


@pytest.fixture
def typed() -> Iterator[None]:
    """Reset the recorded command line after each test."""
    yield
    caller.remember([], [])


def test_root_command_repeats_arguments_and_settings(monkeypatch: pytest.MonkeyPatch, typed: None) -> None:
    monkeypatch.setenv("PITORCH_CALLER_CWD", str(ROOT))
    assert caller.as_root("./inv TASK") == "sudo ./inv TASK", "no command line was recorded"
    caller.remember(["build-image", "--update"], ["HOME", "PITORCH_CALLER_CWD", "proxy", "MY_INVOKE_X", "INVOKE"])
    assert caller.as_root("./inv TASK") == "sudo ./inv build-image --update"
    environment = {
        "INVOKE_IMAGE_SUITE": "bookworm",
        "https_proxy": "http://me:secret@proxy",
        "NO_PROXY": "",
        "PITORCH_REGISTRY_PASSWORD": "secret",
        "PITORCH_CALLER_CWD": "/",
        "DOCKER_HOST": "unix:///x.sock",
        "PATH": "/bin",
    }
    caller.remember(["shell", "--command", "a 'b'"], environment)
    line = caller.as_root("./inv TASK")
    assert shlex.split(line) == [
        "sudo",
        "--preserve-env=DOCKER_HOST,INVOKE_IMAGE_SUITE,NO_PROXY,PITORCH_REGISTRY_PASSWORD,https_proxy",
        *("./inv", "shell", "--command", "a 'b'"),
    ]
    assert "secret" not in line


def test_other_tasks_are_run_for_the_same_architecture() -> None:
    assert caller.command("sd-image") == "./inv sd-image"
    caller.remember_architecture("arm64")
    assert caller.command("sd-image") == "./inv sd-image --architecture=arm64"
    caller.remember_architecture("")
    assert caller.command("sd-image") == "./inv sd-image"


def test_script_is_named_relative_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: None
) -> None:
    """Paths on the command line are relative to the caller's folder."""
    monkeypatch.setenv("PITORCH_CALLER_CWD", str(tmp_path))
    caller.remember(["export-nfsroot", "--folder=a"], [])
    assert caller.as_root("./inv TASK") == f"sudo {ROOT / 'inv'} export-nfsroot --folder=a"


def test_without_the_wrapper_the_current_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PITORCH_CALLER_CWD", raising=False)
    monkeypatch.chdir(tmp_path)
    assert caller.path("a") == tmp_path / "a"
    assert caller.path("") == tmp_path
