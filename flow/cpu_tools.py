"""The native tools for machine code, ready to use: the emulator with plugins, llvm-mca and llvm-objdump."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context
from flow.steps import extracted_tools
from toolchain.config import Config, ImageConfig

SUITE = "bookworm"
"""The release whose emulator supports plugins. Trixie's emulator is statically linked and cannot load plugins."""


def ready(config: Config) -> Path:
    """The folder of the tools, extracted if necessary. Raises the UserError of the step that failed.

    They are native programs, so there is one folder for all targets.
    """
    image = replace(config.image, suite=SUITE, flavour="debian", architecture=ImageConfig().architecture)
    with Context(replace(config, image=image)) as context, build_lock(context.root):
        pipeline = pipelines.cpu_tools_job(context)
        pipeline.execute(pipeline.plan())
        return extracted_tools.folder(context, "cpu-tools")
