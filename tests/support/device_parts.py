"""Helpers for device tests: the exported tree, small suites, and a running virtual board."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from waiting import eventually

from nfsroot import access, qemu, serve
from nfsroot.layout import Layout, require_export
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.config import ROOT, Config
from toolchain.errors import UserError
from toolchain.manifest import Artefact

BOOT_LIMIT_S = 900.0

DEVICE_PYTEST = (
    *(sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-v"),
    *(f"--confcutdir={ROOT / 'tests' / 'device'}", str(ROOT / "tests" / "device")),
)
"""The command line that runs the device suite, to which the caller adds labgrid's environment (``--lg-env``)."""

# A name server that returns the same address for every name.
NAME_SERVER = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("up", flush=True)
while True:
    query, client = server.recvfrom(512)
    end = query.index(0, 12) + 5
    ipv4 = query[end - 4 : end - 2] == bytes([0, 1])
    answer = bytes([192, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7]) if ipv4 else b""
    server.sendto(query[:2] + bytes([129, 128, 0, 1, 0, ipv4, 0, 0, 0, 0]) + query[12:end] + answer, client)
"""

# PYTHON NAME_SERVER COMMAND...: run a command while this machine uses this name server.
WITH_NAME_SERVER = """
place=$(mktemp -d) && ip link set lo up && echo "nameserver 127.0.0.1" >"$place/resolv.conf" || exit
mount --bind "$place/resolv.conf" "$(readlink -f /etc/resolv.conf)" || exit
"$1" -c "$2" >"$place/up" & server=$!
shift 2
while kill -0 $server && ! [ -s "$place/up" ]; do sleep 0.1; done
"$@"; status=$?
kill $server; umount "$(readlink -f /etc/resolv.conf)"; rm -r "$place"
exit $status
"""


def bootable(config: Config) -> Config:
    """Return the configuration, or skip the test if a program for booting the exported tree is missing."""
    for program in ("qemu-system-arm", "ganesha.nfsd", "nfs-ls", "setpriv", "ssh"):
        try:
            process.require_program(program, "to boot the exported tree")
        except UserError as fault:
            pytest.skip(str(fault))
    require_export(Layout.of(config))
    qemu.boot_files(Layout.of(config).tree, config.image.architecture)
    return config


def elsewhere(config: Config, folder: Path) -> Config:
    """Return a configuration with the same exported tree, but with reports and logs in ``folder``."""
    return replace(
        config, nfs=replace(config.nfs, folder=str(config.nfsroot)), build=replace(config.build, folder=folder)
    )


def write_suite(folder: Path, **tests: str) -> Path:
    """Write a suite for the board: one file ``test_NAME.py`` per keyword."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    return folder


@dataclass(frozen=True)
class Board:
    """A running virtual machine, with SSH access like a real board.

    The tests' commands share a connection through the socket ``control``, because a login takes seconds in QEMU.
    """

    config: Config
    machine: qemu.Machine
    server: serve.NfsServer
    access: access.SshAccess
    control: Path

    @property
    def host(self) -> str:
        """The value for ``--host``."""
        return f"root@127.0.0.1:{self.machine.ssh_port}"

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command on the board over the shared connection."""
        ssh, *options = self.access.command(words)
        return [ssh, "-S", str(self.control), *options]

    def run(self, *words: str) -> str:
        """Run a command on the board and return its output."""
        return process.output_of(self.command(*words), limit_s=300)


@contextlib.contextmanager
def booted(config: Config, folder: Path, *, init: str = "lean") -> Iterator[Board]:
    """Serve and boot the exported tree in a private network."""
    with private_network(), booted_here(config, folder, init=init) as board:
        yield board


@contextlib.contextmanager
def booted_here(config: Config, folder: Path, *, init: str = "lean") -> Iterator[Board]:
    """Serve and boot the exported tree in the current network; logs are in ``folder``."""
    layout = Layout.of(config)
    with serve.running_server(layout.tree, log=folder / "nfs.log") as server:
        spec = qemu.MachineSpec(
            boot=qemu.boot_files(layout.tree, config.image.architecture),
            nfs_path=str(layout.tree),
            nfs_port=server.port,
            init=init,
            architecture=config.image.architecture,
            cpus=config.device.cpus,
        )
        with qemu.running_machine(spec, folder / "console.log", boot_timeout_s=BOOT_LIMIT_S) as machine:
            known = access.pin(layout.known_hosts, folder / "known_hosts")
            entry = access.SshAccess(host="127.0.0.1", port=machine.ssh_port, key=layout.client_key, known_hosts=known)
            with connected(entry, folder / "ssh") as control:
                yield Board(config, machine, server, entry, control)


@contextlib.contextmanager
def connected(entry: access.SshAccess, control: Path) -> Iterator[Path]:
    """Log in to a board, and make the connection available through the socket ``control`` (ssh -S)."""
    ssh, *options = entry.command()
    with subprocess.Popen([ssh, "-M", "-N", "-S", control, *options], stdin=subprocess.DEVNULL) as master:
        try:
            eventually(control.exists, "no login", limit_s=BOOT_LIMIT_S, task=master)
            yield control
        finally:
            master.terminate()


def with_folders(content: Mapping[str, str]) -> Mapping[str, str]:
    """Insert the parent folders before each file."""
    found: dict[str, str] = {}
    for path, text in content.items():
        for parent in reversed(list(Path(path).parents)[:-1]):
            found.setdefault(f"{parent}/", "")
        found[path] = text
    return found


def layer(path: Path, content: Mapping[str, str]) -> Artefact:
    """Make a layer's tar. Content that starts with ``->`` creates a link."""
    with tarfile.open(path, "w") as archive:
        for name, text in with_folders(content).items():
            member = tarfile.TarInfo(name)
            member.mtime = 1735689600
            if text.startswith("->"):
                member.type, member.linkname = tarfile.SYMTYPE, text[2:]
                archive.addfile(member)
            elif name.endswith("/"):
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
            else:
                member.mode, member.size = 0o755 if "/bin/" in name else 0o644, len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return Artefact.of(path)
