"""Unpack TVM FFI's wheel in the layout of the target's root filesystem, and pack the result as a tar."""

from __future__ import annotations

from collections.abc import Mapping

from flow.compilers import newer_code_warning
from flow.context import Context
from flow.staging import stage_wheels
from recipes.tvm_ffi import locate
from toolchain import files, progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that finds the wheel in a wheelhouse or the artefact cache, and unpacks it."""
    tar = context.root / "tvm-ffi-site.tar"

    def action(_: Mapping[str, Manifest]) -> Made:
        wheel, origin = locate.find(context.config)
        progress.say(f"    {wheel.name}: {origin}")
        stage_wheels(context, [wheel], context.root / "tvm-ffi-site", tar)
        facts = {
            "wheel": wheel.name,
            "from": origin,
            "size": wheel.stat().st_size,
            "sha256": files.sha256_of(wheel),
        }
        return Made((tar,), facts, newer_code_warning(context, "the wheel of TVM's FFI"))

    return Step(
        name="tvm-ffi",
        title="TVM's FFI, unpacked",
        code=__name__,
        inputs={
            "wheels": locate.listing(context.config),
            "epoch": str(context.epoch),
            "python": context.suite.python,
        },
        needs=("tools",),
        action=action,
    )
