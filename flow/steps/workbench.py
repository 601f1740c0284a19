"""Build the workbench image: the development root with torch, libqpu and the extension."""

from __future__ import annotations

from collections.abc import Mapping

from flow import layers
from flow.context import Context
from flow.engine_images import image_missing
from images import system
from toolchain import files
from toolchain.config import ROOT
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that builds the image."""
    reference = context.config.image_reference("workbench")

    def action(needs: Mapping[str, Manifest]) -> Made:
        added = layers.layers(needs)
        names = [layer.name for layer in added]
        text = system.render(needs["dev"].facts["image"], names, labels={}, bootable=False)
        loaded = system.build(context.client, reference, text, added, context.target)
        return Made(facts={"image": loaded.image_id, "size": loaded.size, "reference": reference})

    return Step(
        name="workbench",
        title="workbench image",
        code=__name__,
        inputs={"templates": files.tree_fingerprint(ROOT / "images" / "templates", "Dockerfile.j2")},
        needs=("dev", "torch-site", "libqpu", "qpu-ops"),
        action=action,
        missing=image_missing(context, "workbench"),
    )
