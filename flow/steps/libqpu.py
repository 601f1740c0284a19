"""Compile libqpu for the target."""

from __future__ import annotations

from collections.abc import Mapping

from flow.compilers import library_image
from flow.context import Context
from recipes import recipe
from recipes.libqpu import build as libqpu
from toolchain import files
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that compiles, installs and packs the library."""
    config = context.config
    data = recipe.load("libqpu")
    tar = context.root / "libqpu.tar"
    role = library_image(context)

    def action(needs: Mapping[str, Manifest]) -> Made:
        reference, image_id = config.image_reference(role), needs[role].facts["image"]
        log, is_cross = context.log("libqpu"), role == "builder"
        libqpu.build(context.client, reference, image_id, data, config, tar, log, cross=is_cross)
        files.unpack(tar, context.libqpu_stage)
        return Made((tar,), facts={"prefix": data.settings["prefix"], "own": True, "library": "libqpu"})

    return Step(
        name="libqpu",
        title=data.title,
        code=__name__,
        inputs={"library": "local", "sources": data.fingerprint(), "epoch": str(context.epoch)},
        needs=(role,),
        action=action,
        missing=lambda _: "" if context.libqpu_stage.is_dir() else "its folder is missing",
    )
