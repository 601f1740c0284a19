"""Load a root filesystem into the engine as an image, and check whether the engine still has this image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.connect import ENGINE_ERRORS, image_id
from flow.context import Context
from images import archive
from toolchain.architecture import Architecture
from toolchain.errors import EngineUnavailable
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import Made

NO_ENGINE = "no engine is running"
"""The reason why a step runs if its image cannot be checked."""


def load_root(context: Context, role: str, tar: Path, architecture: Architecture) -> Made:
    """Load the tar archive of a root filesystem into the engine, as the image for ``role``."""
    reference = context.config.image_reference(role)
    layer = Artefact.of(tar)
    loaded = archive.load(context.client, [archive.Layer(layer)], reference, architecture, epoch=context.epoch)
    return Made((layer,), facts={"image": loaded.image_id, "reference": reference, "size": loaded.size})


def image_missing(context: Context, role: str) -> Callable[[Manifest], str]:
    """Return a function for ``Step.missing`` that checks whether the engine still has the step's image for ``role``."""

    def probe(made: Manifest) -> str:
        try:
            found = image_id(context.client, context.config.image_reference(role))
        except (EngineUnavailable, *ENGINE_ERRORS):
            return NO_ENGINE
        if not found:
            return "the engine no longer has its image"
        return "" if found == made.facts["image"] else "the engine has a different image with this name"

    return probe
