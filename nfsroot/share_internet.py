"""Internet for a board behind this PC: NAT of the board's subnet by nftables, undone completely.

``on`` makes one table of its own (``ip pitorch_nat``): masquerading of the subnet towards the uplink, and nothing
else is translated. Two things outside that table may stand in the way, and are changed and restored:

- ``net.ipv4.ip_forward``: its earlier value is kept in the state file and set again by ``off``;
- forward chains of other programs whose policy is drop (the Docker engine's): a verdict of drop is final in
  netfilter, whatever another table accepts. Each gets accept rules for the subnet, marked with our name, and ``off``
  removes exactly those.

A chain that accepts by policy and refuses by its last rule (firewalld's) is left alone, since it may accept the subnet
before that; it is told as what may be the reason.

All rules, in that table and in others' chains, come in one transaction of nftables, and go in one: never a part of
them. Where ``on`` fails or is interrupted after that, it takes everything back. The state file is written before
anything is changed, so what a killed ``on`` did can be undone too. It lies in /run: a reboot forgets it together with
all it describes.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfsroot.rendering import render
from toolchain import process
from toolchain.addresses import own_addresses, subnet_of
from toolchain.config import Config
from toolchain.errors import NetworkSharingFailed, UserError
from toolchain.files import write_text_atomically

TABLE = "pitorch_nat"
MARK = "pitorch share-internet"
STATE = Path("/run/pitorch/share-internet.json")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_AGAIN = "./inv share-internet"
_WHATEVER_COMES = frozenset({"counter", "log", "reject", "drop", "jump", "goto"})
"""What a rule may consist of that asks nothing of a packet."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Whether the subnet is shared, and what is known about it."""

    on: bool
    subnet: str
    uplink: str
    """Interface to the internet; empty when off and none was found."""
    gateway: str
    """This PC's address in the subnet; empty when it has none."""
    ip_forward: bool
    packets: int
    """Connections that were translated so far."""
    opened: tuple[str, ...]
    """Chains of other programs that got accept rules."""
    problems: tuple[str, ...]
    """What keeps it from working, each with its fix."""

    def lines(self) -> list[str]:
        """For people."""
        said = [f"internet for {self.subnet}: {'on, through ' + self.uplink if self.on else 'off'}"]
        if self.on:
            said.append(f"  connections translated so far: {self.packets}")
            said += [f"  opened for the subnet: {chain}" for chain in self.opened]
            if self.gateway:
                said += ["on the board, as root:", f"    ip route replace default via {self.gateway}"]
        return said + [f"  problem: {problem}" for problem in self.problems]


def on(config: Config, *, state: Path = STATE) -> Sharing:
    """Share this PC's internet with ``nfs.subnet``; done again, it fixes what is missing.

    Raises RootNeeded, ProgramMissing (nft, ip) or NetworkSharingFailed (no uplink, the uplink is in the subnet; what
    cannot be changed, with nothing changed then).
    """
    process.require_root("to translate addresses", f"{_AGAIN} on")
    process.require_program("nft", "to translate the board's addresses")
    subnet = subnet_of(config)
    uplink = find_uplink(subnet)
    kept = _read(state)
    if kept is not None and (kept["subnet"] != str(subnet) or kept["uplink"] != uplink):
        off(config, state=state)
        kept = None
    anew = kept is None
    if kept is None:
        # A forward value that an earlier table's owner set is not ours to restore: only the first change is recorded.
        kept = {"subnet": str(subnet), "uplink": uplink, "ip_forward": _FORWARD.read_text().strip()}
        write_text_atomically(state, json.dumps(kept) + "\n", mode=0o600)
    try:
        # What lies there without a record may be of another subnet.
        old = _deletions() if anew else []
        closed = [chain for chain in _closed_chains() if anew or not any(_is_ours(rule) for rule in _rules(chain))]
        ruleset = render(
            "nat.nft",
            table="" if _has_table() and not anew else TABLE,
            chains=[_place(chain) for chain in closed],
            subnet=str(subnet),
            uplink=uplink,
            mark=MARK,
        )
        _apply([*old, ruleset])
        _set_forward("1")
    except BaseException as fault:  # Ctrl-C too
        _take_back_after(fault, state)
        raise
    return status(config, state=state)


def off(config: Config, *, state: Path = STATE) -> Sharing:
    """Take everything back that ``on`` changed; nothing to do is fine."""
    process.require_root("to translate addresses", f"{_AGAIN} off")
    process.require_program("nft", "to translate the board's addresses")
    _take_back(state)
    return status(config, state=state)


def _take_back(state: Path) -> None:
    _apply(_deletions())
    kept = _read(state)
    if kept is not None:
        _set_forward(kept["ip_forward"])
    state.unlink(missing_ok=True)


def _take_back_after(fault: BaseException, state: Path) -> None:
    """Leave nothing of an ``on`` that did not come to its end; the fault says it where that is not possible."""
    try:
        _take_back(state)
    except UserError as second:
        if isinstance(fault, UserError):
            fault.found += f"; what was done cannot be taken back: {second.found}"
            fault.fix = f"{fault.fix}; then {_AGAIN} off"


def _deletions() -> list[str]:
    """Commands of nft that take away all that is ours."""
    rules = [
        f"delete rule {_place(chain)} handle {rule['handle']}"
        for chain in _forward_chains()
        for rule in _rules(chain)
        if _is_ours(rule)
    ]
    return [*rules, *([f"delete table ip {TABLE}"] if _has_table() else [])]


def _apply(commands: Sequence[str]) -> None:
    """Commands of nft in one transaction: all of them, or none."""
    if text := "\n".join(command.strip() for command in commands if command.strip()):
        _nft("-f", "-", stdin=f"{text}\n")


def _set_forward(value: str) -> None:
    if _FORWARD.read_text().strip() == value:
        return
    try:
        _FORWARD.write_text(f"{value}\n")
    except OSError as fault:
        raise NetworkSharingFailed(
            f"net.ipv4.ip_forward cannot be set to {value}",
            expected=f"a {_FORWARD} that root may write",
            found=fault.strerror or str(fault),
            fix=f"sysctl net.ipv4.ip_forward={value} must work (a container needs --privileged)",
        ) from fault


def status(config: Config, *, state: Path = STATE) -> Sharing:
    """Look, and say what is missing."""
    process.require_root("to read the packet filter", f"{_AGAIN} status")
    process.require_program("nft", "to read the packet filter")
    subnet = subnet_of(config)
    kept = _read(state)
    present = _has_table()
    forwards = _FORWARD.read_text().strip() == "1"
    addresses = [str(address) for address in own_addresses() if address in subnet]
    problems = []
    opened, closed, refusing = [], [], []
    for chain in _forward_chains():
        name = _place(chain)
        if any(_is_ours(rule) for rule in _rules(chain)):
            opened.append(name)
        elif chain.get("policy") == "drop":
            closed.append(name)
        elif _refuses(chain):
            refusing.append(name)
    if kept is not None or present:
        if not present:
            problems.append(f"the table ip {TABLE} is gone (a firewall was loaded anew): {_AGAIN} on")
        if kept is None:
            problems.append(f"{state} is gone, the earlier ip_forward is unknown: {_AGAIN} off, then check the sysctl")
        if not forwards:
            problems.append(f"net.ipv4.ip_forward is 0: {_AGAIN} on")
        problems += [f"the chain {name} drops what is forwarded: {_AGAIN} on" for name in closed]
        problems += [
            f"the chain {name} refuses what no rule of its own accepts: if the board gets nothing, accept {subnet} "
            f"there (firewalld: firewall-cmd --zone=trusted --add-source={subnet})"
            for name in refusing
        ]
        if not addresses:
            first = subnet.network_address + 1
            problems.append(
                f"no interface has an address in {subnet}: ip address add {first}/{subnet.prefixlen} dev INTERFACE"
            )
    return Sharing(
        on=present and kept is not None and forwards and not closed,
        subnet=str(subnet),
        uplink=str(kept["uplink"]) if kept else "",
        gateway=addresses[0] if addresses else "",
        ip_forward=forwards,
        packets=_translated() if present else 0,
        opened=tuple(opened),
        problems=tuple(problems),
    )


def find_uplink(subnet: ipaddress.IPv4Network) -> str:
    """The interface of the best default route.

    Raises NetworkSharingFailed when there is none, or when it leads into the board's own subnet.
    """
    routes = json.loads(process.output_of(["ip", "-j", "-4", "route", "show", "default"]) or "[]")
    usable = [route for route in routes if "dev" in route and "linkdown" not in route.get("flags", ())]
    if not usable:
        raise NetworkSharingFailed(
            "this PC has no internet to share",
            expected="a default route",
            found="none",
            fix="connect the PC first: `ip route` must show a default route",
        )
    best = min(usable, key=lambda route: int(route.get("metric", 0)))
    gateway = best.get("gateway")
    if gateway is not None and ipaddress.IPv4Address(gateway) in subnet:
        raise NetworkSharingFailed(
            "the board's subnet is the one this PC reaches the internet through: there is nothing to translate",
            expected=f"a default route outside {subnet}",
            found=f"{gateway} on {best['dev']}",
            fix="set nfs.subnet to the subnet between PC and board; boards on the PC's own network need no sharing",
        )
    return str(best["dev"])


def _nft(*words: str, stdin: str | None = None, merge_stderr: bool = True) -> str:
    data = stdin.encode() if stdin is not None else None
    done = process.run(["nft", *words], stdin=data, check=False, merge_stderr=merge_stderr, limit_s=30)
    if done.returncode != 0:
        raise NetworkSharingFailed(
            f"nft {' '.join(words)} failed",
            expected="a kernel with nftables and NAT (nf_tables, nft_masq)",
            found=done.output.strip() or process.explain_exit(done.returncode),
            fix="nothing was changed by it; modprobe nft_masq",
        )
    return done.output


def _listed(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(_nft("-j", *words, merge_stderr=False))["nftables"])


def _has_table() -> bool:
    return any(item.get("table", {}).get("name") == TABLE for item in _listed("list", "tables", "ip"))


def _forward_chains() -> Iterator[dict[str, Any]]:
    """Base chains of other programs that see forwarded IPv4 packets."""
    for item in _listed("list", "chains"):
        chain = item.get("chain", {})
        if chain.get("hook") == "forward" and chain["family"] in ("ip", "inet") and chain["table"] != TABLE:
            yield chain


def _closed_chains() -> Iterator[dict[str, Any]]:
    return (chain for chain in _forward_chains() if chain.get("policy") == "drop")


def _place(chain: dict[str, Any]) -> str:
    return f"{chain['family']} {chain['table']} {chain['name']}"


def _rules(chain: dict[str, Any]) -> list[dict[str, Any]]:
    listed = _listed("list", "chain", chain["family"], chain["table"], chain["name"])
    return [item["rule"] for item in listed if "rule" in item]


def _refuses(chain: dict[str, Any], depth: int = 16) -> bool:
    """Whether a rule of the chain refuses whatever reaches it, itself or by a chain that it leads to."""
    for rule in _rules(chain):
        said = {name: value for part in rule["expr"] for name, value in part.items()}
        if said.keys() <= _WHATEVER_COMES:
            if said.keys() & {"reject", "drop"}:
                return True
            onwards = said.get("jump") or said.get("goto")
            if onwards and depth and _refuses({**chain, "name": onwards["target"]}, depth - 1):
                return True
    return False


def _is_ours(rule: dict[str, Any]) -> bool:
    return rule.get("comment") == MARK


def _translated() -> int:
    for item in _listed("list", "table", "ip", TABLE):
        for part in item.get("rule", {}).get("expr", ()):
            if "counter" in part:
                return int(part["counter"]["packets"])
    return 0


def _read(state: Path) -> dict[str, str] | None:
    try:
        kept = json.loads(state.read_text())
        return {key: str(kept[key]) for key in ("subnet", "uplink", "ip_forward")}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
