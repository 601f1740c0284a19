"""Tests of the boards' boot firmware, which apt fetches from an archive that is served here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_in_archives import Package, World

from flow import firmware
from toolchain.config import Config, load_config
from toolchain.errors import CommandFailed

LICENCE = b"""Format: 1.0

Files: boot/*
License: Proprietary
 For a Raspberry Pi only.

Files: debian/*
License: GPL-2+
"""


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Make the archive in a folder with a short name, because the path of gpg-agent's socket must fit in 107 bytes."""
    with contextlib.closing(World(tmp_path_factory.mktemp("world"))) as made:
        made.debian.components = ("main", "non-free-firmware")
        made.debian.add(Package(name="base-files", essential=True))
        yield made


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"build": {"folder": str(tmp_path / "build")}})


def test_firmware_licence_is_shown_once(world: World, config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"usr/lib/raspi-firmware/start.elf": b"elf", "usr/share/doc/raspi-firmware/copyright": LICENCE}
    world.debian.add(Package(name="raspi-firmware", architecture="all", files=files))
    with world.serving():
        made = firmware.ready(config)
        assert (made.folder / "start.elf").read_bytes() == b"elf"
        assert made.package.startswith("raspi-firmware_")
        shown = "".join(capfd.readouterr())
        assert "For a Raspberry Pi only." in shown
        assert "GPL" not in shown
        assert made.licence.read_bytes() == LICENCE
        assert firmware.ready(config) == made
        assert "For a Raspberry Pi only." not in "".join(capfd.readouterr())


def test_wifi_firmware_is_fetched_with_its_licence(
    world: World, config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {
        "usr/lib/firmware/cypress/cyfmac43430-sdio.bin": b"bin",
        "usr/share/doc/firmware-brcm80211/copyright": LICENCE,
    }
    world.debian.add(Package(name="firmware-brcm80211", architecture="all", files=files))
    with world.serving():
        made = firmware.ready(config, "wifi-firmware")
    assert (made.folder / "cypress/cyfmac43430-sdio.bin").read_bytes() == b"bin"
    assert f"the licence of firmware-brcm80211 is in {made.licence}" in "".join(capfd.readouterr())


def test_archive_without_firmware_is_reported(world: World, config: Config) -> None:
    with world.serving(), pytest.raises(CommandFailed, match="raspi-firmware"):
        firmware.ready(config)
