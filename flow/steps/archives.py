"""Download the packages of the target root."""

from __future__ import annotations

from collections.abc import Mapping

from flow import roots
from flow.context import Context
from images import rootfs
from toolchain import progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that downloads the packages."""

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.target_spec(context, needs)
        packages = list(rootfs.download(spec, context.log("archives")))
        warnings = roots.absent_warnings(context)
        for warning in warnings:
            progress.warn(warning)
        return Made(facts={"packages": packages}, warnings=warnings)

    return Step(
        name="archives",
        title="packages, fetched",
        code=__name__,
        inputs=roots.target_packages(context),
        needs=("mirror", "torch"),
        action=action,
    )
