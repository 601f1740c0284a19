"""TVM's servers on this PC: a tracker, a proxy, and RPC servers that represent boards.

Each server runs in a separate process. The server is ready when its ``with`` block starts, and stops at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from waiting import eventually

from device.remote.environment import TvmEnvironment
from recipes.tvm_server.build import SERVER
from toolchain import ports, process

HOST = "127.0.0.1"
_START_LIMIT_S = 180.0


@dataclass(frozen=True)
class Running:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    output: tempfile._TemporaryFileWrapper[bytes]

    def log(self) -> str:
        """The output of the server so far."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


@contextlib.contextmanager
def tracker(environment: TvmEnvironment) -> Iterator[Running]:
    """Run a tracker, which assigns boards to clients by key."""
    port = ports.free_port(HOST)
    words = ["--host", HOST, "--port", str(port), "--port-end", str(port + 1)]
    with _running(environment, ["-m", "tvm.exec.rpc_tracker"], words, port) as server:
        yield server


@contextlib.contextmanager
def proxy(environment: TvmEnvironment, tracker_port: int = 0) -> Iterator[Running]:
    """Run a proxy for boards. If a tracker is given, the proxy registers the boards' keys there."""
    port, web = ports.free_port(HOST), ports.free_port(HOST)
    words = ["--host", HOST, "--port", str(port), "--port-end", str(port + 1), "--web-port", str(web)]
    words += ["--tracker", f"{HOST}:{tracker_port}"] if tracker_port else []
    with _running(environment, ["-m", "tvm.exec.rpc_proxy"], words, port) as server:
        yield server


@contextlib.contextmanager
def board(
    environment: TvmEnvironment, *, key: str = "", tracker_port: int = 0, proxy_port: int = 0
) -> Iterator[Running]:
    """Run an RPC server that acts as a board: direct, registered with a tracker, or connected to a proxy.

    If both ports are given, the proxy registers the board with the tracker.
    """
    port = 0 if proxy_port else ports.free_port(HOST)
    words = ["--key", key] if key else []
    words += ["--proxy", f"{HOST}:{proxy_port}"] if proxy_port else ["--port", str(port)]
    if tracker_port and not proxy_port:
        words += ["--tracker", f"{HOST}:{tracker_port}", "--custom-addr", HOST]
    with _running(environment, [str(SERVER)], words, port, (tracker_port, key)) as server:
        yield server


@contextlib.contextmanager
def _running(
    environment: TvmEnvironment, program: list[str], words: list[str], port: int, tracked: tuple[int, str] = (0, "")
) -> Iterator[Running]:
    """Run a server. ``tracked`` is the tracker's port and the server's key; the port is 0 if there is no tracker."""
    with tempfile.NamedTemporaryFile() as output:
        started = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", sys.executable, *program, *words],
            env={**os.environ, **environment.variables, "TVM_USE_RUNTIME_LIB": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Running(port, started, output)
        try:
            with process.on_interrupt(lambda: process.end_group(started)):
                eventually(lambda: _is_ready(server, *tracked), server.log, limit_s=_START_LIMIT_S, task=started)
                yield server
        finally:
            process.end_group(started)


def _is_ready(server: Running, tracker_port: int, key: str) -> bool:
    # A connection without a request would make a board's server register with the tracker again. Clients that request
    # the board at that time fail, because the tracker does not know the key.
    if tracker_port:
        boards = _boards_of(tracker_port)
        return any(key in board["key"] and server.port in (0, board["addr"][1]) for board in boards)
    return ports.accepts(HOST, server.port) if server.port else "pitorch: serving" in server.log()


def _boards_of(tracker_port: int) -> list[dict[str, Any]]:
    """The boards and proxies that are registered with a tracker (tvm/rpc/base.py: magic number and code SUMMARY)."""
    with socket.create_connection((HOST, tracker_port), timeout=60) as link, link.makefile("rwb", 0) as stream:
        stream.write(struct.pack("<i", 0x2F271))
        stream.read(4)
        stream.write(struct.pack("<i", 3) + b"[6]")
        (size,) = struct.unpack("<i", stream.read(4))
        found = b""
        while len(found) < size:
            part = stream.read(size - len(found))
            assert part, "the tracker closed the connection"
            found += part
    boards: list[dict[str, Any]] = json.loads(found)[1]["server_info"]
    return boards
