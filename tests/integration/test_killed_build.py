"""Test of an image build that is killed while mmdebstrap configures the root filesystem, and of the finished image.

The test builds an image of the previous release in a separate folder, which takes minutes, so it is expensive.

``.venv/bin/python -m pytest -m expensive tests/integration/test_killed_build.py``
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import psutil
import pytest
from machine import needs_the_machine
from registry_parts import engine_client, image
from waiting import eventually

from device import suite
from engine import containers
from flow import main_job
from nfsroot.export import export
from toolchain import files, process_identity
from toolchain.config import ROOT, Config

pytestmark = [
    *(pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation, pytest.mark.machine),
    pytest.mark.skipif(os.geteuid() != 0, reason="requires root to build a root filesystem"),
    pytest.mark.timeout(9000),
]
TASK = (sys.executable, "-m", "toolchain.cli")
BUILD = (*TASK, "build-image", "--only=rootfs")


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    """Connect to the engine, which the fixture for marked tests starts before each test."""
    with engine_client() as found:
        yield found


@pytest.fixture
def config(
    client: docker.DockerClient, product_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Config]:
    """Configure another build folder and the previous release, for this process and for tasks."""
    needs_the_machine()
    monkeypatch.setenv("INVOKE_IMAGE_SUITE", "bookworm")
    monkeypatch.setenv("INVOKE_IMAGE_NAME", product_config.image.name)
    monkeypatch.setenv("INVOKE_BUILD_FOLDER", str(tmp_path / "build"))
    made = dataclasses.replace(
        product_config,
        build=dataclasses.replace(product_config.build, folder=tmp_path / "build"),
        image=dataclasses.replace(product_config.image, suite="bookworm"),
    )
    yield made
    for role in ("system", "base", "rootfs"):
        with contextlib.suppress(docker.errors.ImageNotFound):
            client.images.remove(made.image_reference(role), force=True)


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


def test_bookworm_is_built_after_a_killed_build_and_boots(client: docker.DockerClient, config: Config) -> None:
    """The killed build leaves no processes or containers, and the next one builds the image.

    The previous release has another Python and kernel, a split /usr, and no torch wheel.
    """
    log = config.target_root / "logs" / "rootfs.log"
    output = config.build_root.parent / "output"
    with output.open("wb") as sink:
        quiet = subprocess.DEVNULL
        task = psutil.Popen(BUILD, cwd=ROOT, stdin=quiet, stdout=sink, stderr=sink, start_new_session=True)
    try:
        # The hook writes this line immediately before it configures the packages under emulation.
        eventually(
            lambda: log.exists() and "hook: unpacked" in log.read_text(errors="replace"),
            lambda: output.read_text(errors="replace"),
            limit_s=2400,
            task=task,
        )
        with stopped_container(client, config, task) as box:
            assert client.api.containers(all=True, filters={"id": box})
            programs = task.children(recursive=True)
            # mmdebstrap and its hook have private mount namespaces, which identify their later child processes in any
            # session.
            namespaces = {namespace_of(one.pid) for one in programs} - {namespace_of(os.getpid()), ""}
            assert any("mmdebstrap" in line for line in processes_in(namespaces))
            os.killpg(task.pid, signal.SIGKILL)
            task.wait()
            eventually(
                lambda: not any(map(runs, programs)) and not processes_in(namespaces),
                lambda: [*filter(runs, programs), *processes_in(namespaces)],
                limit_s=120,
            )
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
    built = main_job.build_image(config)
    assert any("torch" in warning for warning in built.warnings), "expected a warning about the missing torch"
    built.manifest("rootfs").artefact(".tar").verify()
    assert list(files.unfinished_in(config.target_root)) == []
    words = ". /etc/os-release; echo $VERSION_CODENAME; uname -m; python3 -c 'import numpy' && echo np"
    system = config.image_reference("system")
    seen = containers.run_in(client, system, ["sh", "-euc", words], architecture=config.image.target)
    assert seen.output.split() == ["bookworm", "armv7l", "np"]
    export(config)
    result = suite.test_on_pi(config, qemu=True, timing=False)
    assert result.ok, result.summary()
    assert "torch" in result.without
