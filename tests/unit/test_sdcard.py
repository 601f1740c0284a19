"""Tests of card images: block maps, the blocks in use, and the settings for the first boot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nfsroot.boot_files import BootParts
from sdcard import bmap, first_boot
from sdcard.image import Identifiers, _used_blocks, imager_devices
from toolchain.config import load_config
from toolchain.errors import ArtefactDamaged, ConfigError

HASH = "$6$salt$" + "a" * 86
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 ada@pc"


def test_a_block_map_is_read_as_written(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"a" * 3 * bmap.BLOCK + b"\0" * bmap.BLOCK)
    made = bmap.measured(image, [(0, 0), (2, 3)])
    (tmp_path / "map").write_text(bmap.text_of(made))
    assert bmap.read(tmp_path / "map") == made
    assert [item.size for item in made.ranges] == [bmap.BLOCK, 2 * bmap.BLOCK]


def test_long_ranges_are_split(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as stream:
        stream.truncate(9000 * bmap.BLOCK)
    assert [(item.first, item.last) for item in bmap.measured(image, [(10, 8999)]).ranges] == [
        (10, 4105),
        (4106, 8201),
        (8202, 8999),
    ]


@pytest.mark.parametrize("change", [("> 0-0 <", "> 0-1 <"), ("bmap", "pmab"), ("BmapFileChecksum", "Other")])
def test_a_changed_block_map_is_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"a" * bmap.BLOCK)
    text = bmap.text_of(bmap.measured(image, [(0, 0)]))
    (tmp_path / "map").write_text(text.replace(*change))
    with pytest.raises(ArtefactDamaged, match="not an intact block map"):
        bmap.read(tmp_path / "map")


@pytest.mark.parametrize(
    ("free", "used"),
    [
        ("  Free blocks: 10-19, 30, 40-99\n", [(0, 9), (20, 29), (31, 39)]),
        ("Free blocks:              8302\n  Free blocks: 0-4\n  Free inodes: 7-9\n  Free blocks: \n", [(5, 99)]),
        ("  Free blocks: 50-59\n  Free blocks: 60-69\n", [(0, 49), (70, 99)]),
        ("", [(0, 99)]),
    ],
)
def test_all_blocks_but_the_free_ones_are_used(free: str, used: list[tuple[int, int]]) -> None:
    assert list(_used_blocks(free, 100)) == used


def test_identifiers_depend_on_tree_and_purpose() -> None:
    ids = Identifiers("a")
    assert len({ids.number("disk"), ids.number("boot"), Identifiers("b").number("disk")}) == 3
    assert ids.uuid("root") == Identifiers("a").uuid("root")


@pytest.mark.parametrize(
    ("architecture", "trees", "devices"),
    [
        ("armhf", ["bcm2836-rpi-2-b.dtb", "bcm2837-rpi-zero-2-w.dtb"], ["pi2-32bit", "pi3-32bit"]),
        ("armhf", ["bcm2710-rpi-3-b.dtb", "bcm2711-rpi-4-b.dtb"], ["pi3-32bit"]),
        ("arm64", ["bcm2837-rpi-3-b.dtb", "bcm2711-rpi-400.dtb"], ["pi3-64bit", "pi4-64bit"]),
        ("arm64", ["bcm2710-rpi-zero-2-w.dtb", "bcm2712-rpi-500.dtb"], ["pi3-64bit", "pi5-64bit"]),
    ],
)
def test_imager_offers_the_image_for_boards_that_boot_it(
    architecture: str, trees: list[str], devices: list[str]
) -> None:
    parts = BootParts(kernel=None, initramfs=None, device_trees=tuple(map(Path, trees)), firmware=())
    assert imager_devices(architecture, parts) == devices


def settings(**given: object) -> dict[str, Any]:
    text = first_boot.user_data(load_config({"sd": given}).sd, "board")
    assert text.startswith("#cloud-config\n{")
    return json.loads(text.partition("\n")[2])  # type: ignore[no-any-return]


def test_without_settings_nobody_can_log_in() -> None:
    assert settings() == {"hostname": "board", "manage_etc_hosts": True, "users": [], "ssh_pwauth": False}


def test_a_user_with_a_key_has_no_password() -> None:
    made = settings(user="ada", ssh_keys=[KEY], locale="en_GB.UTF-8")
    (user,) = made["users"]
    assert (user["lock_passwd"], user["ssh_authorized_keys"]) == (True, [KEY])
    assert user["sudo"] == "ALL=(ALL:ALL) NOPASSWD:ALL"
    assert (made["ssh_pwauth"], made["locale"]) == (False, "en_GB.UTF-8")


def test_a_password_is_required_for_sudo() -> None:
    made = settings(user="ada", password_hash=HASH)
    (user,) = made["users"]
    assert (user["passwd"], user["lock_passwd"], user["sudo"]) == (HASH, False, "ALL=(ALL:ALL) ALL")
    assert made["ssh_pwauth"] is True


@pytest.mark.parametrize("given", [{"ssh_keys": [KEY]}, {"password_hash": HASH}])
def test_settings_of_no_user_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"sd\.user"):
        first_boot.require_complete(load_config({"sd": given}).sd)


@pytest.mark.parametrize(
    "given",
    [
        {"user": "Ada"},
        {"user": "ada\nroot"},
        {"hostname": "a_b"},
        {"password_hash": "secret"},
        {"ssh_keys": ["key"]},
        {"ssh_keys": [KEY + "\n" + KEY]},
        {"locale": "english"},
    ],
)
def test_invalid_settings_are_refused(given: dict[str, object]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"sd\.{name}"):
        load_config({"sd": given})
