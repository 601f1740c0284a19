"""Check the kernel's settings for emulated programs: the registration in binfmt_misc, and vm.mmap_min_addr."""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
from pathlib import Path

from doctor.finding import Finding, fail, ok
from toolchain.architecture import Architecture, host_architecture
from toolchain.errors import UserError

BINFMT = Path("/proc/sys/fs/binfmt_misc")
MMAP_MIN_ADDR = Path("/proc/sys/vm/mmap_min_addr")
EMULATOR_PACKAGES = "Debian 12: qemu-user-static; Debian 13: qemu-user qemu-user-binfmt"


def native(check: str, target: Architecture) -> Finding | None:
    """Return a finding that no emulator is needed if this machine runs the target's programs natively, else None."""
    with contextlib.suppress(UserError):
        if host_architecture() == target:
            found = f"{target.debian} programs run natively on this machine: no emulator needed"
            return ok(check, "read this machine's architecture from dpkg", found)
    return None


def check_registration(target: Architecture) -> Finding:
    """Check the emulator's registration with ``check_binfmt``, or report that no emulator is needed."""
    return native("binfmt flags", target) or check_binfmt(BINFMT / f"qemu-{target.qemu}")


def check_binfmt(entry: Path) -> Finding:
    """Check the emulator's registration. With flag F, emulated programs run even in containers without the emulator."""
    done = f"read {entry}"
    name = "binfmt flags"
    fix = "run ./inv --set-up as root to register it (in a container, start the container with --privileged)"
    if platform.machine().startswith(("armv7", "armv8l")):
        return ok(name, "uname", "this is an ARM machine: no emulator needed")
    if not (entry.parent / "status").exists():
        return fail(name, done, f"binfmt_misc is not mounted at {entry.parent}", fix)
    if not entry.exists():
        return fail(name, done, f"{entry.name} is not registered", fix)
    text = entry.read_text()
    fields = dict(line.partition(" ")[::2] for line in text.splitlines())
    flags = fields.get("flags:", "").strip()
    found = f"flags {flags or 'none'}, interpreter {fields.get('interpreter', 'unknown')}"
    if not text.startswith("enabled") or (entry.parent / "status").read_text().strip() != "enabled":
        return fail(name, done, found + ", disabled", f"run echo 1 > {entry} as root")
    if "F" not in flags:
        return fail(name, done, found + ": without F, the kernel looks for the emulator inside each container", fix)
    return ok(name, done, found)


def check_mmap_min_addr(sysctl: Path) -> Finding:
    """Check that the emulator may map the address 0x10000, where ARM programs start."""
    name, done = "vm.mmap_min_addr", f"read {sysctl}"
    try:
        value = int(sysctl.read_text())
    except (FileNotFoundError, ValueError):
        # The emulator also reads this setting, and exits if the setting does not exist:
        # https://github.com/microsoft/WSL/issues/10049
        found = "the kernel lacks this setting, so qemu-user cannot place the guest's memory (seen on WSL 1)"
        return fail(name, done, found, "use WSL 2 or a Linux kernel")
    if value > 0x10000:
        found = f"{value}: above 65536, the address at which ARM programs start"
        return fail(name, done, found, "run sysctl vm.mmap_min_addr=65536 as root")
    return ok(name, done, f"{value} (65536 or less is required)")


def emulator(suffix: str) -> Path | None:
    """Return the emulator that is registered in binfmt_misc, else the one on the PATH, else None."""
    entry = BINFMT / f"qemu-{suffix}"
    if entry.exists() and (found := re.search(r"^interpreter (\S+)", entry.read_text(), re.MULTILINE)):
        program = Path(found[1]).resolve()
        if program.is_file():
            return program
    for name in (f"qemu-{suffix}-static", f"qemu-{suffix}"):
        if (on_path := shutil.which(name)) is not None:
            return Path(on_path).resolve()
    return None
