"""Quantised models: replace the operators of torch's ``quantized_decomposed`` with plain arithmetic.

TVM's importer does not support the operators in ``quantized_decomposed``. The layers between these operators compute in
float32, as PyTorch's reference does. ``torch`` is imported only in the functions that use it.
"""

from __future__ import annotations

from typing import Any


def decompositions() -> Any:
    """Return the default decompositions of ``torch.export``, and those of the quantisation operators.

    The function also registers the quantisation operators with torch.
    """
    import torch
    from torch.ao.quantization.fx import _decomposed

    def per_channel(values: Any, x: Any, axis: int) -> Any:
        shape = [1] * x.dim()
        shape[axis] = -1
        return values.to(torch.float32).reshape(shape)

    def quantize(x: Any, scales: Any, zeros: Any, axis: int, low: int, high: int, dtype: Any) -> Any:
        steps = torch.round(x * (1.0 / per_channel(scales, x, axis)))
        return torch.clamp(steps + per_channel(zeros, x, axis), low, high).to(dtype)

    def dequantize(
        x: Any, scales: Any, zeros: Any, axis: int, _low: int, _high: int, _dtype: Any, *, out_dtype: Any = None
    ) -> Any:
        steps = x.to(torch.float32)
        if zeros is not None:
            steps = steps - per_channel(zeros, x, axis)
        return (steps * per_channel(scales, x, axis)).to(out_dtype or torch.float32)

    operators = torch.ops.quantized_decomposed
    table = torch.export.default_decompositions()
    table[operators.quantize_per_tensor.default] = _decomposed.quantize_per_tensor
    table[operators.dequantize_per_tensor.default] = _decomposed.dequantize_per_tensor
    table[operators.quantize_per_channel.default] = quantize
    table[operators.dequantize_per_channel.default] = dequantize
    return table


def largest_step(exported: Any) -> float:
    """The model's largest quantisation step; 0 if the model is not quantised."""
    import torch

    operator = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return max((float(node.args[1]) for node in exported.graph.nodes if node.target is operator), default=0.0)
