"""Element-wise operations on the QPUs.

Both operands have one shape and one dtype: float32 (computed as it is), float64, float16 or bfloat16 (rounded to
float32, computed there, and the result rounded to the operands' dtype). Any strides, any size, 0 included. Neither
operand is changed. Elements where an operand is not finite (in float32) are computed on the CPU, as torch does.

Accuracy, for float32: |result - exact| <= 2**-23 * |exact| + 2**-124, where denormal operands count as 0, for which the
QPU takes them. It rounds towards zero and returns +0 for denormal results and for -0.

Gradients are supported, of any order. Calls are safe from any thread; other Python threads run meanwhile.
"""

from __future__ import annotations

import torch
from qpu_ops import _native, require_tensors

__all__ = ["add", "product"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a * b`` element by element, as a new tensor of the same shape and dtype; ``torch.ops.qpu.mul``.

    Raises TypeError for what is not a dense tensor of a float dtype, or for two dtypes; ValueError for two shapes,
    another device than the CPU, or a bad QPU_OPS_* variable; MemoryError when the QPUs have no memory to share;
    qpu_ops.QpuError when the kernel fails.
    """
    require_tensors("product", a, b)
    _native.check_elementwise(a, b, "product")
    result: torch.Tensor = torch.ops.qpu.mul(a, b)
    return result


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` element by element, likewise; ``torch.ops.qpu.add``. Raises as product does."""
    require_tensors("add", a, b)
    _native.check_elementwise(a, b, "add")
    result: torch.Tensor = torch.ops.qpu.add(a, b)
    return result
