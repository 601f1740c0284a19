"""Choose and check TCP ports for servers."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from toolchain import process
from toolchain.errors import InUse, ProgramMissing, UserError

LOOPBACK = "127.0.0.1"

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 1024
_PORTS = 16384


def free_port(host: str = LOOPBACK) -> int:
    """Return a free port at an address of this machine.

    Ephemeral ports (ip(7): ip_local_port_range) are avoided if possible, because another program or connection could
    get such a port before the server listens. Raises OSError if the address does not belong to this machine.
    """
    end = _LOWEST
    with contextlib.suppress(OSError):  # without this file, the ephemeral ports are unknown
        end = int(_EPHEMERAL.read_text().split()[0])
    first = max(_LOWEST, end - _PORTS)
    for _ in range(100 if first < end else 0):
        port = first + secrets.randbelow(end - first)
        with contextlib.suppress(_Taken):
            return _bound(host, port)
    return _bound(host, 0)


class _Taken(Exception):
    """Another program uses the port, or this user is not permitted to listen on the port."""


def _bound(host: str, port: int) -> int:
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError as fault:
            if port and fault.errno in (errno.EADDRINUSE, errno.EACCES):
                raise _Taken from fault
            raise
        return int(probe.getsockname()[1])


def require_free(
    address: str, port: int, *, server: str, settings: Sequence[str], service: str = "", wait_s: float = 0.0
) -> None:
    """Raise InUse if another program listens on the port, or UserError if this user cannot listen there.

    ``settings`` lists the names of the settings that contain the address and the port; the setting for the port is the
    last. ``service`` names a service that often uses the port, and the command that stops it. If the port is in use,
    the function waits up to ``wait_s`` seconds until it is free. Also raises UserError for a port out of range.
    """
    if not 0 < port < 65536:
        raise UserError(
            f"{server} cannot listen on port {port}",
            expected="a TCP port from 1 to 65535",
            found=f"{port}",
            fix=f"pass another --port, or omit --port to use {settings[-1]}",
        )
    deadline = time.monotonic() + wait_s
    while (fault := bind_fault(address, port)) is not None:
        if fault.errno != errno.EADDRINUSE:
            raise UserError(
                f"{server} cannot listen on {address}:{port}",
                expected="an address of this machine, and a port that this user may listen on",
                found=fault.strerror or str(fault),
                fix=f"set {' and '.join(settings)} in invoke.yaml to an address that `ip address` lists and to a port "
                "above 1023",
            ) from fault
        if time.monotonic() >= deadline:
            hint = f" ({service})" if service else ""
            raise InUse(
                f"port {port} is in use",
                expected=f"no program listening on {address}:{port}",
                found=_listener(port),
                fix=f"stop the program that uses the port{hint}, or set {settings[-1]} to a free port",
            ) from fault
        time.sleep(0.05)


def bind_fault(address: str, port: int) -> OSError | None:
    """Return the error that a server would get if it used this address and port, or None. Port 0 means any port."""
    with socket.socket(_family(address)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as fault:
            return fault
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def accepts(address: str, port: int, *, limit_s: float = 1.0) -> bool:
    """Return whether a server accepts TCP connections at this address and port."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=limit_s):
        return True
    return False


def is_ssh(address: str, port: int, *, limit_s: float) -> bool:
    """Return whether the server at this address and port identifies itself as an SSH server."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=limit_s) as link:
        return link.recv(64).startswith(b"SSH-")
    return False


def _listener(port: int) -> str:
    """Return a description of the program that listens on a port, as far as ss(8) can determine it."""
    with contextlib.suppress(ProgramMissing):
        listed = process.run(["ss", "-Hltnp", f"sport = :{port}"], check=False, limit_s=10).output.split()
        users = [word for word in listed if word.startswith("users:")]
        if users:
            return users[0].removeprefix("users:")
        if listed:
            return "the kernel (no process owns the socket)"
    return "another program"
