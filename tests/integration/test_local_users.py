"""What an ordinary user of the PC can do to a tree that is served over NFS: nothing, while root and boards can."""

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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from device_parts import write_suite
from test_device_drive import drive
from test_serve import in_foreground, marked

from device import chain
from device.record import Record
from device.remote import loader_session
from engine import daemon as engine
from nfsroot import serve
from nfsroot.layout import Layout, identity_of, require_export, write_marker
from nfsroot.private_network import private_network
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactMissing, EngineUnavailable, InUse
from toolchain.manifest import Manifest
from toolchain.ports import free_port

ORDINARY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PROGRAM = "bin/id"
EVERYTHING = {"mounted": True, "written": True, "setuid": True, "executed": True}
NOTHING = dict.fromkeys(EVERYTHING, False)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    shutil.copy(Path(__file__).with_name("intruder.py"), folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def exported(open_folder: Path) -> Config:
    """A tree whose programs this machine can run, exported below a folder of mode 0755."""
    layout = Layout(open_folder / "nfsroot")
    fill(layout.tree)
    layout.folder.mkdir()
    write_marker(layout, frozenset({identity_of(layout.tree)}))
    Manifest(step="nfsroot", key="k", inputs={}).write(layout.manifest)
    return load_config({"nfs": {"folder": str(layout.place), "address": "127.0.0.1", "port": free_port()}})


def fill(tree: Path) -> None:
    (tree / "bin").mkdir(parents=True)
    shutil.copy("/usr/bin/id", tree / PROGRAM)


def intrude(folder: Path, port: int, tree: Path) -> dict[str, bool]:
    """What of the attack works for an ordinary user."""
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
def test_the_attack_works_where_nothing_is_closed(open_folder: Path) -> None:
    """Else the tests below would prove nothing."""
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
        assert serve.probe(server, tree) == "", "root connects from a reserved port"
    assert [path.name for path in tree.iterdir()] == ["bin"]


UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@marked(pytest.mark.network_namespaces)
def test_a_warning_where_all_users_may_use_reserved_ports(exported: Config, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    stop.set()
    with private_network():
        serve.serve(exported, stop=stop)
        assert "every user of this PC" not in capsys.readouterr().err
        UNPRIVILEGED.write_text("80")
        serve.serve(exported, stop=stop)
    said = " ".join(capsys.readouterr().err.split())
    assert "every user of this PC may use ports from 80 on" in said
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
        outside.submit(os.getpid).result()  # the thread runs, and stays in the machine's own network
        with private_network(), serve.running_server(tree) as server:
            assert serve.probe(server, tree) == ""
            assert outside.submit(intrude, open_folder, server.port, tree).result() == NOTHING
            entering = [*ORDINARY, "nsenter", f"--net=/proc/{server.pid}/ns/net", "true"]
            assert subprocess.run(entering, capture_output=True, check=False).returncode != 0
            network = Path(f"/proc/{server.pid}/ns/net").readlink()
            assert network != outside.submit(Path("/proc/thread-self/ns/net").readlink).result()
        assert outside.submit(intrude, open_folder, server.port, tree).result() == NOTHING


@marked(pytest.mark.network_namespaces)
def test_an_ordinary_user_cannot_reach_the_server_of_test_on_pi(open_folder: Path, tmp_path: Path) -> None:
    """It runs with all its parts but the virtual machine, whose place this machine takes."""
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
        while not up.exists() and not run.done():
            time.sleep(0.05)
        assert not run.done(), run.result().said
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
def test_where_no_network_namespace_can_be_made_it_is_said() -> None:
    """As in a container without privileges."""
    words = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", WITHOUT_THE_RIGHT]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("False no network namespace can be made"), done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout
    assert "--privileged" in done.stdout


@marked(pytest.mark.network_namespaces)
def test_what_a_client_makes_setuid_cannot_be_executed(exported: Config, open_folder: Path) -> None:
    """Whoever gets through to the server all the same: the folder that holds the tree is root's alone."""
    layout = Layout.of(exported)
    require_export(layout)
    with private_network(), serve.running_server(layout.tree) as server:
        found = intrude(open_folder, server.port, layout.tree)
    assert found == {**EVERYTHING, "executed": False}


@marked()
def test_a_folder_that_was_opened_is_closed_at_the_next_use(exported: Config) -> None:
    layout = Layout.of(exported)
    os.chown(layout.place, 65534, 65534)
    layout.place.chmod(0o777)
    require_export(layout)
    found = layout.place.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o700, 0, 0)
    assert stat.S_IMODE(layout.tree.stat().st_mode) == 0o755, "it is the board's /"


@pytest.fixture
def earlier(exported: Config) -> Config:
    """The export as earlier versions left it: the tree is the named folder itself."""
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
    assert f"the exported tree is now {layout.tree}" in capsys.readouterr().err
    require_export(layout)
    assert "is now" not in capsys.readouterr().err


@marked()
def test_a_move_that_was_killed_halfway_is_finished(earlier: Config) -> None:
    layout = Layout.of(earlier)
    layout.moving.mkdir(mode=0o700)
    layout.place.rename(layout.moving / "tree")
    require_export(layout)
    assert (layout.tree / PROGRAM).is_file()
    assert not layout.moving.exists()


@marked()
def test_a_tree_of_an_earlier_version_is_not_moved_under_its_boards(earlier: Config) -> None:
    layout = Layout.of(earlier)
    with layout.served.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(InUse, match="in use"):
            require_export(layout)
    assert (layout.place / PROGRAM).is_file()


@marked()
def test_a_folder_of_somebody_else_is_neither_moved_nor_closed(earlier: Config) -> None:
    layout = Layout.of(earlier)
    layout.place.rename(layout.place.with_name("away"))
    layout.place.mkdir(mode=0o755)
    (layout.place / "mine").touch()
    with pytest.raises(ArtefactMissing, match="is not the tree that was exported"):
        require_export(layout)
    assert list(layout.place.iterdir()) == [layout.place / "mine"]
    assert stat.S_IMODE(layout.place.stat().st_mode) == 0o755


@contextlib.contextmanager
def as_an_ordinary_user(number: int = 65534) -> Iterator[None]:
    """This process, without root's rights; what it has imported stays at hand, wherever the checkout lies."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@marked()
def test_an_ordinary_user_reads_the_manifest_and_moves_nothing(earlier: Config) -> None:
    layout = Layout.of(earlier)
    with as_an_ordinary_user(), pytest.raises(ArtefactMissing, match="open to all users") as caught:
        require_export(layout)
    assert "sudo" in caught.value.fix
    require_export(layout)
    with as_an_ordinary_user():
        assert require_export(layout).step == "nfsroot"


@marked()
def test_a_report_by_an_ordinary_user_says_what_it_cannot_read(exported: Config) -> None:
    layout = Layout.of(exported)
    require_export(layout)
    facts = {"libqpu": {"path": f"/{PROGRAM}", "sha256": "1"}}
    record = Record(facts=facts, booted={}, tests=(), timing={}, seconds=0.0, error=None)
    with as_an_ordinary_user():
        (link,) = chain.check(exported, record, None, [], source={})
    assert link["holds"] is None
    assert link["expected"] == f"{layout.tree / PROGRAM}, which only root may read"


@marked()
def test_dockerds_socket_is_for_a_group_that_nobody_else_is_in() -> None:
    assert engine.socket_group() == 0
    user = next(entry for entry in pwd.getpwall() if entry.pw_uid == entry.pw_gid == 1)
    assert grp.getgrgid(1).gr_name == user.pw_name, "as Debian's daemon"
    with as_an_ordinary_user(1):
        assert engine.socket_group() == 1


@marked()
@pytest.mark.parametrize(("number", "group"), [(65534, "nogroup"), (54321, "54321")])
def test_dockerd_is_not_started_for_a_shared_group(number: int, group: str) -> None:
    """Its members could become root. Nobody's group is one; of a number without a name nobody knows."""
    with as_an_ordinary_user(number), pytest.raises(EngineUnavailable, match="every member of your group") as caught:
        engine.socket_group()
    assert caught.value.found == f"the primary group {group}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_loader_on_a_board_writes_through_no_link_in_tmp(tmp_path: Path, kind: str) -> None:
    """Its lock has one name for all users, so another user may have put a link there."""
    precious, lock, loader = tmp_path / "precious", tmp_path / "lock", tmp_path / "loader"
    precious.write_text("years of work")
    if kind == "symbolic":
        lock.symlink_to(precious)
    else:
        lock.hardlink_to(precious)
    words: list[str | Path] = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Wconversion",
        "-Werror",
        "-o",
        loader,
    ]
    subprocess.run([*words, loader_session.SOURCE / "loader.cpp", "-ldl"], check=True)
    done = subprocess.run(
        [loader, lock, "1", "5"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert os.fsencode(lock) in done.stdout
    assert precious.read_text() == "years of work"


def test_a_boards_rpc_service_does_not_run_as_root() -> None:
    """Whoever reaches its port runs code there, and with the default address that is every user of the board."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "recipes/tvm_server/files/etc/systemd/system/pitorch-rpc-server.service")
    assert unit["Service"]["DynamicUser"] == "yes"
    assert "User" not in unit["Service"]
