"""Unpack the torch wheel into a folder that has the layout of the target's root filesystem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flow.context import Context
from flow.staging import stage_wheels
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that unpacks the torch wheel, if there is one, into a layer."""
    tar = context.root / "torch-site.tar"

    def action(needs: Mapping[str, Manifest]) -> Made:
        wheel = needs["torch"].facts["wheel"]
        if not wheel:
            return Made(facts={"version": ""})
        stage_wheels(context, [Path(wheel)], context.torch_site, tar)
        return Made((tar,), facts={"version": needs["torch"].facts["version"]})

    def missing(made: Manifest) -> str:
        return "its folder is missing" if made.artefacts and not context.torch_site.is_dir() else ""

    return Step(
        name="torch-site",
        title="torch, unpacked",
        code=__name__,
        inputs={"epoch": str(context.epoch), "python": context.suite.python},
        needs=("tools", "torch"),
        action=action,
        missing=missing,
    )
