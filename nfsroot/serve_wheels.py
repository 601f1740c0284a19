"""``serve-wheels``: the wheelhouse as a package index for the board's pip (PEP 503).

Nothing can be changed through it, and nothing is handed out but the wheels that lie directly in the folders: a request
names one of them, or gets 404, so no path leads elsewhere. Wheels are listed with their SHA-256, which pip checks, and
sent in ranges where asked (werkzeug), so a download that broke off goes on. This PC needs no root for it.

The server listens on the one address that the board reaches this PC at, and speaks plain HTTP: keep it on a network
that you trust, as the NFS server is.
"""

from __future__ import annotations

import contextlib
import email.parser
import functools
import socketserver
import threading
import time
import wsgiref.simple_server
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.utils import redirect, send_file
from werkzeug.wrappers import Response

from nfsroot.addresses import server_address
from nfsroot.serve import require_free, stopped_by_signals
from recipes.torch import resolve
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ServerFailed
from toolchain.files import sha256_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_IDLE_S = 60.0
"""A client that sends nothing for so long is hung up on."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """How serving in the foreground ended."""

    url: str
    requests: int
    seconds: float


class _Index:
    """The index as a WSGI application: pages made from what lies in the folders now, and the wheels themselves."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._routes = Map(
            [
                Rule("/", endpoint="projects", methods=["GET"]),
                Rule("/simple/", endpoint="projects", methods=["GET"]),
                Rule("/simple/<name>/", endpoint="project", methods=["GET"]),
                Rule("/packages/<name>", endpoint="wheel", methods=["GET"]),
            ]
        )

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            endpoint, values = self._routes.bind_to_environ(environ).match()
            answer = getattr(self, f"_{endpoint}")(environ, **values)
        except HTTPException as fault:
            return fault(environ, start)
        return cast("Iterable[bytes]", answer(environ, start))

    def _projects(self, _: WSGIEnvironment) -> Response:
        names = sorted({_project_of(name) for name in wheels_in(self._folders)})
        # From / the same links hold: they begin at the root.
        return _page("pitorch wheels", [(f"/simple/{quote(name)}/", name, "") for name in names])

    def _project(self, _: WSGIEnvironment, name: str) -> Response:
        normalised = canonicalize_name(name)
        if name != normalised:
            return redirect(f"/simple/{quote(normalised)}/", code=301)
        links = [
            (f"/packages/{quote(item)}#sha256={_sha256(path)}", item, _requires_python(path))
            for item, path in wheels_in(self._folders).items()
            if _project_of(item) == normalised
        ]
        if not links:
            raise NotFound(f"no wheel of {normalised} here")
        return _page(f"wheels of {normalised}", links)

    def _wheel(self, environ: WSGIEnvironment, name: str) -> Response:
        path = wheels_in(self._folders).get(name)
        if path is None:
            raise NotFound("no such wheel here")
        return send_file(path, environ, mimetype="application/zip", conditional=True)


def wheels_in(folders: Sequence[Path]) -> dict[str, Path]:
    """The wheels that are served, by file name: those in the folders, not below them, nor links to elsewhere.

    Of two with the same name it is the first folder's.
    """
    found: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.whl"))):
        with contextlib.suppress(InvalidWheelFilename):
            parse_wheel_filename(path.name)
            if path.is_file() and not path.is_symlink():
                found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def _project_of(name: str) -> str:
    return str(parse_wheel_filename(name)[0])


def _page(title: str, links: Sequence[tuple[str, str, str]]) -> Response:
    """A page of PEP 503: links, each with its text and the Python versions that it is for."""
    lines = [
        f'<a href="{escape(address)}"{f" data-requires-python={chr(34)}{escape(python)}{chr(34)}" if python else ""}>'
        f"{escape(text)}</a><br>"
        for address, text, python in links
    ]
    head = f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{escape(title)}</title></head><body>'
    return Response("\n".join([head, *lines, "</body></html>\n"]), mimetype="text/html")


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_then(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1000)
def _sha256_then(path: Path, size: int, time_ns: int) -> str:
    """Kept as long as size and time stamp stay."""
    del size, time_ns
    return sha256_of(path)


def _requires_python(path: Path) -> str:
    """``Requires-Python`` of a wheel's metadata; empty where it states none, or cannot be read."""
    with contextlib.suppress(OSError, zipfile.BadZipFile, StopIteration), zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = email.parser.BytesHeaderParser().parsebytes(archive.read(name))
        return str(head.get("Requires-Python", ""))
    return ""


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
    """One line per request when it has ended, and a bar while a wheel is on its way."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self.count = 0

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        began = time.monotonic()
        head: dict[str, str] = {"status": "500"}

        def note(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            head.update({"status": status, **{name.lower(): value for name, value in headers}})
            return start(status, headers, *rest)

        body = self._application(environ, note)
        return self._passed_on(body, environ, head, began)

    def _passed_on(
        self, body: Iterable[bytes], environ: WSGIEnvironment, head: dict[str, str], began: float
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


@contextlib.contextmanager
def running_index(folders: Sequence[Path], *, address: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, _Told]]:
    """Serve while the block runs; port 0 takes a free one. The index's URL, and who counts the requests.

    Raises PortTaken, or ServerFailed for an address that is not this machine's.
    """
    told = _Told(_Index(folders))
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
    names = list(wheels_in(folders))
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
