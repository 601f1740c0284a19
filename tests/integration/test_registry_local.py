"""The local registry: Debian's docker-registry, started and stopped for real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from registry_parts import HTPASSWD, PASSWORD, USER, ask, config_for, make_certificate, need
from spare_bridge import spare_bridge

from registry import local as local_registry
from registry.local import Settings
from toolchain.config import Config, load_config
from toolchain.errors import ForeignFolder, ProgramMissing, ServerFailed
from toolchain.ports import free_port


@pytest.fixture(autouse=True)
def _registry_is_installed() -> None:
    need("docker-registry")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    found = config_for(tmp_path, f"127.0.0.1:{free_port()}")
    yield found
    local_registry.down(found)


def test_up_answers_when_it_returns_and_a_second_up_changes_nothing(config: Config) -> None:
    first = local_registry.up(config)
    assert first.started_now
    assert first.address == config.registry.address
    assert ask(first, "/v2/").headers["Docker-Distribution-Api-Version"] == "registry/2.0"
    second = local_registry.up(config)
    assert (second.pid, second.started_now) == (first.pid, False)
    assert local_registry.status(config).pid == first.pid


def test_down_ends_it_and_only_purge_deletes_the_images(config: Config) -> None:
    running = local_registry.up(config)
    (running.settings.images / "kept").touch()
    assert not local_registry.down(config).running
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(running.address.rpartition(":")[2])), timeout=5)
    assert not local_registry.down(config).running, "nothing to stop is fine"
    assert (running.settings.images / "kept").exists()
    local_registry.down(config, purge=True)
    assert not running.settings.folder.exists()


def test_it_listens_on_the_loopback_only_and_outlives_its_starter(config: Config, tmp_path: Path) -> None:
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
    running = local_registry.status(config)
    assert running.pid == int(ended.stdout)
    table = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{settings.port:04X} 00000000:0000 0A" in table
    assert f"00000000:{settings.port:04X} 00000000:0000 0A" not in table
    assert f"{settings.port:04X} 00000000000000000000000000000000:0000 0A" not in Path("/proc/net/tcp6").read_text()


def test_one_that_was_killed_is_found_dead_and_started_anew(config: Config) -> None:
    first = local_registry.up(config)
    os.kill(first.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while local_registry.status(config).running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not local_registry.status(config).running
    assert local_registry.up(config).pid != first.pid


def test_a_process_that_got_the_same_pid_later_is_not_taken_for_ours(config: Config) -> None:
    running = local_registry.up(config)
    state = json.loads(running.settings.state.read_text())
    local_registry.down(config)
    state["process"]["pid"] = os.getpid()
    running.settings.state.write_text(json.dumps(state))
    assert not local_registry.status(config).running
    local_registry.down(config)  # does not end the test run


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"process": {}}', '{"process": 3, "address": "", "url": ""}'])
def test_a_torn_record_counts_as_none(config: Config, torn: str) -> None:
    settings = Settings.of(config)
    settings.folder.mkdir(parents=True)
    (settings.folder / ".pitorch-owned").touch()
    settings.state.write_text(torn)
    assert not local_registry.status(config).running
    assert local_registry.up(config).running


def test_a_taken_port_is_said_so(config: Config) -> None:
    port = int(config.registry.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerFailed) as caught:
        local_registry.up(config)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "in use" in caught.value.found
    assert f"sport = :{port}" in caught.value.fix
    assert local_registry.up(config).running, "once it is free, it works"


def test_a_registry_that_does_not_come_up_shows_its_last_lines(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path / "r", certificate=tmp_path / "no.pem", key=tmp_path / "no.key")
    with pytest.raises(ServerFailed) as caught:
        local_registry.start(settings)
    assert "no.pem" in caught.value.found
    assert str(settings.log) in caught.value.fix
    assert not settings.state.exists()


def test_a_changed_port_moves_it(config: Config, tmp_path: Path) -> None:
    first = local_registry.up(config)
    moved = load_config(
        {"build": {"folder": str(config.build.folder)}, "registry": {"address": f"127.0.0.1:{free_port()}"}}
    )
    second = local_registry.up(moved)
    assert second.address == moved.registry.address != first.address
    assert not Path(f"/proc/{first.pid}/exe").exists()


def test_ups_side_by_side_start_one(config: Config) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(local_registry.up(config).pid)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    config = config_for(tmp_path, f"127.0.0.1:{free_port()}")
    folder = Settings.of(config).folder
    folder.mkdir(parents=True)
    (folder / "precious").write_text("x")
    with pytest.raises(ForeignFolder):
        local_registry.up(config)
    with pytest.raises(ForeignFolder):
        local_registry.down(config, purge=True)
    assert [path.name for path in folder.iterdir()] == ["precious"]


def test_without_the_program_it_is_said_what_to_install(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ProgramMissing, match="apt-get install docker-registry"):
        local_registry.up(config)


def test_variables_of_its_own_do_not_leak_in(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_HTTP_ADDR", "0.0.0.0:1")
    monkeypatch.setenv("REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY", "/nonexistent")
    assert local_registry.up(config).running


def test_a_remote_registry_in_the_configuration_is_not_imitated(tmp_path: Path) -> None:
    remote = config_for(tmp_path, "registry.example.com:8443")
    assert (Settings.of(remote).host, Settings.of(remote).port) == ("127.0.0.1", 5000)


@pytest.mark.parametrize("host", ["127.0.0.7", "[::1]"])
def test_it_listens_where_the_configuration_says(tmp_path: Path, host: str) -> None:
    bare = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
        try:
            probe.bind((bare, 0))
        except OSError as fault:
            pytest.skip(f"needs the address {host}: {fault}")
    port = free_port(bare)
    config = config_for(tmp_path, f"{host}:{port}")
    running = local_registry.up(config)
    try:
        assert running.address == config.registry.address
        assert ask(running, "/v2/").status_code == 200
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert local_registry.up(config).pid == running.pid
    finally:
        local_registry.down(config)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a bridge")
def test_another_address_of_this_machine_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    with spare_bridge() as name:
        said = subprocess.run(["ip", "-j", "-4", "address", "show", name], check=True, capture_output=True).stdout
        own = json.loads(said)[0]["addr_info"][0]["local"]
        settings = Settings.of(config_for(tmp_path, f"{own}:5001"))
        assert (settings.host, settings.port) == (own, 5001)
    settings = Settings.of(config_for(tmp_path, f"{own}:5001"))
    assert (settings.host, settings.port) == ("127.0.0.1", 5000), "now it is another machine's"


def test_localhost_is_the_loopback(tmp_path: Path) -> None:
    settings = Settings.of(config_for(tmp_path, "localhost:5001"))
    assert (settings.host, settings.port) == ("127.0.0.1", 5001)


def test_passwords_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    with local_registry.serve(Settings(folder=tmp_path / "r", htpasswd=tmp_path / "htpasswd")) as running:
        assert ask(running, "/v2/").status_code == 401
        assert ask(running, "/v2/", auth=(USER, "wrong")).status_code == 401
        assert ask(running, "/v2/", auth=(USER, PASSWORD)).status_code == 200
    assert not local_registry.look(running.settings).running


def test_tls_is_spoken(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    with local_registry.serve(Settings(folder=tmp_path / "r", certificate=certificate, key=key)) as running:
        assert running.url.startswith("https://")
        assert ask(running, "/v2/").status_code == 200


def test_the_configuration_is_private_and_survives_odd_paths(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted": {path} #1'
    with local_registry.serve(Settings(folder=folder)) as running:
        written = yaml.safe_load(running.settings.configuration.read_text())
        assert written["storage"]["filesystem"]["rootdirectory"] == str(folder / "images")
        assert running.settings.configuration.stat().st_mode & 0o077 == 0
        secret = written["http"]["secret"]
    with local_registry.serve(Settings(folder=folder)) as running:
        assert yaml.safe_load(running.settings.configuration.read_text())["http"]["secret"] == secret
