"""Fetch firmware for boards from Debian's non-free-firmware component. apt verifies the packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from flow.context import Context
from images import apt
from images.flavour import packages_for
from toolchain import files, process
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step

COMPONENT = "non-free-firmware"
PARTS = {
    "card-firmware": ("usr/lib/raspi-firmware", "usr/share/doc/raspi-firmware/copyright"),
    "wifi-firmware": ("usr/lib/firmware", "usr/share/doc/firmware-brcm80211/copyright"),
}
"""For each step, the extracted parts: the firmware, and its licence."""


def folder(context: Context, name: str) -> Path:
    """Return the folder for the firmware and the licence that the step ``name`` extracts."""
    return context.root / name


def step(context: Context, name: str) -> Step:
    """Return the step that fetches a package and extracts the firmware and its licence.

    ``name`` is a key of ``PARTS``. The table in packages.toml has the same name, except that ``_`` replaces ``-``.
    """
    (package,) = packages_for(name.replace("-", "_"), context.image)
    wanted = tuple(
        dataclasses.replace(item, components=(COMPONENT,), only=(), architectures=(context.native.debian,))
        for item in apt.sources_for(context.config, context.keyrings)
        if item.archive == "debian"
    )

    def action(_: Mapping[str, Manifest]) -> Made:
        place = context.root / "mirror" / COMPONENT
        verified = apt.verify(wanted, place, strict=context.image.strict)
        with files.scratch_folder(context.root / "work", name) as scratch:
            (scratch / "fetched").mkdir()
            log = context.log(name)
            fetched = apt.download_alone(verified.sources, place / "lists", package, scratch / "fetched", log)
            digest = files.sha256_of(fetched)
            process.run(["dpkg-deb", "--extract", fetched, scratch / "all"])
            for part in PARTS[name]:
                (scratch / "kept" / part).parent.mkdir(parents=True, exist_ok=True)
                (scratch / "all" / part).rename(scratch / "kept" / part)
            files.remove(folder(context, name))
            (scratch / "kept").rename(folder(context, name))
        return Made(facts={"package": fetched.name, "sha256": digest}, warnings=verified.warnings)

    return Step(
        name=name,
        title=f"firmware for boards ({package})",
        code=__name__,
        inputs={"package": package, "sources": "; ".join(item.line for item in wanted)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder(context, name).is_dir() else "its folder is missing",
    )
