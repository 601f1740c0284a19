"""One machine, many names: each tool world's name for an architecture, converted in one table.

``uname`` describes the kernel, not the userland, so nothing here is derived from it.
A further architecture is a row of ``ARCHITECTURES``, not a change of code.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolchain import process
from toolchain.errors import PlatformMismatch


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture under all of its names."""

    debian: str
    """Debian's name (``dpkg --print-architecture``)."""
    oci_architecture: str
    oci_variant: str
    """Fields of an OCI image's config; the variant is empty where the platform has none."""
    gnu: str
    """GNU triplet and Debian multiarch folder."""
    wheel_platform: str
    """Platform tag of wheels (PEP 425)."""
    qemu: str
    """Suffix of the qemu-user program and of its binfmt_misc entry (``qemu-arm``)."""
    kernel_package: str
    """The distribution's kernel package that boots on boards and on QEMU's ``virt`` machine."""
    bits: int

    @property
    def oci_platform(self) -> str:
        """``os/architecture[/variant]`` as the engine's ``--platform`` takes it."""
        parts = ["linux", self.oci_architecture, self.oci_variant]
        return "/".join(part for part in parts if part)


ARCHITECTURES = {
    row.debian: row
    for row in (
        Architecture(
            debian="armhf",
            oci_architecture="arm",
            oci_variant="v7",
            gnu="arm-linux-gnueabihf",
            wheel_platform="linux_armv7l",
            qemu="arm",
            kernel_package="linux-image-armmp",
            bits=32,
        ),
        Architecture(
            debian="arm64",
            oci_architecture="arm64",
            oci_variant="",
            gnu="aarch64-linux-gnu",
            wheel_platform="linux_aarch64",
            qemu="aarch64",
            kernel_package="linux-image-arm64",
            bits=64,
        ),
        Architecture(
            debian="amd64",
            oci_architecture="amd64",
            oci_variant="",
            gnu="x86_64-linux-gnu",
            wheel_platform="linux_x86_64",
            qemu="x86_64",
            kernel_package="linux-image-amd64",
            bits=64,
        ),
    )
}


def host_architecture() -> Architecture:
    """The architecture of this machine's userland, as dpkg knows it.

    Raises PlatformMismatch where the table does not know it.
    """
    name = process.output_of(["dpkg", "--print-architecture"])
    if name not in ARCHITECTURES:
        raise PlatformMismatch(
            "this machine's architecture is not one that images can be built on",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=name,
            fix="use another machine, or add a row to toolchain/architecture.py",
        )
    return ARCHITECTURES[name]
