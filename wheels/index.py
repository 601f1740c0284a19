"""Serve a given set of wheels over HTTP as a package index for pip (PEP 503).

The index is read-only. The server provides only the index's pages and the given wheels; requests for any other file
return status 404. Wheels are listed with their SHA-256, which pip verifies. Byte ranges are supported, so pip can
resume an interrupted download.

The server uses plain HTTP on one address. Use the server only on trusted networks.
"""

from __future__ import annotations

import contextlib
import email.parser
import functools
import re
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from werkzeug.exceptions import HTTPException, InternalServerError, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import redirect, send_file
from werkzeug.wrappers import Response

from toolchain import ports, progress
from toolchain.files import sha256_of
from wheels import find as wheels

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Offered = Callable[[], Mapping[str, Path]]
"""A function that returns the wheels to serve, by file name. It is called for every request."""

_IDLE_S = 60
"""The time after which idle connections are closed."""
_ONE_RANGE = re.compile(r"bytes\s*=[^,]*", re.IGNORECASE)
"""Matches the supported ranges. Other units must be ignored, and multiple ranges may be ignored (RFC 9110, 14.2)."""


class _Index:
    """The package index as a WSGI application."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._routes = Map(
            [
                Rule("/", endpoint=self._projects, methods=["GET"]),
                Rule("/simple/", endpoint=self._projects, methods=["GET"]),
                Rule("/simple/<name>/", endpoint=self._project, methods=["GET"]),
                Rule("/packages/<name>", endpoint=self._wheel, methods=["GET"]),
            ]
        )

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            endpoint, values = self._routes.bind_to_environ(environ).match()
            response: Response = endpoint(environ, **values)
        except HTTPException as fault:
            return fault(environ, start)
        return response(environ, start)

    def _projects(self, _: WSGIEnvironment) -> Response:
        names = sorted({_project_of(name) for name in self._offered()})
        return _page("pitorch wheels", [(f"/simple/{quote(name)}/", name, "") for name in names])

    def _project(self, _: WSGIEnvironment, name: str) -> Response:
        normalised = canonicalize_name(name)
        if name != normalised:
            return redirect(f"/simple/{quote(normalised)}/", code=301)
        links = [
            (f"/packages/{quote(item)}#sha256={_sha256(path)}", item, _requires_python(path))
            for item, path in self._offered().items()
            if _project_of(item) == normalised
        ]
        if not links:
            raise NotFound(f"no wheel of {normalised}")
        return _page(f"wheels of {normalised}", links)

    def _wheel(self, environ: WSGIEnvironment, name: str) -> Response:
        path = self._offered().get(name)
        if path is None:
            raise NotFound("no such wheel")
        if environ["REQUEST_METHOD"] != "GET" or not _ONE_RANGE.fullmatch(environ.get("HTTP_RANGE", "")):
            # werkzeug would reject other ranges. The header is removed, so that werkzeug sends the complete file.
            environ = {key: value for key, value in environ.items() if key != "HTTP_RANGE"}
        return send_file(path, environ, mimetype="application/zip", conditional=True)


def wheels_in(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the wheels in the given folders by file name; subfolders and symbolic links are excluded.

    Of two wheels with the same name, the one in the earlier folder is used.
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
    """Return an HTML page of links, in the format of PEP 503.

    Each link has a URL, a name and a specifier for Python versions.
    """
    lines = [
        f'<a href="{escape(address)}"{f" data-requires-python={chr(34)}{escape(python)}{chr(34)}" if python else ""}>'
        f"{escape(text)}</a><br>"
        for address, text, python in links
    ]
    head = f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{escape(title)}</title></head><body>'
    return Response("\n".join([head, *lines, "</body></html>\n"]), mimetype="text/html")


def _sha256(path: Path) -> str:
    status = path.stat()
    return _cached_sha256(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1000)
def _cached_sha256(path: Path, size: int, time_ns: int) -> str:
    del size, time_ns  # the size and the time only distinguish entries of the cache
    return sha256_of(path)


def _requires_python(path: Path) -> str:
    """Return ``Requires-Python`` from a wheel's metadata, or an empty string if it is absent or unreadable."""
    with contextlib.suppress(OSError, StopIteration, *wheels.UNREADABLE), zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = email.parser.BytesHeaderParser().parsebytes(archive.read(name))
        return str(head.get("Requires-Python", ""))
    return ""


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def run_wsgi(self) -> None:
        """Reject requests whose URL werkzeug cannot parse."""
        try:
            super().run_wsgi()
        except ValueError:
            self.send_error(400)

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Print nothing, because ``_Log`` prints completed requests."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing, because ``_Log`` prints completed requests."""


class _Log:
    """WSGI middleware that prints a line for each completed request, and a progress bar while a wheel is sent.

    After an error, a warning is printed, and the client receives status 500 or an incomplete download.
    """

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        began = time.monotonic()
        head: dict[str, str] = {"status": "500"}

        def start_response(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            head.update({"status": status, **{name.lower(): value for name, value in headers}})
            return start(status, headers, *rest)

        try:
            body = self._application(environ, start_response)
        except Exception as fault:
            _warn(fault, environ)
            body = InternalServerError()(environ, start_response)
        return self._send(body, environ, head, began)

    def _send(
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
        except Exception as fault:
            _warn(fault, environ)
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                close()
            method = str(environ["REQUEST_METHOD"])
            incomplete = "" if method == "HEAD" or sent >= total else f" of {progress.human_size(total)}"
            progress.say(
                f"    {environ.get('REMOTE_ADDR', '')} {_printable(method)} {_printable(path)} "
                f"{head['status'][:3]} {progress.human_size(sent)}{incomplete}, {time.monotonic() - began:.1f} s"
            )


@contextlib.contextmanager
def running_index(offered: Offered, *, address: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve wheels while the block runs; yield the index's URL. With port 0, a free port is chosen.

    Raises InUse if the port is in use, or UserError if the address does not belong to this machine.
    """
    port = port or ports.free_port(address)
    ports.require_free(address, port, server="the package index", settings=["wheels.address", "wheels.port"])
    with socket.create_server((address, port)) as listener:
        application = _Log(_Index(offered))
        server = make_server(
            address,
            port,
            application,
            threaded=True,
            request_handler=_Handler,
            fd=listener.fileno(),
        )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="serve-wheels")
    thread.start()
    try:
        yield f"http://{address}:{server.port}/simple/"
    finally:
        server.shutdown()
        thread.join()


def instructions(url: str, names: Sequence[str], example: str) -> list[str]:
    """Return the list of wheels, and the commands that install the wheel ``example`` on a board.

    pip searches all its indices and selects the newest version, so the commands state the version of the wheel. If the
    default index has a newer version of a dependency only as source, pip would compile it on the board. With
    ``--prefer-binary``, pip selects a wheel, even of an older version, if the requirement permits it.
    """
    host = url.split("/")[2].rpartition(":")[0]
    project, version, *_ = parse_wheel_filename(example)
    only_this_index = f"--index-url {url} --trusted-host {host}"
    return [
        f"serving {len(names)} wheel{'s' if len(names) > 1 else ''} at {url}; press Ctrl-C to stop",
        *(f"    {name}" for name in names),
        "on the board, to install from this index only (dependencies come from apt):",
        "    python3 -m venv --system-site-packages --without-pip ~/venv",
        # The board's pip.conf may name a second index, as it does on Raspberry Pi OS. Without --ignore-installed, pip
        # would regard the requirement as satisfied by the torch in our image.
        f"    PIP_CONFIG_FILE=/dev/null ~/venv/bin/python -m pip install {only_this_index} "
        f"--no-deps --ignore-installed {project}=={version}",
        "or with dependencies from the board's default index, preferring wheels to newer source:",
        f"    ~/venv/bin/python -m pip install --extra-index-url {url} --trusted-host {host} "
        f"--prefer-binary {project}=={version}",
    ]


def _warn(fault: Exception, environ: WSGIEnvironment) -> None:
    path = str(environ.get("PATH_INFO", ""))
    progress.warn(f"{_printable(path)} cannot be served: {_printable(f'{type(fault).__name__}: {fault}')}")


def _printable(text: str) -> str:
    """Escape unprintable text in a request, so that clients cannot write control sequences to this terminal."""
    return text if text.isprintable() else ascii(text)
