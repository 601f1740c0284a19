"""Fetch the boards' boot firmware and show its licence once."""

from __future__ import annotations

from pathlib import Path

from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context, for_all_targets
from flow.steps import card_firmware
from toolchain import progress
from toolchain.config import Config

SUITE = "trixie"


def ready(config: Config) -> tuple[Path, Path]:
    """Return the folder with the firmware and the file with its licence; fetch both with apt if necessary.

    Prints the licence when it is called for the first time. Raises the failed step's UserError.
    """
    with Context(for_all_targets(config, SUITE)) as context, build_lock(context.root):
        pipeline = pipelines.firmware_job(context)
        pipeline.execute(pipeline.plan())
        folder = card_firmware.folder(context)
    firmware, licence = (folder / part for part in card_firmware.PARTS)
    shown = folder / "licence-shown"
    if not shown.exists():
        text = licence.read_text(errors="replace")
        boot = [part for part in text.split("\n\n") if part.startswith("Files: boot/")]
        progress.say("\n\n".join([f"the licence of raspi-firmware, also in {licence}:", *(boot or [text])]))
        shown.touch()
    return firmware, licence
