"""Boards that boot over the network, in a private network namespace: dnsmasq, the NFS server and QEMU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nfsroot import netboot
from nfsroot.boards import Board
from nfsroot.layout import Layout, identity_of, write_marker
from nfsroot.private_network import private_network
from nfsroot.qemu import LEAN_INIT
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
LIMIT_S = 900.0


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


FETCH = """
import socket, sys
server, name = sys.argv[1:]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    link.settimeout(1)
    for _ in range(60):
        link.sendto(b"\\0\\1" + name.encode() + b"\\0octet\\0", (server, 69))
        try:
            packet, peer = link.recvfrom(1024)
        except TimeoutError:
            continue
        if packet[1] == 3:
            link.sendto(b"\\0\\4" + packet[2:4], peer)
        sys.stdout.buffer.write(packet[4:])
        break
"""
"""Fetch a file of less than 512 bytes by TFTP (RFC 1350), or print the server's error; the server may start later."""


def on_board(namespace: str, *words: str) -> str:
    """Run a program at the other end of the cable."""
    return process.run(["ip", "netns", "exec", namespace, *words], limit_s=90, check=False).output


def fetched(namespace: str, name: str) -> str:
    """A file that the board fetches over TFTP."""
    return on_board(namespace, sys.executable, "-c", FETCH, PC, name)


def test_a_board_that_fetches_files_and_mounts_is_shown_with_its_state(exported: Config) -> None:
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False) as wait_for:
            assert fetched(namespace, "config.txt") == "arm_64bit=0\n"
            board = wait_for(lambda board: board.file == "config.txt")
            assert (board.address, board.state) == ("192.168.77.50", "files")
            assert "not found" in fetched(namespace, "vmlinuz")
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


# --- the whole chain ------------------------------------------------------------------------------------------------

SCRIPT = b"if pxe get; then pxe boot; fi\n"
MENU = """default nfs
label nfs
  kernel vmlinuz
  initrd initrd.img
  append {arguments}
"""


def boot_script(text: bytes) -> bytes:
    """A script as U-Boot's dhcp command expects it: a legacy image of type "script" (doc/usage/cmd/source.rst)."""
    content = struct.pack(">II", len(text), 0) + text
    os_linux, arm, script, uncompressed = 5, 2, 6, 0
    fields = (len(content), 0, 0, zlib.crc32(content), os_linux, arm, script, uncompressed, b"netboot")

    def header(checksum: int) -> bytes:
        return struct.pack(">IIIIIIIBBBB32s", 0x27051956, checksum, 0, *fields)

    return header(zlib.crc32(header(0))) + content


@pytest.fixture
def u_boot(tmp_path: Path) -> Path:
    """U-Boot for QEMU's machine virt, from the distribution's package."""
    process.run(["apt-get", "download", "u-boot-qemu"], cwd=tmp_path, limit_s=300)
    (package,) = tmp_path.glob("u-boot-qemu_*.deb")
    process.run(["dpkg-deb", "--extract", package, tmp_path / "u-boot"])
    return tmp_path / "u-boot/usr/lib/u-boot/qemu_arm/u-boot.bin"


@contextlib.contextmanager
def boards_of_qemu(count: int, bios: Path, folder: Path) -> Iterator[list[Path]]:
    """Machines with a cable to the PC each, and U-Boot in place of the Pi's firmware; yields their consoles."""
    consoles = [folder / f"console-{number}.log" for number in range(count)]
    with contextlib.ExitStack() as stack:
        for number, console in enumerate(consoles):
            ip("tuntap", "add", f"tap{number}", "mode", "tap")
            ip("link", "set", f"tap{number}", "master", "pitorch", "up")
            network = f"tap,id=n0,ifname=tap{number},script=no,downscript=no"
            words = ["-M", "virt", "-cpu", "cortex-a7", "-m", "1024", "-bios", str(bios), "-netdev", network]
            words += ["-device", f"virtio-net-device,netdev=n0,mac=52:54:00:77:00:0{number + 1}"]
            words += ["-display", "none", "-monitor", "none", "-serial", f"file:{console}", "-no-reboot"]
            machine = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", "qemu-system-arm", *words])
            stack.callback(machine.wait)
            stack.callback(machine.terminate)
        yield consoles


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, 4])
def test_boards_boot_from_dhcp_to_ssh(exported_config: Config, u_boot: Path, tmp_path: Path, count: int) -> None:
    """U-Boot asks for an address, fetches kernel and initramfs by TFTP, and the kernel mounts its root by NFS."""
    config = dataclasses.replace(exported_config, nfs=dataclasses.replace(exported_config.nfs, address=PC))
    layout = Layout.of(config)
    command = f"boot=nfs4 root=/dev/nfs rw ip=dhcp nfsroot={PC}:{layout.tree},vers=4.1 net.ifnames=0 panic=5"
    added = {
        layout.tftp / "boot.scr.uimg": boot_script(SCRIPT),
        layout.tftp / "pxelinux.cfg/default": MENU.format(
            arguments=f"console=ttyAMA0 {command} init={LEAN_INIT}"
        ).encode(),
    }
    (layout.tftp / "pxelinux.cfg").mkdir(exist_ok=True)
    for path, content in added.items():
        path.write_bytes(content)
    try:
        with private_network():
            ip("address", "add", f"{PC}/24", "dev", "pitorch")
            up: set[str] = set()
            with booting(config) as wait_for, boards_of_qemu(count, u_boot, tmp_path):
                while len(up) < count:
                    up.add(wait_for(lambda board: board.state == "up" and board.mac not in up).mac)
            assert up == {f"52:54:00:77:00:0{number + 1}" for number in range(count)}
    finally:
        shutil.rmtree(layout.tftp / "pxelinux.cfg")
        (layout.tftp / "boot.scr.uimg").unlink()
