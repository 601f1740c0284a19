"""Check the init system and the user's privileges."""

from __future__ import annotations

import os
import shutil
import subprocess

from doctor.finding import RUN_LIMIT_S, Finding, fail, ok, warn
from engine import systemd


def check_init() -> Finding:
    """Report whether systemd or ``./inv`` starts the engine. Both are supported."""
    found = (
        "systemd is the init system and runs the engine"
        if systemd.booted()
        else "no systemd: ./inv starts dockerd itself"
    )
    return ok("init", "looked for /run/systemd/system", found)


def check_rights() -> Finding:
    """Check that the user is root or can use sudo, because only root can build, export and serve images."""
    return _check_mounting() if os.geteuid() == 0 else _check_sudo()


def _check_mounting() -> Finding:
    done = "created a mount namespace"
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "true"],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    if ended.returncode == 0:
        return ok("rights", done, "you are root and can mount")
    found = f"you are root, but cannot mount: {' '.join(ended.stderr.split())}"
    return fail("rights", done, found, "start this container with --privileged")


def _check_sudo() -> Finding:
    user = f"you are an ordinary user (id {os.geteuid()})"
    if shutil.which("sudo") is None:
        fix = "run ./inv as root, or install sudo and get permission to use it"
        return fail("rights", "looked for sudo on the PATH", f"{user}, and sudo is not installed", fix)
    done = "ran a program with sudo, without a password"
    ended = subprocess.run(
        ["sudo", "--non-interactive", "true"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=RUN_LIMIT_S,
    )
    if ended.returncode == 0:
        return ok("rights", done, f"{user}, and sudo works; to build, run sudo ./inv build-image")
    found = f"{user}; {' '.join(ended.stderr.split()) or 'sudo refused'}"
    return warn("rights", done, found, "check your permission with sudo --validate, then run sudo ./inv build-image")
