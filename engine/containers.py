"""Run a command in a container that is gone afterwards, whatever happens.

Each has a label that says which process made it. One whose process was killed is removed when the next task starts.

Build containers share the host's network: a mirror or proxy on this machine is then reachable from inside by the
name it has outside. The platform is stated at every run and was verified when the image was made.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
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
import requests
from docker.models.containers import Container

from engine.daemon import DEFAULT_HOST, REFUSED_OR_GONE, ProcessRecord, build_environment, chosen, connect, gone
from toolchain import progress
from toolchain.architecture import Architecture
from toolchain.errors import (
    ArtefactMissing,
    CommandFailed,
    CommandTimedOut,
    EngineConfigUnusable,
    EngineUnavailable,
)
from toolchain.process import explain_exit, on_interrupt, pasteable

_TAIL = 4000
_MADE_BY = "pitorch.made-by"
_CLEAR_LIMIT_S = 5.0


@dataclass(frozen=True)
class Ran:
    """How the command ended: what it printed (stdout and stderr) and how long it took."""

    output: str
    seconds: float


def label() -> dict[str, str]:
    """The label of this process's containers: the process, and the namespace in which its number counts."""
    own = ProcessRecord.of(os.getpid())
    if own is None:
        raise RuntimeError("this process is not in /proc")
    return {_MADE_BY: json.dumps({**dataclasses.asdict(own), "namespace": _namespace()})}


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def clear_left() -> None:
    """Remove the containers of processes that are gone, stopped or not, and say which.

    Nothing is done where no engine answers at a socket of this machine: none is started for it.
    """
    try:
        if not (chosen().host or DEFAULT_HOST).startswith("unix://"):
            return
        with contextlib.closing(connect(timeout_s=_CLEAR_LIMIT_S)) as client:
            found = client.api.containers(all=True, filters={"label": _MADE_BY})
            gone_ = [box for box in found if not _maker_lives(box["Labels"][_MADE_BY])]
            for box in gone_:
                with contextlib.suppress(docker.errors.APIError):  # another task was faster
                    client.api.remove_container(box["Id"], force=True, v=True)
                    progress.say(f"    what a killed task left is removed: the container {box['Names'][0].lstrip('/')}")
    except (EngineUnavailable, EngineConfigUnusable, OSError, *REFUSED_OR_GONE):
        return


def _maker_lives(text: str) -> bool:
    """Whether a container's process may still run; of one in another namespace that is not known here."""
    try:
        made_by = json.loads(text)
        return made_by.pop("namespace") != _namespace() or ProcessRecord(**made_by).alive()
    except (ValueError, TypeError, KeyError, AttributeError):
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
    """A created, not yet started container; removed by force on any exit. Raises ArtefactMissing, EngineUnavailable.

    What still runs in it then gets Ctrl-C first and ``patience_s`` seconds to tidy up.
    """
    try:
        made = client.containers.create(
            image,
            list(argv),
            name=f"pitorch-{uuid.uuid4().hex[:12]}",
            labels=label(),
            platform=architecture.oci_platform,
            volumes=list(binds),
            environment={**build_environment(), **(environment or {})},
            working_dir=workdir,
            user=user or None,
            network_mode="host",
        )
    except docker.errors.ImageNotFound as fault:
        raise ArtefactMissing(
            f"the engine does not have the image {image}",
            expected="an image made by an earlier step",
            found="no such image",
            fix="run ./inv build-image",
        ) from fault
    except docker.errors.APIError as fault:
        found = str(fault.explanation)
        raise EngineUnavailable(f"the engine cannot make a container of {image}", found=found) from fault
    except REFUSED_OR_GONE as fault:
        raise gone(f"made a container of {image}", fault) from fault
    try:
        with on_interrupt(lambda: _end(made, patience_s)):
            yield made
    finally:
        try:
            if patience_s:
                _end(made, patience_s)
        finally:  # a second Ctrl-C too, while the first is waited for
            _remove(made)


def _remove(box: Container) -> None:
    try:
        box.remove(force=True, v=True)
    except docker.errors.NotFound:
        return
    except REFUSED_OR_GONE as fault:  # what went wrong before is what is to be told
        progress.warn(f"the container {box.name} may be left: {fault}")


def _end(box: Container, patience_s: float) -> None:
    """End what runs in a container, if anything does."""
    with contextlib.suppress(*REFUSED_OR_GONE):
        box.reload()
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
    """Run ``argv`` to its end in a fresh container of ``image``; its output goes to ``log`` as it comes.

    ``binds`` are ``SOURCE:TARGET:ro|rw``. Raises CommandFailed (unless ``check`` is false) or CommandTimedOut
    (``limit_s`` seconds), with the last lines of the output; EngineUnavailable where the engine ends meanwhile.
    ``patience_s`` as in ``container``.
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
                f"the container of {image} does not start",
                found=str(fault.explanation),
                fix="check that the program exists in the image and that ./inv doctor finds no fault",
            ) from fault
        except REFUSED_OR_GONE as fault:
            raise gone(f"started a container of {image}", fault) from fault
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            with contextlib.suppress(*REFUSED_OR_GONE):
                box.kill()

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        try:
            stream = box.logs(stdout=True, stderr=True, stream=True, follow=True)
            output = _collect(stream, sink.write if sink else None, on_line)
            status = int(box.wait()["StatusCode"])
        except REFUSED_OR_GONE as fault:
            raise gone(f"ran {pasteable(argv)[:200]} in {image}", fault) from fault
    if expired.is_set():
        raise CommandTimedOut(
            f"[{image}] {pasteable(argv)} was ended at its deadline",
            tail=output[-_TAIL:],
            expected=f"an end within {limit_s:.0f} s",
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
    kept: list[str] = []
    rest = ""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode  # a letter may come in two blocks

    def take(text: str) -> None:
        nonlocal rest
        kept.append(text)
        if write is not None:
            write(text)
        if on_line is not None:
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                on_line(line)

    for block in stream:
        take(decode(block))
    take(decode(b"", final=True))
    return "".join(kept)


def calling_user() -> tuple[int, int]:
    """User and group id of whoever called: under sudo, of the one who typed it."""
    uid, gid = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    return (int(uid), int(gid)) if uid and gid else (os.getuid(), os.getgid())
