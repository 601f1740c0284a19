"""The user name and the environment variables of labgrid's clients."""

from __future__ import annotations

import getpass
import os


def own_user() -> str:
    """Return the user name for labgrid, which under sudo is the name of the user who ran sudo."""
    return os.environ.get("LG_USERNAME") or os.environ.get("SUDO_USER") or getpass.getuser()


def client_environment(coordinator: str) -> dict[str, str]:
    """Return environment variables for labgrid's programs.

    ``LG_USERNAME`` contains the user's name, and ``no_grpc_proxy`` prevents connections to the coordinator from using
    an HTTP proxy.
    """
    return {"no_grpc_proxy": coordinator.rpartition(":")[0].strip("[]"), "LG_USERNAME": own_user()}
