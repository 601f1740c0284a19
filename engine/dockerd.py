"""A ``dockerd`` that ``./inv`` starts: its files, and the record of its process.

The record ``state.json`` identifies the process (toolchain.process_identity). Only that process is ever stopped.
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
    """The folder for the record, log and pid file of a ``dockerd``, and its socket's address."""

    folder: Path
    host: str = DEFAULT_HOST
    exec_root: Path = Path("/var/run/docker")
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Daemon:
        """The daemon that ``ensure_running`` starts: default socket, default data root."""
        return cls(folder=config.build_root / "engine")

    @property
    def log(self) -> Path:
        """The output of dockerd."""
        return self.folder / "dockerd.log"

    @property
    def state(self) -> Path:
        """The record of the process that was started."""
        return self.folder / "state.json"

    @property
    def pidfile(self) -> Path:
        """Written when dockerd is executed."""
        return self.folder / "dockerd.pid"

    def read_record(self) -> dict[str, int | float] | None:
        """The identity of the process on record; None if there is no record, or it is damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            identity = json.loads(self.state.read_text())
            return {"pid": int(identity["pid"]), "created": float(identity["created"])}
        return None

    def recorded_process(self) -> psutil.Process | None:
        """The process on record, if it still runs."""
        identity = self.read_record()
        return find_recorded(identity) if identity is not None else None

    def write_record(self, started: psutil.Process) -> None:
        """Record the process that was started."""
        write_text_atomically(self.state, json.dumps(record(started), indent=2) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let one task at a time start or stop the daemon. Raises UserError if the folder is not writable."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").open("a").close()
        except (FileExistsError, NotADirectoryError, PermissionError) as fault:
            raise UserError(
                f"the engine's record cannot be stored in {self.folder}",
                expected="a folder that you may write to",
                found=str(fault),
                fix=caller.as_root("./inv TASK") if isinstance(fault, PermissionError) else "move that file away",
            ) from fault
        with locked(self.folder):
            yield


def sudo_prefix(purpose: str) -> list[str]:
    """The words before a command that needs root; empty for root. Prints the purpose when sudo is used."""
    if os.geteuid() == 0:
        return []
    sudo = process.require_program("sudo", f"{purpose}, since you are not root")
    progress.say(f"    using sudo {purpose}")
    proxies = ",".join(build_environment())
    return [str(sudo), f"--preserve-env={proxies}"] if proxies else [str(sudo)]
