"""The Docker engine: find the one that answers, start one where none does, stop only what was started here.

The order, each step tried by doing it:

1. ``DOCKER_HOST`` if it is set, else docker's current context, as for the docker program, else the default socket: an
   engine that answers is used as it is. One of another machine is refused: what a build mounts into its containers
   would be that machine's files.
2. Where systemd is the init (``/run/systemd/system`` exists, sd_booted(3)), it starts ``docker.service``.
3. Elsewhere (containers, CI) ``dockerd`` is started from here, in a session of its own so that it outlives the task.

What step 3 starts is recorded in ``engine/state.json`` in the build folder: pid, start time and boot id, which
together name one process for ever. ``down`` ends that process and no other; a ``dockerd`` that is not in the record
is refused.

``dockerd`` needs cgroup hierarchies. A systemd machine has them; in a bare container nobody mounted any, so step 3
does, in the way of the cgroupfs-mount package: the unified hierarchy unless controllers are bound to version 1.
"""

from __future__ import annotations

import contextlib
import grp
import http.client
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.context import ContextAPI
from docker.context.config import get_current_context_name, get_meta_file, get_tls_dir

from toolchain import caller, process, progress
from toolchain.config import Config
from toolchain.errors import (
    CommandFailed,
    EngineConfigUnusable,
    EngineUnavailable,
    ForeignFolder,
    ProgramMissing,
    ServerFailed,
)
from toolchain.files import locked, write_text_atomically

DEFAULT_HOST = "unix:///var/run/docker.sock"

_SYSTEMD_MARK = Path("/run/systemd/system")
_SYSTEM_PIDFILE = Path("/var/run/docker.pid")
_CGROUP = Path("/sys/fs/cgroup")
_PROXY_NAMES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
REFUSED_OR_GONE = (
    *(docker.errors.DockerException, requests.RequestException),
    *(urllib3.exceptions.HTTPError, http.client.HTTPException, ConnectionError),
)
"""What docker-py raises where an engine refuses, does not answer, or ends in the middle of an answer."""
SOCKS_MISSING = "Missing dependencies for SOCKS support"
"""What requests and pip say when the proxy speaks SOCKS and PySocks is not installed."""
SOCKS_FIX = "name an HTTP proxy in http_proxy and https_proxy, or install PySocks into .venv from a file"

_ABOUT_TLS = re.compile(r"HTTPS server|\bSSL|\bTLS|certificate")
"""What errors say where one side speaks TLS and the other does not, or does not let it in."""

_START_LIMIT_S = 60.0
_SYSTEMD_LIMIT_S = 120.0
_STOP_LIMIT_S = 30.0
_TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine that answers."""

    address: str
    """As DOCKER_HOST takes it."""
    version: str
    api_version: str
    storage_driver: str
    cgroup_version: str
    data_root: Path
    """The engine's folder for images."""
    started_here: bool
    """Whether ``down`` may stop it."""


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """A ``dockerd`` of ours: where it keeps its record, log and pid, and where it listens."""

    folder: Path
    host: str = DEFAULT_HOST
    exec_root: Path = Path("/var/run/docker")
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Daemon:
        """The one that ``ensure_running`` starts: default socket, default data root."""
        return cls(folder=config.build_root / "engine")

    @property
    def log(self) -> Path:
        """What dockerd prints."""
        return self.folder / "dockerd.log"

    @property
    def state(self) -> Path:
        """The record of the process that was started."""
        return self.folder / "state.json"

    @property
    def pidfile(self) -> Path:
        """Written when dockerd is executed."""
        return self.folder / "dockerd.pid"


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process, for ever: a pid is reused, a pid with its start time in a boot is not."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat, clock ticks since boot (proc(5))."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord | None:
        """Look a process up; None when it is gone or a zombie.

        A process whose first thread has ended is there until its others have too: they hold its files and its ports.
        """
        try:
            # The command's name, field 2, may itself hold spaces and brackets: split behind its last one.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] in "ZX" and int(fields[17]) <= 1:  # field 20, num_threads: the zombie alone is left
            return None
        return cls(pid=pid, start_ticks=int(fields[19]), boot_id=_boot_id())

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessRecord.of(self.pid) == self


class _ContextTls(docker.TLSConfig):
    """A context's TLS, whatever certificates the environment names for programs at large."""

    def configure_client(self, client: Any) -> None:
        super().configure_client(client)
        # requests takes REQUESTS_CA_BUNDLE for better than a session's own setting.
        client.trust_env = bool(self.verify and not self.ca_cert)


class Chosen(NamedTuple):
    """The engine that the user chose; without a host it is this machine's own."""

    host: str = ""
    by: str = "DOCKER_HOST"
    undo: str = "unset DOCKER_HOST"
    """What to type to have it as if nothing was chosen."""
    context: str = ""
    """The name of docker's context, where one chose it."""
    tls: docker.TLSConfig | None = None
    """How a context wants the engine to be spoken to; for the others the environment says."""


def chosen() -> Chosen:
    """DOCKER_HOST's engine, else that of docker's context. Raises EngineConfigUnusable for one that is of no use."""
    if host := os.environ.get("DOCKER_HOST", ""):
        return Chosen(host)
    named = os.environ.get("DOCKER_CONTEXT", "")
    name = named or get_current_context_name()
    if name == "default":
        return Chosen()
    by = f"docker's context {name}"
    undo = "unset DOCKER_CONTEXT" if named else "docker context use default"
    try:
        context = ContextAPI.get_context(name)
        host = (context.Host if context is not None else "") or ""
        found = "none of that name" if context is None else "no address in it"
    except Exception as fault:  # docker-py's own, of no class of its own, and what it takes for granted of the file
        found = str(fault)
    if not host:
        raise EngineConfigUnusable(
            f"{by} is of no use",
            expected="a context that docker context ls shows, with the address of an engine",
            found=found,
            fix=f"{undo}, or make it: docker context create {name}",
        )
    host = host.removeprefix("http+")  # as docker-py writes a socket's address
    return Chosen(host, by, undo, name, _tls_of(name, host, undo))


def _tls_of(name: str, host: str, undo: str) -> docker.TLSConfig | None:
    """TLS as the docker program has it for a context: with those of the three files that there are, or without any."""
    if not host.startswith("tcp://"):
        return None
    files = {part: _tls_folder(name) / f"{part}.pem" for part in ("ca", "cert", "key")}
    try:
        # docker-py's own reading wants all three, and takes a setting that is not there for true.
        endpoint = json.loads(Path(get_meta_file(name)).read_text())["Endpoints"]["docker"]
        unverified = bool(endpoint.get("SkipTLSVerify", False))
        there = [part for part, path in files.items() if path.is_file()]
        for part in there:
            files[part].open("rb").close()
        missing = {"cert", "key"} - {*there} if {"cert", "key"} & {*there} else set()
        found = f"no {' and '.join(f'{part}.pem' for part in sorted(missing))}" if missing else ""
    except OSError as fault:
        found = str(fault)
    if found:
        raise EngineConfigUnusable(
            f"the TLS files of docker's context {name} are of no use",
            expected=f"cert.pem and key.pem, a pair that can be read, in {_tls_folder(name)}",
            found=found,
            fix=f"{_tls_fix(name, host)}, or {undo}",
        )
    if not there and not unverified:
        return None
    if unverified:
        machine = re.escape(urlsplit(host).hostname or "")
        warnings.filterwarnings("ignore", f"Unverified HTTPS request is being made to host '{machine}'")
    return _ContextTls(
        client_cert=(str(files["cert"]), str(files["key"])) if "cert" in there else None,
        ca_cert=str(files["ca"]) if "ca" in there else None,
        verify=not unverified,
    )


def _tls_folder(name: str) -> Path:
    return Path(get_tls_dir(name, "docker"))


def _tls_fix(name: str, host: str) -> str:
    return f"docker context update {name} --docker host={host},ca=CA.pem,cert=CERT.pem,key=KEY.pem"


def _chosen_at(address: str) -> Chosen:
    """What chose the engine at an address; DOCKER_HOST where nothing that is known did."""
    with contextlib.suppress(EngineConfigUnusable):
        if (found := chosen()).host == address:
            return found
    return Chosen()


def connect(*, timeout_s: float = 600.0) -> docker.DockerClient:
    """A client of the engine that answers where the user has it, or at the default socket.

    ``timeout_s`` is per API call. Raises EngineUnavailable, EngineConfigUnusable.
    """
    return _client(chosen().host or DEFAULT_HOST, timeout_s)


def ensure_running(config: Config) -> EngineInfo:
    """Use the engine that answers, else start one (see the module's docstring); then say what it is.

    Raises EngineUnavailable (an engine of another machine too), ServerFailed (with the log's last lines),
    EngineConfigUnusable or ProgramMissing.
    """
    return ensure_daemon(Daemon.of(config), host=chosen().host)


def ensure_daemon(daemon: Daemon, *, host: str = "") -> EngineInfo:
    """``ensure_running`` for a given daemon; ``host`` is what the user chose."""
    wanted = host or daemon.host
    if name := elsewhere(wanted):
        chooser = _chosen_at(wanted)
        raise EngineUnavailable(
            f"the Docker engine that {chooser.by} names runs on another machine",
            expected="an engine of this machine: a build mounts folders of its own machine into containers",
            found=f"{name}, which is no address of this machine",
            fix=f"{chooser.undo}, or run ./inv on that machine",
        )
    with contextlib.suppress(EngineUnavailable):
        return _describe(wanted, daemon)
    if host and host != daemon.host:
        raise _unavailable(None, host)
    if _closed_to_us(daemon.host):
        raise _unavailable(None, wanted)
    with _locked(daemon.folder):
        with contextlib.suppress(EngineUnavailable):  # another task was faster
            return _describe(wanted, daemon)
        if _SYSTEMD_MARK.is_dir() and daemon.host == DEFAULT_HOST:
            _start_by_systemd()
            return _wait_for_answer(wanted, daemon, None)
        return _start(daemon)


def elsewhere(address: str) -> str:
    """The host's name where an engine's address (as DOCKER_HOST takes it) is of another machine, else nothing.

    What is no address at all, and a name of TCP that leads nowhere, is left to be told by who connects.
    """
    scheme, _, rest = address.rpartition("://")
    if (scheme or "tcp") not in ("tcp", "http", "https", "ssh"):
        return ""
    try:
        name = urlsplit(f"//{rest}").hostname or ""
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
    except OSError:  # ssh knows names of its own
        return name if scheme == "ssh" else ""
    except ValueError:  # UnicodeError too
        return ""
    return "" if not name or any(_own(family, place) for family, _, _, _, place in found) else name


def _own(family: int, place: tuple[Any, ...]) -> bool:
    """Whether an address is this machine's: a program can listen there."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((place[0], 0, *place[2:]))
        return True
    return False


def down(config: Config) -> str:
    """Stop the engine that ``ensure_running`` started; returns what was done, in words.

    Nothing to stop is fine. Raises ServerFailed when it will not end.
    """
    return stop_daemon(Daemon.of(config))


def stop_daemon(daemon: Daemon) -> str:
    """``down`` for a given daemon."""
    none = "no engine was started here"
    if daemon.host == DEFAULT_HOST and runs_by_systemd():
        none += "; the one that systemd runs stays (systemctl stop docker.socket docker.service ends it)"
    if not daemon.folder.is_dir():
        return none
    with _locked(daemon.folder):
        record = _read_state(daemon)
        done: list[str] = []
        if record is not None and record.alive():
            _end(record, "dockerd")
            done.append(f"dockerd (pid {record.pid}) stopped")
        if record is not None:
            done += _end_leftovers(daemon)
        daemon.state.unlink(missing_ok=True)
        daemon.pidfile.unlink(missing_ok=True)
    return "; ".join(done) or none


def build_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The proxy variables, as build arguments and as environment of build steps, in both spellings.

    curl reads only the lower-case ``http_proxy``, other programs only upper-case names; apt does not know
    ``all_proxy``, so it stands in for ``http_proxy`` and ``https_proxy`` where those are not set. These names are
    Docker's predefined build arguments: they neither stay in the image's history nor spoil the build cache.
    """
    source = os.environ if environ is None else environ
    given = {name: source.get(name) or source.get(name.upper()) or "" for name in _PROXY_NAMES}
    if given["all_proxy"]:
        for name in ("http_proxy", "https_proxy"):
            given[name] = given[name] or _spelt_for_all(given["all_proxy"])
    return {spelling: value for name, value in given.items() if value for spelling in (name, name.upper())}


def daemon_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a ``dockerd`` of ours, whose proxies are those of ``build_environment``.

    dockerd takes no plain proxy from ``all_proxy``, and a SOCKS proxy named there it uses on top of the others (seen
    with 20.10): it stands in for them, and goes. Of SOCKS Go's HTTP client knows ``socks5`` by which others mean
    ``socks5h``: the proxy resolves names.
    """
    source = os.environ if environ is None else environ
    passed = {**source, **build_environment(source)}
    given = {name for proxy in _PROXY_NAMES for name in (proxy, proxy.upper())}
    for name in given & passed.keys():
        passed[name] = passed[name].replace("socks5h://", "socks5://", 1)
    return {name: value for name, value in passed.items() if name.lower() != "all_proxy"}


def _spelt_for_all(proxy: str) -> str:
    """A proxy's address as every program takes it: apt wants a scheme, and of SOCKS knows ``socks5h`` alone."""
    scheme, separator, rest = proxy.rpartition("://")
    if not separator:
        return f"http://{rest}"
    return f"socks5h://{rest}" if scheme == "socks5" else proxy


def build_network(environ: Mapping[str, str] | None = None) -> str | None:
    """``host`` where a proxy listens on this machine's loopback, which a container's own network cannot reach."""
    for name, value in build_environment(environ).items():
        address = urlsplit(value if "//" in value else f"//{value}").hostname or ""
        if (
            name != "no_proxy"
            and name != "NO_PROXY"
            and (address in ("localhost", "::1") or address.startswith("127."))
        ):
            return "host"
    return None


def _client(address: str, timeout_s: float) -> docker.DockerClient:
    """A client whose engine has answered.

    TLS settings come from the context that names it, else from the environment, as for the docker program.
    """
    chooser = _chosen_at(address)
    try:
        if address.startswith("unix://"):
            # docker-py leaves its socket open when nobody listens: knock first.
            with socket.socket(socket.AF_UNIX) as knock:
                knock.settimeout(timeout_s)
                knock.connect(str(_socket_path(address)))
        # It negotiates the API version, so it asks the engine at once.
        if chooser.context:
            return docker.DockerClient(base_url=address, tls=chooser.tls or False, timeout=int(timeout_s))
        return docker.from_env(timeout=int(timeout_s), environment={**os.environ, "DOCKER_HOST": address})
    except (docker.errors.InvalidConfigFile, AttributeError) as fault:  # docker-py takes the file's shape for granted
        raise EngineConfigUnusable(
            "docker's configuration file for this user cannot be read",
            expected="a JSON object in ~/.docker/config.json (or in the folder DOCKER_CONFIG names)",
            found=str(fault),
            fix="repair or remove that file",
        ) from fault
    except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as fault:
        if chooser.context and _ABOUT_TLS.search(str(fault)):
            raise EngineConfigUnusable(
                f"the engine of docker's context {chooser.context} and its TLS files do not fit together",
                expected=f"ca.pem of who signed its certificate, cert.pem and key.pem that it lets in, in "
                f"{_tls_folder(chooser.context)}",
                found=_reason(fault),
                fix=f"{_tls_fix(chooser.context, address)}, or {chooser.undo}",
            ) from fault
        raise _unavailable(fault, address) from fault


def _describe(address: str, daemon: Daemon) -> EngineInfo:
    client = None
    try:
        client = _client(address, 20)
        info, version = client.info(), client.version()
    except (docker.errors.DockerException, requests.RequestException) as fault:
        raise _unavailable(fault, address) from fault
    finally:
        if client is not None:
            client.close()
    record = _read_state(daemon)
    return EngineInfo(
        address=address,
        version=str(version["Version"]),
        api_version=str(version["ApiVersion"]),
        storage_driver=str(info.get("Driver", "")),
        cgroup_version=str(info.get("CgroupVersion", "")),
        data_root=Path(info.get("DockerRootDir", "")),
        started_here=address == daemon.host and record is not None and record.alive(),
    )


def _unavailable(fault: BaseException | None, address: str) -> EngineUnavailable:
    """The error that fits what can be seen of the address."""
    chooser = _chosen_at(address)
    expected = f"an engine that answers at {address}"
    if _closed_to_us(address):
        path = _socket_path(address)
        return EngineUnavailable(
            "the Docker engine's socket is closed to you",
            expected=expected,
            found=f"{path} belongs to group {_group_of(path)}, of which you are not a member",
            fix=f"sudo usermod -aG {_group_of(path)} $USER, then log in again",
        )
    if chooser.host and chooser.host == address != DEFAULT_HOST:
        return EngineUnavailable(
            f"the Docker engine that {chooser.by} names does not answer",
            expected=expected,
            found=_reason(fault),
            fix=f"start that engine, or {chooser.undo} to use this machine's own",
        )
    return EngineUnavailable(
        "no Docker engine answers",
        expected=expected,
        found=_reason(fault),
        fix="./inv doctor starts one (systemd or dockerd), or set DOCKER_HOST to another one of this machine",
    )


def gone(doing: str, fault: BaseException) -> EngineUnavailable:
    """The error where an engine that answered before ended, or ceased to answer, while it was ``doing`` something."""
    return EngineUnavailable(
        f"the Docker engine went away while it {doing}",
        expected="an engine that answers until the step is done",
        found=_reason(fault),
        fix="its log says why it ended (./inv doctor starts it again, and examines it); then run the task again",
    )


def _reason(fault: BaseException | None) -> str:
    """The innermost words of a chain of wrapped exceptions, in one line."""
    if fault is None:
        return "no answer"
    return " ".join(str(fault).split())[:300]


def _group_of(path: Path) -> str:
    return _group_name(path.stat().st_gid)


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _closed_to_us(address: str) -> bool:
    """Whether there is a socket that this user may not open."""
    path = _socket_path(address)
    # os.path's: in a folder that is closed to this user too, Path's raises.
    there = address.startswith("unix://") and os.path.exists(path)  # noqa: PTH110
    return there and not os.access(path, os.R_OK | os.W_OK)


def _socket_path(address: str) -> Path:
    return Path(address.removeprefix("unix://") or DEFAULT_HOST.removeprefix("unix://"))


def _sudo(why: str) -> list[str]:
    """The words before a command that needs root; says what for when sudo is used."""
    if os.geteuid() == 0:
        return []
    sudo = process.require_program("sudo", f"{why}, since you are not root")
    progress.say(f"    sudo is used {why}")
    keep = ",".join(build_environment())
    return [str(sudo), f"--preserve-env={keep}"] if keep else [str(sudo)]


def runs_by_systemd() -> bool:
    """Whether systemd is this machine's init and runs the engine."""
    if not _SYSTEMD_MARK.is_dir():
        return False
    with contextlib.suppress(CommandFailed, ProgramMissing):
        process.run(["systemctl", "is-active", "--quiet", "docker.service"], limit_s=30)
        return True
    return False


def _start_by_systemd() -> None:
    with progress.step("start docker.service"):
        argv = [*_sudo("to start docker.service"), "systemctl", "start", "docker.service"]
        try:
            ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_SYSTEMD_LIMIT_S)
        except subprocess.TimeoutExpired as fault:
            raise EngineUnavailable(
                "systemd does not come to an end of starting the Docker engine",
                expected="systemctl start docker.service to end",
                found=f"it still runs after {fault.timeout:.0f} s",
                fix="journalctl -u docker.service shows what it waits for",
            ) from fault
    if ended.returncode != 0:
        raise EngineUnavailable(
            "systemd could not start the Docker engine",
            expected="systemctl start docker.service ends with status 0",
            found=f"status {ended.returncode}: {ended.stderr.strip()[-400:]}",
            fix="journalctl -u docker.service shows why; apt-get install docker.io where the unit is missing",
        )


def _start(daemon: Daemon) -> EngineInfo:
    program = process.require_program("dockerd", "to run containers")
    _refuse_second(daemon)
    sudo = _sudo("to start dockerd")
    _mount_cgroups(sudo)
    # A new dockerd would wait for the containerd that a killed one left, also for one that has ended and that nobody
    # has waited for: it goes by the number in a file.
    if all(said.startswith("leftover") for said in _end_leftovers(daemon, shims=False)):
        with contextlib.suppress(PermissionError):
            (daemon.exec_root / "containerd" / "containerd.pid").unlink(missing_ok=True)
    daemon.pidfile.unlink(missing_ok=True)
    offset = daemon.log.stat().st_size if daemon.log.exists() else 0
    argv = [
        *sudo,
        "setsid",
        "--fork",
        "sh",
        "-c",
        'echo $$ >"$1.part" && mv "$1.part" "$1" && shift && exec "$@"',
        "sh",
        str(daemon.pidfile),
        str(program),
        f"--host={daemon.host}",
        f"--exec-root={daemon.exec_root}",
        f"--pidfile={daemon.folder / 'docker.pid'}",
        f"--group={socket_group()}",
        *daemon.options,
    ]
    (daemon.folder / "docker.pid").unlink(missing_ok=True)
    with progress.step(f"start dockerd (log: {daemon.log})"):
        with daemon.log.open("ab") as log:
            log.write(f"$ {process.pasteable(argv)}\n".encode())
            log.flush()
            subprocess.run(
                argv,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=daemon_environment(),
                timeout=120,
            )
        record = _await_pid(daemon, offset)
        try:
            write_text_atomically(daemon.state, json.dumps(asdict(record), indent=2) + "\n")
            return _wait_for_answer(daemon.host, daemon, record, offset)
        except BaseException:
            if record.alive():
                _end(record, "dockerd")
            for _ in _end_leftovers(daemon):
                pass
            daemon.state.unlink(missing_ok=True)
            raise


def socket_group() -> int:
    """The group that may use the socket of a ``dockerd`` that is started here; its members can become root by it.

    Root's where root starts it, else the caller's own one. Raises EngineUnavailable where others are in that too, and
    the caller is not in the group docker.
    """
    if os.geteuid() == 0:
        return 0
    with contextlib.suppress(KeyError):  # of a number without a name nobody knows who else has it
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(os.getegid())
        if group.gr_name == user and not set(group.gr_mem) - {user}:
            return group.gr_gid
    with contextlib.suppress(KeyError):
        docker = grp.getgrnam("docker").gr_gid
        if docker in os.getgroups():
            return docker
    raise EngineUnavailable(
        "dockerd is not started: every member of your group could become root by its socket",
        expected="a primary group with your name that nobody else is in, or that you are in the group docker",
        found=f"the primary group {_group_name(os.getegid())}",
        fix="sudo groupadd --force docker && sudo usermod -aG docker $USER, then log in again",
    )


def _refuse_second(daemon: Daemon) -> None:
    """Another dockerd on this machine's default paths that does not answer is its owner's to fix."""
    if daemon.host != DEFAULT_HOST:
        return
    with contextlib.suppress(OSError, ValueError):
        pid = int(_SYSTEM_PIDFILE.read_text())
        record = ProcessRecord.of(pid)
        if record is not None and _command_name(pid) == "dockerd" and record != _read_state(daemon):
            raise EngineUnavailable(
                "a dockerd that was not started here runs, but does not answer",
                expected=f"an answer at {daemon.host}",
                found=f"pid {pid} from {_SYSTEM_PIDFILE}",
                fix="look at its log, then stop or restart it yourself",
            )


def _await_pid(daemon: Daemon, offset: int) -> ProcessRecord:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = ProcessRecord.of(int(daemon.pidfile.read_text()))
            if record is None:
                break
            return record
        time.sleep(0.02)
    raise _died(daemon, offset)


def _wait_for_answer(address: str, daemon: Daemon, record: ProcessRecord | None, offset: int = 0) -> EngineInfo:
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        with contextlib.suppress(EngineUnavailable):
            return _describe(address, daemon)
        if record is not None and not record.alive():
            raise _died(daemon, offset)
        if time.monotonic() > deadline:
            tail = f":\n{_tail(daemon.log, offset)}" if record is not None else ""
            raise ServerFailed(
                "the Docker engine was started but does not answer",
                expected=f"an answer at {address} within {_START_LIMIT_S:.0f} s",
                found=f"none{tail}",
                fix=f"read {daemon.log}" if record is not None else "journalctl -u docker.service",
            )
        time.sleep(0.1)


def _died(daemon: Daemon, offset: int) -> ServerFailed:
    tail = _tail(daemon.log, offset)
    return ServerFailed(
        "dockerd ended while it started",
        expected="a daemon that stays",
        found=f"its last lines:\n{tail}",
        fix=_fix_for(tail) + f"; the whole log: {daemon.log}",
    )


def _fix_for(tail: str) -> str:
    """What to do about the usual reasons for which dockerd ends."""
    lowered = tail.lower()
    known = (
        ("needs to be started with root", "run as root, or install sudo"),
        ("operation not permitted", "this container lacks rights: run it with --privileged"),
        ("permission denied", "this container lacks rights: run it with --privileged"),
        ("devices cgroup", "cgroups are not mounted: run this container with --privileged"),
        ("iptables", "iptables must work here: --privileged or --cap-add=NET_ADMIN, and the iptables package"),
        ("no space left", "free some space below /var/lib/docker"),
        ("no sockets found", "start it without socket activation"),
        ("pid file found", "another dockerd runs: use it (DOCKER_HOST) or stop it"),
    )
    return next((fix for words, fix in known if words in lowered), "fix what the log names")


def _tail(log: Path, offset: int) -> str:
    with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:
        stream.seek(offset)
        lines = stream.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
    return "    (no log)"


def _end(record: ProcessRecord, name: str) -> None:
    """SIGTERM, a wait, SIGKILL; each only while the process is the one on record."""
    for sign, wait_s in ((signal.SIGTERM, _STOP_LIMIT_S), (signal.SIGKILL, 5.0)):
        if not record.alive():
            return
        if os.geteuid() == 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, sign)
        else:
            argv = [*_sudo(f"to stop {name}"), "kill", f"-{sign.value}", str(record.pid)]
            subprocess.run(argv, check=False, timeout=120)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not record.alive():
                return
            time.sleep(0.05)
    raise ServerFailed(
        f"{name} does not end",
        expected=f"an end within {_STOP_LIMIT_S:.0f} s of SIGTERM, or by SIGKILL",
        found=f"pid {record.pid} still runs",
        fix="a process that SIGKILL does not end waits for a disk or a file server: look at dmesg",
    )


def _end_leftovers(daemon: Daemon, *, shims: bool = True) -> Iterator[str]:
    """Where dockerd was killed, containerd and its ``shims`` stay behind: those on our exec-root are ours.

    The same path in another root (a chroot, a container) or mount namespace is another daemon's: both must be ours.
    Tells what was done about each.
    """
    marker = f"{daemon.exec_root}/containerd/"
    mounts = Path("/proc/self/ns/mnt").readlink()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        name = _command_name(int(entry.name))
        if not name.startswith("containerd") or (name != "containerd" and not shims):
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            record = ProcessRecord.of(int(entry.name))
            if record is None or not any(word.startswith(marker) for word in words):
                continue
            others = "mount namespace" if (entry / "ns/mnt").readlink() != mounts else "root"
            if others == "root" and (entry / "root").samefile("/"):
                _end(record, name)
                yield f"leftover {name} (pid {record.pid}) stopped"
            else:
                yield f"left alone: {name} (pid {record.pid}), of another {others}"


def _command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_state(daemon: Daemon) -> ProcessRecord | None:
    try:
        return ProcessRecord(**json.loads(daemon.state.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One task at a time starts or stops the engine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").open("a").close()
    except (FileExistsError, NotADirectoryError, PermissionError) as fault:
        raise ForeignFolder(
            f"{folder} cannot hold the engine's record",
            expected="a folder that you may write to",
            found=str(fault),
            fix=caller.as_root("./inv TASK") if isinstance(fault, PermissionError) else "move that file away",
        ) from fault
    with locked(folder):
        yield


def cgroup_mounts(proc_cgroups: str, mounted: Sequence[str]) -> list[list[str]]:
    """The mount commands that give dockerd its cgroup hierarchies; none where some are mounted already.

    ``proc_cgroups`` is the text of /proc/cgroups (name, hierarchy, number, enabled), ``mounted`` the file system
    types mounted at and below /sys/fs/cgroup. A controller whose hierarchy is 0 is free for version 2.
    """
    if "cgroup" in mounted or "cgroup2" in mounted:
        return []
    rows = [line.split() for line in proc_cgroups.splitlines() if line and not line.startswith("#")]
    bound = [row[0] for row in rows if row[1] != "0" and row[3] == "1"]
    if not bound:
        return [["mount", "-t", "cgroup2", "cgroup2", str(_CGROUP)]]
    commands = [["mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", str(_CGROUP)]]
    for name in bound:
        folder = str(_CGROUP / name)
        commands += [["mkdir", "-p", folder], ["mount", "-t", "cgroup", "-o", name, "cgroup", folder]]
    return commands


def _mount_cgroups(sudo: Sequence[str]) -> None:
    fields = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounted = [row[2] for row in fields if Path(row[1]).is_relative_to(_CGROUP)]
    try:
        table = Path("/proc/cgroups").read_text()
    except FileNotFoundError:
        table = ""
    for argv in cgroup_mounts(table, mounted):
        process.run([*sudo, *argv], limit_s=30, fix="dockerd needs cgroups: run this container with --privileged")
