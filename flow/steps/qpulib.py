"""Build upstream's QPULib instead of our libqpu (``qpu.library: upstream``)."""

from __future__ import annotations

from collections.abc import Mapping

from flow.compilers import library_image
from flow.context import Context
from recipes import recipe
from recipes.qpulib import build as qpulib
from toolchain import files, progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that fetches, compiles and installs QPULib."""
    config = context.config
    data = recipe.load("qpulib")
    tar = context.root / "libqpu.tar"
    variant = qpulib.Variant.of(config)
    role = library_image(context)

    def action(needs: Mapping[str, Manifest]) -> Made:
        reference, image_id = config.image_reference(role), needs[role].facts["image"]
        source = qpulib.obtain(data, config)
        log, is_cross = context.log("libqpu"), role == "builder"
        qpulib.build(context.client, reference, image_id, data, source, config, tar, log, cross=is_cross)
        files.unpack(tar, context.libqpu_stage)
        warnings = (
            f"the image contains upstream QPULib ({variant.label}) instead of our libqpu, so qpu-info and "
            "qpu-selftest are missing",
            *([source.warning] if source.warning else []),
        )
        for warning in warnings:
            progress.warn(warning)
        library = f"QPULib {source.commit or 'of unknown commit'}, {variant.label}"
        return Made((tar,), {"prefix": data.settings["prefix"], "own": False, "library": library}, warnings)

    return Step(
        name="libqpu",
        title=data.title,
        code=__name__,
        inputs={
            "library": "upstream",
            "mode": variant.label,
            "source": qpulib.identity(data, config),
            "recipe": data.fingerprint(),
            "epoch": str(context.epoch),
        },
        needs=(role,),
        action=action,
        missing=lambda _: "" if context.libqpu_stage.is_dir() else "its folder is missing",
    )
