"""Boards that boot over the network, in a private network namespace: dnsmasq, the NFS server and QEMU."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nfsroot import netboot
from nfsroot.boards import Board
from nfsroot.layout import Layout, identity_of, write_marker
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.config import Config, load_config
from toolchain.errors import ArtefactMissing, InUse, NetworkUnreachable
from toolchain.manifest import Manifest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces, DHCP and NFS"),
    pytest.mark.skipif(shutil.which("dnsmasq", path="/usr/sbin:/usr/bin") is None, reason="needs dnsmasq"),
    pytest.mark.skipif(shutil.which("ganesha.nfsd") is None, reason="needs ganesha.nfsd (package nfs-ganesha)"),
]

PC = "192.168.77.1"
LIMIT_S = 120.0


def ip(*words: str) -> None:
    process.run(["ip", *words], limit_s=30)


@pytest.fixture
def exported(tmp_path: Path) -> Config:
    """A configuration with a folder that looks like an export, and a TFTP folder."""
    config = load_config({"build": {"folder": str(tmp_path / "build")}, "nfs": {"address": PC, "port": "12049"}})
    layout = Layout.of(config)
    layout.tree.mkdir(parents=True)
    layout.place.chmod(0o700)
    layout.tftp.mkdir(parents=True)
    (layout.tftp / "config.txt").write_text("arm_64bit=0\n")
    write_marker(layout, frozenset({identity_of(layout.tree)}))
    Manifest(step="nfsroot", key="k", inputs={}).write(layout.manifest)
    return config


@contextlib.contextmanager
def cable() -> Iterator[str]:
    """A private network with the PC's end of a cable; yields the namespace at the other end, as an argument of ip."""
    with private_network():
        namespace = f"pitorch-test-{os.getpid()}"
        ip("netns", "add", namespace)
        try:
            ip("link", "add", "toboard", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("address", "add", f"{PC}/24", "dev", "toboard")
            ip("link", "set", "toboard", "up")
            ip("-n", namespace, "link", "set", "eth0", "up")
            yield namespace
        finally:
            ip("netns", "delete", namespace)


@contextlib.contextmanager
def booting(config: Config, *, alone: bool = True) -> Iterator[Callable[[Callable[[Board], bool]], Board]]:
    """Run ``netboot`` in a thread, which is in the same namespace; yields a function that waits for a board's event."""
    stop, changed = threading.Event(), threading.Condition()
    seen: list[Board] = []
    failed: list[BaseException] = []

    def on_event(board: Board) -> None:
        with changed:
            seen.append(board)
            changed.notify_all()

    def run() -> None:
        try:
            netboot.netboot(config, alone=alone, stop=stop, on_event=on_event)
        except BaseException as fault:
            with changed:
                failed.append(fault)
                changed.notify_all()

    def wait_for(condition: Callable[[Board], bool]) -> Board:
        with changed:
            assert changed.wait_for(lambda: failed or any(map(condition, seen)), LIMIT_S), seen
            assert not failed, failed
            return next(board for board in seen if condition(board))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield wait_for
    finally:
        stop.set()
        thread.join(60)
    assert not failed, failed


def on_board(namespace: str, *words: str) -> str:
    """Run a program at the other end of the cable."""
    return process.run(["ip", "netns", "exec", namespace, *words], limit_s=60, check=False).output


def test_a_board_that_fetches_files_and_mounts_is_shown_with_its_state(exported: Config) -> None:
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False) as wait_for:
            patient = ("curl", "-s", "--retry", "30", "--retry-all-errors", "--retry-delay", "1")
            got = on_board(namespace, *patient, f"tftp://{PC}/config.txt")
            assert got == "arm_64bit=0\n"
            board = wait_for(lambda board: board.file == "config.txt")
            assert (board.address, board.state) == ("192.168.77.50", "files")
            on_board(namespace, "curl", "-s", f"tftp://{PC}/vmlinuz")
            assert "profile bootable" in wait_for(lambda board: "vmlinuz" in board.absent).advice(0.0)
            assert on_board(namespace, "nfs-ls", f"nfs://{PC}{Layout.of(exported).tree}?version=4&nfsport=12049") == ""
            client = f"import socket, time; s = socket.create_connection(({PC!r}, 12049)); time.sleep(60)"
            mounting = subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, "-c", client])
            try:
                assert wait_for(lambda board: board.state == "mounted").advice(1e6) == ""
            finally:
                mounting.kill()
                mounting.wait()


def test_this_pc_needs_an_address_in_the_boards_subnet(exported: Config) -> None:
    with private_network(), pytest.raises(NetworkUnreachable, match="no address in the board's subnet") as caught:
        netboot.netboot(exported)
    assert "ip address add 192.168.77.1/24" in caught.value.fix


def test_another_tftp_server_is_reported(exported: Config) -> None:
    with cable(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((PC, 69))
        with pytest.raises(InUse, match="another DHCP or TFTP server"):
            netboot.netboot(exported, alone=True)


def test_an_export_is_required(exported: Config) -> None:
    Layout.of(exported).manifest.unlink()
    with pytest.raises(ArtefactMissing, match="export-nfsroot"):
        netboot.netboot(exported)
