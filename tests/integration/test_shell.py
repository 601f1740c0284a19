"""Tests of the shell in the image: its container is removed when the task ends, and the terminal is restored."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import nasty_image
import pytest
from processes import command_lines
from registry_parts import engine_client, need
from waiting import eventually

from engine import containers
from toolchain.config import ROOT

pytestmark = pytest.mark.engine

# Runs with the signal handlers of tasks.py. SIGALRM represents an unexpected exception.
CALL = """
import signal, sys
from pathlib import Path
import tasks
from images.native import Mounts
from flow.shell import open_shell
from toolchain.architecture import ARCHITECTURES

def bug(*_):
    raise RuntimeError("a bug")

@tasks._reported
def task(image, folder, command):
    signal.signal(signal.SIGALRM, bug)
    architecture = next(row for row in ARCHITECTURES.values() if row.debian == "amd64")
    sys.exit(open_shell(image, architecture, Path(folder), compiler=Mounts(), command=command, as_root=True))

task(*sys.argv[1:])
"""


def little_root() -> bytes:
    """Make the tar of a root with this machine's shell and ``sleep``."""
    bash = nasty_image.with_libraries("bash")
    return nasty_image.root_of({**bash, "bin/sh": bash["bin/bash"], **nasty_image.with_libraries("sleep")})


@pytest.fixture(scope="module")
def client(engine_if_root: None) -> Iterator[docker.DockerClient]:
    with engine_client() as found:
        yield found


@pytest.fixture(scope="module")
def imported(client: docker.DockerClient) -> Iterator[str]:
    need("docker", "ldd")
    if os.uname().machine != "x86_64":
        pytest.skip("requires an amd64 machine")
    name = f"pitorch-test-{uuid.uuid4().hex[:10]}"
    client.api.import_image_from_data(little_root(), repository=name, tag="shell")
    try:
        yield f"{name}:shell"
    finally:
        client.images.remove(f"{name}:shell", force=True)


@pytest.fixture
def image(client: docker.DockerClient, imported: str) -> Iterator[str]:
    """Provide the image, and remove the containers that a failed test leaves behind."""
    yield imported
    for left in client.containers.list(all=True, filters={"ancestor": imported}, ignore_removed=True):
        left.remove(force=True)


def containers_of(client: docker.DockerClient, image: str) -> list[str]:
    """Return the states of the image's containers."""
    found = client.containers.list(all=True, filters={"ancestor": image}, ignore_removed=True)
    return [box.status for box in found]


def assert_none_is_left(client: docker.DockerClient, image: str) -> None:
    """Check that no container is running, and wait until those that are being removed have disappeared."""
    assert "running" not in containers_of(client, image)
    eventually(lambda: not containers_of(client, image))


def wait_until(found: Callable[[], object], task: subprocess.Popen[bytes]) -> None:
    eventually(found, interval_s=0.01, task=task)


def child_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


@pytest.mark.parametrize(
    ("sign", "early"),
    [
        *((sign, early) for sign in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) for early in (False, True)),
        (signal.SIGALRM, False),
    ],
)
def test_an_ended_task_leaves_no_container(
    client: docker.DockerClient, image: str, tmp_path: Path, sign: signal.Signals, early: bool
) -> None:
    command = "trap '' INT TERM HUP; echo ready; while :; do sleep 600; done"
    argv = [sys.executable, "-c", CALL, image, str(tmp_path), command]
    with (tmp_path / "said").open("wb") as said:
        task = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        wait_until(lambda: child_of(task.pid) if early else containers_of(client, image) == ["running"], task)
        task.send_signal(sign)
        assert task.wait(60) != 0
    finally:
        task.kill()
        task.wait()
    if early:
        time.sleep(1)  # A container that is created late would exist by now.
    assert_none_is_left(client, image)


def test_the_task_has_the_exit_status_of_the_command(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CALL, image, str(tmp_path), "echo words; exit 7"]
    done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "words\n"), done.stderr
    assert_none_is_left(client, image)


def test_the_terminal_is_restored(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        before = termios.tcgetattr(theirs)
        argv = ["setsid", "--ctty", sys.executable, "-c", CALL, image, str(tmp_path), ""]
        task = subprocess.Popen(argv, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
        try:
            wait_until(lambda: containers_of(client, image) == ["running"], task)
            wait_until(lambda: termios.tcgetattr(theirs) != before, task)
            task.send_signal(signal.SIGTERM)
            task.wait(60)
        finally:
            task.kill()
            task.wait()
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
    assert_none_is_left(client, image)


def test_a_proxy_password_is_not_on_a_command_line(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    """Every user can read command lines, so the container gets the password in its environment."""
    proxy = "http://someone:hidden-4711@127.0.0.1:9"
    argv = [sys.executable, "-c", CALL, image, str(tmp_path), 'echo "$http_proxy $HTTP_PROXY $HOME"; sleep 600']
    environment = {**os.environ, "http_proxy": proxy}
    said = tmp_path / "said"
    with said.open("wb") as out:
        task = subprocess.Popen(argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait_until(lambda: said.read_text().endswith("/root\n"), task)
        assert said.read_text() == f"{proxy} {proxy} /root\n"
        lines = command_lines().values()
    finally:
        task.terminate()
        task.wait(60)
    assert any("run" in line and image in line for line in lines), (
        "the command line of the program that opens the shell was not found"
    )
    assert not any("hidden-4711" in line for line in lines)
    assert_none_is_left(client, image)


# ------------------------------------------------------------------------------------------ a task that is killed

STEP = """
import sys
from engine.containers import run_in
from engine.connect import connect
from toolchain.architecture import ARCHITECTURES
architecture = next(row for row in ARCHITECTURES.values() if row.debian == "amd64")
run_in(connect(), sys.argv[1], ["bash", "-c", sys.argv[2]], architecture=architecture)
"""


def next_task() -> str:
    """Run a task that does not need the engine, and return its standard error."""
    argv = [sys.executable, "-m", "toolchain.cli", "completion", "bash"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stderr


@contextlib.contextmanager
def task_in(image: str, code: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a separate session, which is stopped at the end of the block."""
    argv = [sys.executable, "-c", code, image, *words]
    quiet = subprocess.DEVNULL
    task = subprocess.Popen(argv, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield task
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)
        task.wait()


@pytest.mark.parametrize(("code", "words"), [(STEP, ()), (CALL, ("/",))])
@pytest.mark.parametrize("stopped", [True, False])
def test_the_next_task_removes_what_a_killed_one_left(
    client: docker.DockerClient, image: str, tmp_path: Path, code: str, words: tuple[str, ...], stopped: bool
) -> None:
    """The container may be running or stopped. The engine itself removes the docker program's stopped containers."""
    command = "sleep 3" if stopped else "sleep 600"
    for _ in range(5):  # A task in a parallel test process may remove the container first.
        with task_in(image, code, *words, command) as task:
            wait_until(lambda: containers_of(client, image) == ["running"], task)
        if stopped:
            eventually(lambda: "running" not in containers_of(client, image))
        said = next_task()
        assert_none_is_left(client, image)
        if stopped or said:
            break
    assert stopped or "removed the container of a killed task: pitorch-" in said
    assert "killed task" not in next_task()


def test_containers_of_running_tasks_stay(client: docker.DockerClient, image: str) -> None:
    with task_in(image, STEP, "sleep 600") as task:
        wait_until(lambda: containers_of(client, image) == ["running"], task)
        next_task()
        assert containers_of(client, image) == ["running"]
    next_task()
    assert_none_is_left(client, image)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"namespace": "pid:[1]", "pid": 1}', "ours and damaged"])
def test_containers_of_unknown_processes_stay(client: docker.DockerClient, image: str, text: str) -> None:
    box = client.containers.create(image, ["sleep", "1"], labels={containers._CREATOR: text})
    next_task()
    assert containers_of(client, image) == ["created"]
    box.remove()


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:9", "nonsense"])
def test_a_task_without_an_engine_does_not_wait(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert next_task() == ""
