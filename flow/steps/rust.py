"""Extract the native Rust toolchain for ``build-wheel``."""

from __future__ import annotations

from flow.context import Context
from flow.steps import extracted_tools
from images import rust
from toolchain.steps import Step

NAME = "rust"


def step(context: Context) -> Step:
    """Return the step that extracts the packages and adds scripts that run their programs in a container."""
    return extracted_tools.step(
        context,
        NAME,
        "Rust toolchain",
        code=__name__,
        foreign=(context.target,),
        finish=lambda folder: rust.add_programs(folder, context.suite),
    )
