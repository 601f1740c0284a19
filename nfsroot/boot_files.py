"""Write the files next to an exported tree: server configurations, boot files for TFTP, and the chroot helper.

The files are rendered from templates with values from the configuration and the tree's contents (kernel, initramfs,
device trees, firmware). A warning names each file that a network boot requires but the tree lacks.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nfsroot.audit import HELPER, nameservers_of_host
from nfsroot.layout import Layout
from nfsroot.rendering import render
from nfsroot.serve import ganesha_configuration, major_version, plugin_folder, served_folders
from nfsroot.tree import file_in, follow
from toolchain import process
from toolchain.addresses import server_address, subnet_of
from toolchain.config import Config
from toolchain.errors import NetworkUnreachable, ProgramMissing

GPU_MEMORY_MIB = 128
"""The memory for the firmware and the buffers of QPU kernels. For small arrays, half of this size is enough."""

_SMALL_SUBNET = 16
"""If a subnet has fewer addresses than this, boards may use any of its addresses."""

_DEVICE_TREES = re.compile(r"bcm(2709|2710|2711|2712(d0)?|2836|2837)-rpi-[a-z0-9-]+\.dtb")
_OF_THE_RASPBERRY_PI_KERNEL = re.compile(r"bcm27(09|10)-")
"""Device trees with names that only the Raspberry Pi kernel uses. The firmware itself selects one of them."""
_ETHERNET_DRIVERS = {
    "bcm2711": re.compile(r"CONFIG_BCMGENET=[ym]"),
    "bcm2712": re.compile(r"CONFIG_(MFD|MISC)_RP1=[ym]"),
}
"""Kernel options that enable the Ethernet port of a Pi 4 and of a Pi 5. Linux 6.12 supports the Pi 4's port on arm64
only, and its device tree for a Pi 5 does not describe the port."""

_TREES_OF = {
    "pi2": "bcm2836-rpi-2-b.dtb",
    "pi3": "bcm2837-rpi-3-b.dtb",
    "pi3+": "bcm2837-rpi-3-b-plus.dtb",
    "pi02": "bcm2837-rpi-zero-2-w.dtb",
    "pi4": "bcm2711-rpi-4-b.dtb",
    "pi400": "bcm2711-rpi-400.dtb",
    "cm4": "bcm2711-rpi-cm4-io.dtb",
}
"""The distribution's device tree for each config.txt filter. The order matters: a Pi 3B+ also reads section [pi3]."""

_FIRMWARE = ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat")
"""The firmware files: the first three for Pi 2 and 3, the others for Pi 4. A Pi 5 has its firmware in the EEPROM."""
_FIRMWARE_FOLDERS = ("boot/firmware", "usr/lib/raspi-firmware", "boot")


@dataclass(frozen=True, kw_only=True)
class BootParts:
    """The files in a tree that a board fetches before it mounts its root filesystem.

    The path of an absent file is None; the mappings do not contain absent files.
    """

    kernel: Path | None
    initramfs: Path | None
    device_trees: Mapping[str, Path]
    """The files by name. If a file is found through a link, the name is that of the link."""
    firmware: Mapping[str, Path]
    """The files by name."""

    @property
    def absent_firmware(self) -> list[str]:
        """The names of the firmware files that are absent."""
        return [name for name in _FIRMWARE if name not in self.firmware]

    def missing(self) -> list[str]:
        """Return the names of the files that a network boot needs but the tree lacks."""
        gone = [] if self.kernel else ["a kernel (image.profile: bootable)"]
        gone += [] if self.device_trees else ["the device tree of a Raspberry Pi"]
        absent = self.absent_firmware
        return gone + ([f"{', '.join(absent)} (package raspi-firmware)"] if absent else [])

    def boots(self, soc: str) -> bool:
        """Return whether boards with this system on chip, such as ``bcm2712``, can boot from these files."""
        return any(name.startswith(soc) for name in self.device_trees)


def boot_parts(tree: Path, firmware: Path | None = None) -> BootParts:
    """Find the newest kernel, its initramfs and device trees, and the boards' firmware.

    If the tree lacks the firmware, it is taken from the folder ``firmware``. Links are resolved as the board would
    resolve them, and never lead out of the tree.
    """

    def version(name: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", name)]

    kernels = {item.name: file_in(tree, item.relative_to(tree)) for item in follow(tree, "boot").glob("vmlinu?-*")}
    kernel = max((name for name, item in kernels.items() if item), key=version, default="")
    initramfs = None
    trees: dict[str, Path] = {}
    if kernel:
        release = kernel.split("-", 1)[1]
        initramfs = file_in(tree, f"boot/initrd.img-{release}")
        for place in (f"boot/dtbs/{release}", "boot/firmware", f"usr/lib/linux-image-{release}"):
            for item in follow(tree, place).rglob("*.dtb"):
                if _DEVICE_TREES.fullmatch(item.name) and (found := file_in(tree, item.relative_to(tree))):
                    trees[item.name] = found
        settings = file_in(tree, f"boot/config-{release}")
        for soc, driver in _ETHERNET_DRIVERS.items():
            if settings and not driver.search(settings.read_text()):
                trees = {name: item for name, item in trees.items() if not name.startswith(soc)}
    found_firmware = {name: firmware / name for name in _FIRMWARE if firmware and (firmware / name).is_file()}
    for place in reversed(_FIRMWARE_FOLDERS):
        found_firmware |= {name: source for name in _FIRMWARE if (source := file_in(tree, f"{place}/{name}"))}
    return BootParts(
        kernel=kernels.get(kernel),
        initramfs=initramfs,
        device_trees=dict(sorted(trees.items())),
        firmware=found_firmware,
    )


def trees_by_filter(names: Collection[str]) -> dict[str, str]:
    """Map the filters of config.txt, such as ``pi4``, to the device trees in ``names``.

    The map is empty if the firmware itself selects the device tree.
    """
    if any(_OF_THE_RASPBERRY_PI_KERNEL.match(name) for name in names):
        return {}
    return {board: name for board, name in _TREES_OF.items() if name in names}


def write_boot_files(config: Config, final: Layout, tree: Path, folder: Path) -> list[str]:
    """Write the files for ``tree`` into ``folder``. Paths in the files refer to the export's final location, ``final``.

    Returns the warnings, for example that files for a network boot are missing.
    """
    warnings: list[str] = []
    try:
        address = server_address(config)
    except (NetworkUnreachable, ProgramMissing) as fault:
        if config.nfs.address:
            raise
        address = str(subnet_of(config).network_address + 1)
        warnings.append(f"{fault.summary}; the files next to the tree use {address}")
    subnet = subnet_of(config)
    if ipaddress.IPv4Address(address) not in subnet:
        warnings.append(f"this PC's address {address} is not in nfs.subnet ({subnet}), so boards cannot reach it")
    parts = boot_parts(tree)
    place = Layout(folder / final.place.name)
    output = folder / final.folder.name
    path = str(final.tree)
    if re.search(r"[\s,:\"'\\]", path):
        warnings.append(f"{path} contains a character that is invalid on a kernel command line: boards cannot boot it")
    tftp = output / place.tftp.name
    tftp.mkdir(parents=True)
    initramfs = parts.initramfs is not None
    write_board_files(
        config,
        parts,
        tftp,
        render(
            "cmdline.txt",
            address=address,
            path=path,
            port=config.nfs.port,
            initramfs=initramfs,
            init="",
            overlay=" ".join(overlay_arguments(config, final)),
        ),
    )
    if missing := parts.missing():
        warnings.append("missing in the TFTP folder for boards without a card: " + "; ".join(missing))
    served = served_folders(config, final)
    if config.nfs.overlay:  # a server that the user starts does not create the folder
        final.boards.mkdir(mode=0o700, parents=True, exist_ok=True)
    access = [(_exports_path(str(place)), "rw" if is_writable else "ro") for place, is_writable in served.items()]
    (output / "exports").write_text(render("exports", folders=access, subnet=str(subnet)))
    # This file is for users who start the server themselves; serve-nfsroot renders another file with the address and
    # port that it uses.
    try:
        major = major_version(process.require_program("ganesha.nfsd", "to serve the tree"))
        plugins = plugin_folder()
    except ProgramMissing as fault:
        warnings.append(f"{fault.summary}; ganesha.conf was not written")
    else:
        (output / "ganesha.conf").write_text(
            ganesha_configuration(
                list(served),
                address=address,
                port=config.nfs.port,
                nfsv3=False,
                clients=[str(subnet)],
                recovery=final.folder / "ganesha-recovery",
                plugins=plugins,
                major=major,
                read_only=[place for place, is_writable in served.items() if not is_writable],
            )
        )
    (output / "ganesha-recovery").mkdir()
    for name, proxy in (("dnsmasq.conf", True), ("dnsmasq-alone.conf", False)):
        try:
            text = dnsmasq_configuration(subnet, address, tree=final.tree, tftp=final.tftp, proxy=proxy)
        except NetworkUnreachable as fault:
            warnings.append(f"{fault.summary}: {name} was not written")
        else:
            (output / name).write_text(text)
    helper = output / HELPER.name
    helper.write_bytes(HELPER.read_bytes())
    helper.chmod(0o755)
    return warnings


def dnsmasq_configuration(subnet: ipaddress.IPv4Network, address: str, *, tree: Path, tftp: Path, proxy: bool) -> str:
    """Return the configuration of the DHCP and TFTP server at ``address``.

    With ``proxy``, another DHCP server assigns the addresses. Without ``proxy``, raises NetworkUnreachable if the
    subnet has no free address.
    """
    leases = None if proxy else lease_range(subnet, ipaddress.IPv4Address(address))
    if leases is None and not proxy:
        raise NetworkUnreachable(
            f"nfs.subnet ({subnet}) has no free address for a board",
            expected="a subnet with at least one usable address in addition to this PC's",
            found=f"{subnet}, which contains no usable address except this PC's ({address})",
            fix="set nfs.subnet to a larger subnet",
        )
    return render(
        "dnsmasq.conf",
        proxy=proxy,
        address=address,
        network=str(subnet.network_address),
        netmask=str(subnet.netmask),
        first=str(leases[0]) if leases else "",
        last=str(leases[1]) if leases else "",
        nameservers=[server for server in nameservers_of_host() if ":" not in server],  # DHCP's option is for IPv4
        path=str(tree),
        tftp=str(tftp),
    )


def overlay_arguments(config: Config, layout: Layout) -> list[str]:
    """Return the kernel arguments that pass the settings for ``nfs.overlay`` to the initramfs script ``nfs4``."""
    if not config.nfs.overlay:
        return []
    persistent = [f"pitorch.persistent={','.join(config.nfs.persistent)}"] if config.nfs.persistent else []
    return ["pitorch.overlay", f"pitorch.boards={layout.boards}", *persistent]


def current_command_line(text: str, config: Config, layout: Layout, address: str) -> str:
    """Return a kernel command line that contains the server's ``address`` and the current settings.

    ``text`` is the command line that the export wrote, possibly with the user's changes, which are kept.
    """
    words = [word for word in text.split() if not word.startswith("pitorch.")]
    for index, word in enumerate(words):
        if word.startswith("nfsroot="):
            options = [option for option in word.split(",")[1:] if not option.startswith("port=")]
            port = [f"port={config.nfs.port}"] if config.nfs.port != 2049 else []
            words[index] = ",".join([f"nfsroot={address}:{layout.tree}", *options, *port])
    return " ".join([*words, *overlay_arguments(config, layout)]) + "\n"


def write_board_files(config: Config, parts: BootParts, folder: Path, command_line: str) -> None:
    """Write the files that a board's firmware reads: ``parts``, config.txt, and the kernel command line."""
    (folder / "cmdline.txt").write_text(command_line)
    (folder / "config.txt").write_text(
        render(
            "config.txt",
            bits=config.image.target.bits,
            kernel="vmlinuz",
            initramfs="initrd.img" if parts.initramfs else "",
            device_trees=trees_by_filter(parts.device_trees),
            boots_pi_4=parts.boots("bcm2711"),
            boots_pi_5=parts.boots("bcm2712"),
            gpu_memory_mib=GPU_MEMORY_MIB,
        )
    )
    for source, name in (
        (parts.kernel, "vmlinuz"),
        (parts.initramfs, "initrd.img"),
        *((item, name) for name, item in (*parts.device_trees.items(), *parts.firmware.items())),
    ):
        if source is not None:
            process.run(["cp", "--reflink=auto", "--", source, folder / name], limit_s=120)
            (folder / name).chmod(0o644)


def lease_range(
    subnet: ipaddress.IPv4Network, server: ipaddress.IPv4Address
) -> tuple[ipaddress.IPv4Address, ipaddress.IPv4Address] | None:
    """Return the first and the last address of the range from which DHCP assigns addresses to boards.

    The range is the second fifth of the subnet, or all of a small subnet. It is shortened to exclude the server's
    address. Returns None if the subnet has no address for a board. The range is calculated without a list of all
    addresses, because a /8 subnet has 16 million addresses.
    """
    low, high = subnet.network_address + 1, subnet.broadcast_address - 1
    count = int(high) - int(low) + 1
    first, last = (low, high) if count < _SMALL_SUBNET else (low + count // 5, low + count * 2 // 5)
    if first <= server <= last:
        below, above = (first, server - 1), (server + 1, last)
        first, last = above if int(last) - int(server) >= int(server) - int(first) else below
    return (first, last) if first <= last else None


def _exports_path(path: str) -> str:
    """Return a path in the format of exports(5), with octal escapes for spaces, quotes and similar characters."""
    return re.sub(r"[^\w/.,:+@=\x80-\U0010ffff-]", lambda char: f"\\{ord(char[0]):03o}", path)
