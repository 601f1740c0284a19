"""Helpers that configure, start and stop a lab for the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from device.lab import services
from device.lab.coordinator import Coordinator
from toolchain import ports, reaper
from toolchain.config import Config


def with_boards(config: Config, *boards: str) -> Config:
    return replace(config, lab=replace(config.lab, boards=boards))


def programs(config: Config, name: str) -> list[int]:
    """Find the processes of one of the lab's programs, except its supervisor."""
    session = services.status(config).running[name]
    return [pid for pid, _, leader in reaper.running() if leader == session and pid != session]


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
