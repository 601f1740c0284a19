"""Build and unpack the QPU extension wheel."""

from __future__ import annotations

from collections.abc import Mapping

from flow.compilers import is_extension_cross_compiled, native_compiler
from flow.context import Context
from flow.staging import stage_wheels
from recipes import recipe
from recipes.qpu_ops import target as qpu_ops
from toolchain import files, progress
from toolchain.errors import CommandFailed
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that compiles the QPU extension wheel against torch and libqpu.

    If there is no torch wheel, the step builds nothing and prints a warning.
    """
    data = recipe.load("qpu_ops")
    tar = context.root / "qpu-ops-site.tar"

    def action(needs: Mapping[str, Manifest]) -> Made:
        log = context.log("qpu-ops")
        if not needs["torch-site"].facts["version"]:
            return _omitted("NOT built: it is compiled against torch, and there is no torch wheel")
        try:
            wheel = qpu_ops.build(
                context.client,
                place(context, needs),
                data,
                context.config,
                suite=context.suite,
                torch_site=context.torch_site,
                libqpu=context.libqpu_stage,
                libqpu_prefix=needs["libqpu"].facts["prefix"],
                folder=context.root / "wheels",
                log=log,
                surroundings=(needs["torch-site"].product,),
                reuse=context.reuse,
            )
        except CommandFailed as fault:
            if needs["libqpu"].facts["own"] or files.NO_ROOM.search(fault.tail):
                raise
            library = needs["libqpu"].facts["library"]
            return _omitted(f"LEFT OUT: it cannot be built against {library} ({fault.found}; {log})")
        stage_wheels(context, [wheel], context.root / "qpu-ops-site", tar)
        return Made((wheel, tar), facts={"wheel": wheel.name})

    return Step(
        name="qpu-ops",
        title=data.title,
        code=__name__,
        inputs={
            "sources": data.fingerprint(),
            "native compiler": str(context.config.build.native_compiler),
            "epoch": str(context.epoch),
            "python": context.suite.python,
        },
        needs=("builder" if is_extension_cross_compiled(context) else "dev", "torch-site", "libqpu"),
        action=action,
    )


def _omitted(reason: str) -> Made:
    warning = f"the QPU extension wheel is {reason}"
    progress.warn(warning)
    return Made(facts={"wheel": ""}, warnings=(warning,))


def place(context: Context, made: Mapping[str, Manifest]) -> qpu_ops.Place:
    """Return the environment for compiling the wheel: the native ``builder`` image or the target's ``dev`` image.

    The ``builder`` image is used if the extension is cross-compiled and ``made`` contains this image.
    """
    role = "builder" if is_extension_cross_compiled(context) and "builder" in made else "dev"
    reference, image_id = context.config.image_reference(role), made[role].facts["image"]
    if role == "builder":
        return qpu_ops.crossed(reference, image_id, context.target, context.suite)
    return qpu_ops.container(reference, image_id, context.target, native_compiler(context))
