"""The layers and labels of images that are based on a root filesystem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images import system
from toolchain.config import ImageConfig
from toolchain.manifest import Manifest


def layers(needs: Mapping[str, Manifest]) -> list[system.Layer]:
    """Return the recipes' products as layers; layers that change less often come first."""
    names = [
        name for name in ("torch-site", "companions", "tvm-server", "tvm-ffi", "libqpu", "qpu-ops") if name in needs
    ]
    made = [needs[name].artefact(".tar") for name in names if needs[name].artefacts]
    return [system.Layer(item.path.name, item.path) for item in made]


def labels(image: ImageConfig, needs: Mapping[str, Manifest]) -> dict[str, str]:
    """Return the system image's labels, which describe the image's parts."""
    left_out = needs["rootfs"].facts.get("left_out")  # older manifests lack this fact
    return {
        "org.opencontainers.image.title": "pitorch system image",
        "org.opencontainers.image.base.digest": needs["rootfs"].facts["image"],
        "pitorch.suite": image.suite,
        "pitorch.architecture": image.architecture,
        "pitorch.libqpu": needs["libqpu"].facts["library"],
        "pitorch.torch": needs["torch"].facts["version"] or "none",
        "pitorch.products": json.dumps({name: item.product[:16] for name, item in sorted(needs.items())}),
        system.WHEELS: json.dumps({item["name"]: item["sha256"] for item in wheels_in(needs)}),
        **({system.LEFT_OUT: json.dumps(left_out)} if left_out is not None else {}),
    }


def wheels_in(needs: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """Read the ``name``, ``size`` and ``sha256`` of each wheel in an image from the manifests of the image's steps.

    A value that an older manifest does not record is empty or None.
    """
    found = []
    for name in ("companions", "qpu-ops"):
        made = [item for item in needs[name].artefacts if item.path.suffix == ".whl"] if name in needs else []
        found += [{"name": item.path.name, "size": item.size, "sha256": item.sha256} for item in made]
    for name in ("torch", "tvm-ffi"):
        step = needs.get(name)
        if step is None or not step.facts.get("wheel"):
            continue
        path = Path(step.facts["wheel"])
        size = step.facts.get("size", path.stat().st_size if path.is_file() else None)
        found.append({"name": path.name, "size": size, "sha256": step.facts.get("sha256", "")})
    server = needs["tvm-server"].facts.get("wheels", ()) if "tvm-server" in needs else ()
    found += [item for item in server if item not in found]  # the step tvm-ffi may install the same wheel
    return sorted(found, key=lambda item: str(item["name"]))
