"""TVM's servers on this PC: a tracker, a proxy, and RPC servers that represent boards.

Each server runs in a separate process. The server is ready when its ``with`` block starts, and stops at the end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

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
    """Run an RPC server that acts as a board: direct, registered with a tracker, or connected to a proxy."""
    port = 0 if proxy_port else ports.free_port(HOST)
    words = ["--key", key] if key else []
    words += ["--proxy", f"{HOST}:{proxy_port}"] if proxy_port else ["--port", str(port)]
    if tracker_port:
        words += ["--tracker", f"{HOST}:{tracker_port}", "--custom-addr", HOST]
    with _running(environment, [str(SERVER)], words, port) as server:
        yield server


@contextlib.contextmanager
def _running(environment: TvmEnvironment, program: list[str], words: list[str], port: int) -> Iterator[Running]:
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
                eventually(lambda: _answers(server), server.log, limit_s=_START_LIMIT_S, task=started)
                yield server
        finally:
            process.end_group(started)


def _answers(server: Running) -> bool:
    return ports.accepts(HOST, server.port) if server.port else "pitorch: serving" in server.log()
