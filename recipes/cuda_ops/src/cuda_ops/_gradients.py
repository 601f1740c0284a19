"""Register the functions that torch requires in addition to the kernels: fake kernels and backward formulas.

``NAME`` calls ``_NAME_differentiable`` if a gradient is needed, and ``_NAME`` otherwise (csrc/ops.cpp explains why).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = ("add2", "axpy", "exp", "softmax", "matvec")

_kept: list[torch.library.Library] = []
"""Keeps the Library object alive, because torch removes the registrations when the object is destroyed."""


def _fills_its_memory(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _elementwise(a: Tensor, b: Tensor | None = None) -> Tensor:
    """Return an uninitialised result with the layout that csrc/ops.cpp chooses."""
    if b is not None:
        torch._check(a.shape == b.shape, lambda: f"cuda_ops: expected the same shape, found {a.shape} and {b.shape}")
    if (b is None or a.stride() == b.stride()) and (a.is_contiguous() or _fills_its_memory(a.shape, a.stride())):
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)
    return torch.empty(a.shape, dtype=a.dtype, device=a.device)


def _fake_matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    torch._check(matrix.dim() == 2 and vector.dim() == 1, lambda: "cuda_ops.matvec: expected a matrix and a vector")
    torch._check(matrix.shape[1] == vector.shape[0], lambda: "cuda_ops.matvec: sizes do not match")
    return matrix.new_empty((matrix.shape[0],))


_FAKES: dict[str, Callable[..., Tensor]] = {
    "add2": _elementwise,
    "axpy": lambda _, x, y: _elementwise(x, y),
    "exp": _elementwise,
    "softmax": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "matvec": _fake_matvec,
}


def _keep_alpha(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 (torch passes all)
    ctx.alpha = inputs[0]


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(output)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward_axpy(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, grad * ctx.alpha, grad


def _backward_exp(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return grad * y


def _backward_softmax(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    product = grad * y
    return product - y * product.sum(-1, keepdim=True)


def _backward_matvec(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    matrix, vector = ctx.saved_tensors
    to_matrix = torch.outer(grad, vector) if ctx.needs_input_grad[0] else None
    to_vector = torch.ops.cuda_ops.matvec(matrix.t(), grad) if ctx.needs_input_grad[1] else None
    return to_matrix, to_vector


_BACKWARD: dict[str, tuple[Callable[..., Any], Callable[..., None] | None]] = {
    "add2": (lambda _, grad: (grad, grad), None),
    "axpy": (_backward_axpy, _keep_alpha),
    "exp": (_backward_exp, _keep_output),
    "softmax": (_backward_softmax, _keep_output),
    "matvec": (_backward_matvec, _keep_inputs),
}


def register() -> None:
    """Register with torch. Called once, after the library has been loaded."""
    library = torch.library.Library("cuda_ops", "IMPL")
    _kept.append(library)
    for name in NAMES:
        for entry in (name, f"_{name}", f"_{name}_differentiable"):
            torch.library.register_fake(f"cuda_ops::{entry}", _FAKES[name])
        # Only calls that need no gradient reach _NAME, so autograd has nothing to record.
        library.impl(f"_{name}", torch.library.fallthrough_kernel, "Autograd")
        backward, setup = _BACKWARD[name]
        torch.library.register_autograd(f"cuda_ops::_{name}_differentiable", backward, setup_context=setup)
    torch.library.register_fake("cuda_ops::torch_launch_add2", lambda *_: None)
    torch.ops.cuda_ops._trust_requires_grad(_requires_grad_is_right())


def _requires_grad_is_right() -> bool:
    """Return whether the library reads ``requires_grad`` correctly.

    torch's stable interface has no function for this.
    """
    plain, leaf = torch.zeros(1), torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        derived = leaf * 2
    return all(torch.ops.cuda_ops._requires_grad(item) == item.requires_grad for item in (plain, leaf, derived))
