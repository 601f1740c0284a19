"""Parse the rows of ``lab.boards``: ``NAME=ADDRESS [TAG=VALUE ...] [power=...] [serial=...] [card=...]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolchain.architecture import ARCHITECTURES

OWN_TAGS = ("kind", "project", "quarantine")
"""Tags that ``./inv lab`` sets itself."""

ARCHITECTURE = "architecture"
"""The tag that selects an export for an architecture other than ``image.architecture``."""

MANUAL = "manual"
"""The value of ``power`` for a board that a person switches on and off by hand."""

USB_HUB = "uhubctl"
"""The power model that switches a port on a USB hub."""

CARDS = ("usbsdmux", "sdwire")
"""Devices that connect an SD card either to the board or to the PC."""

NAME = re.compile(r"[a-z][a-z0-9-]*")  # labgrid creates an extra place for a group whose name is a number
_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+@)?(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\])(?::(?P<port>\d+))?")
_KEY = re.compile(r"[a-z][a-z0-9_]+")
_VALUE = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True)
class Power:
    """An outlet of a power switch, as labgrid's NetworkPowerPort describes it.

    If the model is ``uhubctl``, ``index`` is the number of a port on a USB hub, and ``host`` is the hub's location,
    such as ``1-1.4``.
    """

    model: str
    index: str
    host: str


@dataclass(frozen=True)
class Card:
    """An SD card multiplexer: its type from ``CARDS``, and its USB serial number."""

    model: str
    serial: str


@dataclass(frozen=True)
class BoardRow:
    """A board. ``address`` is ``qemu`` for a virtual machine on this PC, otherwise ``[USER@]HOST[:PORT]``."""

    name: str
    address: str
    tags: Mapping[str, str] = field(default_factory=dict)
    power: Power | None = None
    serial: str = ""
    """The serial console: a device on this PC (``/dev/...``), or ``HOST:PORT`` of a TCP server."""
    card: Card | None = None

    @property
    def virtual(self) -> bool:
        """Whether the board is a virtual machine on this PC."""
        return self.address == "qemu"


def parse(text: str) -> BoardRow:
    """Return the board that a row describes. Raises ValueError, whose message states the expected form."""
    first, *rest = text.split() or [""]
    name, mark, address = first.partition("=")
    if not mark or not NAME.fullmatch(name):
        raise ValueError("expected NAME=ADDRESS, where NAME consists of lower-case letters, digits and hyphens")
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise ValueError("expected qemu or [USER@]HOST[:PORT] as the address")
    tags: dict[str, str] = {}
    power = card = None
    serial = ""
    for word in rest:
        key, _, value = word.partition("=")
        if key == "power" and value == MANUAL:
            tags[key] = value
        elif key == "power":
            power = _power(value)
        elif key == "serial":
            serial = _serial(value)
        elif key == "card":
            card = _card(value)
        elif key in (*OWN_TAGS, "name"):
            raise ValueError(f"expected a tag other than {', '.join((*OWN_TAGS, 'name'))}")
        elif not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ValueError(f"expected TAG=VALUE in lower case, such as model=pi3, found {word!r}")
        elif key == ARCHITECTURE and value not in ARCHITECTURES:
            raise ValueError(f"expected {ARCHITECTURE}={' or '.join(ARCHITECTURES)}, found {value}")
        else:
            tags[key] = value
    if address == "qemu" and (power or serial or card or "power" in tags):
        raise ValueError("expected no power, serial or card, because test-on-pi starts and stops the virtual machine")
    return BoardRow(name, address, tags, power, serial, card)


def _power(text: str) -> Power:
    parts = text.split("/", 2)
    if len(parts) != 3 or not all(parts) or not re.fullmatch(r"[a-z0-9_]+", parts[0]):
        raise ValueError(
            "expected power=manual, power=uhubctl/PORT/HUB, or power=MODEL/INDEX/HOST, where MODEL is one of labgrid's "
            "power models, such as shelly_gen2"
        )
    if not parts[1].isdigit():
        raise ValueError(
            f"expected the number of an outlet or port as INDEX in power=MODEL/INDEX/HOST, found {parts[1]!r}"
        )
    if parts[0] == USB_HUB and not re.fullmatch(r"\d+-\d+(?:\.\d+)*", parts[2]):
        raise ValueError(
            f"expected the hub's location, such as 1-1.4, as HUB in power=uhubctl/PORT/HUB, found {parts[2]!r}"
        )
    return Power(*parts)


def _serial(text: str) -> str:
    found = re.fullmatch(r"/dev/\S+|(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>\d+)", text)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise ValueError("expected serial=/dev/NAME or serial=HOST:PORT")
    return text


def _card(text: str) -> Card:
    model, _, serial = text.partition("/")
    if model not in CARDS or not re.fullmatch(r"[\w.-]+", serial):
        raise ValueError(
            f"expected card=MODEL/SERIAL, where MODEL is {' or '.join(CARDS)} and SERIAL is the USB serial number"
        )
    return Card(model, serial)


def check(rows: Sequence[str]) -> str:
    """Return the error in a list of rows, or an empty string if there is none."""
    faults, names = [], []
    for text in rows:
        try:
            names.append(parse(text).name)
        except ValueError as fault:
            faults.append(f"{text!r}: {fault}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"expected each name once, found {', '.join(twice)} more than once")
    return "; ".join(faults)
