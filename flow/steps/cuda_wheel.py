"""Build the wheel with CUDA operators."""

from __future__ import annotations

from collections.abc import Mapping

from flow.context import Context
from recipes import recipe
from recipes.cuda_ops import audit, build, toolkit
from toolchain.architecture import Architecture
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step
from wheels import for_this_pc


def step(context: Context, target: Architecture) -> Step:
    """Return the step that compiles the wheel for a machine with an NVIDIA GPU, and audits it."""
    config, data = context.config, recipe.load("cuda_ops")
    name = f"cuda-wheel-{target.debian}"

    def action(_: Mapping[str, Manifest]) -> Made:
        tools = toolkit.obtain(data, config, target)
        include = for_this_pc.torch(config) / "torch" / "include"
        builder = config.image_reference("cuda-builder")
        made = build.build(context.client, builder, data, config, target, tools, include, context.log(name))
        found = audit.audit(made, target, config.cuda.architectures)
        return Made((made,), facts={"contents": found.text(), "toolkit": tools.origin})

    return Step(
        name=name,
        title=f"{data.title} for {target.debian}",
        code=__name__,
        inputs={
            "sources": data.fingerprint(),
            "architectures": " ".join(config.cuda.architectures),
            "toolkit": toolkit.identity(data, config),
            "headers": for_this_pc.TORCH,
            "epoch": str(context.epoch),
        },
        needs=("cuda-builder",),
        action=action,
    )
