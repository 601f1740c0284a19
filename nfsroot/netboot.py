"""Boot boards without a card: run the DHCP and TFTP server (dnsmasq) and the NFS server in the foreground.

dnsmasq serves a copy of the TFTP folder, because it drops root privileges and only root can access the exported folder.
A table shows which stage each board has reached. With ``nfs.overlay``, the boards share a tree that none of them can
change.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import math
import queue
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.live import Live
from rich.table import Table

from nfsroot import host_keys
from nfsroot.access import parse_host
from nfsroot.boards import STALLED_S, Board, Boards
from nfsroot.boot_files import BootParts, boot_parts, current_command_line, dnsmasq_configuration
from nfsroot.layout import Layout, require_export
from nfsroot.serve import NfsServer, scratch_folder, serving_boards
from nfsroot.tree import follow
from toolchain import board_events, files, lab_boards, ports, process, process_identity, progress
from toolchain.addresses import own_addresses, server_address, subnet_of
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, CommandFailed, InUse, NetworkUnreachable, UserError

_POLL_S = 0.5
_READY_LIMIT_S = 15.0
_BANNER_WAIT_S = 5.0
_RESOLVE_S = 5.0
_KEPT_EVENTS = 500
"""The maximum number of events that are kept for a board whose address does not match a name in ``lab.boards``."""
_STATES = {"address": "has an address", "files": "fetches files", "mounted": "mounted", "up": "up"}


def netboot(
    config: Config,
    *,
    alone: bool = False,
    fetch_firmware: Callable[[], Path] | None = None,
    stop: threading.Event | None = None,
    on_event: Callable[[Board], None] = lambda _board: None,
) -> None:
    """Serve DHCP, TFTP and NFS until Ctrl-C, SIGTERM or SIGHUP, or until ``stop`` is set; show the boards' progress.

    With ``alone``, this PC assigns addresses; otherwise a router assigns them. ``fetch_firmware`` is called if the tree
    has no boot firmware, and returns a folder with the firmware. ``on_event`` is called whenever a board's state
    changes. Raises the same errors as ``running_server``; ArtefactMissing if nothing was exported or the tree does not
    support ``nfs.overlay``; NetworkUnreachable if this PC has no address in ``nfs.subnet``; DiskFull; InUse if another
    DHCP or TFTP server is running here; UserError if a server exits.
    """
    layout = Layout.of(config)
    process.require_root("to serve DHCP, TFTP and NFS", "./inv netboot")
    require_export(layout)
    address = _address_in_subnet(config)
    if config.nfs.overlay:
        _require_overlay(layout)
    parts = _parts(layout, fetch_firmware)
    for item in parts.missing():
        progress.warn(f"the tree lacks files that boards without an SD card need: {item}")
    stop = stop or threading.Event()

    def event(board: Board) -> None:
        if board.state == "up" and config.nfs.overlay:
            try:
                host_keys.publish(layout)
            except OSError as fault:  # the other boards must still be able to boot
                progress.warn(f"cannot add the host keys of {board.address} to {layout.known_hosts}: {fault.strerror}")
        on_event(board)

    with (
        process.stopped_by_signals(stop),
        serving_boards(config, layout, address=address) as server,
        _running_dnsmasq(config, layout, parts, address, proxy=not alone) as lines,
        _recording(config) as keep,
    ):
        mode = "alone" if alone else "alongside the router"
        progress.say(f"serving DHCP ({mode}), TFTP and NFS on {address}; stop with Ctrl-C")
        _watch(Boards(neighbour, subnet_of(config)), server, lines, stop, event, keep)
        progress.say("stopping the servers")


@contextlib.contextmanager
def _recording(config: Config) -> Iterator[Callable[[Board, str, str], None]]:
    """Yield a function that records a board's event for ``./inv lab log`` if the board is in ``lab.boards``.

    Names are resolved repeatedly, because a name may be unknown until its board has booted. A board's events are kept
    in memory until its address matches a name in ``lab.boards``.
    """
    hosts = {
        row.name: parse_host(row.address)[1] for row in map(lab_boards.parse, config.lab.boards) if not row.virtual
    }
    names: dict[str, str] = {}
    waiting: dict[str, tuple[Board, collections.deque[tuple[float, str, str]]]] = {}
    lock, ended = threading.Lock(), threading.Event()

    def write() -> None:
        for board, events in waiting.values():
            if name := names.get(board.address):
                while events:
                    when, source, text = events.popleft()
                    board_events.append(board_events.of_netboot(config, name), source, text, when=when)

    def record(board: Board, source: str, text: str) -> None:
        with lock:
            _, events = waiting.setdefault(board.mac, (board, collections.deque(maxlen=_KEPT_EVENTS)))
            events.append((time.time(), source, text))
            write()

    def resolve() -> None:
        while True:
            for name, host in hosts.items():
                with contextlib.suppress(OSError, UnicodeError):  # a name that cannot be resolved
                    address = socket.gethostbyname(host)
                    with lock:
                        for old in [key for key, value in names.items() if value == name]:
                            del names[old]
                        names[address] = name
                        write()
            if ended.wait(_RESOLVE_S):
                return

    # Use a thread and do not wait for it, because the resolver may block for seconds.
    threading.Thread(target=resolve, name="resolve-boards", daemon=True).start()
    try:
        yield record
    finally:
        ended.set()


def _require_overlay(layout: Layout) -> None:
    script = follow(layout.tree, "etc/initramfs-tools/scripts/nfs4")
    if not (script.is_file() and "share_deployed" in script.read_text(errors="replace")):
        raise ArtefactMissing(
            "the exported tree does not support nfs.overlay",
            expected="an initramfs whose script nfs4 creates the overlay",
            found="an image from an earlier version of pitorch, or one that is not bootable",
            fix="set image.profile: bootable, then run ./inv build-image and ./inv export-nfsroot; or set "
            "nfs.overlay: false",
        )


def _parts(layout: Layout, fetch_firmware: Callable[[], Path] | None) -> BootParts:
    """Return the files that boards fetch. Download firmware that the tree lacks; print a warning if this fails."""
    parts = boot_parts(layout.tree)
    if parts.absent_firmware and fetch_firmware is not None:
        try:
            return boot_parts(layout.tree, fetch_firmware())
        except (NetworkUnreachable, CommandFailed) as fault:
            progress.warn(f"the boot firmware cannot be fetched: {fault.summary}")
    return parts


def _address_in_subnet(config: Config) -> str:
    address, subnet = server_address(config), subnet_of(config)
    if address not in {str(own) for own in own_addresses() if own in subnet}:
        raise NetworkUnreachable(
            "this PC has no address in the board's subnet",
            expected=f"an address in nfs.subnet ({subnet}) on the interface to the board",
            found=", ".join(f"{own} ({name})" for own, name in own_addresses().items()),
            fix=f"run ip address add {subnet.network_address + 1}/{subnet.prefixlen} dev INTERFACE, or set nfs.subnet "
            "to the subnet of that interface",
        )
    return address


@contextlib.contextmanager
def _running_dnsmasq(
    config: Config, layout: Layout, parts: BootParts, address: str, *, proxy: bool
) -> Iterator[queue.Queue[str | None]]:
    """Run dnsmasq; yield a queue of its log lines, in which None marks the end."""
    program = process.require_program("dnsmasq", "to serve DHCP and TFTP")
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(scratch_folder("pitorch-netboot"))
        place.chmod(0o755)
        tftp = place / "tftp"
        configuration = place / "dnsmasq.conf"
        with files.room_for("the boot files", place):
            shutil.copytree(layout.tftp, tftp, ignore=_dangling)
            for name, item in parts.firmware.items():
                shutil.copyfile(item, tftp / name)
            # The settings may have changed since the export, so cmdline.txt and dnsmasq.conf are written again.
            command_line = tftp / "cmdline.txt"
            command_line.write_text(current_command_line(command_line.read_text(), config, layout, address))
            text = dnsmasq_configuration(subnet_of(config), address, tree=layout.tree, tftp=tftp, proxy=proxy)
            configuration.write_text(text)
        words = ["--keep-in-foreground", f"--conf-file={configuration}", "--log-facility=-", f"--pid-file={place}/pid"]
        child = process.tied([program, *words], output=subprocess.PIPE)
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        stack.callback(reader.join)
        stack.callback(process.end_group, child)
        _await_ready(lines)
        yield lines


def _dangling(folder: str, names: list[str]) -> list[str]:
    """Return the links that lead nowhere. copytree's own option for them does not support relative links."""
    return [name for name in names if not Path(folder, name).exists()]


def _read(log: IO[bytes], lines: queue.Queue[str | None]) -> None:
    with log:
        for line in log:
            lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _await_ready(lines: queue.Queue[str | None]) -> None:
    """Wait until dnsmasq serves TFTP, the last service that it starts.

    Raises InUse or UserError if dnsmasq does not start.
    """
    seen: list[str] = []
    deadline = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=_POLL_S)
            if line is None:
                break
            seen.append(line)
            if "TFTP root is" in line:
                return
    tail = "\n".join(seen[-5:])
    if "Address already in use" in tail:
        raise InUse(
            "another DHCP or TFTP server is running on this PC",
            expected="free UDP ports 67 and 69",
            found=tail,
            fix="stop the other server, for example: systemctl stop dnsmasq isc-dhcp-server tftpd-hpa",
        )
    raise UserError(
        "dnsmasq did not start",
        expected="a running DHCP and TFTP server",
        found=tail or "no message",
        fix="find the cause in dnsmasq's messages above, correct it, then try again",
    )


def _watch(
    boards: Boards,
    server: NfsServer,
    lines: queue.Queue[str | None],
    stop: threading.Event,
    on_event: Callable[[Board], None],
    keep: Callable[[Board, str, str], None],
) -> None:
    shown: dict[str, tuple[str, str]] = {}
    hint_at = time.monotonic() + STALLED_S

    def tell(board: Board) -> None:
        on_event(board)
        now = (_STATES[board.state], board.advice(time.monotonic()))
        if live is None and shown.get(board.mac) != now:
            progress.say(f"    {board.mac} {board.address} {' '.join(filter(None, now))}")
        shown[board.mac] = now

    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        logins: dict[str, concurrent.futures.Future[bool]] = {}
        live = stack.enter_context(_live()) if progress.console.is_terminal else None
        refusals = stack.enter_context(server.log.open(errors="replace"))
        while not stop.is_set():
            for line in _drain(lines):
                if line is None:
                    raise UserError("dnsmasq exited unexpectedly", fix="run ./inv netboot again")
                if board := boards.record(line, time.monotonic()):
                    keep(board, "tftp" if "dnsmasq-tftp" in line else "dhcp", line.partition(": ")[2])
                    tell(board)
            for line in refusals:
                if board := boards.record(line, time.monotonic()):
                    keep(board, "nfs", board.refused)
                    tell(board)
            if process_identity.find(server.pid) is None:
                raise UserError(
                    "the NFS server exited unexpectedly",
                    found=f"the messages in {server.log}",
                    fix=f"find the cause in {server.log}, then run ./inv netboot again",
                )
            now = time.monotonic()
            if now > hint_at and not any(boards):
                progress.say("no board has requested an address: check the cable, and enable network boot on the board")
                hint_at = math.inf
            for board in boards.mounted(clients_of(server.port), now):
                keep(board, "nfs", f"{board.address} has connected to {server.source()}")
                tell(board)
            for board in boards:
                if board.state == "mounted" and (board.mac not in logins or logins[board.mac].done()):
                    if board.mac in logins and logins.pop(board.mac).result():
                        board.reach("up", time.monotonic())
                        keep(board, "ssh", f"the SSH server of {board.address} responds")
                        tell(board)
                    else:
                        logins[board.mac] = pool.submit(ports.is_ssh, board.address, 22, limit_s=_BANNER_WAIT_S)
                elif board.advice(now) != shown.get(board.mac, ("", ""))[1]:
                    tell(board)
            if live is not None:
                live.update(table(boards, now), refresh=True)
            stop.wait(_POLL_S)
    progress.console.print(table(boards, time.monotonic()))


def _live() -> Live:
    return Live(console=progress.console, auto_refresh=False, transient=True)


def _drain(lines: queue.Queue[str | None]) -> Iterator[str | None]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield lines.get_nowait()


def table(boards: Boards, now: float) -> Table:
    """Return a table with a row per board; ``now`` is a time on the same clock as the events."""
    made = Table()
    for name in ("board", "address", "last file", "state"):
        made.add_column(name, overflow="fold")
    made.add_column("s", justify="right")
    for board in boards:
        who = "\n".join(filter(None, (board.mac, board.serial, board.model)))
        state = "\n".join(filter(None, (_STATES[board.state], board.advice(now))))
        until = board.last if board.state == "up" else now
        made.add_row(who, board.address, board.file, state, f"{until - board.began:.0f}")
    return made


def clients_of(port: int) -> dict[str, float]:
    """Return the addresses of the clients that are connected to a TCP port on this machine.

    For each address, the value is the number of seconds since data was last received from it.
    """
    listed = process.run(["ss", "-HntiO", "state", "established", f"sport = :{port}"], limit_s=20).output
    idle: dict[str, float] = {}
    for line in filter(str.strip, listed.splitlines()):
        peer = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        found = re.search(r" lastrcv:(\d+)", line)  # in milliseconds; omitted if 0
        idle[peer] = min(idle.get(peer, math.inf), int(found[1]) / 1000 if found else 0.0)
    return idle


def neighbour(address: str) -> str:
    """Return the hardware address of a neighbour on the network, or an empty string if unknown."""
    listed = json.loads(process.output_of(["ip", "-j", "neighbour", "show", address]) or "[]")
    macs = [
        item["lladdr"] for item in listed if re.fullmatch(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}", item.get("lladdr", ""))
    ]
    return str(macs[0]) if macs else ""
