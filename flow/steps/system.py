"""Build the system image: the root filesystem with the recipes' products."""

from __future__ import annotations

from collections.abc import Mapping

from flow import layers
from flow.context import Context
from flow.engine_images import image_missing
from images import system
from recipes.tvm_server import build as tvm_server
from toolchain import files
from toolchain.config import ROOT
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step

MODULES = ("dot_cpp", "matrix_cpp", "cpu_cpp")
"""The extension wheel's modules, which are imported in the finished image as a test."""


def step(context: Context) -> Step:
    """Return the step that builds the image, starts it, and imports the installed modules."""
    config, log = context.config, context.log("system")
    reference = config.image_reference("system")

    def action(needs: Mapping[str, Manifest]) -> Made:
        added = layers.layers({name: made for name, made in needs.items() if name != "torch-site"})
        text = system.render(
            needs["base"].facts["base"],
            [layer.name for layer in added],
            labels=layers.labels(context.image, needs),
            bootable=context.image.profile == "bootable",
        )
        (context.root / "Dockerfile").write_text(text)
        loaded = system.build(context.client, reference, text, added, context.target)
        with_torch = needs["torch"].facts["wheel"] or config.torch.source == "distribution"
        modules = ["torch", "numpy"] if with_torch else ["numpy"]
        modules += MODULES if needs["qpu-ops"].facts["wheel"] else ()
        modules += ["tvm_ffi"] if "tvm-ffi" in needs else []
        modules += (
            [name.partition("-")[0] for name in needs["companions"].facts["wheels"]] if "companions" in needs else []
        )
        own = needs["libqpu"].facts["own"]
        seen = system.inspect(context.client, reference, context.target, modules=modules, own_libqpu=own, log=log)
        if "tvm-server" in needs:
            seen["tvm"] = tvm_server.check(context.client, reference, context.target, log)
        return Made(
            facts={
                "image": loaded.image_id,
                "size": loaded.size,
                "reference": reference,
                "libqpu": needs["libqpu"].facts["library"],
                "seen": seen,
                "left_out": needs["rootfs"].facts.get("left_out"),
                "wheels": layers.wheels_in(needs),
            }
        )

    return Step(
        name="system",
        title="system image",
        code=__name__,
        inputs={
            "templates": files.tree_fingerprint(ROOT / "images" / "templates", "Dockerfile.j2"),
            "profile": context.image.profile,
        },
        needs=(
            *("torch", "torch-site", "rootfs", "base", "libqpu", "qpu-ops"),
            *(("companions",) if config.image.companions else ()),
            *(("tvm-server",) if config.remote.server_in_image else ()),
            *(("tvm-ffi",) if config.remote.ffi_in_image else ()),
        ),
        action=action,
        missing=image_missing(context, "system"),
    )
