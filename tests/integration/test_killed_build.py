"""Test of an image build that is killed while mmdebstrap configures the root filesystem.

The test builds a root filesystem in a separate folder, which takes minutes, so it is expensive.

``.venv/bin/python -m pytest -m expensive tests/integration/test_killed_build.py``
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import psutil
import pytest
from machine import needs_the_machine
from registry_parts import engine_client, image

from engine import containers
from toolchain import files, process_identity
from toolchain.config import ROOT, Config, load_config
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX

pytestmark = [
    *(pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation),
    pytest.mark.skipif(os.geteuid() != 0, reason="requires root to build a root filesystem"),
    pytest.mark.timeout(5400),
]
TASK = (sys.executable, "-m", "toolchain.cli")
BUILD = (*TASK, "build-image", "--only=rootfs")


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    """Connect to the engine; unlike the shared fixture, this one does not require the shared build."""
    with engine_client() as found:
        yield found


@pytest.fixture
def config(client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Configure the smallest image, without torch, kernel or init, for this process and for tasks."""
    needs_the_machine()
    settings = {"suite": "bookworm", "profile": "container", "name": f"pitorch-test-{uuid.uuid4().hex[:8]}"}
    for name, value in settings.items():
        monkeypatch.setenv(f"INVOKE_IMAGE_{name.upper()}", value)
    monkeypatch.setenv("INVOKE_BUILD_FOLDER", str(tmp_path / "build"))
    made = load_config({"image": settings, "build": {"folder": str(tmp_path / "build")}})
    yield made
    with contextlib.suppress(docker.errors.ImageNotFound):
        client.images.remove(made.image_reference("rootfs"), force=True)


def namespace_of(pid: int) -> str:
    """Return a process's mount namespace, or an empty string if the process has exited."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    return ""


def processes_in(namespaces: set[str]) -> list[str]:
    """Return the IDs and command lines of the processes in these mount namespaces."""
    found = []
    for pid in psutil.pids():
        if namespace_of(pid) in namespaces:
            with contextlib.suppress(OSError):
                found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
    return found


def runs(process: psutil.Process) -> bool:
    """Return whether this process, not a later one with the same ID, is running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def stopped_container(client: docker.DockerClient, config: Config, task: psutil.Process) -> Iterator[str]:
    """Create a stopped container, as other steps of the task would, because the step rootfs uses none; yield its ID."""
    creator = {**process_identity.record(task), "namespace": containers._namespace()}
    with image(client, f"{config.image.name}/empty:latest") as made:
        box = client.containers.create(made, ["true"], labels={containers._CREATOR: json.dumps(creator)})
        try:
            yield box.id or ""
        finally:
            with contextlib.suppress(docker.errors.NotFound):
                box.remove(force=True)


def test_killed_build_leaves_no_processes_or_containers(client: docker.DockerClient, config: Config) -> None:
    log = config.target_root / "logs" / "rootfs.log"
    output = config.build_root.parent / "output"
    with output.open("wb") as sink:
        quiet = subprocess.DEVNULL
        task = psutil.Popen(BUILD, cwd=ROOT, stdin=quiet, stdout=sink, stderr=sink, start_new_session=True)
    try:
        deadline = time.monotonic() + 2400
        # The hook writes this line immediately before it configures the packages under emulation.
        while not log.exists() or "hook: unpacked" not in log.read_text(errors="replace"):
            assert task.poll() is None, output.read_text(errors="replace")
            assert time.monotonic() < deadline, output.read_text(errors="replace")
            time.sleep(0.2)
        with stopped_container(client, config, task) as box:
            assert client.api.containers(all=True, filters={"id": box})
            programs = task.children(recursive=True)
            # mmdebstrap and its hook have private mount namespaces, which identify their later child processes in any
            # session.
            namespaces = {namespace_of(one.pid) for one in programs} - {namespace_of(os.getpid()), ""}
            assert any("mmdebstrap" in line for line in processes_in(namespaces))
            os.killpg(task.pid, signal.SIGKILL)
            task.wait()
            deadline = time.monotonic() + 120
            while left := [*filter(runs, programs), *processes_in(namespaces)]:
                assert time.monotonic() < deadline, left
                time.sleep(0.2)
            assert "hook: configured" not in log.read_text(errors="replace"), (
                "the programs must stop before they have finished"
            )
            subprocess.run([*TASK, "completion", "bash"], cwd=ROOT, check=True, capture_output=True, timeout=300)
            assert client.api.containers(all=True, filters={"id": box}) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)
        task.wait()
    assert list(files.unfinished_in(config.target_root)), "the killed task must leave its scratch folder"
    again = subprocess.run(BUILD, cwd=ROOT, check=False, capture_output=True, text=True, timeout=2400)
    assert again.returncode == 0, again.stderr
    made = Manifest.read(config.target_root / f"rootfs{MANIFEST_SUFFIX}")
    assert made is not None
    made.artefact(".tar").verify()
    assert list(files.unfinished_in(config.target_root)) == []
