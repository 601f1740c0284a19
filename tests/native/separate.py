"""Separate processes of the tests. ``pitorch.preloaded`` forks them, because each import of torch takes a second."""

from __future__ import annotations

import os
import subprocess
import sys

_PRELOADED = (sys.executable, "-m", "pitorch.preloaded", "--idle=300")
"""The server also exits if pytest was killed and could not stop it."""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``SCRIPT ARGUMENT...`` or ``-c CODE`` in a process that has imported torch, but not the extension."""
    return subprocess.run(
        [*_PRELOADED, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def strict(code: str) -> str:
    """Return the code with all warnings as errors."""
    return f"import warnings\nwarnings.simplefilter('error')\n{code}"


def start() -> None:
    """Start the server, which prints a message."""
    subprocess.run([*_PRELOADED, "-c", ""], timeout=600, check=True)


def stop() -> None:
    """Stop the server."""
    subprocess.run([sys.executable, "-m", "pitorch.preloaded", "--stop"], timeout=60, check=True)
