"""Tests of the local registry: start and stop Debian's docker-registry."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from registry_parts import ask, config_for, need, with_tls
from spare_bridge import spare_bridge
from waiting import eventually

from registry import local as local_registry
from registry.local import Settings
from toolchain.config import Config, load_config
from toolchain.errors import InUse, ProgramMissing, RootNeeded, UserError
from toolchain.ports import free_port


@pytest.fixture(autouse=True)
def _registry_is_installed() -> None:
    need("docker-registry")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    found = config_for(tmp_path, f"127.0.0.1:{free_port()}")
    yield found
    local_registry.down(Settings.of(found))


def test_second_up_changes_nothing(config: Config) -> None:
    first = local_registry.start(Settings.of(config))
    assert first.address == config.registry.address
    assert ask(first, "/v2/").headers["Docker-Distribution-Api-Version"] == "registry/2.0"
    second = local_registry.start(Settings.of(config))
    assert local_registry.look(Settings.of(config)).pid == second.pid == first.pid


def test_down_keeps_images_and_purge_deletes_them(config: Config) -> None:
    running = local_registry.start(Settings.of(config))
    (running.settings.images / "file").touch()
    assert not local_registry.down(Settings.of(config)).running
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(running.address.rpartition(":")[2])), timeout=5)
    assert not local_registry.down(Settings.of(config)).running, "stopping a stopped registry must not be an error"
    assert (running.settings.images / "file").exists()
    local_registry.down(Settings.of(config), purge=True)
    assert not running.settings.folder.exists()


def test_registry_outlives_its_starter_on_loopback_only(config: Config, tmp_path: Path) -> None:
    settings = Settings.of(config)
    code = (
        "import sys; from pathlib import Path; from registry import local as l;"
        f"print(l.start(l.Settings(folder=Path({str(settings.folder)!r}), port={settings.port})).pid)"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    running = local_registry.look(Settings.of(config))
    assert running.pid == int(ended.stdout)
    table = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{settings.port:04X} 00000000:0000 0A" in table
    assert f"00000000:{settings.port:04X} 00000000:0000 0A" not in table
    assert f"{settings.port:04X} 00000000000000000000000000000000:0000 0A" not in Path("/proc/net/tcp6").read_text()


def test_busy_registry_is_not_restarted(config: Config) -> None:
    """The registry does not respond for 6 s."""
    first = local_registry.start(Settings.of(config))
    os.kill(first.pid, signal.SIGSTOP)
    resume = threading.Timer(6.0, os.kill, (first.pid, signal.SIGCONT))
    resume.start()
    try:
        assert local_registry.start(Settings.of(config)).pid == first.pid
    finally:
        resume.join()


def test_killed_registry_is_started_again(config: Config) -> None:
    first = local_registry.start(Settings.of(config))
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: not local_registry.look(Settings.of(config)).running)
    assert local_registry.start(Settings.of(config)).pid != first.pid


def test_reused_pid_is_not_the_registry(config: Config) -> None:
    running = local_registry.start(Settings.of(config))
    state = json.loads(running.settings.state.read_text())
    local_registry.down(Settings.of(config))
    state["process"]["pid"] = os.getpid()
    running.settings.state.write_text(json.dumps(state))
    assert not local_registry.look(Settings.of(config)).running
    local_registry.down(Settings.of(config))  # The recorded process is the test run, which must not be stopped.


def test_registry_of_another_user_is_not_stopped() -> None:
    """The folder belongs to an ordinary user, and root has started the registry."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        settings = Settings(folder=Path(name, "registry"))
        with local_registry.serve(settings):
            for path in (Path(name), settings.folder, *settings.folder.iterdir()):
                os.chown(path, 65534, 65534)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setuid(65534)
                    local_registry.stop(settings)
                except RootNeeded as fault:
                    code = fault.exit_code
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == RootNeeded.exit_code
            assert local_registry.look(settings).running


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": {}}', '{"process": 3, "address": "", "url": ""}'])
def test_invalid_record_counts_as_stopped(config: Config, text: str) -> None:
    settings = Settings.of(config)
    settings.folder.mkdir(parents=True)
    (settings.folder / ".pitorch-owned").touch()
    settings.state.write_text(text)
    assert not local_registry.look(Settings.of(config)).running
    assert local_registry.start(Settings.of(config)).running


def test_port_in_use_is_reported(config: Config) -> None:
    port = int(config.registry.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(InUse, match=f"port {port} is in use") as caught:
        local_registry.start(Settings.of(config))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert str(os.getpid()) in caught.value.found or "another program" in caught.value.found
    assert "systemctl disable --now docker-registry" in caught.value.fix
    assert local_registry.start(Settings.of(config)).running


def test_failed_start_shows_the_last_lines_of_the_log(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path / "r", variables=with_tls(tmp_path / "no.pem", tmp_path / "no.key"))
    with pytest.raises(UserError) as caught:
        local_registry.start(settings)
    assert "no.pem" in caught.value.found
    assert str(settings.log) in caught.value.fix
    assert not settings.state.exists()


def test_changed_port_restarts_the_registry(config: Config, tmp_path: Path) -> None:
    first = local_registry.start(Settings.of(config))
    moved = load_config(
        {"build": {"folder": str(config.build.folder)}, "registry": {"address": f"127.0.0.1:{free_port()}"}}
    )
    second = local_registry.start(Settings.of(moved))
    assert second.address == moved.registry.address != first.address
    assert not Path(f"/proc/{first.pid}/exe").exists()


def test_concurrent_ups_start_one_registry(config: Config) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(local_registry.start(Settings.of(config)).pid)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_foreign_folder_is_not_changed(tmp_path: Path) -> None:
    config = config_for(tmp_path, f"127.0.0.1:{free_port()}")
    folder = Settings.of(config).folder
    folder.mkdir(parents=True)
    (folder / "precious").write_text("x")
    with pytest.raises(UserError):
        local_registry.start(Settings.of(config))
    with pytest.raises(UserError):
        local_registry.down(Settings.of(config), purge=True)
    assert [path.name for path in folder.iterdir()] == ["precious"]


def test_missing_program_is_reported_with_its_package(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ProgramMissing, match="apt-get install docker-registry"):
        local_registry.start(Settings.of(config))


def test_environment_does_not_change_the_registry(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_HTTP_ADDR", "0.0.0.0:1")
    monkeypatch.setenv("REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY", "/nonexistent")
    assert local_registry.start(Settings.of(config)).running


def test_remote_address_is_replaced_by_loopback(tmp_path: Path) -> None:
    remote = config_for(tmp_path, "registry.example.com:8443")
    assert (Settings.of(remote).host, Settings.of(remote).port) == ("127.0.0.1", 5000)


@pytest.mark.parametrize("host", ["127.0.0.7", "[::1]"])
def test_configured_loopback_address_is_used(tmp_path: Path, host: str) -> None:
    bare = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
        try:
            probe.bind((bare, 0))
        except OSError as fault:
            pytest.skip(f"requires the address {host}: {fault}")
    port = free_port(bare)
    config = config_for(tmp_path, f"{host}:{port}")
    running = local_registry.start(Settings.of(config))
    try:
        assert running.address == config.registry.address
        assert ask(running, "/v2/").status_code == 200
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert local_registry.start(Settings.of(config)).pid == running.pid
    finally:
        local_registry.down(Settings.of(config))


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root to create a bridge")
def test_configured_address_of_this_machine_is_used(tmp_path: Path) -> None:
    with spare_bridge() as name:
        listed = subprocess.run(["ip", "-j", "-4", "address", "show", name], check=True, capture_output=True).stdout
        own = json.loads(listed)[0]["addr_info"][0]["local"]
        settings = Settings.of(config_for(tmp_path, f"{own}:5001"))
        assert (settings.host, settings.port) == (own, 5001)
    settings = Settings.of(config_for(tmp_path, f"{own}:5001"))
    assert (settings.host, settings.port) == ("127.0.0.1", 5000), "the address must no longer exist"


def test_localhost_means_loopback(tmp_path: Path) -> None:
    settings = Settings.of(config_for(tmp_path, "localhost:5001"))
    assert (settings.host, settings.port) == ("127.0.0.1", 5001)


def test_configuration_is_private_with_any_path(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted": {path} #1 🥧'
    with local_registry.serve(Settings(folder=folder)) as running:
        written = yaml.safe_load(running.settings.configuration.read_text())
        assert written["storage"]["filesystem"]["rootdirectory"] == str(folder / "images")
        assert running.settings.configuration.stat().st_mode & 0o077 == 0
        secret = written["http"]["secret"]
    with local_registry.serve(Settings(folder=folder)) as running:
        assert yaml.safe_load(running.settings.configuration.read_text())["http"]["secret"] == secret
