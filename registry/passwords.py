"""Take passwords from the environment or a prompt. The programs that tasks start do not inherit the passwords.

Every task imports this module to take the passwords from the environment. The module is separate because the modules
that use the passwords import large libraries.
"""

from __future__ import annotations

import getpass
import os
import sys

REGISTRY = "PITORCH_REGISTRY_PASSWORD"
SIGNING = "PITORCH_SIGNING_PASSWORD"

_taken: dict[str, str] = {}


def take(variable: str) -> str:
    """Return the password in an environment variable.

    The first call removes the variable; later calls return the same password.
    """
    _taken[variable] = os.environ.pop(variable, "") or _taken.get(variable, "")
    return _taken[variable]


def prompt(text: str) -> str:
    """Prompt for a password on the terminal; return an empty string at the end of the input (Ctrl-D)."""
    try:
        return getpass.getpass(text, stream=sys.stderr)
    except EOFError:
        print(file=sys.stderr)  # getpass ends the line only after an input
        return ""
