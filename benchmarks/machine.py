"""A description of the machine on which the figures were measured."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.connect import connect
from toolchain import process
from toolchain.architecture import Architecture
from toolchain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine's properties that affect the measured times.

    They include the number of cores, the memory in MiB, the load averages over 1, 5 and 15 minutes, and the
    software versions.
    """

    processor: str
    cores: int
    memory_mib: int
    load: tuple[float, float, float]
    system: str
    kernel: str
    python: str
    qemu_user: str
    qemu_system: str
    engine: str
    storage: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"load": list(self.load)}

    def lines(self) -> list[str]:
        """Return the description as text."""
        return [
            f"{self.cores} cores ({self.processor}), {self.memory_mib / 1024:.1f} GiB memory, "
            f"load {', '.join(f'{item:.2f}' for item in self.load)}",
            f"{self.system}, Linux {self.kernel}, Python {self.python}",
            f"qemu-user {self.qemu_user}, qemu-system {self.qemu_system}, engine {self.engine}, storage {self.storage}",
        ]


def describe(target: Architecture) -> Machine:
    """Describe this machine. Values that cannot be determined are empty."""
    system = version = storage = ""
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    with contextlib.suppress(UserError):
        with contextlib.closing(connect(timeout_s=30)) as client:
            info = client.info()
        version = str(info.get("ServerVersion", ""))
        backing = dict(info.get("DriverStatus") or ()).get("Backing Filesystem", "")
        storage = f"{info.get('Driver', '')}{f' on {backing}' if backing else ''}"
    return Machine(
        processor=processor(_text(Path("/proc/cpuinfo"))),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=psutil.virtual_memory().total >> 20,
        load=os.getloadavg(),
        system=system,
        kernel=platform.release(),
        python=platform.python_version(),
        qemu_user=_version(_interpreter(target.qemu)),
        qemu_system=_version(f"qemu-system-{target.qemu}"),
        engine=version,
        storage=storage,
    )


def processor(cpuinfo: str) -> str:
    """Return the processor's name from /proc/cpuinfo, or the machine type if the file does not contain a name."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _interpreter(suffix: str) -> str:
    """Return the path of the emulator that the kernel uses for this architecture (binfmt_misc)."""
    entry = _text(Path(f"/proc/sys/fs/binfmt_misc/qemu-{suffix}"))
    found = re.search(r"^interpreter (\S+)$", entry, re.MULTILINE)
    if found is None:
        return ""
    # Debian registers a link to the emulator, and the link's name encodes flags. The emulator supports --version only
    # if it is started by its own name.
    return os.path.realpath(found[1])


def _version(program: str) -> str:
    if not program:
        return ""
    with contextlib.suppress(UserError, OSError):
        match = re.search(r"version (\S+)(?: \(Debian ([^)]+)\))?", process.output_of([program, "--version"]))
        return (match[2] or match[1]) if match else ""
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
