"""Test every QPU operator with the samples that PyTorch uses for its own kernels.

Results are compared with those of the CPU in float64. Each operator has a bound in units in the last place (ULP, here
2^-23 of the magnitude), plus the loss from flushed denormals. The magnitude is that of the exact result or, for sums,
the sum of the magnitudes of the terms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
import torch_qpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # hypothesis would generate samples that are not used here
    from torch.testing._internal.common_methods_invocations import op_db

ULP = 2.0**-23
TINY = 2.0**-124
MOST_SAMPLES = 40

Tree = Any


def mapped(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply the function to every tensor in a tree of arguments, and return the new tree."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, item) for item in tree)
    if isinstance(tree, dict):
        return {name: mapped(function, item) for name, item in tree.items()}
    return tree


def leaves_of(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors in a tree that require a gradient."""
    found: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> None:
        if t.requires_grad:
            found.append(t)

    mapped(keep, tree)
    return found


def first(result: Any) -> torch.Tensor:
    """Return only the values if the operator also returns indices."""
    value: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return value


def to_qpu(t: torch.Tensor) -> torch.Tensor:
    """Return the same tensor on the device, with the same strides."""
    moved = t.detach().to("qpu")
    return moved.requires_grad_(t.requires_grad) if t.requires_grad else moved


def exact(t: torch.Tensor) -> torch.Tensor:
    """Convert float32 to float64."""
    return t.detach().double() if t.dtype == torch.float32 else t.detach()


@dataclass(frozen=True)
class Bound:
    """The error bound of an operator."""

    ulps: float
    sums: bool = False
    """Whether the magnitude is that of the terms: the operator is applied to the absolute values of the arguments."""
    inputs: bool = False
    """Whether the magnitude includes the result and the input."""
    minus: bool = False
    """Like ``sums``, for an operator that subtracts: the magnitudes of its terms are added explicitly."""


BOUNDS = {
    "add": Bound(2, sums=True),
    "sub": Bound(2, minus=True),
    "rsub": Bound(2, minus=True),
    "mul": Bound(1),
    "div": Bound(5),
    "addcmul": Bound(4, sums=True),
    "addcdiv": Bound(8, sums=True),
    "exp": Bound(4),
    "log": Bound(8),
    "sqrt": Bound(4),
    "rsqrt": Bound(4),
    "reciprocal": Bound(3),
    "neg": Bound(0),
    "abs": Bound(0),
    "sigmoid": Bound(8),
    "tanh": Bound(8),
    "nn.functional.relu": Bound(0),
    "nn.functional.silu": Bound(10),
    "nn.functional.leaky_relu": Bound(1),
    "clamp": Bound(0),
    "clamp_min": Bound(0),
    "clamp_max": Bound(0),
    "maximum": Bound(0),
    "minimum": Bound(0),
    "mm": Bound(32, sums=True),
    "addmm": Bound(32, sums=True),
    "bmm": Bound(32, sums=True),
    "baddbmm": Bound(32, sums=True),
    "mv": Bound(32, sums=True),
    "addmv": Bound(32, sums=True),
    "dot": Bound(8, sums=True),
    "matmul": Bound(32, sums=True),
    "nn.functional.linear": Bound(32, sums=True),
    "sum": Bound(8, sums=True),
    "mean": Bound(12, sums=True),
    "amax": Bound(0),
    "argmax": Bound(0),
    "softmax": Bound(64),
    "nn.functional.conv2d": Bound(64, sums=True),
    "nn.functional.max_pool2d": Bound(0),
    "linalg.vector_norm": Bound(8),
    "expm1": Bound(8),
    "nn.functional.gelu": Bound(12, inputs=True),
    "nn.functional.hardtanh": Bound(0),
    "nn.functional.relu6": Bound(0),
    "nn.functional.hardsigmoid": Bound(8, inputs=True),
    "nn.functional.hardswish": Bound(8, inputs=True),
    "nn.functional.elu": Bound(12),
    "nn.functional.softplus": Bound(16),
    "nn.functional.layer_norm": Bound(512),
    "nn.functional.embedding": Bound(4),
    "nn.functional.conv_transpose2d": Bound(64, sums=True),
    "nn.functional.adaptive_avg_pool2d": Bound(8, sums=True),
    "nn.functional.adaptive_max_pool2d": Bound(0),
    "nn.functional.avg_pool2d": Bound(8, sums=True),
    "lerp": Bound(32, minus=True),
    "cat": Bound(0),
    "index_select": Bound(0),
    "where": Bound(0),
    "masked_fill": Bound(0),
    "amin": Bound(0),
    "argmin": Bound(0),
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le"), Bound(0)),
}
INFOS = {
    info.name: info for info in op_db if info.name in BOUNDS and info.variant_test_name in ("", "no_rounding_mode")
}


def samples(name: str, *, requires_grad: bool = False) -> Iterator[Any]:
    torch.manual_seed(3)
    return islice(INFOS[name].sample_inputs("cpu", torch.float32, requires_grad=requires_grad), MOST_SAMPLES)


def magnitude(name: str, call: Callable[..., Any], sample: Any, result: torch.Tensor) -> torch.Tensor:
    bound = BOUNDS[name]
    if bound.sums:
        arguments = mapped(lambda t: exact(t).abs(), (sample.input, sample.args))
        keywords = mapped(lambda t: exact(t).abs(), sample.kwargs)
        keywords = {k: abs(v) if k in ("alpha", "beta", "value") else v for k, v in keywords.items()}
        terms: torch.Tensor = call(arguments[0], *arguments[1], **keywords)
        return terms.abs()
    if bound.minus:
        other = sample.args[0]
        other = exact(other).abs() if isinstance(other, torch.Tensor) else abs(other)
        return exact(sample.input).abs() + abs(sample.kwargs.get("alpha", 1)) * other + torch.zeros_like(result)
    return result.abs() + exact(sample.input).abs() if bound.inputs else result.abs()


def assert_within(name: str, call: Callable[..., Any], sample: Any, found: torch.Tensor) -> None:
    arguments = mapped(exact, (sample.input, sample.args, sample.kwargs))
    expected = call(arguments[0], *arguments[1], **arguments[2])
    assert found.device.type == "qpu"
    assert found.shape == expected.shape
    found = found.detach().cpu()
    if not found.is_floating_point():
        assert torch.equal(found, expected), sample
        return
    allowed = BOUNDS[name].ulps * ULP * magnitude(name, call, sample, expected) + TINY * max(expected.numel(), 64)
    error = (found.double() - expected).abs()
    same = (found.double() == expected) | (error <= allowed)
    assert torch.all(same), f"{sample}: the error is {(error / allowed).max().item():.3g} times the bound"


def test_all_operators_with_bounds_have_samples() -> None:
    assert set(INFOS) == set(BOUNDS)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", sorted(INFOS))
def test_pytorch_samples_are_within_bounds(name: str) -> None:
    info = INFOS[name]
    torch_qpu.reset_counters()
    tried = 0
    for sample in samples(name):
        there = mapped(to_qpu, (sample.input, sample.args, sample.kwargs))
        found = first(info(there[0], *there[1], **there[2]))
        assert_within(name, lambda *a, **k: first(info.op(*a, **k)), sample, found)
        tried += 1
        if info.inplace_variant is not None and not sample.broadcasts_input:
            own = mapped(lambda t: to_qpu(t).clone(), sample.input)
            changed = info.inplace_variant(own, *there[1], **there[2])
            assert changed is own
            assert torch.equal(own.cpu(), found.cpu())
        if info.supports_out and name not in ("matmul", "mean", "nn.functional.linear"):
            spread = torch.full((*found.shape, 2), 7, dtype=found.dtype, device="qpu")[..., 0]
            for out in (torch.empty_like(found), spread):
                assert info.op(there[0], *there[1], **there[2], out=out) is out
                assert torch.equal(out.cpu(), found.cpu())
    assert tried > 0
    assert torch_qpu.launches(), f"no sample ran on the QPUs; fallbacks: {torch_qpu.fallbacks()}"


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", sorted(name for name in INFOS if INFOS[name].supports_autograd))
def test_gradients_match_the_cpu(name: str) -> None:
    info = INFOS[name]
    for sample in islice(samples(name, requires_grad=True), 12):
        grads = []
        for move in (lambda t: t.detach().clone().requires_grad_(t.requires_grad), to_qpu):
            copy = mapped(move, (sample.input, sample.args, sample.kwargs))
            leaves = leaves_of(copy)
            result = first(info(copy[0], *copy[1], **copy[2]))
            if not leaves or not result.is_floating_point():
                break
            result.square().sum().backward()
            grads.append([leaf.grad.cpu() for leaf in leaves if leaf.grad is not None])
        if len(grads) == 2:
            assert len(grads[0]) == len(grads[1])
            for ours, theirs in zip(grads[1], grads[0], strict=True):
                scale = theirs.abs().nan_to_num().max().item() if theirs.numel() else 0
                torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5 * scale + 2e-4, equal_nan=True)


EDGES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "elementwise": (lambda a: a * 2 + a, [(0,), (0, 3), (), (1,), (15,), (16,), (17,), (63,), (64,), (65,), (129,)]),
    "sum": (lambda a: a.sum(), [(0,), (), (1,), (1000,)]),
    "sum of rows": (lambda a: a.sum(-1), [(0,), (3, 0), (0, 3), (2, 3, 4), (1, 1), (1, 8193), (13, 9000)]),
    "sum of columns": (lambda a: a.sum(0), [(0, 3), (3, 0), (1, 1), (13, 1), (2, 17), (25, 16), (5, 2, 200)]),
    "softmax": (lambda a: a.softmax(0), [(0,), (), (1,), (5, 0), (65, 2), (2, 65)]),
    "mm": (lambda a: a @ a.mT, [(0, 0), (0, 3), (3, 0), (1, 1), (17, 33)]),
    "max": (lambda a: a.max(), [(), (1,), (100,)]),
}


@pytest.mark.parametrize("name", EDGES)
def test_sizes_at_the_limits(name: str) -> None:
    function, shapes = EDGES[name]
    for shape in shapes:
        a = torch.randint(-9, 9, shape).float()
        found = function(a.to("qpu"))
        assert found.shape == function(a).shape
        torch.testing.assert_close(found.cpu(), function(a), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_other_dtypes_match_the_cpu(dtype: torch.dtype) -> None:
    a, b = torch.randint(0, 2, (4, 5)).to(dtype), torch.randint(0, 2, (4, 5)).to(dtype)
    torch_qpu.reset_counters()
    found = a.to("qpu") * b.to("qpu")
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), a * b)
    assert torch_qpu.fallbacks() == {"aten::mul.out": 1}
    assert not torch_qpu.launches()
    mixed = torch.ones(4, 5, device="qpu") + b.to("qpu")
    assert mixed.dtype == torch.promote_types(torch.float32, dtype)
    assert torch.equal(mixed.cpu(), torch.ones(4, 5) + b)


def test_out_of_other_dtype_or_shape_behaves_as_in_torch() -> None:
    a = torch.tensor([1.0, 2.0], device="qpu")
    wide = torch.empty(2, dtype=torch.float64, device="qpu")
    torch.add(a, a, out=wide)
    assert wide.tolist() == [2, 4]
    grown = torch.empty(0, device="qpu")
    assert torch.mul(a, a, out=grown) is grown
    assert grown.tolist() == [1, 4]
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(a, a, out=torch.empty(2, dtype=torch.int64, device="qpu"))
    with pytest.raises(RuntimeError, match=r"match the size|must match"):
        a + torch.ones(3, device="qpu")
    with pytest.raises(RuntimeError, match=r"shapes|mat1|size"):
        torch.ones(2, 3, device="qpu") @ torch.ones(2, 3, device="qpu")
    joined = torch.empty(0, device="qpu")
    assert torch.cat([a, a], out=joined) is joined
    assert joined.tolist() == [1, 2, 1, 2]
    ones = torch.empty(0, device="qpu")
    assert torch.pow(a, 0, out=ones) is ones
    assert ones.tolist() == [1, 1]
    rows, one_row = a.view(1, 2), torch.empty(3, device="qpu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.cat([rows, rows], 1, out=one_row)
    assert one_row.tolist() == [[1, 2, 1, 2]]
    overlapping = torch.ones(4, device="qpu")
    with pytest.raises(RuntimeError, match=r"overlap|single memory"):
        torch.add(overlapping[:3], 1, out=overlapping[1:])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["amax", "amin", "argmax", "argmin"])
def test_out_of_extremes_is_resized_as_on_the_cpu(name: str, keep: bool) -> None:
    a = torch.randn(3, 4, 5)
    for shape in ((4, 3), (3, 4), (3, 1, 4), (3, 4, 1), (12,)):
        found = []
        for device in ("cpu", "qpu"):
            out = torch.empty(shape, device=device, dtype=torch.int64 if name.startswith("arg") else torch.float32)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                getattr(torch, name)(a.to(device), 2, keepdim=keep, out=out)
            found.append((out.shape, out.tolist(), [str(item.message)[:40] for item in caught]))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["max", "min"])
def test_out_of_max_and_indices_is_resized_as_on_the_cpu(name: str) -> None:
    a = torch.randn(3, 4)
    found = []
    for device in ("cpu", "qpu"):
        values, places = torch.empty(3, 1, device=device), torch.empty(1, 3, device=device, dtype=torch.int64)
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            getattr(torch, name)(a.to(device), 1, out=(values, places))
        found.append((values.tolist(), places.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((10000, 8), 0), ((100000, 2), 0), ((4, 100000), 1), ((500, 3, 70), (0, 1)), ((2, 3, 9000), (0, 2))],
    ids=str,
)
def test_errors_of_sums_do_not_grow_with_the_length(shape: tuple[int, ...], dims: int | tuple[int, ...]) -> None:
    torch.manual_seed(1)
    a = torch.rand(shape)
    there = a.to("qpu")
    torch_qpu.reset_counters()
    for found, expected in ((there.sum(dims), a.double().sum(dims)), (there.mean(dims), a.double().mean(dims))):
        assert torch.all((found.cpu().double() - expected).abs() <= 8 * ULP * expected)
    assert torch_qpu.fallbacks() == {}


@pytest.mark.parametrize("value", [1e-17, 1e-18, 1e-20])
def test_norm_of_tiny_elements_is_not_lost(value: float) -> None:
    a = torch.full((100,), value)
    a[0] = 10 * value
    torch.testing.assert_close(a.to("qpu").norm().cpu(), a.double().norm().float(), rtol=1e-4, atol=0)


def test_gradcheck_where_float32_allows() -> None:
    def check(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        leaves = [torch.randn(shape).to("qpu").requires_grad_() for shape in shapes]
        with pytest.warns(UserWarning, match="double precision"):
            assert torch.autograd.gradcheck(function, leaves, eps=1e-2, atol=2e-2, rtol=5e-2, nondet_tol=0)

    check(lambda a, b: a * b + a, (3, 2), (3, 2))
    check(torch.tanh, (5,))
    check(lambda a, b: a @ b, (2, 3), (3, 2))
    check(lambda a: a.softmax(-1), (2, 4))
    check(torch.nn.functional.conv2d, (1, 2, 5, 4), (2, 2, 3, 3), (2,))
