"""A root filesystem with a few packages, which are unpacked but not configured."""

from __future__ import annotations

from pathlib import Path

from flow import roots
from flow.context import Context
from flow.steps import mirror
from images import rootfs
from toolchain import files
from toolchain.architecture import Architecture
from toolchain.config import Config
from toolchain.steps import Pipeline


def extract_root(
    config: Config, role: str, packages: tuple[str, ...], folder: Path, architecture: Architecture
) -> None:
    """Download packages and their dependencies with the verified lists of the shared build, and unpack them."""
    with files.locked(config.build_root / "for-the-tests"), Context(config) as context:
        pipeline = Pipeline(context.root, [mirror.step(context)])
        (verified,) = pipeline.execute(pipeline.plan())
        spec = roots.root_spec(context, role, packages, verified, (architecture,))
        rootfs.build_tools(spec, folder, context.log(role), standing_in=())
