"""Servers on the loopback interface that run during a block."""

from __future__ import annotations

import contextlib
import functools
import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Run a server in a thread, and close it at the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def answering(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    """Run an HTTP server; yield its port."""
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield server.server_port


@contextlib.contextmanager
def served(folder: Path, encoding: str = "") -> Iterator[str]:
    """Serve a folder over HTTP, with the given Content-Encoding; yield its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def end_headers(self) -> None:
            if encoding:
                self.send_header("Content-Encoding", encoding)
            super().end_headers()

    with answering(functools.partial(Quiet, directory=str(folder))) as port:
        yield f"http://127.0.0.1:{port}"
