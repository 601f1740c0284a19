"""Run commands in containers, which are always removed afterwards.

A label on each container identifies the process that created it. If the process that created a container was killed,
the next task removes the container before it does anything else.

Build containers share the host's network, so a mirror or proxy on this machine has the same address in the container.
Every container is created for an explicit platform, which was verified when its image was built.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
import psutil
import requests
from docker.models.containers import Container

from engine.connect import ENGINE_ERRORS, connect, engine_lost
from engine.proxies import build_environment
from toolchain import progress
from toolchain.architecture import Architecture
from toolchain.errors import ArtefactMissing, CommandFailed, CommandTimedOut, EngineUnavailable
from toolchain.process import explain_exit, on_interrupt, pasteable
from toolchain.process_identity import find_recorded, record

_TAIL = 4000
_CREATOR = "pitorch.made-by"
_REMOVE_LIMIT_S = 5.0
_END_LIMIT_S = 60.0
"""The limit in seconds for each request that ends or removes a container. An engine that hangs exceeds it."""


@dataclass(frozen=True)
class Ran:
    """The output (stdout and stderr) and the duration of a command."""

    output: str
    seconds: float


def label() -> dict[str, str]:
    """Return the label for this process's containers. The label identifies the process and its PID namespace."""
    return {_CREATOR: json.dumps({**record(psutil.Process()), "namespace": _namespace()})}


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def remove_abandoned() -> None:
    """Remove the containers, running or stopped, of processes that no longer exist. Print each container's name.

    Does nothing if no engine responds.
    """
    try:
        with contextlib.closing(connect(timeout_s=_REMOVE_LIMIT_S)) as client:
            found = client.api.containers(all=True, filters={"label": _CREATOR})
            for box in found:
                if _creator_runs(box["Labels"][_CREATOR]):
                    continue
                with contextlib.suppress(docker.errors.APIError):  # another task has removed it in the meantime
                    client.api.remove_container(box["Id"], force=True, v=True)
                    progress.say(f"    removed the container of a killed task: {box['Names'][0].lstrip('/')}")
    except (EngineUnavailable, OSError):
        return


def _creator_runs(text: str) -> bool:
    """Return whether the process that created a container may still be running.

    A process in another PID namespace is assumed to be running.
    """
    try:
        creator = json.loads(text)
        return creator["namespace"] != _namespace() or find_recorded(creator) is not None
    except (ValueError, TypeError, KeyError):
        return True


@contextlib.contextmanager
def container(
    client: docker.DockerClient,
    image: str,
    argv: Sequence[str],
    *,
    architecture: Architecture,
    binds: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    workdir: str = "/",
    user: str = "",
    patience_s: float = 0.0,
) -> Iterator[Container]:
    """Create a container without starting it, and remove it by force when the block ends.

    If ``patience_s`` is not 0, a process that is still running in the container first receives SIGINT and has
    ``patience_s`` seconds to clean up. Raises ArtefactMissing or EngineUnavailable.
    """
    try:
        made = client.containers.create(
            image,
            list(argv),
            name=f"pitorch-{uuid.uuid4().hex[:12]}",
            labels=label(),
            platform=architecture.oci_platform,
            volumes=list(binds),
            environment={**build_environment(), **architecture.emulation, **(environment or {})},
            working_dir=workdir,
            user=user or None,
            network_mode="host",
            # The kernel ignores signals that process 1 sends to itself, so an emulated program that crashes would hang.
            init=True,
        )
    except docker.errors.ImageNotFound as fault:
        raise ArtefactMissing(
            f"the engine does not have the image {image}",
            expected="an image that an earlier step built",
            found="no such image",
            fix="run ./inv build-image",
        ) from fault
    except docker.errors.APIError as fault:
        found = str(fault.explanation)
        raise EngineUnavailable(f"the engine cannot create a container from {image}", found=found) from fault
    except ENGINE_ERRORS as fault:
        raise engine_lost(f"created a container from {image}", fault) from fault
    try:
        with on_interrupt(lambda: _end(made, patience_s)):
            yield made
    finally:
        try:
            if patience_s:
                _end(made, patience_s)
        finally:  # even if a second Ctrl-C arrives during the wait
            _remove(made)


def _remove(box: Container) -> None:
    try:
        with contextlib.closing(connect(timeout_s=_END_LIMIT_S)) as client:
            client.api.remove_container(str(box.id), force=True, v=True)
    except docker.errors.NotFound:
        return
    except (EngineUnavailable, *ENGINE_ERRORS) as fault:  # only a warning, which does not mask the block's error
        found = str(fault).partition("\n")[0]
        progress.warn(f"the container {box.name} may not have been removed; the next task tries to remove it: {found}")


def _end(made: Container, patience_s: float) -> None:
    """Stop a container's process if it is running."""
    with (
        contextlib.suppress(EngineUnavailable, *ENGINE_ERRORS),
        contextlib.closing(connect(timeout_s=_END_LIMIT_S)) as client,
    ):
        box = client.containers.get(str(made.id))
        if box.status != "running":
            return
        if patience_s:
            box.kill(signal="SIGINT")
            with contextlib.suppress(requests.exceptions.RequestException):
                box.wait(timeout=patience_s)
            box.reload()
        if box.status == "running":
            box.kill()


def run_in(
    client: docker.DockerClient,
    image: str,
    argv: Sequence[str],
    *,
    architecture: Architecture,
    binds: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    workdir: str = "/",
    user: str = "",
    limit_s: float = 3600.0,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    fix: str = "",
    patience_s: float = 0.0,
) -> Ran:
    """Run ``argv`` to completion in a new container from ``image``; write its output to ``log`` as it arrives.

    ``binds`` have the form ``SOURCE:TARGET:ro|rw``; ``patience_s`` is as in ``container``. Raises CommandFailed (unless
    ``check`` is false) or CommandTimedOut (after ``limit_s`` seconds), both with the last lines of the output. Raises
    EngineUnavailable if the engine stops responding.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(
            container(
                client,
                image,
                argv,
                architecture=architecture,
                binds=binds,
                environment=environment,
                workdir=workdir,
                user=user,
                patience_s=patience_s,
            )
        )
        sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(log.open("a"))
            sink.write(f"$ [{image}] {pasteable(argv)}\n")
        try:
            box.start()
        except docker.errors.APIError as fault:
            raise CommandFailed(
                f"the container created from {image} does not start",
                found=str(fault.explanation),
                fix="run ./inv doctor",
            ) from fault
        except ENGINE_ERRORS as fault:
            raise engine_lost(f"started a container from {image}", fault) from fault
        expired = threading.Event()
        try:
            stream = box.logs(stdout=True, stderr=True, stream=True, follow=True)

            def expire() -> None:
                expired.set()
                with contextlib.suppress(OSError):  # the engine has just closed the connection
                    stream.close()

            timer = threading.Timer(limit_s, expire)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
            output = _collect(stream, sink.write if sink else None, on_line)
            status = 0 if expired.is_set() else int(box.wait(timeout=_END_LIMIT_S)["StatusCode"])
        except ENGINE_ERRORS as fault:
            raise engine_lost(f"ran {pasteable(argv)[:200]} in {image}", fault) from fault
    if expired.is_set():
        raise CommandTimedOut(
            f"[{image}] {pasteable(argv)} timed out",
            tail=output[-_TAIL:],
            expected=f"completion within {limit_s:.0f} s",
            found="still running",
            fix=fix,
        )
    if status and check:
        raise CommandFailed(
            f"[{image}] {pasteable(argv)} failed",
            returncode=status,
            tail=output[-_TAIL:],
            found=explain_exit(status),
            fix=fix,
        )
    return Ran(output, time.monotonic() - began)


def _collect(
    stream: Iterator[bytes], write: Callable[[str], object] | None, on_line: Callable[[str], None] | None
) -> str:
    """Pass each block of the output to ``write`` and each line to ``on_line``, and return the full output."""
    output: list[str] = []
    rest = ""
    # A block may end in the middle of a character.
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def take(text: str) -> None:
        nonlocal rest
        output.append(text)
        if write is not None:
            write(text)
        if on_line is not None:
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                on_line(line)

    for block in stream:
        take(decode(block))
    take(decode(b"", final=True))
    return "".join(output)


def calling_user() -> tuple[int, int]:
    """Return the caller's user and group IDs; under sudo, those of the user who ran sudo."""
    uid, gid = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    return (int(uid), int(gid)) if uid and gid else (os.getuid(), os.getgid())
