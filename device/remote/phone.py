"""Access to phones through adb: the adb server, a phone's state, and the command line for a phone.

The adb client connects to a server, which manages the connections to all phones. If a server is running, or if an
environment variable specifies a server, this server is used. Otherwise, a private server runs during the session, on a
UNIX socket that only this user can open.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from device.remote import faults
from device.remote.address import Address
from toolchain import process
from toolchain.errors import BoardSilent, CommandFailed

_PORT = 5037
_VARIABLES = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT")
_LIMIT_S = 60.0
_SETTLE_S = 5.0
"""How long to wait until the server has found a phone and the phone's state is "device".

A server that has just been started lists no phones, and a phone is "offline" or "authorizing" at first.
"""
_STATES = {"unauthorized": "unauthorized-phone", "authorizing": "unauthorized-phone", "offline": "offline-phone"}


@contextlib.contextmanager
def connected(address: Address) -> Iterator[list[str]]:
    """The beginning of an adb command line for the phone at ``address``. The caller appends the adb command.

    Raises ProgramMissing if adb is missing, and BoardSilent if there is no phone or the phone is offline. Raises
    AccessDenied if the phone does not accept this PC's key, and UserError if there are several phones or the phone is
    in another state.
    """
    with _server() as adb:
        answer = ""
        if ":" in address.host:
            answer = process.run([*adb, "connect", address.host], limit_s=_LIMIT_S, check=False).output.strip()
        deadline = time.monotonic() + _SETTLE_S
        while True:
            last = time.monotonic() >= deadline
            phones = states(process.run([*adb, "devices"], limit_s=_LIMIT_S).output)
            try:
                serial, state = choose(phones, address, answer)
            except BoardSilent:
                if last or answer:
                    raise
            else:
                if last or state == "device":
                    break
            time.sleep(0.1)
        require_usable(state, address)
        yield [*adb, "-s", serial]


def states(listed: str) -> Mapping[str, str]:
    """The state of each phone in the output of ``adb devices``, by serial number."""
    return {found[1]: found[2].strip() for found in re.finditer(r"^(\S+)\t(.+)$", listed, re.MULTILINE)}


def choose(phones: Mapping[str, str], address: Address, answer: str = "") -> tuple[str, str]:
    """The serial number and the state of the phone at ``address``. ``answer`` is the output of ``adb connect``.

    Raises BoardSilent if no phone matches the address, or UserError if several phones match.
    """
    if address.host in phones:
        return address.host, phones[address.host]
    rows = ", ".join(f"{serial} ({state})" for serial, state in phones.items())
    if address.host or not phones:
        raise faults.error_of("no-phone", answer or rows or "no phones", where=address)
    if len(phones) > 1:
        raise faults.error_of("several-phones", rows)
    return next(iter(phones.items()))


def require_usable(state: str, address: Address) -> None:
    """Raise AccessDenied, BoardSilent or UserError if the phone's state is not ``device``."""
    if state != "device":
        raise faults.error_of(_STATES.get(state, "unusable-phone"), f"the state {state}", where=address)


@contextlib.contextmanager
def _server() -> Iterator[list[str]]:
    """The adb client's command line. If no server is running, a private one runs during the ``with`` block."""
    adb = str(process.require_program("adb", "to reach a phone"))
    if any(os.environ.get(name) for name in _VARIABLES) or _answers():
        yield [adb]
        return
    # A socket's path can have at most 107 characters, so the socket cannot be in the build folder.
    with tempfile.TemporaryDirectory(prefix="pitorch-adb-") as name, tempfile.TemporaryFile() as log:
        path = Path(name) / "socket"
        words = [adb, "-L", f"localfilesystem:{path}"]
        # The server is not started by start-server, because such a server must be stopped by kill-server, which
        # sometimes hangs when adb deadlocks during shutdown.
        with subprocess.Popen(
            [*words, "nodaemon", "server"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        ) as server:
            try:
                deadline = time.monotonic() + _LIMIT_S
                while not _accepts(path):
                    if server.poll() is not None or time.monotonic() >= deadline:
                        log.seek(0)
                        raise CommandFailed("the adb server did not start", tail=log.read().decode(errors="replace"))
                    time.sleep(0.05)
                yield words
            finally:
                server.kill()


def _accepts(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return True
    return False


def _answers() -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", _PORT), timeout=5):
        return True
    return False
