"""``write-card``: write the card image to a card, using the image's block map, and read the card back to verify it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcard import bmap
from sdcard.image import FIRST_BOOT, Folder, first_boot_digest
from toolchain import caller, manifest, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, InUse, UserError
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX

_LIMIT_S = 7200.0
_BLKFLSBUF = 0x1261
"""The number of the ioctl that drops a block device's cache (linux/fs.h)."""


@dataclass(frozen=True)
class Written:
    """A finished card: the device, the number of bytes written and read back, and the duration."""

    device: Path
    size: int
    seconds: float


def write_card(config: Config, device: Path, *, removable: bool = True) -> Written:
    """Write the configuration's card image to a block device, then read the device back and compare the content.

    A warning is printed if the card image does not have the current settings or the latest system image.

    If ``removable`` is true, only a card or USB device is accepted. Raises ArtefactMissing if there is no image;
    ArtefactDamaged if the image was changed or the device's content differs from the image; RootNeeded; UserError if
    the device is not suitable, for example because it is too small; or InUse if the device is mounted.
    """
    began = time.monotonic()
    folder = Folder.of(config)
    made = manifest.require(folder.manifest, "sd-image")
    for artefact in made.artefacts:
        artefact.verify()
    blocks = bmap.read(folder.bmap)
    process.require_root("to write to a device", "./inv write-card DEVICE")
    _require_card(device, blocks.size, removable=removable)
    program = process.require_program("bmaptool", "to write the card")
    for found in _outdated(config, made):
        progress.warn(f"{folder.image.name} was made {found}; to make it again, run {caller.command('sd-image')}")
    with progress.step(f"write {folder.image.name} to {device}"):
        process.run(
            [program, "copy", "--bmap", folder.bmap, folder.image, device],
            limit_s=_LIMIT_S,
            fix="insert the card again, or use another card: this one may be worn out",
        )
    with progress.step(f"read {device} back"):
        _compare(device, blocks)
    return Written(device, sum(item.size for item in blocks.ranges), time.monotonic() - began)


def _outdated(config: Config, made: Manifest) -> list[str]:
    """Return what has changed since the card image was made, as parts of a sentence."""
    found = []
    if made.inputs.get(FIRST_BOOT) != first_boot_digest(config):
        found.append("with other settings for the first boot (sd.*) than the current ones")
    built = Manifest.read(config.target_root / f"system{MANIFEST_SUFFIX}")
    known = [made.facts.get(name) for name in ("image_id", "built_image")]
    if built is not None and built.facts.get("image") not in known:
        found.append("before the last build of the system image")
    return found


def _require_card(device: Path, size: int, *, removable: bool) -> None:
    try:
        is_device = stat.S_ISBLK(device.stat().st_mode)
        found = "another file" if not is_device else ""
    except FileNotFoundError:
        found = "no such file"
    names = "run lsblk to list the devices; a card is often /dev/mmcblk0 or /dev/sdb"
    if found:
        raise UserError(f"{device} is not a card", expected="a block device", found=found, fix=names)
    listed = _lsblk(device)
    if listed["type"] not in ("disk", "loop"):
        raise UserError(
            f"{device} is not a whole device",
            expected="a whole device, not a partition",
            found=f"type {listed['type']}",
            fix=f"pass the whole device instead of a part of it; {names}",
        )
    mounted = [point for item in _with_children(listed) for point in item["mountpoints"] if point]
    if mounted:
        raise InUse(
            f"{device} is in use and will not be overwritten",
            expected="no mounted partition or swap space on the device",
            found=", ".join(mounted),
            fix=f"if this is the right device, run umount {mounted[0]}",
        )
    if listed["ro"]:
        raise UserError(
            f"{device} is read-only",
            expected="a writable card",
            found="a write-protected card",
            fix="slide the card's lock switch to the unlocked position",
        )
    if removable and not (listed["rm"] or listed["hotplug"]):
        raise UserError(
            f"{device} is not a removable device",
            expected="a card or a USB device",
            found=f"{listed['model'] or 'a fixed disk'}, {progress.human_size(listed['size'])}",
            fix=names,
        )
    if listed["size"] < size:
        raise UserError(
            f"{device} is too small for the image",
            expected=f"at least {size} bytes ({progress.human_size(size)})",
            found=f"{listed['size']} bytes",
            fix="use a larger card",
        )


def _lsblk(device: Path) -> dict[str, Any]:
    columns = "NAME,TYPE,RM,HOTPLUG,RO,SIZE,MODEL,MOUNTPOINTS"
    text = process.output_of(["lsblk", "--json", "--bytes", "--output", columns, str(device)])
    found: dict[str, Any] = json.loads(text)["blockdevices"][0]
    return found


def _with_children(listed: dict[str, Any]) -> list[dict[str, Any]]:
    return [listed, *(below for item in listed.get("children", ()) for below in _with_children(item))]


def _compare(device: Path, blocks: bmap.BlockMap) -> None:
    """Read the blocks from the device, not from a cache, and verify their checksums. Raises ArtefactDamaged."""
    with device.open("rb", buffering=0) as stream:
        fcntl.ioctl(stream, _BLKFLSBUF)
        for item in blocks.ranges:
            content = os.pread(stream.fileno(), item.size, item.first * bmap.BLOCK)
            if hashlib.sha256(content).hexdigest() != item.sha256:
                raise ArtefactDamaged(
                    f"{device} does not contain what was written",
                    expected=f"SHA-256 {item.sha256} of blocks {item.first} to {item.last}",
                    found=f"{len(content)} bytes with another SHA-256",
                    fix="use another card or reader: either may be damaged, or the card's stated capacity may be false",
                )
