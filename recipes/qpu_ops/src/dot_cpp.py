"""Compute element-wise operations on the QPUs.

Both operands must have the same shape and dtype: float32, float64, float16 or bfloat16. Values of dtypes other than
float32 are rounded to float32 for the computation, and the result is rounded to the operands' dtype. Any strides and
sizes are supported, including 0. The operands are not modified. If an element of either operand is not finite (in
float32), torch computes the corresponding element of the result on the CPU.

Accuracy, for float32: |result - exact| <= 2**-23 * |exact| + 2**-124, where denormal operands count as 0, because the
QPU treats them as 0. The QPU rounds towards zero and returns +0 for denormal results and for -0.

Gradients of any order are supported. Calls are thread-safe; other Python threads run during a call.
"""

from __future__ import annotations

import torch
from qpu_ops import _native, require_tensors

__all__ = ["add", "product"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a * b`` element by element, as a new tensor of the same shape and dtype (``torch.ops.qpu.mul``).

    Raises TypeError if an operand is not a dense tensor of a float dtype, or if the dtypes differ; ValueError if the
    shapes differ, for a device other than the CPU, or for an invalid QPU_OPS_* variable; MemoryError if there is not
    enough memory that the QPUs can access; qpu_ops.QpuError if the kernel fails.
    """
    require_tensors("product", a, b)
    _native.check_elementwise(a, b, "product")
    result: torch.Tensor = torch.ops.qpu.mul(a, b)
    return result


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a + b`` element by element, computed by ``torch.ops.qpu.add``. Raises the same errors as ``product``."""
    require_tensors("add", a, b)
    _native.check_elementwise(a, b, "add")
    result: torch.Tensor = torch.ops.qpu.add(a, b)
    return result
