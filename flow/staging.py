"""Unpack wheels in the layout of the target root, and pack the result as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flow.context import Context
from toolchain import files
from wheels import byte_code
from wheels import find as wheels


def stage_wheels(context: Context, made: Sequence[Path], folder: Path, tar: Path) -> None:
    """Unpack wheels into ``folder``, byte-compile their modules, and pack ``folder`` into ``tar``.

    Raises DiskFull.
    """
    with (
        files.room_for(f"the contents of {', '.join(wheel.name for wheel in made)}", context.root),
        files.scratch_folder(context.root, folder.name) as scratch,
    ):
        stage = scratch / "root"
        stage.mkdir()
        for wheel in made:
            wheels.unpack(wheel, stage, context.suite)
        byte_code.compile_tree(stage, context.tools, context.suite, epoch=context.epoch)
        files.pack(stage, tar, epoch=context.epoch)
        files.remove(folder)
        stage.rename(folder)
