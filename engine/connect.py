"""Find the selected Docker engine and connect to it.

Like the docker program, this module uses ``DOCKER_HOST`` if it is set, else docker's current context, else the default
socket. Only Unix sockets are supported, because builds mount folders from this machine into containers.
"""

from __future__ import annotations

import grp
import http.client
import os
import socket
from pathlib import Path
from typing import NamedTuple

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.context import ContextAPI
from docker.context.config import get_current_context_name

from toolchain.errors import EngineUnavailable

DEFAULT_HOST = "unix:///var/run/docker.sock"

ENGINE_ERRORS = (
    *(docker.errors.DockerException, requests.RequestException),
    *(urllib3.exceptions.HTTPError, http.client.HTTPException, ConnectionError),
)
"""The exceptions that docker-py raises if the engine rejects a request, does not respond, or exits while responding."""


class Selection(NamedTuple):
    """The engine that the user selected. An empty ``host`` selects the engine at the default socket."""

    host: str = ""
    source: str = "DOCKER_HOST"
    undo: str = "unset DOCKER_HOST"
    """The command that undoes the selection."""


def selected() -> Selection:
    """Return the engine that DOCKER_HOST or docker's context selects.

    Raises EngineUnavailable if the selected engine cannot be used.
    """
    if host := os.environ.get("DOCKER_HOST", ""):
        return _supported(Selection(host))
    from_environment = os.environ.get("DOCKER_CONTEXT", "")
    name = from_environment or get_current_context_name()
    if name == "default":
        return Selection()
    source = f"docker's context {name}"
    undo = "unset DOCKER_CONTEXT" if from_environment else "docker context use default"
    try:
        context = ContextAPI.get_context(name)
        host = (context.Host if context is not None else "") or ""
        found = "no such context" if context is None else "a context without an address"
    except Exception as fault:  # docker-py raises a plain Exception, or KeyError and others for a malformed file
        found = str(fault)
    if not host:
        raise EngineUnavailable(
            f"{source} cannot be used",
            expected="a context that docker context ls lists and that contains the address of an engine",
            found=found,
            fix=f"{undo}, or create the context: docker context create {name}",
        )
    return _supported(Selection(host.removeprefix("http+"), source, undo))  # docker-py writes http+unix://


def _supported(selection: Selection) -> Selection:
    if not selection.host.startswith("unix://"):
        raise EngineUnavailable(
            f"the Docker engine that {selection.source} selects does not use a Unix socket on this machine",
            expected="unix://PATH, because builds bind-mount folders from this machine into containers",
            found=selection.host,
            fix=f"{selection.undo}, or run ./inv on the machine where that engine runs",
        )
    return selection


def connect(*, timeout_s: float = 600.0) -> docker.DockerClient:
    """Return a client connected to the selected engine.

    ``timeout_s`` is the limit for each API call. Raises EngineUnavailable.
    """
    return connect_to(selected(), timeout_s=timeout_s)


def connect_to(selection: Selection, *, timeout_s: float) -> docker.DockerClient:
    """Return a client connected to the given engine."""
    address = selection.host or DEFAULT_HOST
    try:
        # If nothing listens at the address, docker-py does not close its socket, so the connection is tested first.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(timeout_s)
            probe.connect(str(_socket_path(address)))
        # Creating the client sends a request to the engine, to negotiate the API version.
        return docker.DockerClient(base_url=address, timeout=int(timeout_s))
    except (docker.errors.InvalidConfigFile, AttributeError, TypeError) as fault:
        # docker-py does not validate the configuration file.
        raise EngineUnavailable(
            "docker's configuration file for this user cannot be read",
            expected="a JSON object in ~/.docker/config.json, or in config.json in the folder that DOCKER_CONFIG names",
            found=str(fault),
            fix="repair or remove this configuration file",
        ) from fault
    except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as fault:
        raise unavailable(selection, fault) from fault


def image_id(client: docker.DockerClient, reference: str) -> str:
    """Return the ID of an image, or an empty string if the engine does not have the image."""
    try:
        return str(client.images.get(reference).id)
    except (docker.errors.ImageNotFound, docker.errors.NullResource):
        return ""


def unavailable(selection: Selection, fault: BaseException | None = None) -> EngineUnavailable:
    """Return the error for an engine that does not respond."""
    address = selection.host or DEFAULT_HOST
    expected = f"an engine that responds at {address}"
    if not_accessible(address):
        path = _socket_path(address)
        group = group_name(path.stat().st_gid)
        return EngineUnavailable(
            "access to the Docker engine's socket denied",
            expected=expected,
            found=f"{path} belongs to group {group}, of which you are not a member",
            fix=f"run sudo usermod -aG {group} $USER, then log in again",
        )
    if address != DEFAULT_HOST:
        return EngineUnavailable(
            f"the Docker engine that {selection.source} selects does not respond",
            expected=expected,
            found=_reason(fault),
            fix=f"start that engine, or {selection.undo} to use the default engine",
        )
    return EngineUnavailable(
        "no Docker engine responds",
        expected=expected,
        found=_reason(fault),
        fix="run ./inv doctor to start an engine, or set DOCKER_HOST to the socket of another engine on this machine",
    )


def engine_lost(action: str, fault: BaseException) -> EngineUnavailable:
    """Return the error for an engine that stopped responding; ``action`` completes "while it …" in the message."""
    return EngineUnavailable(
        f"the Docker engine stopped responding while it {action}",
        expected="an engine that responds until the step is done",
        found=_reason(fault),
        fix="find the cause in the engine's log, restart the engine with ./inv doctor, then run the task again",
    )


def not_accessible(address: str) -> bool:
    """Return whether the socket exists but this user has no access to it."""
    path = _socket_path(address)
    # If the folder is not accessible, Path.exists raises PermissionError, but os.path.exists returns False.
    return os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)  # noqa: PTH110


def group_name(number: int) -> str:
    """Return the name of the group with this number, or the number as text if the group has no name."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _socket_path(address: str) -> Path:
    return Path(address.removeprefix("unix://") or DEFAULT_HOST.removeprefix("unix://"))


def _reason(fault: BaseException | None) -> str:
    """Return the exception's text on one line."""
    return " ".join(str(fault).split())[:300] if fault is not None else "no response"
