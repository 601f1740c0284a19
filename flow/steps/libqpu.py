"""Compile libqpu for the target or, if ``qpu.library`` is ``upstream``, upstream's QPULib."""

from __future__ import annotations

from collections.abc import Mapping

from flow.compilers import library_image
from flow.context import Context
from recipes import library, recipe
from recipes.libqpu import build as libqpu
from recipes.qpulib import build as qpulib
from toolchain import files, progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that compiles, installs and packs the library."""
    config = context.config
    is_upstream = config.qpu.library == "upstream"
    data = recipe.load("qpulib" if is_upstream else "libqpu")
    tar = context.root / "libqpu.tar"
    variant = qpulib.Variant.of(config).label
    role = library_image(context)

    def action(needs: Mapping[str, Manifest]) -> Made:
        warnings: list[str] = []
        if is_upstream:
            source = qpulib.obtain(data, config)
            plan = qpulib.plan(data, source, config, cross=role == "builder")
            name = f"QPULib {source.commit or 'of unknown commit'}, {variant}"
            warnings.append(
                f"the image contains upstream QPULib ({variant}) instead of our libqpu, so qpu-info and qpu-selftest "
                "are missing"
            )
            warnings += [source.warning] if source.warning else []
        else:
            plan, name = libqpu.plan(data, config, cross=role == "builder"), "libqpu"
        reference, image_id = config.image_reference(role), needs[role].facts["image"]
        library.build(context.client, reference, image_id, data, plan, config, tar, context.log("libqpu"))
        files.unpack(tar, context.libqpu_stage)
        for warning in warnings:
            progress.warn(warning)
        facts = {"prefix": data.settings["prefix"], "own": not is_upstream, "library": name}
        return Made((tar,), facts, tuple(warnings))

    inputs = {"library": config.qpu.library, "sources": data.fingerprint(), "epoch": str(context.epoch)}
    if is_upstream:
        inputs |= {"mode": variant, "source": qpulib.identity(data, config)}
    return Step(
        name="libqpu",
        title=data.title,
        code=__name__,
        inputs=inputs,
        needs=(role,),
        action=action,
        missing=lambda _: "" if context.libqpu_stage.is_dir() else "its folder is missing",
    )
