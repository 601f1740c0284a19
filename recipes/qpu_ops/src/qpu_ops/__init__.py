"""QPU operators for CPU tensors, and the common parts of dot_cpp, matrix_cpp and cpu_cpp: settings, errors and results.

``torch.ops.qpu.add``, ``mul``, ``mv`` and ``mm`` support gradients of any order, torch.compile and torch.export. Both
operands must have the same dtype; broadcasting is not supported.

Environment variables, read at each call:

``QPU_OPS_QPUS``
    Number of QPUs that kernels run on, 1 to 12; 4 if unset. Memory-bound kernels gain little from more than 4 QPUs.
``QPU_OPS_BUFFER_KIB``
    Maximum size of the memory that the operations share with the QPUs, 4 to 32768 KiB; 8192 if unset. Larger operands
    are processed in parts.
``QPU_BACKEND``
    The backend that runs the kernels; libqpu reads this variable.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # torch's libraries must be loaded before the extension's

from qpu_ops import _native
from qpu_ops._native import QpuError, buffered, compilations, release_buffers

__all__ = ["Backend", "QpuError", "Timed", "backend", "buffered", "compilations", "release_buffers"]


class Timed(NamedTuple):
    """The result of a call, and two durations in seconds, measured with a monotonic clock."""

    result: torch.Tensor
    compute_s: float
    """The kernel's time alone, summed over the parts if the operands were processed in parts. It does not include the
    compilation of the kernel, which occurs in the first call in a process."""
    end_to_end_s: float
    """The whole call's time: checks, copies to and from the shared memory, and the computation."""


class Backend(NamedTuple):
    """The backend that runs the kernels, as reported by libqpu."""

    name: str
    reason: str


def backend() -> Backend:
    """Return the backend that runs kernels in this process, and the reason for this choice.

    Raises QpuError for an invalid QPU_BACKEND.
    """
    return Backend(*_native.backend())


def _setting(name: str, default: int, low: int, high: int, unit: str) -> int:
    text = os.environ.get(name, "")
    if text == "":
        return default
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise ValueError(
            f"{name}: expected {low} to {high} {unit}, found {text!r}; unset it to use the default ({default})"
        )
    return int(text)


def settings() -> tuple[int, int]:
    """Read two settings: the number of QPUs, and the shared buffers' maximum size in floats. Raises ValueError."""
    qpus = _setting("QPU_OPS_QPUS", 4, 1, 12, "QPUs")
    return qpus, _setting("QPU_OPS_BUFFER_KIB", 8192, 4, 32768, "KiB") * 256


def require_tensors(operation: str, a: object, b: object) -> None:
    """Raise TypeError unless both operands are tensors."""
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{operation}: {name} is expected to be a torch.Tensor, found {type(value).__name__}; "
                "convert it with torch.as_tensor()"
            )


Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


def _with_gradient(name: str, of_a: Callable[..., torch.Tensor], of_b: Callable[..., torch.Tensor]) -> None:
    """Register functions that compute an operator's gradients from the result's gradient and both operands."""

    def keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:  # noqa: ARG001
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        a, b = ctx.saved_tensors
        return (
            of_a(gradient, a, b) if ctx.needs_input_grad[0] else None,
            of_b(gradient, a, b) if ctx.needs_input_grad[1] else None,
        )

    torch.library.register_autograd(f"qpu::{name}", backward, setup_context=keep)


_ops = torch.ops.qpu
_with_gradient("add", lambda g, _a, _b: g, lambda g, _a, _b: g)
_with_gradient("mul", lambda g, _a, b: _ops.mul(g, b), lambda g, a, _b: _ops.mul(g, a))
_with_gradient("mv", lambda g, _a, b: torch.outer(g, b), lambda g, a, _b: _ops.mv(a.t(), g))
_with_gradient("mm", lambda g, _a, b: _ops.mm(g, b.t()), lambda g, a, _b: _ops.mm(a.t(), g))


# The firmware does not release a process's memory when the process ends.
atexit.register(release_buffers)
