"""The native Rust toolchain of ``build-wheel``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flow import roots
from flow.context import Context
from images import rootfs, rust
from images.flavour import packages_for
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def folder(context: Context) -> Path:
    """The folder of the extracted packages."""
    return context.root / "rust"


def step(context: Context) -> Step:
    """Extract the packages into one folder."""
    packages = packages_for("rust", context.image)

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, "rust", packages, needs["mirror"], (context.native, context.target))
        rootfs.build_tools(spec, folder(context), context.log("rust"), standing_in=())
        rust.add_programs(folder(context), context.suite)
        return Made(facts={"packages": list(packages)})

    return Step(
        name="rust",
        title="Rust toolchain",
        code=__name__,
        inputs={"packages": " ".join(packages)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if (folder(context) / "start").is_dir() else "its folder is missing",
    )
