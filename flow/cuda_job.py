"""``build-cuda-wheel``: build the wheel with CUDA operators."""

from __future__ import annotations

import dataclasses

from engine.start import ensure_running
from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context, with_debian
from flow.steps import native_python
from toolchain.architecture import ARCHITECTURES, Architecture
from toolchain.config import Config
from toolchain.errors import PlatformMismatch
from toolchain.manifest import Manifest
from toolchain.steps import Decision

TARGETS = ("amd64", "arm64")
"""The architectures for which a wheel can be built: PCs, and boards with an NVIDIA GPU."""
SUITE = "bookworm"
"""Always the older suite, because libraries that are linked in this suite also run on newer systems."""


def context_of(config: Config) -> Context:
    """Return the build's context. The build runs in an amd64 image, regardless of the configured target."""
    image = with_debian(config.image, SUITE, "amd64")
    return Context(dataclasses.replace(config, image=dataclasses.replace(image, profile="container")))


def plan(config: Config, architecture: str = "amd64") -> list[Decision]:
    """Return a decision for each step: whether the step would run, and why."""
    with context_of(config) as context:
        return pipelines.cuda_job(context, target_of(architecture)).plan()


def build_wheel(config: Config, architecture: str = "amd64") -> Manifest:
    """Bring the wheel for an architecture up to date; return the wheel's manifest.

    If a step fails, raises the step's UserError.
    """
    target = target_of(architecture)
    ensure_running(config)
    native_python.ready(config)
    with context_of(config) as context, build_lock(context.root):
        pipeline = pipelines.cuda_job(context, target)
        return pipeline.execute(pipeline.plan())[-1]


def target_of(architecture: str) -> Architecture:
    """Return the architecture with this Debian name. Raises PlatformMismatch if CUDA is not available for it."""
    if architecture not in TARGETS:
        raise PlatformMismatch(
            f"CUDA is not available for {architecture}",
            expected=f"one of {', '.join(TARGETS)}",
            found=architecture,
            fix=f"run ./inv build-cuda-wheel --architecture={TARGETS[0]}",
        )
    return ARCHITECTURES[architecture]
