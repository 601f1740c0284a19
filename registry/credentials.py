"""Who we are to a registry: user and password, or an identity token.

A password is taken from the first of these that has one, and from nowhere else:

1. ``PITORCH_REGISTRY_PASSWORD`` in the environment, with the user named by ``--user``, ``registry.user``, or the
   credential store;
2. Docker's credential store: the helper named in ``config.json`` (``credHelpers``, ``credsStore``), else its
   ``auths``, as ``docker login`` left them;
3. a prompt, where there is a terminal.

It is never an argument of a command, never logged, and never part of an object's ``repr``. It is taken out of the
environment before any program is started, so that none inherits it.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.auth
import docker.errors

from registry.reference import Reference
from toolchain import progress
from toolchain.errors import RegistryRefused

PASSWORD_VARIABLE = "PITORCH_REGISTRY_PASSWORD"  # noqa: S105  (the name of a variable)

_taken = ""


def take_password() -> str:
    """The password that the environment has, or had: it is taken out of it, and kept here."""
    global _taken
    _taken = os.environ.pop(PASSWORD_VARIABLE, "") or _taken
    return _taken


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What proves to a registry who we are; the secret parts stay out of ``repr``."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """An OAuth 2 refresh token, stored by some registries' logins instead of a password."""
    source: str = ""
    """Where they were found, in words."""

    @property
    def basic(self) -> str:
        """The value of an ``Authorization`` header (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def for_engine(self, host: str) -> dict[str, str]:
        """As the engine's API takes them (``X-Registry-Auth``)."""
        if self.identity_token:
            return {"identitytoken": self.identity_token, "serveraddress": host}
        return {"username": self.user, "password": self.password, "serveraddress": host}


def find(reference: Reference, *, user: str = "") -> Credentials | None:
    """What the environment and Docker's credential store know about a registry; None when neither has anything.

    A ``user`` that is not the store's makes the store's password useless, and it is left alone. Raises
    RegistryRefused when the store names a helper that is missing or fails.
    """
    stored = _stored(reference.host)
    if password := take_password():
        name = user or (stored.user if stored else "")
        if not name:
            raise RegistryRefused(
                f"{PASSWORD_VARIABLE} is set, but it is not said whose password that is",
                expected="a user name",
                found=f"none given, and none in the credential store for {reference.host}",
                fix="give --user NAME, or set registry.user in invoke.yaml",
            )
        return Credentials(user=name, password=password, source=f"the environment ({PASSWORD_VARIABLE})")
    if stored is not None and user in ("", stored.user):
        return stored
    return None


def ask(reference: Reference, *, user: str = "") -> Credentials:
    """Prompt on the terminal. Raises RegistryRefused where there is none, or nothing was typed."""
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise RegistryRefused(
            f"{reference.host} wants to know who you are",
            expected=f"a password{f' of {user}' if user else ''}",
            found=f"none in the credential store or in {PASSWORD_VARIABLE}, and no terminal to ask on",
            fix=f"docker login {reference.host}, or set {PASSWORD_VARIABLE} and give --user NAME",
        )
    if not user:
        progress.console.print(f"User at {reference.host}: ", end="", markup=False)
        user = sys.stdin.readline().strip()
    password = getpass.getpass(f"Password of {user} at {reference.host}: ", stream=sys.stderr) if user else ""
    if not user or not password:
        raise RegistryRefused(
            f"{reference.host} wants to know who you are",
            expected="a user name and a password",
            found="nothing was typed",
            fix=f"run the task again, or docker login {reference.host}",
        )
    return Credentials(user=user, password=password, source="the prompt")


def require_readable() -> None:
    """Raise RegistryRefused when Docker's ``config.json`` cannot be read.

    Neither docker-py nor anybody else can tell then which credentials there are; docker-py would even say that no
    engine answers.
    """
    path = _config_file()
    fault = ""
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict):
            fault = f"a JSON {type(document).__name__}"
        else:
            docker.auth.load_config(config_dict=document)
    except (FileNotFoundError, NotADirectoryError):  # a home that is a file too
        return
    except OSError as problem:
        fault = problem.strerror or str(problem)
    except (docker.errors.InvalidConfigFile, KeyError, TypeError, AttributeError, ValueError) as problem:
        # The text of other faults may quote an entry, which holds a password.
        known = (json.JSONDecodeError, docker.errors.InvalidConfigFile)
        fault = str(problem) if isinstance(problem, known) else "an entry of another form"
    if fault:
        raise RegistryRefused(
            f"Docker's configuration {path} cannot be read",
            expected="a JSON object as docker login writes it",
            found=fault,
            fix="fix or delete that file, then docker login again",
        )


def _stored(host: str) -> Credentials | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # docker-py warns of a missing helper, which we report as an error
            entry: dict[str, Any] | None = docker.auth.load_config().resolve_authconfig(host)
    except docker.errors.DockerException as fault:
        raise RegistryRefused(
            "Docker's credential helper failed",
            expected=f"an answer of the helper that {_config_file()} names",
            found=" ".join(str(fault).split())[:200],
            fix=f"install or unlock that helper, set {PASSWORD_VARIABLE}, or remove it from config.json",
        ) from fault
    except ValueError:
        # Its text would quote what the helper printed.
        raise RegistryRefused(
            "Docker's credential helper failed",
            expected="a JSON object with Username and Secret",
            found="something else",
            fix=f"fix the helper that {_config_file()} names, or set {PASSWORD_VARIABLE}",
        ) from None
    lowered = {name.lower(): value for name, value in (entry or {}).items() if isinstance(value, str)}
    user, password, token = (lowered.get(name, "") for name in ("username", "password", "identitytoken"))
    if not token and not (user and password):
        return None
    return Credentials(user=user, password=password, identity_token=token, source="Docker's credential store")


def _config_file() -> Path:
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"
