"""Models for profile-remote, named as MODULE:FUNCTION. Each function returns a module and its example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.networks import Cnn, cnn, lstm, transformer

__all__ = ("cnn", "lstm", "transformer")


class Bessel(nn.Module):  # type: ignore[misc]
    """A model with an operator that TVM's importer lacks."""

    def forward(self, x: Any) -> Any:
        """Return the Bessel function of each element."""
        return torch.special.bessel_j0(x)


def same() -> Any:
    """Return a model that computes with integers and also returns its unchanged input."""

    class Same(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x + 1, x

    return Same(), (torch.arange(6, dtype=torch.int64).reshape(2, 3),)


class Calls(nn.Module):  # type: ignore[misc]
    """A model that calls a function of one tensor."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """Return the function's result."""
        return self.function(x)


class Counter(nn.Module):  # type: ignore[misc]
    """A model that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        """Return the input plus the number of calls."""
        self.calls += 1
        return x + self.calls


def cumsum() -> Any:
    """Return a model whose TVM schedule has a parallel loop. The second output is a scalar."""
    return Calls(lambda x: (torch.cumsum(x, 1), x.sum())), (torch.randn(4, 8),)


def cumsum_of_int32() -> Any:
    """Return a model whose result is int64 in PyTorch but int32 in TVM 0.27."""
    return Calls(lambda x: torch.cumsum(x, 1)), (torch.arange(8, dtype=torch.int32).reshape(2, 4),)


def limited() -> Any:
    """Return two convolutions with a ReLU6 between them. The activations exceed the limits of the ReLU6."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)), (4 * torch.randn(1, 3, 8, 8),)


def small() -> Any:
    """Return a model whose outputs are far below 1."""
    return Calls(lambda x: x * 1e-6), (torch.rand(12),)


def large_and_small() -> Any:
    """Return a model with a large output and one whose values are about 1e-4."""
    return Calls(lambda x: (1000 * x, 1e-4 * x)), (torch.rand(12) + 0.5,)


def large_and_wrong() -> Any:
    """Return a model with a large output and an output that consists of rounding errors, which differ in TVM."""
    half = torch.randn(8, 1000)
    x = torch.cat([half, -half], 1)[:, torch.randperm(2000)]
    return Calls(lambda x: (1000 * x, 1e-2 * x.sum(1))), (x,)


def empty() -> Any:
    """Return a model whose first input and first output have no elements, unlike the second ones."""

    class Empty(nn.Module):  # type: ignore[misc]
        def forward(self, rows: Any, x: Any) -> Any:
            return rows + 1, torch.cat([rows, x]) * 2

    return Empty(), (torch.empty(0, 4), torch.randn(3, 4))


def topk() -> Any:
    return Calls(lambda x: torch.topk(x, 3)[0]), (torch.randn(4, 8),)


def refused() -> Any:
    """Return a model with an operator that TVM's importer supports only without an offset."""
    return Calls(lambda x: torch.as_strided(x, (2,), (1,), 1) + 1), (torch.randn(4),)


def ordered() -> Any:
    """Return a model that sorts in its second layer."""
    return nn.Sequential(nn.ReLU(), Calls(lambda x: torch.sort(x, 1)[0])), (torch.randn(4, 8),)


def ordered_twice() -> Any:
    """Return a model that sorts in its first and in its third layer."""
    layers = [Calls(lambda x: torch.sort(x, 1)[0]) for _ in range(2)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]), (torch.randn(4, 8),)


def branching() -> Any:
    """Return a model that chooses a branch at run time."""
    return Calls(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), (torch.randn(4),)


def changes_its_buffer() -> Any:
    return Counter(), (torch.randn(2),)


def changes_its_input() -> Any:
    return Calls(lambda x: x.add_(1)), (torch.randn(2),)


def bfloat16() -> Any:
    return nn.Linear(4, 4).bfloat16(), (torch.randn(2, 4, dtype=torch.bfloat16),)


def bfloat16_inside() -> Any:
    return Calls(lambda x: (x.bfloat16() @ x.bfloat16().t()).float()), (torch.randn(2, 4),)


def nonzero() -> Any:
    return Calls(torch.nonzero), (torch.randn(2, 4),)


def int8() -> Any:
    """Return a model with int8 weights (a scale per channel) and uint8 values, with operators that PT2E also uses."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

    image = torch.randn(1, 1, 16, 16)
    prepared = prepare_fx(Cnn().eval(), get_default_qconfig_mapping("x86"), (image,))
    prepared(image)
    return _convert_to_reference_decomposed_fx(prepared), (image,)


def quantized() -> Any:
    """Return a model with a quantisation operator that has no decomposition."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers it

    operator = torch.ops.quantized_decomposed.quantize_per_tensor.tensor
    scale, zero = torch.tensor(0.1), torch.tensor(3)
    return Calls(lambda x: operator(x, scale, zero, 0, 127, torch.uint8)), (torch.randn(2, 4),)


def exits() -> Any:
    raise SystemExit("the data set is missing")


def unsupported() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Bessel()), (torch.randn(2, 4),)


def no_inputs() -> Any:
    return nn.Linear(4, 4)
