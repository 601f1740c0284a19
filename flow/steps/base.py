"""Load the base of the system image: an image that contains the root filesystem and torch.

This step is separate from the step for the system image, so that it can run while extensions are compiled.
"""

from __future__ import annotations

from collections.abc import Mapping

from flow.context import Context
from flow.engine_images import image_missing
from images import archive
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that loads the root and torch as the layers of one image."""
    reference = context.config.image_reference("base")
    is_missing = image_missing(context, "base")

    def action(needs: Mapping[str, Manifest]) -> Made:
        root, torch = needs["rootfs"], needs["torch-site"]
        if not torch.artefacts:
            return Made(facts={"base": root.facts["image"]})
        layers = (
            archive.Layer(root.artefact(".tar")),
            archive.Layer(torch.artefact(".tar"), f"torch {torch.facts['version']}, unpacked"),
        )
        loaded = archive.load(context.client, layers, reference, context.target, epoch=context.epoch)
        facts = {"image": loaded.image_id, "reference": reference, "size": loaded.size}
        return Made(facts={**facts, "base": loaded.image_id})

    return Step(
        name="base",
        title="image with torch",
        code=__name__,
        inputs={"epoch": str(context.epoch)},
        needs=("torch-site", "rootfs"),
        action=action,
        missing=lambda made: is_missing(made) if "image" in made.facts else "",
    )
