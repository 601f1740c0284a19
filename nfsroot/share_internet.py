"""Internet for a board behind this PC: NAT of the board's subnet by nftables, undone completely.

``on`` makes one table of its own (``ip pitorch_nat``): masquerading of the subnet towards the uplink, and nothing
else is translated. Two things outside that table may stand in the way, and are changed and restored:

- ``net.ipv4.ip_forward``: its earlier value is kept in the state file and set again by ``off``;
- forward chains of other programs whose policy is drop (the Docker engine's): a verdict of drop is final in
  netfilter, whatever another table accepts. Each gets accept rules for the subnet, marked with our name, and ``off``
  removes exactly those.

The state file is written before anything is changed, so what an interrupted ``on`` did can be undone. It lies in
/run: a reboot forgets it together with all it describes.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfsroot.addresses import own_addresses, subnet_of
from nfsroot.rendering import render
from toolchain import process
from toolchain.config import Config
from toolchain.errors import NetworkSharingFailed
from toolchain.files import write_text_atomically

TABLE = "pitorch_nat"
MARK = "pitorch share-internet"
STATE = Path("/run/pitorch/share-internet.json")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_AGAIN = "./inv share-internet"


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
    """What keeps it from working, each with its mend."""

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
    """Share this PC's internet with ``nfs.subnet``; done again, it mends what is missing.

    Raises RootNeeded, ProgramMissing (nft, ip) or NetworkSharingFailed (no uplink, the uplink is in the subnet).
    """
    process.require_root("to translate addresses", f"{_AGAIN} on")
    process.require_program("nft", "to translate the board's addresses")
    subnet = subnet_of(config)
    uplink = find_uplink(subnet)
    kept = _read(state)
    if kept is not None and (kept["subnet"] != str(subnet) or kept["uplink"] != uplink):
        off(config, state=state)
        kept = None
    if kept is None:
        # A forward value that an earlier table's owner set is not ours to restore: only the first change is recorded.
        kept = {"subnet": str(subnet), "uplink": uplink, "ip_forward": _FORWARD.read_text().strip()}
        write_text_atomically(state, json.dumps(kept) + "\n", mode=0o600)
    ruleset = render("nat.nft", table=TABLE, subnet=str(subnet), uplink=uplink, mark=MARK)
    if not _has_table():
        _nft("-f", "-", stdin=ruleset)
    for chain in _closed_chains():
        if not any(_is_ours(rule) for rule in _rules(chain)):
            where = [chain["family"], chain["table"], chain["name"]]
            for rule in (
                ["ip", "daddr", str(subnet), "ct", "state", "established,related"],
                ["ip", "saddr", str(subnet), "oifname", uplink],
            ):
                _nft("insert", "rule", *where, *rule, "counter", "accept", "comment", f'"{MARK}"')
    if _FORWARD.read_text().strip() != "1":
        _FORWARD.write_text("1\n")
    return status(config, state=state)


def off(config: Config, *, state: Path = STATE) -> Sharing:
    """Take everything back that ``on`` changed; nothing to do is fine."""
    process.require_root("to translate addresses", f"{_AGAIN} off")
    process.require_program("nft", "to translate the board's addresses")
    for chain in _forward_chains():
        for rule in _rules(chain):
            if _is_ours(rule):
                _nft("delete", "rule", chain["family"], chain["table"], chain["name"], "handle", str(rule["handle"]))
    if _has_table():
        _nft("delete", "table", "ip", TABLE)
    kept = _read(state)
    if kept is not None:
        if _FORWARD.read_text().strip() != kept["ip_forward"]:
            _FORWARD.write_text(kept["ip_forward"] + "\n")
        state.unlink()
    return status(config, state=state)


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
    opened, closed = [], []
    for chain in _forward_chains():
        name = f"{chain['family']} {chain['table']} {chain['name']}"
        if any(_is_ours(rule) for rule in _rules(chain)):
            opened.append(name)
        elif chain.get("policy") == "drop":
            closed.append(name)
    if kept is not None or present:
        if not present:
            problems.append(f"the table ip {TABLE} is gone (a firewall was loaded anew): {_AGAIN} on")
        if kept is None:
            problems.append(f"{state} is gone, the earlier ip_forward is unknown: {_AGAIN} off, then check the sysctl")
        if not forwards:
            problems.append(f"net.ipv4.ip_forward is 0: {_AGAIN} on")
        problems += [f"the chain {name} drops what is forwarded: {_AGAIN} on" for name in closed]
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
            mend="connect the PC first: `ip route` must show a default route",
        )
    best = min(usable, key=lambda route: int(route.get("metric", 0)))
    gateway = best.get("gateway")
    if gateway is not None and ipaddress.IPv4Address(gateway) in subnet:
        raise NetworkSharingFailed(
            "the board's subnet is the one this PC reaches the internet through: there is nothing to translate",
            expected=f"a default route outside {subnet}",
            found=f"{gateway} on {best['dev']}",
            mend="set nfs.subnet to the subnet between PC and board; boards on the PC's own network need no sharing",
        )
    return str(best["dev"])


def _nft(*words: str, stdin: str | None = None) -> str:
    data = stdin.encode() if stdin is not None else None
    done = process.run(["nft", *words], stdin=data, check=False, limit_s=30)
    if done.returncode != 0:
        raise NetworkSharingFailed(
            f"nft {' '.join(words)} failed",
            expected="a kernel with nftables and NAT (nf_tables, nft_masq)",
            found=done.output.strip() or process.explain_exit(done.returncode),
            mend=f"{_AGAIN} off takes back what was done; modprobe nft_masq",
        )
    return done.output


def _listed(*words: str) -> list[dict[str, Any]]:
    output = process.run(["nft", "-j", *words], check=False, merge_stderr=False, limit_s=30)
    if output.returncode != 0:
        return []
    return list(json.loads(output.output)["nftables"])


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


def _rules(chain: dict[str, Any]) -> list[dict[str, Any]]:
    listed = _listed("list", "chain", chain["family"], chain["table"], chain["name"])
    return [item["rule"] for item in listed if "rule" in item]


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
