"""Provide the native cross compiler as mounts for containers created from the development image."""

from __future__ import annotations

from flow.compilers import emulated_compiler_reason
from flow.context import Context
from images import native


def native_compiler(context: Context) -> native.Mounts:
    """Return the mounts; if the native compiler is disabled or cannot be used, return no mounts."""
    is_emulated = context.target == context.native or emulated_compiler_reason(context)
    if is_emulated or not context.config.build.native_compiler:
        return native.Mounts()
    return native.compiler_mounts(context.tools, context.farm, context.target, context.suite)
