"""Create the native environment for jobs that need torch on this machine."""

from __future__ import annotations

from pathlib import Path

from flow import native_environment, pipelines
from flow.context import Context
from toolchain import files
from toolchain.config import Config


def ready_python(config: Config) -> Path:
    """Create the environment unless it exists, and return its interpreter."""
    with files.locked(native_environment.folder_of(config)), Context(config) as context:
        pipeline = pipelines.native_checks(context)
        pipeline.execute(pipeline.plan(only=("native-python",)))
    return native_environment.python_of(config)
