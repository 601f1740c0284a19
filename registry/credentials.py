"""Find the credentials for a registry: user and password, or an identity token.

The password comes from the first of these sources that contains one:

1. ``PITORCH_REGISTRY_PASSWORD`` in the environment, with the user in ``--user``, ``registry.user`` or the credential
   store;
2. Docker's credential store: the helper in ``config.json`` (``credHelpers``, ``credsStore``), or the entries in
   ``auths`` that ``docker login`` has written;
3. a prompt on a terminal.

The password is never passed as an argument, never logged, and never part of an object's ``repr``. The password is
removed from the environment before any program is started.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.auth
import docker.errors

from registry import passwords
from registry.reference import Reference
from toolchain import progress
from toolchain.errors import AccessDenied

PASSWORD_VARIABLE = passwords.REGISTRY
_BYPASS = f"set {PASSWORD_VARIABLE} and pass --user NAME"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials for a registry; the object's ``repr`` omits the secrets."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """An OAuth 2 refresh token, which some registries store instead of a password."""
    source: str = ""
    """The source of the credentials, for messages."""

    @property
    def basic(self) -> str:
        """The value of an ``Authorization`` header (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode(errors="surrogateescape")).decode()

    def for_engine(self, host: str) -> dict[str, str]:
        """Return the credentials in the format of the engine's API (``X-Registry-Auth``)."""
        if self.identity_token:
            return {"identitytoken": self.identity_token, "serveraddress": host}
        return {"username": self.user, "password": self.password, "serveraddress": host}


def find(reference: Reference, *, user: str = "") -> Credentials | None:
    """Return a registry's credentials from the environment or Docker's credential store, or None if neither has any.

    The store's password is not used if ``user`` differs from the store's user. Raises AccessDenied if the store is
    needed and its helper is missing or fails.
    """
    password = passwords.take(PASSWORD_VARIABLE)
    stored = None if password and user else _stored(reference.host)
    if password:
        name = user or (stored.user if stored else "")
        if not name:
            raise AccessDenied(
                f"{PASSWORD_VARIABLE} is set without a user name",
                expected="a user name",
                found=f"no user name was given, and the credential store has none for {reference.host}",
                fix="pass --user NAME, or set registry.user in invoke.yaml",
            )
        return Credentials(user=name, password=password, source=f"the environment ({PASSWORD_VARIABLE})")
    if stored is not None and user in ("", stored.user):
        return stored
    return None


def ask(reference: Reference, *, user: str = "") -> Credentials:
    """Prompt for credentials on the terminal. Raises AccessDenied if there is no terminal or the input is empty."""
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise AccessDenied(
            f"authentication required at {reference.host}",
            expected=f"a password{f' for {user}' if user else ''}",
            found=f"none in the credential store or in {PASSWORD_VARIABLE}, and no terminal for a prompt",
            fix=f"run docker login {reference.host}, or {_BYPASS}",
        )
    if not user:
        progress.console.print(f"User at {reference.host}: ", end="", markup=False)
        user = sys.stdin.readline().strip()
    password = passwords.prompt(f"Password of {user} at {reference.host}: ") if user else ""
    if not user or not password:
        raise AccessDenied(
            f"authentication required at {reference.host}",
            expected="a user name and a password",
            found="no input",
            fix=f"run the task again, or run docker login {reference.host}",
        )
    return Credentials(user=user, password=password, source="the prompt")


def require_readable() -> None:
    """Raise AccessDenied if Docker's ``config.json`` cannot be read.

    Without this check, docker-py would report that the engine does not respond.
    """
    path = _config_file()
    fault = ""
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict):
            fault = f"a JSON {type(document).__name__}"
        else:
            docker.auth.load_config(config_dict=document)
    except (FileNotFoundError, NotADirectoryError):  # this includes a parent that is a file
        return
    except OSError as problem:
        fault = problem.strerror or str(problem)
    except (docker.errors.InvalidConfigFile, KeyError, TypeError, AttributeError, ValueError) as problem:
        # Other exceptions may quote an entry, and thus a password.
        known = (json.JSONDecodeError, docker.errors.InvalidConfigFile)
        fault = str(problem) if isinstance(problem, known) else "an invalid entry"
    if fault:
        raise AccessDenied(
            f"Docker's configuration {path} cannot be read",
            expected="a JSON object as written by docker login",
            found=fault,
            fix="repair or delete the file, then run docker login again",
        )


def _stored(host: str) -> Credentials | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # docker-py only warns about a missing helper
            entry: dict[str, Any] | None = docker.auth.load_config().resolve_authconfig(host)
    except docker.errors.DockerException as fault:
        raise AccessDenied(
            "Docker's credential helper failed",
            expected=f"output from the credential helper that {_config_file()} names",
            found=" ".join(str(fault).split())[:200],
            fix=f"install or unlock the credential helper, remove it from config.json, or {_BYPASS}",
        ) from fault
    except ValueError:
        raise AccessDenied(
            "Docker's credential helper failed",
            expected="a JSON object with Username and Secret",
            found="other output",
            fix=f"repair the helper that {_config_file()} names, or {_BYPASS}",
        ) from None  # the original exception quotes the helper's output, which may contain the password
    lowered = {name.lower(): value for name, value in (entry or {}).items() if isinstance(value, str)}
    user, password, token = (lowered.get(name, "") for name in ("username", "password", "identitytoken"))
    if not token and not (user and password):
        return None
    return Credentials(user=user, password=password, identity_token=token, source="Docker's credential store")


def _config_file() -> Path:
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"
