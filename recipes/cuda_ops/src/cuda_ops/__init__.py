"""PyTorch operators that run on CUDA GPUs: add2, exp, axpy, softmax and matvec, with gradients.

Importing this module loads ``libcuda_ops.so``, which registers the operators with torch's dispatcher:
``cuda_ops.add2(a, b)`` calls ``torch.ops.cuda_ops.add2(a, b)``. The library uses torch's stable interface, so one
library file supports torch 2.10 and later, and Python 3.10 and later. Tensors must be float32, float16 or bfloat16; all
sizes and strides are supported. All tensors of a call must be on the same CUDA device, or all on the CPU, where plain
loops compute reference results. Invalid arguments raise RuntimeError with the reason.

Reverse-mode gradients of any order are supported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

try:
    __version__ = version("pitorch-cuda-ops")
except PackageNotFoundError:
    __version__ = "0"

torch.ops.load_library(str(Path(__file__).with_name("libcuda_ops.so")))

from cuda_ops import _gradients  # noqa: E402 (requires the library)

_gradients.register()
_ops = torch.ops.cuda_ops


def add2(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + b``, for tensors of the same shape."""
    return _ops.add2.default(a, b)


def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """Return ``alpha * x + y``, for tensors of the same shape. Each result is rounded only once."""
    return _ops.axpy.default(alpha, x, y)


def exp(x: Tensor) -> Tensor:
    """Return the exponential of each element."""
    return _ops.exp.default(x)


def softmax(x: Tensor) -> Tensor:
    """Compute softmax over the last dimension."""
    return _ops.softmax.default(x)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the product of a matrix [rows, columns] and a vector [columns]. Products are accumulated in float32."""
    return _ops.matvec.default(matrix, vector)


def torch_launch_add2(c: Tensor, a: Tensor, b: Tensor, n: int) -> None:
    """Write ``a[i] + b[i]`` to ``c[i]`` for the first ``n`` elements.

    As in a kernel launch, the caller allocates ``c``. There are no gradients.
    """
    _ops.torch_launch_add2.default(c, a, b, n)


__all__ = ["add2", "axpy", "exp", "matvec", "softmax", "torch_launch_add2"]
