"""Build the target's root filesystem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flow import roots
from flow.context import Context
from flow.engine_images import image_missing, load_root
from images import rootfs
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that builds the target's root filesystem and loads it into the engine as an image."""
    parts = {"bootable": context.image.profile == "bootable", "card": context.image.card}
    overlays = roots.overlays(context, *(name for name, wanted in parts.items() if wanted))

    def action(needs: Mapping[str, Manifest]) -> Made:
        roots.require_execution(context)
        spec = dataclasses.replace(
            roots.target_spec(context, needs),
            overlays=overlays,
            fetched=tuple(needs["archives"].facts.get("packages", ())),  # older manifests lack this fact
            native_tools=context.tools,
        )
        tar = context.root / "rootfs.tar"
        rootfs.build_tar(spec, tar, context.log("rootfs"))
        made = load_root(context, "rootfs", tar, context.target)
        left_out = roots.unverified_pockets(context, needs["mirror"])
        return dataclasses.replace(made, facts={**made.facts, "left_out": left_out})

    return Step(
        name="rootfs",
        title="root filesystem",
        code=__name__,
        inputs={
            **roots.target_packages(context),
            **roots.mmdebstrap_inputs(context),
            **roots.overlay_inputs(overlays),
        },
        # The step ``archives`` downloads the packages while the native tools are extracted. This step downloads only
        # the packages that are still missing.
        needs=("mirror", "tools", "torch", "archives"),
        action=action,
        missing=image_missing(context, "rootfs"),
    )
