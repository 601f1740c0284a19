"""TVM's RPC server, kept alive: what runs on a board. Needs Python and TVM's runtime, nothing of ours.

    python3 board_server.py --port 9090 [--host ADDRESS] [--tracker HOST:PORT --key KEY] [--custom-addr ADDRESS]
    python3 board_server.py --proxy HOST:PORT --key KEY          (the board dials out)
    python3 board_server.py --check                              (starts, says so, ends)

TVM's server (0.27) does not outlive a kernel that crashes: the thread that accepts connections ends, the process and
its port stay, and the next client waits for ever. The same happens when the tracker cannot be reached at the start. So
here an exception in any thread of the server ends its process, and this one starts it again, on the same port.

There is no authentication: whoever reaches the port runs code on the board. Listen on the loopback address (the
default) and go through SSH, or on a network that is yours alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
import traceback

PAUSE_S = 1.0
"""Between two lives: a tracker that is away is not called more often."""


def _die_of_exceptions() -> None:
    """Runs in the server's process, before its threads."""

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
    """The command line."""
    parser = argparse.ArgumentParser(description="TVM's RPC server, kept alive.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9090, help="port to listen on")
    parser.add_argument("--tracker", type=_address, help="HOST:PORT of the tracker that hands this board out")
    parser.add_argument("--proxy", type=_address, help="HOST:PORT of a proxy to dial out to, instead of listening")
    parser.add_argument("--key", default="", help="what clients ask the tracker or proxy for")
    parser.add_argument("--custom-addr", help="address to tell the tracker, where it differs")
    parser.add_argument("--check", action="store_true", help="start on any free port, tell TVM's version, and end")
    found = parser.parse_args(words)
    if (found.tracker or found.proxy) and not found.key:
        parser.error("--tracker and --proxy need a --key")
    return found


def check() -> None:
    """Start a server, connect to it, end it; tell TVM's version."""
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
    try:
        while True:
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
            print(f"pitorch: serving at {host}:{port}", flush=True)
            server.proc.join()
            print("pitorch: the server ended; it is started again", flush=True)
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        server.terminate()


if __name__ == "__main__":
    main()
