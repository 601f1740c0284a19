"""Element-wise operations on the QPUs.

Both operands have one shape and one dtype: float32 (computed as it is), float64, float16 or bfloat16 (rounded to
float32, computed there, and the result rounded to the operands' dtype). Any strides, any size, 0 included. Neither
operand is changed. Elements where an operand is not finite (in float32) are computed on the CPU, as torch does.

Accuracy, for float32: |result - exact| <= 2**-23 * |exact| + 2**-124. The QPU rounds towards zero, takes denormal
operands for 0 and returns +0 for denormal results and for -0.

Gradients are supported, of any order. Calls are safe from any thread; other Python threads run meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from qpu_ops import _native, require_tensors, settings, wants_gradient

__all__ = ["add", "product"]


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _native.product(a, b, *settings())[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        return (
            product(gradient, b) if ctx.needs_input_grad[0] else None,
            product(gradient, a) if ctx.needs_input_grad[1] else None,
        )


class _Add(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _native.add(a, b, *settings())[0]

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a * b`` element by element, as a new tensor of the same shape and dtype.

    Raises TypeError for what is not a dense tensor of a float dtype, or for two dtypes; ValueError for two shapes,
    another device than the CPU, or a bad QPU_OPS_* variable; MemoryError when the QPUs have no memory to share;
    qpu_ops.QpuError when the kernel fails.
    """
    require_tensors("product", a, b)
    if wants_gradient(a, b):
        return _Product.apply(a, b)
    return _native.product(a, b, *settings())[0]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` element by element, as a new tensor of the same shape and dtype. Raises as product does."""
    require_tensors("add", a, b)
    if wants_gradient(a, b):
        return _Add.apply(a, b)
    return _native.add(a, b, *settings())[0]
