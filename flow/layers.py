"""What images are composed of on top of their roots: layers that recipes made, and labels.

Apart from the steps (flow.main_steps), for it is an input of those that make these images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from images import system
from toolchain.config import ImageConfig
from toolchain.manifest import Manifest


def layers(needs: Mapping[str, Manifest]) -> list[system.Layer]:
    """What the recipes made, the layers that change least first."""
    names = [name for name in ("torch-site", "tvm-server", "tvm-ffi", "libqpu", "qpu-ops") if name in needs]
    made = [needs[name].artefact(".tar") for name in names if needs[name].artefacts]
    return [system.Layer(item.path.name, item.path) for item in made]


def labels(image: ImageConfig, needs: Mapping[str, Manifest]) -> dict[str, str]:
    """The system image's labels, from what it is made of."""
    left_out = needs["rootfs"].facts.get("left_out")  # absent from manifests that are older than it
    return {
        "org.opencontainers.image.title": "pitorch system image",
        "org.opencontainers.image.base.digest": needs["rootfs"].facts["image"],
        "pitorch.suite": image.suite,
        "pitorch.architecture": image.architecture,
        "pitorch.libqpu": needs["libqpu"].facts["library"],
        "pitorch.torch": needs["torch"].facts["version"] or "none",
        "pitorch.products": json.dumps({name: item.product[:16] for name, item in sorted(needs.items())}),
        **({system.LEFT_OUT: json.dumps(left_out)} if left_out is not None else {}),
    }
