"""Make the builder image for TVM's FFI."""

from __future__ import annotations

from flow.context import Context
from flow.native_builder import builder_step
from toolchain.steps import Step


def step(context: Context) -> Step:
    """Return the step that builds the root and its image."""
    return builder_step(
        context,
        name="tvm-ffi-builder",
        title="builder image of TVM's FFI",
        code=__name__,
        packages="tvm_ffi_builder",
        architectures=(context.native, context.target),
    )
