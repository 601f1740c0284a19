"""Quantized operators on QNNPACK and XNNPACK, compared with float32 for several data types, shapes and layouts.

Without patch 0018, most of these tests fail: some operators return elements in the wrong order, ignore an argument,
divide by zero or refuse inputs that the generic kernels support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from our_torch import only_our_torch
from torch import Tensor
from torch.nn import functional

pytestmark = only_our_torch

OPS = torch.ops.quantized
SHAPES = [(2, 8, 6, 7), (1, 4, 1, 1), (3, 1, 5, 5)]
SCALE = 0.05
ZERO_POINT = {torch.quint8: 120, torch.qint8: 3}

# Each layout is a view or a copy of a contiguous batch of images.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "sliced": lambda x: x[:, ::2, :, ::2],
    "part of channels_last": lambda x: x.contiguous(memory_format=torch.channels_last)[:, -2:],
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]

# The quantized operator and the same operator in float32.
ACTIVATIONS: dict[str, Pair] = {
    "relu": (torch.relu, torch.relu),
    "relu6": (functional.relu6, functional.relu6),
    "hardtanh": (lambda x: functional.hardtanh(x, -1.0, 2.0), lambda x: functional.hardtanh(x, -1.0, 2.0)),
    "clamp": (lambda x: x.clamp(-0.7, 1.3), lambda x: x.clamp(-0.7, 1.3)),
    "sigmoid": (torch.sigmoid, torch.sigmoid),
    "sigmoid with another scale": (lambda x: OPS.sigmoid(x, 1 / 128, 5), torch.sigmoid),
    "tanh": (torch.tanh, torch.tanh),
    "hardsigmoid": (functional.hardsigmoid, functional.hardsigmoid),
    "hardswish": (lambda x: OPS.hardswish(x, 0.04, 20), functional.hardswish),
    "leaky_relu": (lambda x: functional.leaky_relu(x, 0.1), lambda x: functional.leaky_relu(x, 0.1)),
}
OPERATORS: dict[str, Pair] = ACTIVATIONS | {
    "softmax over channels": (lambda x: OPS.softmax(x, 1, 1 / 256, 0), lambda x: x.softmax(1)),
    "softmax over rows": (lambda x: OPS.softmax(x, 2, 1 / 256, 0), lambda x: x.softmax(2)),
    "softmax over the last dimension": (lambda x: OPS.softmax(x, -1, 1 / 256, 0), lambda x: x.softmax(-1)),
    "mean": (lambda x: x.mean((2, 3)), lambda x: x.mean((2, 3))),
    "adaptive_avg_pool2d": (
        lambda x: functional.adaptive_avg_pool2d(x, (3, 2)),
        lambda x: functional.adaptive_avg_pool2d(x, (3, 2)),
    ),
    "avg_pool2d": (
        lambda x: functional.avg_pool2d(x, (3, 2), stride=(2, 1), padding=1),
        lambda x: functional.avg_pool2d(x, (3, 2), stride=(2, 1), padding=1),
    ),
    "avg_pool2d without padding in the count": (
        lambda x: functional.avg_pool2d(x, (2, 3), padding=(0, 1), count_include_pad=False) if x.shape[2] > 1 else x,
        lambda x: functional.avg_pool2d(x, (2, 3), padding=(0, 1), count_include_pad=False) if x.shape[2] > 1 else x,
    ),
    "avg_pool2d with a divisor": (
        lambda x: functional.avg_pool2d(x, 2, padding=1, divisor_override=5),
        lambda x: functional.avg_pool2d(x, 2, padding=1, divisor_override=5),
    ),
    "avg_pool2d of one element": (
        lambda x: functional.avg_pool2d(x, 1, stride=2),
        lambda x: functional.avg_pool2d(x, 1, stride=2),
    ),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2, padding=1), lambda x: functional.max_pool2d(x, 2, padding=1)),
    "max_pool2d of one element": (
        lambda x: functional.max_pool2d(x, 1, stride=2),
        lambda x: functional.max_pool2d(x, 1, stride=2),
    ),
    "interpolate, nearest": (
        lambda x: functional.interpolate(x, scale_factor=2),
        lambda x: functional.interpolate(x, scale_factor=2),
    ),
    "interpolate, bilinear": (
        lambda x: functional.interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=False),
        lambda x: functional.interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=False),
    ),
}


@pytest.fixture(autouse=True)
def on_qnnpack() -> Iterator[None]:
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    yield
    torch.backends.quantized.engine = engine


def drawn(*shape: int, dtype: torch.dtype = torch.quint8, seed: int = 0) -> Tensor:
    """Return a quantized tensor of normally distributed numbers with a standard deviation of 3."""
    x = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.quantize_per_tensor(x, SCALE, ZERO_POINT[dtype], dtype)


def steps_apart(found: Tensor, wanted: Tensor) -> float:
    """Return the greatest difference in quantization steps, after clamping ``wanted`` to the range of ``found``."""
    assert found.shape == wanted.shape
    limits = torch.iinfo(found.int_repr().dtype)
    scale, zero = found.q_scale(), found.q_zero_point()
    wanted = wanted.clamp((limits.min - zero) * scale, (limits.max - zero) * scale)
    return float((found.dequantize() - wanted).abs().max() / scale)


@pytest.mark.parametrize("dtype", ["quint8", "qint8"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_agrees_with_float32_in_all_layouts(name: str, dtype: str) -> None:
    quantized, exact = OPERATORS[name]
    for shape in SHAPES:
        for layout, change in LAYOUTS.items():
            x = change(drawn(*shape, dtype=getattr(torch, dtype)))
            assert steps_apart(quantized(x), exact(x.dequantize().contiguous())) < 1.01, (shape, layout)


@pytest.mark.parametrize("dtype", ["quint8", "qint8"])
@pytest.mark.parametrize("other_shape", [(2, 8, 6, 7), (2, 8, 1, 1), (1, 8, 1, 1), (7,)])
def test_sums_and_products_agree_with_float32_in_all_layouts(other_shape: tuple[int, ...], dtype: str) -> None:
    kind = getattr(torch, dtype)
    first, second = drawn(2, 8, 6, 7, dtype=kind), drawn(*other_shape, dtype=kind, seed=1)
    formats = (torch.contiguous_format, torch.channels_last)
    for a in [first.contiguous(memory_format=item) for item in formats]:
        for b in [second.contiguous(memory_format=item) for item in formats if second.dim() == 4] or [second]:
            x, y = a.dequantize().contiguous(), b.dequantize().contiguous()
            assert steps_apart(OPS.add(a, b, 0.07, 2), x + y) < 1.01
            assert steps_apart(OPS.add_relu(a, b, 0.07, 2), (x + y).relu()) < 1.01
            assert steps_apart(OPS.mul(a, b, 0.2, 2), x * y) < 1.01
            assert steps_apart(OPS.mul_relu(a, b, 0.2, 2), (x * y).relu()) < 1.01


@pytest.mark.parametrize("shape", [(0, 4, 5, 5), (2, 0, 3, 3), (0,)])
@pytest.mark.parametrize("name", [*ACTIVATIONS, "add", "softmax"])
def test_empty_tensors_have_empty_results(name: str, shape: tuple[int, ...]) -> None:
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda x: OPS.add(x, x, 0.1, 0),
        "softmax": lambda x: OPS.softmax(x, -1, 1 / 256, 0),
    }
    quantized = others[name] if name in others else ACTIVATIONS[name][0]
    assert quantized(drawn(*shape)).shape == shape


def test_group_norm_of_an_empty_tensor_is_empty() -> None:
    assert OPS.group_norm(drawn(2, 0, 3, 3), 2, None, None, 1e-5, 0.1, 0).shape == (2, 0, 3, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scalars_are_supported(name: str) -> None:
    quantized, exact = ACTIVATIONS[name]
    x = torch.quantize_per_tensor(torch.tensor(0.4), SCALE, 120, torch.quint8)
    assert steps_apart(quantized(x), exact(x.dequantize())) < 1.01


def test_pools_accept_inputs_without_a_batch() -> None:
    x = drawn(4, 6, 7)
    exact = x.dequantize()
    assert steps_apart(functional.max_pool2d(x, 2), functional.max_pool2d(exact, 2)) < 1.01
    assert steps_apart(functional.avg_pool2d(x, 2), functional.avg_pool2d(exact, 2)) < 1.01
    assert steps_apart(functional.adaptive_avg_pool2d(x, 1), functional.adaptive_avg_pool2d(exact, 1)) < 1.01
    assert steps_apart(functional.max_pool1d(x, 3), functional.max_pool1d(exact, 3)) < 1.01
