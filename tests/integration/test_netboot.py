"""Tests of boards that boot over the network, in a private network namespace with dnsmasq, the NFS server and QEMU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from exports import mark_as_export
from waiting import eventually

from device import deploy
from nfsroot import access, host_keys, netboot
from nfsroot.boards import Board
from nfsroot.boot_files import overlay_arguments
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from nfsroot.qemu import LEAN_INIT
from nfsroot.tree import TreeHash
from toolchain import board_events, process
from toolchain.config import ROOT, Config, LabConfig, load_config
from toolchain.errors import ArtefactMissing, DiskFull, InUse, NetworkUnreachable
from toolchain.manifest import Artefact

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces, DHCP and NFS"),
    pytest.mark.skipif(shutil.which("dnsmasq", path="/usr/sbin:/usr/bin") is None, reason="needs dnsmasq"),
    pytest.mark.skipif(shutil.which("ganesha.nfsd") is None, reason="needs ganesha.nfsd (package nfs-ganesha)"),
]

PC = "192.168.77.1"
LIMIT_S = 3000.0
_CLONE_NEWNS = 0x00020000


def ip(*words: str) -> None:
    process.run(["ip", *words], limit_s=30)


@pytest.fixture
def exported(tmp_path: Path) -> Config:
    """Return a configuration with a folder that looks like an export, and a TFTP folder."""
    config = load_config({"build": {"folder": str(tmp_path / "build")}, "nfs": {"address": PC, "port": "12049"}})
    layout = Layout.of(config)
    mark_as_export(layout)
    layout.place.chmod(0o700)
    layout.tftp.mkdir()
    (layout.tftp / "config.txt").write_text("arm_64bit=0\n")
    (layout.tftp / "cmdline.txt").write_text(
        "boot=nfs4 nfsroot=192.0.2.2:/old,vers=4.1,port=20490 rw quiet pitorch.overlay\n"
    )
    return config


@contextlib.contextmanager
def cable() -> Iterator[str]:
    """Create a private network with a virtual cable; yield the namespace of the board's end, as an argument for ip."""
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
def booting(
    config: Config, *, alone: bool = True, fetch_firmware: Callable[[], Path] | None = None
) -> Iterator[Callable[[Callable[[Board], bool]], Board]]:
    """Run ``netboot`` in a thread in this namespace; yield a function that waits until a board meets a condition."""
    stop, changed = threading.Event(), threading.Condition()
    seen: list[Board] = []
    failed: list[BaseException] = []

    def on_event(board: Board) -> None:
        with changed:
            seen.append(board)
            changed.notify_all()

    def run() -> None:
        try:
            netboot.netboot(config, alone=alone, fetch_firmware=fetch_firmware, stop=stop, on_event=on_event)
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
"""Fetch a file of less than 512 bytes over TFTP (RFC 1350), or print the server's error; the server may start later."""


def on_board(namespace: str, *words: str) -> str:
    """Run a program at the board's end of the cable."""
    return process.run(["ip", "netns", "exec", namespace, *words], limit_s=90, check=False).output


def fetched(namespace: str, name: str) -> str:
    """Fetch a file over TFTP as the board does."""
    return on_board(namespace, sys.executable, "-c", FETCH, PC, name)


def test_boards_that_fetch_and_mount_are_shown_with_their_state(exported: Config) -> None:
    exported = dataclasses.replace(exported, lab=LabConfig(boards=("pi3=192.168.77.50", "vm=qemu")))
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False) as wait_for:
            assert fetched(namespace, "config.txt") == "arm_64bit=0\n"
            board = wait_for(lambda board: board.file == "config.txt")
            assert (board.address, board.state) == ("192.168.77.50", "files")
            assert "not found" in fetched(namespace, "vmlinuz")
            assert "bootable profile" in wait_for(lambda board: "vmlinuz" in board.absent).advice(0.0)
            assert on_board(namespace, "nfs-ls", f"nfs://{PC}{Layout.of(exported).tree}?version=4&nfsport=12049") == ""
            client = f"import socket, time; s = socket.create_connection(({PC!r}, 12049)); time.sleep(60)"
            mounting = subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, "-c", client])
            try:
                assert wait_for(lambda board: board.state == "mounted").advice(0.0) == ""
            finally:
                mounting.kill()
                mounting.wait()
    recorded = [(event.source, event.text) for event in board_events.read(board_events.of_netboot(exported, "pi3"))]
    assert ("nfs", f"192.168.77.50 has connected to {PC}:{Layout.of(exported).tree}") in recorded
    (sent, absent) = (text for source, text in recorded if source == "tftp")
    assert sent.endswith("config.txt to 192.168.77.50")
    assert "vmlinuz not found" in absent


def test_addresses_that_boards_of_the_lab_get_are_recorded(exported: Config) -> None:
    rows = tuple(f"b{number}=192.168.77.{number}" for number in range(2, 255))
    config = dataclasses.replace(exported, lab=LabConfig(boards=rows))
    with cable() as namespace, booting(config) as wait_for:
        on_board(namespace, sys.executable, "-c", ASK.replace("len(seen) < 2", "len(seen) < 1"))
        board = wait_for(lambda board: bool(board.address))
    name = f"b{board.address.rpartition('.')[2]}"
    events = board_events.read(board_events.of_netboot(config, name))
    assert {event.source for event in events} == {"dhcp"}
    assert f"DHCPDISCOVER(toboard) {board.mac}" in events[0].text, (
        "the log must include events from before the board had an address"
    )
    assert any(f"DHCPOFFER(toboard) {board.address} {board.mac}" in event.text for event in events)


def test_a_board_whose_name_is_unknown_at_first_is_recorded(exported: Config, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    config = dataclasses.replace(exported, lab=LabConfig(boards=("pi3=pi3.board.test",)))
    path = board_events.of_netboot(config, "pi3")

    def boot() -> None:
        """Boot with a private /etc/hosts. The thread that runs ``boot`` gets a separate mount namespace."""
        assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) == 0
        process.run(["mount", "--make-rprivate", "/"])
        process.run(["mount", "--bind", hosts, "/etc/hosts"])
        with cable() as namespace, booting(config) as wait_for:
            on_board(namespace, sys.executable, "-c", ASK.replace("len(seen) < 2", "len(seen) < 1"))
            board = wait_for(lambda board: bool(board.address))
            assert not path.exists()
            hosts.write_text(f"127.0.0.1 localhost\n{board.address} pi3.board.test\n")
            eventually(path.exists)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(boot).result()
    assert "DHCPDISCOVER(toboard)" in board_events.read(path)[0].text


FOREGROUND = """
import sys
from nfsroot import netboot
from toolchain.config import load_config
netboot.netboot(load_config({"build": {"folder": sys.argv[1]}, "nfs": {"address": sys.argv[2]}}), alone=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_both_servers_and_leave_no_files(exported: Config, number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory() as scratch, cable():
        Path(scratch).chmod(0o755)  # dnsmasq drops root privileges
        child = subprocess.Popen(
            [sys.executable, "-c", FOREGROUND, str(exported.build.folder), PC],
            cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": scratch},
        )  # fmt: skip
        try:
            assert child.stderr is not None
            assert any("stop with Ctrl-C" in line for line in child.stderr)
            started = [item for item in psutil.process_iter(["name", "ppid"]) if item.info["ppid"] == child.pid]
            servers = [item for item in started if item.info["name"] in {"dnsmasq", "ganesha.nfsd"}]
            assert len(servers) == 2
            child.send_signal(number)
            assert child.wait(90) == 0
        finally:
            child.kill()
            child.communicate()
        assert not any(item.is_running() for item in servers)
        assert not list(Path(scratch).iterdir())


def test_this_pc_needs_an_address_in_the_boards_subnet(exported: Config) -> None:
    with private_network(), pytest.raises(NetworkUnreachable, match="no address in the board's subnet") as caught:
        netboot.netboot(exported)
    assert "ip address add 192.168.77.1/24" in caught.value.fix


def test_another_tftp_server_is_reported(exported: Config) -> None:
    with cable(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((PC, 69))
        with pytest.raises(InUse, match="another DHCP or TFTP server"):
            netboot.netboot(exported, alone=True)


def test_a_full_disk_is_reported(exported: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (Layout.of(exported).tftp / "vmlinuz").write_bytes(bytes(1 << 20))
    process.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", small])
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        with cable(), pytest.raises(DiskFull, match="no room for the boot files") as caught:
            netboot.netboot(exported, alone=True)
    finally:
        process.run(["umount", small])
    assert str(small) in caught.value.expected


def test_files_of_a_killed_netboot_are_removed(exported: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # dnsmasq drops root privileges
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        (Path(scratch) / ".pitorch-netboot.killed.scratch").mkdir()
        with cable():
            netboot.netboot(exported, alone=True, stop=stop)
        assert list(Path(scratch).iterdir()) == []


def test_links_in_the_folder_of_a_board_are_followed(exported: Config) -> None:
    folder = Layout.of(exported).tftp / "9ffefdef"
    folder.mkdir()
    (folder / "config.txt").symlink_to("../config.txt")
    (folder / "vmlinuz").symlink_to("../vmlinuz")  # does not exist
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False) as wait_for:
            assert fetched(namespace, "9ffefdef/config.txt") == "arm_64bit=0\n"
            assert wait_for(lambda board: board.file == "config.txt").serial == "9ffefdef"


def test_an_export_is_required(exported: Config) -> None:
    Layout.of(exported).manifest.unlink()
    with pytest.raises(ArtefactMissing, match="export-nfsroot"):
        netboot.netboot(exported)


def with_nfs(config: Config, **nfs: Any) -> Config:
    """Return the configuration with other settings in the section ``nfs``."""
    return dataclasses.replace(config, nfs=dataclasses.replace(config.nfs, **nfs))


@pytest.mark.parametrize("persistent", [(), ("/home", "/srv")])
def test_boards_sharing_a_tree_write_only_to_own_folders(
    exported: Config, tmp_path: Path, persistent: tuple[str, ...]
) -> None:
    """The boards' folder also stores their host keys, so it is served without nfs.persistent as well."""
    config, layout = with_nfs(exported, overlay=True, persistent=persistent), Layout.of(exported)
    (layout.tree / "etc").mkdir()
    shutil.copytree(ROOT / "images/overlay/bootable/etc/initramfs-tools", layout.tree / "etc/initramfs-tools")
    source = tmp_path / "source"
    source.write_text("of a board")

    def write_by_nfs(namespace: str, folder: Path) -> str:
        return on_board(namespace, "nfs-cp", str(source), f"nfs://{PC}{folder}/new?version=4&nfsport=12049")

    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(config, alone=False) as wait_for:
            words = fetched(namespace, "cmdline.txt").split()
            assert words[:4] == ["boot=nfs4", f"nfsroot={PC}:{layout.tree},vers=4.1,port=12049", "rw", "quiet"]
            kept = ["pitorch.persistent=/home,/srv"] if persistent else []
            assert words[4:] == ["pitorch.overlay", f"pitorch.boards={layout.boards}", *kept]
            wait_for(lambda board: board.file == "cmdline.txt")
            assert "ROFS" in write_by_nfs(namespace, layout.tree)
            write_by_nfs(namespace, layout.boards)
    assert not (layout.tree / "new").exists()
    assert (layout.boards / "new").read_text() == "of a board"
    assert layout.boards.stat().st_mode & 0o777 == 0o700


def test_one_board_writes_into_its_tree_by_default(exported: Config) -> None:
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False):
            assert fetched(namespace, "cmdline.txt") == (
                f"boot=nfs4 nfsroot={PC}:{Layout.of(exported).tree},vers=4.1,port=12049 rw quiet\n"
            )
            url = f"nfs://{PC}{Layout.of(exported).tree}/new?version=4&nfsport=12049"
            on_board(namespace, "nfs-cp", str(Layout.of(exported).tftp / "config.txt"), url)
    assert (Layout.of(exported).tree / "new").read_text() == "arm_64bit=0\n"


def test_a_tree_of_an_older_image_cannot_be_shared(exported: Config) -> None:
    scripts = Layout.of(exported).tree / "etc/initramfs-tools/scripts"
    scripts.mkdir(parents=True)
    (scripts / "nfs4").write_text("mount -t nfs\n")
    with cable(), pytest.raises(ArtefactMissing, match=r"does not support nfs\.overlay"):
        netboot.netboot(with_nfs(exported, overlay=True))


def test_firmware_that_the_tree_lacks_is_fetched_and_served(exported: Config, tmp_path: Path) -> None:
    firmware = tmp_path / "firmware"
    firmware.mkdir()
    for name in ("bootcode.bin", "start.elf", "fixup.dat"):
        (firmware / name).write_text(f"contents of {name}")
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False, fetch_firmware=lambda: firmware):
            assert fetched(namespace, "start.elf") == "contents of start.elf"


def test_without_the_firmware_the_other_files_are_served(exported: Config) -> None:
    def unreachable() -> Path:
        raise NetworkUnreachable("the mirror does not answer")

    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(exported, alone=False, fetch_firmware=unreachable):
            assert fetched(namespace, "config.txt") == "arm_64bit=0\n"


def test_a_board_outside_the_subnet_is_refused_and_shown(exported: Config) -> None:
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.78.50/24", "dev", "eth0")
        ip("-n", namespace, "route", "add", PC, "dev", "eth0")
        ip("route", "add", "192.168.78.0/24", "dev", "toboard")
        with booting(exported, alone=False) as wait_for:
            assert fetched(namespace, "config.txt") == "arm_64bit=0\n"
            assert "is not in nfs.subnet" in wait_for(lambda board: bool(board.outside)).advice(0.0)
            url = f"nfs://{PC}{Layout.of(exported).tree}?version=4&nfsport=12049"
            assert "failed" in on_board(namespace, "nfs-ls", url)
            board = wait_for(lambda board: bool(board.refused))
            assert "the NFS server refuses it" in board.advice(0.0)
            assert board.state == "files"


def test_only_host_keys_of_boards_are_pinned(exported: Config) -> None:
    layout = Layout.of(exported)
    secret = layout.place / "secret.pub"
    secret.write_text("ssh-ed25519 AAAA of another file\n")
    for name, content in (("00000001", "ssh-ed25519 AAAAC3Nz root@pi\n"), ("00000002", "no key\n")):
        keys = layout.boards / name / "host-keys"
        keys.mkdir(parents=True)
        (keys / "ssh_host_ed25519_key.pub").write_text(content)
    (layout.boards / "00000002/host-keys/link.pub").symlink_to(secret)
    layout.known_hosts.write_text("* ssh-ed25519 BBBB\n")
    for _ in range(2):
        host_keys.publish(layout)
        assert layout.known_hosts.read_text() == "* ssh-ed25519 BBBB\n* ssh-ed25519 AAAAC3Nz\n"


def test_a_host_key_removed_while_it_is_read_is_ignored(exported: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(exported)
    for name in ("00000001", "00000002"):
        (layout.boards / name / "host-keys").mkdir(parents=True)
        (layout.boards / name / "host-keys/a.pub").write_text(f"ssh-ed25519 {name} root@pi\n")
    read = Path.read_text

    def read_text(path: Path, **how: str) -> str:
        if "00000001" in path.parts:
            path.unlink()
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert host_keys.of_boards(layout) == ["ssh-ed25519 00000002"]


UP = """
import socket
with socket.create_server(("", 22)) as ssh, socket.create_connection(("192.168.77.1", 12049)):
    while True:
        ssh.accept()[0].sendall(b"SSH-2.0-board\\r\\n")
"""
"""Connect to the NFS server and respond as an SSH server, as a board does that has booted."""


def test_host_keys_that_cannot_be_stored_do_not_end_netboot(
    exported: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout.of(exported)
    (layout.tree / "etc").mkdir()
    shutil.copytree(ROOT / "images/overlay/bootable/etc/initramfs-tools", layout.tree / "etc/initramfs-tools")

    def fail(_layout: Layout) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host_keys, "publish", fail)
    with cable() as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.50/24", "dev", "eth0")
        with booting(with_nfs(exported, overlay=True), alone=False) as wait_for:
            fetched(namespace, "config.txt")
            with subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, "-c", UP]) as board:
                try:
                    wait_for(lambda board: board.state == "up")
                    assert fetched(namespace, "config.txt") == "arm_64bit=0\n"
                finally:
                    board.kill()
    assert f"{layout.known_hosts}: No space left on device" in capsys.readouterr().err.replace("\n", "")


# --- together with another DHCP server
# --------------------------------------------------------------------------------------

ASK = """
import json, os, socket, struct
mac = bytes.fromhex(open("/sys/class/net/eth0/address").read().strip().replace(":", ""))
discover, architecture, interface = b"\\x35\\x01\\x01", b"\\x5d\\x02\\0\\0", b"\\x5e\\x03\\x01\\x02\\x01"
options = discover + architecture + interface + b"\\x3c\\x20PXEClient:Arch:00000:UNDI:002001\\xff"
ask = struct.pack(">BBBBIHH16s16s192s4s", 1, 1, 6, 0, 1, 0, 0x8000, b"", mac, b"", b"\\x63\\x82\\x53\\x63") + options
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    link.setsockopt(socket.SOL_SOCKET, 25, b"eth0")
    link.bind(("", 68))
    link.settimeout(1)
    seen = {}
    for _ in range(60):
        link.sendto(ask, ("255.255.255.255", 67))
        try:
            while len(seen) < 2:
                answer, (sender, _port) = link.recvfrom(2048)
                seen[sender] = [socket.inet_ntoa(answer[16:20]), b"Raspberry Pi Boot" in answer]
        except TimeoutError:
            continue
        break
print(json.dumps(seen))
"""
"""Ask for an address as the firmware of a Pi does, until two servers have answered."""


@contextlib.contextmanager
def bridged(name: str) -> Iterator[str]:
    """Create a namespace that is connected to the private network's bridge; yield its name."""
    namespace = f"pitorch-{name}-{os.getpid()}"
    ip("netns", "add", namespace)
    try:
        ip("link", "add", f"to{name}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", f"to{name}", "master", "pitorch", "up")
        ip("-n", namespace, "link", "set", "eth0", "up")
        yield namespace
    finally:
        ip("netns", "delete", namespace)


@contextlib.contextmanager
def router() -> Iterator[None]:
    """Run another DHCP server on the bridge.

    The server's replies also contain the PC's address as boot server, and the name of U-Boot's script.
    """
    with bridged("router") as namespace:
        ip("-n", namespace, "address", "add", "192.168.77.254/24", "dev", "eth0")
        words = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--leasefile-ro", "--pid-file"]
        words += ["--dhcp-range=192.168.77.200,192.168.77.220,1h", f"--dhcp-boot=boot.scr.uimg,,{PC}", "--user=root"]
        words += ["--log-facility=/dev/null"]
        child = subprocess.Popen(["ip", "netns", "exec", namespace, *words])
        try:
            yield
        finally:
            child.terminate()
            child.wait()


def test_pc_adds_boot_information_next_to_a_router(exported: Config) -> None:
    with private_network():
        ip("address", "add", f"{PC}/24", "dev", "pitorch")
        with router(), bridged("board") as namespace, booting(exported, alone=False) as wait_for:
            answers = json.loads(on_board(namespace, sys.executable, "-c", ASK))
            address, names_the_pi = answers.pop("192.168.77.254")
            assert address.startswith("192.168.77.2")
            assert not names_the_pi
            assert list(answers.values()) == [["0.0.0.0", True]], "the PC must not assign an address"
            assert wait_for(lambda board: board.by_firmware).state == "address"


# --- the whole chain ------------------------------------------------------------------------------------------------

SCRIPT = b"""setenv tftptimeout 1000
setenv tftptimeoutcountmax 1000000
if pxe get; then pxe boot; fi
"""
"""Repeat a lost request after 1 s (default 5 s) and, unlike the default, more than 10 times per file."""
MENU = """default nfs
label nfs
  kernel vmlinuz
  initrd initrd.img
  append {arguments}
"""


def boot_script(text: bytes) -> bytes:
    """Make a script for U-Boot's dhcp command: a legacy image of type "script" (doc/usage/cmd/source.rst)."""
    content = struct.pack(">II", len(text), 0) + text
    os_linux, arm, script, uncompressed = 5, 2, 6, 0
    fields = (len(content), 0, 0, zlib.crc32(content), os_linux, arm, script, uncompressed, b"netboot")

    def header(checksum: int) -> bytes:
        return struct.pack(">IIIIIIIBBBB32s", 0x27051956, checksum, 0, *fields)

    return header(zlib.crc32(header(0))) + content


@pytest.fixture
def u_boot(tmp_path: Path) -> Path:
    """Provide U-Boot for QEMU's virt machine, from the distribution's package."""
    process.run(["apt-get", "download", "u-boot-qemu"], cwd=tmp_path, limit_s=300)
    (package,) = tmp_path.glob("u-boot-qemu_*.deb")
    process.run(["dpkg-deb", "--extract", package, tmp_path / "u-boot"])
    return tmp_path / "u-boot/usr/lib/u-boot/qemu_arm/u-boot.bin"


@contextlib.contextmanager
def boards_of_qemu(count: int, bios: Path, folder: Path) -> Iterator[list[Path]]:
    """Run machines that are connected to the PC, with U-Boot in place of the Pi's firmware; yield their consoles."""
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


@contextlib.contextmanager
def bridge_for_boards(config: Config) -> Iterator[None]:
    """Connect the PC to a private network's bridge, and put U-Boot's files into the TFTP folder."""
    layout = Layout.of(config)
    command = f"boot=nfs4 root=/dev/nfs rw ip=dhcp nfsroot={PC}:{layout.tree},vers=4.1 net.ifnames=0 panic=5"
    arguments = " ".join(["console=ttyAMA0", command, f"init={LEAN_INIT}", *overlay_arguments(config, layout)])
    script, menu = layout.tftp / "boot.scr.uimg", layout.tftp / "pxelinux.cfg"
    menu.mkdir(exist_ok=True)
    (menu / "default").write_text(MENU.format(arguments=arguments))
    script.write_bytes(boot_script(SCRIPT))
    try:
        with private_network():
            ip("address", "add", f"{PC}/24", "dev", "pitorch")
            yield
    finally:
        shutil.rmtree(menu)
        script.unlink()


def all_up(wait_for: Callable[[Callable[[Board], bool]], Board], count: int) -> list[Board]:
    """Wait until each board's SSH server has responded, and return the boards."""
    up: dict[str, Board] = {}
    while len(up) < count:
        board = wait_for(lambda board: board.state == "up" and board.mac not in up)
        up[board.mac] = board
    return [up[mac] for mac in sorted(up)]


def ssh(config: Config, board: Board, *words: str) -> list[str]:
    """Return the command line that runs a command over SSH on a board whose host key is pinned."""
    layout = Layout.of(config)
    known = access.pin(layout.known_hosts, layout.folder / "known_hosts.pinned")
    login = access.SshAccess(host=board.address, key=layout.client_key, known_hosts=known)
    return login.command(words, connect_timeout_s=120)


def run_on(config: Config, board: Board, *words: str) -> str:
    """Run a program on a board and return its output."""
    return process.run(ssh(config, board, *words), limit_s=300).output.strip()


@pytest.fixture
def of_one(exported_config: Config) -> Config:
    """Return the configuration of an exported tree that one board writes to."""
    return with_nfs(exported_config, address=PC)


@pytest.fixture
def of_many(exported_config: Config) -> Iterator[Config]:
    """Return the configuration of an exported tree that boards share, except for separate /home folders."""
    config = with_nfs(exported_config, address=PC, overlay=True, persistent=("/home",))
    yield config
    shutil.rmtree(Layout.of(config).boards, ignore_errors=True)


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(1800)
def test_one_board_boots_from_dhcp_to_ssh(of_one: Config, u_boot: Path, tmp_path: Path) -> None:
    """U-Boot gets an address, and fetches the kernel and initramfs over TFTP. The kernel mounts its root over NFS."""
    with bridge_for_boards(of_one), booting(of_one) as wait_for, boards_of_qemu(1, u_boot, tmp_path):
        (board,) = all_up(wait_for, 1)
        assert board.mac == "52:54:00:77:00:01"
        run_on(of_one, board, "touch", "/root/written-by-the-board")
    written = Layout.of(of_one).tree / "root/written-by-the-board"
    assert written.exists()
    written.unlink()


HEADER = "opt/pitorch/include/qpu.h"


def layer_with(name: str, content: bytes, tar: Path) -> Artefact:
    """Make a layer with one file, as deploy installs it."""
    with tarfile.open(tar, "w") as archive:
        item = tarfile.TarInfo(name)
        item.size, item.mode = len(content), 0o644
        archive.addfile(item, io.BytesIO(content))
    return Artefact.of(tar)


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(4800)
def test_four_boards_share_a_read_only_tree(of_many: Config, u_boot: Path, tmp_path: Path) -> None:
    """Each board also reads the deployed content of a file that it has read before and that a program keeps open."""
    layout = Layout.of(of_many)
    before, header = TreeHash.of(layout.tree).sha256, (layout.tree / HEADER).read_bytes()
    kept = {path: path.read_bytes() for path in (layout.manifest, *layout.folder.glob("sbom.*"))}
    with bridge_for_boards(of_many), booting(of_many) as wait_for, boards_of_qemu(4, u_boot, tmp_path):
        boards = all_up(wait_for, 4)
        names = [run_on(of_many, board, "hostname") for board in boards]
        name = (layout.tree / "etc/hostname").read_text().strip()
        assert names == [f"{name}-525400770{number:03}" for number in range(1, 5)]
        assert len({run_on(of_many, board, "cat", "/etc/machine-id") for board in boards}) == 4
        assert len({run_on(of_many, board, "cat", "/etc/ssh/ssh_host_ed25519_key.pub") for board in boards}) == 4
        for board, name in zip(boards, names, strict=True):
            run_on(of_many, board, "sh", "-c", "hostname >/home/kept && hostname >/usr/in-memory && sync")
            assert run_on(of_many, board, "cat", "/home/kept", "/usr/in-memory").split() == [name, name]
            assert run_on(of_many, board, "sh", "-c", f"tail -f /{HEADER} >/dev/null 2>&1 & cat /{HEADER}")
        assert TreeHash.of(layout.tree).sha256 == before
        try:
            deploy.put(layout, [layer_with(HEADER, b"// deployed\n", tmp_path / "new.tar")], owned_prefixes=())
            time.sleep(2)  # boards cache the attributes of folders for 1 s
            assert [run_on(of_many, board, "cat", f"/{HEADER}") for board in boards] == ["// deployed"] * 4
            refused = process.run(ssh(of_many, boards[0], "touch", "/opt/pitorch/new"), limit_s=300, check=False)
            assert "Read-only file system" in refused.output
        finally:
            deploy.put(layout, [layer_with(HEADER, header, tmp_path / "old.tar")], owned_prefixes=())
            for path, content in kept.items():
                path.write_bytes(content)
    for board, name in zip(boards, names, strict=True):
        assert (layout.boards / board.mac.replace(":", "") / "tree/home/kept").read_text() == f"{name}\n"


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(1800)
def test_board_boots_next_to_a_router(of_many: Config, u_boot: Path, tmp_path: Path) -> None:
    """The PC also stores the board's host keys without nfs.persistent."""
    config = with_nfs(of_many, persistent=())
    network = bridge_for_boards(config), router(), booting(config, alone=False), boards_of_qemu(1, u_boot, tmp_path)
    with network[0], network[1], network[2] as wait_for, network[3]:
        (board,) = all_up(wait_for, 1)
        assert board.address.startswith("192.168.77.2"), "the router must assign the address"
        assert run_on(config, board, "hostname").endswith("-525400770001")
    assert [path.name for path in (Layout.of(config).boards / "525400770001").iterdir()] == ["host-keys"]


LOSS = b"""table bridge lossy {
  chain from_boards {
    type filter hook input priority 0; policy accept;
    numgen random mod 1000 < 25 counter drop
  }
  chain to_boards {
    type filter hook output priority 0; policy accept;
    numgen random mod 1000 < 25 counter drop
  }
}
"""
"""In about one of twenty exchanges, the packet or its acknowledgement is lost. The kernel may lack netem."""


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(3600)
def test_a_board_boots_while_one_packet_in_twenty_is_lost(of_many: Config, u_boot: Path, tmp_path: Path) -> None:
    with bridge_for_boards(of_many):
        process.run(["nft", "-f", "-"], stdin=LOSS, limit_s=30)
        with booting(of_many) as wait_for, boards_of_qemu(1, u_boot, tmp_path):
            (board,) = all_up(wait_for, 1)
            assert run_on(of_many, board, "hostname").endswith("-525400770001")
        dropped = re.findall(r"counter packets (\d+)", process.output_of(["nft", "list", "ruleset"]))
        assert len(dropped) == 2
        assert all(int(count) > 0 for count in dropped)


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(1800)
def test_boards_wait_for_a_server_that_was_killed(of_many: Config, u_boot: Path, tmp_path: Path) -> None:
    with bridge_for_boards(of_many), boards_of_qemu(1, u_boot, tmp_path):
        ended = pytest.raises(AssertionError, match="NFS server exited unexpectedly")
        with ended, booting(of_many) as wait_for:
            (board,) = all_up(wait_for, 1)
            assert run_on(of_many, board, "cat", "/proc/sys/kernel/hostname").endswith("-525400770001")
            (server,) = [child for child in psutil.Process().children() if child.name() == "ganesha.nfsd"]
            server.kill()
            wait_for(lambda _board: False)
        reading = subprocess.Popen(ssh(of_many, board, "md5sum", "/usr/bin/python3", "/usr/bin/ssh-keygen"))
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                reading.wait(10)
            with booting(of_many):
                assert reading.wait(LIMIT_S) == 0
        finally:
            reading.kill()
            reading.wait()
