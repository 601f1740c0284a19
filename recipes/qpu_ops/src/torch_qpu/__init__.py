"""PyTorch's device ``qpu``: tensors in memory shared by the QPUs and the CPU, with operators that run on the QPUs.

    import torch
    a = torch.randn(64, 128, device="qpu")
    model.to("qpu")

(``import torch`` imports this package automatically if the wheel is installed.)

The QPUs run the float32 operators that have a kernel. The CPU runs all other operators, with its usual results;
``fallbacks()`` counts the calls of these operators. ``torch.qpu`` is the device's module, like ``torch.cuda``.

Environment variables, read when the first tensor is created:

``QPU_BACKEND``        the backend that runs the kernels, read by libqpu
``QPU_TORCH_CACHING``  0: a tensor's memory has exactly the tensor's size, and is released with the tensor
``QPU_TORCH_COPY``     1: the CPU works on copies, as it must on a board
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

import torch

# This import must come first, so that PyTorch stays unchanged if the import fails because libqpu is missing.
from torch_qpu import _C

if not hasattr(torch, "qpu"):
    torch.utils.rename_privateuse1_backend("qpu")

import qpu_ops  # noqa: F401 (torch.ops.qpu: add, mul, mv and mm)

from torch_qpu import device, upstream
from torch_qpu.counters import Profile, copies, fallbacks, launches, profile, report, reset_counters
from torch_qpu.device import synchronize

__all__ = [
    "Profile",
    "check_finite",
    "copies",
    "cpu_view",
    "fallbacks",
    "launches",
    "profile",
    "report",
    "reset_counters",
    "set_qpus",
    "synchronize",
]


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the tensor's memory, so that writes to either tensor are visible in the other.

    Raises RuntimeError for a tensor on another device. On a board, the function always raises RuntimeError, because the
    CPU cannot treat GPU memory as ordinary memory there; use ``.cpu()`` instead.
    """
    if tensor.device.type != "qpu":
        raise RuntimeError(f"cpu_view: expected a qpu tensor, found one on {tensor.device}")
    view: torch.Tensor = torch.ops.torch_qpu.cpu_view(tensor.detach())
    return view


def set_qpus(count: int) -> None:
    """Set the number of QPUs for kernels, 1 to 12; 0 (default) lets the kernel library choose. Raises ValueError."""
    _C.set_qpus(count)


def check_finite(on: bool) -> None:
    """Set whether the CPU computes each operator that has Inf or NaN in an operand.

    QPUs do not follow IEEE 754 for these values. The check is off by default, because it reads the whole operand, and
    because it replaces fused kernels by separate operators. The check is also on while
    ``torch.autograd.set_detect_anomaly(True)`` or ``detect_anomaly()`` is active, unless its ``check_nan`` is False.
    """
    _C.set_finite_only(on)


def _register() -> None:
    """Register the device with PyTorch, unless this process has already done so."""
    if hasattr(torch, "qpu"):
        return
    torch._register_device_module("qpu", device)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    upstream.install()


def _let_backward_threads_rest() -> None:
    """Before Python exits, wait until the other threads are idle, but for at most half a second.

    PyTorch's thread for a device cleans up a backward pass after ``backward()`` has returned, and acquires the GIL to
    do so. If this thread acquires the GIL while the interpreter is shutting down, Python ends the thread, and C++
    aborts the process (``terminate called without an active exception``). PyTorch's other devices have the same race.
    """
    own = str(threading.get_native_id())
    end = time.monotonic() + 0.5
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.002)  # releases the GIL
        quiet = (
            0
            if any(_runs(task) for task in Path("/proc/self/task").glob("*/stat") if task.parent.name != own)
            else quiet + 1
        )


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False  # the thread has ended


_register()
atexit.register(_let_backward_threads_rest)
