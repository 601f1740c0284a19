"""``serve-wheels``: the wheels that are at hand, as a package index for the board's pip (PEP 503).

What is offered is the wheelhouse, the torch that the image would get (recipes.torch.resolve), wherever that lies, and
TVM's FFI likewise. Of the torch wheels that fit the image the others are left out: pip would take the newest, and the
board would run another torch than the image.

Nothing can be changed through it, and nothing is handed out but what is offered: a request names one of these wheels,
or gets 404, so no path leads elsewhere. Wheels are listed with their SHA-256, which pip checks, and sent in ranges
where asked (werkzeug), so a download that broke off goes on. This PC needs no root for it.

The server listens on the one address that the board reaches this PC at, and speaks plain HTTP: keep it on a network
that you trust, as the NFS server is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.parser
import functools
import re
import socketserver
import threading
import time
import wsgiref.simple_server
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from werkzeug.exceptions import HTTPException, InternalServerError, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.utils import redirect, send_file
from werkzeug.wrappers import Response

from images.flavour import load_suite
from nfsroot.serve import require_free, stopped_by_signals
from recipes.torch import resolve
from recipes.tvm_ffi import locate as tvm_ffi
from recipes.wheelhouses import wheelhouses
from toolchain import progress
from toolchain.addresses import server_address
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ServerFailed, UserError
from toolchain.files import sha256_of
from wheels import find as wheels

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_IDLE_S = 60.0
"""A client that sends nothing for so long is hung up on."""
_ONE_RANGE = re.compile(r"bytes\s*=[^,]*", re.IGNORECASE)
"""What is answered in part. A range of other units must be ignored, and several of bytes may be (RFC 9110, 14.2)."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """How serving in the foreground ended."""

    url: str
    requests: int
    seconds: float


class _Index:
    """The index as a WSGI application: pages made from what is offered now, and the wheels themselves."""

    def __init__(self, offered: Callable[[], Mapping[str, Path]]) -> None:
        self._offered = offered
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
        names = sorted({_project_of(name) for name in self._offered()})
        # From / the same links hold: they begin at the root.
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
            raise NotFound(f"no wheel of {normalised} here")
        return _page(f"wheels of {normalised}", links)

    def _wheel(self, environ: WSGIEnvironment, name: str) -> Response:
        path = self._offered().get(name)
        if path is None:
            raise NotFound("no such wheel here")
        if environ["REQUEST_METHOD"] != "GET" or not _ONE_RANGE.fullmatch(environ.get("HTTP_RANGE", "")):
            # The whole file then; werkzeug would refuse.
            environ = {key: value for key, value in environ.items() if key != "HTTP_RANGE"}
        return send_file(path, environ, mimetype="application/zip", conditional=True)


def wheels_in(folders: Sequence[Path]) -> dict[str, Path]:
    """Wheels by file name: those in the folders, not below them, nor links to elsewhere.

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
    with contextlib.suppress(OSError, StopIteration, *wheels.UNREADABLE), zipfile.ZipFile(path) as archive:
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
    """One line per request when it has ended, and a bar while a wheel is on its way.

    What goes wrong meanwhile is a warning, and for the client status 500, or a download that breaks off.
    """

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self.count = 0

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        began = time.monotonic()
        head: dict[str, str] = {"status": "500"}

        def note(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            head.update({"status": status, **{name.lower(): value for name, value in headers}})
            return start(status, headers, *rest)

        try:
            body = self._application(environ, note)
        except Exception as fault:
            _warn_of(fault, environ)
            body = InternalServerError()(environ, note)
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
        except Exception as fault:
            _warn_of(fault, environ)
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                close()
            self.count += 1
            method = str(environ["REQUEST_METHOD"])
            whole = "" if method == "HEAD" or sent >= total else f" of {progress.human_size(total)}"
            progress.say(
                f"    {environ.get('REMOTE_ADDR', '')} {_printable(method)} {_printable(path)} "
                f"{head['status'][:3]} {progress.human_size(sent)}{whole}, {time.monotonic() - began:.1f} s"
            )


class Offer:
    """The wheels that there are for a configuration, by file name, whenever it is called.

    Which torch and which TVM's FFI these are is found out again when there are others to choose from: both are audited,
    which takes seconds. Making one raises as ``resolve.resolve`` and ``tvm_ffi.find`` do for wheels that are damaged or
    for another machine; such a one that comes later is a warning, and is not served.
    """

    def __init__(self, config: Config) -> None:
        # That an image may be refused for want of torch is no reason to serve nothing.
        self._config = dataclasses.replace(config, torch=dataclasses.replace(config.torch, required=False))
        self._lock = threading.Lock()
        self._listing = self._list()
        self.torch = resolve.resolve(self._config)
        """What the image would get, or why it would get none."""
        self._ffi = self._find_ffi()

    def __call__(self) -> dict[str, Path]:
        """What is served now."""
        with self._lock:
            listing = self._list()
            if listing != self._listing:
                self._choose_again()
                self._listing = listing
            taken = [path for path in (self.torch.wheel, self._ffi) if path is not None]
        chosen = [path for path in taken if not path.is_symlink()]  # the image may get what a link leads to, others not
        left_out = self._fitting_torch()
        found = {name: path for name, path in self._wheelhouses().items() if path not in left_out}
        return dict(sorted({**found, **{path.name: path for path in chosen}}.items()))

    @property
    def left_out(self) -> list[str]:
        """Names of wheelhouses' torch wheels that are not the image's."""
        served = self()
        return [path.name for path in self._fitting_torch() if served.get(path.name) != path]

    def _choose_again(self) -> None:
        try:
            self.torch = resolve.resolve(self._config)
        except UserError as fault:
            self.torch = resolve.Resolution(None, "", fault.summary)
            progress.warn(f"torch is not served: {fault.summary}")
        try:
            self._ffi = self._find_ffi()
        except UserError as fault:
            self._ffi = None
            progress.warn(f"TVM's FFI is not served from the artefact cache: {fault.summary}")

    def _find_ffi(self) -> Path | None:
        with contextlib.suppress(ArtefactMissing):
            return tvm_ffi.find(self._config)[0] if tvm_ffi.key(self._config) else None
        return None

    def _list(self) -> str:
        return f"{resolve.listing(self._config)}\n{tvm_ffi.listing(self._config)}"

    def _wheelhouses(self) -> dict[str, Path]:
        return wheels_in(wheelhouses(self._config))

    def _fitting_torch(self) -> list[Path]:
        image = self._config.image
        tags = wheels.tags_for(image.target, load_suite(image.suite))
        return [item.path for item in wheels.candidates(wheelhouses(self._config), "torch", tags)[0]]


@contextlib.contextmanager
def running_index(
    offered: Callable[[], Mapping[str, Path]], *, address: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[str, _Told]]:
    """Serve what is ``offered``, by file name, while the block runs; port 0 takes a free one.

    The index's URL, and who counts the requests.

    Raises PortTaken, or ServerFailed for an address that is not this machine's.
    """
    told = _Told(_Index(offered))
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
            fix="set wheels.address and wheels.port in invoke.yaml, or give --address and --port",
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
    with progress.step("look into the wheels"):
        offer = Offer(config)
    names = list(offer())
    if not names:
        raise ArtefactMissing(
            "there is no wheel to serve",
            expected="a torch wheel for the image, or any in "
            + ", ".join(str(folder) for folder in wheelhouses(config)),
            found=offer.torch.reason,
            fix="./inv build-torch or ./inv build-wheel NAME==VERSION makes one",
        )
    stop = stop or threading.Event()
    began = time.monotonic()
    shown = address or config.wheels.address or server_address(config)
    with (
        stopped_by_signals(stop),
        running_index(offer, address=shown, port=config.wheels.port if port is None else port) as (url, told),
    ):
        for line in (*what_to_type(url, names), *_of_torch(offer)):
            progress.say(line)
        while not stop.wait(0.5):
            pass
        progress.say("stopping the package index")
    return Served(url=url, requests=told.count, seconds=time.monotonic() - began)


def _of_torch(offer: Offer) -> list[str]:
    """What is not served though one may look for it."""
    if offer.torch.wheel is None:
        return [f"torch is not served: {offer.torch.reason}"]
    if offer.torch.wheel.is_symlink():
        return [f"torch is not served: {offer.torch.wheel} is a link to elsewhere; put the wheel itself there"]
    return [f"not served: {name}; the image's torch is {offer.torch.wheel.name}" for name in offer.left_out]


def what_to_type(url: str, names: Sequence[str]) -> list[str]:
    """The wheels that there are, and the board's commands.

    pip treats all indices as one and takes the newest version, so it would compile newer source of the usual index on
    the board. With ``--prefer-binary`` it takes a wheel that fits, however old, if the requirement allows that.
    """
    host = url.split("/")[2].rpartition(":")[0]
    wanted = "torch" if any(name.startswith("torch-") for name in names) else names[0].partition("-")[0]
    here = f"--index-url {url} --trusted-host {host}"
    return [
        f"serving {len(names)} wheel{'s' if len(names) > 1 else ''} at {url}; Ctrl-C ends it",
        *(f"    {name}" for name in names),
        "on the board, from here alone (what else a wheel needs comes from apt):",
        "    python3 -m venv --system-site-packages --without-pip ~/venv",
        # Our image has a torch of its own, which pip would take for what is wanted.
        f"    ~/venv/bin/python -m pip install {here} --no-deps --ignore-installed {wanted}",
        "or with what it needs from the board's usual index, wheels before newer source:",
        f"    ~/venv/bin/python -m pip install --extra-index-url {url} --trusted-host {host} --prefer-binary {wanted}",
    ]


def _warn_of(fault: Exception, environ: WSGIEnvironment) -> None:
    asked = str(environ.get("PATH_INFO", ""))
    progress.warn(f"{_printable(asked)} cannot be served: {_printable(f'{type(fault).__name__}: {fault}')}")


def _printable(text: str) -> str:
    """A text of a request as it may stand in a line: who asks cannot write escape sequences to this terminal."""
    return text if text.isprintable() else ascii(text)
