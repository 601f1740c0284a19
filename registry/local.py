"""Run Debian's ``docker-registry`` on this machine as a background process, for experiments and tests.

``start`` renders a configuration from ``registry.yml.j2``, starts ``docker-registry serve`` in a new session and waits
for the response to ``GET /v2/`` (distribution API specification). The folder ``registry/`` in the build folder contains
the registry's state file, log and images. ``down`` preserves the images.

The registry has no access control, and engines accept plain HTTP only on loopback addresses. The registry therefore
listens on the loopback address unless ``registry.address`` is an address of this machine. Tests call ``serve`` with
environment variables that enable TLS or access control.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

from toolchain import caller, files, ports, process, process_identity, templates
from toolchain.config import Config, split_registry
from toolchain.errors import RootNeeded, UserError

_START_LIMIT_S = 20.0
_RESPONSE_LIMIT_S = 5.0
_STOP_LIMIT_S = 10.0
_TAIL_LINES = 15
_PORT_LIMIT_S = 1.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A registry's settings."""

    folder: Path
    """The folder for the configuration, the state file, the log and the images."""
    host: str = _LOOPBACK
    port: int = 0
    """The TCP port; 0 selects a free one."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for docker-registry (``REGISTRY_HTTP_TLS_KEY``, for example), which override its configuration."""

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings for the configured address if it is this machine's, otherwise for 127.0.0.1:5000.

        Host names other than localhost are treated as other machines.
        """
        host, port = split_registry(config.registry.address)
        folder = config.build_root / "registry"
        if host == "localhost":
            return cls(folder=folder, port=port or 80)
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.is_loopback or ports.bind_fault(host, 0) is None:
                return cls(folder=folder, host=host, port=port or 80)
        return cls(folder=folder, port=5000)

    def authority(self, port: int) -> str:
        """Return HOST:PORT, as in a URL."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def log(self) -> Path:
        """The file with the registry's output, including the access log."""
        return self.folder / "registry.log"

    @property
    def state(self) -> Path:
        """The state file, which records the running registry's process and address."""
        return self.folder / "state.json"

    @property
    def configuration(self) -> Path:
        """The configuration file of ``docker-registry serve``."""
        return self.folder / "registry.yml"

    @property
    def images(self) -> Path:
        """The folder with the images."""
        return self.folder / "images"

    @property
    def certificate(self) -> str:
        """The path of the TLS certificate; empty for plain HTTP."""
        return self.variables.get("REGISTRY_HTTP_TLS_CERTIFICATE", "")


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The state of a registry. ``pid`` is 0 if the registry is not running."""

    address: str
    """HOST:PORT; empty if the registry is not running."""
    url: str
    pid: int
    settings: Settings

    @property
    def running(self) -> bool:
        """Whether the registry is running."""
        return self.pid != 0


def down(settings: Settings, *, purge: bool = False) -> Registry:
    """Stop the registry if it is running; with ``purge``, also delete its images."""
    stop(settings)
    if purge and settings.folder.is_dir():
        files.require_owned(settings.folder)
        files.remove(settings.folder)
    return look(settings)


@contextlib.contextmanager
def serve(settings: Settings) -> Iterator[Registry]:
    """Run a registry while the block runs."""
    try:
        yield start(settings)
    finally:
        stop(settings)


def start(settings: Settings) -> Registry:
    """Start the registry if it is not running, and wait until it responds.

    Raises ProgramMissing, InUse if the port is in use, UserError if the registry does not start, or RootNeeded if a
    registry that another user started must be stopped first.
    """
    program = process.require_program("docker-registry", "to run a local registry")
    with files.owned(settings.folder):
        running = _recorded(settings)
        if running is not None:
            # A running registry may be busy. It has as much time to respond as a new one, because stopping it would end
            # its transfers.
            if _is_at_configured_port(running, settings) and _responds(running, settings, limit_s=_START_LIMIT_S):
                return running
            _end(settings)
        port = settings.port or ports.free_port(settings.host)
        # After a registry is killed, its threads can keep the port open for a short time.
        ports.require_free(
            settings.host,
            port,
            server="the local registry",
            settings=["registry.address"],
            service="for Debian's own service: systemctl disable --now docker-registry",
            wait_s=_PORT_LIMIT_S,
        )
        _render(settings, port)
        return _start(program, settings, port)


def stop(settings: Settings) -> bool:
    """Stop the registry, and return whether it was running. Raises RootNeeded if another user started it."""
    if not settings.folder.is_dir():
        return False
    with files.owned(settings.folder):
        return _end(settings)


def look(settings: Settings) -> Registry:
    """Return the current state of the registry."""
    running = _recorded(settings)
    if running is not None and _responds(running, settings):
        return running
    return Registry(address="", url="", pid=0, settings=settings)


def _is_at_configured_port(running: Registry, settings: Settings) -> bool:
    return settings.port == 0 or running.address == settings.authority(settings.port)


def _start(program: Path, settings: Settings, port: int) -> Registry:
    address = settings.authority(port)
    scheme = "https" if settings.certificate else "http"
    # Remove inherited variables with this prefix, because they would override the configuration file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
    environment |= {"OTEL_TRACES_EXPORTER": "none", **settings.variables}
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
        started = process_identity.find(child.pid)
        running = Registry(address=address, url=f"{scheme}://{address}", pid=child.pid, settings=settings)
        deadline = time.monotonic() + _START_LIMIT_S
        while started is None or not _responds(running, settings):
            ended = child.poll()
            if ended is not None or time.monotonic() > deadline:
                raise _not_up(settings, address, ended, offset)
            time.sleep(0.05)
        state = {"process": process_identity.record(started), "address": address, "url": running.url}
        files.write_text_atomically(settings.state, json.dumps(state, indent=2) + "\n")
    except BaseException:
        child.kill()
        child.wait()
        raise
    # The registry outlives this process. A return code is set, because Popen would otherwise emit a ResourceWarning.
    child.returncode = 0
    return running


def _not_up(settings: Settings, address: str, ended: int | None, offset: int) -> UserError:
    with settings.log.open("rb") as stream:
        stream.seek(offset)
        lines = stream.read().decode(errors="replace").splitlines()
    tail = "\n".join(f"    {line[:300]}" for line in lines[-_TAIL_LINES:])
    how = f"no response after {_START_LIMIT_S:.0f} s" if ended is None else process.explain_exit(ended)
    return UserError(
        "the local registry did not start",
        expected=f"a response from {address}",
        found=f"{how}; the last lines of its log:\n{tail}",
        fix=f"find the cause in {settings.log}",
    )


def _render(settings: Settings, port: int) -> None:
    settings.images.mkdir(parents=True, exist_ok=True)
    text = templates.render(
        Path(__file__).with_name("registry.yml.j2"),
        {
            "address": settings.authority(port),
            "storage": str(settings.images.absolute()),
            "secret": _secret(settings),
        },
    )
    files.write_text_atomically(settings.configuration, text, mode=0o600)


def _secret(settings: Settings) -> str:
    """Return the secret with which the registry signs the state of uploads.

    The secret is stored, so that uploads survive a restart of the registry.
    """
    path = settings.folder / "secret"
    if not path.exists():
        files.write_text_atomically(path, secrets.token_hex(32), mode=0o600)
    return path.read_text()


def _recorded(settings: Settings) -> Registry | None:
    try:
        state = json.loads(settings.state.read_text())
        found = process_identity.find_recorded(state["process"])
        address, url = state["address"], state["url"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return Registry(address=address, url=url, pid=found.pid, settings=settings) if found else None


def _responds(registry: Registry, settings: Settings, *, limit_s: float = _RESPONSE_LIMIT_S) -> bool:
    session = requests.Session()
    session.trust_env = False
    with session, contextlib.suppress(OSError):  # the base class of requests' exceptions
        answer = session.get(f"{registry.url}/v2/", timeout=limit_s, verify=settings.certificate or True)
        version = answer.headers.get("Docker-Distribution-Api-Version", "")
        return answer.status_code in (200, 401) and version == "registry/2.0"
    return False


def _end(settings: Settings) -> bool:
    running = _recorded(settings)
    if running is not None:
        registry = process_identity.find(running.pid)
        for sign, wait_s in ((signal.SIGTERM, _STOP_LIMIT_S), (signal.SIGKILL, 5.0)):
            if registry is not None and process_identity.running(registry):
                try:
                    registry.send_signal(sign)
                except psutil.NoSuchProcess:
                    break
                except psutil.AccessDenied as fault:
                    raise RootNeeded(
                        "the local registry belongs to another user",
                        expected="a registry that this user started",
                        found=f"pid {registry.pid} of another user",
                        fix=f"run the task as that user or as root: {caller.as_root('./inv registry down')}",
                    ) from fault
                deadline = time.monotonic() + wait_s
                while process_identity.running(registry) and time.monotonic() < deadline:
                    time.sleep(0.02)
        if registry is not None and process_identity.running(registry):
            raise UserError(
                "the local registry did not stop",
                expected="the process to exit after SIGTERM or SIGKILL",
                found=f"pid {registry.pid} is still running",
                fix="check the output of dmesg: the process may be blocked on disk I/O",
            )
        with contextlib.suppress(ChildProcessError):
            os.waitpid(running.pid, os.WNOHANG)
    settings.state.unlink(missing_ok=True)
    return running is not None
