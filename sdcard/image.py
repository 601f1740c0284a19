"""``sd-image``: make a reproducible card image from the system image, without loop devices.

The image has an MBR partition table, a FAT partition with the files that a board's firmware reads, and an ext4 root.
All identifiers are derived from the hash of the image's tree, and all times from ``image.source_date_epoch``. mke2fs
makes the root from a tarball; genimage and mtools make the boot partition and the partition table. These programs are
extracted from packages (flow.extracted_tools), so the image does not depend on the versions of the host's programs.

Root privileges are not required. If an ordinary user runs the task, the code that makes the image runs under fakeroot
(toolchain.fake_root), which emulates the files' owners. The resulting image is identical.

The products are in ``sd/`` in the target's folder: the compressed image, its block map, its SHA-256, the entry for
Raspberry Pi Imager, its bill of materials, and the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.connect import connect
from flow import extracted_tools, firmware, publish
from flow.context import Context, for_all_targets
from images import sbom
from nfsroot import unpack
from nfsroot.audit import ON_EVERY_MEDIUM, Settings, audit
from nfsroot.boot_files import BootParts, boot_parts, write_board_files
from nfsroot.export import left_out_warnings, origin_of, write_sbom
from nfsroot.tree import TreeHash, follow, inside
from sdcard import bmap, first_boot
from sdcard.tools import Tools
from toolchain import caller, checkout, fake_root, files, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, InUse
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import MANIFEST_SUFFIX, key_of

TOOLS_SUITE = "trixie"
"""The release whose mke2fs can read a tarball."""

BOOT_START_MIB = 4
BOOT_MIB = 128
ROOT_START = (BOOT_START_MIB + BOOT_MIB) << 20
"""The offset of the root's file system, in bytes."""

FIRST_BOOT = "first boot"
"""The manifest's input for the settings for the first boot."""

_ROOT_FREE_MIB = 128
"""The free space in the root for cloud-init, which writes there before it enlarges the root's file system."""
_JOURNAL_MIB = 16
_INODE_SIZE = 256
_INODE_RATIO = 16384
"""The size of the file system per inode, in bytes, unless the root has many small files."""
_LAYOUT = """\
image boot.vfat {{
    vfat {{
        label = "{label}"
        extraargs = "--invariant -F 32 -i {boot}"
    }}
    size = {boot_mib}M
    temporary = true
}}
image "{name}" {{
    hdimage {{
        partition-table-type = mbr
        disk-signature = 0x{disk}
    }}
    partition boot {{
        partition-type = 0xc
        offset = {boot_start_mib}M
        image = boot.vfat
    }}
    partition root {{
        partition-type = 0x83
        offset = {root_start}
        image = "{root}"
    }}
}}
"""
"""genimage's configuration."""
_XZ = ("--threads=2", "--block-size=16MiB", "-3")
"""The block size makes the result independent of the number of threads."""


class Folder:
    """The paths of a card image and of the files that belong to it, all in ``place``."""

    def __init__(self, place: Path, name: str) -> None:
        self.place = place
        self.name = name
        self.image = place / f"{name}.img.xz"
        self.bmap = place / f"{name}.bmap"
        self.checksum = place / f"{name}.img.xz.sha256"  # in sha256sum's format
        self.imager = place / f"{name}.imager.json"  # the list of images for Raspberry Pi Imager
        # The bill of materials of the root and the firmware.
        self.sbom = (place / f"{name}.spdx.json", place / f"{name}.cdx.json")
        self.manifest = place / f"sd{MANIFEST_SUFFIX}"  # written last

    @classmethod
    def of(cls, config: Config) -> Folder:
        """Return the paths of the card image for this configuration."""
        return cls(config.target_root / "sd", f"{config.image.name.replace('/', '-')}-{config.image.label}")


def number_of(seed: str, purpose: str) -> str:
    """Return an identifier for use on the card: eight hex digits, derived from ``seed`` (a tree's hash)."""
    return _digest(seed, purpose)[:4].hex()


def uuid_of(seed: str, purpose: str) -> str:
    """Return a UUID for use on the card, derived from ``seed`` (a tree's hash)."""
    return str(uuid.UUID(bytes=_digest(seed, purpose)[:16], version=4))


def _digest(seed: str, purpose: str) -> bytes:
    return hashlib.sha256(f"{purpose} {seed}".encode()).digest()


def first_boot_digest(config: Config) -> str:
    """Return the SHA-256 of the configured settings for the first boot."""
    user_data = first_boot.user_data(config.sd, config.sd.hostname or config.image.host_name)
    return hashlib.sha256(f"{user_data}{first_boot.network_config(config.sd)}".encode()).hexdigest()


def build(config: Config) -> Manifest:
    """Make the card image for the configuration, and return the image's manifest.

    Raises RootNeeded (the build folder belongs to another user), ConfigError, EngineUnavailable, ArtefactMissing (no
    image, or one without a kernel), PlatformMismatch, ProgramMissing (fakeroot), InUse (another run) or DiskFull.
    """
    first_boot.require_complete(config.sd)
    began = time.monotonic()
    folder = Folder.of(config)
    source = unpack.find_image(connect(), config.image_reference("system"), config.image.target)
    with contextlib.suppress(PermissionError):
        folder.place.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.place, os.W_OK):
        raise files.belongs_to_another(config.build_root, f"no permission to write to {folder.place}")
    another = InUse(
        f"another run is making the card image in {folder.place}",
        expected="one run at a time",
        found="a lock",
        fix="wait until the other run has finished",
    )
    needed = 3 * (source.size >> 20) + BOOT_MIB + _ROOT_FREE_MIB
    files.require_space(folder.place, needed, "the card image")
    tools = ready_tools(config)
    fetched, wifi = firmware.ready(config), firmware.ready(config, "wifi-firmware")
    with files.held(folder.place / "lock", another), files.room_for_programs("the card image", folder.place):
        with files.scratch_folder(folder.place, "card") as scratch:
            parts = (config, source, tools, fetched, wifi, scratch, folder)
            if os.geteuid() == 0:
                made = _make(*parts)
            else:
                made = fake_root.call(_make, *parts, why="to make a card image without root")
        manifest = dataclasses.replace(made, seconds=time.monotonic() - began, source=checkout.origin())
        manifest.write(folder.manifest)
    return manifest


def ready_tools(config: Config) -> Tools:
    """Return the programs that make card images; extract them if necessary. Raises the failed step's UserError."""
    with Context(for_all_targets(config, TOOLS_SUITE)) as context:
        folder = extracted_tools.ready(context, "card-tools", "tools for card images")
    return Tools(folder, config.image.source_date_epoch)


def _make(
    config: Config,
    source: unpack.SourceImage,
    tools: Tools,
    fetched: firmware.Firmware,
    wifi: firmware.Firmware,
    scratch: Path,
    folder: Folder,
) -> Manifest:
    """Make the image in ``scratch``, then move the products to ``folder``; return their manifest."""
    tree = scratch / "tree"
    with progress.step(f"copy {source.reference}"):
        unpack.unpack(connect(), source, tree)
    with progress.step("hash the tree"):
        hashed = TreeHash.of(tree)
    seed = hashed.sha256
    documents = write_sbom(config, source, tree, scratch)
    boot = scratch / "boot"
    parts = _write_boot(config, tree, fetched, boot, seed)
    for_wifi = _install_wifi_firmware(tree, wifi)
    is_fetched = any(item.is_relative_to(fetched.folder) for item in parts.firmware.values())
    added = [*([fetched] if is_fetched else []), *([wifi] if for_wifi else [])]
    added_firmware = {item.package: item.sha256 for item in added}
    if documents:
        sbom.add(scratch, [sbom.Part(*item) for item in added_firmware.items()])
    devices = imager_devices(config.image.architecture, parts)
    hostname = config.sd.hostname or config.image.host_name
    settings = Settings(hostname=hostname, nameservers=(), client_public_key="", now=tools.epoch)
    audited = audit(tree, settings, ON_EVERY_MEDIUM)
    first_boot.fit_for_card(audited, number_of(seed, "disk"))
    hashed.refresh([*audited.touched, *for_wifi])
    user_data = first_boot.user_data(config.sd, hostname)
    (boot / "user-data").write_text(user_data)
    network = first_boot.network_config(config.sd)
    if network:
        (boot / "network-config").write_text(network)
    (boot / "meta-data").write_text(first_boot.meta_data(number_of(seed, f"instance {user_data}")))
    image = scratch / f"{folder.name}.img"
    with progress.step("make the file systems"):
        root = _root_of(tree, scratch / "root.ext4", tools, seed, dict(hashed.counts()))
        used = list(_used_blocks(tools.run("dumpe2fs", root), root.stat().st_size // bmap.BLOCK))
        _assemble(image, root, boot, tools, seed)
        start = ROOT_START // bmap.BLOCK
        mapped = [(0, start - 1), *((start + first, start + last) for first, last in used)]
        blocks = bmap.measured(image, mapped)
    extracted = Artefact.of(image)
    with progress.step(f"compress {image.name}"):
        tools.run("xz", "--keep", *_XZ, image)
    packed = image.with_name(f"{image.name}.xz")
    if config.sd.password_hash or config.sd.wifi_psk:
        packed.chmod(0o600)
    digest = files.sha256_of(packed)
    entry = _imager_entry(config, folder, devices, extracted, packed.stat().st_size, digest)
    stale = [folder.manifest, *folder.sbom, *map(publish.envelope_of, (folder.image, *folder.sbom))]
    for path in stale:  # the signatures are for the earlier files
        files.remove(path)
    os.replace(packed, folder.image)
    files.write_text_atomically(folder.bmap, bmap.text_of(blocks))
    files.write_text_atomically(folder.checksum, f"{digest}  {folder.image.name}\n")
    files.write_text_atomically(folder.imager, json.dumps({"os_list": [entry]}, indent=2) + "\n")
    for name, path in zip(documents, folder.sbom, strict=False):
        os.replace(scratch / name, path)
    origin = origin_of(config, source)
    products = [folder.image, folder.bmap, folder.checksum, folder.imager, *(folder.sbom if documents else ())]
    inputs = {"image": source.id, FIRST_BOOT: first_boot_digest(config)}
    return Manifest(
        step="sd",
        key=key_of("sd", inputs),
        inputs=inputs,
        artefacts=tuple(Artefact.of(path) for path in products),
        facts={
            "image": source.reference,
            "image_id": source.id,
            **origin,
            "image_tree_sha256": seed,
            "rootfs_sha256": hashed.sha256,
            "firmware": added_firmware,
            "disk": number_of(seed, "disk"),
            "extract_size": extracted.size,
            "extract_sha256": extracted.sha256,
            "mapped_size": sum(item.size for item in blocks.ranges),
        },
        warnings=(*left_out_warnings(origin), *first_boot.login_warnings(config.sd)),
    )


def _write_boot(config: Config, tree: Path, fetched: firmware.Firmware, boot: Path, seed: str) -> BootParts:
    """Write the files of the boot partition. Raises ArtefactMissing if a board could not boot from these files."""
    parts = boot_parts(tree, fetched.folder)
    missing = parts.missing()
    if not follow(tree, "usr/bin/cloud-init").is_file():
        missing.append("cloud-init (image.card: true)")
    if missing:
        raise ArtefactMissing(
            "a board cannot boot from a card with this image",
            expected="a kernel, device trees, the firmware and cloud-init",
            found=f"an image without {'; '.join(missing)}",
            fix=f"set image.card: true in invoke.yaml and run {caller.command('build-image')}",
        )
    script = "boot=local " if parts.initramfs else ""
    root = f"root=PARTUUID={number_of(seed, 'disk')}-02 rootfstype=ext4 rw rootwait"
    boot.mkdir()
    write_board_files(
        config,
        parts,
        boot,
        f"console=serial0,115200 console=tty1 {script}{root} net.ifnames=0\n",
    )
    (boot / "LICENCE.raspi-firmware").write_bytes(fetched.licence.read_bytes())
    return parts


def _install_wifi_firmware(tree: Path, wifi: firmware.Firmware) -> list[str]:
    """Copy the boards' Wi-Fi firmware and its licence; return the paths of the copies, relative to the tree."""
    found = sorted(wifi.folder.glob("*/*fmac434*"))
    sources = {f"usr/lib/firmware/{path.relative_to(wifi.folder)}": path for path in found}
    if found:
        sources[f"usr/share/doc/{wifi.licence.parent.name}/{wifi.licence.name}"] = wifi.licence
    copied = []
    for path, source in sources.items():
        target = inside(tree, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        files.remove(target)  # the image may contain a link that leads out of the tree
        shutil.copy2(source, target, follow_symlinks=source is wifi.licence)
        copied.append(str(target.relative_to(tree)))
    return copied


def _root_of(tree: Path, root: Path, tools: Tools, seed: str, counts: dict[str, int]) -> Path:
    """Make an ext4 file system from a tree, and remove the tree. The file system's size includes some free space."""
    tar = root.with_suffix(".tar")
    process.run(
        [
            "tar", "--create", f"--file={tar}", f"--directory={tree}", "--format=posix", "--numeric-owner",
            "--sort=name", "--xattrs", "--xattrs-include=*", "--clamp-mtime", f"--mtime=@{tools.epoch}",
            # File names are bytes. Without this option, libarchive would interpret them as UTF-8.
            "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime,hdrcharset:=BINARY", ".",
        ],
        env={"LC_ALL": "C"},
        fix="read the last lines of the output; if the disk is full, which is the usual cause, free some space",
    )  # fmt: skip
    files.remove(tree)
    size_mib, inodes = root_size(counts)
    tools.run(
        "mke2fs", "-q", "-t", "ext4", "-b", str(bmap.BLOCK), "-I", str(_INODE_SIZE), "-N", str(inodes), "-m", "1",
        "-J", f"size={_JOURNAL_MIB}", "-L", "rootfs", "-U", uuid_of(seed, "root"),
        "-E", f"hash_seed={uuid_of(seed, 'hash seed')},root_owner=0:0", "-d", tar, root, f"{size_mib}M",
    )  # fmt: skip
    tar.unlink()
    return root


def root_size(counts: Mapping[str, int]) -> tuple[int, int]:
    """Return the size of a root's file system in MiB, and its number of inodes.

    ``counts`` is the result of ``TreeHash.counts``. The size includes free space. The number of inodes is sufficient
    for at least a quarter more entries than the tree contains.
    """
    content = counts["bytes"] + (counts["files"] + counts["folders"]) * bmap.BLOCK
    size_mib = ((content + content // 16) >> 20) + _JOURNAL_MIB + _ROOT_FREE_MIB
    size_mib += -size_mib % 4
    usual = (size_mib << 20) // _INODE_RATIO
    entries = sum(counts[kind] for kind in ("files", "folders", "symlinks", "devices", "fifos", "sockets"))
    inodes = entries + entries // 4 + 1024
    if inodes <= usual:
        return size_mib, usual
    tables = (inodes - usual) * _INODE_SIZE
    # ext4 supports at most as many inodes as blocks.
    size_mib = max(size_mib + (tables >> 20), inodes * bmap.BLOCK >> 20) + 4
    return size_mib - size_mib % 4, inodes


def _used_blocks(dumped: str, total: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of blocks (first, last) that are in use according to dumpe2fs's output."""
    begin = 0
    for line in re.findall(r"^  Free blocks: (.+)$", dumped, re.MULTILINE):
        for part in line.split(", "):
            first, _, last = part.partition("-")
            if int(first) > begin:
                yield begin, int(first) - 1
            begin = int(last or first) + 1
    if begin < total:
        yield begin, total - 1


def _assemble(image: Path, root: Path, boot: Path, tools: Tools, seed: str) -> None:
    """Assemble the image from the partition table, the boot partition and the root; remove the root's image file."""
    for path in boot.iterdir():
        os.utime(path, (tools.epoch, tools.epoch))
    layout = image.with_name("layout.cfg")
    layout.write_text(
        _LAYOUT.format(
            name=image.name,
            root=root.name,
            label=first_boot.LABEL,
            boot=number_of(seed, "boot"),
            disk=number_of(seed, "disk"),
            boot_mib=BOOT_MIB,
            boot_start_mib=BOOT_START_MIB,
            root_start=ROOT_START,
        )
    )
    tools.run(
        "genimage", "--config", layout, "--rootpath", boot, "--inputpath", root.parent, "--outputpath", image.parent,
        "--tmppath", image.with_name("genimage"), "--mkdosfs", shlex.join(tools.command("mkfs.fat")),
        "--mcopy", shlex.join(tools.command("mcopy", "-m")),
    )  # fmt: skip
    root.unlink()


_IMAGER_DEVICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "armhf": {"pi2-32bit": ("bcm2836", "bcm2709"), "pi3-32bit": ("bcm2837", "bcm2710")},
    "arm64": {"pi3-64bit": ("bcm2837", "bcm2710"), "pi4-64bit": ("bcm2711",), "pi5-64bit": ("bcm2712",)},
}
"""Maps Raspberry Pi Imager's names for boards to the systems on chip in the file names of the boards' device trees.

Imager lists a Zero 2 W under Pi 3, a Pi 400 under Pi 4, and a Pi 500 under Pi 5. An image cannot have a 32-bit kernel
for a Pi 4 or 5.
"""


def imager_devices(architecture: str, parts: BootParts) -> list[str]:
    """Return Raspberry Pi Imager's names for the boards that can boot an image with these boot files."""
    names = _IMAGER_DEVICES[architecture]
    return [name for name, socs in names.items() if any(parts.boots(soc) for soc in socs)]


def _imager_entry(
    config: Config, folder: Folder, devices: Sequence[str], extracted: Artefact, size: int, sha256: str
) -> dict[str, Any]:
    """Return the image's entry in the list that Raspberry Pi Imager reads."""
    place = config.sd.url.rstrip("/") or folder.place.as_uri()
    return {
        "name": f"{config.image.name} {config.image.label}",
        "description": "PyTorch with kernels for the QPUs of VideoCore IV",
        "icon": "icons/use_custom.png",  # part of Raspberry Pi Imager; its schema requires one
        "url": f"{place}/{folder.image.name}",
        "extract_size": extracted.size,
        "extract_sha256": extracted.sha256,
        "image_download_size": size,
        "image_download_sha256": sha256,
        "release_date": time.strftime("%Y-%m-%d", time.gmtime(config.image.source_date_epoch)),
        "devices": devices,
        "init_format": "cloudinit",
    }
