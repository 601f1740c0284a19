"""Open a shell in the workbench: the development root with torch, libqpu, the extension and the caller's folder.

The compilers are native (images.native). Files that are created in the mounted folder belong to the caller, because the
container starts as root, creates a user with the caller's user and group IDs, and continues as that user.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from engine.containers import calling_user, label
from engine.proxies import build_environment
from images.native import Mounts
from toolchain.architecture import Architecture
from toolchain.errors import ArtefactMissing
from toolchain.process import deferred_signals, require_program

WORK = "/root/work"

_END_LIMIT_S = 20.0

_AS_CALLER = """
uid=$1 gid=$2
shift 2
if [ "$uid" -ne 0 ]; then
    getent group "$gid" >/dev/null || groupadd --gid "$gid" caller
    getent passwd "$uid" >/dev/null ||
        useradd --no-create-home --home-dir /root --shell /bin/bash --uid "$uid" --gid "$gid" caller
    chown "$uid:$gid" /root
    exec setpriv --reuid "$uid" --regid "$gid" --init-groups -- "$@"
fi
exec "$@"
"""


def command_line(
    image: str,
    architecture: Architecture,
    folder: Path,
    *,
    compiler: Mounts,
    command: Sequence[str],
    interactive: bool,
    user: tuple[int, int],
    name: str = "",
) -> list[str]:
    """Return docker's command line for opening the shell in a container called ``name`` (default: a new name).

    Every user of this PC can read the command line, so it contains only the names of the environment variables.
    ``environment`` returns the values.
    """
    docker = str(require_program("docker", "to open a shell in a container"))
    words = [docker, "run", "--rm", "--init=false", f"--name={name or _new_name()}", "--network=host"]
    words += ["--platform", architecture.oci_platform, "--interactive", *(["--tty"] if interactive else [])]
    words += ["--volume", f"{folder}:{WORK}", "--workdir", WORK, "--env", "HOME=/root"]
    words += [word for key, value in label().items() for word in ("--label", f"{key}={value}")]
    for bind in compiler.binds():
        words += ["--volume", bind]
    for variable in environment(architecture, compiler):
        words += ["--env", variable]
    return [*words, image, "sh", "-euc", _AS_CALLER, "sh", str(user[0]), str(user[1]), *command]


def require_folder(folder: Path) -> None:
    """Raise ArtefactMissing unless the folder exists."""
    if not folder.is_dir():
        raise ArtefactMissing(
            f"{folder} is not a folder",
            expected="a folder to mount at " + WORK,
            fix="pass an existing folder to --folder",
        )


def environment(architecture: Architecture, compiler: Mounts) -> dict[str, str]:
    """Return the values of the variables that ``command_line`` names.

    The values may be secret: the address of a proxy, for example, can contain a password.
    """
    return {**build_environment(), **architecture.emulation, **compiler.environment}


def open_shell(
    image: str, architecture: Architecture, folder: Path, *, compiler: Mounts, command: str, as_root: bool
) -> int:
    """Open a shell, or run ``command`` in the shell, and return the shell's exit status.

    The container is removed afterwards, even after Ctrl-C, SIGTERM or the loss of the terminal. Raises ArtefactMissing
    if ``folder`` does not exist.
    """
    require_folder(folder)
    words = ["bash", "-c", command] if command else ["bash", "-l"]
    interactive = not command and sys.stdin.isatty()
    argv = command_line(
        image,
        architecture,
        folder.resolve(),
        compiler=compiler,
        command=words,
        interactive=interactive,
        user=(0, 0) if as_root else calling_user(),
        name=(name := _new_name()),
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        with deferred_signals():
            stdin = None if interactive or not command else subprocess.DEVNULL
            started.append(
                subprocess.Popen(argv, stdin=stdin, env={**os.environ, **environment(architecture, compiler)})
            )
        return started[0].wait()
    finally:
        with deferred_signals():
            _end(argv[0], name, started)


def _new_name() -> str:
    return f"pitorch-shell-{uuid.uuid4().hex[:8]}"


def _end(docker: str, name: str, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Remove the container, regardless of the state of the docker program that started it.

    The docker program then exits and restores the terminal. The removal is repeated until the program has exited,
    because the program may still be creating the container.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    while True:
        if time.monotonic() > deadline:
            for child in started:
                child.kill()
        ended = all(child.poll() is not None for child in started)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [docker, "rm", "--force", "--volumes", name],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_END_LIMIT_S,
                start_new_session=True,  # so that a second Ctrl-C does not stop the removal
            )
        if ended:
            return
        for child in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
