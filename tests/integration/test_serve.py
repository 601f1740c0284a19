"""Tests of the user-space NFS server: access from a real NFS client, and error handling."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from exports import mark_as_export
from waiting import eventually

from nfsroot import export, serve
from nfsroot.layout import Layout
from nfsroot.rendering import render
from toolchain import process, process_identity
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactMissing, InUse, ProgramMissing, RootNeeded, UserError
from toolchain.ports import free_port

needs_server = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the NFS server opens files of all owners"),
    pytest.mark.skipif(shutil.which("ganesha.nfsd") is None, reason="needs ganesha.nfsd (package nfs-ganesha)"),
    pytest.mark.skipif(shutil.which("nfs-ls") is None, reason="needs nfs-ls (package libnfs-utils)"),
]


Function = TypeVar("Function", bound=Callable[..., None])


def marked(*marks: pytest.MarkDecorator) -> Callable[[Function], Function]:
    def apply(function: Function) -> Function:
        for mark in (*needs_server, *marks):
            function = mark(function)
        return function

    return apply


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a tree"
    (made / "etc").mkdir(parents=True)
    (made / "etc" / "hostname").write_text("pitorch\n")
    return made


@pytest.fixture
def exported(tmp_path: Path) -> Config:
    """Return a configuration with a folder that looks like an export."""
    layout = Layout(tmp_path / "nfsroot")
    (layout.tree / "etc").mkdir(parents=True)
    mark_as_export(layout)
    return load_config({"nfs": {"folder": str(layout.place), "address": "127.0.0.1", "port": free_port()}})


def listing(server: serve.NfsServer, path: Path) -> str:
    url = f"nfs://127.0.0.1{path}?version=4&nfsport={server.port}"
    return subprocess.run(["nfs-ls", url], capture_output=True, text=True, check=True).stdout


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@marked()
def test_a_client_lists_the_folder_until_the_block_ends(folder: Path) -> None:
    with serve.running_server(folder) as server:
        assert "hostname" in listing(server, folder / "etc")
        assert serve.probe(server, folder) == ""
        assert "NOENT" in serve.probe(server, folder.parent / "elsewhere")
        assert server.source() == f"127.0.0.1:{folder}"
    assert gone(server.pid)
    with socket.socket() as trial:
        assert trial.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.skipif(shutil.which("nfs-ls") is None, reason="needs nfs-ls (package libnfs-utils)")
def test_a_server_that_does_not_respond_is_probed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_PROBE_LIMIT_S", 0.5)
    monkeypatch.setattr(serve, "_READY_LIMIT_S", 1.2)
    log = folder / "log"
    log.write_text("waiting for a lock\n")
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(["sleep", "60"]) as child:
        port = silent.getsockname()[1]
        server = serve.NfsServer(folders=(folder,), address="127.0.0.1", port=port, nfsv3=False, log=log, pid=child.pid)
        began = time.monotonic()
        try:
            assert "timed out" in serve.probe(server, folder)
            with pytest.raises(UserError, match=r"does not serve .* after 1 s\n(.*\n)*waiting for a lock"):
                serve._await_ready(server, child)
        finally:
            child.kill()
    assert time.monotonic() - began > 1.7


@marked()
def test_files_written_by_root_belong_to_root(folder: Path) -> None:
    with serve.running_server(folder) as server:
        url = f"nfs://127.0.0.1{folder}/etc/new?version=4&nfsport={server.port}&uid=0&gid=0"
        source = folder.parent / "source"
        source.write_text("written over NFS")
        subprocess.run(["nfs-cp", str(source), url], check=True, capture_output=True)
    made = folder / "etc" / "new"
    assert made.read_text() == "written over NFS"
    assert made.stat().st_uid == 0


@marked()
def test_two_servers_and_two_folders_at_once(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "second").touch()
    with serve.running_server([folder, other]) as one, serve.running_server(other) as two:
        assert "second" in listing(one, other)
        assert "etc" in listing(one, folder)
        assert one.port != two.port
        assert "second" in listing(two, other)


@marked()
def test_only_own_folders_of_killed_servers_are_removed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, theirs = (tmp_path / f".pitorch-nfs.{name}.scratch" for name in ("own", "theirs"))
    for place in (own, theirs):
        place.mkdir()
    os.chown(theirs, 65534, 65534)
    with serve.running_server(folder):
        assert not own.exists()
    assert list(tmp_path.glob(".pitorch-nfs.*")) == [theirs]


@marked()
def test_the_server_ends_when_the_block_fails(folder: Path) -> None:
    pids = []

    def interrupted() -> None:
        with serve.running_server(folder) as server:
            pids.append(server.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(pids[0])


@marked()
def test_a_port_in_use_is_reported_with_its_owner(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(InUse, match=f"port {port} is in use") as caught,
            serve.running_server(folder, port=port),
        ):
            raise AssertionError("must not start")
    assert str(os.getpid()) in caught.value.found or "another program" in caught.value.found
    assert caught.value.exit_code == 29


@marked()
def test_a_foreign_address_is_refused(folder: Path) -> None:
    with (
        pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.250"),
        serve.running_server(folder, address="192.0.2.250", port=2049),
    ):
        raise AssertionError("must not start")


@marked()
def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match="cannot be served"), serve.running_server(tmp_path / "none"):
        raise AssertionError("must not start")


@marked()
def test_a_missing_server_names_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProgramMissing, match=r"ganesha\.nfsd") as caught, serve.running_server(folder):
        raise AssertionError("must not start")
    assert "nfs-ganesha" in caught.value.fix


@marked()
def test_an_ordinary_user_gets_the_sudo_command(folder: Path, exported: Config) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(RootNeeded) as caught, serve.running_server(folder):
            raise AssertionError("must not start")
        with pytest.raises(RootNeeded) as of_the_task:
            serve.serve(exported)
    finally:
        os.seteuid(0)
    assert caught.value.fix == "sudo ./inv TASK"
    assert of_the_task.value.fix == "sudo ./inv serve-nfsroot"


@marked()
def test_a_file_system_without_handles_is_reported(tmp_path: Path) -> None:
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for item in (lower, upper, work, merged):
        item.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work},index=off"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        began = time.monotonic()
        with pytest.raises(UserError, match="does not export") as caught, serve.running_server(merged):
            raise AssertionError("must not start")
        assert time.monotonic() - began < 30
        assert "file handles" in caught.value.fix
    finally:
        subprocess.run(["umount", str(merged)], check=True)


@marked(pytest.mark.skipif(not Path("/etc/mtab").is_symlink(), reason="needs an /etc/mtab that is a link"))
def test_a_missing_mtab_is_created(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nfsroot.serve import running_server\n"
        "with running_server(Path(sys.argv[1])) as server: print(Path('/etc/mtab').readlink())"
    )
    # Use a copy of /etc without mtab, in a private mount namespace.
    bare = "cp -a /etc/. . && rm mtab && mount --bind . /etc"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'cd "$1" && {bare} && cd "$2" && shift 2 && exec "$@"', "bare",
         tmp_path, ROOT, sys.executable, "-c", script, "/var"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "../proc/self/mounts\n"
    assert "created /etc/mtab" in done.stderr


@marked()
def test_paths_invalid_in_the_configuration_are_refused(tmp_path: Path) -> None:
    odd = tmp_path / 'a"b'
    odd.mkdir()
    with pytest.raises(UserError, match="cannot export this path"), serve.running_server(odd):
        raise AssertionError("must not start")


@marked()
@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_an_invalid_port_is_refused(exported: Config, port: int) -> None:
    with pytest.raises(UserError, match=f"cannot listen on port {port}") as caught:
        serve.serve(exported, port=port)
    assert caught.value.expected == "a TCP port from 1 to 65535"
    assert "nfs.port" in caught.value.fix


@marked()
def test_a_served_tree_is_not_replaced(exported: Config) -> None:
    layout = Layout.of(exported)
    with serve.running_server(layout.tree):
        with serve.running_server(layout.tree) as second:
            assert serve.probe(second, layout.tree) == ""
        with pytest.raises(InUse, match="is being served over NFS"), export.locked(layout):
            raise AssertionError("must not be replaced")
    with export.locked(layout), pytest.raises(InUse, match="an export is replacing"), serve.running_server(layout.tree):
        raise AssertionError("must not be served")


@marked()
def test_a_missing_export_is_reported_with_the_task(tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match="export-nfsroot"):
        serve.serve(load_config({"nfs": {"folder": str(tmp_path / "none")}}))


@marked()
def test_another_folder_is_not_served(exported: Config) -> None:
    tree = Layout.of(exported).tree
    tree.rename(tree.with_name("moved"))
    tree.mkdir()
    with pytest.raises(ArtefactMissing, match="is not the exported tree"):
        serve.serve(exported)


FOREGROUND = """
import sys
from nfsroot.serve import serve
from toolchain.config import load_config
serve(load_config({"nfs": {"folder": sys.argv[1], "address": "127.0.0.1", "port": int(sys.argv[2])}}))
print("ended")
"""


@contextlib.contextmanager
def in_foreground(config: Config) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Run the task in a process; yield the process, the server's PID and the output."""
    child = subprocess.Popen(
        [sys.executable, "-c", FOREGROUND, str(config.nfsroot), str(config.nfs.port)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stderr is not None
        said = ""
        while "chroot /mnt" not in said:
            line = child.stderr.readline()
            assert line, f"the task ended before the server started: {said}"
            said += line
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        (server,) = (int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ganesha.nfsd\n")
        yield child, server, said
    finally:
        child.kill()
        child.communicate()
    # The kernel terminates the server when the task has ended. Until then, the server writes to its log.
    eventually(lambda: process_identity.find(server) is None)


@marked()
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_the_server(exported: Config, number: signal.Signals) -> None:
    with in_foreground(exported) as (child, server, said):
        assert f"enter-nfsroot -o port={exported.nfs.port} 127.0.0.1:{Layout.of(exported).tree}" in said
        child.send_signal(number)
        output, _ = child.communicate(timeout=30)
    assert output.strip() == "ended"
    assert child.returncode == 0
    assert gone(server)


def test_commands_for_the_board_quote_the_tree() -> None:
    server = serve.NfsServer(
        address="192.168.77.1", port=2049, nfsv3=False, folders=(Path("/srv/my pi"),), log=Path("log"), pid=1
    )
    lines = serve._what_to_type(server, "192.168.77.0/24", "armhf")
    for command in (lines[2], lines[4]):
        assert "192.168.77.1:/srv/my pi" in shlex.split(command)


@marked()
def test_clients_see_changes_in_the_tree_immediately(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with serve.running_server(folder) as server:
        words = ["nfs-ls", f"nfs://127.0.0.1{folder}?version=4&nfsport={server.port}"]
        for text in ("first", "another"):
            (folder / "file").write_text(text)
            assert f" {len(text)} file" in process.output_of(words)


@marked()
def test_the_end_of_the_server_is_reported(exported: Config) -> None:
    with in_foreground(exported) as (child, server, _):
        os.kill(server, signal.SIGKILL)
        _, errors = child.communicate(timeout=30)
    assert child.returncode != 0
    assert "the NFS server exited unexpectedly" in errors


V3 = """
import subprocess, sys
from pathlib import Path
from nfsroot.serve import running_server
folder = Path(sys.argv[1])
with running_server(folder, port=2049, nfsv3=True) as server:
    for version in (3, 4):
        words = ["nfs-ls", f"nfs://127.0.0.1{folder}?version={version}"]
        print(subprocess.run(words, capture_output=True, text=True))
        ordinary = ["timeout", "30", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words]
        print("ordinary:", "for-v3" in subprocess.run(ordinary, capture_output=True, text=True).stdout)
print("rpcbind left:", subprocess.run(["ss", "-Hltn", "sport = :111"], capture_output=True, text=True).stdout)
"""


@marked(
    pytest.mark.network_namespaces,
    pytest.mark.skipif(shutil.which("rpcbind", path="/usr/sbin:/sbin") is None, reason="needs rpcbind"),
)
def test_nfs_3_starts_a_portmapper(tmp_path: Path) -> None:
    (tmp_path / "for-v3-and-v4").touch()
    # Use a separate network and /run, because the host may run a portmapper and an NFS server. The server resolves its
    # own address, and the resolver does not return a loopback address if there is no other address.
    script = (
        "mount -t tmpfs tmpfs /run && ip link set lo up && ip link add v0 type veth peer name v1 && ip link set v0 up "
        '&& ip link set v1 up && ip addr add 192.0.2.77/24 dev v0 && exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script, "v3", sys.executable, "-c", V3, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("for-v3-and-v4") == 2, done.stdout
    assert done.stdout.count("ordinary: False") == 2, "unprivileged ports must be refused"
    assert done.stdout.rstrip().endswith("rpcbind left:")


def configuration(**changes: object) -> str:
    values = {
        "folders": ["/srv/tree", "/srv/boards"],
        "read_only": ["/srv/tree"],
        "address": "127.0.0.1",
        "port": 12049,
        "nfsv3": False,
        "clients": ["10.0.0.0/8"],
        "recovery": "/r",
        "plugins": "/p",
        "major": 4,
        "privileged_port": True,
    }
    return render("ganesha.conf", **values | changes)


def test_the_servers_configuration() -> None:
    made = configuration()
    assert made.count("PrivilegedPort = true;") == 3, (
        "each block of clients needs PrivilegedPort, which is not inherited from the defaults"
    )
    assert re.findall(r"Access_Type = (R\w);", made) == ["RO", "RW"], (
        "read-only access to the tree, and read-write access to the boards' folders"
    )
    settings = dict(re.findall(r"^\s+(\w+) = (.+);$", made, re.MULTILINE))
    assert settings["Minor_Versions"] == "0, 1", "with NFS 4.2, Linux 6 clients get EIO"
    assert settings["Graceless"] == "true"
    assert settings["Only_Numeric_Owners"] == "true"
    assert settings["Squash"] == "No_Root_Squash"
    assert settings["Bind_addr"] == "127.0.0.1"
    assert settings["Clients"] == "10.0.0.0/8"
    # Other clients have no access.
    assert re.search(r"EXPORT_DEFAULTS \{\s+Access_Type = None;", made)


def test_nfs_3_configures_the_portmapper() -> None:
    made = configuration(nfsv3=True)
    assert "Protocols = 3,4;" in made
    assert "MNT_Port = 20048;" in made
    assert "Enable_UDP = Mount;" in made
    assert "Transports = UDP, TCP;" in made
    assert "MNT_Port" not in configuration()


def test_ganesha_6_may_run_in_a_container() -> None:
    assert "Allow_Set_Io_Flusher_Fail = true;" in configuration(major=6)
    # NFS-Ganesha 4 exits if a setting is unknown.
    assert "Flusher" not in configuration()
