"""Who called, from where and by which words: paths of the command line are meant from there, not from the repository.

``./inv`` goes into the repository before it starts a task, and says in ``PITORCH_CALLER_CWD`` where it was called. What
was typed, and which of the variables that count were set, is kept for the fixes that say how to repeat it as root.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent
_COUNT = re.compile(
    r"INVOKE_\w+|PITORCH_(?!CALLER_CWD$)\w+|SOURCE_DATE_EPOCH|DOCKER_(?:HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY)|"
    r"(?:https?|ftp|all|no)_proxy|(?:HTTPS?|FTP|ALL|NO)_PROXY"
)
"""Names of the variables that a task goes by, and that sudo drops unless it is told to keep them."""

_typed: list[str] = []
_set: list[str] = []


def folder() -> Path:
    """The folder that the caller was in when ./inv took over."""
    return Path(os.environ.get("PITORCH_CALLER_CWD") or Path.cwd())


def path(given: str) -> Path:
    """A path that was given on the command line; the caller's folder for an empty one."""
    return folder() / given


def home() -> str:
    """The home of whoever called: under sudo, of the one who typed it."""
    uid = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and uid.isdecimal():
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(int(uid)).pw_dir
    return str(Path("~").expanduser())


def expanded(given: str) -> str:
    """A path with ``~`` replaced by ``home``, and ``~NAME`` by that user's."""
    if given == "~" or given.startswith("~/"):
        return home() + given[1:]
    return os.path.expanduser(given)  # noqa: PTH111 (Path's raises where there is no such user)


def remember(words: Sequence[str], variables: Iterable[str]) -> None:
    """Keep the words behind ``./inv``, and the names of the variables that were set with them."""
    _typed[:] = words
    _set[:] = sorted(name for name in variables if _COUNT.fullmatch(name))


def as_root(task: str) -> str:
    """The line that repeats as root what was typed, with the variables that were set; ``task`` where nothing was.

    Of variables it has the names alone: a value may be a password.
    """
    if not _typed:
        return f"sudo {task}"
    kept = [f"--preserve-env={','.join(_set)}"] if _set else []
    program = "./inv" if folder().resolve() == _CHECKOUT else str(_CHECKOUT / "inv")
    return shlex.join(["sudo", *kept, program, *_typed])
