"""Run git in the tests' repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    """Run git with an identity that does not depend on the machine's configuration; return its output."""
    argv = ["git", *IDENTITY, "-C", str(folder), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
