"""Multiply a matrix by a vector on the QPUs: (H x W) times (W) gives H scores.

Both operands must have the same dtype: float32, float64, float16 or bfloat16. Values of dtypes other than float32 are
rounded to float32 for the computation, and the scores are rounded to the operands' dtype. Any strides and any H and W
are supported, including 0. The operands are not modified. If a row contains a value that is not finite (in float32),
torch computes the score of this row on the CPU; if the vector contains such a value, torch computes all scores.

Order of the sums: the product in column w is added to partial sum w mod 16. Each of the 16 partial sums adds its
products from left to right, rounding towards zero; the CPU adds the 16 partial sums in order, in double precision. Rows
wider than a quarter of QPU_OPS_BUFFER_KIB are split, and the partial sums of all parts are added in the same way.

Accuracy, for float32: with n = ceil(W / 16) + 1 and u = 2**-23,
|score - exact| <= n u / (1 - n u) * sum(|a_w b_w|) + 2**-24 |score| + 2 W * 2**-126; denormal operands count as 0.

Gradients of any order are supported. Calls are thread-safe; other Python threads run during a call.
"""

from __future__ import annotations

import time

import torch
from qpu_ops import Timed, _native, require_tensors, settings

__all__ = ["Timed", "gpu", "gpu_timed"]


def gpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of the matrix ``a`` and the vector ``b``, as a new tensor of shape (H,) with the same dtype.

    Raises TypeError if an operand is not a dense tensor of a float dtype, or if the dtypes differ; ValueError for
    shapes other than (H, W) and (W,), a device other than the CPU, or an invalid QPU_OPS_* variable; MemoryError if
    there is not enough memory that the QPUs can access; qpu_ops.QpuError if the kernel fails.
    """
    require_tensors("gpu", a, b)
    _native.check_matrix_vector(a, b, "gpu")
    result: torch.Tensor = torch.ops.qpu.mv(a, b)
    return result


def gpu_timed(a: torch.Tensor, b: torch.Tensor) -> Timed:
    """Return the result of ``gpu``, without gradients, and the durations of the kernel and the call in seconds."""
    began = time.perf_counter()
    require_tensors("gpu_timed", a, b)
    result, compute_s = _native.matrix_vector(a, b, *settings())
    return Timed(result, compute_s, time.perf_counter() - began)
