"""Determine the address at which boards reach this PC."""

from __future__ import annotations

import ipaddress
import json
import socket

from toolchain import process
from toolchain.config import Config
from toolchain.errors import NetworkUnreachable


def subnet_of(config: Config) -> ipaddress.IPv4Network:
    """Return the board's subnet."""
    return ipaddress.IPv4Network(config.nfs.subnet)


def own_addresses() -> dict[ipaddress.IPv4Address, str]:
    """Return this machine's IPv4 addresses, with their interfaces."""
    listed = json.loads(process.output_of(["ip", "-j", "-4", "address", "show"]) or "[]")
    return {
        ipaddress.IPv4Address(item["local"]): link["ifname"]
        for link in listed
        for item in link.get("addr_info", ())
        if "local" in item
    }


def server_address(config: Config) -> str:
    """Return the address at which boards reach this PC.

    Return ``nfs.address`` if it is set. Otherwise, return this machine's address in the board's subnet or, if it has
    none, the source address of the route to that subnet. Raises NetworkUnreachable if there is no such route.
    """
    if config.nfs.address:
        return config.nfs.address
    subnet = subnet_of(config)
    for address in own_addresses():
        if address in subnet:
            return str(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket only looks up the route; no packet is sent.
            probe.connect((str(subnet.network_address + 1), 9))
        except OSError as fault:
            raise NetworkUnreachable(
                "cannot determine the address at which boards reach this PC",
                expected=f"an address of this machine in {subnet}, or a route to that subnet",
                found=str(fault.strerror),
                fix="set nfs.address in invoke.yaml (or INVOKE_NFS_ADDRESS) to an address that boards can reach",
            ) from fault
        return str(probe.getsockname()[0])
