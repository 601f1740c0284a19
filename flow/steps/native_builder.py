"""Make the builder images of recipes that require more than the native tools.

A builder image is a complete root filesystem for this PC's architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flow import roots
from flow.context import Context
from flow.engine_images import image_missing, load_root
from images import rootfs
from images.flavour import packages_for
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context, name: str, title: str, *, with_target: bool = True) -> Step:
    """Return the step that makes a builder's root filesystem and its image.

    The root contains the packages that packages.toml lists in a table that has the step's name, except that ``_``
    replaces ``-``. Without ``with_target``, all packages are for this PC.
    """
    architectures = (context.native, *([context.target] if with_target else []))
    names = packages_for(name.replace("-", "_"), context.image)

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, name, names, needs["mirror"], architectures)
        tar = context.root / f"{name}.tar"
        rootfs.build_native_tar(dataclasses.replace(spec, keyring_package=""), tar, context.log(name))
        return load_root(context, name, tar, context.native)

    return Step(
        name=name,
        title=title,
        code=__name__,
        inputs={"packages": " ".join(names), **roots.mmdebstrap_inputs(context)},
        needs=("mirror",),
        action=action,
        missing=image_missing(context, name),
    )
