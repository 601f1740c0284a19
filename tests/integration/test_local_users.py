"""Tests that root and boards can access a tree that is served over NFS, but ordinary users of the PC cannot."""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from device_parts import write_suite
from exports import mark_as_export
from test_device_drive import drive
from test_serve import in_foreground, marked
from waiting import eventually

from device import chain
from device.record import Record
from device.remote import loader_session, targets
from engine.start import socket_group
from nfsroot import serve
from nfsroot.layout import Layout, identity_of, require_export
from nfsroot.private_network import private_network
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactMissing, EngineUnavailable, InUse
from toolchain.ports import free_port

ORDINARY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PROGRAM = "bin/id"
EVERYTHING = {"mounted": True, "written": True, "setuid": True, "executed": True}
NOTHING = dict.fromkeys(EVERYTHING, False)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user can enter, unlike pytest's temporary folders."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    # Do not copy the file's mode: in a clone made with umask 077, other users could not read the copy.
    shutil.copyfile(ROOT / "tests" / "support" / "intruder.py", folder / "intruder.py")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def exported(open_folder: Path) -> Config:
    """Make an export with this machine's programs, in a folder with mode 0755."""
    layout = Layout(open_folder / "nfsroot")
    fill(layout.tree)
    mark_as_export(layout)
    return load_config({"nfs": {"folder": str(layout.place), "address": "127.0.0.1", "port": free_port()}})


def fill(tree: Path) -> None:
    (tree / "bin").mkdir(parents=True)
    shutil.copy("/usr/bin/id", tree / PROGRAM)


def intrude(folder: Path, port: int, tree: Path) -> dict[str, bool]:
    """Run the attack as an ordinary user, and return the steps that succeed."""
    words: list[str | Path] = [
        *ORDINARY,
        "/usr/bin/python3",
        folder / "intruder.py",
        "127.0.0.1",
        str(port),
        tree,
        PROGRAM,
    ]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["user"] == 65534
    return {what: found[what] for what in EVERYTHING}


@marked(pytest.mark.network_namespaces)
def test_the_attack_works_without_protection(open_folder: Path) -> None:
    """If the attack failed without protection, the other tests would not prove anything."""
    tree = open_folder / "tree"
    fill(tree)
    with private_network(), serve.running_server(tree) as server:
        assert intrude(open_folder, server.port, tree) == EVERYTHING


@marked()
def test_the_server_refuses_unprivileged_ports(open_folder: Path) -> None:
    tree = open_folder / "tree"
    fill(tree)
    with serve.running_server(tree) as server:
        assert intrude(open_folder, server.port, tree) == NOTHING
        assert serve.probe(server, tree) == "", (
            "the probe runs as root and connects from a reserved port, so it must succeed"
        )
    assert [path.name for path in tree.iterdir()] == ["bin"]


UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@marked(pytest.mark.network_namespaces)
def test_unprivileged_reserved_ports_cause_a_warning(exported: Config, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    stop.set()
    with private_network():
        serve.serve(exported, stop=stop)
        assert "any user of this PC" not in capsys.readouterr().err
        UNPRIVILEGED.write_text("80")
        serve.serve(exported, stop=stop)
    said = " ".join(capsys.readouterr().err.split())
    assert "any user of this PC can bind ports from 80" in said
    assert "ip_unprivileged_port_start=1024" in said


@marked()
def test_serve_nfsroot_refuses_an_ordinary_user(exported: Config, open_folder: Path) -> None:
    with in_foreground(exported):
        assert intrude(open_folder, exported.nfs.port, Layout.of(exported).tree) == NOTHING


@marked(pytest.mark.network_namespaces)
def test_a_private_network_cannot_be_reached_or_entered(open_folder: Path) -> None:
    tree = open_folder / "tree"
    fill(tree)
    with ThreadPoolExecutor(1) as outside:
        outside.submit(os.getpid).result()  # the thread stays in the machine's network namespace
        with private_network(), serve.running_server(tree) as server:
            assert serve.probe(server, tree) == ""
            assert outside.submit(intrude, open_folder, server.port, tree).result() == NOTHING
            entering = [*ORDINARY, "nsenter", f"--net=/proc/{server.pid}/ns/net", "true"]
            assert subprocess.run(entering, capture_output=True, check=False).returncode != 0
            network = Path(f"/proc/{server.pid}/ns/net").readlink()
            assert network != outside.submit(Path("/proc/thread-self/ns/net").readlink).result()
        assert outside.submit(intrude, open_folder, server.port, tree).result() == NOTHING


@marked(pytest.mark.network_namespaces)
def test_other_users_cannot_reach_test_on_pis_server(open_folder: Path, tmp_path: Path) -> None:
    """The test runs test-on-pi with this machine in place of the virtual machine."""
    tree, port = open_folder / "tree", free_port()
    fill(tree)
    up, go = tmp_path / "up", tmp_path / "go"
    write_suite(
        tmp_path / "suite",
        a=f"""
            import pathlib, socket, time
            def test_reached_from_inside():
                socket.create_connection(("127.0.0.1", {port})).close()
                pathlib.Path("{up}").touch()
                deadline = time.monotonic() + 120
                while not pathlib.Path("{go}").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
        """,
    )
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(drive, tmp_path, served=(tree, port), private_network=True)
        eventually(lambda: up.exists() or run.done(), limit_s=600)
        assert not run.done(), run.result().output
        assert intrude(open_folder, port, tree) == NOTHING
        go.touch()
        assert run.result().outcomes() == {"test_reached_from_inside": "passed"}


WITHOUT_THE_RIGHT = """
from nfsroot.private_network import is_entered, private_network
from toolchain.errors import UserError
try:
    with private_network(): raise AssertionError("made")
except UserError as fault:
    print(is_entered(), fault)
"""


@marked()
def test_a_missing_network_namespace_is_reported() -> None:
    """The process has the capabilities of an unprivileged container."""
    words = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", WITHOUT_THE_RIGHT]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("False cannot create a network namespace"), done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout
    assert "--privileged" in done.stdout


@marked(pytest.mark.network_namespaces)
def test_setuid_programs_of_clients_cannot_be_executed(exported: Config, open_folder: Path) -> None:
    """Even with access to the server, users cannot execute setuid programs: only root can enter the tree's folder."""
    layout = Layout.of(exported)
    require_export(layout)
    with private_network(), serve.running_server(layout.tree) as server:
        found = intrude(open_folder, server.port, layout.tree)
    assert found == {**EVERYTHING, "executed": False}


@marked()
def test_the_next_use_restores_the_folders_mode(exported: Config) -> None:
    layout = Layout.of(exported)
    os.chown(layout.place, 65534, 65534)
    layout.place.chmod(0o777)
    require_export(layout)
    found = layout.place.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o700, 0, 0)
    assert stat.S_IMODE(layout.tree.stat().st_mode) == 0o755, (
        "the tree must keep its mode, which is the mode of the board's /"
    )


@pytest.fixture
def earlier(exported: Config) -> Config:
    """Make an export as an earlier version did, with the tree directly in the given folder."""
    layout = Layout.of(exported)
    layout.tree.rename(layout.place.with_name("moved"))
    layout.place.rmdir()
    layout.place.with_name("moved").rename(layout.place)
    return exported


@marked()
def test_a_tree_of_an_earlier_version_is_moved(earlier: Config, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout.of(earlier)
    before = identity_of(layout.place)
    require_export(layout)
    assert identity_of(layout.tree) == before
    assert list(layout.place.iterdir()) == [layout.tree]
    assert stat.S_IMODE(layout.place.stat().st_mode) == 0o700
    assert not layout.moving.exists()
    assert f"the exported tree was moved to {layout.tree}" in capsys.readouterr().err
    require_export(layout)
    assert "was moved" not in capsys.readouterr().err


@marked()
def test_a_killed_move_is_completed(earlier: Config) -> None:
    layout = Layout.of(earlier)
    layout.moving.mkdir(mode=0o700)
    layout.place.rename(layout.moving / "tree")
    require_export(layout)
    assert (layout.tree / PROGRAM).is_file()
    assert not layout.moving.exists()


@marked()
def test_a_served_tree_is_not_moved(earlier: Config) -> None:
    layout = Layout.of(earlier)
    with layout.served.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(InUse, match="in use"):
            require_export(layout)
    assert (layout.place / PROGRAM).is_file()


@marked()
def test_unrelated_folders_are_not_moved(earlier: Config) -> None:
    layout = Layout.of(earlier)
    layout.place.rename(layout.place.with_name("away"))
    layout.place.mkdir(mode=0o755)
    (layout.place / "mine").touch()
    with pytest.raises(ArtefactMissing, match="is not the exported tree"):
        require_export(layout)
    assert list(layout.place.iterdir()) == [layout.place / "mine"]
    assert stat.S_IMODE(layout.place.stat().st_mode) == 0o755


@contextlib.contextmanager
def as_an_ordinary_user(number: int = 65534) -> Iterator[None]:
    """Run the block without root privileges in this process, which has imported all modules."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@marked()
def test_an_ordinary_user_only_reads_the_manifest(earlier: Config) -> None:
    layout = Layout.of(earlier)
    with as_an_ordinary_user(), pytest.raises(ArtefactMissing, match="which all users can enter") as caught:
        require_export(layout)
    assert "sudo" in caught.value.fix
    require_export(layout)
    with as_an_ordinary_user():
        assert require_export(layout).step == "nfsroot"


@marked()
def test_a_users_report_names_unreadable_files(exported: Config) -> None:
    layout = Layout.of(exported)
    require_export(layout)
    facts = {"libqpu": {"path": f"/{PROGRAM}", "sha256": "1"}}
    record = Record(facts=facts, booted={}, tests=(), timing={}, seconds=0.0, error=None)
    with as_an_ordinary_user():
        (link,) = chain.check(exported, record, None, [], source={})
    assert link["holds"] is None
    assert link["expected"] == f"the hash of a file in {layout.tree}, which only root may read"


@marked()
def test_dockerds_socket_belongs_to_a_private_group() -> None:
    assert socket_group() == 0
    user = next(entry for entry in pwd.getpwall() if entry.pw_uid == entry.pw_gid == 1)
    assert grp.getgrgid(1).gr_name == user.pw_name, "expected Debian's user daemon"
    with as_an_ordinary_user(1):
        assert socket_group() == 1


@marked()
@pytest.mark.parametrize(("number", "group"), [(65534, "nogroup"), (54321, "54321")])
def test_dockerd_is_not_started_for_a_shared_group(number: int, group: str) -> None:
    """Every member of the group could use the engine to become root."""
    with as_an_ordinary_user(number), pytest.raises(EngineUnavailable, match="every member of your group") as caught:
        socket_group()
    assert caught.value.found == f"the primary group {group}, and no membership in the group docker"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_the_loader_follows_no_link_in_tmp(product_config: Config, tmp_path: Path, kind: str) -> None:
    """The lock file's name is the same for all users, so another user may have created a link with that name."""
    precious, lock = tmp_path / "precious", tmp_path / "lock"
    precious.write_text("years of work")
    if kind == "symbolic":
        lock.symlink_to(precious)
    else:
        lock.hardlink_to(precious)
    loader = loader_session.build_loader(product_config, targets.load("local"))
    done = subprocess.run(
        [loader, lock, "1", "5"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert os.fsencode(lock) in done.stdout
    assert precious.read_text() == "years of work"


def test_the_rpc_service_does_not_run_as_root() -> None:
    """Every user of the board can connect to the service's port, and run code with the privileges of the service."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "recipes/tvm_server/files/etc/systemd/system/pitorch-rpc-server.service")
    assert unit["Service"]["DynamicUser"] == "yes"
    assert "User" not in unit["Service"]
