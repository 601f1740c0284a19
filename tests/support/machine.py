"""Skip tests that this machine cannot run, and run scripts in a user namespace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from toolchain import checks

OWN_BINFMT = "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"
"""A command that mounts an empty binfmt_misc in a user namespace (Linux 6.7 and newer)."""


def needs_the_machine() -> None:
    """Skip the test if images cannot be built here. The reason names what is missing."""
    if missing := checks.missing_for_builds():
        pytest.skip(f"images cannot be built here: {', '.join(missing)} missing (./inv --set-up installs programs)")


def in_user_namespace(script: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a new user and mount namespace. The first of ``words`` is its $0."""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, *words]
    return subprocess.run(argv, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
