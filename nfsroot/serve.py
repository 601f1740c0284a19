"""The user-space NFS server (NFS-Ganesha): run it, prove that it serves, end it.

Two ways, because boards boot in two ways:

- NFSv4 alone (the default): one TCP port, no portmapper. Enough for enter-nfsroot, for the initramfs script
  ``boot=nfs4`` and for kernels that mount their root themselves.
- NFSv3 and v4: for the stock initramfs, whose ``nfsmount`` speaks v3 only and asks the portmapper (rpcbind,
  port 111) for mountd. A running rpcbind is used; else one is started for as long as the server runs.

The server counts as ready when a client (``nfs-ls`` of libnfs-utils) has listed the exported folder, not when a log
line says so: a server whose export was refused prints the same line.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nfsroot import private_network
from nfsroot.layout import Layout, require_export
from nfsroot.rendering import render
from toolchain import files, ports, process, process_identity, progress
from toolchain.addresses import server_address, subnet_of
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, InUse, PortTaken, ProgramMissing, ServerFailed, UserError

_SCRATCH = "pitorch-nfs."
_YOUNG_S = 60.0
_PORTMAPPER = 111
_RESERVED = 1024
"""NFS-Ganesha's PrivilegedPort takes ports below."""
_READY_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0
_TAIL_LINES = 15
# What every run without D-Bus, Kerberos and a portmapper says, and what says nothing.
_HARMLESS = re.compile(r"DBUS|dbus|krb5|gssd|RADOS|Cannot register NFS V4|:-{10,}|svc_vc_wait|successfully$")


@dataclass(frozen=True, kw_only=True)
class NfsServer:
    """A server that has answered a client."""

    folders: tuple[Path, ...]
    address: str
    port: int
    nfsv3: bool
    log: Path
    pid: int

    def source(self, folder: Path | None = None) -> str:
        """``ADDRESS:/path`` as mount(8) takes it."""
        return f"{self.address}:{folder or self.folders[0]}"


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """How serving in the foreground ended."""

    source: str
    seconds: float
    ended_by: str


def plugin_folder() -> Path:
    """Where the server's back ends are. Raises ProgramMissing when the one for local folders is absent."""
    for found in sorted(glob.glob("/usr/lib/*/ganesha/libfsalvfs.so")) + glob.glob("/usr/lib/ganesha/libfsalvfs.so"):
        return Path(found).parent
    raise ProgramMissing(
        "the NFS server's back end for local folders is not installed",
        expected="/usr/lib/*/ganesha/libfsalvfs.so",
        found="no such file",
        fix="apt-get install nfs-ganesha-vfs",
    )


def major_version(program: Path) -> int:
    """The server's major version: 4 in Debian 12, 6 in Debian 13."""
    told = process.run([program, "-v"], check=False, limit_s=20).output
    found = re.search(r"V(\d+)\.", told)
    if found is None:
        raise ServerFailed(
            f"{program} does not tell its version",
            expected="NFS-Ganesha Release = V…",
            found=told.strip()[:200] or "nothing",
            fix="apt-get install --reinstall nfs-ganesha",
        )
    return int(found[1])


def ganesha_configuration(
    folders: Sequence[Path],
    *,
    address: str,
    port: int,
    nfsv3: bool,
    clients: Sequence[str],
    recovery: Path,
    plugins: Path,
    major: int,
    privileged_port: bool = True,
) -> str:
    """The server's configuration for these folders.

    ``privileged_port`` refuses clients that connect from a port that any user of a machine may have. ``clients`` are
    addresses or subnets, ``major`` is the server's version: it refuses settings it does not know.
    """
    for folder in folders:
        if set(str(folder)) & set('"\\\n\r;?'):
            raise ServerFailed(
                "the NFS server cannot export that path",
                expected="a path without quotes, backslashes, semicolons, question marks and line ends",
                found=repr(str(folder)),
                fix="export the tree to another folder",
            )
    return render(
        "ganesha.conf",
        folders=[str(folder) for folder in folders],
        address=address,
        port=port,
        nfsv3=nfsv3,
        clients=list(clients),
        recovery=str(recovery),
        plugins=str(plugins),
        major=major,
        privileged_port=privileged_port,
    )


@contextlib.contextmanager
def running_server(
    folder: Path | Sequence[Path],
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    nfsv3: bool = False,
    clients: Sequence[str] = ("127.0.0.1",),
    log: Path | None = None,
    limit_s: float = _READY_LIMIT_S,
) -> Iterator[NfsServer]:
    """Serve folders while the block runs; port 0 takes a free one.

    ``clients`` may mount, as root, for writing: keep the list short. They must connect from a port below 1024; from any
    other one in a ``private_network`` alone, where nobody else is. The server has listed every folder to a real
    client when the block starts, and is gone when it ends.

    Raises RootNeeded, ProgramMissing, PortTaken, ArtefactMissing (no such folder), InUse (an export is replacing a
    folder) or ServerFailed with the last lines of its log.
    """
    folders = (folder,) if isinstance(folder, Path) else tuple(folder)
    process.require_root("to serve files of all owners over NFS", "./inv TASK, with the task that you gave")
    program = process.require_program("ganesha.nfsd", "to serve the exported tree over NFS")
    process.require_program("nfs-ls", "to see that the NFS server serves")
    plugins = plugin_folder()
    for item in folders:
        if not item.is_dir():
            raise ArtefactMissing(
                f"{item} cannot be served", expected="a folder", found="no folder", fix="run ./inv export-nfsroot"
            )
    port = port or ports.free_port(address)
    require_free(address, port)
    _provide_mtab()
    with contextlib.ExitStack() as stack:
        for item in folders:
            stack.enter_context(_kept_as_it_is(item))
        scratch = stack.enter_context(_scratch())
        (scratch / "recovery").mkdir()
        log = log or scratch / "ganesha.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        configuration = scratch / "ganesha.conf"
        # The server is asked from here as well, so this machine is a client too.
        allowed = list(dict.fromkeys([*clients, address if address != "0.0.0.0" else "127.0.0.1"]))  # noqa: S104
        configuration.write_text(
            ganesha_configuration(
                folders,
                address=address,
                port=port,
                nfsv3=nfsv3,
                clients=allowed,
                recovery=scratch / "recovery",
                plugins=plugins,
                major=major_version(program),
                privileged_port=not private_network.is_entered(),
            )
        )
        if nfsv3:
            stack.enter_context(_portmapper())
        paths = ["-f", str(configuration), "-L", str(log), "-p", str(scratch / "ganesha.pid")]
        server = subprocess.Popen(
            # The kernel ends the server should this process be killed without a chance to clean up.
            ["setpriv", "--pdeathsig", "TERM", str(program), "-F", *paths, "-N", "NIV_EVENT"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(process.end_group, server, polite_s=_STOP_LIMIT_S)
        made = NfsServer(folders=folders, address=address, port=port, nfsv3=nfsv3, log=log, pid=server.pid)
        _await_ready(made, server, limit_s)
        yield made


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for a server's own files. What servers left that were killed is removed: nobody holds its lock."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError, InUse):
            if left.lstat().st_uid == os.geteuid():  # another user's may hold a link to anything
                _remove_unheld(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as folder, files.locked(Path(folder)):
        yield Path(folder)


def _remove_unheld(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime > _YOUNG_S:  # a younger folder may not be locked yet
        with files.held(folder / "lock", InUse(f"{folder} is in use")):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _kept_as_it_is(tree: Path) -> Iterator[None]:
    """Keep exports from replacing the tree: clients of the old one would be left with stale handles."""
    layout = Layout(tree.parent)
    if layout.tree != tree or not layout.marker.is_file():
        yield
        return
    taken = InUse(
        f"{layout.tree} cannot be served now",
        expected="no export that replaces it",
        found="one that runs",
        fix="wait for it to end",
    )
    with files.held(layout.served, taken, shared=True):
        yield


def probe(server: NfsServer, folder: Path) -> str:
    """List a folder through the server, as an NFSv4 client; empty when that works, else the complaint."""
    address = "127.0.0.1" if server.address == "0.0.0.0" else server.address  # noqa: S104
    # libnfs decodes no percent signs: the path stands as it is.
    url = f"nfs://{address}{folder}?version=4&nfsport={server.port}"
    done = process.run(["nfs-ls", url], check=False, limit_s=20)
    return "" if done.returncode == 0 else done.output.strip() or process.explain_exit(done.returncode)


def serve(
    config: Config,
    *,
    nfsv3: bool = False,
    address: str | None = None,
    port: int | None = None,
    stop: threading.Event | None = None,
) -> ServeResult:
    """Serve the exported tree in the foreground until Ctrl-C, SIGTERM, a dropped terminal, or ``stop``.

    Clients in ``nfs.subnet`` (and this machine) may mount. Says what to type on the board. Raises what
    ``running_server`` raises, ArtefactMissing when nothing was exported, and ServerFailed when the server dies.
    """
    layout = Layout.of(config)
    process.require_root("to serve files of all owners over NFS", "./inv serve-nfsroot")
    require_export(layout)
    shown = address or server_address(config)
    subnet = subnet_of(config)
    stop = stop or threading.Event()
    began = time.monotonic()
    with stopped_by_signals(stop) as received:
        clients = dict.fromkeys([str(subnet), "127.0.0.1"])
        with running_server(
            layout.tree,
            address=shown,
            port=config.nfs.port if port is None else port,
            nfsv3=nfsv3,
            clients=tuple(clients),
            log=layout.folder / "ganesha.log",
        ) as server:
            if (first := unprivileged_port_start()) < _RESERVED:
                progress.warn(
                    f"every user of this PC may use ports from {first} on, so the server cannot tell them from root: "
                    f"sysctl net.ipv4.ip_unprivileged_port_start={_RESERVED}"
                )
            for line in _what_to_type(server, str(subnet)):
                progress.say(line)
            while not stop.wait(0.5):
                if process_identity.find(server.pid) is None:
                    raise _failed(server, "the NFS server ended by itself")
            progress.say("stopping the NFS server")
            source = server.source()
    ended_by = signal.Signals(received[0]).name if received else "request"
    return ServeResult(source=source, seconds=time.monotonic() - began, ended_by=ended_by)


def unprivileged_port_start() -> int:
    """The first port that every user of this machine may use (ip(7)); 1024 unless the machine was told otherwise."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except FileNotFoundError:
        return _RESERVED


def require_free(address: str, port: int, *, server: str = "the NFS server", section: str = "nfs") -> None:
    """Raise PortTaken when another program listens there, ServerFailed when the address is not ours.

    ``section`` is that of invoke.yaml which has the server's address and port. Raises UserError for what is no port.
    """
    if not 0 < port < 65536:
        raise UserError(
            f"{server} cannot listen on port {port}",
            expected="a TCP port from 1 to 65535",
            found=f"{port}",
            fix=f"give another --port, or none: then {section}.port counts",
        )
    kernels = " (the kernel's NFS server: systemctl stop nfs-server)" if section == "nfs" else ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except PermissionError:
            return
        except OSError as fault:
            if fault.errno == 98:
                raise PortTaken(
                    f"port {port} is taken",
                    expected=f"nothing listening on {address}:{port}",
                    found=_listener(port),
                    fix=f"end that program{kernels}, or set {section}.port",
                ) from fault
            raise ServerFailed(
                f"{server} cannot listen on {address}",
                expected="an IPv4 address of this machine",
                found=str(fault.strerror),
                fix=f"set {section}.address in invoke.yaml to one that `ip address` shows",
            ) from fault


def _what_to_type(server: NfsServer, subnet: str) -> list[str]:
    port = "" if server.port == 2049 else f" -o port={server.port}"
    versions = "NFSv3 and NFSv4" if server.nfsv3 else "NFSv4"
    return [
        f"serving {server.folders[0]} by {versions} on {server.address}:{server.port}, to {subnet}; Ctrl-C ends it",
        "on the board, as root:",
        f"    enter-nfsroot{port} {server.source()}",
        "or, without the helper:",
        f"    mount -t nfs -o nolock,vers=4.1{port.replace(' -o ', ',')} {server.source()} /mnt && chroot /mnt",
    ]


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Let SIGINT, SIGTERM and SIGHUP set ``stop``; signals can only be handled in the main thread."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listener(port: int) -> str:
    """Who listens, as far as ss(8) may tell."""
    with contextlib.suppress(ProgramMissing):
        listed = process.run(["ss", "-Hltnp", f"sport = :{port}"], check=False, limit_s=10).output.split()
        users = [word for word in listed if word.startswith("users:")]
        if users:
            return users[0].removeprefix("users:")
        if listed:
            return "the kernel (no process owns the socket)"
    return "another program"


def _await_ready(server: NfsServer, child: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    waiting = list(server.folders)
    complaint = ""
    while waiting:
        if child.poll() is not None:
            raise _failed(server, f"the NFS server ended at once: {process.explain_exit(child.returncode)}")
        if time.monotonic() > deadline:
            raise _failed(server, f"the NFS server does not serve {waiting[0]} after {limit_s:.0f} s", complaint)
        complaint = "" if not _listens(server) else probe(server, waiting[0])
        if _listens(server) and not complaint:
            waiting.pop(0)
            continue
        if "NFS SERVER INITIALIZED" in _tail(server.log, 200) and "NFS4ERR_NOENT" in complaint:
            raise _failed(
                server,
                f"the NFS server does not export {waiting[0]}",
                complaint,
                fix="it needs a file system with file handles (ext4, xfs, btrfs, tmpfs; not overlay): set nfs.folder",
            )
        time.sleep(0.1)


def _listens(server: NfsServer) -> bool:
    address = "127.0.0.1" if server.address == "0.0.0.0" else server.address  # noqa: S104
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.settimeout(1)
        return trial.connect_ex((address, server.port)) == 0


def _failed(server: NfsServer, summary: str, found: str = "", *, fix: str = "") -> ServerFailed:
    # The log goes away with its folder, so what it says last becomes part of the message.
    said = _tail(server.log, _TAIL_LINES)
    if "No IP address found for" in said:
        # The resolver leaves out loopback addresses while no other interface has one (AI_ADDRCONFIG).
        fix = "give any interface besides lo an address: the server looks its own up, and finds none on a lone lo"
    return ServerFailed(
        summary + (f"\n--- last lines of its log ---\n{said}\n---" if said else ""),
        expected=f"a server that lists {server.source()}",
        found=found or "see the log",
        fix=fix or "see the last lines of its log above",
    )


def _tail(log: Path, lines: int) -> str:
    try:
        told = [line for line in log.read_text(errors="replace").splitlines() if not _HARMLESS.search(line)]
        return "\n".join(told[-lines:])
    except FileNotFoundError:
        return ""


def _provide_mtab() -> None:
    """The server finds file systems by /etc/mtab, which systemd makes at boot; bare containers and chroots lack it."""
    mtab = Path("/etc/mtab")
    if not os.path.lexists(mtab):
        mtab.symlink_to("../proc/self/mounts")
        progress.say("made /etc/mtab, a link to /proc/self/mounts: the NFS server needs it")


@contextlib.contextmanager
def _portmapper() -> Iterator[None]:
    """Make sure that a portmapper runs; one that is started here ends with the block."""

    def answers() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.settimeout(1)
            return trial.connect_ex(("127.0.0.1", _PORTMAPPER)) == 0

    if answers():
        yield
        return
    program = process.require_program("rpcbind", "to serve NFSv3 (the portmapper)")
    Path("/run/rpcbind").mkdir(mode=0o755, exist_ok=True)
    child = subprocess.Popen(
        [os.fspath(program), "-f", "-w"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 15
        while not answers():
            if child.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(
                    "the portmapper (rpcbind) did not come up",
                    expected="an answer on TCP port 111",
                    found="none" if child.poll() is None else process.explain_exit(child.returncode),
                    fix="start it by hand to see why: rpcbind -f -d",
                )
            time.sleep(0.1)
        yield
    finally:
        process.end_group(child)
