"""Boards that boot over the network, as seen in the log of dnsmasq.

A board asks for an address (DHCP), fetches the firmware's files, the kernel and the initramfs (TFTP), mounts its root
(NFS), and starts its SSH server. ``Boards`` records how far each one has got, and why one stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

STALLED_S = 120.0
"""Seconds without an event after which a board that has not booted gets advice."""

_STATES = ("address", "files", "mounted", "up")
"""In the order of a boot."""

_MAC = r"(?P<mac>(?:[0-9a-f]{2}:){5}[0-9a-f]{2})"
_DHCP = re.compile(rf"dnsmasq-dhcp\S* \d+ (?P<kind>DHCP[A-Z]+|PXE)\([^)]*\) (?:(?P<ip>[\d.]+) )?{_MAC}")
_SENT = re.compile(r"dnsmasq-tftp\S* sent (?P<file>\S+) to (?P<ip>[\d.]+)")
_ABSENT = re.compile(r"dnsmasq-tftp\S* file (?P<file>\S+) not found for (?P<ip>[\d.]+)")
_FAILED = re.compile(r"dnsmasq-tftp\S* (?:failed sending|error \d+ .* received from) .*?(?P<ip>\d+\.\d+\.\d+\.\d+)")
_SERIAL = re.compile(r"[0-9a-f]{8}")
_DEVICE_TREE = re.compile(r"bcm\d+-rpi-(?P<model>.+)\.dtb")
# The firmware also asks for files that may be absent, such as recovery.elf and a folder named after the board.
_REQUIRED = re.compile(r"bootcode\.bin|start4?\.elf|fixup4?\.dat|config\.txt|cmdline\.txt|vmlinuz|initrd\.img|.+\.dtb")
_LAST_FILE = re.compile(r"vmlinuz|initrd\.img")


@dataclass
class Board:
    """One board. Times are in seconds on one clock."""

    mac: str
    began: float
    last: float
    address: str = ""
    serial: str = ""
    model: str = ""
    file: str = ""
    state: str = "address"
    absent: set[str] = field(default_factory=set)
    """Required files that it asked for and that do not exist."""
    lost: bool = False
    """Whether a transfer has failed."""

    def reach(self, state: str, now: float) -> None:
        """Record an event; states never go back until the board asks for an address again."""
        self.last = now
        if _STATES.index(state) > _STATES.index(self.state):
            self.state = state

    def advice(self, now: float) -> str:
        """What keeps it from booting, and the fix; empty if it boots, or as long as it may still."""
        if self.state in ("mounted", "up"):
            return ""
        if self.absent:
            name = min(self.absent)
            return f"{name} is not in the TFTP folder: {_FIXES.get(name, 'run ./inv export-nfsroot again')}"
        if now - self.last < STALLED_S:
            return ""
        if self.lost:
            return "a transfer was lost: check the cable and the switch, then power the board off and on"
        if self.state == "address":
            return "it has an address but fetches no file: enable network boot on the board, and allow UDP port 69"
        if _LAST_FILE.fullmatch(self.file):
            return "its kernel does not mount the tree: nfs.address, the firewall (TCP port of NFS), or its console"
        return f"it stopped after {self.file}: power it off and on, or see its console"


_FIXES = {
    **dict.fromkeys(("vmlinuz", "initrd.img"), "build and export the profile bootable"),
    **dict.fromkeys(
        ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat"),
        "install the package raspi-firmware in the image",
    ),
}


class Boards:
    """All boards that have asked for an address or a file, in that order.

    ``mac_of`` returns the hardware address of a neighbour, or an empty string: if a router assigns addresses, the
    address of a board is only known when it fetches a file.
    """

    def __init__(self, mac_of: Callable[[str], str]) -> None:
        self._mac_of = mac_of
        self._by_mac: dict[str, Board] = {}

    def __iter__(self) -> Iterator[Board]:
        return iter(self._by_mac.values())

    def record(self, line: str, now: float) -> Board | None:
        """Record a line of dnsmasq's log; returns the board that it is about."""
        if found := _DHCP.search(line):
            return self._asked(found["mac"], found["kind"], found["ip"] or "", now)
        for pattern in (_SENT, _ABSENT, _FAILED):
            if (found := pattern.search(line)) and (board := self._at(found["ip"], now)):
                if pattern is _FAILED:
                    board.lost = True
                else:
                    self._fetched(board, PurePosixPath(found["file"]), now, is_there=pattern is _SENT)
                return board
        return None

    def mounted(self, addresses: Collection[str], now: float) -> list[Board]:
        """Record the addresses that are connected to the NFS server; returns the boards that are new."""
        new = [board for board in self if board.address in addresses and board.state in ("address", "files")]
        for board in new:
            board.reach("mounted", now)
        return new

    def _at(self, address: str, now: float) -> Board | None:
        for board in reversed(self._by_mac.values()):
            if board.address == address:
                return board
        mac = self._mac_of(address)
        return self._asked(mac, "", address, now) if mac else None

    def _asked(self, mac: str, kind: str, address: str, now: float) -> Board:
        board = self._by_mac.setdefault(mac, Board(mac, now, now))
        # The firmware, the initramfs and the system each ask for an address: only the first one after a long silence
        # is a new boot.
        if kind == "DHCPDISCOVER" and board.state == "up" and now - board.last > STALLED_S:
            board = self._by_mac[mac] = Board(mac, now, now, board.address, board.serial, board.model)
        if address and kind != "DHCPNAK":
            board.address = address
        board.reach("address", now)
        return board

    def _fetched(self, board: Board, path: PurePosixPath, now: float, *, is_there: bool) -> None:
        if _SERIAL.fullmatch(path.parent.name):
            board.serial = path.parent.name
        if is_there:
            board.file = path.name
            board.absent.discard(path.name)
            if found := _DEVICE_TREE.fullmatch(path.name):
                board.model = found["model"]
        elif _REQUIRED.fullmatch(path.name) and not _SERIAL.fullmatch(path.parent.name):
            board.absent.add(path.name)
        board.reach("files", now)
