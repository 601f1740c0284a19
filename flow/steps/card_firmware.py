"""Fetch the boards' boot firmware from Debian's component non-free-firmware with apt, which verifies it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from flow.context import Context
from flow.sources import sources
from images import apt
from images.flavour import packages_for
from toolchain import files, process
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step

COMPONENT = "non-free-firmware"
PARTS = ("usr/lib/raspi-firmware", "usr/share/doc/raspi-firmware/copyright")
"""The extracted parts: the files for the boot partition, and their licence."""


def folder(context: Context) -> Path:
    """Return the folder that contains ``PARTS``."""
    return context.root / "card-firmware"


def step(context: Context) -> Step:
    """Return the step that fetches the package and extracts the firmware and its licence."""
    (package,) = packages_for("card_firmware", context.image)
    wanted = tuple(
        dataclasses.replace(item, components=(COMPONENT,), only=(), architectures=(context.native.debian,))
        for item in sources(context)
        if item.archive == "debian"
    )

    def action(_: Mapping[str, Manifest]) -> Made:
        place = context.root / "mirror" / COMPONENT
        verified = apt.verify(wanted, place, strict=context.image.strict)
        with files.scratch_folder(context.root / "work", "card-firmware") as scratch:
            (scratch / "fetched").mkdir()
            log = context.log("card-firmware")
            name = apt.download_alone(verified.sources, place / "lists", package, scratch / "fetched", log)
            digest = files.sha256_of(name)
            process.run(["dpkg-deb", "--extract", name, scratch / "all"])
            for part in PARTS:
                (scratch / "kept" / part).parent.mkdir(parents=True, exist_ok=True)
                (scratch / "all" / part).rename(scratch / "kept" / part)
            files.remove(folder(context))
            (scratch / "kept").rename(folder(context))
        return Made(facts={"package": name.name, "sha256": digest}, warnings=verified.warnings)

    return Step(
        name="card-firmware",
        title="boot firmware of boards",
        code=__name__,
        inputs={"package": package, "sources": "; ".join(item.line for item in wanted)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder(context).is_dir() else "its folder is missing",
    )
