"""Start and stop the user-space NFS server (NFS-Ganesha), and verify that clients can use it.

There are two modes:

- NFSv4 only (the default) needs one TCP port and no portmapper. This mode is enough for enter-nfsroot, the initramfs
  script ``boot=nfs4`` and kernels that mount their root themselves.
- NFSv3 and NFSv4 together are for the stock initramfs. Its ``nfsmount`` supports only NFSv3 and asks the portmapper
  (rpcbind, port 111) for mountd's port. If rpcbind is not running, it is started and stopped together with the server.

The server is ready when a client (``nfs-ls`` of libnfs-utils) has listed the exported folder. The server's log message
does not prove that the server is ready, because it also appears if the export was rejected.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfsroot import private_network
from nfsroot.layout import Layout, require_export
from nfsroot.rendering import render
from toolchain import files, leftovers, ports, process, process_identity, progress
from toolchain.addresses import server_address, subnet_of
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, CommandTimedOut, InUse, ProgramMissing, UserError

_SCRATCH = "pitorch-nfs"
_PORTMAPPER = 111
_RESERVED = 1024
"""NFS-Ganesha's PrivilegedPort accepts only client ports below this number."""
_READY_LIMIT_S = 60.0
_PROBE_LIMIT_S = 20.0
_STOP_LIMIT_S = 10.0
_TAIL_LINES = 15
# Messages that the server always prints if D-Bus, Kerberos or a portmapper is missing, and uninformative lines.
_HARMLESS = re.compile(r"DBUS|dbus|krb5|gssd|RADOS|Cannot register NFS V4|:-{10,}|svc_vc_wait|successfully$")


@dataclass(frozen=True, kw_only=True)
class NfsServer:
    """A running server that has responded to a client."""

    folders: tuple[Path, ...]
    address: str
    port: int
    nfsv3: bool
    log: Path
    pid: int

    def source(self, folder: Path | None = None) -> str:
        """Return ``ADDRESS:/path``, the source for mount(8)."""
        return f"{self.address}:{folder or self.folders[0]}"


def plugin_folder() -> Path:
    """Return the folder with the server's backends.

    Raises ProgramMissing if the backend for local folders is absent.
    """
    for found in sorted(glob.glob("/usr/lib/*/ganesha/libfsalvfs.so")) + glob.glob("/usr/lib/ganesha/libfsalvfs.so"):
        return Path(found).parent
    raise ProgramMissing(
        "the NFS server's backend for local folders is not installed",
        expected="/usr/lib/*/ganesha/libfsalvfs.so",
        found="no such file",
        fix="apt-get install nfs-ganesha-vfs",
    )


def major_version(program: Path) -> int:
    """Return the server's major version: 4 in Debian 12, 6 in Debian 13."""
    output = process.run([program, "-v"], check=False, limit_s=20).output
    found = re.search(r"V(\d+)\.", output)
    if found is None:
        raise UserError(
            f"{program} does not print its version",
            expected="output that contains NFS-Ganesha Release = V…",
            found=output.strip()[:200] or "no output",
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
    read_only: Collection[Path] = (),
    privileged_port: bool = True,
) -> str:
    """Return the server's configuration.

    With ``privileged_port``, the server rejects connections from ports that ordinary users may use. ``clients`` are
    addresses or subnets. ``major`` is the server's major version, which matters because a server rejects unknown
    settings. Writes to ``read_only`` folders are refused.
    """
    for folder in folders:
        if set(str(folder)) & set('"\\\n\r;?'):
            raise UserError(
                "the NFS server cannot export this path",
                expected="a path without quotes, backslashes, semicolons, question marks or line breaks",
                found=repr(str(folder)),
                fix="export the tree to another folder",
            )
    return render(
        "ganesha.conf",
        folders=[str(folder) for folder in folders],
        read_only=[str(folder) for folder in read_only],
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
    read_only: Collection[Path] = (),
    log: Path | None = None,
) -> Iterator[NfsServer]:
    """Serve folders while the block runs; with port 0, a free port is chosen.

    ``clients`` may mount the folders and, as root, write to all of them except ``read_only``, so keep the list short.
    The clients must connect from a port below 1024, except in a ``private_network``. The block starts only after a
    client has listed every folder. The server stops when the block ends.

    Raises RootNeeded or ProgramMissing; ArtefactMissing for a missing folder; InUse if the port is taken or an export
    is replacing a folder; UserError, with the last lines of the log, if the server does not serve the folders.
    """
    folders = (folder,) if isinstance(folder, Path) else tuple(folder)
    process.require_root("to serve files of all owners over NFS", "./inv TASK")
    program = process.require_program("ganesha.nfsd", "to serve the exported tree over NFS")
    process.require_program("nfs-ls", "to verify that the NFS server works")
    plugins = plugin_folder()
    for item in folders:
        if not item.is_dir():
            raise ArtefactMissing(
                f"{item} cannot be served", expected="a folder", found="no folder", fix="run ./inv export-nfsroot"
            )
    port = port or ports.free_port(address)
    ports.require_free(
        address,
        port,
        server="the NFS server",
        settings=["nfs.address", "nfs.port"],
        service="for the kernel's NFS server: systemctl stop nfs-server",
    )
    _provide_mtab()
    with contextlib.ExitStack() as stack:
        for item in folders:
            stack.enter_context(_locked_for_serving(item))
        scratch = stack.enter_context(scratch_folder(_SCRATCH))
        (scratch / "recovery").mkdir()
        log = log or scratch / "ganesha.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        configuration = scratch / "ganesha.conf"
        # The probe runs on this machine, so this machine must also be among the clients.
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
                read_only=read_only,
                privileged_port=not private_network.is_entered(),
            )
        )
        if nfsv3:
            stack.enter_context(_portmapper())
        paths = ["-f", str(configuration), "-L", str(log), "-p", str(scratch / "ganesha.pid")]
        server = process.tied([program, "-F", *paths, "-N", "NIV_EVENT"])
        stack.callback(process.end_group, server, polite_s=_STOP_LIMIT_S)
        made = NfsServer(folders=folders, address=address, port=port, nfsv3=nfsv3, log=log, pid=server.pid)
        _await_ready(made, server)
        yield made


@contextlib.contextmanager
def serving_boards(
    config: Config, layout: Layout, *, address: str, port: int | None = None, nfsv3: bool = False
) -> Iterator[NfsServer]:
    """Serve the exported tree to ``nfs.subnet`` and this PC according to ``nfs.overlay`` and ``nfs.persistent``.

    Raises the same errors as ``running_server``.
    """
    folders = served_folders(config, layout)
    if layout.boards in folders:
        layout.boards.mkdir(mode=0o700, exist_ok=True)
    with running_server(
        list(folders),
        address=address,
        port=config.nfs.port if port is None else port,
        nfsv3=nfsv3,
        clients=tuple(dict.fromkeys([str(subnet_of(config)), "127.0.0.1"])),
        read_only=[folder for folder, is_writable in folders.items() if not is_writable],
        log=layout.folder / "ganesha.log",
    ) as server:
        yield server


def served_folders(config: Config, layout: Layout) -> dict[Path, bool]:
    """Return the folders that boards mount, and whether boards may write to each of them."""
    # Boards that share a tree need layout.boards even if nfs.persistent is empty, because it stores their SSH host
    # keys.
    return {layout.tree: False, layout.boards: True} if config.nfs.overlay else {layout.tree: True}


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for a server's files, and remove the folders of killed servers with this ``prefix``."""
    top = Path(tempfile.gettempdir()).resolve()
    # Do not clear other users' folders, because they may contain arbitrary links.
    leftovers.clear((path for path in top.glob(f".{prefix}.*.scratch") if _is_own(path)), top)
    with files.scratch_folder(top, prefix) as folder:
        yield folder


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):  # removed in the meantime
        return path.lstat().st_uid == os.geteuid()
    return False


@contextlib.contextmanager
def _locked_for_serving(tree: Path) -> Iterator[None]:
    """Prevent ``export-nfsroot`` from replacing the tree, which would leave clients with stale handles."""
    layout = Layout(tree.parent)
    if layout.tree != tree or not layout.marker.is_file():
        yield
        return
    taken = InUse(
        f"an export is replacing {layout.tree}",
        expected="no running export",
        found="a lock",
        fix="wait until the export has finished, then try again",
    )
    with files.held(layout.served, taken, shared=True):
        yield


def probe(server: NfsServer, folder: Path) -> str:
    """List a served folder as an NFSv4 client; return the error, or an empty string."""
    address = "127.0.0.1" if server.address == "0.0.0.0" else server.address  # noqa: S104
    # libnfs does not decode percent-encoded URLs, so the path is inserted unchanged.
    url = f"nfs://{address}{folder}?version=4&nfsport={server.port}"
    try:
        done = process.run(["nfs-ls", url], check=False, limit_s=_PROBE_LIMIT_S)
    except CommandTimedOut as fault:
        return fault.summary
    return "" if done.returncode == 0 else done.output.strip() or process.explain_exit(done.returncode)


def serve(
    config: Config,
    *,
    nfsv3: bool = False,
    port: int | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve the exported tree in the foreground until Ctrl-C, SIGTERM or SIGHUP, or until ``stop`` is set.

    This machine and all clients in ``nfs.subnet`` may mount the tree. Prints the commands to run on the board. Raises
    the same errors as ``running_server``; ArtefactMissing if nothing was exported; UserError if the server exits.
    """
    layout = Layout.of(config)
    process.require_root("to serve files of all owners over NFS", "./inv serve-nfsroot")
    require_export(layout)
    subnet = subnet_of(config)
    stop = stop or threading.Event()
    with (
        process.stopped_by_signals(stop),
        serving_boards(config, layout, address=server_address(config), port=port, nfsv3=nfsv3) as server,
    ):
        if (first := unprivileged_port_start()) < _RESERVED:
            progress.warn(
                f"any user of this PC can bind ports from {first} up, so the server cannot distinguish users from "
                f"root: run sysctl net.ipv4.ip_unprivileged_port_start={_RESERVED}"
            )
        for line in _what_to_type(server, str(subnet), config.image.architecture):
            progress.say(line)
        while not stop.wait(0.5):
            if process_identity.find(server.pid) is None:
                raise _failed(server, "the NFS server exited unexpectedly")
        progress.say("stopping the NFS server")


def unprivileged_port_start() -> int:
    """Return the first unprivileged port of this machine (ip(7)), by default 1024."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except FileNotFoundError:
        return _RESERVED


def _what_to_type(server: NfsServer, subnet: str, architecture: str) -> list[str]:
    expected = "" if architecture == "armhf" else f" -a {architecture}"
    port = "" if server.port == 2049 else f" -o port={server.port}"
    versions = "NFSv3 and NFSv4" if server.nfsv3 else "NFSv4"
    source = shlex.quote(server.source())
    return [
        f"serving {server.folders[0]} over {versions} on {server.address}:{server.port}, to {subnet}; stop with Ctrl-C",
        "on the board, as root:",
        f"    enter-nfsroot{expected}{port} {source}",
        "or, without the helper:",
        f"    mount -t nfs -o nolock,vers=4.1{port.replace(' -o ', ',')} {source} /mnt && chroot /mnt",
    ]


def _await_ready(server: NfsServer, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_LIMIT_S
    waiting = list(server.folders)
    complaint = ""
    while waiting:
        if child.poll() is not None:
            raise _failed(server, f"the NFS server exited immediately: {process.explain_exit(child.returncode)}")
        if time.monotonic() > deadline:
            raise _failed(server, f"the NFS server does not serve {waiting[0]} after {_READY_LIMIT_S:.0f} s", complaint)
        complaint = probe(server, waiting[0])
        if not complaint:
            waiting.pop(0)
            continue
        if "NFS SERVER INITIALIZED" in _tail(server.log, 200) and "NFS4ERR_NOENT" in complaint:
            raise _failed(
                server,
                f"the NFS server does not export {waiting[0]}",
                complaint,
                fix="set nfs.folder to a folder whose file system supports file handles (ext4, xfs, btrfs or tmpfs)",
            )
        time.sleep(0.1)


def _failed(server: NfsServer, summary: str, found: str = "", *, fix: str = "") -> UserError:
    # The log may be deleted with its folder, so the message includes the log's last lines.
    tail = _tail(server.log, _TAIL_LINES)
    if "No IP address found for" in tail:
        # The resolver omits loopback addresses unless another interface has an address (AI_ADDRCONFIG).
        fix = "assign an address to an interface other than lo: the server requires one"
    return UserError(
        summary + (f"\n--- last lines of its log ---\n{tail}\n---" if tail else ""),
        expected=f"a server that exports {server.source()}",
        found=found or "see the log",
        fix=fix or "find the cause in the last lines of the server's log above, correct it, then try again",
    )


def _tail(log: Path, lines: int) -> str:
    try:
        kept = [line for line in log.read_text(errors="replace").splitlines() if not _HARMLESS.search(line)]
        return "\n".join(kept[-lines:])
    except FileNotFoundError:
        return ""


def _provide_mtab() -> None:
    """Create /etc/mtab, which the server reads. systemd creates it at boot, but containers and chroots lack it."""
    mtab = Path("/etc/mtab")
    if not os.path.lexists(mtab):
        mtab.symlink_to("../proc/self/mounts")
        progress.say("created /etc/mtab, a link to /proc/self/mounts, which the NFS server requires")


@contextlib.contextmanager
def _portmapper() -> Iterator[None]:
    """Use a running portmapper, or start one and stop it when the block ends."""
    if ports.accepts(ports.LOOPBACK, _PORTMAPPER):
        yield
        return
    program = process.require_program("rpcbind", "to serve NFSv3 (the portmapper)")
    Path("/run/rpcbind").mkdir(mode=0o755, exist_ok=True)
    child = process.tied([program, "-f", "-w"])
    try:
        deadline = time.monotonic() + 15
        while not ports.accepts(ports.LOOPBACK, _PORTMAPPER):
            if child.poll() is not None or time.monotonic() > deadline:
                raise UserError(
                    "the portmapper (rpcbind) did not start",
                    expected="a response on TCP port 111",
                    found="none" if child.poll() is None else process.explain_exit(child.returncode),
                    fix="start rpcbind by hand to see the error: rpcbind -f -d",
                )
            time.sleep(0.1)
        yield
    finally:
        process.end_group(child)
