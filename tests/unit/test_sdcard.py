"""Tests of card images: block maps, the blocks in use, and the settings for the first boot."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flow.firmware import Firmware
from nfsroot.boot_files import BootParts
from sdcard import bmap, first_boot, write
from sdcard.image import (
    FIRST_BOOT,
    Folder,
    _install_wifi_firmware,
    _used_blocks,
    first_boot_digest,
    imager_devices,
    number_of,
    root_size,
    uuid_of,
)
from toolchain import process, progress
from toolchain.config import ROOT, load_config
from toolchain.errors import ArtefactDamaged, ConfigError
from toolchain.manifest import Artefact, Manifest

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
    assert len({number_of("a", "disk"), number_of("a", "boot"), number_of("b", "disk")}) == 3
    assert uuid_of("a", "root") == uuid_of("a", "root") != uuid_of("b", "root")


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
    parts = BootParts(kernel=None, initramfs=None, device_trees={name: Path(name) for name in trees}, firmware={})
    assert imager_devices(architecture, parts) == devices


KINDS = ("files", "folders", "symlinks", "devices", "fifos", "sockets")


@pytest.mark.parametrize(
    ("counts", "size_mib"),
    [({"files": 3000, "folders": 21, "bytes": 3000 * 20_000}, 220), ({}, 144), ({"files": 1, "bytes": 1 << 30}, 1232)],
)
def test_a_root_has_an_inode_per_16_kib(counts: dict[str, int], size_mib: int) -> None:
    made = root_size({**dict.fromkeys((*KINDS, "bytes"), 0), **counts})
    assert made == (size_mib, size_mib << 20 >> 14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [20_000, 1_000_000])
def test_a_root_has_inodes_for_many_small_entries(kind: str, count: int) -> None:
    few = {**dict.fromkeys((*KINDS, "bytes"), 0), "files": 100}
    (small, usual), (size_mib, inodes) = root_size(few), root_size({**few, kind: count})
    assert inodes > 1.25 * count
    assert size_mib % 4 == 0
    assert (size_mib - small << 20) >= (inodes - usual) * 256, "expected room for the additional inodes"
    assert inodes <= size_mib << 8, "expected at most one inode per block"


@pytest.mark.parametrize("kind", ["absent", "file", "link", "folder link"])
def test_wifi_firmware_stays_in_the_tree(tmp_path: Path, kind: str) -> None:
    tree, package, outside = tmp_path / "tree", tmp_path / "package", tmp_path / "outside"
    name, alias, licence = "cypress/cyfmac43430.bin", "brcm/brcmfmac43430.bin", "firmware-brcm80211/copyright"
    for folder in (package / "cypress", package / "brcm", package / "firmware-brcm80211", outside):
        folder.mkdir(parents=True)
    (package / name).write_text("firmware")
    (package / alias).symlink_to(f"../{name}")
    (package / licence).write_text("licence")
    targets = [tree / f"usr/lib/firmware/{item}" for item in (name, alias)] + [tree / "usr/share/doc" / licence]
    for target in targets:
        if kind == "folder link":
            target.parent.parent.mkdir(parents=True, exist_ok=True)
            target.parent.symlink_to(outside)
        elif kind != "absent":
            target.parent.mkdir(parents=True)
            (outside / target.name).write_text("this PC")
            target.symlink_to(outside / target.name) if kind == "link" else target.write_text("old")
    before = {path.name: path.read_text() for path in outside.iterdir()}
    wifi = Firmware(folder=package, licence=package / licence, package="", sha256="")
    copied = _install_wifi_firmware(tree, wifi)
    assert {path.name: path.read_text() for path in outside.iterdir()} == before
    assert {(tree / path).name: (tree / path).is_symlink() for path in copied} == {
        Path(name).name: False,
        Path(alias).name: True,
        "copyright": False,
    }
    if kind != "folder link":
        assert [target.read_text() for target in targets] == ["firmware", "firmware", "licence"]


PSK = "0123456789abcdef" * 4
WIFI = """network:
  version: 2
  ethernets: {eth0: {dhcp4: true, optional: true}}
  wifis:
    wlan0:
      dhcp4: true
      regulatory-domain: "GB"
      access-points:
        "Home \\"5\\"":
          hidden: true
          password: "IEEE passphrase"
        "café": {}
      optional: true
"""
"""A file in the form that Raspberry Pi Imager writes, with two networks."""


def configured(root: Path, network: str) -> dict[str, str]:
    """Run the card's Wi-Fi setup program, and return the files that it writes."""
    for folder in ("boot/firmware", "etc/network/interfaces.d"):
        (root / folder).mkdir(parents=True)
    if network:
        (root / "boot/firmware/network-config").write_text(network)
    program = ROOT / "images/overlay/card/usr/local/sbin/wifi-from-card"
    process.run([sys.executable, str(program), str(root)])
    return {str(path.relative_to(root)): path.read_text() for path in root.glob("etc/**/*") if path.is_file()}


def test_wifi_is_configured_from_the_imagers_file(tmp_path: Path) -> None:
    made = configured(tmp_path, WIFI)
    assert made["etc/network/interfaces.d/wlan0"].endswith("    wpa-conf /etc/wpa_supplicant/card.conf\n")
    name = b'Home "5"'
    key = hashlib.pbkdf2_hmac("sha1", b"IEEE passphrase", name, 4096, 32).hex()
    assert made["etc/wpa_supplicant/card.conf"].splitlines() == [
        *("ctrl_interface=DIR=/run/wpa_supplicant", "country=GB"),
        *("network={", f"    ssid={name.hex()}", "    scan_ssid=1", f"    psk={key}", "}"),
        *("network={", f"    ssid={'café'.encode().hex()}", "    key_mgmt=NONE", "}"),
    ]
    assert (tmp_path / "etc/wpa_supplicant/card.conf").stat().st_mode & 0o777 == 0o600


def test_wifi_is_configured_from_the_settings(tmp_path: Path) -> None:
    sd = load_config({"sd": {"wifi_name": "Home", "wifi_psk": PSK, "wifi_country": "GB"}}).sd
    made = configured(tmp_path, first_boot.network_config(sd))
    assert f"    psk={PSK}\n" in made["etc/wpa_supplicant/card.conf"]


@pytest.mark.parametrize("network", [first_boot.network_config(load_config({}).sd), "network: {version: 2}\n"])
def test_without_wifi_nothing_is_written(tmp_path: Path, network: str) -> None:
    assert configured(tmp_path, network) == {}


@pytest.mark.parametrize("given", [{"wifi_name": "Home"}, {"wifi_country": "GB"}, {"wifi_psk": PSK}])
def test_incomplete_wifi_settings_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"sd\.wifi_name, sd\.wifi_country"):
        first_boot.require_complete(load_config({"sd": given}).sd)


def settings(**given: object) -> dict[str, Any]:
    text = first_boot.user_data(load_config({"sd": given}).sd, "board")
    assert text.startswith("#cloud-config\n{")
    return json.loads(text.partition("\n")[2])  # type: ignore[no-any-return]


def test_without_settings_nobody_can_log_in() -> None:
    assert settings() == {"hostname": "board", "manage_etc_hosts": True, "users": [], "ssh_pwauth": False}


@pytest.mark.parametrize(
    ("given", "can_log_in"),
    [
        ({}, False),
        ({"user": "ada"}, False),
        ({"user": "ada", "ssh_keys": [KEY]}, True),
        ({"user": "ada", "password_hash": HASH}, True),
    ],
)
def test_a_card_without_a_login_is_a_warning(given: dict[str, object], can_log_in: bool) -> None:
    assert bool(first_boot.login_warnings(load_config({"sd": given}).sd)) is not can_log_in


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


@pytest.mark.parametrize(
    ("settings", "latest", "warnings"),
    [
        ({}, "sha256:new", []),
        ({}, "", []),
        ({"user": "ben"}, "sha256:new", ["with other settings for the first boot"]),
        ({"ssh_keys": []}, "sha256:new", ["with other settings for the first boot"]),
        ({"hostname": "other"}, "sha256:new", ["with other settings for the first boot"]),
        ({"wifi_psk": "b" * 64}, "sha256:new", ["with other settings for the first boot"]),
        ({"url": "https://example.org"}, "sha256:new", []),
        ({}, "sha256:newer", ["before the last build of the system image"]),
        (
            {"locale": "C.UTF-8"},
            "sha256:newer",
            ["with other settings for the first boot", "before the last build of the system image"],
        ),
    ],
)
def test_an_outdated_card_image_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], latest: str, warnings: list[str]
) -> None:
    """The card image was made from a pulled system image, after the system image ``sha256:new`` had been built."""
    wifi = {"wifi_name": "home", "wifi_psk": "a" * 64, "wifi_country": "GB"}
    before = {"user": "ada", "ssh_keys": [KEY], "hostname": "board", **wifi}
    config = load_config({"build": {"folder": str(tmp_path)}, "sd": before})
    folder = Folder.of(config)
    folder.place.mkdir(parents=True)
    folder.image.write_bytes(b"a" * bmap.BLOCK)
    folder.bmap.write_text(bmap.text_of(bmap.measured(folder.image, [(0, 0)])))
    Manifest(
        step="sd",
        key="",
        inputs={FIRST_BOOT: first_boot_digest(config)},
        artefacts=(Artefact.of(folder.image), Artefact.of(folder.bmap)),
        facts={"image_id": "sha256:pulled", "built_image": "sha256:new"},
    ).write(folder.manifest)
    if latest:
        Manifest(step="system", key="", inputs={}, facts={"image": latest}).write(
            config.target_root / "system.manifest.json"
        )
    for name in ("require_root", "require_program", "run"):
        monkeypatch.setattr(process, name, lambda *_, **__: "bmaptool")
    for name in ("_require_card", "_compare"):
        monkeypatch.setattr(write, name, lambda *_, **__: None)
    printed: list[str] = []
    monkeypatch.setattr(progress, "warn", printed.append)
    current = load_config({"build": {"folder": str(tmp_path)}, "sd": {**before, **settings}})
    assert write.write_card(current, tmp_path / "card").size == bmap.BLOCK
    assert [text.partition(" was made ")[2].split(" (")[0].split(";")[0] for text in printed] == warnings
    assert all(text.endswith("; to make it again, run ./inv sd-image") for text in printed)
