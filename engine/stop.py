"""Stop the engine that ``./inv`` started; leave all other engines running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from engine import systemd
from engine.connect import DEFAULT_HOST
from engine.dockerd import Daemon, sudo_prefix
from toolchain.errors import UserError
from toolchain.process_identity import running

_STOP_LIMIT_S = 30.0


def stop_daemon(daemon: Daemon) -> str:
    """Stop the daemon if ``ensure_running`` started it, and return a description of what was done.

    Raises UserError if the process does not exit.
    """
    nothing = "no engine was started here"
    if daemon.host == DEFAULT_HOST and systemd.runs_engine():
        nothing += "; systemd runs one, which is left running (systemctl stop docker.socket docker.service stops it)"
    if not daemon.folder.is_dir():
        return nothing
    with daemon.lock():
        had_record, process = daemon.read_record() is not None, daemon.recorded_process()
        done: list[str] = []
        if process is not None:
            end_process(process, "dockerd")
            done.append(f"dockerd (pid {process.pid}) stopped")
        if had_record:
            done += end_leftovers(daemon)
        daemon.state.unlink(missing_ok=True)
        daemon.pidfile.unlink(missing_ok=True)
    return "; ".join(done) or nothing


def end_process(process: psutil.Process, name: str) -> None:
    """Send SIGTERM, wait, then send SIGKILL. Raises UserError if sudo fails or the process does not exit."""
    for number, wait_s in ((signal.SIGTERM, _STOP_LIMIT_S), (signal.SIGKILL, 5.0)):
        if not running(process):
            return
        if os.geteuid() == 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        else:
            argv = [*sudo_prefix(f"to stop {name}"), "kill", f"-{number.value}", str(process.pid)]
            try:
                subprocess.run(argv, check=True, timeout=120)
            except (subprocess.SubprocessError, PermissionError) as fault:  # only root may kill a sudo that timed out
                if running(process):
                    raise UserError(
                        f"{name} cannot be stopped",
                        expected=f"{argv[0]} to exit with status 0 within 120 s",
                        found=str(fault),
                        fix="run the task in a terminal, as root or as a user who may use sudo",
                    ) from fault
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not running(process):
                return
            time.sleep(0.05)
    raise UserError(
        f"{name} does not exit",
        expected=f"the process to exit within {_STOP_LIMIT_S:.0f} s of SIGTERM, or after SIGKILL",
        found=f"pid {process.pid} is still running",
        fix="run dmesg to find the disk or file server that the process is waiting for, and restore access to it",
    )


def end_leftovers(daemon: Daemon, *, shims: bool = True) -> Iterator[str]:
    """Stop the containerd of a killed dockerd and, if ``shims`` is true, its shims; yield a description of each.

    These processes are recognised by the path of the daemon's exec-root on their command line. Processes in another
    root directory (a chroot or container) or mount namespace are left running, because the same path belongs to another
    daemon there.
    """
    marker = f"{daemon.exec_root}/containerd/"
    mounts = Path("/proc/self/ns/mnt").readlink()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError, PermissionError):
            name = process.name()
            if not name.startswith("containerd") or (name != "containerd" and not shims):
                continue
            if not any(word.startswith(marker) for word in process.cmdline()) or not running(process):
                continue
            folder = Path(f"/proc/{process.pid}")
            if (folder / "ns/mnt").readlink() != mounts:
                yield f"not stopped: {name} (pid {process.pid}), in another mount namespace"
            elif not (folder / "root").samefile("/"):
                yield f"not stopped: {name} (pid {process.pid}), in another root directory"
            else:
                end_process(process, name)
                yield f"leftover {name} (pid {process.pid}) stopped"
