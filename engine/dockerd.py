"""Describe a ``dockerd`` that ``./inv`` starts: its files and the record of its process.

The record ``state.json`` identifies the process (toolchain.process_identity). ``./inv`` stops only the ``dockerd`` that
``state.json`` identifies.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.connect import DEFAULT_HOST
from engine.proxies import build_environment
from toolchain import caller, process, progress
from toolchain.config import Config
from toolchain.errors import UserError
from toolchain.files import locked, write_text_atomically
from toolchain.process_identity import find_recorded, record


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """A ``dockerd``: the address of its socket, and the folder that contains its record, log and pid file."""

    folder: Path
    host: str = DEFAULT_HOST
    exec_root: Path = Path("/var/run/docker")
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Daemon:
        """Return the daemon that ``ensure_running`` starts, with the default socket and data root."""
        return cls(folder=config.build_root / "engine")

    @property
    def log(self) -> Path:
        """The log file with dockerd's output."""
        return self.folder / "dockerd.log"

    @property
    def state(self) -> Path:
        """The file that records the started process."""
        return self.folder / "state.json"

    @property
    def pidfile(self) -> Path:
        """The file with dockerd's process ID, which is written immediately before dockerd is executed."""
        return self.folder / "dockerd.pid"

    def read_record(self) -> dict[str, int | str] | None:
        """Return the identity of the recorded process, or None if there is no valid record."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            identity = json.loads(self.state.read_text())
            return {"pid": int(identity["pid"]), "boot": str(identity["boot"]), "ticks": int(identity["ticks"])}
        return None

    def recorded_process(self) -> psutil.Process | None:
        """Return the recorded process if it is still running, else None."""
        identity = self.read_record()
        return find_recorded(identity) if identity is not None else None

    def write_record(self, started: psutil.Process) -> None:
        """Record the started process."""
        write_text_atomically(self.state, json.dumps(record(started), indent=2) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock that a task needs to start or stop the daemon.

        Raises UserError if the lock cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").open("a").close()
        except (FileExistsError, NotADirectoryError, PermissionError) as fault:
            raise UserError(
                f"the engine's lock file in {self.folder} cannot be opened for writing",
                expected="a folder that you may write to",
                found=str(fault),
                fix=caller.as_root("./inv TASK") if isinstance(fault, PermissionError) else "move the file away",
            ) from fault
        with locked(self.folder):
            yield


def sudo_prefix(purpose: str) -> list[str]:
    """Return the prefix for a command that needs root: sudo, or nothing if the caller is root.

    If sudo is used, print ``purpose``.
    """
    if os.geteuid() == 0:
        return []
    sudo = process.require_program("sudo", f"{purpose}, since you are not root")
    progress.say(f"    using sudo {purpose}")
    proxies = ",".join(build_environment())
    return [str(sudo), f"--preserve-env={proxies}"] if proxies else [str(sudo)]
