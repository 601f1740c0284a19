"""Retry operations that fail because of temporary registry errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from toolchain import progress
from toolchain.errors import (
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryHostUnknown,
    RegistryProxyUnusable,
    RegistryUnreachable,
)

RETRY_DELAYS_S = (2.0, 5.0, 10.0, 20.0)
"""The delays between attempts."""
STALL_S = 90.0
"""A transfer without progress for this time is cancelled."""
PATIENCE_S = 50.0
"""An operation is retried only if a transfer made progress within this time."""
_STEP = 1 << 16
_PERMANENT_AT_FIRST = (RegistryHostUnknown, RegistryConnectionRefused, RegistryProxyUnusable)

Result = TypeVar("Result")


class Activity:
    """The time at which a transfer to or from a registry last made progress, across all attempts."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Record the current time as the time of the last progress."""
        self._at = time.monotonic()

    def note(self, name: str, amount: float) -> None:
        """Record that this attempt has transferred ``amount`` bytes of ``name``, such as a layer.

        Bytes that are sent again do not count as progress.
        """
        if amount >= self._best.get(name, 0) + _STEP:
            self._best[name] = amount
            self.begin()

    @property
    def idle_s(self) -> float:
        """The time since the last progress, in seconds."""
        return time.monotonic() - self._at


class Remote(Protocol):
    """A connection to a registry (registry.connection)."""

    activity: Activity

    def ping(self) -> object:
        """Raise an error unless the registry responds."""


def with_retries(attempt: Callable[[], Result], remote: Remote, *, at_first: bool = False) -> Result:
    """Run ``attempt`` until it succeeds or fails permanently; return its result.

    The operation is not retried after ``PATIENCE_S`` seconds without progress. If ``at_first`` is true, an unknown
    host, a refused connection or an unusable proxy also ends the attempts.
    """
    delays = iter(RETRY_DELAYS_S)
    number = 0
    remote.activity.begin()
    while True:
        number += 1
        try:
            if number > 1 and not at_first:
                remote.ping()
            return attempt()
        except (RegistryBroke, RegistryUnreachable) as failure:
            delay_s = next(delays, None)
            if delay_s is None or remote.activity.idle_s + delay_s > PATIENCE_S:
                raise
            if at_first and isinstance(failure, _PERMANENT_AT_FIRST):
                raise
            progress.warn(f"{failure.summary} ({failure.found}); attempt {number + 1} in {delay_s:.0f} s")
        time.sleep(delay_s)
