"""Wait for a free labgrid place, hold it while a ``with`` block runs, and always release it at the end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from device.lab.coordinator import Coordinator, Place, own_name
from toolchain import process, progress
from toolchain.config import ROOT
from toolchain.errors import CommandFailed, InUse, UserError

_POLL_S = 0.5
_RELEASE_LIMIT_S = 60.0


@contextlib.contextmanager
def acquired(coordinator: Coordinator, filters: Mapping[str, str], *, limit_s: float) -> Iterator[Place]:
    """Reserve and acquire a place, and release it at the end of the ``with`` block.

    ``filters`` are the tags that the place must have; ``{"name": NAME}`` selects the place with that name.

    labgrid's reservations form a queue, so users get boards in the order of their requests.

    Raises UserError if no place has the tags or the board's exporter is not running. Raises InUse, which names the
    holder, if no board is free within ``limit_s`` seconds. Raises NetworkUnreachable if the coordinator does not
    respond.
    """
    _require_match(coordinator, filters)
    token = coordinator.reserve(filters)
    try:
        name = _allocation(coordinator, filters, token, limit_s)
    except BaseException:
        with contextlib.suppress(UserError):
            coordinator.cancel(token)
        raise
    with _released(coordinator, name, token):
        try:
            place = coordinator.places().get(name)
            if place is None:
                raise CommandFailed("the place is missing", found=f"the place {name} was deleted")
            coordinator.acquire(place)
        except CommandFailed as fault:
            raise UserError(
                f"{name} cannot be acquired",
                expected="a place whose resources are exported",
                found=fault.found,
                fix="run ./inv lab up on the PC that the board is connected to, then run ./inv lab status and check "
                "that the board's resources are exported",
            ) from fault
        yield coordinator.places()[name]


def _matching(coordinator: Coordinator, filters: Mapping[str, str]) -> list[Place]:
    return [
        place
        for place in coordinator.places().values()
        if filters.items() <= {**place.tags, "name": place.name}.items()
    ]


def _require_match(coordinator: Coordinator, filters: Mapping[str, str]) -> None:
    if _matching(coordinator, filters):
        return
    tags = ", ".join(f"{key}={value}" for key, value in filters.items())
    raise UserError(
        f"no board has the tags {tags}",
        expected=f"a place with these tags on the coordinator at {coordinator.address}",
        found=", ".join(sorted(coordinator.places())) or "no places",
        fix="to list the places and tags, run ./inv lab status; to define the places in lab.boards, run ./inv lab up",
    )


def _allocation(coordinator: Coordinator, filters: Mapping[str, str], token: str, limit_s: float) -> str:
    """Wait until a place is allocated to the reservation, and return the place's name.

    Raises InUse if no place is allocated within ``limit_s`` seconds.
    """
    interrupted = threading.Event()
    deadline = time.monotonic() + limit_s
    shown = ""
    with process.on_interrupt(interrupted.set):
        while not (name := coordinator.allocated(token)):
            held = [place for place in _matching(coordinator, filters) if place.holder]
            text = "; ".join(place.held_text() for place in held) or "other reservations are ahead in the queue"
            if interrupted.is_set():
                raise CommandFailed("interrupted while waiting for a board", found=text)
            if time.monotonic() > deadline:
                raise InUse(
                    "the board is in use",
                    expected=f"a free board within {limit_s:g} s",
                    found=text,
                    fix="wait and try again, ask the holder to release the board, or increase lab.queue_limit_s",
                )
            if text != shown:
                progress.say(f"    waiting up to {limit_s:g} s for a free board: {text}")
                shown = text
            interrupted.wait(_POLL_S)
    return name


@contextlib.contextmanager
def _released(coordinator: Coordinator, name: str, token: str) -> Iterator[None]:
    """Release the place at the end of the ``with`` block, or when this process is killed (see device.lab.release)."""
    words = [sys.executable, "-m", "device.lab.release", coordinator.address, name, own_name(), token]
    with process.deferred_signals():
        keeper = subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        yield
    finally:
        released = b""
        with contextlib.suppress(UserError):
            coordinator.give_back(name, own_name(), token)
            released = b"released"
        try:
            _, said = keeper.communicate(released, timeout=_RELEASE_LIMIT_S)
            if keeper.returncode:
                progress.warn(f"{name} may still be held: {said.decode(errors='replace').strip()}")
        except subprocess.TimeoutExpired:
            progress.warn(f"{name} is still held: process {keeper.pid} releases it when the coordinator responds")
