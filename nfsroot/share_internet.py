"""Share this PC's internet connection with boards by means of address translation (NAT) in nftables.

``on`` creates the table ``ip pitorch_nat``, which masquerades the subnet on the uplink. If necessary, ``on`` also
makes two changes outside the table, which ``off`` reverts:

- ``on`` sets ``net.ipv4.ip_forward`` and stores the previous value in the state file. If the Docker engine's bridge
  exists, ``off`` does not change the setting, because the engine needs it.
- ``on`` adds accept rules for the subnet to other programs' forward chains whose policy is drop, such as the chain of
  the Docker engine. netfilter drops a packet if any table drops it, so it is not enough to accept the packet in this
  project's table. ``on`` marks these rules with a comment, and ``off`` removes them.

In some other chains, such as firewalld's, the policy is accept, and the last rule rejects all remaining packets. ``on``
does not change such a chain, because an earlier rule may accept the subnet. ``status`` reports it, because it may be
the reason why boards have no connection.

All rules are added in one nftables transaction and removed in another. If ``on`` fails or is interrupted, it reverts
all changes. The state file is written before the first change, so that ``off`` can also undo the changes of an
``on`` that was killed. The state file is in /run, so a reboot removes it together with the rules.
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
from toolchain.errors import UserError
from toolchain.files import write_text_atomically

TABLE = "pitorch_nat"
MARK = "pitorch share-internet"
STATE = Path("/run/pitorch/share-internet.json")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_DOCKER = Path("/sys/class/net/docker0")
"""The Docker engine's bridge, which the engine creates when it starts."""
_AGAIN = "./inv share-internet"
_MATCHES_ALL = frozenset({"counter", "log", "reject", "drop", "jump", "goto"})
"""A rule that consists only of these expressions matches every packet."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The state of connection sharing."""

    on: bool
    subnet: str
    uplink: str
    """The interface to the internet; empty if sharing is off."""
    gateway: str
    """This PC's address in the subnet; empty if the PC has none."""
    packets: int
    """The number of translated connections."""
    opened: tuple[str, ...]
    """Other programs' chains to which this task added accept rules."""
    problems: tuple[str, ...]
    """The problems, each with its fix."""

    def lines(self) -> list[str]:
        """Return the state as lines of text."""
        text = [f"internet for {self.subnet}: {'on, through ' + self.uplink if self.on else 'off'}"]
        if self.on:
            text.append(f"  translated connections: {self.packets}")
            text += [f"  accept rules for the subnet in: {chain}" for chain in self.opened]
            if self.gateway:
                text += ["on the board, as root:", f"    ip route replace default via {self.gateway}"]
        return text + [f"  problem: {problem}" for problem in self.problems]


def on(config: Config, *, state: Path = STATE) -> Sharing:
    """Share this PC's internet connection with ``nfs.subnet``, and return the state.

    A second call restores rules and settings that are missing. Raises RootNeeded; ProgramMissing if nft or ip is
    missing; UserError if there is no uplink, if the uplink is in the subnet, or if a setting cannot be changed.
    After an error, all changes are reverted, including those of an earlier call.
    """
    process.require_root("to translate addresses", f"{_AGAIN} on")
    process.require_program("nft", "to translate the board's addresses")
    subnet = subnet_of(config)
    uplink = find_uplink(subnet)
    kept = _read(state)
    if kept is not None and (kept["subnet"] != str(subnet) or kept["uplink"] != uplink):
        off(config, state=state)
        kept = None
    first = kept is None
    if kept is None:
        # Record ip_forward only before this task's first change, because afterwards this task has set the value.
        kept = {"subnet": str(subnet), "uplink": uplink, "ip_forward": _FORWARD.read_text().strip()}
        write_text_atomically(state, json.dumps(kept) + "\n", mode=0o600)
    try:
        # If the state file is missing, existing rules may be for another subnet, so remove them.
        old = _deletions() if first else []
        closed = [chain for chain in _closed_chains() if first or not any(_is_ours(rule) for rule in _rules(chain))]
        ruleset = render(
            "nat.nft",
            table="" if _has_table() and not first else TABLE,
            chains=[_place(chain) for chain in closed],
            subnet=str(subnet),
            uplink=uplink,
            mark=MARK,
        )
        _apply([*old, ruleset])
        _set_forward("1")
    except BaseException as fault:  # including Ctrl-C
        _revert_after(fault, state)
        raise
    return status(config, state=state)


def off(config: Config, *, state: Path = STATE) -> Sharing:
    """Undo all changes made by ``on``, if any, and return the state."""
    process.require_root("to translate addresses", f"{_AGAIN} off")
    process.require_program("nft", "to translate the board's addresses")
    _revert(state)
    return status(config, state=state)


def _revert(state: Path) -> None:
    _apply(_deletions())
    kept = _read(state)
    # A Docker engine that was started after ``on`` needs forwarding, but does not set ip_forward again after ``off``.
    if kept is not None and not _DOCKER.exists():
        _set_forward(kept["ip_forward"])
    state.unlink(missing_ok=True)


def _revert_after(fault: BaseException, state: Path) -> None:
    """Revert the changes of a failed ``on``; if this fails too, add the second failure to the first error."""
    try:
        _revert(state)
    except UserError as second:
        if isinstance(fault, UserError):
            fault.found += f"; the changes cannot be reverted: {second.found}"
            fault.fix = f"{fault.fix}; then {_AGAIN} off"


def _deletions() -> list[str]:
    """Return the nft commands that remove all rules of this task."""
    rules = [
        f"delete rule {_place(chain)} handle {rule['handle']}"
        for chain in _forward_chains()
        for rule in _rules(chain)
        if _is_ours(rule)
    ]
    return [*rules, *([f"delete table ip {TABLE}"] if _has_table() else [])]


def _apply(commands: Sequence[str]) -> None:
    """Run nft commands in one transaction."""
    if text := "\n".join(command.strip() for command in commands if command.strip()):
        _nft("-f", "-", stdin=f"{text}\n")


def _set_forward(value: str) -> None:
    if _FORWARD.read_text().strip() == value:
        return
    try:
        _FORWARD.write_text(f"{value}\n")
    except OSError as fault:
        raise UserError(
            f"net.ipv4.ip_forward cannot be set to {value}",
            expected=f"write access to {_FORWARD}",
            found=fault.strerror or str(fault),
            fix=f"run sysctl net.ipv4.ip_forward={value} to see the error, and correct its cause; "
            "if this is a container, start it with --privileged",
        ) from fault


def status(config: Config, *, state: Path = STATE) -> Sharing:
    """Return whether and how the connection is shared, and any problems found."""
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
        elif _rejects_all(chain):
            refusing.append(name)
    if kept is not None or present:
        if not present:
            problems.append(f"the table ip {TABLE} is missing (perhaps a firewall was reloaded): run {_AGAIN} on")
        if kept is None:
            problems.append(
                f"{state} is missing, so the previous ip_forward is unknown: run {_AGAIN} off, then check the sysctl"
            )
        if not forwards:
            problems.append(f"net.ipv4.ip_forward is 0: run {_AGAIN} on")
        problems += [f"the chain {name} drops forwarded packets: run {_AGAIN} on" for name in closed]
        problems += [
            f"the chain {name} rejects packets that none of its rules accepts: if the board has no connection, accept "
            f"{subnet} in it (firewalld: firewall-cmd --zone=trusted --add-source={subnet})"
            for name in refusing
        ]
        if not addresses:
            first = subnet.network_address + 1
            problems.append(
                f"no interface has an address in {subnet}: run ip address add {first}/{subnet.prefixlen} dev INTERFACE"
            )
    return Sharing(
        on=present and kept is not None and forwards and not closed,
        subnet=str(subnet),
        uplink=str(kept["uplink"]) if kept else "",
        gateway=addresses[0] if addresses else "",
        packets=_translated() if present else 0,
        opened=tuple(opened),
        problems=tuple(problems),
    )


def find_uplink(subnet: ipaddress.IPv4Network) -> str:
    """Return the interface of the default route with the lowest metric.

    Raises UserError if there is no default route, or if its gateway is in the board's subnet.
    """
    routes = json.loads(process.output_of(["ip", "-j", "-4", "route", "show", "default"]) or "[]")
    usable = [route for route in routes if "dev" in route and "linkdown" not in route.get("flags", ())]
    if not usable:
        raise UserError(
            "this PC has no internet connection",
            expected="a default route",
            found="none",
            fix="connect the PC to the internet; `ip route` must show a default route",
        )
    best = min(usable, key=lambda route: int(route.get("metric", 0)))
    gateway = best.get("gateway")
    if gateway is not None and ipaddress.IPv4Address(gateway) in subnet:
        raise UserError(
            "the board's subnet contains this PC's gateway, so no address translation (NAT) is needed",
            expected=f"a default route through a gateway outside {subnet}",
            found=f"a default route through {gateway} on {best['dev']}",
            fix="set nfs.subnet to the subnet between the PC and the boards; boards in this PC's own network do not "
            "need this PC to share its internet connection",
        )
    return str(best["dev"])


def _nft(*words: str, stdin: str | None = None, merge_stderr: bool = True) -> str:
    data = stdin.encode() if stdin is not None else None
    done = process.run(["nft", *words], stdin=data, check=False, merge_stderr=merge_stderr, limit_s=30)
    if done.returncode != 0:
        raise UserError(
            f"nft {' '.join(words)} failed",
            expected="a kernel with nftables and NAT (nf_tables, nft_masq)",
            found=done.output.strip() or process.explain_exit(done.returncode),
            fix="run modprobe nft_masq and try again; the failed command changed nothing",
        )
    return done.output


def _listed(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(_nft("-j", *words, merge_stderr=False))["nftables"])


def _has_table() -> bool:
    return any(item.get("table", {}).get("name") == TABLE for item in _listed("list", "tables", "ip"))


def _forward_chains() -> Iterator[dict[str, Any]]:
    """Yield other programs' base chains for forwarded IPv4 packets."""
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


def _rejects_all(chain: dict[str, Any], depth: int = 16) -> bool:
    """Return whether the chain has a rule that rejects every packet, directly or through another chain."""
    for rule in _rules(chain):
        expressions = {name: value for part in rule["expr"] for name, value in part.items()}
        if expressions.keys() <= _MATCHES_ALL:
            if expressions.keys() & {"reject", "drop"}:
                return True
            target = expressions.get("jump") or expressions.get("goto")
            if target and depth and _rejects_all({**chain, "name": target["target"]}, depth - 1):
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
