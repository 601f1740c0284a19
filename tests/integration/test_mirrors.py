"""Tests of registry mirrors: changes to daemon.json, and reloads of a real engine.

The tests run a separate dockerd. The tests never change the machine's engine or its /etc/docker/daemon.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from registry_parts import need, second_engine
from waiting import eventually

from engine import systemd
from engine.connect import connect
from engine.dockerd import Daemon
from registry import mirrors
from toolchain import process
from toolchain.config import ROOT
from toolchain.errors import EngineUnavailable, ProgramMissing, UserError
from toolchain.process_identity import find

A, B, C = "https://a.example", "http://b.example:5000", "https://c.example"


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's engines, so that none is queried or reloaded."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setattr(mirrors, "_PIDFILES", ())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "docker"
    folder.mkdir()
    return folder / "daemon.json"


@pytest.fixture
def daemon(no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """Run an engine that is configured by ``tmp_path / "daemon.json"``."""
    with second_engine(tmp_path) as found:
        monkeypatch.setenv("DOCKER_HOST", found.host)
        yield found


# --- the file ------------------------------------------------------------------------------------------------------


def test_missing_file_is_created(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "docker" / "daemon.json"
    state = mirrors.merge([A, B], daemon_json=file)
    assert json.loads(file.read_text()) == {"registry-mirrors": [A, B]}
    assert (state.configured, state.changed, state.backup, state.active) == ((A, B), True, None, None)
    assert "not running" in state.reload
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [path.name for path in file.parent.iterdir()] == ["daemon.json"]


def test_other_keys_and_the_format_are_preserved(file: Path) -> None:
    text = (
        '{\n\t"log-opts": {"max-size": "10m", "ü": "µ"},\n\t"registry-mirrors": ["https://Z.example/"],\n'
        '\t"max-download-attempts": 3,\n\t"a": [1, 2.50, null, true]\n}\n'
    )
    file.write_text(text)
    file.chmod(0o640)
    mirrors.merge([A], daemon_json=file)
    found = json.loads(file.read_text())
    assert list(found) == ["log-opts", "registry-mirrors", "max-download-attempts", "a"]
    before = json.loads(text)
    assert found["registry-mirrors"] == ["https://Z.example/", A]
    assert {key: value for key, value in found.items() if key != "registry-mirrors"} == {
        key: value for key, value in before.items() if key != "registry-mirrors"
    }
    assert '\n\t"log-opts"' in file.read_text()
    assert "µ" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_old_file_is_backed_up(file: Path) -> None:
    file.write_text('{"debug": true}')
    first = mirrors.merge([A], daemon_json=file)
    second = mirrors.merge([B], daemon_json=file)
    assert first.backup is not None
    assert second.backup is not None
    assert first.backup != second.backup
    assert first.backup.read_text() == '{"debug": true}'
    assert json.loads(second.backup.read_text()) == {"debug": True, "registry-mirrors": [A]}


def test_private_file_stays_private(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other user can ever read the new file or the backup, because proxy addresses can contain passwords."""
    seen: list[int] = []

    def see(aside: Path, _: Path) -> None:
        seen.append(stat.S_IMODE(aside.stat().st_mode))

    monkeypatch.setattr(mirrors, "_validate", see)
    file.write_text('{"debug": true}')
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 1234, 1234)
    changed = mirrors.merge([A], daemon_json=file)
    assert changed.backup is not None
    for path in (file, changed.backup):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == (1234 if os.geteuid() == 0 else os.geteuid())
    assert seen == [0o600]


def test_merging_twice_changes_nothing(file: Path) -> None:
    mirrors.merge([A, B, A], daemon_json=file)
    before = (file.read_text(), file.stat().st_mtime_ns, sorted(file.parent.iterdir()))
    for again in ([B, A], ["HTTPS://A.EXAMPLE/"], [A + "/"], []):
        state = mirrors.merge(again, daemon_json=file)
        assert not state.changed
        assert state.backup is None
    assert (file.read_text(), file.stat().st_mtime_ns, sorted(file.parent.iterdir())) == before


def test_mirrors_are_removed(file: Path) -> None:
    file.write_text(json.dumps({"debug": False, "registry-mirrors": [A, "https://B.example/", C]}))
    assert mirrors.remove([A, "https://b.example", "https://never.example"], daemon_json=file).configured == (C,)
    assert not mirrors.remove([A], daemon_json=file).changed
    assert mirrors.remove(daemon_json=file).configured == ()
    assert json.loads(file.read_text()) == {"debug": False, "registry-mirrors": []}
    assert not mirrors.remove(daemon_json=file).changed


def test_removing_does_not_create_a_file(file: Path) -> None:
    assert not mirrors.remove(daemon_json=file).changed
    assert not file.exists()


def test_showing_changes_nothing(file: Path) -> None:
    assert mirrors.show(daemon_json=file).configured == ()
    file.write_text(json.dumps({"registry-mirrors": [A]}))
    assert mirrors.show(daemon_json=file).configured == (A,)
    assert [path.name for path in file.parent.iterdir()] == ["daemon.json"]


@pytest.mark.parametrize("empty", ["", "\n", "{}", " {\n}\n"])
def test_empty_file_is_filled(file: Path, empty: str) -> None:
    file.write_text(empty)
    mirrors.merge([A], daemon_json=file)
    assert json.loads(file.read_text()) == {"registry-mirrors": [A]}


def test_symbolic_link_is_preserved(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.json"
    target.write_text("{}")
    file.symlink_to(target)
    mirrors.merge([A], daemon_json=file)
    assert file.is_symlink()
    assert json.loads(target.read_text()) == {"registry-mirrors": [A]}


def test_concurrent_merges_keep_all_mirrors(file: Path) -> None:
    urls = [f"https://m{number}.example" for number in range(8)]
    threads = [threading.Thread(target=mirrors.merge, args=([url],), kwargs={"daemon_json": file}) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(json.loads(file.read_text())["registry-mirrors"]) == urls


# --- the command line ----------------------------------------------------------------------------------------------


def inv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a mount namespace with a copy of /etc, ``folder``'s daemon.json and an empty /run."""
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    script = """
        folder=$0
        mkdir -p "$folder/etc"
        mount -t tmpfs tmpfs "$folder/etc"
        cp -a /etc/. "$folder/etc" 2>/dev/null || true # unreadable files are not needed
        mkdir -p "$folder/etc/docker"
        rm -f "$folder/etc/docker/daemon.json"
        if [ -e "$folder/daemon.json" ]; then cp "$folder/daemon.json" "$folder/etc/docker"; fi
        mount --bind "$folder/etc" /etc
        mount -t tmpfs tmpfs /run
        status=0
        "$@" || status=$?
        if [ -e /etc/docker/daemon.json ]; then cp /etc/docker/daemon.json "$folder"; fi
        exit "$status"
    """
    environment = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    environment["INVOKE_BUILD_FOLDER"] = str(folder / "build")
    return subprocess.run(
        [*enter, "sh", "-ec", script, folder, sys.executable, "-m", "toolchain.cli", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_command_line_adds_and_removes_urls(tmp_path: Path) -> None:
    before = Path("/etc/docker/daemon.json").exists()
    file = tmp_path / "daemon.json"
    done = inv(tmp_path, "mirror", A, B)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text()) == {"registry-mirrors": [A, B]}
    assert done.stdout.splitlines() == [
        f"/etc/docker/daemon.json: changed, mirrors {A}, {B}",
        "engine: not running; it reads the file when it starts",
    ]
    assert inv(tmp_path, "mirror", A, "--remove").returncode == 0
    assert json.loads(file.read_text()) == {"registry-mirrors": [B]}
    assert Path("/etc/docker/daemon.json").exists() == before, "this machine's daemon.json must not change"


def test_command_line_refuses_comma_separated_urls(tmp_path: Path) -> None:
    done = inv(tmp_path, "mirror", f"{A},{B}")
    assert done.returncode == 10
    assert "is not the address of a mirror" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "daemon.json").exists()


# --- invalid input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("a.example", "no http:// or https://"),
        ("ftp://a.example", "the scheme 'ftp'"),
        ("https://a.example/v2", "the path /v2"),
        ("https://a.example/v2/", "the path /v2/"),
        ("https://a.example?x=1", "a query or fragment"),
        ("https://a.example/#x", "a query or fragment"),
        ("https://me:word@a.example", "a user or password"),
        ("https://", "the host ''"),
        ("https://a b.example", "the host"),
        ("https://a.example:99999", "ort"),
        ("https://a.example:x", "ort"),
        ("https://a.example:0", "the host"),
        ("https://[::1", "Invalid IPv6 URL"),
        ("", "no http:// or https://"),
    ],
)
def test_invalid_urls_are_refused(file: Path, url: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        mirrors.merge([A, url], daemon_json=file)
    assert words in caught.value.found
    assert "word@" not in str(caught.value)
    assert caught.value.fix
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1"),
        ('{"a": 1,}', "line 1"),
        ("[]", "a list"),
        ('"text"', "a str"),
        ('{"registry-mirrors": "https://a.example"}', "https://a.example"),
        ('{"registry-mirrors": [3]}', "[3]"),
        ('{"debug": true, "debug": false}', "duplicate key 'debug'"),
        ('// a comment\n{"debug": true}', "line 1"),
    ],
)
def test_invalid_file_is_refused_and_unchanged(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    calls: tuple[Callable[[], object], ...] = (
        lambda: mirrors.merge([A], daemon_json=file),
        lambda: mirrors.show(daemon_json=file),
    )
    for call in calls:
        with pytest.raises(EngineUnavailable) as caught:
            call()
        assert words in caught.value.found
        assert caught.value.exit_code == 16
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["daemon.json"]


def test_binary_file_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(EngineUnavailable, match="UTF-8"):
        mirrors.merge([A], daemon_json=file)


def test_missing_permission_suggests_root(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("requires root to switch to another user")
    file.write_text("{}")
    for path in (file, *list(file.parents)[:3]):
        path.chmod(0o755 if path.is_dir() else 0o644)
    os.seteuid(65534)
    try:
        with pytest.raises(EngineUnavailable) as caught:
            mirrors.merge([A], daemon_json=file)
    finally:
        os.seteuid(0)
    assert "root" in caught.value.fix
    assert file.read_text() == "{}"
    assert [path.name for path in file.parent.iterdir()] == ["daemon.json"]


def test_remote_engine_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(EngineUnavailable, match="does not use a Unix socket on this machine"):
        mirrors.merge([A], daemon_json=file)
    assert not file.exists()


# --- a real engine -------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_engine_reloads_added_and_removed_mirrors(tmp_path: Path, daemon: Daemon) -> None:
    file = tmp_path / "daemon.json"
    pid = json.loads(daemon.state.read_text())["pid"]
    state = mirrors.merge([A, B], daemon_json=file, daemon=daemon)
    assert state.in_effect
    assert state.active == (A + "/", B + "/")
    assert state.reload == f"kill -HUP {pid}"
    assert state.lines() == [
        f"{file}: changed, mirrors {A}, {B}",
        f"backup of the old file: {state.backup}",
        f"engine: kill -HUP {pid}",
        f"the engine uses mirrors {A}/, {B}/: same as in the file",
    ]
    again = mirrors.merge([A], daemon_json=file, daemon=daemon)
    assert again.in_effect
    assert (again.changed, again.reload) == (False, "")
    state = mirrors.remove([A], daemon_json=file, daemon=daemon)
    assert state.active == (B + "/",)
    state = mirrors.remove(daemon_json=file, daemon=daemon)
    assert state.in_effect
    assert state.active == ()
    assert json.loads(daemon.state.read_text())["pid"] == pid, "the engine must be reloaded, not restarted"


@pytest.mark.engine
def test_manual_change_of_the_file_is_reloaded(tmp_path: Path, daemon: Daemon) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({"registry-mirrors": [C]}))
    assert mirrors.show(daemon_json=file).active == ()
    state = mirrors.merge([C], daemon_json=file, daemon=daemon)
    assert not state.changed
    assert state.active == (C + "/",)


@pytest.mark.engine
def test_foreign_engine_gets_a_suggested_command(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "daemon.json"
    monkeypatch.setattr(systemd, "_BOOTED", tmp_path / "no-systemd")
    monkeypatch.setattr(mirrors, "_PIDFILES", (daemon.folder / "docker.pid",))
    state = mirrors.merge([A], daemon_json=file)
    pid = json.loads(daemon.state.read_text())["pid"]
    assert state.reload.endswith(f"kill -HUP {pid}")
    assert not state.in_effect
    assert state.active == ()
    assert state.lines()[-1] == "the engine uses no mirrors: differs from the file"
    assert json.loads(file.read_text()) == {"registry-mirrors": [A]}


@pytest.mark.engine
def test_file_is_restored_if_the_engine_ignores_it(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_RELOAD_LIMIT_S", 1.0)
    elsewhere = tmp_path / "not-the-engines.json"
    elsewhere.write_text('{"debug": true}')
    with pytest.raises(UserError) as caught:
        mirrors.merge([A], daemon_json=elsewhere, daemon=daemon)
    assert "was restored" in caught.value.found
    assert elsewhere.read_text() == '{"debug": true}'
    assert not list(tmp_path.glob("not-the-engines.json.*"))
    absent = tmp_path / "absent.json"
    with pytest.raises(UserError):
        mirrors.merge([A], daemon_json=absent, daemon=daemon)
    assert not absent.exists()


@pytest.mark.engine
def test_engine_uses_the_previous_mirrors_again(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine removes duplicates, so the mirrors in use differ from those in the file."""
    monkeypatch.setattr(mirrors, "_RELOAD_LIMIT_S", 2.0)
    file, twice = tmp_path / "daemon.json", json.dumps({"registry-mirrors": [A, A + "/"]})
    file.write_text(twice)
    with pytest.raises(UserError):
        mirrors.merge([A], daemon_json=file, daemon=daemon)
    assert mirrors.show(daemon_json=file).active == (A + "/",)
    with pytest.raises(UserError) as caught:
        mirrors.merge([B], daemon_json=file, daemon=daemon)
    assert caught.value.found == (f"it uses {A}/, {B}/; {file} was restored, and the engine uses the previous mirrors")
    assert file.read_text() == twice
    assert mirrors.show(daemon_json=file).active == (A + "/",)


@pytest.mark.engine
def test_file_is_restored_if_the_reload_fails(tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reload fails because the program ``kill`` is missing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("dockerd", "ip"):
        (folder / program).symlink_to(process.require_program(program, "for this test"))
    file = tmp_path / "daemon.json"
    file.write_text('{"debug": true}')
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder))
        with pytest.raises(ProgramMissing) as caught:
            mirrors.merge([A], daemon_json=file, daemon=daemon)
    assert f"{file} was restored, but the engine could not be reloaded: cannot run kill" in caught.value.found
    assert file.read_text() == '{"debug": true}'
    assert not list(tmp_path.glob("daemon.json.*"))


@pytest.mark.engine
def test_killed_engine_is_started_again(tmp_path: Path, daemon: Daemon) -> None:
    pid = json.loads(daemon.state.read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: find(pid) is None)
    assert mirrors._reload_restored(daemon, ()) == "and the engine uses the previous mirrors"
    assert json.loads(daemon.state.read_text())["pid"] != pid


@pytest.mark.engine
def test_mirrors_on_the_command_line_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with second_engine(tmp_path, f"--registry-mirror={C}") as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        with pytest.raises(EngineUnavailable, match="command line"):
            mirrors.merge([A], daemon_json=tmp_path / "daemon.json", daemon=daemon)
    assert json.loads((tmp_path / "daemon.json").read_text()) == {}


@pytest.mark.engine
def test_invalid_configuration_is_not_written(file: Path) -> None:
    need("dockerd")
    program = process.require_program("dockerd", "for this test")
    if "--validate" not in process.output_of([program, "--help"]):
        pytest.skip("requires a dockerd with --validate (23.0 or later)")
    file.write_text('{"no-such-setting": 1}')
    with pytest.raises(EngineUnavailable) as caught:
        mirrors.merge([A], daemon_json=file)
    assert "no-such-setting" in caught.value.found
    assert str(file) in str(caught.value)
    assert file.read_text() == '{"no-such-setting": 1}'
    assert [path.name for path in file.parent.iterdir()] == ["daemon.json"]
    file.write_text('{"debug": true}')
    assert mirrors.merge([A], daemon_json=file).changed


@pytest.mark.engine
def test_engine_starts_with_the_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrors.merge([A, B], daemon_json=tmp_path / "daemon.json")
    with second_engine(tmp_path) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        assert mirrors.show(daemon_json=tmp_path / "daemon.json").in_effect
    with pytest.raises(EngineUnavailable):
        connect(timeout_s=5)
