"""Make torch's builder image."""

from __future__ import annotations

from flow.context import Context
from flow.native_builder import builder_step
from toolchain.steps import Step


def step(context: Context) -> Step:
    """Return the step that builds the root and its image."""
    return builder_step(
        context,
        name="torch-builder",
        title="torch's builder image",
        code=__name__,
        packages="torch_builder",
        architectures=(context.native, context.target),
    )
