"""Check that this PC can execute programs built for the target."""

from __future__ import annotations

from flow.context import Context
from images import probe, rootfs
from toolchain import files


def require_execution(context: Context) -> None:
    """Execute a small program that is built for the target. Raises UserError if the program does not run."""
    if context.target != context.native and context.target.debian in probe.PROGRAMS:
        with files.scratch_folder(context.root / "work", "probe") as scratch:
            program = scratch / "probe"
            program.write_bytes(probe.PROGRAMS[context.target.debian]())
            program.chmod(0o755)
            rootfs.require_execution(context.target, program)
