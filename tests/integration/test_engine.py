"""The engine: a dockerd of the tests' own, beside whatever runs here, without a bridge or a firewall rule."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import os
import platform
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import docker
import pytest
from docker.context import ContextAPI
from registry_parts import make_certificate
from spare_bridge import spare_bridge

from doctor import examination as doctor
from engine import daemon as engine
from engine.containers import _collect, run_in
from flow import main_job, pipelines
from flow.context import Context
from flow.engine_images import NO_ENGINE
from images import archive, probe, system
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, BuildConfig, Config
from toolchain.errors import (
    EngineConfigUnusable,
    EngineUnavailable,
    ForeignFolder,
    ImageBuildFailed,
    ServerFailed,
    UserError,
)
from toolchain.manifest import Artefact, Manifest

needs_dockerd = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd", path="/usr/sbin:/usr/bin:" + os.environ["PATH"]) is None,
    reason="starting dockerd needs root and the package docker.io",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def bridge() -> Iterator[str]:
    with spare_bridge() as name:
        yield name


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, bridge: str) -> Iterator[engine.Daemon]:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    # A socket's path has room for 107 bytes: pytest's own folders are too long.
    folder = Path(tempfile.mkdtemp(prefix="pitorch-engine-"))
    made = engine.Daemon(
        folder=folder / "engine",
        host=f"unix://{folder}/docker.sock",
        exec_root=folder / "exec",
        options=(
            f"--data-root={folder}/data",
            f"--bridge={bridge}",
            "--iptables=false",
            "--ip-forward=false",
            "--storage-driver=vfs",
        ),
    )
    yield made
    engine.stop_daemon(made)
    mounted = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in reversed([place for place in mounted if place.is_relative_to(folder)]):
        subprocess.run(["umount", "-q", place], check=False, capture_output=True)
    shutil.rmtree(folder)


def processes_of(daemon: engine.Daemon) -> list[str]:
    """Command lines of everything that names the daemon's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0].rpartition(b"/")[2] in (b"dockerd", b"containerd") and str(daemon.exec_root).encode() in b" ".join(
            words
        ):
            found.append(b" ".join(words).decode())
    return found


@pytest.mark.engine
@needs_dockerd
def test_it_is_started_used_and_stopped(daemon: engine.Daemon) -> None:
    info = engine.ensure_daemon(daemon)
    assert (info.address, info.storage_driver, info.started_here) == (daemon.host, "vfs", True)
    pid = json.loads(daemon.state.read_text())["pid"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid(), "it would end with the task"

    assert engine.ensure_daemon(daemon) == info
    assert json.loads(daemon.state.read_text())["pid"] == pid, "a running one is used again"

    said = engine.stop_daemon(daemon)
    assert f"dockerd (pid {pid}) stopped" in said
    assert processes_of(daemon) == []
    assert not daemon.state.exists()
    assert engine.stop_daemon(daemon) == "no engine was started here"


@pytest.mark.engine
@pytest.mark.emulation
@needs_dockerd
def test_an_engine_started_here_runs_arm_containers(daemon: engine.Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    info = engine.ensure_daemon(daemon)
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    finding = doctor.check_container("linux/arm/v7")
    assert finding.verdict is doctor.Verdict.OK, finding.found
    judged = doctor.judge_engine(info)
    assert judged.verdict is doctor.Verdict.WARN
    assert "overlay2" in judged.fix


@pytest.mark.engine
@needs_dockerd
def test_dockers_context_names_the_engine_as_for_the_docker_program(
    daemon: engine.Daemon, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ensure_daemon(daemon)
    ContextAPI.create_context("mine", host=daemon.host)
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    with contextlib.closing(engine.connect()) as client:
        assert client.info()["Driver"] == "vfs"
    info = engine.ensure_running(Config(build=BuildConfig(folder=contexts)))
    assert (info.address, info.storage_driver, info.started_here) == (daemon.host, "vfs", False)


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of docker's own for this user, without any context."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_dockers_context_counts_where_docker_host_is_not_set(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.chosen().host == ""
    for name, host in (("near", "unix:///nowhere.sock"), ("far", "tcp://192.0.2.1:2375")):
        ContextAPI.create_context(name, host=host)
    (contexts / "config.json").write_text('{"currentContext": "near"}')
    with pytest.raises(EngineUnavailable, match="that docker's context near names does not answer") as caught:
        engine.ensure_running(Config(build=BuildConfig(folder=contexts / "build")))
    assert "docker context use default" in caught.value.fix
    assert not (contexts / "build").exists(), "no other one is started"
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    with pytest.raises(EngineUnavailable, match="that docker's context far names runs on another machine") as caught:
        engine.ensure_running(Config(build=BuildConfig(folder=contexts / "build")))
    assert "unset DOCKER_CONTEXT" in caught.value.fix
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert engine.chosen().host == ""
    monkeypatch.setenv("DOCKER_HOST", "unix:///other.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert engine.chosen() == engine.Chosen("unix:///other.sock")


@pytest.mark.parametrize(
    ("damage", "found"), [("{", "corrupted"), ('{"Name": "near"}', "Endpoints"), (None, "none of that name")]
)
def test_a_context_that_is_of_no_use_is_told(contexts: Path, damage: str | None, found: str) -> None:
    ContextAPI.create_context("near", host="unix:///nowhere.sock")
    (contexts / "config.json").write_text('{"currentContext": "near"}')
    (meta,) = contexts.rglob("meta.json")
    if damage is None:
        meta.unlink()
    else:
        meta.write_text(damage)
    with pytest.raises(EngineConfigUnusable, match="docker's context near is of no use") as caught:
        engine.connect()
    assert found in caught.value.found
    assert "docker context use default" in caught.value.fix


@pytest.fixture
def tls_daemon(daemon: engine.Daemon, tmp_path: Path) -> tuple[str, dict[str, Path]]:
    """The address of an engine that lets in those alone who have its certificate; the files for that."""
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    options = ["--tlsverify", f"--tlscacert={certificate}", f"--tlscert={certificate}", f"--tlskey={key}"]
    engine.ensure_daemon(dataclasses.replace(daemon, options=(*daemon.options, f"--host={address}", *options)))
    return address, {"ca": certificate, "cert": certificate, "key": key}


def make_context(name: str, **settings: object) -> None:
    """By the docker program."""
    if shutil.which("docker") is None:
        pytest.skip("the docker program is not installed")
    given = ",".join(f"{key.replace('_', '-')}={value}" for key, value in settings.items())
    subprocess.run(["docker", "context", "create", name, f"--docker={given}"], check=True, capture_output=True)


@pytest.mark.engine
@needs_dockerd
def test_a_contexts_tls_files_are_those_of_the_docker_program(
    tls_daemon: tuple[str, dict[str, Path]], contexts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files_of = tls_daemon
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other", "127.0.0.1")
    make_context("mine", host=address, **files_of)
    make_context("unverified", host=address, **{**files_of, "ca": other}, skip_tls_verify="true")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / "of no context"))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(other))
    for name in ("mine", "unverified"):
        monkeypatch.setenv("DOCKER_CONTEXT", name)
        with contextlib.closing(engine.connect()) as client:
            assert client.info()["Driver"] == "vfs"
        info = engine.ensure_running(Config(build=BuildConfig(folder=contexts)))
        assert (info.address, info.storage_driver) == (address, "vfs")


@pytest.mark.engine
@needs_dockerd
def test_a_contexts_tls_files_that_do_not_serve_are_told(
    tls_daemon: tuple[str, dict[str, Path]], contexts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files_of = tls_daemon
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other", "127.0.0.1")
    make_context("anothers", host=address, **{**files_of, "ca": other})
    make_context("stranger", host=address, ca=files_of["ca"])
    make_context("none", host=address)
    make_context("half", host=address, **files_of)
    (half,) = (path for path in contexts.rglob("key.pem") if sha256(b"half").hexdigest() in str(path))
    half.unlink()
    for name, found in (
        ("anothers", "CERTIFICATE_VERIFY_FAILED"),
        ("stranger", "certificate"),
        ("none", "HTTPS server"),
        ("half", "no key.pem"),
    ):
        monkeypatch.setenv("DOCKER_CONTEXT", name)
        for task in (engine.connect, lambda: engine.ensure_running(Config(build=BuildConfig(folder=contexts)))):
            with pytest.raises(EngineConfigUnusable, match=f"docker's context {name} ") as caught:
                task()
            assert found in caught.value.found
            assert f"docker context update {name} --docker host={address},ca=" in caught.value.fix
            assert "unset DOCKER_CONTEXT" in caught.value.fix
            assert sha256(name.encode()).hexdigest() in caught.value.expected


@pytest.mark.engine
@needs_dockerd
def test_two_tasks_at_once_start_one(daemon: engine.Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(engine.ensure_daemon, [daemon, daemon])
    assert first == second
    assert len([line for line in processes_of(daemon) if "dockerd" in line.split()[0]]) == 1


@pytest.mark.engine
@needs_dockerd
def test_down_also_ends_what_a_killed_dockerd_left(daemon: engine.Daemon) -> None:
    engine.ensure_daemon(daemon)
    os.kill(json.loads(daemon.state.read_text())["pid"], signal.SIGKILL)
    time.sleep(0.5)
    left = processes_of(daemon)
    said = engine.stop_daemon(daemon)
    assert processes_of(daemon) == []
    if any("containerd" in line.split()[0] for line in left):  # else the machine's own containerd was used
        assert "leftover containerd" in said


@needs_root
@pytest.mark.parametrize(("enter", "ends"), [((), True), (("unshare", "--mount"), False)])
def test_a_containerd_among_other_mounts_is_another_engines(
    daemon: engine.Daemon, tmp_path: Path, enter: tuple[str, ...], ends: bool
) -> None:
    """On the same exec-root, seen from elsewhere: a second engine in a mount namespace of its own."""
    program = tmp_path / "containerd-try"
    shutil.copy(os.path.realpath("/bin/sh"), program)
    mark = f"{daemon.exec_root}/containerd/containerd.toml"
    words: list[str | Path] = [*enter, program, "-c", "echo up; read -r line", mark]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        daemon.folder.mkdir(parents=True)
        gone = {"pid": child.pid, "start_ticks": 0, "boot_id": "another"}
        daemon.state.write_text(json.dumps(gone))
        said = engine.stop_daemon(daemon)
        who = f"containerd-try (pid {child.pid})"
        assert said == (f"leftover {who} stopped" if ends else f"left alone: {who}, of another mount namespace")
        assert (child.poll() is not None) is ends
        child.kill()


@needs_root
def test_a_containerd_in_another_root_is_another_engines(daemon: engine.Daemon, tmp_path: Path) -> None:
    script = (
        "import os, sys; open('/proc/self/comm', 'w').write('containerd-try'); os.chroot(sys.argv[2]); print('up'); "
        "sys.stdout.flush(); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, f"{daemon.exec_root}/containerd/containerd.toml", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        daemon.folder.mkdir(parents=True)
        daemon.state.write_text(json.dumps({"pid": child.pid, "start_ticks": 0, "boot_id": "another"}))
        assert engine.stop_daemon(daemon) == f"left alone: containerd-try (pid {child.pid}), of another root"
        assert child.poll() is None
        child.kill()


@pytest.mark.engine
@needs_dockerd
def test_one_that_dies_is_told_with_its_last_lines(daemon: engine.Daemon) -> None:
    broken = dataclasses.replace(daemon, options=(*daemon.options[:-1], "--storage-driver=nonsense"))
    with pytest.raises(ServerFailed) as caught:
        engine.ensure_daemon(broken)
    assert "nonsense" in caught.value.found
    assert str(broken.log) in caught.value.fix
    assert not broken.state.exists()
    assert processes_of(broken) == []


PAUSE_X86_64 = bytes.fromhex("b822000000 0f05 ebf7 909090")
"""mov eax, 34 (pause); syscall; and again."""


def waiting_program() -> bytes:
    """A static program for this machine that runs until it is killed."""
    if platform.machine() != "x86_64":
        pytest.skip(f"a program of a few bytes for {platform.machine()} is not known here")
    program = bytearray(probe.elf_64())
    program[18:20] = (62).to_bytes(2, "little")
    return bytes(program[: -len(PAUSE_X86_64)]) + PAUSE_X86_64


@pytest.fixture
def collected() -> Iterator[None]:
    """docker-py leaves its socket open where nobody listens any more: that is told of here, not in the next test."""
    yield
    gc.collect()


@pytest.mark.engine
@needs_dockerd
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("doing", ["run", "build"])
def test_one_that_dies_while_it_works_is_told(
    daemon: engine.Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """By an error with a fix, whatever asks it then: what runs in a container, a build, a load, a plan."""
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    engine.ensure_daemon(daemon)
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "wait").write_bytes(waiting_program())
    (stage / "wait").chmod(0o755)
    files.pack(stage, tmp_path / "wait.tar", epoch=1000)
    native = host_architecture()
    layer = archive.Layer(Artefact.of(tmp_path / "wait.tar"))
    with contextlib.closing(engine.connect()) as client, Context(Config(build=BuildConfig(folder=tmp_path))) as context:
        assert context.client.ping()
        made = archive.load(client, [layer], "pitorch-test/wait:1", native, epoch=1000)
        jobs = {
            "run": lambda: run_in(client, made.reference, ["/wait"], architecture=native, log=tmp_path / "log"),
            "build": lambda: system.build(
                client,
                "pitorch-test/built:1",
                'FROM scratch\nADD wait.tar /\nRUN ["/wait"]\n',
                [system.Layer("wait.tar", tmp_path / "wait.tar")],
                native,
            ),
        }
        expected = {
            "run": (EngineUnavailable, "went away while it ran /wait"),
            "build": (ImageBuildFailed, "the engine did not build pitorch-test/built:1"),
        }
        with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.closing(engine.connect()) as watcher:
            work = pool.submit(jobs[doing])
            deadline = time.monotonic() + 120
            while not (running := watcher.containers.list()):
                assert time.monotonic() < deadline, "no container came up"
                assert not work.done(), work.exception()
                time.sleep(0.05)
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
        with pytest.raises(EngineUnavailable, match="went away"):
            archive.load(client, [layer], "pitorch-test/wait:2", native, epoch=1000)
        with pytest.raises(EngineUnavailable, match="went away"):
            run_in(client, made.reference, ["/wait"], architecture=native)
        (step,) = (step for step in pipelines.main_job(context).steps if step.name == "rootfs")
        assert step.missing(Manifest(step="rootfs", key="", inputs={}, facts={"image": "x"})) == NO_ENGINE


def test_what_a_container_prints_is_whole_wherever_the_engine_cuts_it() -> None:
    words = "gemäß “µ”\nzweite Zeile\nRest €"
    told = words.encode() + b"\xe2\x82"  # and half a letter, after which it was killed
    for size in range(1, len(told)):
        log: list[str] = []
        lines: list[str] = []
        blocks = (told[at : at + size] for at in range(0, len(told), size))
        assert _collect(blocks, log.append, lines.append) == f"{words}\ufffd"
        assert "".join(log) == f"{words}\ufffd"
        assert lines == words.split("\n")[:2]


def test_down_leaves_a_process_that_is_not_on_record(daemon: engine.Daemon) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        record = engine.ProcessRecord.of(bystander.pid)
        assert record is not None
        daemon.folder.mkdir(parents=True)
        reused = {**dataclasses.asdict(record), "start_ticks": record.start_ticks - 1}
        daemon.state.write_text(json.dumps(reused))
        assert engine.stop_daemon(daemon) == "no engine was started here"
        assert bystander.poll() is None
        assert not daemon.state.exists()
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "start_ticks": 1, "boot_id": "x", "more": 1}']
)
def test_a_torn_record_names_no_process(daemon: engine.Daemon, text: str) -> None:
    daemon.folder.mkdir(parents=True)
    daemon.state.write_text(text)
    assert engine.stop_daemon(daemon) == "no engine was started here"


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while " Z " not in Path(f"/proc/{child.pid}/stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.ProcessRecord.of(child.pid) is None
    child.wait()


def test_a_process_is_alive_until_its_last_thread_has_ended() -> None:
    number = {"x86_64": 60, "aarch64": 93}.get(platform.machine())  # exit(2) of the calling thread alone
    if number is None:
        pytest.skip(f"the number of exit(2) on {platform.machine()} is not known here")
    code = (
        "import ctypes, sys, threading;"
        "threading.Thread(target=sys.stdin.read).start();"
        f"ctypes.CDLL(None).syscall({number}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 30
        while " Z " not in Path(f"/proc/{child.pid}/stat").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        record = engine.ProcessRecord.of(child.pid)
        assert record is not None
        assert record.alive()
        assert child.stdin is not None
        child.stdin.close()
        while record.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not record.alive()


def test_a_docker_host_that_does_not_answer_is_not_replaced(
    daemon: engine.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(EngineUnavailable) as caught:
        engine.ensure_daemon(daemon, host="tcp://127.0.0.1:9")
    assert "DOCKER_HOST" in caught.value.summary
    assert "unset DOCKER_HOST" in caught.value.fix
    assert not daemon.state.exists()
    with pytest.raises(EngineUnavailable, match="DOCKER_HOST"):
        engine.connect(timeout_s=5)


@pytest.mark.parametrize(
    "address", ["tcp://192.0.2.1:2375", "192.0.2.1:2375", "https://192.0.2.1", "ssh://me@192.0.2.1", "ssh://no.invalid"]
)
def test_an_engine_of_another_machine_is_refused_before_a_build_begins(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks it anything: at 192.0.2.1 (TEST-NET-1, RFC 5737) nobody would answer either."""
    monkeypatch.setenv("DOCKER_HOST", address)
    config = Config(build=BuildConfig(folder=tmp_path / "build"))
    with pytest.raises(EngineUnavailable, match="another machine") as caught:
        engine.ensure_running(config)
    assert caught.value.expected.startswith("an engine of this machine")
    assert caught.value.found.split(",")[0] in address
    assert "unset DOCKER_HOST" in caught.value.fix
    if os.geteuid() == 0:
        with pytest.raises(EngineUnavailable, match="another machine"):
            main_job.build_image(config)
    findings = {item.check: item for item in doctor._engine_findings(config)}
    assert findings["engine"].verdict is doctor.Verdict.FAIL
    assert "another machine" in findings["engine"].found
    assert findings["engine"].fix == caught.value.fix
    assert not (tmp_path / "build").exists()


def test_every_address_of_this_machine_is_here(bridge: str) -> None:
    told = subprocess.run(["ip", "-j", "-4", "address", "show", bridge], check=True, capture_output=True).stdout
    own = json.loads(told)[0]["addr_info"][0]["local"]
    for address in ("unix:///x.sock", "tcp://127.0.0.1:9", "localhost:9", f"tcp://{own}:2375", "ssh://localhost"):
        assert engine.elsewhere(address) == ""
    assert engine.elsewhere("tcp://198.51.100.1:2375") == "198.51.100.1"


@pytest.mark.parametrize(
    "nonsense", ["nonsense", "unix:///nowhere.sock", "unix:///" + 200 * "x", "tcp://127.0.0.1:notaport"]
)
def test_a_docker_host_that_is_no_address_is_an_error_too(nonsense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", nonsense)
    with pytest.raises(EngineUnavailable) as caught:
        engine.connect(timeout_s=5)
    assert caught.value.fix


@needs_root
def test_a_closed_socket_names_its_group(tmp_path: Path) -> None:
    """As another user: the socket answers root alone."""
    code = (
        "from images import engine\n"
        "from toolchain.errors import EngineUnavailable\n"
        "try:\n    engine.connect(timeout_s=5)\n"
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
            while not address.exists():
                time.sleep(0.02)
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
def test_an_engine_of_systemds_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >{asked}\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setattr(engine, "_SYSTEMD_MARK", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = engine.down(Config(build=BuildConfig(folder=tmp_path / "build")))
    assert ("systemctl stop docker.socket docker.service" in said) is stays
    assert asked.read_text() == "is-active --quiet docker.service\n", "and asked nothing else of systemd"


@needs_root
def test_a_systemd_that_does_not_come_to_an_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(engine, "_SYSTEMD_LIMIT_S", 0.6)
    with pytest.raises(EngineUnavailable, match="does not come to an end") as caught:
        engine._start_by_systemd()
    assert "after 1 s" in caught.value.found
    assert "journalctl" in caught.value.fix


def test_the_engine_that_answers_is_used(tmp_path: Path) -> None:
    try:
        docker.from_env(timeout=10).close()
    except docker.errors.DockerException:
        pytest.skip("no Docker engine answers")
    config = Config(build=BuildConfig(folder=tmp_path))
    info = engine.ensure_running(config)
    assert not info.started_here
    assert engine.down(config).startswith("no engine was started here")
    client = engine.connect()
    try:
        assert client.version()["Version"] == info.version
    finally:
        client.close()


def test_a_build_folder_that_is_a_file_is_told(daemon: engine.Daemon) -> None:
    daemon.folder.write_text("not a folder")
    with pytest.raises(ForeignFolder, match="engine"):
        engine.ensure_daemon(daemon)
    daemon.folder.unlink()


@needs_root
def test_a_record_that_belongs_to_another_user_is_told(tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(ForeignFolder, match="engine's record") as caught, engine._locked(tmp_path / "engine"):
            raise AssertionError("must not go on")
    finally:
        os.seteuid(0)
    assert "sudo" in caught.value.fix


PROC_CGROUPS = (
    "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t{0}\t1\t1\nmemory\t{0}\t1\t1\nrdma\t0\t1\t1\nnet\t7\t1\t0\n"
)


def test_free_controllers_go_to_the_unified_hierarchy() -> None:
    assert engine.cgroup_mounts(PROC_CGROUPS.format(0), []) == [["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"]]


def test_bound_controllers_are_mounted_one_by_one() -> None:
    commands = engine.cgroup_mounts(PROC_CGROUPS.format(3), ["sysfs"])
    assert commands[0][:3] == ["mount", "-t", "tmpfs"]
    assert [argv[4] for argv in commands if "cgroup" in argv[:3]] == ["cpu", "memory"]


@pytest.mark.parametrize("mounted", [["cgroup2"], ["tmpfs", "cgroup"]])
def test_what_is_mounted_stays(mounted: list[str]) -> None:
    assert engine.cgroup_mounts(PROC_CGROUPS.format(3), mounted) == []


@needs_root
def test_a_bare_container_gets_its_cgroups() -> None:
    """In a mount namespace without any, as in a container that nobody prepared."""
    script = (
        "mount --make-rprivate / && while umount -l /sys/fs/cgroup 2>/dev/null; do :; done\n"
        f"{sys.executable} -c 'from images import engine; engine._mount_cgroups([])' && cat /proc/self/mounts"
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


def test_proxies_reach_build_steps_in_both_spellings() -> None:
    given = {"HTTP_PROXY": "http://upper:1", "https_proxy": "http://lower:2", "all_proxy": "", "PATH": "/bin"}
    assert engine.build_environment(given) == {
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
def test_all_proxy_stands_in_for_what_is_not_set(proxy: str, filled: str) -> None:
    """Apt does not know it; what is set for one kind of address holds for that kind."""
    for name in ("all_proxy", "ALL_PROXY"):
        found = engine.build_environment({name: proxy, "HTTPS_PROXY": "http://own:2"})
        assert found == {
            **dict.fromkeys(("http_proxy", "HTTP_PROXY"), filled),
            **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://own:2"),
            **dict.fromkeys(("all_proxy", "ALL_PROXY"), proxy),
        }


@contextlib.contextmanager
def asked_of_a_proxy(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A port on the loopback, and what those who came there sent: first words, then what follows ``answer``."""
    heard: list[bytes] = []

    class Listener(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(20)
            heard.append(self.request.recv(4096))
            if answer:
                self.request.sendall(answer)
                heard.append(self.request.recv(4096))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], heard
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.engine
@needs_dockerd
@pytest.mark.parametrize(("scheme", "answer"), [("http", b""), ("socks5h", b"\x05\x00")])
def test_an_engine_started_here_goes_through_all_proxy(
    daemon: engine.Daemon, monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes
) -> None:
    for name in engine.build_environment():
        monkeypatch.delenv(name, raising=False)
    with asked_of_a_proxy(answer) as (port, heard):
        with monkeypatch.context() as environment:
            environment.setenv("all_proxy", f"{scheme}://127.0.0.1:{port}")
            engine.ensure_daemon(daemon)
        client = docker.DockerClient(base_url=daemon.host)
        with contextlib.closing(client), pytest.raises(docker.errors.APIError):
            client.images.pull("registry.example/some/image", "tag")
    assert any(b"registry.example" in words for words in heard), heard


def test_what_dockerd_gets_of_proxies() -> None:
    given = {"ALL_PROXY": "socks5h://p:1", "https_proxy": "http://own:2", "no_proxy": "here", "PATH": "/bin"}
    assert engine.daemon_environment(given) == {
        "PATH": "/bin",
        **dict.fromkeys(("http_proxy", "HTTP_PROXY"), "socks5://p:1"),
        **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://own:2"),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "here"),
    }


@pytest.mark.parametrize(
    ("proxy", "network"),
    [
        ("http://127.0.0.1:3128", "host"),
        ("socks5://localhost:1080", "host"),
        ("http://[::1]:8080", "host"),
        ("127.8.0.1:80", "host"),
        ("http://proxy.example:3128", None),
        ("http://10.0.0.1:3128", None),
    ],
)
def test_a_proxy_on_this_machine_needs_its_network(proxy: str, network: str | None) -> None:
    assert engine.build_network({"all_proxy": proxy}) == network


def test_where_no_proxy_is_not_looked_for_one() -> None:
    assert engine.build_network({"no_proxy": "localhost,127.0.0.1"}) is None


def test_a_broken_docker_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("[]")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(EngineConfigUnusable, match="configuration file"):
        engine.connect()


@pytest.mark.engine
def test_other_tests_of_this_checkout_that_end_leave_the_engine() -> None:
    """It may be one that the tests started: the last of their sessions ends it."""
    others = ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/host/test_errors.py"]
    done = subprocess.run([sys.executable, *others], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    with contextlib.closing(engine.connect()) as client:
        assert client.ping()


@needs_root
def test_a_socket_in_a_folder_that_is_closed_to_us_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        os.seteuid(65534)
        try:
            with pytest.raises(EngineUnavailable) as caught:
                engine.connect()
        finally:
            os.seteuid(0)
    assert "Permission denied" in caught.value.found
