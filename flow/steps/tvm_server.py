"""Install TVM's RPC server into a layer for the target root."""

from __future__ import annotations

from collections.abc import Mapping

from flow.context import Context
from recipes import recipe
from recipes.tvm_server import build as tvm_server
from toolchain import files
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step
from wheels import byte_code


def step(context: Context) -> Step:
    """Return the step that installs the server's wheels into a layer."""
    data = recipe.load("tvm_server")
    tar = context.root / "tvm-server.tar"

    def action(_: Mapping[str, Manifest]) -> Made:
        with files.scratch_folder(context.root, "tvm-server") as scratch:
            stage = scratch / "root"
            stage.mkdir()
            wheels = tvm_server.stage(data, context.target, context.suite, stage, context.log("tvm-server"))
            byte_code.compile_tree(stage, context.tools, context.suite, epoch=context.epoch)
            files.pack(stage, tar, epoch=context.epoch)
        recorded = [{"name": item.path.name, "size": item.size, "sha256": item.sha256} for item in wheels]
        return Made((tar,), facts={"version": tvm_server.pins()[0], "wheels": recorded})

    return Step(
        name="tvm-server",
        title=data.title,
        code=__name__,
        inputs={
            "wheels": " ".join(tvm_server.pins()),
            "recipe": data.fingerprint(),
            "epoch": str(context.epoch),
            "python": context.suite.python,
        },
        needs=("tools",),
        action=action,
    )
