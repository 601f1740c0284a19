"""TCP ports for servers that are told theirs before they start."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 1024
_PORTS = 16384


def free_port(host: str = LOOPBACK) -> int:
    """A port of an address of this machine that nothing has.

    It is none of those that the kernel gives out by itself (ip(7): ip_local_port_range), as long as there are others:
    such a one may belong to any program, or to a connection, before the server listens there. Raises OSError for an
    address that is not this machine's.
    """
    end = _LOWEST
    with contextlib.suppress(OSError):  # no such file: of this kernel's own ports nothing is known
        end = int(_GIVEN_OUT.read_text().split()[0])
    first = max(_LOWEST, end - _PORTS)
    for _ in range(100 if first < end else 0):
        port = first + secrets.randbelow(end - first)
        with contextlib.suppress(_Taken):
            return _bound(host, port)
    return _bound(host, 0)


class _Taken(Exception):
    """A port that another program has, or that is kept from this user."""


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as fault:
            if port and fault.errno in (errno.EADDRINUSE, errno.EACCES):
                raise _Taken from fault
            raise
        return int(probe.getsockname()[1])
