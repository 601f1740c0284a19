"""Fetch firmware for boards, and show its licence once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context, for_all_targets
from flow.steps import card_firmware
from toolchain import progress
from toolchain.config import Config

SUITE = "trixie"


@dataclass(frozen=True)
class Firmware:
    """The firmware's folder and licence file, and the file name and SHA-256 of the package that contains them."""

    folder: Path
    licence: Path
    package: str
    sha256: str


def ready(config: Config, name: str = "card-firmware") -> Firmware:
    """Return the firmware of the step ``name``, a key of ``card_firmware.PARTS``; apt fetches the package if necessary.

    The first call prints the boot firmware's licence or, for other firmware, the path of the licence. If a step fails,
    raises the step's UserError.
    """
    with Context(for_all_targets(config, SUITE)) as context, build_lock(context.root):
        pipeline = pipelines.firmware_job(context, name)
        made = pipeline.execute(pipeline.plan())[-1]
        folder = card_firmware.folder(context, name)
    firmware, licence = (folder / part for part in card_firmware.PARTS[name])
    shown = folder / "licence-shown"
    if not shown.exists():
        text = licence.read_text(errors="replace")
        boot = [part for part in text.split("\n\n") if part.startswith("Files: boot/")]
        quoted = (boot or [text]) if name == "card-firmware" else []
        progress.say("\n\n".join([f"the licence of {licence.parent.name} is in {licence}", *quoted]))
        shown.touch()
    return Firmware(firmware, licence, str(made.facts["package"]), str(made.facts["sha256"]))
