"""Parse the rows of ``lab.boards``: ``NAME=ADDRESS [TAG=VALUE ...] [power=MODEL/INDEX/HOST]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OWN_TAGS = ("kind", "project", "quarantine")
"""Tags that ``./inv lab`` sets itself."""

NAME = re.compile(r"[a-z][a-z0-9-]*")  # labgrid creates an extra place for a group whose name is a number
_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+@)?(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\])(?::(?P<port>\d+))?")
_KEY = re.compile(r"[a-z][a-z0-9_]+")
_VALUE = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True)
class Power:
    """A port of a power switch, as labgrid's NetworkPowerPort describes it."""

    model: str
    index: str
    host: str


@dataclass(frozen=True)
class BoardRow:
    """A board. ``address`` is ``qemu`` for a virtual machine on this PC, otherwise ``[USER@]HOST[:PORT]``."""

    name: str
    address: str
    tags: Mapping[str, str] = field(default_factory=dict)
    power: Power | None = None

    @property
    def virtual(self) -> bool:
        """Whether the board is a virtual machine on this PC."""
        return self.address == "qemu"


def parse(text: str) -> BoardRow:
    """Return the board that a row describes. Raises ValueError with the expected form."""
    first, *rest = text.split() or [""]
    name, mark, address = first.partition("=")
    if not mark or not NAME.fullmatch(name):
        raise ValueError("expected NAME=ADDRESS, with a name of lower-case letters, digits and hyphens")
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise ValueError("expected qemu or [USER@]HOST[:PORT] as the address")
    tags: dict[str, str] = {}
    power = None
    for word in rest:
        key, _, value = word.partition("=")
        if key == "power":
            power = _power(value)
        elif key in (*OWN_TAGS, "name"):
            raise ValueError(f"expected a tag other than {', '.join((*OWN_TAGS, 'name'))}")
        elif not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ValueError(f"expected TAG=VALUE in lower case, such as model=pi3, in place of {word!r}")
        else:
            tags[key] = value
    if power is not None and address == "qemu":
        raise ValueError("expected no power switch: the run starts and stops a virtual machine itself")
    return BoardRow(name, address, tags, power)


def _power(text: str) -> Power:
    parts = text.split("/", 2)
    if len(parts) != 3 or not all(parts) or not re.fullmatch(r"[a-z0-9_]+", parts[0]):
        raise ValueError("expected power=MODEL/INDEX/HOST, with one of labgrid's power models, such as shelly_gen2")
    return Power(*parts)


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
