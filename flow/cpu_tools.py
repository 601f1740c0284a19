"""Prepare the native tools that examine machine code: the emulator with plugins, llvm-mca and llvm-objdump."""

from __future__ import annotations

from pathlib import Path

from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context, for_all_targets
from flow.steps import extracted_tools
from toolchain.config import Config

SUITE = "bookworm"
"""The suite whose emulator supports plugins. Trixie's emulator is statically linked and cannot load plugins."""


def ready(config: Config) -> Path:
    """Return the folder with the tools; extract them if necessary. Raises the failed step's UserError."""
    with Context(for_all_targets(config, SUITE)) as context, build_lock(context.root):
        pipeline = pipelines.cpu_tools_job(context)
        pipeline.execute(pipeline.plan())
        return extracted_tools.folder(context, "cpu-tools")
