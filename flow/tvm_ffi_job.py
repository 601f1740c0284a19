"""``build-tvm-ffi``: build an apache-tvm-ffi wheel for 32-bit ARM boards, for which PyPI has none.

The wheel is stored in the wheelhouse, from which ``serve-wheels`` serves it to boards, and in the artefact cache, from
which the next build with the same inputs takes it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.start import ensure_running
from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context
from toolchain import progress
from toolchain.config import Config
from toolchain.manifest import Artefact, Manifest, all_warnings
from toolchain.steps import Decision
from wheels.wheelhouse import place, wheelhouses


@dataclass(frozen=True)
class Done:
    """The wheel in the wheelhouse, and how long the whole job took, in seconds."""

    wheel: Artefact
    manifests: tuple[Manifest, ...]
    seconds: float
    warnings: tuple[str, ...]

    @property
    def row(self) -> progress.Row:
        """The wheel's row in the final table."""
        facts = self.manifests[-1].facts
        return progress.row_of(self.wheel.path.name, self.wheel, self.seconds, f"{facts['elf files']} ELF files")


def plan(config: Config) -> list[Decision]:
    """Return a decision for each step: whether the step would run, and why."""
    with Context(config) as context:
        return pipelines.tvm_ffi_job(context).plan()


def build_tvm_ffi(config: Config) -> Done:
    """Bring the wheel up to date and put it into the first wheelhouse. If a step fails, raises the step's UserError."""
    began = time.monotonic()
    with Context(config) as context:
        pipeline = pipelines.tvm_ffi_job(context)
        ensure_running(config)
        with build_lock(context.root):
            manifests = tuple(pipeline.execute(pipeline.plan()))
    wheel = manifests[-1].artefact(".whl").path
    wheelhouse = wheelhouses(config)[0]
    wheelhouse.mkdir(parents=True, exist_ok=True)
    placed, warnings = place(wheel, wheelhouse)
    for warning in warnings:
        progress.warn(warning)
    all_of_them = (*all_warnings(manifests), *warnings)
    return Done(Artefact.of(placed), manifests, time.monotonic() - began, all_of_them)
