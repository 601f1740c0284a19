"""Native programs for machine code: the emulator with plugins, a C compiler, llvm-mca and llvm-objdump."""

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
    return context.root / "cpu-tools"


def step(context: Context) -> Step:
    """Extract the packages into one folder."""
    packages = packages_for("cpu_tools", context.image)

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, "cpu-tools", packages, needs["mirror"], (context.native,))
        rootfs.build_tools(spec, folder(context), context.log("cpu-tools"), standing_in=())
        return Made(facts={"packages": list(packages)})

    return Step(
        name="cpu-tools",
        title="emulator with plugins and LLVM",
        code=__name__,
        inputs={"packages": " ".join(packages)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder(context).is_dir() else "its folder is missing",
    )
