"""Measure a lab with several hundred places on one coordinator: times, memory, and estimates for ``test-on-pi --all``.

labgrid's coordinator and exporters run on this PC. The boards are fictitious: exporters announce their addresses,
but nothing connects to them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from labgrid.remote.generated import labgrid_coordinator_pb2 as messages

from benchmarks.measure import Figure, Result, quantity
from benchmarks.workspace import Workspace
from device.lab import services
from device.lab.acquire import acquired
from device.lab.coordinator import Coordinator
from device.lab.services import program
from device.labgrid_client import client_environment
from toolchain import files, ports, process, progress
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed
from toolchain.lab_boards import parse

SIZES = (200, 400, 800)
BOARDS_PER_EXPORTER = 40
SUITE_S = 300.0
"""The assumed duration of the suite on each board."""

_TOGETHER = min(os.cpu_count() or 1, SIZES[0] // 2)
"""The number of boards that are acquired at the same time.

A lab must have at least twice as many places, because ``_complete`` acquires twice as many boards.
"""

_START_LIMIT_S = 300.0
_ALONE_LIMIT_S = 3600.0
_PYTEST = "import pytest, device.drive, device.strategy, labgrid.pytestplugin, labgrid.remote.client"
_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"

RULE = (
    "The coordinator alone: every place is acquired and released over one connection, in turn. Complete: "
    f"{2 * _TOGETHER} boards, {_TOGETHER} at a time, with a reservation and the process that releases a board. "
    f"Model of --all: all boards are acquired and released at the measured rate, and each runs for {SUITE_S:g} s. "
    "Model of the memory of --all: per board, the process that releases it and the suite's pytest with its imports."
)


@dataclass(frozen=True, kw_only=True)
class _Complete:
    """The results of acquiring and releasing boards as ``test-on-pi --all`` does: times, rate and memory."""

    acquire: Sequence[float]
    rate: float
    """The number of boards acquired and released per second."""
    keeper_mb: float
    """The memory of a process that releases a board."""


def measure(workspace: Workspace) -> Result:
    """Measure one lab for each size in ``SIZES``. Raises CommandFailed if the programs do not start."""
    pytest_mb = int(process.output_of([sys.executable, "-c", f"{_PYTEST}; {_PEAK}"], cwd=ROOT)) * 1024 / 1e6
    free_mb = psutil.virtual_memory().available / 1e6
    figures: list[Figure] = []
    for size in SIZES:
        with progress.step(f"{size} places"):
            figures += _of_size(workspace, size, pytest_mb, free_mb)
    return Result(
        name="lab",
        title=f"Times and memory of a lab by number of places, {BOARDS_PER_EXPORTER} boards per exporter",
        rule=RULE,
        figures=tuple(figures),
        facts={"pytest_mb": round(pytest_mb), "free_mb": round(free_mb)},
    )


def _of_size(workspace: Workspace, size: int, pytest_mb: float, free_mb: float) -> list[Figure]:
    with files.scratch_folder(workspace.folder, "lab") as scratch, _lab(workspace.config, scratch, size) as lab:
        coordinator, server, exporters = lab
        acquire, release = _in_turn(coordinator, size, workspace.times)
        listed = _milliseconds(coordinator.places, times=20)
        complete = _complete(coordinator)
        stalls = re.findall(r"took ([\d.]+) seconds", (scratch / "coordinator.log").read_text(errors="replace"))
        server_mb = server.memory_info().rss / 1e6
        exporter_mb = statistics.median(item.memory_info().rss / 1e6 for item in exporters)
    board_mb = complete.keeper_mb + pytest_mb
    stall = f"longest stall {max(map(float, stalls)):.2f} s" if stalls else "no stall above 0.1 s"
    return [
        *_figures(f"{size} places: acquire, the coordinator alone", acquire, note=stall),
        *_figures(f"{size} places: release, the coordinator alone", release),
        *_figures(f"{size} places: list them", listed),
        *_figures(f"{size} places: acquire, complete", [1000 * item for item in complete.acquire]),
        Figure(
            name=f"{size} places: memory of the coordinator",
            value=server_mb,
            unit="MB",
            note=f"exporters: {len(exporters)} with {quantity(exporter_mb, 'MB')} each",
        ),
        Figure(
            name=f"{size} places: test-on-pi --all (model)",
            value=size / complete.rate + SUITE_S,
            note=f"{quantity(complete.rate, 'boards/s')} acquired and released",
        ),
        Figure(
            name=f"{size} places: memory of test-on-pi --all (model)",
            value=size * board_mb,
            unit="MB",
            note=f"{quantity(board_mb, 'MB')} per board; {quantity(free_mb, 'MB')} available here",
        ),
    ]


def _figures(name: str, samples: Sequence[float], *, note: str = "") -> list[Figure]:
    """Return two figures in milliseconds: the median with its range, and the 90th percentile."""
    p90 = statistics.quantiles(samples, n=10, method="inclusive")[-1]
    middle = Figure(name=name, value=statistics.median(samples), unit="ms", samples=tuple(samples), note=note)
    return [middle, Figure(name="  90th percentile", value=p90, unit="ms")]


def _milliseconds(action: Any, *, times: int) -> list[float]:
    samples = []
    for _ in range(times):
        began = time.monotonic()
        action()
        samples.append(1000 * (time.monotonic() - began))
    return samples


def _in_turn(coordinator: Coordinator, size: int, times: int) -> tuple[list[float], list[float]]:
    """Return how long it takes, in milliseconds, to acquire and to release each place over one connection."""
    acquire: list[float] = []
    release: list[float] = []
    with coordinator.session(limit_s=_ALONE_LIMIT_S) as (stub, _):
        for _ in range(times):
            for number in range(size):
                request = messages.AcquirePlaceRequest(placename=f"b{number}")
                acquire += _milliseconds(lambda request=request: stub.AcquirePlace(request, timeout=60), times=1)
            for number in range(size):
                done = messages.ReleasePlaceRequest(placename=f"b{number}")
                release += _milliseconds(lambda done=done: stub.ReleasePlace(done, timeout=60), times=1)
    return acquire, release


def _complete(coordinator: Coordinator) -> _Complete:
    """Acquire and release boards in parallel, in the same way as ``test-on-pi --all``."""

    def hold(number: int) -> float:
        began = time.monotonic()
        with acquired(coordinator, {"name": f"b{number}"}, limit_s=_START_LIMIT_S):
            return time.monotonic() - began

    with acquired(coordinator, {"name": "b0"}, limit_s=_START_LIMIT_S):
        keepers = [item for item in psutil.Process().children() if "device.lab.release" in item.cmdline()]
        keeper_mb = keepers[0].memory_info().rss / 1e6
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
        acquire = list(pool.map(hold, range(2 * _TOGETHER)))
    return _Complete(acquire=acquire, rate=len(acquire) / (time.monotonic() - began), keeper_mb=keeper_mb)


@contextlib.contextmanager
def _lab(
    config: Config, scratch: Path, size: int
) -> Iterator[tuple[Coordinator, psutil.Process, list[psutil.Process]]]:
    """Start a lab with places ``b0``, ``b1``, …; yield the coordinator, its process and the exporters' processes."""
    coordinator = Coordinator(f"127.0.0.1:{ports.free_port()}")
    rows = [parse(f"b{number}=192.0.2.{number % 250 + 1}") for number in range(size)]
    with contextlib.ExitStack() as stack:
        words = ["labgrid-coordinator", "--listen", coordinator.address]
        server = stack.enter_context(_started(words, coordinator, scratch / "coordinator.log"))
        _wait(coordinator.responds, "labgrid's coordinator")
        exporters = []
        for first in range(0, size, BOARDS_PER_EXPORTER):
            name = f"pc{first // BOARDS_PER_EXPORTER}"
            group = rows[first : first + BOARDS_PER_EXPORTER]
            described = scratch / f"{name}.yaml"
            described.write_text(yaml.safe_dump(services.resources(config, group)))
            words = ["labgrid-exporter", "-c", coordinator.address, "-n", name, str(described)]
            exporters.append(stack.enter_context(_started(words, coordinator, scratch / f"{name}.log")))
            for row in group:
                coordinator.define(row.name, {"project": services.PROJECT, "kind": "ssh"}, f"{name}/{row.name}/*")
        _wait(lambda: len(coordinator.exported()) == size, "all exporters")
        yield coordinator, server, exporters


@contextlib.contextmanager
def _started(words: Sequence[str], coordinator: Coordinator, log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [program(words[0]), *words[1:]],
            cwd=log.parent,
            env={**os.environ, **client_environment(coordinator.address)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield psutil.Process(child.pid)
    finally:
        process.end_group(child)


def _wait(ready: Any, what: str) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not ready():
        if time.monotonic() > deadline:
            raise CommandFailed(f"{what} did not start", expected=f"a response within {_START_LIMIT_S:g} s")
        time.sleep(0.5)
