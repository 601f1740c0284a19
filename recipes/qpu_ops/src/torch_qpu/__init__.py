"""PyTorch's device ``qpu``: tensors in memory that the QPUs share with the CPU, and what the QPUs compute of PyTorch.

    import torch
    a = torch.randn(64, 128, device="qpu")
    model.to("qpu")

(``import torch`` imports this package by itself where the wheel is installed.)

Float32 is computed by the QPUs where their kernels know the operator; everything else goes to the CPU, is counted
(``fallbacks()``) and gives the CPU's results. ``torch.qpu`` is the module of the device, like ``torch.cuda``.

Environment variables, read when the first tensor is made:

``QPU_BACKEND``        what runs the kernels, read by libqpu
``QPU_TORCH_CACHING``  0: memory of a tensor is given back when it dies, and is exactly as long as the tensor
``QPU_TORCH_COPY``     1: the CPU works on copies, as it must on a board
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

import torch

# First: where libqpu is missing this raises, and PyTorch is left as it was.
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
    """A CPU tensor over the same memory: what one writes the other reads. ``.numpy()`` of it copies nothing either.

    Raises RuntimeError for a tensor of another device, and on a board, whose GPU memory the CPU does not reach like
    its own: use ``.cpu()`` there.
    """
    if tensor.device.type != "qpu":
        raise RuntimeError(f"cpu_view: expected a qpu tensor, found one on {tensor.device}")
    view: torch.Tensor = torch.ops.torch_qpu.cpu_view(tensor.detach())
    return view


def set_qpus(count: int) -> None:
    """Run kernels on so many QPUs, 1 to 12; 0, the default, lets the kernel library choose. Raises ValueError."""
    _C.set_qpus(count)


def check_finite(on: bool) -> None:
    """Whether operators with an Inf or NaN in an operand go to the CPU, since QPUs do not treat them as IEEE 754 does.

    Off unless set: every operand has to be read for it, and fused kernels run as single operators. On as long as
    ``torch.autograd.set_detect_anomaly(True)`` or ``detect_anomaly()`` looks for NaN.
    """
    _C.set_finite_only(on)


def _register() -> None:
    """Make the device known to PyTorch; once per process."""
    if hasattr(torch, "qpu"):
        return
    torch._register_device_module("qpu", device)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    upstream.install()


def _let_backward_threads_rest() -> None:
    """Before Python ends, wait until the other threads sleep: at most half a second.

    PyTorch's thread for a device puts away what a backward pass left after ``backward()`` has returned, and takes the
    interpreter's lock for that. When the interpreter is ending by then, Python ends that thread, and C++ the process
    (``terminate called without an active exception``); the other devices of PyTorch have the same race.
    """
    own = str(threading.get_native_id())
    end = time.monotonic() + 0.5
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.002)  # gives the lock away
        quiet = (
            0
            if any(_runs(task) for task in Path("/proc/self/task").glob("*/stat") if task.parent.name != own)
            else quiet + 1
        )


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False  # it has ended


_register()
atexit.register(_let_backward_threads_rest)
