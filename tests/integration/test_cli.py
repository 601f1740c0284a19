"""Tests of the command line: the translation of arguments for Invoke, and error cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest
from forked_cli import Run, forked_cli

from benchmarks import suite
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
def test_arguments_are_translated_for_invoke(typed: list[str], understood: list[str]) -> None:
    assert spelt_out(typed) == understood


_forked: list[Run] = []


@pytest.fixture(scope="module", autouse=True)
def one_import(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import the project's modules once for ``run`` and ``run_with``."""
    with forked_cli(tmp_path_factory.mktemp("cli")) as running:
        _forked[:] = [running]
        yield


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_with(words, variables)


def run_with(words: tuple[str, ...], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return _forked[0](words, {**os.environ, **variables})


def run_alone(
    words: tuple[str, ...],
    variables: Mapping[str, str],
    *,
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run the program in a new interpreter."""
    argv = [sys.executable, "-m", "toolchain.cli", *words]
    env = {**os.environ, **variables}
    return subprocess.run(argv, cwd=ROOT, env=env, stdout=stdout, stderr=stderr, text=True, check=False, timeout=120)


def test_a_task_does_not_use_the_callers_umask() -> None:
    program = (
        "import atexit, os, runpy; os.umask(0o077); atexit.register(lambda: print(f'umask {os.umask(0):03o}')); "
        "runpy.run_module('toolchain.cli', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", program, "--version"], cwd=ROOT, capture_output=True, check=True)
    assert ended.stdout.endswith(b"umask 022\n")


def test_every_task_has_help_with_its_options() -> None:
    listed = run("--list", "--list-format=flat")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ") and line.strip()]
    names = [name for name in names if name.replace("-", "").isalpha() and name.islower()]
    assert {"build-image", "export-nfsroot", "test-on-pi", "push", "shell", "doctor", "test"} <= set(names)
    assert run_alone(("push", "--help"), {}).stdout == run("--help", "push").stdout
    for words in (("test-on-pi", "-h"), ("test-on-pi", "--qemu", "-h"), ("-h", "test-on-pi")):
        assert run(*words).stdout == run("--help", "test-on-pi").stdout, words
    for name in ("build-image", "export-nfsroot", "test-on-pi", "push", "shell", "verify", "build-wheel"):
        printed = run(name, "--help")
        assert printed.returncode == 0
        assert "Docstring:\n" in printed.stdout
        assert "Docstring:\n  none" not in printed.stdout


def test_the_help_of_bench_lists_all_benchmarks() -> None:
    printed = " ".join(run("bench", "--help").stdout.split())
    *names, last = suite.BENCHMARKS
    assert f"{', '.join(names)} or {last} (default: all)" in printed


def test_the_option_architecture_overrides_the_variable(tmp_path: Path) -> None:
    """Tasks without other options also accept ``--architecture``."""
    variables = {"INVOKE_IMAGE_ARCHITECTURE": "armhf", "INVOKE_BUILD_FOLDER": str(tmp_path)}
    for words in (["export-nfsroot"], ["build-image", "--plan"], ["build-tvm-ffi", "--plan"]):
        done = run_with((*words, "--architecture=armv7"), variables)
        assert done.returncode == 11
        assert "image.architecture: expected one of armhf, arm64, amd64" in done.stderr
        assert "--architecture=STRING" in run(words[0], "--help").stdout
    for task in ("push", "pull"):
        done = run_with((task, "--architecture=armhf,armv7"), variables)
        assert done.returncode == 11
        assert "found 'armv7'" in done.stderr


@pytest.mark.parametrize("words", [["registry", "sideways"], ["lab", "sideways"], ["share-internet", "maybe"]])
def test_an_invalid_argument_lists_the_valid_ones(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "expected" in done.stderr
    assert "status" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("option", "fix"), [("", ""), ("-a=arm64", " --architecture=arm64")])
def test_suggested_task_has_the_same_architecture(tmp_path: Path, option: str, fix: str) -> None:
    device = tmp_path / "card"
    device.touch()
    done = run("write-card", f"--device={device}", *filter(None, [option]), INVOKE_BUILD_FOLDER=str(tmp_path / "build"))
    assert done.returncode == 25, done.stderr
    assert done.stderr.rstrip().endswith(f"fix:      run ./inv sd-image{fix}")


def test_the_option_architecture_is_for_its_own_task_only(tmp_path: Path) -> None:
    done = run_with(
        ("build-image", "--plan", "--architecture=arm64", "test-on-pi", "--qemu"),
        {"INVOKE_BUILD_FOLDER": str(tmp_path)},
    )
    assert "trixie-armhf/nfsroot.manifest.json" in done.stderr


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
        ("run: 5\n", "run: expected a section with Invoke's own settings"),
        ("tasks: {executor: my.Executor}\n", "tasks.executor: Invoke has no such setting; valid: "),
        ("tasks: {executor_class: my.Executor}\n", "tasks.executor_class: a class cannot be set here"),
        ("tasks: {dedupe: maybe}\n", "tasks.dedupe: expected a value such as True, found 'maybe'"),
        ("runners: {local: my.Runner}\n", "runners.local: a class cannot be set here"),
        ("run: &a {env: *a}\n", "run.env: expected names with text values"),
        ("image: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("image: " + "{a: " * 3000 + "}" * 3000, "nested too deeply"),
        ("image: {suite: 2024-13-45}\n", "not YAML: month must be in 1..12"),
        ("image: !!timestamp soon\n", "not YAML: "),
        ("nfs: {port: " + "9" * 5000 + "}\n", "not YAML: "),
    ],
)
def test_an_invalid_settings_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_text(text)
    done = run(f"--config={path}", "completion", "bash")
    assert said in done.stderr
    assert "edit invoke.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 11


def test_a_settings_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_bytes("image:\n  suite: trixié\n".encode("latin-1"))
    done = run(f"--config={path}", "completion", "bash")
    assert (done.returncode, "Traceback" in done.stderr) == (11, False)
    assert f"{path}: not YAML: " in done.stderr


@pytest.mark.parametrize("text", ["", "# nothing\n", "image:\n  # suite: bookworm\n"])
def test_an_empty_section_is_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "invoke.yaml"
    path.write_text(text)
    done = run(f"--config={path}", "completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------ --config


def test_the_file_overrides_environment_variables(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("image:\n  suite: trixie\n  flavour: ubuntu\n")
    variables = {"INVOKE_IMAGE_SUITE": "sid", "INVOKE_IMAGE_FLAVOUR": "debian", "INVOKE_NFS_PORT": "0"}
    done = run(f"--config={path}", "build-image", "--plan", **variables)
    assert done.returncode == 11
    assert "2 errors" in done.stderr
    assert "image.flavour: expected one of debian, raspbian, found 'ubuntu'" in done.stderr, (
        "expected the value from the file"
    )
    assert "nfs.port: expected 1 to 65535, found '0'" in done.stderr, (
        "expected the value of the variable, which the file does not override"
    )
    path.write_text("qpu:\n  library: local\n")
    done = run(f"--config={path}", "build-image", "--plan", "--qpulib=nobodys", INVOKE_QPU_LIBRARY="upstream")
    assert "qpu.library: expected one of local, upstream, found 'nobodys'" in done.stderr, (
        "a task's option must take precedence"
    )


@pytest.mark.parametrize("task", ["shell", "deploy"])
def test_shells_and_deployments_can_select_qpulib(task: str) -> None:
    done = run(task, "--qpulib=upstreem")
    assert done.returncode == 11
    assert "qpu.library: expected one of local, upstream; did you mean 'upstream'?, found 'upstreem'" in done.stderr


@pytest.mark.parametrize("form", ["yaml", "yml", "json"])
def test_the_file_is_relative_to_the_callers_folder(tmp_path: Path, form: str) -> None:
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
        ("x.py", "not valid Python: '{' was never closed"),
        ("section.py", "image: expected a section with keys, found 5"),
    ],
)
def test_an_unusable_config_file_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for torn in ("x.conf", "x", "x.json", "x.yml", "x.py"):
        (tmp_path / torn).write_text("{")
    (tmp_path / "section.py").write_text("image = 5")
    (tmp_path / "list.json").write_text("[]")
    done = run("--config", name, "completion", "bash", PITORCH_CALLER_CWD=str(tmp_path))
    assert said in done.stderr
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (11, "", False)


def test_without_a_file_nothing_is_read() -> None:
    assert run("completion", "bash", INVOKE_RUNTIME_CONFIG="").returncode == 0


# ------------------------------------------------------------------------------- invalid numbers and paths


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "neither"),
        (("--kernel=gemm", "--model=nets:cnn"), "both"),
        (("--kernel=gemm", "--html=report.html"), "an option for kernels together with --model"),
        (("--model=nets:cnn", "--size=64"), "an option for kernels together with --model"),
    ],
)
def test_profile_remote_needs_either_a_kernel_or_a_model(words: tuple[str, ...], found: str) -> None:
    done = run("profile-remote", "--target=local", *words)
    assert done.returncode == 10
    assert "the options must select either a kernel or a model" in done.stderr
    assert f"found:    {found}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("push-artefacts",), 25, "there is no artefact to push"),
        (("pull-artefacts", "--registry", "http://x/y"), 10, "must not contain a scheme"),
        (("build-wheel", "numpy"), 25, "NAME==VERSION"),
        (("build-wheel", "./nothing"), 25, "there is no project at"),
    ],
)
def test_tasks_exit_with_the_code_of_the_error(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = run(*words, INVOKE_BUILD_FOLDER=str(tmp_path / "build"))
    assert said in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "torch", "--sample=x"), "--sample: expected a number, found 'x'"),
        (("upstream-tests", "--limit=x"), "--limit: expected a number, found 'x'"),
        (("serve-nfsroot", "--port=2049.5"), "--port: expected a number, found '2049.5'"),
        (("serve-wheels", "--port", "http"), "--port: expected a number, found 'http'"),
        (("test", "--lanes=two"), "--lanes: expected a number, found 'two'"),
        (("-T", "soon", "down"), "--command-timeout: expected a number, found 'soon'"),
        (("--list-depth=x", "--list"), "--list-depth: expected a number, found 'x'"),
        (("serve-nfsroot", "--port=70000"), "nfs.port: expected 1 to 65535, found '70000'"),
        (("serve-wheels", "--port=-1"), "wheels.port: expected 1 to 65535, found '-1'"),
        (("upstream-tests", "--limit=inf"), "--limit: expected at most 1000000, found inf"),
        (("--list", "--list-format=x"), "--list-format: expected one of flat, nested, json, found 'x'"),
        (("upstream-tests", "--limit=0"), "--limit: expected at least 1, found 0"),
        (("verify", "torch", "--sample=0"), "--sample: expected at least 1, found 0"),
        (("bench", "--times=-1"), "--times: expected at least 1, found -1"),
        (("test", "--lanes=0"), "--lanes: expected at least 1, found 0"),
        (("export-nfsroot", "--tarball="), "--tarball: expected a value, found an empty string"),
        (("test-on-pi", "--host", ""), "--host: expected a value, found an empty string"),
    ],
)
def test_an_invalid_value_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 11), (
        "expected Invoke's exit code for an invalid command line (1), or this program's (11)"
    )


LONG = "n" * 256


@pytest.mark.parametrize("option", ["--folder", "--tarball"])
def test_paths_on_the_command_line_are_checked(option: str) -> None:
    done = run("export-nfsroot", f"{option}=/tmp/{LONG}")
    assert f"{option}: expected a path whose parts have at most 255 bytes each" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (11, False)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("export-nfsroot", "--tarball=special"), "--tarball"),
        (("profile-remote", "--target=local", "--kernel=add_one", "--keep=special"), "--keep"),
        (("sign", "special"), "--what"),
    ],
)
def test_a_pipe_is_not_replaced(tmp_path: Path, words: tuple[str, ...], option: str) -> None:
    """Output must not replace pipes, or devices such as /dev/null."""
    os.mkfifo(tmp_path / "special")
    done = run(
        *words,
        PITORCH_CALLER_CWD=str(tmp_path),
        INVOKE_BUILD_FOLDER=str(tmp_path / "build"),
        INVOKE_REGISTRY_SIGNING_KEY="x",
    )
    assert f"{option}: expected a file or a folder, not a device or a pipe, found 'special'" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (11, False)
    assert (tmp_path / "special").is_fifo()


def test_shell_in_a_file_is_refused_before_any_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("shell", f"--folder={tmp_path}/file", INVOKE_BUILD_FOLDER=str(tmp_path / "build"))
    assert f"{tmp_path}/file is not a folder" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (25, False)
    assert not (tmp_path / "build").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="an export needs root")
@pytest.mark.parametrize("option", ["--folder=/", "--folder=/usr/..", "--tarball=/"])
def test_an_export_to_the_root_directory_is_refused(option: str) -> None:
    done = run("export-nfsroot", option)
    assert "an export cannot replace the root folder of this machine" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (10, False)


# ---------------------------------------------------------------------- errors of the operating system


@pytest.mark.parametrize("words", [("--list",), ("build-image", "--plan")])
def test_standard_output_on_a_full_disk_is_reported(tmp_path: Path, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run_alone(words, {"INVOKE_BUILD_FOLDER": str(tmp_path)}, stdout=full)
    assert "standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 21


def test_both_streams_on_a_full_disk_exit_with_21() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert run_alone(("--list",), {}, stdout=full, stderr=full).returncode == 21


def test_a_closed_pipe_ends_the_program_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_alone(("--list",), {}, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("closed", "out", "err"), [(">&-", False, True), ("2>&-", True, False), ("<&- >&- 2>&-", False, False)]
)
def test_closed_streams_are_ignored(closed: str, out: bool, err: bool) -> None:
    for words, code in ((("--list",), 0), (("completion", "tcsh"), 10)):
        argv = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "toolchain.cli", *words]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code
        assert bool(done.stdout) == (out and code == 0)
        assert bool(done.stderr) == (err and code != 0)


@pytest.mark.parametrize("words", [("verify", "deep.spdx.json"), ("diff", "deep.json", "deep.json")])
def test_deeply_nested_json_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    for name in ("deep.json", "deep.spdx.json"):
        (tmp_path / name).write_text("[" * 100_000)
    done = run(*words, PITORCH_CALLER_CWD=str(tmp_path))
    assert "nested too deeply" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (10, 26)


def test_a_limit_on_open_files_is_reported(tmp_path: Path) -> None:
    limited = 'ulimit -n 10; exec "$0" -m toolchain.cli build-image --plan'
    argv, env = ["sh", "-c", limited, sys.executable], {**os.environ, "INVOKE_BUILD_FOLDER": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert "cannot run " in done.stderr
    assert "ulimit -n" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (14, False)


def test_a_file_size_limit_is_reported(tmp_path: Path) -> None:
    keep = tmp_path / "plan"
    limited = f'ulimit -f 0; exec "$0" -m toolchain.cli completion bash >{keep}'
    done = subprocess.run(
        ["sh", "-c", limited, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert "standard output: File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (10, False)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """There is a folder at the path of a file that the task reads."""
    (tmp_path / "trixie-armhf" / "mirror.manifest.json").mkdir(parents=True)
    done = run("build-image", "--plan", INVOKE_BUILD_FOLDER=str(tmp_path))
    assert f"{tmp_path}/trixie-armhf/mirror.manifest.json: Is a directory" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (10, False)


def test_a_home_that_is_a_file_is_ignored(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.touch()
    done = run("build-image", "--plan", HOME=str(home), SUDO_UID="", INVOKE_BUILD_FOLDER=str(tmp_path / "build"))
    assert (done.returncode, done.stderr) == (0, "")


def test_unreadable_user_settings_are_reported(tmp_path: Path) -> None:
    (tmp_path / ".invoke.yaml").mkdir()
    done = run("--list", HOME=str(tmp_path))
    assert f"{tmp_path}/.invoke.yaml: Is a directory" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (11, False)


# ------------------------------------------------------------------------------------------ passwords


def test_child_processes_do_not_get_the_passwords(tmp_path: Path) -> None:
    real = shutil.which("apt-get")
    if real is None:
        pytest.skip("apt-get is not installed")
    seen = tmp_path / "seen"
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\ncat /proc/self/environ >>{seen}\nexec {real} "$@"\n')
    (tmp_path / "apt-get").chmod(0o755)
    done = run(
        "build-image",
        "--plan",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PITORCH_REGISTRY_PASSWORD="a secret",
        PITORCH_SIGNING_PASSWORD="a secret",
        INVOKE_BUILD_FOLDER=str(tmp_path / "build"),
    )
    assert done.returncode == 0, done.stderr
    environment = seen.read_bytes()
    assert b"INVOKE_" not in environment
    assert b"PATH=" in environment
    assert b"a secret" not in environment
