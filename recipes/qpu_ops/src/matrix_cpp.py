"""The product of a matrix and a vector on the QPUs: (H x W) times (W) gives H scores.

Both operands have one dtype: float32 (computed as it is), float64, float16 or bfloat16 (rounded to float32, computed
there, and the scores rounded to the operands' dtype). Any strides, any H and W, 0 included. Neither operand is
changed. Rows that hold a value which is not finite (in float32), and all rows when the vector does, are computed on
the CPU, as torch does.

Order of the sums: the columns are dealt to 16 elements, column w to element w mod 16, and each element adds up its
products from left to right, rounding towards zero; the CPU adds the 16 partial sums, in order, in double precision.
Rows wider than a quarter of QPU_OPS_BUFFER_KIB begin new partial sums there, which are added likewise.

Accuracy, for float32: with n = ceil(W / 16) + 1 and u = 2**-23,
|score - exact| <= n u / (1 - n u) * sum(|a_w b_w|) + 2**-24 |score| + 2 W * 2**-126; denormal operands count as 0.

Gradients are supported, of any order. Calls are safe from any thread; other Python threads run meanwhile.
"""

from __future__ import annotations

import time

import torch
from qpu_ops import Timed, _native, require_tensors, settings

__all__ = ["Timed", "gpu", "gpu_timed"]


def gpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Scores of the rows of ``a`` against ``b``, as a new tensor of shape (H,), same dtype; ``torch.ops.qpu.mv``.

    Raises TypeError for what is not a dense tensor of a float dtype, or for two dtypes; ValueError for shapes other
    than (H, W) and (W,), another device than the CPU, or a bad QPU_OPS_* variable; MemoryError when the QPUs have no
    memory to share; qpu_ops.QpuError when the kernel fails.
    """
    require_tensors("gpu", a, b)
    _native.check_matrix_vector(a, b, "gpu")
    result: torch.Tensor = torch.ops.qpu.mv(a, b)
    return result


def gpu_timed(a: torch.Tensor, b: torch.Tensor) -> Timed:
    """As ``gpu``, with the seconds of the computation alone and of the whole call; autograd does not see it."""
    began = time.perf_counter()
    require_tensors("gpu_timed", a, b)
    result, compute_s = _native.matrix_vector(a, b, *settings())
    return Timed(result, compute_s, time.perf_counter() - began)
