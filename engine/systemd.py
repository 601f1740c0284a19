"""Start the Docker engine as a systemd service."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from engine.dockerd import sudo_prefix
from toolchain import process, progress
from toolchain.errors import CommandFailed, EngineUnavailable, ProgramMissing

_BOOTED = Path("/run/systemd/system")
_LIMIT_S = 120.0


def booted() -> bool:
    """Return whether systemd is this machine's init system, determined as in sd_booted(3)."""
    return _BOOTED.is_dir()


def runs_engine() -> bool:
    """Return whether systemd is this machine's init system and runs the engine."""
    if not booted():
        return False
    with contextlib.suppress(CommandFailed, ProgramMissing):
        process.run(["systemctl", "is-active", "--quiet", "docker.service"], limit_s=30)
        return True
    return False


def start_engine() -> None:
    """Start ``docker.service``. Raises EngineUnavailable."""
    with progress.step("start docker.service"):
        argv = [*sudo_prefix("to start docker.service"), "systemctl", "start", "docker.service"]
        try:
            ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as fault:
            raise EngineUnavailable(
                "systemd timed out while starting the Docker engine",
                expected="systemctl start docker.service to finish",
                found=f"still running after {fault.timeout:.0f} s",
                fix="look for the cause with journalctl -u docker.service",
            ) from fault
    if ended.returncode != 0:
        raise EngineUnavailable(
            "systemd could not start the Docker engine",
            expected="systemctl start docker.service to exit with status 0",
            found=f"status {ended.returncode}: {ended.stderr.strip()[-400:]}",
            fix="run journalctl -u docker.service to see why; if the unit is missing, run apt-get install docker.io",
        )
