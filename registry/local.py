"""A registry on this machine, for trying out and for tests: Debian's ``docker-registry``, run detached.

``up`` renders a configuration from ``registry.yml.j2``, starts ``docker-registry serve`` in a session of its own and
waits until it answers the protocol's version check (``GET /v2/``, distribution API specification). Its record, log
and images stay in ``registry/`` of the build folder, so ``down`` and a later ``up`` lose nothing.

It listens where ``registry.address`` says, if that is an address of this machine: on the loopback one unless another
is asked for there, since it lets anybody in, and engines accept plain HTTP on the loopback only. The tests use
``serve`` for registries with TLS, passwords, token authentication or a storage of their choice.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

from toolchain import files, ports, process, process_identity, templates
from toolchain.config import Config, split_registry
from toolchain.errors import ServerFailed

_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 10.0
_TAIL_LINES = 15
_PORT_LIMIT_S = 1.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class TokenService:
    """Where a registry with token authentication sends its clients, and whose tokens it believes."""

    realm: str
    """URL of the token server."""
    service: str
    issuer: str
    certificate: Path
    """PEM certificate of the key that signs the tokens."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a registry is run."""

    folder: Path
    """Holds the configuration, the record, the log and, unless ``storage`` says otherwise, the images."""
    host: str = _LOOPBACK
    port: int = 0
    """TCP port; 0: any free one."""
    storage: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    htpasswd: Path | None = None
    """bcrypt entries only."""
    token: TokenService | None = None

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The one that ``up`` runs: at the configured address if that is this machine's, else loopback, port 5000.

        A name is another machine's: only a number says which of this machine's addresses is meant.
        """
        host, port = split_registry(config.registry.address)
        folder = config.build_root / "registry"
        if host == "localhost":
            return cls(folder=folder, port=port or 80)
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.is_loopback or _bind_fault(host, 0) is None:
                return cls(folder=folder, host=host, port=port or 80)
        return cls(folder=folder, port=5000)

    def authority(self, port: int) -> str:
        """HOST:PORT, as it stands in a URL."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def log(self) -> Path:
        """What the registry prints, access log included."""
        return self.folder / "registry.log"

    @property
    def state(self) -> Path:
        """The record of the running process."""
        return self.folder / "state.json"

    @property
    def configuration(self) -> Path:
        """What ``docker-registry serve`` reads."""
        return self.folder / "registry.yml"

    @property
    def images(self) -> Path:
        """Where the images lie."""
        return self.storage or self.folder / "images"


@dataclass(frozen=True, kw_only=True)
class Registry:
    """A registry that answers, or (without a pid) one that does not run."""

    address: str
    """HOST:PORT; empty when it does not run."""
    url: str
    pid: int
    settings: Settings
    started_now: bool = False

    @property
    def running(self) -> bool:
        """Whether it answered."""
        return self.pid != 0


def up(config: Config) -> Registry:
    """Start the local registry, or find it running; it has answered when this returns.

    Raises ProgramMissing, or ServerFailed (port taken, did not come up).
    """
    return start(Settings.of(config))


def down(config: Config, *, purge: bool = False) -> Registry:
    """Stop it; with ``purge`` its images are deleted as well. Nothing to stop is fine."""
    settings = Settings.of(config)
    stop(settings)
    if purge and settings.folder.is_dir():
        files.require_owned(settings.folder)
        files.remove(settings.folder)
    return look(settings)


def status(config: Config) -> Registry:
    """What runs now, found out by asking it."""
    return look(Settings.of(config))


@contextlib.contextmanager
def serve(settings: Settings) -> Iterator[Registry]:
    """A registry for the length of a block."""
    try:
        yield start(settings)
    finally:
        stop(settings)


def start(settings: Settings) -> Registry:
    """``up`` for given settings."""
    program = process.require_program("docker-registry", "to run a local registry")
    with _locked(settings):
        running = _recorded(settings)
        if running is not None and _answers(running, settings) and _where_wanted(running, settings):
            return running
        if running is not None:
            _end(settings)
        port = settings.port or ports.free_port(settings.host)
        _refuse_taken(settings.host, port)
        _render(settings, port)
        return _start(program, settings, port)


def stop(settings: Settings) -> bool:
    """``down`` for given settings; returns whether one was running."""
    if not settings.folder.is_dir():
        return False
    with _locked(settings):
        return _end(settings)


def look(settings: Settings) -> Registry:
    """``status`` for given settings."""
    running = _recorded(settings)
    if running is not None and _answers(running, settings):
        return running
    return Registry(address="", url="", pid=0, settings=settings)


def _where_wanted(running: Registry, settings: Settings) -> bool:
    return settings.port == 0 or running.address == settings.authority(settings.port)


def _start(program: Path, settings: Settings, port: int) -> Registry:
    address = settings.authority(port)
    scheme = "https" if settings.certificate else "http"
    # The registry takes any setting from variables of this prefix; a stray one would override the file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
    environment["OTEL_TRACES_EXPORTER"] = "none"
    offset = settings.log.stat().st_size if settings.log.exists() else 0
    with settings.log.open("ab") as log:
        child = subprocess.Popen(
            [program, "serve", settings.configuration],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=settings.folder,
            env=environment,
            start_new_session=True,
        )
    try:
        recorded = process_identity.find(child.pid)
        running = Registry(
            address=address, url=f"{scheme}://{address}", pid=child.pid, settings=settings, started_now=True
        )
        deadline = time.monotonic() + _START_LIMIT_S
        while recorded is None or not _answers(running, settings):
            ended = child.poll()
            if ended is not None or time.monotonic() > deadline:
                raise _not_up(settings, address, ended, offset)
            time.sleep(0.05)
        state = {"process": process_identity.record(recorded), "address": address, "url": running.url}
        files.write_text_atomically(settings.state, json.dumps(state, indent=2) + "\n")
    except BaseException:
        child.kill()
        child.wait()
        raise
    # Detached on purpose: it outlives this process, which must not be told off for leaving a child.
    child.returncode = 0
    return running


def _not_up(settings: Settings, address: str, ended: int | None, offset: int) -> ServerFailed:
    with settings.log.open("rb") as stream:
        stream.seek(offset)
        lines = stream.read().decode(errors="replace").splitlines()
    tail = "\n".join(f"    {line[:300]}" for line in lines[-_TAIL_LINES:])
    how = f"no answer after {_START_LIMIT_S:.0f} s" if ended is None else process.explain_exit(ended)
    return ServerFailed(
        "the local registry did not come up",
        expected=f"an answer at {address}",
        found=f"{how}; its last lines:\n{tail}",
        fix=f"read {settings.log}",
    )


def _render(settings: Settings, port: int) -> None:
    settings.images.mkdir(parents=True, exist_ok=True)
    token = settings.token
    text = templates.render(
        Path(__file__).with_name("registry.yml.j2"),
        {
            "address": settings.authority(port),
            "storage": str(settings.images.absolute()),
            "secret": _secret(settings),
            "certificate": str(settings.certificate or ""),
            "key": str(settings.key or ""),
            "htpasswd": str(settings.htpasswd or ""),
            "token": {name: str(value) for name, value in asdict(token).items()} if token else None,
        },
    )
    files.write_text_atomically(settings.configuration, text, mode=0o600)


def _secret(settings: Settings) -> str:
    """Signs the state of running uploads: kept, so that an upload survives a restart of the registry."""
    path = settings.folder / "secret"
    if not path.exists():
        files.write_text_atomically(path, secrets.token_hex(32), mode=0o600)
    return path.read_text()


def _recorded(settings: Settings) -> Registry | None:
    try:
        state = json.loads(settings.state.read_text())
        recorded = process_identity.find_recorded(state["process"])
        if recorded is None:
            return None
        return Registry(address=state["address"], url=state["url"], pid=recorded.pid, settings=settings)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _answers(registry: Registry, settings: Settings) -> bool:
    session = requests.Session()
    session.trust_env = False
    verify = str(settings.certificate) if settings.certificate else True
    with session, contextlib.suppress(OSError):  # requests' own are among them
        answer = session.get(f"{registry.url}/v2/", timeout=5, verify=verify)
        spoken = answer.headers.get("Docker-Distribution-Api-Version", "")
        return answer.status_code in (200, 401) and spoken == "registry/2.0"
    return False


def _end(settings: Settings) -> bool:
    running = _recorded(settings)
    if running is not None:
        recorded = process_identity.find(running.pid)
        for sign, wait_s in ((signal.SIGTERM, _STOP_LIMIT_S), (signal.SIGKILL, 5.0)):
            if recorded is None or not process_identity.running(recorded):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(recorded.pid, sign)
            deadline = time.monotonic() + wait_s
            while process_identity.running(recorded) and time.monotonic() < deadline:
                time.sleep(0.02)
        if recorded is not None and process_identity.running(recorded):
            raise ServerFailed(
                "the local registry does not end",
                expected="an end after SIGTERM, or by SIGKILL",
                found=f"pid {recorded.pid} still runs",
                fix="it waits for its disk: look at dmesg",
            )
        with contextlib.suppress(ChildProcessError):
            os.waitpid(running.pid, os.WNOHANG)
    settings.state.unlink(missing_ok=True)
    return running is not None


def _refuse_taken(host: str, port: int) -> None:
    deadline = time.monotonic() + _PORT_LIMIT_S
    while fault := _bind_fault(host, port):
        # The threads of a registry that was killed can hold the port for a moment longer than its pid.
        if fault.errno == errno.EADDRINUSE and time.monotonic() < deadline:
            time.sleep(0.05)
            continue
        debian = "; Debian's own service: systemctl disable --now docker-registry" if port == 5000 else ""
        raise ServerFailed(
            f"the local registry cannot listen on {host}:{port}",
            expected="a free port that this user may listen on",
            found=os.strerror(fault.errno or 0),
            fix=f"stop what listens there (ss -ltnp 'sport = :{port}'{debian}), "
            "or set registry.address in invoke.yaml to another port",
        ) from fault


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bind_fault(host: str, port: int) -> OSError | None:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as fault:
            return fault
    return None


@contextlib.contextmanager
def _locked(settings: Settings) -> Iterator[None]:
    """One task at a time starts or stops the registry."""
    files.require_owned(settings.folder)
    settings.folder.mkdir(parents=True, exist_ok=True)
    (settings.folder / files.MARKER).touch()
    with files.locked(settings.folder):
        yield
