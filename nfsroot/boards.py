"""Use the logs of dnsmasq and the NFS server to track the progress of boards that boot over the network.

A board requests an address (DHCP), fetches the firmware's files, the kernel and the initramfs (TFTP), mounts its root
(NFS), and starts its SSH server. ``Boards`` records which stage each board has reached, and why a board is stuck.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

STALLED_S = 120.0
"""If a board has not booted and no event has occurred for this many seconds, advice is shown.

Advice is also shown if the NFS server has received nothing from a board for this long. Linux renews a mount's lease
every 40 s.
"""

_EPOCH = time.time() - time.monotonic()

_STATES = ("address", "files", "mounted", "up")
"""The stages of a boot, in order."""

_MAC = r"(?P<mac>(?:[0-9a-f]{2}:){5}[0-9a-f]{2})"
_DHCP = re.compile(rf"dnsmasq-dhcp\S* (?P<xid>\d+) (?P<kind>DHCP[A-Z]+|PXE)\([^)]*\) (?:(?P<ip>[\d.]+) )?{_MAC}")
_FIRMWARE_ASKS = re.compile(r"dnsmasq-dhcp\S* (?P<xid>\d+) vendor class: PXEClient")
_SENT = re.compile(r"dnsmasq-tftp\S* sent (?P<file>\S+) to (?P<ip>[\d.]+)")
_ABSENT = re.compile(r"dnsmasq-tftp\S* file (?P<file>\S+) not found for (?P<ip>[\d.]+)")
_FAILED = re.compile(r"dnsmasq-tftp\S* (?:failed sending|error \d+ .* received from) .*?(?P<ip>\d+\.\d+\.\d+\.\d+)")
_REFUSED = re.compile(
    r"(?P<cause>Access|Non-reserved Port \d+) (?:is )?not allowed on Export_Id "
    r"\d+ .* for client (?:::ffff:)?(?P<ip>[\d.]+)"
)
_SERIAL = re.compile(r"[0-9a-f]{8}")
# With TFTP_PREFIX=2, the boot loader of a Pi 4 or 5 requests files from a folder that is named after the hardware
# address instead of the serial number.
_FOLDER = re.compile(rf"{_SERIAL.pattern}|([0-9a-f]{{2}}-){{5}}[0-9a-f]{{2}}")
_DEVICE_TREE = re.compile(r"bcm\d+(?:d0)?-rpi-(?P<model>.+)\.dtb")
# The firmware also requests files that may be absent, such as recovery.elf and a folder named after the board.
_REQUIRED = re.compile(r"bootcode\.bin|start4?\.elf|fixup4?\.dat|config\.txt|cmdline\.txt|vmlinuz|initrd\.img|.+\.dtb")
_LAST_FILE = re.compile(r"vmlinuz|initrd\.img")


@dataclass
class Board:
    """A board. All times are in seconds on the clock of ``time.monotonic``."""

    mac: str
    began: float
    last: float
    address: str = ""
    serial: str = ""
    model: str = ""
    file: str = ""
    state: str = "address"
    absent: set[str] = field(default_factory=set)
    """Required files that the board requested and that do not exist."""
    lost: bool = False
    """Whether a transfer to the board has failed."""
    by_firmware: bool = False
    """Whether the firmware itself, and not only a system on a card, has requested an address."""
    declined: bool = False
    """Whether the board has been offered an address but has not accepted it."""
    outside: str = ""
    """The configured subnet, if the board's address is outside it."""
    refused: str = ""
    """Why the NFS server refused the board."""
    contact: float = 0.0
    """When the NFS server last received data from the board."""
    contact_before: float = -math.inf
    """The same time for the board's previous boot."""

    def reach(self, state: str, now: float) -> None:
        """Record the time of an event, and change the board's state if ``state`` is a later stage."""
        self.last = now
        if _STATES.index(state) > _STATES.index(self.state):
            self.state = state

    def advice(self, now: float) -> str:
        """Return the reason why the board does not boot or does not respond, and the fix.

        The text is empty if the board has booted and responds, or may still boot.
        """
        if self.state in ("mounted", "up"):
            if now - self.contact < STALLED_S:
                return ""
            since = time.strftime("%H:%M", time.localtime(self.contact + _EPOCH))
            return f"the NFS server has received nothing from it since {since}: check its power and its cable"
        if self.refused:
            return self.refused
        if self.outside:
            return f"{self.address} is not in nfs.subnet ({self.outside}): set nfs.subnet to the subnet of the boards"
        if self.absent:
            name = min(self.absent)
            fix = _FIXES.get(name) or _KERNELS.get(name[:7], "run ./inv export-nfsroot again")
            return f"{name} is not in the TFTP folder: {fix}"
        if now - self.last < STALLED_S:
            return ""
        if self.lost:
            return "a transfer failed: check the cable and the switch, then power the board off and on"
        if self.state == "address" and self.declined:
            return "it accepts no address from this PC: if another DHCP server responds, run netboot without --alone"
        if self.state == "address" and not self.by_firmware:
            return (
                "a system on the board requests an address, but its firmware does not: enable network boot (Pi 4, 5: "
                "BOOT_ORDER=0xf21 in the EEPROM; Pi 3B: program_usb_boot_mode=1), and remove the card"
            )
        if self.state == "address":
            return "its firmware fetches no file: allow UDP port 69 in this PC's firewall"
        if _LAST_FILE.fullmatch(self.file):
            return (
                "its kernel does not mount the tree: check nfs.address, the firewall (NFS's TCP port) and the board's "
                "console"
            )
        return f"it stopped after {self.file}: power it off and on, or check its console"


_FIXES = {
    **dict.fromkeys(("vmlinuz", "initrd.img"), "build and export the bootable profile (image.profile: bootable)"),
    **dict.fromkeys(
        ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat"),
        "install the package raspi-firmware in the image",
    ),
}
_KERNELS = {
    "bcm2711": "for a Pi 4, build an image with the package linux-image-arm64 (image.architecture: arm64)",
    "bcm2712": "for a Pi 5, build an image with the package linux-image-rpi-v8 (arm64, image.kernel: raspberrypi)",
}
"""The kernels with an Ethernet driver for each system on chip."""


class Boards:
    """All boards that have requested an address or a file, in the order of their first request.

    ``mac_of`` returns the hardware address for a neighbour's IP address, or an empty string. ``mac_of`` is needed if a
    router assigns addresses, because a board's IP address is then unknown until the board fetches a file. Only
    addresses in ``subnet`` may mount the tree.
    """

    def __init__(self, mac_of: Callable[[str], str], subnet: ipaddress.IPv4Network) -> None:
        self._mac_of = mac_of
        self._subnet = subnet
        self._of_firmware: set[str] = set()
        self._by_mac: dict[str, Board] = {}

    def __iter__(self) -> Iterator[Board]:
        return iter(self._by_mac.values())

    def record(self, line: str, now: float) -> Board | None:
        """Record a log line; return the board that the line is about."""
        if found := _FIRMWARE_ASKS.search(line):
            self._of_firmware.add(found["xid"])
            return None
        if found := _DHCP.search(line):
            by_firmware = found["xid"] in self._of_firmware
            asking = self._asked(found["mac"], found["kind"], found["ip"] or "", now, by_firmware=by_firmware)
            asking.by_firmware |= by_firmware
            return asking
        if found := _REFUSED.search(line):
            return self._refused(found["cause"], found["ip"], now)
        for pattern in (_SENT, _ABSENT, _FAILED):
            if (found := pattern.search(line)) and (board := self._at(found["ip"], now)):
                if pattern is _FAILED:
                    board.lost = True
                else:
                    self._fetched(board, PurePosixPath(found["file"]), now, is_there=pattern is _SENT)
                return board
        return None

    def mounted(self, idle: Mapping[str, float], now: float) -> list[Board]:
        """Record the NFS server's clients; return the boards that have newly mounted the tree.

        ``idle`` contains, for each client's address, the seconds since the server last received data from it. If a
        router assigns addresses, a board with the firmware on a card is not detected until it connects to the NFS
        server.
        """
        for address, seconds in idle.items():
            if board := self._at(address, now):
                board.contact = max(board.contact, now - seconds)
        # The connection of a board that was switched off stays open for hours, even if the board boots again. Times of
        # the same data differ slightly, and a board needs more than 5 s to boot.
        new = [
            board
            for board in self
            if board.address in idle
            and board.contact > board.contact_before + 5
            and board.state in ("address", "files")
            and not board.refused
        ]
        for board in new:
            board.reach("mounted", now)
        return new

    def _at(self, address: str, now: float) -> Board | None:
        for board in reversed(self._by_mac.values()):
            if board.address == address:
                return board
        mac = self._mac_of(address)
        return self._asked(mac, "", address, now) if mac else None

    def _asked(self, mac: str, kind: str, address: str, now: float, *, by_firmware: bool = False) -> Board:
        board = self._by_mac.setdefault(mac, Board(mac, now, now))
        # The firmware, the initramfs and the system each request an address, so only a request of the firmware or the
        # first request after a long silence indicates a new boot. If a router assigns the addresses, dnsmasq logs the
        # firmware's requests as PXE.
        if kind in ("DHCPDISCOVER", "PXE") and (
            (board.state == "up" and now - board.last > STALLED_S)
            or (board.state == "mounted" and (by_firmware or kind == "PXE"))
        ):
            old = board
            board = Board(mac, now, now, old.address, old.serial, old.model, contact_before=old.contact)
            self._by_mac[mac] = board
        if kind in ("DHCPOFFER", "DHCPACK"):
            board.declined = kind == "DHCPOFFER"
        if address and kind != "DHCPNAK":
            board.address = address
            board.outside = "" if ipaddress.IPv4Address(address) in self._subnet else str(self._subnet)
        board.reach("address", now)
        return board

    def _refused(self, cause: str, address: str, now: float) -> Board | None:
        board = self._at(address, now)
        if board is not None:
            board.state = "files"  # a refused board has an open connection for a moment, which counts as mounted
            fix = f"set nfs.subnet to a subnet with {address}" if cause == "Access" else "mount without noresvport"
            board.refused = f"the NFS server refuses it ({cause}): {fix}"
        return board

    def _fetched(self, board: Board, path: PurePosixPath, now: float, *, is_there: bool) -> None:
        if _SERIAL.fullmatch(path.parent.name):
            board.serial = path.parent.name
        if is_there:
            board.file = path.name
            board.absent.discard(path.name)
            if found := _DEVICE_TREE.fullmatch(path.name):
                board.model = found["model"]
        elif _REQUIRED.fullmatch(path.name) and not _FOLDER.fullmatch(path.parent.name):
            board.absent.add(path.name)
        board.reach("files", now)
