"""``serve-wheels``: the wheelhouse as a package index for the board's pip (PEP 503).

pypiserver makes the index and hands out the files, byte ranges included; it is asked to read only, and it is shown
nothing but the wheels that lie directly in the folders: a request names one of them, or gets 404, so no path leads
elsewhere. Files are listed with their SHA-256, which pip checks. The board needs no account and this PC no root.

The server listens on the one address that the board reaches this PC at, and speaks plain HTTP: keep it on a network
that you trust, as the NFS server is.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pypiserver
from pypiserver.backend import BackendProxy, SimpleFileBackend
from pypiserver.core import PkgFile

from nfsroot.addresses import server_address
from nfsroot.serve import require_free, stopped_by_signals
from recipes.torch import resolve
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ServerFailed

_IDLE_S = 60.0
"""A client that sends nothing for so long is hung up on."""

Start = Callable[..., Any]
Application = Callable[[dict[str, Any], Start], Iterable[bytes]]


@dataclass(frozen=True, kw_only=True)
class Served:
    """How serving in the foreground ended."""

    url: str
    requests: int
    seconds: float


class _Wheels(SimpleFileBackend):  # type: ignore[misc]  # pypiserver has no types
    """The wheels in some folders, not below them; of two with the same name the first folder's."""

    def get_all_packages(self) -> Iterator[PkgFile]:
        seen: set[str] = set()
        for root in self.roots:
            with contextlib.suppress(FileNotFoundError):
                for path in sorted(root.glob("*.whl")):
                    parts = path.name.split("-")
                    if path.name not in seen and len(parts) in (5, 6) and path.is_file() and not path.is_symlink():
                        seen.add(path.name)
                        yield PkgFile(parts[0], parts[1], fn=str(path), root=str(root), relfn=path.name)


class _Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no fault of ours; anything else is told in its request's line."""


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = int(_IDLE_S)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Requests are told by ``_Told``, when they have ended."""

    def address_string(self) -> str:
        """As it is: looking up the board's name could take seconds."""
        return str(self.client_address[0])


class _Told:
    """One line per request when it has ended, and a bar while a wheel is on its way; reading is all that is allowed."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.count = 0

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        began = time.monotonic()
        head: dict[str, str] = {"status": "500"}

        def note(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            head.update({"status": status, **{name.lower(): value for name, value in headers}})
            return start(status, headers, *rest)

        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            body = self._application(environ, note)
        else:
            note("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            body = []
        return self._passed_on(body, environ, head, began)

    def _passed_on(
        self, body: Iterable[bytes], environ: dict[str, Any], head: dict[str, str], began: float
    ) -> Iterator[bytes]:
        total = int(head.get("content-length") or 0)
        sent = 0
        path = str(environ.get("PATH_INFO", ""))
        try:
            with contextlib.ExitStack() as stack:
                bar = None
                if path.startswith("/packages/") and head["status"][:3] in ("200", "206"):
                    bar = stack.enter_context(progress.bar(path.rpartition("/")[2], total=total, in_bytes=True))
                for block in body:
                    yield block
                    sent += len(block)
                    if bar is not None:
                        bar.update(sent)
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                close()
            self.count += 1
            whole = "" if environ["REQUEST_METHOD"] == "HEAD" or sent >= total else f" of {progress.human_size(total)}"
            progress.say(
                f"    {environ.get('REMOTE_ADDR', '')} {environ['REQUEST_METHOD']} {_printable(path)} "
                f"{head['status'][:3]} {progress.human_size(sent)}{whole}, {time.monotonic() - began:.1f} s"
            )


def folders_of(config: Config) -> list[Path]:
    """Where wheels are served from: the wheelhouse, what build-torch made, and what is kept in this repository."""
    return [folder.resolve() for folder in (*resolve.wheelhouses(config), resolve.products(config), resolve.PREBUILT)]


def application(folders: Sequence[Path]) -> Application:
    """The index of the wheels in some folders, as a WSGI application that can only be read from."""
    made = pypiserver.app(
        roots=list(folders),
        # Nobody may change anything; that there is no password file is how pypiserver is told so.
        authenticate=["update"],
        password_file=None,
        disable_fallback=True,
        hash_algo="sha256",
        welcome_msg="pitorch wheels: /simple/ is the index for pip",
    )
    made._pypiserver_config.backend = BackendProxy(_Wheels(made._pypiserver_config))
    return cast("Application", made)


def names_in(folders: Sequence[Path]) -> list[str]:
    """File names of the wheels that are served, sorted."""
    found = {path.name for folder in folders if folder.is_dir() for path in folder.glob("*.whl") if path.is_file()}
    return sorted(found)


@contextlib.contextmanager
def running_index(folders: Sequence[Path], *, address: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, _Told]]:
    """Serve while the block runs; port 0 takes a free one. The index's URL, and who counts the requests.

    Raises PortTaken, or ServerFailed for an address that is not this machine's.
    """
    told = _Told(application(folders))
    with _listening(address, port) as server:
        server.set_app(told)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="serve-wheels")
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}/simple/", told
        finally:
            server.shutdown()
            thread.join()


def _listening(address: str, port: int) -> _Server:
    if port:
        require_free(address, port, server="the package index", section="wheels")
    try:
        return _Server((address, port), _Handler)
    except OSError as fault:
        raise ServerFailed(
            f"the package index cannot listen on {address}:{port}",
            expected="an address of this machine, and a port that this user may listen on",
            found=fault.strerror or str(fault),
            mend="set wheels.address and wheels.port in invoke.yaml, or give --address and --port",
        ) from fault


def serve_wheels(
    config: Config,
    *,
    address: str | None = None,
    port: int | None = None,
    stop: threading.Event | None = None,
) -> Served:
    """Serve the wheels in the foreground until Ctrl-C, SIGTERM, a dropped terminal, or ``stop``.

    Says what to type on the board, then one line per request. Raises ArtefactMissing when there is no wheel, and what
    ``running_index`` raises.
    """
    folders = folders_of(config)
    names = names_in(folders)
    if not names:
        raise ArtefactMissing(
            "there is no wheel to serve",
            expected="a wheel in " + ", ".join(str(folder) for folder in folders),
            found="none",
            mend="./inv build-torch or ./inv build-wheel NAME==VERSION makes one",
        )
    stop = stop or threading.Event()
    began = time.monotonic()
    shown = address or config.wheels.address or server_address(config)
    with (
        stopped_by_signals(stop),
        running_index(folders, address=shown, port=config.wheels.port if port is None else port) as (url, told),
    ):
        for line in what_to_type(url, names):
            progress.say(line)
        while not stop.wait(0.5):
            pass
        progress.say("stopping the package index")
    return Served(url=url, requests=told.count, seconds=time.monotonic() - began)


def what_to_type(url: str, names: Sequence[str]) -> list[str]:
    """The wheels that there are, and the board's commands."""
    host = url.split("/")[2].rpartition(":")[0]
    wanted = "torch" if any(name.startswith("torch-") for name in names) else names[0].partition("-")[0]
    here = f"--index-url {url} --trusted-host {host}"
    return [
        f"serving {len(names)} wheel{'s' if len(names) > 1 else ''} at {url}; Ctrl-C ends it",
        *(f"    {name}" for name in names),
        "on the board, from here alone (what else a wheel needs comes from apt):",
        "    python3 -m venv --system-site-packages ~/venv",
        f"    ~/venv/bin/pip install {here} --no-deps {wanted}",
        "or with what it needs from the board's usual index:",
        f"    ~/venv/bin/pip install {here.replace('--index-url', '--extra-index-url')} {wanted}",
    ]


def _printable(path: str) -> str:
    """A path as it may stand in a line: whoever asks cannot write escape sequences to this terminal."""
    return path if path.isprintable() else ascii(path)
