"""Build the development root: the target's compilers and headers for building wheels in the target's container."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flow import roots
from flow.compilers import emulated_compiler_reason
from flow.context import Context
from flow.engine_images import image_missing, load_root
from images import native, rootfs
from images.flavour import packages_for
from toolchain import progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that builds the root, loads it as an image, and creates the native compiler's symbolic links."""
    packages = tuple(
        sorted(
            {
                *packages_for("base", context.image),
                *packages_for("dev", context.image),
                *context.suite.torch_libraries,
                *context.suite.torch_python,
                *context.image.extra_packages,
            }
        )
    )
    overlays = roots.overlays(context)

    def action(needs: Mapping[str, Manifest]) -> Made:
        roots.require_execution(context)
        spec = roots.root_spec(context, "dev", packages, needs["mirror"], (context.target,))
        tar = context.root / "dev.tar"
        spec = dataclasses.replace(spec, overlays=overlays, native_tools=context.tools)
        rootfs.build_tar(spec, tar, context.log("dev"))
        if context.target != context.native:
            native.make_farm(context.farm, tar, context.target, context.suite)
        made = load_root(context, "dev", tar, context.target)
        if not (reason := emulated_compiler_reason(context)):
            return made
        progress.warn(reason)
        return dataclasses.replace(made, warnings=(reason,))

    return Step(
        name="dev",
        title="development root",
        code=__name__,
        inputs={
            "packages": " ".join(packages),
            **roots.mmdebstrap_inputs(context),
            **roots.overlay_inputs(overlays),
        },
        needs=("mirror", "tools"),
        action=action,
        missing=image_missing(context, "dev"),
    )
