"""Native programs that make card images: mke2fs, mtools, mkfs.fat and sfdisk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flow import roots
from flow.context import Context
from images import rootfs
from images.flavour import packages_for
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def folder(context: Context) -> Path:
    """The folder of the extracted packages."""
    return context.root / "card-tools"


def step(context: Context) -> Step:
    """Extract the packages into one folder."""
    packages = packages_for("card_tools", context.image)

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, "card-tools", packages, needs["mirror"], (context.native,))
        rootfs.build_tools(spec, folder(context), context.log("card-tools"), standing_in=())
        return Made(facts={"packages": list(packages)})

    return Step(
        name="card-tools",
        title="tools for card images",
        code=__name__,
        inputs={"packages": " ".join(packages)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder(context).is_dir() else "its folder is missing",
    )
