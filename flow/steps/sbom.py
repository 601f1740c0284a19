"""Write the system image's bill of materials."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from flow import layers
from flow.context import Context
from images import sbom
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that writes the bill of materials for the root filesystem and the added wheels and libraries."""
    config = context.config

    def action(needs: Mapping[str, Manifest]) -> Made:
        wheels = [sbom.Part(item["name"], item["sha256"]) for item in layers.wheels_in(needs)]
        parts = [*wheels, *sbom.libraries_in(needs["libqpu"].artefact(".tar").path)]
        written = sbom.write(
            needs["rootfs"].artefact(".tar").path,
            context.root,
            label=context.image.label,
            parts=parts,
            packages=needs["archives"].facts["packages"],
            epoch=context.epoch,
            log=context.log("sbom"),
        )
        return Made(written, facts={"parts": {part.file: part.sha256 for part in parts}})

    return Step(
        name="sbom",
        title="bill of materials",
        code=__name__,
        inputs={"epoch": str(context.epoch), "debsbom": importlib.metadata.version("debsbom")},
        needs=(
            *("torch", "archives", "rootfs", "libqpu", "qpu-ops"),
            *(("companions",) if config.image.companions else ()),
            *(("tvm-server",) if config.remote.server_in_image else ()),
            *(("tvm-ffi",) if config.remote.ffi_in_image else ()),
        ),
        action=action,
    )
