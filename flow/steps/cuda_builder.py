"""Make the builder image for the CUDA wheel."""

from __future__ import annotations

from flow.context import Context
from flow.native_builder import builder_step
from toolchain.steps import Step


def step(context: Context) -> Step:
    """Return the step that builds the root and its image."""
    return builder_step(
        context,
        name="cuda-builder",
        title="CUDA builder image",
        code=__name__,
        packages="cuda",
        architectures=(context.native,),
    )
