"""Helpers that configure, start and stop a lab for the tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from device.lab import services
from device.lab.coordinator import Coordinator
from toolchain import ports
from toolchain.config import Config

LIMIT_S = 90.0
"""The time limit, on a busy machine, for a labgrid program to start or to detect that another one has ended."""


def with_boards(config: Config, *boards: str) -> Config:
    return replace(config, lab=replace(config.lab, boards=boards))


def eventually(condition: Callable[[], Any], interval_s: float = 0.2) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(interval_s)
    return found


@contextlib.contextmanager
def running(config: Config) -> Iterator[Config]:
    """Run a configuration's lab, with a separate coordinator."""
    made = replace(config, lab=replace(config.lab, coordinator=f"127.0.0.1:{ports.free_port()}"))
    coordinator = Coordinator(made.lab.coordinator)
    services.up(made)
    try:
        yield made
    finally:
        if coordinator.responds():
            for place in filter(lambda place: place.holder, coordinator.places().values()):
                coordinator.release(place.name, place.holder)
        services.down(made)
