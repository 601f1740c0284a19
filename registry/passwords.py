"""Take passwords from the environment, so that the programs that tasks start do not inherit them.

Every task imports this module to take the passwords from the environment. The module is separate because the modules
that use the passwords import large libraries.
"""

from __future__ import annotations

import os

REGISTRY = "PITORCH_REGISTRY_PASSWORD"
SIGNING = "PITORCH_SIGNING_PASSWORD"

_taken: dict[str, str] = {}


def take(variable: str) -> str:
    """Return the password in an environment variable.

    The first call removes the variable; later calls return the same password.
    """
    _taken[variable] = os.environ.pop(variable, "") or _taken.get(variable, "")
    return _taken[variable]
