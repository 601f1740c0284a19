"""TVM's RPC server for the board, restarted when it fails. Requires only Python and TVM's runtime.

    python3 board_server.py --port 9090 [--host ADDRESS] [--tracker HOST:PORT --key KEY] [--custom-addr ADDRESS]
    python3 board_server.py --proxy HOST:PORT --key KEY          (the board connects to the proxy)
    python3 board_server.py --check                              (start, print the version, exit)

TVM's server (0.27) does not survive a kernel that crashes: the thread that accepts connections ends, but the process
and its port remain, and the next client waits forever. The same happens if the tracker is unreachable at the start.
This script therefore stops the server's process after an exception in any of its threads, and restarts it on the same
port.

There is no authentication: anyone who can reach the port can run code on the board. Listen on the loopback address
(the default) and connect through SSH, or use a private network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

PAUSE_S = 1.0
"""The delay in seconds before a restart, which limits how often an unreachable tracker is contacted."""


def _die_of_exceptions() -> None:
    """Make an exception in any thread end the process. The server's process calls this before it starts threads."""

    def end(fault: threading.ExceptHookArgs) -> None:
        traceback.print_exception(fault.exc_type, fault.exc_value, fault.exc_traceback)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, found {text!r}")
    return host, int(port)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run TVM's RPC server and restart it when it fails.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9090, help="port to listen on")
    parser.add_argument("--tracker", type=_address, help="HOST:PORT of the tracker that assigns this board to clients")
    parser.add_argument("--proxy", type=_address, help="HOST:PORT of a proxy to connect to, instead of listening")
    parser.add_argument(
        "--key", default="", help="name under which clients request the board from the tracker or proxy"
    )
    parser.add_argument("--custom-addr", help="address to report to the tracker, if it differs from --host")
    parser.add_argument("--check", action="store_true", help="start on any free port, print TVM's version, and exit")
    found = parser.parse_args(words)
    if (found.tracker or found.proxy) and not found.key:
        parser.error("--tracker and --proxy require --key")
    return found


def check() -> None:
    """Start a server, connect to it, stop it, and print TVM's version."""
    import tvm
    from tvm import rpc

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = rpc.Server("127.0.0.1", port, port_end=port + 1)
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    finally:
        server.terminate()
    print(f"pitorch: TVM {tvm.__version__} serves", flush=True)


def main() -> None:
    """Serve until SIGTERM."""
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    if options.check:
        check()
        return
    from tvm import rpc

    host, port = options.proxy or (options.host, options.port)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with contextlib.ExitStack() as stack:
                # The server creates each session's files there, and leaves them if the session's kernel crashes.
                os.environ["TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="pitorch-rpc-"))
                server = rpc.Server(
                    host,
                    port,
                    port_end=port + 1,
                    is_proxy=options.proxy is not None,
                    tracker_addr=options.tracker,
                    key=options.key,
                    custom_addr=options.custom_addr,
                    server_init_callback=_die_of_exceptions,
                )
                stack.callback(server.terminate)
                print(f"pitorch: serving at {host}:{port}", flush=True)
                server.proc.join()
            print("pitorch: the server exited and is being restarted", flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
