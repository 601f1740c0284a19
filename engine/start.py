"""Use a running Docker engine, or start one.

1. An engine that responds at the selected address (engine.connect) is used unchanged.
2. If no engine responds and systemd is the init system, systemd starts ``docker.service``.
3. Otherwise (in containers and CI), this module starts ``dockerd`` in a separate session, so that it outlives the task.

Step 3 records the ``dockerd`` that it starts, so that ``stop_daemon`` can stop it (engine.dockerd, engine.stop).
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import docker.errors
import psutil
import requests

from engine import cgroups, systemd
from engine.connect import (
    DEFAULT_HOST,
    Selection,
    connect_to,
    group_name,
    not_accessible,
    selected,
    unavailable,
)
from engine.dockerd import Daemon, sudo_prefix
from engine.proxies import daemon_environment
from engine.stop import end_leftovers, end_process
from toolchain import process, progress
from toolchain.config import Config
from toolchain.errors import EngineUnavailable, UserError
from toolchain.process_identity import find, running

_SYSTEM_PIDFILE = Path("/var/run/docker.pid")
_LAUNCH_LIMIT_S = 120.0
_START_LIMIT_S = 60.0
_TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine that responds."""

    address: str
    """The address in the format of DOCKER_HOST."""
    version: str
    storage_driver: str
    cgroup_version: str
    data_root: Path
    """The engine's folder for images."""
    started_here: bool
    """Whether ``stop_daemon`` stops this engine."""


def ensure_running(config: Config) -> EngineInfo:
    """Use a running engine or start one (see the module docstring), and return its description.

    Raises EngineUnavailable, UserError (with the log's last lines) or ProgramMissing.
    """
    return ensure_daemon(Daemon.of(config), selected())


def ensure_daemon(daemon: Daemon, selection: Selection | None = None) -> EngineInfo:
    """Use a running engine. If there is none, start ``daemon``, unless the user selected another engine."""
    selection = selection or Selection()
    wanted = selection if selection.host else Selection(daemon.host)
    with contextlib.suppress(EngineUnavailable):
        return _describe(wanted, daemon)
    if wanted.host != daemon.host or not_accessible(daemon.host):
        raise unavailable(wanted)
    with daemon.lock():
        with contextlib.suppress(EngineUnavailable):  # another task has started it in the meantime
            return _describe(wanted, daemon)
        if systemd.booted() and daemon.host == DEFAULT_HOST:
            systemd.start_engine()
            return _wait_for_response(daemon, None)
        return _start(daemon)


def _describe(selection: Selection, daemon: Daemon) -> EngineInfo:
    try:
        with contextlib.closing(connect_to(selection, timeout_s=20)) as client:
            info = client.info()
    except (docker.errors.DockerException, requests.RequestException) as fault:
        raise unavailable(selection, fault) from fault
    return EngineInfo(
        address=selection.host,
        version=str(info["ServerVersion"]),
        storage_driver=str(info.get("Driver", "")),
        cgroup_version=str(info.get("CgroupVersion", "")),
        data_root=Path(info.get("DockerRootDir", "")),
        started_here=selection.host == daemon.host and daemon.recorded_process() is not None,
    )


def _start(daemon: Daemon) -> EngineInfo:
    program = process.require_program("dockerd", "to run containers")
    _refuse_second(daemon)
    sudo = sudo_prefix("to start dockerd")
    cgroups.mount_missing(sudo)
    # If an earlier dockerd was killed, its containerd's pid file still exists. A new dockerd then waits for that
    # containerd, even if it is a zombie.
    if all(report.startswith("leftover") for report in end_leftovers(daemon, shims=False)):
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
            try:
                subprocess.run(
                    argv,
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=daemon_environment(),
                    timeout=_LAUNCH_LIMIT_S,
                )
            except (subprocess.SubprocessError, PermissionError) as fault:  # only root may kill a sudo that timed out
                raise EngineUnavailable(
                    "dockerd cannot be started",
                    expected=f"{argv[0]} to exit with status 0 within {_LAUNCH_LIMIT_S:.0f} s",
                    found=f"the last lines of {daemon.log}:\n{_tail(daemon.log, offset)}",
                    fix="run the task in a terminal, as root or as a user who may use sudo",
                ) from fault
        started = _wait_for_process(daemon, offset)
        try:
            daemon.write_record(started)
            return _wait_for_response(daemon, started, offset)
        except BaseException:
            end_process(started, "dockerd")
            for _ in end_leftovers(daemon):
                pass
            daemon.state.unlink(missing_ok=True)
            raise


def socket_group() -> int:
    """Return the group that can access the socket of a ``dockerd`` that this module starts.

    Members of the group can become root.

    For root, this is root's group. For another user, it is the user's primary group if that group has the user's name
    and no other members; otherwise, it is the group docker. Raises EngineUnavailable if the user needs the group docker
    but is not in it.
    """
    if os.geteuid() == 0:
        return 0
    with contextlib.suppress(KeyError):  # the members of a group without a name are unknown
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(os.getegid())
        if group.gr_name == user and not set(group.gr_mem) - {user}:
            return group.gr_gid
    with contextlib.suppress(KeyError):
        docker_group = grp.getgrnam("docker").gr_gid
        if docker_group in os.getgroups():
            return docker_group
    raise EngineUnavailable(
        "refusing to start dockerd: every member of your group could become root through its socket",
        expected="a primary group with your name and no other members, or membership in the group docker",
        found=f"the primary group {group_name(os.getegid())}, and no membership in the group docker",
        fix="sudo groupadd --force docker && sudo usermod -aG docker $USER, then log in again",
    )


def _refuse_second(daemon: Daemon) -> None:
    """Raise EngineUnavailable if the recorded dockerd, or another dockerd with the default paths, is still running.

    The running dockerd, which does not respond, and its containerd are not stopped.
    """
    recorded = daemon.recorded_process()
    if recorded is not None:
        raise EngineUnavailable(
            "the dockerd that ./inv started does not respond",
            expected=f"a response from {daemon.host}",
            found=f"dockerd (pid {recorded.pid}) is still running",
            fix="wait until the machine is less busy and run the task again, or stop this dockerd with ./inv down",
        )
    if daemon.host != DEFAULT_HOST:
        return
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        other = find(int(_SYSTEM_PIDFILE.read_text()))
        if other is not None and other.name() == "dockerd":
            raise EngineUnavailable(
                "a dockerd that pitorch did not start is running, but does not respond",
                expected=f"a response from {daemon.host}",
                found=f"a dockerd with pid {other.pid}, according to {_SYSTEM_PIDFILE}",
                fix="check the log of that dockerd, then stop or restart it yourself",
            )


def _wait_for_process(daemon: Daemon, offset: int) -> psutil.Process:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            started = find(int(daemon.pidfile.read_text()))
            if started is None:
                break
            return started
        time.sleep(0.02)
    raise _ended_early(daemon, offset)


def _wait_for_response(daemon: Daemon, started: psutil.Process | None, offset: int = 0) -> EngineInfo:
    """Wait until the engine at the daemon's address responds; ``started`` is None for an engine that systemd runs."""
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        with contextlib.suppress(EngineUnavailable):
            return _describe(Selection(daemon.host), daemon)
        if started is not None and not running(started):
            raise _ended_early(daemon, offset)
        if time.monotonic() > deadline:
            tail = f":\n{_tail(daemon.log, offset)}" if started is not None else ""
            raise UserError(
                "the Docker engine was started but does not respond",
                expected=f"a response from {daemon.host} within {_START_LIMIT_S:.0f} s",
                found=f"none{tail}",
                fix=f"find the cause in {daemon.log}"
                if started is not None
                else "find the cause with journalctl -u docker.service",
            )
        time.sleep(0.1)


def _ended_early(daemon: Daemon, offset: int) -> UserError:
    tail = _tail(daemon.log, offset)
    return UserError(
        "dockerd exited during startup",
        expected="dockerd to keep running",
        found=f"the last lines of its log:\n{tail}",
        fix=_fix_for(tail) + f"; the full log: {daemon.log}",
    )


def _fix_for(tail: str) -> str:
    """Return the fix for the likely reason why dockerd exited early, according to the end of its log."""
    lowered = tail.lower()
    known = (
        ("needs to be started with root", "run as root, or install sudo"),
        ("operation not permitted", "this container lacks privileges: run it with --privileged"),
        ("permission denied", "this container lacks privileges: run it with --privileged"),
        ("devices cgroup", "cgroups are not mounted: run this container with --privileged"),
        ("iptables", "install iptables, and run this container with --privileged or --cap-add=NET_ADMIN"),
        ("no space left", "free some space below /var/lib/docker"),
        ("no sockets found", "start dockerd without socket activation"),
        ("pid file found", "another dockerd is running: set DOCKER_HOST to use it, or stop it"),
    )
    return next((fix for words, fix in known if words in lowered), "fix the error in the log")


def _tail(log: Path, offset: int) -> str:
    with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:
        stream.seek(offset)
        lines = stream.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
    return "    (no log)"
