"""Addresses of boards for ``--device`` and ``remote.devices``.

::

    local                     this PC, in a separate process
    HOST:PORT                 TVM's server on the board, without a tracker or proxy (also direct://HOST:PORT)
    tracker://HOST:PORT/KEY   any board that is registered with the tracker under KEY; waits until one is free
    proxy://HOST:PORT/KEY     a board that is connected to the proxy under KEY; no tracker is used
    tree://[USER@]HOST[:PORT] the loader, over SSH, on a board that booted the exported tree; uses the tree's keys
    ssh://[USER@]HOST[:PORT]  the loader, over SSH, on any other board; uses your SSH keys and your known_hosts
    adb://[SERIAL|HOST:PORT]  the loader, through adb, on a phone; without a serial number, on the only connected phone
    emulator                  the loader, under qemu-user on this PC

``--device`` also accepts ``place://NAME`` for a board in a lab: the task acquires the board and uses its ``tree://``
address.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolchain.errors import ConfigError, UserError

FORM_OF = {
    "local": "local",
    "direct": "HOST:PORT",
    "tracker": "tracker://HOST:PORT/KEY",
    "proxy": "proxy://HOST:PORT/KEY",
    "tree": "tree://[USER@]HOST[:PORT]",
    "ssh": "ssh://[USER@]HOST[:PORT]",
    "adb": "adb://[SERIAL|HOST:PORT]",
    "emulator": "emulator",
}
"""The form of an address, by kind."""
PLACE_FORM = "place://NAME (--device only)"
FORMS = f"{', '.join(FORM_OF.values())} or {PLACE_FORM}"

RPC_KINDS = ("local", "direct", "tracker", "proxy")
LOADER_KINDS = ("local", "tree", "ssh", "adb", "emulator")

_HOST = r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)"
_NETWORKED = re.compile(rf"(?:(?P<kind>direct|tracker|proxy)://)?{_HOST}:(?P<port>\d{{1,5}})(?:/(?P<key>[\w.+-]+))?")
_SSH = re.compile(r"(?P<kind>ssh|tree)://(?P<rest>\S+)")
_ADB = re.compile(r"adb://(?P<serial>[\w.:\[\]-]*)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A parsed address.

    ``key`` is set only in tracker and proxy addresses. In an SSH address, ``host`` is [USER@]HOST[:PORT]. In an adb
    address, ``host`` is a serial number or HOST:PORT, or it is empty.
    """

    kind: str
    host: str = ""
    port: int = 0
    key: str = ""

    def __str__(self) -> str:
        if self.kind in ("local", "emulator"):
            return self.kind
        if self.kind in ("ssh", "tree", "adb"):
            return f"{self.kind}://{self.host}"
        scheme = "" if self.kind == "direct" else f"{self.kind}://"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}{host}:{self.port}" + (f"/{self.key}" if self.key else "")


def parse(text: str) -> Address:
    """Parse an address. Raises UserError if the address is invalid."""
    if text in ("local", "emulator"):
        return Address(kind=text)
    if (found := _SSH.fullmatch(text)) is not None:
        return Address(kind=found["kind"], host=found["rest"])
    if (found := _ADB.fullmatch(text)) is not None:
        return Address(kind="adb", host=found["serial"])
    found = _NETWORKED.fullmatch(text)
    kind = (found["kind"] or "direct") if found is not None else ""
    keyed = found is not None and found["key"] is not None
    if found is None or not 0 < int(found["port"]) < 65536 or keyed != (kind in ("tracker", "proxy")):
        raise UserError(
            f"{text!r} is not a valid board address",
            expected=FORMS,
            found=repr(text),
            fix="use a name from remote.devices in invoke.yaml, or a complete address",
        )
    return Address(kind=kind, host=found["host"].strip("[]"), port=int(found["port"]), key=found["key"] or "")


def named(devices: Sequence[str]) -> Mapping[str, Address]:
    """The addresses in ``remote.devices``, by board name. Raises a ConfigError that lists all invalid entries."""
    made: dict[str, Address] = {}
    faults = []
    for item in devices:
        name, _, text = item.partition("=")
        try:
            made[name] = parse(text)
        except UserError as fault:
            faults.append(f"remote.devices: {name}: expected {fault.expected}, found {fault.found}")
    if faults:
        raise ConfigError(faults)
    return made


def resolve(name: str, devices: Sequence[str]) -> Address:
    """The address for ``--device NAME``, where NAME is a name from ``remote.devices`` or an address.

    Raises UserError.
    """
    known = named(devices)
    if name in known:
        return known[name]
    if re.fullmatch(r"[A-Za-z0-9_.-]+", name) and name not in ("local", "emulator"):
        near = difflib.get_close_matches(name, [*known, "local", "emulator"], n=1, cutoff=0.5)
        raise UserError(
            f"there is no board {name!r}",
            expected=f"a name from remote.devices ({', '.join(known) or 'none configured'}), or {FORMS}",
            found=repr(name),
            fix=f"pass --device {near[0]}" if near else "add NAME=ADDRESS to remote.devices in invoke.yaml",
        )
    return parse(name)
