"""Determine the caller's folder, home and command line.

``./inv`` changes to the checkout before it starts a task, and passes the caller's folder in ``PITORCH_CALLER_CWD``,
because paths on the command line are relative to that folder. The module also stores the command line and the names of
the environment variables that are set. With this information, error messages show how to repeat the command as root, or
how to run another task for the same architecture.
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
"""Matches the names of environment variables that a task reads and that sudo drops by default."""

_typed: list[str] = []
_set: list[str] = []
_architecture: list[str] = []


def folder() -> Path:
    """Return the folder from which ./inv was called."""
    return Path(os.environ.get("PITORCH_CALLER_CWD") or Path.cwd())


def path(given: str) -> Path:
    """Return a path from the command line, with ``~`` expanded, resolved against the caller's folder.

    The shell expands ``~`` only at the start of a word, not in ``--folder=~/nfs``.
    """
    return folder() / expanded(given)


def home() -> str:
    """Return the caller's home folder; under sudo, the home folder of the user who ran sudo."""
    uid = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and uid.isdecimal():
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(int(uid)).pw_dir
    return str(Path("~").expanduser())


def expanded(given: str) -> str:
    """Return a path with ``~`` replaced by ``home()``, and ``~NAME`` by the home folder of the user NAME."""
    if given == "~" or given.startswith("~/"):
        return home() + given[1:]
    return os.path.expanduser(given)  # noqa: PTH111 (Path.expanduser raises if there is no such user)


def remember(words: Sequence[str], variables: Iterable[str]) -> None:
    """Store the arguments of ``./inv`` and the names of the variables that were set."""
    _typed[:] = words
    _set[:] = sorted(name for name in variables if _COUNT.fullmatch(name))


def remember_architecture(given: str) -> None:
    """Store the value of the running task's option ``--architecture``; empty if the option was not given."""
    _architecture[:] = [given] if given else []


def command(task: str) -> str:
    """Return the command that runs another task for the same architecture as the running task."""
    return " ".join(["./inv", task, *(f"--architecture={given}" for given in _architecture)])


def as_root(task: str) -> str:
    """Return the command that repeats the caller's command as root.

    If no command was stored, the result is ``sudo`` followed by ``task``. The command lists the names of the variables
    to preserve, not their values, because a value may be a password.
    """
    if not _typed:
        return f"sudo {task}"
    kept = [f"--preserve-env={','.join(_set)}"] if _set else []
    program = "./inv" if folder().resolve() == _CHECKOUT else str(_CHECKOUT / "inv")
    return shlex.join(["sudo", *kept, program, *_typed])
