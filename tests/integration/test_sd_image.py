"""Tests of card images: partitions, file systems, content, reproducibility, writing to a device, and booting."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nasty_image
import pytest
from device_parts import BOOT_LIMIT_S
from nasty_image import entry, folder, tree_listing
from ordinary_user import USER, run_python
from registry_parts import small_disk
from waiting import eventually

from engine import containers
from engine.connect import DEFAULT_HOST, connect
from flow import main_job, publish
from nfsroot import qemu, unpack
from sdcard import bmap, image, write
from sdcard.image import Folder
from sdcard.tools import Tools
from toolchain import files, process
from toolchain.config import Config, load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, ConfigError, DiskFull, InUse, RootNeeded, UserError
from toolchain.manifest import Manifest

NAME = f"pitorch-test-card-{os.getpid()}"
RELEASE = "6.12.107-armmp"
TREES = f"usr/lib/linux-image-{RELEASE}"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount, and to become another user")
pytestmark = [pytest.mark.engine, needs_root]

CHANGED = {
    *("boot", "boot/firmware", "dev", "dev/console", "etc", "etc/cloud", "etc/cloud/cloud.cfg.d"),
    *("etc/cloud/cloud.cfg.d/99-card.cfg", "etc/fstab", "etc/hostname", "etc/hosts", "etc/machine-id"),
    *("etc/network", "etc/network/interfaces.d", "etc/network/interfaces.d/eth0", "etc/resolv.conf", "etc/ssh"),
    *("etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "etc/environment"),
    *("etc/apt/apt.conf.d", "etc/apt/apt.conf.d/01proxy", ".", ".dockerenv", "usr/sbin", "usr/sbin/policy-rc.d"),
    *("usr/lib", "usr/lib/clock-epoch", "lost+found", "usr/share", "usr/share/doc"),
}
"""Paths at which a card and its image may differ."""

ADDED = ("usr/lib/firmware", "usr/share/doc/firmware-brcm80211")
"""Additional folders of a card, with the firmware for Wi-Fi and its licence."""


STATUS = b"""Package: dpkg
Status: install ok installed
Maintainer: Dpkg Developers <dpkg@example.org>
Architecture: armhf
Version: 1.22.22
Description: Debian package management system
"""


def boot_layer() -> list[object]:
    return [
        *(folder(name) for name in ("boot", "usr", "usr/bin", "usr/lib", TREES, "var", "var/lib", "var/lib/dpkg")),
        entry("var/lib/dpkg/status", STATUS),
        entry("usr/bin/cloud-init", b"program"),
        entry(f"boot/vmlinuz-{RELEASE}", b"kernel" * 1000),
        entry(f"boot/initrd.img-{RELEASE}", b"initramfs" * 1000),
        entry(f"{TREES}/bcm2837-rpi-3-b.dtb", b"device tree"),
        entry(f"{TREES}/bcm2836-rpi-2-b.dtb", b"device tree"),
    ]


def config_for(name: str, **sections: dict[str, object]) -> Config:
    return load_config({"image": {"name": name}, "build": {"folder": "build/test"}, **sections})


@contextlib.contextmanager
def loaded(name: str, *layers: object) -> Iterator[Config]:
    config = config_for(name)
    with contextlib.closing(connect()) as client:
        nasty_image.load(client, config.image_reference("system"), [nasty_image.layer(item) for item in layers])  # type: ignore[arg-type]
        try:
            yield config
        finally:
            client.images.remove(config.image_reference("system"), force=True)


@dataclass(frozen=True)
class Card:
    """A card image, unpacked."""

    config: Config
    manifest: Manifest
    raw: Path
    boot: Path
    root: Path
    tools: Tools


def unpacked(config: Config, place: Path) -> tuple[Path, Path, Path]:
    """Return the raw image and copies of its two partitions, read at the offsets in the image's partition table."""
    raw = place / "card.img"
    with lzma.open(Folder.of(config).image) as source, raw.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    parts = []
    for row in partitions(raw):
        parts.append(place / f"part{row['nr']}")
        with raw.open("rb") as source, parts[-1].open("wb") as sink:
            source.seek(row["start"] * 512)
            sink.write(source.read(row["sectors"] * 512))
    return raw, parts[0], parts[1]


def partitions(raw: Path) -> list[dict[str, Any]]:
    """Return the rows of an image's partition table; ``start`` and ``sectors`` are in units of 512 bytes."""
    columns = "NR,START,SECTORS,TYPE,UUID,SCHEME"
    listed = process.output_of(["partx", "--noheadings", "--raw", "--output", columns, raw])
    rows = [line.split() for line in listed.splitlines()]
    return [
        {"nr": int(nr), "start": int(start), "sectors": int(sectors), "type": kind, "uuid": uuid, "scheme": scheme}
        for nr, start, sectors, kind, uuid, scheme in rows
    ]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory, engine_runs: None) -> Iterator[Card]:
    with loaded(NAME, nasty_image.lower_layer(), nasty_image.upper_layer(), boot_layer()) as config:
        made = image.build(config)
        tools = image.ready_tools(config)
        raw, boot, root = unpacked(config, tmp_path_factory.mktemp("card"))
        yield Card(config, made, raw, boot, root, tools)
    for path in Folder.of(config).place.glob(f"{NAME}*"):
        path.unlink()


def on_boot(card: Card) -> dict[str, bytes]:
    """Return the files of the boot partition."""
    listed = card.tools.run("mdir", "-b", "-i", card.boot, "::").split()
    names = [name.removeprefix("::/") for name in listed]
    return {name: card.tools.run("mtype", "-i", card.boot, f"::{name}").encode() for name in names}


def test_both_file_systems_are_intact(card: Card) -> None:
    boot, root = partitions(card.raw)
    assert (boot["scheme"], boot["type"], root["type"]) == ("dos", "0xc", "0x83")
    assert [row["uuid"] for row in (boot, root)] == [f"{card.manifest.facts['disk']}-{part}" for part in ("01", "02")]
    assert root["start"] * 512 == image.ROOT_START
    assert (root["start"] + root["sectors"]) * 512 == card.raw.stat().st_size == card.manifest.facts["extract_size"]
    card.tools.run("e2fsck", "-fn", card.root)
    card.tools.run("fsck.fat", "-n", card.boot)


def test_boot_partition_has_the_files_that_a_board_reads(card: Card) -> None:
    files = on_boot(card)
    assert {"bootcode.bin", "start.elf", "fixup.dat", "LICENCE.raspi-firmware"} <= set(files)
    assert files["vmlinuz"] == b"kernel" * 1000
    assert files["initrd.img"] == b"initramfs" * 1000
    assert files["cmdline.txt"].decode() == (
        f"console=serial0,115200 console=tty1 boot=local root=PARTUUID={card.manifest.facts['disk']}-02 "
        "rootfstype=ext4 rw rootwait net.ifnames=0\n"
    )
    assert b"[pi3]\ndevice_tree=bcm2837-rpi-3-b.dtb\n" in files["config.txt"]
    assert b"Broadcom" in files["LICENCE.raspi-firmware"]


def test_an_unconfigured_image_has_no_password_and_no_user(card: Card) -> None:
    files = on_boot(card)
    first, _, rest = files["user-data"].decode().partition("\n")
    assert first == "#cloud-config"
    assert json.loads(rest) == {"hostname": NAME, "manage_etc_hosts": True, "users": [], "ssh_pwauth": False}
    assert files["meta-data"].startswith(b"instance-id: pitorch-")


@contextlib.contextmanager
def attached(file: Path) -> Iterator[Path]:
    """Attach a file to a loop device, and yield the device."""
    done = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the kernel has no loop devices: {done.stderr.strip()}")
    try:
        yield Path(done.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


@contextlib.contextmanager
def mounted(device: Path, place: Path, *options: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", *options, device, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_the_root_has_the_files_of_the_image(card: Card, tmp_path: Path) -> None:
    """Owners, modes, times, hard links, devices, attributes and names are equal, except where a card must differ."""
    with contextlib.closing(connect()) as client:
        source = unpack.find_image(client, card.config.image_reference("system"), card.config.image.target)
        unpack.unpack(client, source, tmp_path / "tree")
    wanted = tree_listing(tmp_path / "tree")
    with attached(card.root) as device, mounted(device, tmp_path / "root", "-o", "ro,noload") as place:
        found = tree_listing(place)
        fstab = (place / "etc/fstab").read_text()
        assert not list((place / "etc/ssh").glob("ssh_host_*"))
    disk = card.manifest.facts["disk"]
    assert fstab.splitlines() == [
        f"PARTUUID={disk}-02 / ext4 defaults,noatime 0 1",
        f"PARTUUID={disk}-01 /boot/firmware vfat umask=0077,nofail 0 2",
    ]
    differing = {os.fsdecode(name) for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)}
    assert {name for name in differing - CHANGED if not name.startswith(ADDED)} == set()
    assert b"usr/lib/firmware/cypress/cyfmac43430-sdio.bin" in found.keys() - wanted.keys()


def test_two_builds_are_equal_after_one_with_a_password(card: Card) -> None:
    """Only the image with the password is private."""
    secret = replace(card.config, sd=replace(card.config.sd, user="ada", password_hash=f"$6$salt${'a' * 86}"))
    image.build(secret)
    assert Folder.of(card.config).image.stat().st_mode & 0o777 == 0o600
    again = image.build(card.config)
    assert Folder.of(card.config).image.stat().st_mode & 0o777 == 0o644
    assert [item.sha256 for item in again.artefacts] == [item.sha256 for item in card.manifest.artefacts]
    assert again.facts == card.manifest.facts


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """Make a folder with write permission for all users."""
    with tempfile.TemporaryDirectory(prefix="pitorch-card-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_ordinary_user(checkout: Path, public: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``./inv`` as an ordinary user who may use the engine, with another umask and a build folder in ``public``."""
    environment = {"HOME": str(public), "INVOKE_IMAGE_NAME": NAME, "INVOKE_BUILD_FOLDER": str(public / "build")}
    address = os.environ.get("DOCKER_HOST", DEFAULT_HOST)
    program = "import os, runpy; os.umask(0o077); runpy.run_module('toolchain.cli', run_name='__main__')"
    return run_python(
        checkout,
        *("-X", "utf8", "-c", program, *words),
        environment={**environment, "DOCKER_HOST": address, **settings},
        group=Path(address.removeprefix("unix://")).stat().st_gid,
        limit_s=1800,
    )


def test_an_ordinary_user_makes_the_same_image(card: Card, open_checkout: Path, public: Path) -> None:
    ended = as_ordinary_user(open_checkout, public, "sd-image")
    assert ended.returncode == 0, ended.stderr
    config = replace(card.config, build=replace(card.config.build, folder=public / "build"))
    ours, theirs = Folder.of(card.config), Folder.of(config)
    assert theirs.image.stat().st_uid == USER
    made = Manifest.read(theirs.manifest)
    assert made is not None
    facts = [
        {**item.facts, "built_image": ""} for item in (made, card.manifest)
    ]  # known only where the image was built
    assert facts[0] == facts[1]
    for mine, other in zip([ours.image, ours.bmap, *ours.sbom], [theirs.image, theirs.bmap, *theirs.sbom], strict=True):
        assert files.sha256_of(other) == files.sha256_of(mine), mine.name
    assert not list(theirs.place.glob(".*")), "no temporary files must be left"


def test_the_build_folder_of_another_user_is_refused(card: Card, open_checkout: Path, public: Path) -> None:
    (public / "of-root").mkdir(mode=0o755)
    ended = as_ordinary_user(open_checkout, public, "sd-image", INVOKE_BUILD_FOLDER=str(public / "of-root"))
    assert ended.returncode == RootNeeded.exit_code, ended.stderr
    assert f"{public}/of-root belongs to another user" in ended.stderr
    assert "./inv sd-image; or change build.folder" in ended.stderr
    assert not list((public / "of-root").iterdir())


REQUIRED = {
    **dict.fromkeys(("name", "description", "icon", "url", "extract_sha256", "release_date"), str),
    **dict.fromkeys(("extract_size", "image_download_size"), int),
}
"""Fields that Imager's schema requires in an entry: doc/json-schema/os-list-schema.json in its repository."""


def test_the_imagers_entry_describes_the_image(card: Card) -> None:
    place = Folder.of(card.config)
    listed = json.loads(place.imager.read_text())
    assert listed.keys() == {"os_list"}, "the schema allows only one other field"
    (row,) = listed["os_list"]
    assert {name: type(row.get(name)) for name in REQUIRED} == REQUIRED
    packed = place.image.stat().st_size
    assert row["url"] == place.image.as_uri()
    assert (row["extract_size"], row["extract_sha256"]) == (
        card.raw.stat().st_size,
        process.output_of(["sha256sum", str(card.raw)]).split()[0],
    )
    assert row["image_download_size"] == packed
    assert row["init_format"] == "cloudinit"
    assert row["devices"] == ["pi2-32bit", "pi3-32bit"]
    subprocess.run(["sha256sum", "--check", "--quiet", place.checksum.name], check=True, cwd=place.place)


def test_bill_of_materials_is_next_to_the_image(card: Card) -> None:
    spdx, cyclonedx = Folder.of(card.config).sbom
    packages = {item["name"]: item["versionInfo"] for item in json.loads(spdx.read_text())["packages"]}
    assert packages["dpkg"] == "1.22.22"
    components = {item["name"]: item for item in json.loads(cyclonedx.read_text())["components"]}
    assert "dpkg" in components
    fetched = card.manifest.facts["firmware"]
    assert [file.partition("_")[0] for file in fetched] == ["raspi-firmware", "firmware-brcm80211"]
    for file, sha256 in fetched.items():
        name = file.partition("_")[0]
        assert unquote(file).startswith(f"{name}_{packages[name]}_")
        assert components[name]["type"] == "firmware"
        assert components[name]["hashes"] == [{"alg": "SHA-256", "content": sha256}]
    assert {spdx, cyclonedx} <= {item.path for item in card.manifest.artefacts}
    for path in (spdx, cyclonedx):
        assert "accepted by the library" in publish.verify_file(card.config, path, key=None).text()


@contextlib.contextmanager
def loop_device(size: int, folder: Path) -> Iterator[Path]:
    """Provide a block device that is filled with 0xFF."""
    backing = folder / "device"
    with backing.open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(b"\xff" * (1 << 20))
    with attached(backing) as device:
        yield device


def test_a_card_is_written_by_its_block_map_and_compared(card: Card, tmp_path: Path) -> None:
    """Blocks outside the map keep their old contents on the card; both file systems are intact nevertheless."""
    with loop_device(card.raw.stat().st_size + (8 << 20), tmp_path) as device:
        done = write.write_card(card.config, device, removable=False)
        assert done.size == card.manifest.facts["mapped_size"] < card.raw.stat().st_size
        with device.open("rb") as stream:
            stream.seek(image.ROOT_START)
            root = tmp_path / "root"
            root.write_bytes(stream.read(card.root.stat().st_size))
        with device.open("r+b") as stream:
            stream.seek(image.ROOT_START + 1024)
            stream.write(b"\0" * 512)
        with pytest.raises(ArtefactDamaged, match="does not contain what was written"):
            write._compare(device, bmap.read(Folder.of(card.config).bmap))
    assert root.read_bytes() != card.root.read_bytes(), "free blocks must not be written"
    card.tools.run("e2fsck", "-fn", root)


def test_a_mounted_card_is_refused(card: Card, tmp_path: Path) -> None:
    with loop_device(8 << 20, tmp_path) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        place = tmp_path / "mounted"
        with mounted(device, place), pytest.raises(InUse) as caught:
            write.write_card(card.config, device, removable=False)
    assert str(place) in caught.value.found


def test_a_fixed_disk_is_refused(card: Card, tmp_path: Path) -> None:
    with loop_device(1 << 20, tmp_path) as device, pytest.raises(UserError) as caught:
        write.write_card(card.config, device)
    assert "not a removable device" in caught.value.summary


def test_a_small_card_is_refused(card: Card, tmp_path: Path) -> None:
    with loop_device(1 << 20, tmp_path) as device, pytest.raises(UserError) as caught:
        write.write_card(card.config, device, removable=False)
    assert "too small" in caught.value.summary


@pytest.mark.parametrize(("name", "found"), [("absent", "no such file"), ("file", "another file")])
def test_path_that_is_not_a_device_is_refused(card: Card, tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError) as caught:
        write.write_card(card.config, tmp_path / name)
    assert caught.value.found == found
    assert (tmp_path / "file").read_text() == "precious"


def test_a_changed_image_is_not_written(card: Card, tmp_path: Path) -> None:
    place = Folder.of(card.config)
    before = place.image.read_bytes()
    try:
        place.image.write_bytes(before[:-1])
        with pytest.raises(ArtefactDamaged):
            write.write_card(card.config, tmp_path / "any")
    finally:
        place.image.write_bytes(before)


def test_a_missing_card_image_is_reported(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    with pytest.raises(ArtefactMissing) as caught:
        write.write_card(config, tmp_path / "any")
    assert "./inv sd-image" in caught.value.fix


def test_a_missing_system_image_is_reported(engine_runs: None) -> None:
    with pytest.raises(ArtefactMissing) as caught:
        image.build(config_for(f"{NAME}-absent"))
    assert "./inv build-image" in caught.value.fix


def test_an_image_without_a_kernel_is_refused(engine_runs: None) -> None:
    with loaded(f"{NAME}-container", nasty_image.lower_layer()) as config, pytest.raises(ArtefactMissing) as caught:
        image.build(config)
    assert "a kernel" in caught.value.found
    assert "cloud-init (image.card: true)" in caught.value.found
    assert not list(Folder.of(config).place.glob(f"*{NAME}-container*"))


def test_a_full_disk_is_reported_first(card: Card, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as folder:
        full = replace(card.config, build=replace(card.config.build, folder=folder))
        with pytest.raises(DiskFull):
            image.build(full)


def test_keys_without_a_user_are_refused() -> None:
    config = load_config({"sd": {"ssh_keys": ["ssh-ed25519 AAAA you@pc"]}})
    with pytest.raises(ConfigError, match=r"sd\.user"):
        image.build(config)


@dataclass(frozen=True)
class RealCard:
    """The card image of a bootable system image, with a user."""

    config: Config
    manifest: Manifest
    raw: Path
    boot: Path
    root: Path
    key: Path


@pytest.fixture(scope="module", params=["armhf", "arm64"])
def real_card(
    request: pytest.FixtureRequest, product_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealCard]:
    """Build a separate image, because the tests' shared image is not for cards. The next run reuses the build."""
    place = tmp_path_factory.mktemp("real")
    key = place / "key"
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    public = key.with_suffix(".pub").read_text().strip()
    config = replace(
        product_config,
        build=replace(product_config.build, folder=product_config.build.folder.with_name("test-card")),
        image=replace(
            product_config.image, name=f"{product_config.image.name}-card", card=True, architecture=request.param
        ),
        sd=replace(
            product_config.sd,
            user="ada",
            ssh_keys=(public,),
            hostname="card-test",
            locale="en_GB.UTF-8",
            wifi_name="net",
            wifi_country="GB",
        ),
    )
    main_job.build_image(config)
    made = image.build(config)
    yield RealCard(config, made, *unpacked(config, place), key)
    shutil.rmtree(place)


@pytest.mark.expensive
@pytest.mark.emulation
@pytest.mark.timeout(3600)
def test_a_real_card_is_intact_and_reproducible(real_card: RealCard) -> None:
    tools = image.ready_tools(real_card.config)
    tools.run("e2fsck", "-fn", real_card.root)
    tools.run("fsck.fat", "-n", real_card.boot)
    again = image.build(real_card.config)
    assert [item.sha256 for item in again.artefacts] == [item.sha256 for item in real_card.manifest.artefacts]


@pytest.mark.expensive
@pytest.mark.emulation
def test_the_initramfs_of_a_card_has_its_drivers(real_card: RealCard) -> None:
    """The card slot of a Pi 4 has no power until the regulators' drivers are loaded; QEMU's boards need none."""
    config = real_card.config
    with contextlib.closing(connect()) as client:
        listed = containers.run_in(
            client,
            config.image_reference("system"),
            ["sh", "-euc", "lsinitramfs /boot/initrd.img-*; cat /lib/modules/*/modules.builtin"],
            architecture=config.image.target,
        ).output
    for module in ("sdhci-iproc.ko", "bcm2835.ko", "fixed.ko", "gpio-regulator.ko"):
        assert f"/{module}" in listed


EMULATED_PIS = {
    "armhf": ("raspi2b", "bcm2836-rpi-2-b.dtb", "ttyAMA0"),
    # Linux assigns the first serial port of a Pi 3 to Bluetooth.
    "arm64": ("raspi3b", "bcm2837-rpi-3-b.dtb", "ttyS1,115200", "-serial", "null"),
}
"""QEMU's machine, device tree and console for each architecture, and options for serial ports before the console."""
FIRST_BOOT_IS_FINISHED = "Datasource DataSourceNoCloud [seed=/dev/mmcblk0p1]."
"""The end of cloud-init's last message, which names the SD card's first partition as the source of the settings."""


@pytest.mark.expensive
@pytest.mark.emulation
@pytest.mark.machine
@pytest.mark.timeout(3600)
def test_an_emulated_pi_boots_from_the_card(real_card: RealCard, tmp_path: Path) -> None:
    """QEMU has no firmware for the machine, so it loads the kernel from the boot partition. The root is on the card."""
    machine_name, tree, console_name, *serial = EMULATED_PIS[real_card.config.image.architecture]
    tools = image.ready_tools(real_card.config)
    for name in ("vmlinuz", "initrd.img", "cmdline.txt", tree):
        tools.run("mcopy", "-i", real_card.boot, f"::{name}", tmp_path)
    card, console = tmp_path / "card", tmp_path / "console.log"
    process.run(["cp", "--sparse=always", real_card.raw, card])
    os.truncate(card, 1 << real_card.raw.stat().st_size.bit_length())  # QEMU accepts powers of 2 only
    words = (tmp_path / "cmdline.txt").read_text().split()
    line = " ".join([f"console={console_name}", *(word for word in words if not word.startswith("console="))])
    argv = ["setpriv", "--pdeathsig", "TERM", "qemu-system-aarch64", "-M", machine_name, "-append", line]
    argv += ["-kernel", "vmlinuz", "-initrd", "initrd.img", "-dtb", tree, *serial]
    argv += ["-drive", "if=sd,format=raw,file=card", "-serial", f"file:{console}", "-display", "none"]
    machine = subprocess.Popen([*argv, "-monitor", "none", "-no-reboot"], cwd=tmp_path)
    try:
        # A login prompt may never appear on a busy machine, because systemd waits only 90 s for the serial port.
        eventually(
            lambda: console.exists() and FIRST_BOOT_IS_FINISHED in console.read_text(errors="replace"),
            lambda: console.read_text(errors="replace")[-3000:],
            limit_s=BOOT_LIMIT_S,
            interval_s=1,
            task=machine,
        )
    finally:
        machine.kill()
        machine.wait()


@pytest.mark.expensive
@pytest.mark.emulation
@pytest.mark.machine
@pytest.mark.timeout(3600)
def test_the_first_boot_applies_the_settings(real_card: RealCard, tmp_path: Path) -> None:
    """Systemd and cloud-init add a user without a password, set the host name, locale and keys, and grow the root."""
    tools = image.ready_tools(real_card.config)
    for name in ("vmlinuz", "initrd.img", "cmdline.txt"):
        tools.run("mcopy", "-i", real_card.boot, f"::{name}", tmp_path)
    size = real_card.raw.stat().st_size + (512 << 20)
    os.truncate(real_card.raw, size)  # a card is larger than its image
    words = (tmp_path / "cmdline.txt").read_text().split()
    spec = qemu.MachineSpec(
        boot=qemu.BootFiles(tmp_path / "vmlinuz", tmp_path / "initrd.img", "of the card"),
        disk=real_card.raw,
        architecture=real_card.config.image.architecture,
        init="systemd",
        extra_arguments=" ".join(word for word in words if not word.startswith("console=")),
    )
    with qemu.running_machine(spec, tmp_path / "console.log", boot_timeout_s=BOOT_LIMIT_S) as machine:
        ssh = ["ssh", "-i", str(real_card.key), "-p", str(machine.ssh_port), "-o", "StrictHostKeyChecking=accept-new"]
        ssh += ["-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "BatchMode=yes", "ada@127.0.0.1"]

        def on_board(command: str) -> str:
            return process.run([*ssh, command], limit_s=BOOT_LIMIT_S, merge_stderr=False).output

        assert "status: done" in on_board("cloud-init status --long --wait || true")
        assert on_board("hostname").strip() == "card-test"
        assert on_board("locale -a").split().count("en_GB.utf8") == 1
        assert on_board("sudo grep -c '^ada:!' /etc/shadow").strip() == "1"
        assert f"ssid={b'net'.hex()}" in on_board("sudo cat /etc/wpa_supplicant/card.conf")
        assert "wpa-conf" in on_board("/usr/sbin/ifquery wlan0")
        assert "passwordauthentication no" in on_board("sudo sshd -T")
        # systemd stops waiting for a device after 90 s, which may elapse on a busy machine.
        assert on_board("sudo mount -a; findmnt -no SOURCE /boot/firmware").strip() == "/dev/vda1"
        assert int(on_board("findmnt -bno SIZE /")) > size - image.ROOT_START - (128 << 20), (
            "the root file system must fill the card"
        )
        on_board("sudo systemctl --no-block poweroff")
