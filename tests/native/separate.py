"""Separate processes of the tests. ``pitorch.preloaded`` forks them, because each import of torch takes a second."""

from __future__ import annotations

import os
import subprocess
import sys

_PRELOADED = (sys.executable, "-m", "pitorch.preloaded", "--idle=300")
"""With ``--idle``, the server exits after five minutes if pytest is killed and cannot stop it."""


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
    """Start the server, so that its message is not part of the first process's output."""
    subprocess.run([*_PRELOADED, "-c", ""], timeout=600, check=True)


def stop() -> None:
    """Stop the server."""
    subprocess.run([sys.executable, "-m", "pitorch.preloaded", "--stop"], timeout=60, check=True)
