"""The folder that the caller stands in: paths of the command line are meant from there, not from the repository.

``./inv`` goes into the repository before it starts a task, and says in ``PITORCH_CALLER_CWD`` where it was called.
"""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """The folder that the caller was in when ./inv took over."""
    return Path(os.environ.get("PITORCH_CALLER_CWD") or Path.cwd())


def path(given: str) -> Path:
    """A path that was given on the command line; the caller's folder for an empty one."""
    return folder() / given
