"""Make the native builder image from the native tools."""

from __future__ import annotations

from collections.abc import Mapping

from flow.context import Context
from flow.engine_images import image_missing, load_root
from images import rootfs
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that packs the native tools and loads them as an image."""

    def action(_: Mapping[str, Manifest]) -> Made:
        tar = context.root / "builder.tar"
        rootfs.pack_tools(context.tools, tar, epoch=context.epoch)
        return load_root(context, "builder", tar, context.native)

    return Step(
        name="builder",
        title="native builder image",
        code=__name__,
        inputs={"epoch": str(context.epoch)},
        needs=("mirror", "tools"),
        action=action,
        missing=image_missing(context, "builder"),
    )
