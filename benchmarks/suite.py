"""Run the benchmarks one after the other (``./inv bench``)."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import importlib
import os
import time
from collections.abc import Iterator, Mapping

from benchmarks import torch_wheel
from benchmarks.machine import describe
from benchmarks.measure import Report
from benchmarks.workspace import Workspace
from engine.start import ensure_running
from toolchain import checkout, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, PlatformMismatch, UserError

BENCHMARKS: Mapping[str, str] = {
    "build": "benchmarks.build",
    "extension": "benchmarks.extension",
    "export": "benchmarks.export",
    "device": "benchmarks.device",
    "kernels": "benchmarks.kernels",
    "torch": "benchmarks.torch_wheel",
    "cpu": "benchmarks.cpu.compare",
    "models": "benchmarks.models.compare",
    "lab": "benchmarks.lab",
}
"""The module of each benchmark, in the order in which they run. The first builds the image that the others use.

A module is imported only for its benchmark, because labgrid, for example, takes a long time to import.
"""

_WITHOUT_ROOT = frozenset({"kernels", "lab"})


def bench(config: Config, name: str = "", *, times: int = 3, keep: bool = False, against: str = "") -> None:
    """Run one benchmark, or all of them; print and write each report when its benchmark ends.

    ``times`` is the number of repetitions of short measurements. The files built for the benchmarks are removed at the
    end, unless ``keep`` is set; keeping them makes the next run of a single benchmark faster. ``against`` is the path
    of a torch wheel that ``cpu`` also measures. A run of all benchmarks skips those that do not support the target or
    whose wheel or build tree is missing. Raises UserError for an unknown name, and RootNeeded.
    """
    if against and name != "cpu":
        raise UserError(
            "only the benchmark 'cpu' compares two wheels",
            expected="--name=cpu with --against",
            found=f"--name={name}" if name else "no --name",
            fix=f"run ./inv bench --name=cpu --against={against}",
        )
    chosen = _chosen(name)
    if not _WITHOUT_ROOT.issuperset(chosen):
        again = f"./inv bench --name={name}" if name else "./inv bench"
        process.require_root("to create files with different owners", again)
    if not name and not torch_wheel.has_tree(config):
        progress.say("    skipping torch: its build tree does not exist (./inv build-torch --again creates one)")
        chosen = [item for item in chosen if item != "torch"]
    ensure_running(config)
    workspace = Workspace.of(config, times=times, against=against)
    with workspace.exclusive(), _cleaned_up(workspace, keep=keep):
        for item in chosen:
            try:
                report = run_one(workspace, item)
            except (ArtefactMissing, PlatformMismatch) as fault:
                if name:
                    raise
                progress.warn(f"skipping {item}: {'; '.join(filter(None, (fault.summary, fault.fix)))}")
                continue
            path = report.write(workspace.results)
            print("\n".join([*report.machine.lines(), "", report.text(), f"results: {path}", ""]), flush=True)


def run_one(workspace: Workspace, name: str) -> Report:
    """Run one benchmark and record the machine and its load."""
    measure = importlib.import_module(BENCHMARKS[name]).measure
    machine = describe(workspace.config.image.target)
    started = datetime.datetime.now(datetime.UTC)
    began = time.monotonic()
    with progress.step(f"benchmark {name}"):
        result = measure(workspace)
    return Report(
        result=result,
        machine=machine,
        load_after=os.getloadavg(),
        started=started,
        seconds=time.monotonic() - began,
        commit=_commit(),
    )


def _chosen(name: str) -> list[str]:
    if not name:
        return list(BENCHMARKS)
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.5)
        raise UserError(
            f"there is no benchmark {name!r}",
            expected=f"one of {', '.join(BENCHMARKS)}",
            found=name,
            fix=f"run ./inv bench --name={near[0]}" if near else "run ./inv bench without --name to run all benchmarks",
        )
    return [name]


@contextlib.contextmanager
def _cleaned_up(workspace: Workspace, *, keep: bool) -> Iterator[None]:
    try:
        yield
    finally:
        if not keep:
            workspace.drop()


def _commit() -> str:
    """Return the checkout's commit, followed by ``+`` if there are uncommitted changes; empty outside a checkout."""
    found = checkout.state()
    return f"{found['commit']}+" if found["dirty"] else str(found["commit"])
