"""The supported architectures, with their names in Debian, OCI, GNU, wheels and QEMU.

``uname`` is not used, because it describes the kernel, not the userland. To add an architecture, add a row to
``ARCHITECTURES``.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolchain import process
from toolchain.errors import PlatformMismatch


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture and its names."""

    debian: str
    """Debian's name (``dpkg --print-architecture``)."""
    oci_architecture: str
    oci_variant: str
    """Fields of an OCI image configuration. The variant is empty if the platform has none."""
    gnu: str
    """The GNU triplet, which is also the name of Debian's multiarch folder."""
    wheel_platform: str
    """The platform tag of wheels (PEP 425)."""
    qemu: str
    """The suffix of the qemu-user program and its binfmt_misc entry (``arm`` in ``qemu-arm``)."""
    kernel_package: str
    """The distribution's kernel package that boots on boards and on QEMU's ``virt`` machine."""
    bits: int
    emulated_cpu: str = ""
    """The CPU that qemu-user emulates, in the format of QEMU_CPU. An empty string means QEMU's default CPU."""

    @property
    def emulation(self) -> dict[str, str]:
        """Environment variables for emulated programs."""
        return {"QEMU_CPU": self.emulated_cpu} if self.emulated_cpu else {}

    @property
    def oci_platform(self) -> str:
        """The platform as ``os/architecture[/variant]``, which is the value of the engine's option ``--platform``."""
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
            # Debian's programs sign return addresses. By default, QEMU computes the signatures with the architected
            # algorithm, which makes `import torch` four times slower.
            emulated_cpu="max,pauth-impdef=on",
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
    """Return the architecture of this machine's userland according to dpkg.

    Raises PlatformMismatch if the architecture is not in ``ARCHITECTURES``.
    """
    name = process.output_of(["dpkg", "--print-architecture"])
    if name not in ARCHITECTURES:
        raise PlatformMismatch(
            "images cannot be built on this machine's architecture",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=name,
            fix="use a machine with a supported architecture, or add a row to toolchain/architecture.py",
        )
    return ARCHITECTURES[name]
