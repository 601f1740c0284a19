"""Tests of the engine.

These tests start a separate dockerd, which sets no firewall rules and does not affect other engines.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import os
import platform
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil
import pytest
from docker.context import ContextAPI
from http_parts import serving
from processes import command_lines
from registry_parts import unstarted_engine
from waiting import eventually

from doctor.containers import check_container, engine_findings, judge_engine
from doctor.finding import Verdict
from engine import cgroups, systemd
from engine.connect import Selection, connect, connect_to, selected
from engine.containers import _collect, run_in
from engine.dockerd import Daemon
from engine.proxies import build_environment, daemon_environment
from engine.start import ensure_daemon, ensure_running
from engine.stop import end_process, stop_daemon
from flow import main_job, pipelines
from flow.context import Context
from flow.engine_images import NO_ENGINE
from images import archive, probe, system
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, BuildConfig, Config
from toolchain.errors import CommandFailed, CommandTimedOut, EngineUnavailable, UserError
from toolchain.manifest import Artefact, Manifest
from toolchain.process_identity import record

needs_dockerd = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd", path="/usr/sbin:/usr/bin:" + os.environ["PATH"]) is None,
    reason="starting dockerd needs root and the package docker.io",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with unstarted_engine(tmp_path_factory.mktemp("engine")) as made:
        yield made


def processes_of(daemon: Daemon) -> list[str]:
    """Return the command lines of the dockerd and containerd processes that use the daemon's folder."""
    ours = [line for line in command_lines().values() if str(daemon.exec_root) in line]
    return [line for line in ours if Path(line.split()[0]).name in ("dockerd", "containerd")]


@pytest.mark.engine
@needs_dockerd
def test_dockerd_is_started_reused_and_stopped(daemon: Daemon) -> None:
    info = ensure_daemon(daemon)
    assert (info.address, info.storage_driver, info.started_here) == (daemon.host, "vfs", True)
    pid = json.loads(daemon.state.read_text())["pid"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid(), "the engine must outlive the task"

    assert ensure_daemon(daemon) == info
    assert json.loads(daemon.state.read_text())["pid"] == pid, "a running engine must be reused"

    report = stop_daemon(daemon)
    assert f"dockerd (pid {pid}) stopped" in report
    assert processes_of(daemon) == []
    assert not daemon.state.exists()
    assert stop_daemon(daemon) == "no engine was started here"


@pytest.mark.engine
@pytest.mark.emulation
@needs_dockerd
def test_a_started_engine_runs_arm_containers(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    info = ensure_daemon(daemon)
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    finding = check_container("linux/arm/v7")
    assert finding.verdict is Verdict.OK, finding.found
    judged = judge_engine(info)
    assert judged.verdict is Verdict.WARN
    assert "overlay2" in judged.fix


@pytest.mark.engine
@needs_dockerd
def test_the_engine_of_the_current_context_is_used(
    daemon: Daemon, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_daemon(daemon)
    ContextAPI.create_context("mine", host=daemon.host)
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    with contextlib.closing(connect()) as client:
        assert client.info()["Driver"] == "vfs"
    info = ensure_running(Config(build=BuildConfig(folder=contexts)))
    assert (info.address, info.storage_driver, info.started_here) == (daemon.host, "vfs", False)


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the docker program's configuration folder for this user, without contexts."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_docker_host_takes_precedence_over_the_context(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected().host == ""
    for name, host in (("near", "unix:///nowhere.sock"), ("far", "tcp://192.0.2.1:2375")):
        ContextAPI.create_context(name, host=host)
    (contexts / "config.json").write_text('{"currentContext": "near"}')
    with pytest.raises(EngineUnavailable, match="engine that docker's context near selects does not respond") as caught:
        ensure_running(Config(build=BuildConfig(folder=contexts / "build")))
    assert "docker context use default" in caught.value.fix
    assert not (contexts / "build").exists(), "no other engine must be started"
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    with pytest.raises(
        EngineUnavailable, match="engine that docker's context far selects does not use a Unix socket"
    ) as refused:
        ensure_running(Config(build=BuildConfig(folder=contexts / "build")))
    assert "unset DOCKER_CONTEXT" in refused.value.fix
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert selected().host == ""
    monkeypatch.setenv("DOCKER_HOST", "unix:///other.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert selected() == Selection("unix:///other.sock")


@pytest.mark.parametrize(
    ("damage", "found"), [("{", "corrupted"), ('{"Name": "near"}', "Endpoints"), (None, "no such context")]
)
def test_a_damaged_context_is_reported(contexts: Path, damage: str | None, found: str) -> None:
    ContextAPI.create_context("near", host="unix:///nowhere.sock")
    (contexts / "config.json").write_text('{"currentContext": "near"}')
    (meta,) = contexts.rglob("meta.json")
    if damage is None:
        meta.unlink()
    else:
        meta.write_text(damage)
    with pytest.raises(EngineUnavailable, match="docker's context near cannot be used") as caught:
        connect()
    assert found in caught.value.found
    assert "docker context use default" in caught.value.fix


@pytest.mark.engine
@needs_dockerd
def test_two_simultaneous_tasks_start_one_engine(daemon: Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ensure_daemon, [daemon, daemon])
    assert first == second
    assert len([line for line in processes_of(daemon) if "dockerd" in line.split()[0]]) == 1


@pytest.mark.engine
@needs_dockerd
def test_the_containerd_of_a_killed_dockerd_is_stopped(daemon: Daemon) -> None:
    ensure_daemon(daemon)
    os.kill(json.loads(daemon.state.read_text())["pid"], signal.SIGKILL)
    time.sleep(0.5)
    left = processes_of(daemon)
    report = stop_daemon(daemon)
    assert processes_of(daemon) == []
    if any("containerd" in line.split()[0] for line in left):  # otherwise, dockerd used the machine's containerd
        assert "leftover containerd" in report


@pytest.mark.engine
@needs_dockerd
def test_a_frozen_engine_is_not_replaced_and_can_be_stopped(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.stop._STOP_LIMIT_S", 1.0)
    monkeypatch.setattr("engine.start.connect_to", lambda selection, **_: connect_to(selection, timeout_s=1))
    ensure_daemon(daemon)
    pid = json.loads(daemon.state.read_text())["pid"]
    running = processes_of(daemon)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match="started does not respond") as caught:
        ensure_daemon(daemon)
    assert str(pid) in caught.value.found
    assert processes_of(daemon) == running
    assert f"dockerd (pid {pid}) stopped" in stop_daemon(daemon)
    assert processes_of(daemon) == []


@needs_root
@pytest.mark.parametrize(("enter", "ends"), [((), True), (("unshare", "--mount"), False)])
def test_a_containerd_in_another_mount_namespace_stays(
    daemon: Daemon, tmp_path: Path, enter: tuple[str, ...], ends: bool
) -> None:
    """A second engine has the same exec-root in another mount namespace."""
    program = tmp_path / "containerd-try"
    shutil.copy(os.path.realpath("/bin/sh"), program)
    mark = f"{daemon.exec_root}/containerd/containerd.toml"
    words: list[str | Path] = [*enter, program, "-c", "echo up; read -r line", mark]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        daemon.folder.mkdir(parents=True)
        daemon.state.write_text(json.dumps({"pid": child.pid, "boot": "", "ticks": 0}))
        report = stop_daemon(daemon)
        name = f"containerd-try (pid {child.pid})"
        assert report == (f"leftover {name} stopped" if ends else f"not stopped: {name}, in another mount namespace")
        assert (child.poll() is not None) is ends
        child.kill()


@needs_root
def test_a_containerd_in_another_root_stays(daemon: Daemon, tmp_path: Path) -> None:
    script = (
        "import os, sys; open('/proc/self/comm', 'w').write('containerd-try'); os.chroot(sys.argv[2]); print('up'); "
        "sys.stdout.flush(); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, f"{daemon.exec_root}/containerd/containerd.toml", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        daemon.folder.mkdir(parents=True)
        daemon.state.write_text(json.dumps({"pid": child.pid, "boot": "", "ticks": 0}))
        assert stop_daemon(daemon) == f"not stopped: containerd-try (pid {child.pid}), in another root directory"
        assert child.poll() is None
        child.kill()


@needs_dockerd
def test_a_refused_sudo_is_reported(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    monkeypatch.setattr("engine.start.sudo_prefix", lambda _: [str(sudo)])
    monkeypatch.setattr("engine.cgroups.mount_missing", lambda _: None)
    with pytest.raises(EngineUnavailable, match="dockerd cannot be started") as caught:
        ensure_daemon(daemon)
    assert "sudo: a password is required" in caught.value.found
    assert not daemon.pidfile.exists()


def test_a_refused_sudo_is_reported_when_a_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.stop.sudo_prefix", lambda _: ["false"])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with subprocess.Popen(["sleep", "60"]) as child:
        with pytest.raises(UserError, match="dockerd cannot be stopped"):
            end_process(psutil.Process(child.pid), "dockerd")
        child.kill()


@pytest.mark.engine
@needs_dockerd
def test_the_error_shows_the_last_lines_of_dockerd(daemon: Daemon) -> None:
    broken = dataclasses.replace(daemon, options=(*daemon.options[:-1], "--storage-driver=nonsense"))
    with pytest.raises(UserError) as caught:
        ensure_daemon(broken)
    assert "nonsense" in caught.value.found
    assert str(broken.log) in caught.value.fix
    assert not broken.state.exists()
    assert processes_of(broken) == []


PAUSE_X86_64 = bytes.fromhex("b822000000 0f05 ebf7 909090")
"""mov eax, 34 (pause); syscall; jump back."""


def waiting_program() -> bytes:
    """Compile a static program for this machine that runs until it is killed."""
    if platform.machine() != "x86_64":
        pytest.skip(f"there is no machine code for {platform.machine()} in this test")
    program = bytearray(probe.elf_64())
    program[18:20] = (62).to_bytes(2, "little")
    return bytes(program[: -len(PAUSE_X86_64)]) + PAUSE_X86_64


def load_waiting_program(client: docker.DockerClient, folder: Path) -> str:
    """Load an image with the program as /wait; return its reference."""
    stage = folder / "stage"
    stage.mkdir(exist_ok=True)
    (stage / "wait").write_bytes(waiting_program())
    (stage / "wait").chmod(0o755)
    files.pack(stage, folder / "wait.tar", epoch=1000)
    layer = archive.Layer(Artefact.of(folder / "wait.tar"))
    return archive.load(client, [layer], "pitorch-test/wait:1", host_architecture(), epoch=1000).reference


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect garbage after the test, so that warnings about docker-py's open sockets are attributed to this test."""
    yield
    gc.collect()


@pytest.mark.engine
@needs_dockerd
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("doing", ["run", "build"])
def test_an_engine_that_ends_during_work_is_reported(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """Each operation (running a container, building, loading, planning) reports a fix if the engine stops."""
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    ensure_daemon(daemon)
    native = host_architecture()
    with contextlib.closing(connect()) as client, Context(Config(build=BuildConfig(folder=tmp_path))) as context:
        assert context.client.ping()
        image = load_waiting_program(client, tmp_path)
        jobs = {
            "run": lambda: run_in(client, image, ["/wait"], architecture=native, log=tmp_path / "log"),
            "build": lambda: system.build(
                client,
                "pitorch-test/built:1",
                'FROM scratch\nADD wait.tar /\nRUN ["/wait"]\n',
                [system.Layer("wait.tar", tmp_path / "wait.tar")],
                native,
            ),
        }
        expected = {
            "run": (EngineUnavailable, "stopped responding while it ran /wait"),
            "build": (CommandFailed, "the engine did not build pitorch-test/built:1"),
        }
        with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.closing(connect()) as watcher:
            work = pool.submit(jobs[doing])
            running = eventually(lambda: work.done() or watcher.containers.list(), limit_s=120)
            assert not work.done(), work.exception()
            inside = running[0].attrs["State"]["Pid"]
            try:
                os.kill(json.loads(daemon.state.read_text())["pid"], signal.SIGKILL)
                kind, words = expected[doing]
                with pytest.raises(kind, match=words) as caught:
                    work.result(120)
            finally:
                os.kill(inside, signal.SIGKILL)
        assert isinstance(caught.value, UserError)
        assert "./inv doctor" in caught.value.fix
        with pytest.raises(EngineUnavailable, match="stopped responding"):
            load_waiting_program(client, tmp_path)
        with pytest.raises(EngineUnavailable, match="stopped responding"):
            run_in(client, image, ["/wait"], architecture=native)
        (step,) = (step for step in pipelines.main_job(context).steps if step.name == "rootfs")
        assert step.missing(Manifest(step="rootfs", key="", inputs={}, facts={"image": "x"})) == NO_ENGINE


@pytest.mark.engine
@needs_dockerd
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("patience_s", [0.0, 0.5])
def test_the_time_limit_holds_if_the_engine_freezes(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    patience_s: float,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    monkeypatch.setattr("engine.containers._END_LIMIT_S", 1.0)
    ensure_daemon(daemon)
    with contextlib.closing(connect()) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        image = load_waiting_program(client, tmp_path)
        native = host_architecture()
        run = functools.partial(run_in, client, image, ["/wait"], architecture=native, limit_s=3, patience_s=patience_s)
        with pytest.raises(CommandTimedOut, match="/wait timed out"):
            run()
        assert client.containers.list(all=True) == []

        work = pool.submit(run)
        (running,) = eventually(lambda: client.containers.list(), limit_s=20)
        time.sleep(1)  # until run_in reads the output
        os.kill(json.loads(daemon.state.read_text())["pid"], signal.SIGSTOP)
        try:
            with pytest.raises(CommandTimedOut, match="/wait timed out"):
                work.result(20)
        finally:
            os.kill(json.loads(daemon.state.read_text())["pid"], signal.SIGCONT)
            eventually(lambda: client.containers.list(all=True) == [] or running.remove(force=True), limit_s=20)
    assert f"the container {running.name} may not have been removed" in capfd.readouterr().err


def test_output_is_decoded_across_block_boundaries() -> None:
    words = "gemäß “µ”\nzweite Zeile\nRest €"
    printed = words.encode() + b"\xe2\x82"  # an incomplete character, as if the program had been killed here
    for size in range(1, len(printed)):
        log: list[str] = []
        lines: list[str] = []
        blocks = (printed[at : at + size] for at in range(0, len(printed), size))
        assert _collect(blocks, log.append, lines.append) == f"{words}\ufffd"
        assert "".join(log) == f"{words}\ufffd"
        assert lines == words.split("\n")[:2]


def test_down_leaves_a_process_with_a_reused_number(daemon: Daemon) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            identity = record(psutil.Process(bystander.pid))
            daemon.folder.mkdir(parents=True)
            daemon.state.write_text(json.dumps({**identity, "ticks": int(identity["ticks"]) - 1}))
            assert stop_daemon(daemon) == "no engine was started here"
            assert bystander.poll() is None
            assert not daemon.state.exists()
        finally:
            bystander.kill()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "created": 1.5}', '{"pid": "x", "boot": "", "ticks": 1}']
)
def test_a_damaged_record_names_no_process(daemon: Daemon, text: str) -> None:
    daemon.folder.mkdir(parents=True)
    daemon.state.write_text(text)
    assert stop_daemon(daemon) == "no engine was started here"


def test_no_engine_replaces_one_in_docker_host(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = Selection("unix:///nowhere.sock")
    with pytest.raises(EngineUnavailable) as caught:
        ensure_daemon(daemon, selection)
    assert "DOCKER_HOST" in caught.value.summary
    assert "unset DOCKER_HOST" in caught.value.fix
    assert not daemon.state.exists()
    monkeypatch.setenv("DOCKER_HOST", selection.host)
    with pytest.raises(EngineUnavailable, match="DOCKER_HOST"):
        connect(timeout_s=5)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:2375", "192.0.2.1:2375", "https://192.0.2.1", "ssh://me@192.0.2.1", "nonsense"]
)
def test_only_unix_sockets_are_supported(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    config = Config(build=BuildConfig(folder=tmp_path / "build"))
    with pytest.raises(EngineUnavailable, match="not use a Unix socket") as caught:
        ensure_running(config)
    assert caught.value.found == address
    assert "unset DOCKER_HOST" in caught.value.fix
    if os.geteuid() == 0:
        with pytest.raises(EngineUnavailable, match="not use a Unix socket"):
            main_job.build_image(config)
    findings = {item.check: item for item in engine_findings(config)}
    assert findings["engine"].verdict is Verdict.FAIL
    assert "not use a Unix socket" in findings["engine"].found
    assert findings["engine"].fix == caught.value.fix
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("address", ["unix:///nowhere.sock", "unix:///" + 200 * "x"])
def test_a_missing_socket_is_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(EngineUnavailable) as caught:
        connect(timeout_s=5)
    assert caught.value.fix


@needs_root
def test_the_error_names_the_group_of_the_socket(tmp_path: Path) -> None:
    """The socket is accessible only to root, but another user connects."""
    code = (
        "from engine.connect import connect\n"
        "from toolchain.errors import EngineUnavailable\n"
        "try:\n    connect(timeout_s=5)\n"
        "except EngineUnavailable as fault:\n    print(fault)\n"
    )
    with tempfile.TemporaryDirectory(prefix="pitorch-socket-") as folder:
        Path(folder).chmod(0o755)
        address = Path(folder) / "docker.sock"
        listener = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import socket,time; s=socket.socket(1); s.bind({str(address)!r}); s.listen(); time.sleep(60)",
            ]
        )
        try:
            eventually(address.exists)
            address.chmod(0o660)
            drop = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            ended = subprocess.run(
                [sys.executable, "-c", code.replace("try:", drop + "try:", 1)],
                env={**os.environ, "DOCKER_HOST": f"unix://{address}", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            listener.kill()
            listener.wait()
    assert "belongs to group root" in ended.stdout
    assert "usermod -aG root" in ended.stdout


@pytest.mark.engine
@pytest.mark.parametrize(("status", "stays"), [(0, True), (3, False)])
def test_an_engine_run_by_systemd_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
) -> None:
    calls = tmp_path / "calls"
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >{calls}\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setattr(systemd, "_BOOTED", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    report = stop_daemon(Daemon.of(Config(build=BuildConfig(folder=tmp_path / "build"))))
    assert ("systemctl stop docker.socket docker.service" in report) is stays
    assert calls.read_text() == "is-active --quiet docker.service\n"


@needs_root
def test_a_systemd_timeout_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "_LIMIT_S", 0.6)
    with pytest.raises(EngineUnavailable, match="timed out while starting") as caught:
        systemd.start_engine()
    assert "after 1 s" in caught.value.found
    assert "journalctl" in caught.value.fix


def test_a_running_engine_is_used(tmp_path: Path) -> None:
    try:
        docker.from_env(timeout=10).close()
    except docker.errors.DockerException:
        pytest.skip("no Docker engine responds")
    config = Config(build=BuildConfig(folder=tmp_path))
    info = ensure_running(config)
    assert not info.started_here
    assert stop_daemon(Daemon.of(config)).startswith("no engine was started here")
    client = connect()
    try:
        assert client.version()["Version"] == info.version
    finally:
        client.close()


def test_a_file_in_place_of_the_folder_is_reported(daemon: Daemon) -> None:
    daemon.folder.write_text("not a folder")
    with pytest.raises(UserError, match="engine"):
        ensure_daemon(daemon)
    daemon.folder.unlink()


@needs_root
def test_a_record_of_another_user_is_reported(tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="engine's lock file") as caught, Daemon(folder=tmp_path / "engine").lock():
            raise AssertionError("the block must not run")
    finally:
        os.seteuid(0)
    assert "sudo" in caught.value.fix


PROC_CGROUPS = (
    "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t{0}\t1\t1\nmemory\t{0}\t1\t1\nrdma\t0\t1\t1\nnet\t7\t1\t0\n"
)


def test_free_controllers_use_the_unified_hierarchy() -> None:
    assert cgroups.mount_commands(PROC_CGROUPS.format(0), []) == [
        ["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"]
    ]


def test_bound_controllers_are_mounted_separately() -> None:
    commands = cgroups.mount_commands(PROC_CGROUPS.format(3), ["sysfs"])
    assert commands[0][:3] == ["mount", "-t", "tmpfs"]
    assert [argv[4] for argv in commands if "cgroup" in argv[:3]] == ["cpu", "memory"]


@pytest.mark.parametrize("mounted", [["cgroup2"], ["tmpfs", "cgroup"]])
def test_mounted_cgroups_are_left_alone(mounted: list[str]) -> None:
    assert cgroups.mount_commands(PROC_CGROUPS.format(3), mounted) == []


@needs_root
def test_cgroups_are_mounted_in_a_bare_container() -> None:
    """As in a bare container, no cgroup file system is mounted in the mount namespace."""
    script = (
        "mount --make-rprivate / && while umount -l /sys/fs/cgroup 2>/dev/null; do :; done\n"
        f"{sys.executable} -c 'from engine import cgroups; cgroups.mount_missing([])' && cat /proc/self/mounts"
    )
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    kinds = [line.split()[2] for line in ended.stdout.splitlines() if line.split()[1].startswith("/sys/fs/cgroup")]
    assert "cgroup" in kinds or "cgroup2" in kinds


def test_proxy_variables_get_both_spellings() -> None:
    given = {"HTTP_PROXY": "http://upper:1", "https_proxy": "http://lower:2", "all_proxy": "", "PATH": "/bin"}
    assert build_environment(given) == {
        "http_proxy": "http://upper:1",
        "HTTP_PROXY": "http://upper:1",
        "https_proxy": "http://lower:2",
        "HTTPS_PROXY": "http://lower:2",
    }


@pytest.mark.parametrize(
    ("proxy", "filled"),
    [
        ("http://p:1", "http://p:1"),
        ("p:1", "http://p:1"),
        ("socks5://me:word@p:1", "socks5h://me:word@p:1"),
        ("socks5h://p:1", "socks5h://p:1"),
        ("https://p:1", "https://p:1"),
    ],
)
def test_all_proxy_fills_the_unset_variables(proxy: str, filled: str) -> None:
    """Because apt ignores all_proxy, its value is copied to http_proxy and https_proxy if they are not set."""
    for name in ("all_proxy", "ALL_PROXY"):
        found = build_environment({name: proxy, "HTTPS_PROXY": "http://own:2"})
        assert found == {
            **dict.fromkeys(("http_proxy", "HTTP_PROXY"), filled),
            **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://own:2"),
            **dict.fromkeys(("all_proxy", "ALL_PROXY"), proxy),
        }


@contextlib.contextmanager
def recording_proxy(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Run a proxy; yield its loopback port, and the blocks that it receives before and after it sends ``answer``."""
    heard: list[bytes] = []

    class Listener(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(20)
            heard.append(self.request.recv(4096))
            if answer:
                self.request.sendall(answer)
                heard.append(self.request.recv(4096))

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener)) as server:
        yield server.server_address[1], heard


@pytest.mark.engine
@needs_dockerd
@pytest.mark.parametrize(("scheme", "answer"), [("http", b""), ("socks5h", b"\x05\x00")])
def test_a_started_engine_uses_all_proxy(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes
) -> None:
    for name in build_environment():
        monkeypatch.delenv(name, raising=False)
    with recording_proxy(answer) as (port, heard):
        with monkeypatch.context() as environment:
            environment.setenv("all_proxy", f"{scheme}://127.0.0.1:{port}")
            ensure_daemon(daemon)
        client = docker.DockerClient(base_url=daemon.host)
        with contextlib.closing(client), pytest.raises(docker.errors.APIError):
            client.images.pull("registry.example/some/image", "tag")
    assert any(b"registry.example" in words for words in heard), heard


def test_dockerd_gets_no_all_proxy() -> None:
    given = {"ALL_PROXY": "socks5h://p:1", "https_proxy": "http://own:2", "no_proxy": "here", "PATH": "/bin"}
    assert daemon_environment(given) == {
        "PATH": "/bin",
        **dict.fromkeys(("http_proxy", "HTTP_PROXY"), "socks5://p:1"),
        **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://own:2"),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "here"),
    }


@pytest.mark.parametrize("text", ["[]", pytest.param('{"proxies": 5}', marks=pytest.mark.engine)])
def test_a_broken_docker_configuration_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="configuration file"):
        connect()


@pytest.mark.engine
def test_another_test_session_leaves_the_engine_running() -> None:
    """An engine that tests have started is stopped only by the last test session."""
    others = ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/unit/test_errors.py"]
    done = subprocess.run([sys.executable, *others], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    with contextlib.closing(connect()) as client:
        assert client.ping()


@needs_root
def test_a_socket_in_an_inaccessible_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        os.seteuid(65534)
        try:
            with pytest.raises(EngineUnavailable) as caught:
                connect()
        finally:
            os.seteuid(0)
    assert "Permission denied" in caught.value.found
