"""OpenCL kernels: the driver on the board compiles an OpenCL C file that is next to the kernel's Python file.

As with any kernel, the Python file creates the input arrays and the reference result. The Python file must also define
``launch(size)``, which returns the total number of work items and the number per work group (None lets the driver
choose). The ``.cl`` file must define a ``__kernel`` with the file's name. The arguments of the ``__kernel`` must be the
inputs, then the result. The macro ``SIZE`` is predefined.

Without a ``.cl`` file, TVM generates the source from the Python file's ``opencl_module`` (``opencl_worker``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device.remote.compiling import Kernel
from device.remote.reporting import Fault
from toolchain import progress

_MOST_DIMENSIONS = 3
_MOST_ERRORS = 3
_PLACE = re.compile(r"(?<!\S)(\S*):(\d+):(\d+): ")


@dataclass(frozen=True)
class Device:
    """An OpenCL device on a board."""

    type: str
    name: str
    version: str
    driver: str
    units: int
    memory: int

    def __str__(self) -> str:
        memory = progress.human_size(self.memory)
        return f"{self.name} ({self.type}, {self.version}, driver {self.driver}, {self.units} compute units, {memory})"


@dataclass(frozen=True)
class Program:
    """A kernel's source and launch sizes for the loader."""

    kernel: str
    options: str
    source: str
    work_items: tuple[int, ...]
    group: tuple[int, ...] | None

    def digest(self, device: Device) -> str:
        """The SHA-256 of everything that determines the binary. The board uses this hash as the binary's file name."""
        parts = (str(device), self.options, self.source)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def sizes(self) -> str:
        """The three global sizes and then the three work-group sizes, which are 0 if the driver chooses them."""
        group = _padded(self.group) if self.group is not None else (0,) * _MOST_DIMENSIONS
        return " ".join(map(str, (*_padded(self.work_items), *group)))


def parse_devices(lines: str) -> tuple[Device, ...]:
    """Parse the loader's list of OpenCL devices."""
    found = []
    for line in lines.splitlines():
        type_, name, version, driver, units, memory = line.split("\t")
        found.append(Device(type_, name, version, driver, int(units), int(memory)))
    return tuple(found)


def choose(devices: Sequence[Device]) -> int:
    """The index of the first GPU, or of the first device if there is no GPU."""
    return next((number for number, device in enumerate(devices) if device.type == "GPU"), 0)


def program(path: Path, kernel: Kernel) -> Program:
    """The OpenCL program that belongs to a kernel's Python file. Raises Fault ``kernel``."""
    source = path.with_suffix(".cl")
    if not source.is_file():
        raise Fault(
            "kernel",
            f"{path.stem} is not an OpenCL kernel: there is no {source.name} next to {path.name}, and {path.name} does "
            "not define opencl_module",
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", path.stem, re.ASCII):
        raise Fault("kernel", f"{source.name}: {path.stem!r} is not a valid name of a function, so rename both files")
    if not hasattr(kernel.source, "launch"):
        raise Fault("kernel", f"{path} does not define launch, so it is not an OpenCL kernel")
    returned = kernel.launch()
    fault = _fault(returned)
    if fault:
        raise Fault("kernel", f"{path}: launch({kernel.size}) returns {returned!r}: {fault}")
    work_items, group = returned
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Fault("kernel", f"{source} is not UTF-8: {error.reason} at byte {error.start}") from error
    return Program(
        kernel=path.stem,
        options=f"-DSIZE={kernel.size}",
        source=text,
        work_items=tuple(work_items),
        group=None if group is None else tuple(group),
    )


def compiler_errors(log: str) -> str:
    """The error of ``clBuildProgram`` and the first errors in the compiler's output.

    The loader sends the error's name and the lines of the output, joined by a separator. Each driver uses a different
    name for the source, such as ``<kernel>`` or a temporary file, and NVIDIA's driver ignores ``#line``. The names of
    sources are therefore omitted, but not the names of headers.
    """
    name, *lines = (line.strip() for line in log.split("\x1e") if line.strip())
    errors = [_PLACE.sub(_place, line) for line in lines if re.search(r"\berror\b", line)]
    return " / ".join((name, *(errors or lines)[:_MOST_ERRORS]))


def _place(found: re.Match[str]) -> str:
    name, line, column = found.groups()
    header = f"{name}, " if Path(name).suffix.startswith(".h") else ""
    return f"{header}line {line}, column {column}: "


def _fault(launch: Any) -> str:
    """The error in the value that ``launch`` returned; empty if the value is valid."""
    if not isinstance(launch, tuple) or len(launch) != 2:
        return "expected a pair: the total number of work items, and the number per work group"
    work_items, group = launch
    for sizes in (work_items, group) if group is not None else (work_items,):
        dimensions = len(sizes) if isinstance(sizes, tuple) else 0
        if not 1 <= dimensions <= _MOST_DIMENSIONS or not all(isinstance(size, int) and size >= 1 for size in sizes):
            return "expected tuples of one to three integers of 1 or more"
    if group is None:
        return ""
    # OpenCL 1.2 does not support partial work groups.
    if len(group) != len(work_items) or any(all_ % one for all_, one in zip(work_items, group, strict=True)):
        return "expected multiples of the work group's sizes"
    return ""


def _padded(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, *(1,) * (_MOST_DIMENSIONS - len(sizes)))
