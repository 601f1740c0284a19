"""Tests that layers run entirely on the QPUs, without fallbacks, and match the CPU's results and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_qpu
from torch.nn import functional

Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261125)


def run(function: Function, operands: tuple[torch.Tensor, ...], device: str) -> list[torch.Tensor]:
    """Return the result, and the gradients of its weighted sum."""
    leaves = [t.detach().clone().to(device) for t in operands]
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point())
    result = function(*leaves)
    found = [result.detach().cpu()]
    if result.requires_grad:
        result.backward(torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(device))
        found += [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]
    return found


def assert_alike(function: Function, *operands: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Check that the results of both devices agree within a tolerance relative to the largest element."""
    expected = run(function, operands, "cpu")
    torch_qpu.reset_counters()
    found = run(function, operands, "qpu")
    assert torch_qpu.fallbacks() == {}
    assert torch_qpu.launches()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(theirs.abs().max().item(), 1))


# --- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Function] = {
    **{
        name: getattr(functional, name)
        for name in (
            "gelu", "hardtanh", "relu6", "elu", "selu", "celu", "softplus", "silu", "hardswish", "hardsigmoid",
            "leaky_relu",
        )
    },
    "gelu by tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "elu, scaled": lambda a: functional.elu(a, alpha=1.7),
    "elu in place": lambda a: functional.elu(a * 1, inplace=True),
    "relu6 in place": lambda a: functional.relu6(a * 1, inplace=True),
    "hardswish in place": lambda a: functional.hardswish(a * 1, inplace=True),
    "softplus, sharp": lambda a: functional.softplus(a, beta=3, threshold=5),
    "expm1": torch.expm1,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name: str) -> None:
    limits = torch.tensor([-30.0, -6, -3, -1, -1e-3, 0, 1e-3, 1, 3, 6, 10])
    if name in ("hardtanh", "relu6", "relu6 in place", "hardswish", "hardswish in place", "hardsigmoid"):
        limits = limits + 1e-4  # at the corners, the CPU's own kernels disagree with each other
    assert_alike(ACTIVATIONS[name], torch.cat([torch.randn(200) * 3, limits]))


def test_expm1_and_softplus_keep_small_results() -> None:
    small = torch.tensor([1e-6, -1e-6, 3e-4, -0.2, 0.1])
    torch.testing.assert_close(torch.expm1(small.to("qpu")).cpu(), torch.expm1(small), rtol=2e-6, atol=0)
    low = torch.tensor([-60.0, -20, -10, -2])
    found, expected = functional.softplus(low.to("qpu")).cpu(), functional.softplus(low)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_expm1_is_finite_where_exp_is() -> None:
    large = torch.tensor([88.3, 88.4, 88.5, 88.6, 88.7, 88.722, 88.73, 100])
    torch.testing.assert_close(torch.expm1(large.to("qpu")).cpu(), torch.expm1(large), rtol=8 * 2**-23, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_silu_approaches_1(compiled: bool) -> None:
    x = torch.tensor([-1e8, -90.0, -87, -60, -20, -5, -1, 0, 1, 5, 17, 20, 60, 87, 90, 1e5, 1e8])
    silu = torch.compile(functional.silu, backend="qpu") if compiled else functional.silu
    (expected,), (found,) = (run(f, (x,), d)[1:] for f, d in ((functional.silu, "cpu"), (silu, "qpu")))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-36)


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 5, 33), (2, 16), (3, 100), (1, 7), (40, 3)], ids=str)
def test_layer_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    x, width = torch.randn(shape) * 2 + 5, shape[-1]
    assert_alike(
        lambda a, w, b: functional.layer_norm(a, (width,), w, b), x, torch.randn(width), torch.randn(width),
        tolerance=1e-4,
    )  # fmt: skip
    assert_alike(lambda a: functional.layer_norm(a, (width,)), x, tolerance=1e-4)
    assert_alike(lambda a: functional.rms_norm(a, (width,)), x, tolerance=1e-4)


def test_layer_norm_of_row_with_nan_or_inf_is_nan() -> None:
    x = torch.randn(4, 70)
    x[1, 3], x[2, 69], x[2, 0] = float("nan"), float("inf"), 0
    found, expected = functional.layer_norm(x.to("qpu"), (70,)).cpu(), functional.layer_norm(x, (70,))
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_layer_norm_over_two_dimensions() -> None:
    assert_alike(lambda a, w: functional.layer_norm(a, (5, 6), w), torch.randn(4, 5, 6), torch.randn(5, 6))


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_sums_the_gradients_of_a_word(padding: int | None) -> None:
    words = torch.randint(0, 9, (3, 5))
    words[0, :3] = 2
    for dtype in (torch.int64, torch.int32):
        assert_alike(
            lambda w, t=dtype: functional.embedding(words.to(t).to(w.device), w, padding_idx=padding),
            torch.randn(9, 19),
        )


def test_invalid_embedding_indices_are_rejected() -> None:
    table = torch.randn(9, 4, device="qpu")
    for wrong in (9, -1):
        with pytest.raises(IndexError, match=f"expected 0 to 8, found {wrong}"):
            functional.embedding(torch.tensor([0, wrong]).to("qpu"), table)


JOINED: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "rows": (lambda a, b: torch.cat([a, b]), [(3, 4), (2, 4)]),
    "columns": (lambda a, b: torch.cat([a, b.t(), a], 1), [(3, 4), (20, 3)]),
    "channels": (lambda a, b: torch.cat([a, b], 1), [(2, 3, 4, 5), (2, 1, 4, 5)]),
    "stacked": (lambda a, b: torch.stack([a, b], 1), [(3, 4), (3, 4)]),
    "long": (lambda a, b: torch.cat([a, b]), [(9000,), (17,)]),
    "chunks": (lambda a: torch.tanh(a.chunk(2, 1)[1]) * a.chunk(2, 1)[0], [(3, 8)]),
}


@pytest.mark.parametrize("name", JOINED)
def test_cat(name: str) -> None:
    function, shapes = JOINED[name]
    assert_alike(function, *(torch.randn(shape) for shape in shapes))


def test_cpu_joins_and_selects_many_single_elements() -> None:
    a, b, places = torch.randn(9000), torch.randn(9000), torch.randperm(9000)
    there = a.to("qpu"), b.to("qpu"), places.to("qpu")
    torch_qpu.reset_counters()
    assert torch.equal(torch.stack(there[:2], -1).cpu(), torch.stack([a, b], -1))
    assert torch.equal(there[0].index_select(0, there[2]).cpu(), a[places])
    assert torch_qpu.fallbacks() == {"aten::cat.out": 1, "aten::index_select": 1}
    torch_qpu.reset_counters()
    assert torch.equal(torch.stack([t[:100] for t in there[:2]], -1).cpu(), torch.stack([a[:100], b[:100]], -1))
    assert torch.equal(there[0].index_select(0, there[2][:300]).cpu(), a[places[:300]])
    assert torch.equal(
        torch.cat([t.view(-1, 2) for t in there[:2]], 1).cpu(), torch.cat([a.view(-1, 2), b.view(-1, 2)], 1)
    )
    assert torch_qpu.fallbacks() == {}


def test_cat_of_empty_tensors() -> None:
    a = torch.ones(2, 3, device="qpu")
    assert torch.cat([torch.ones(0, device="qpu"), a, a[:0]]).tolist() == [[1, 1, 1]] * 2
    assert torch.cat([a[:, :0], a], 1).tolist() == [[1, 1, 1]] * 2
    with pytest.raises(RuntimeError, match=r"[Ss]izes of tensors must match"):
        torch.cat([a, torch.ones(2, 4, device="qpu")])


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (5, 7), (7, 9), (9, 12)], ids=str)
def test_adaptive_pooling_to_any_size(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 7, 9)
    assert_alike(lambda a: functional.adaptive_avg_pool2d(a, size), x)
    assert_alike(lambda a: functional.adaptive_max_pool2d(a, size), x)
    assert_alike(lambda a: functional.adaptive_max_pool2d(a, size, return_indices=True)[1], x.long().float())


def test_adaptive_pooling_of_sequences() -> None:
    assert_alike(lambda a: functional.adaptive_avg_pool1d(a, 4), torch.randn(2, 3, 9))
    assert_alike(lambda a: functional.adaptive_max_pool1d(a, 4), torch.randn(2, 3, 9))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True},
        {"kernel_size": (2, 3), "stride": 1, "divisor_override": 5},
        {"kernel_size": 2, "stride": 3},
    ],
    ids=str,
)
def test_average_pooling(options: dict[str, object]) -> None:
    assert_alike(lambda a: functional.avg_pool2d(a, **options), torch.randn(2, 3, 8, 9))


TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, object]]] = {
    "plain": ((2, 3, 5, 4), (3, 4, 3, 3), {}),
    "stride and padding": ((2, 3, 5, 4), (3, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "groups": ((2, 4, 5, 4), (4, 3, 3, 2), {"stride": (2, 3), "dilation": (2, 1), "groups": 2}),
    "each channel": ((2, 4, 6, 5), (4, 1, 3, 2), {"stride": 2, "groups": 4}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution_and_its_gradients(name: str) -> None:
    shape, kernels, options = TRANSPOSED[name]
    bias = torch.randn(kernels[1] * int(str(options.get("groups", 1))))
    assert_alike(
        lambda a, w, b: functional.conv_transpose2d(a, w, b, **options), torch.randn(shape), torch.randn(kernels), bias
    )


def test_transposed_convolution_of_sequences() -> None:
    assert_alike(lambda a, w: functional.conv_transpose1d(a, w, stride=2), torch.randn(2, 4, 5), torch.randn(4, 3, 3))


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "stride": 2}, {"padding": (1, 2), "dilation": (2, 1)}],
    ids=str,
)
def test_depthwise_convolution_is_one_launch(options: dict[str, object]) -> None:
    x, weight, bias = torch.randn(2, 12, 6, 7), torch.randn(12, 1, 3, 3), torch.randn(12)
    assert_alike(lambda a, w, b: functional.conv2d(a, w, b, groups=12, **options), x, weight, bias)
    torch_qpu.reset_counters()
    with torch.no_grad():
        functional.conv2d(x.to("qpu"), weight.to("qpu"), bias.to("qpu"), groups=12, **options)
    assert {name: count.calls for name, count in torch_qpu.launches().items()} == {"conv2d": 1}


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_extremes_return_the_first_of_equal_elements(dim: int) -> None:
    x = torch.randint(-3, 4, (6, 5, 70)).float()
    for name in ("argmax", "argmin", "amax", "amin"):
        for keep in (False, True):
            assert_alike(lambda a, n=name, k=keep: getattr(a.detach(), n)(dim, keepdim=k), x)
    for name in ("max", "min"):
        for part in (0, 1):
            assert_alike(lambda a, n=name, p=part: getattr(a.detach(), n)(dim)[p], x)


def test_nan_is_the_extreme_of_its_row() -> None:
    x = torch.tensor([[1.0, float("nan"), 3], [float("-inf"), -5, -7], [-0.0, 0.0, -1]])
    for name in ("max", "min"):
        values, places = getattr(x.to("qpu"), name)(1)
        expected = getattr(x, name)(1)
        torch.testing.assert_close(values.cpu(), expected.values, equal_nan=True)
        assert torch.equal(places.cpu(), expected.indices)


@pytest.mark.parametrize("size", [1, 3, 5, 64, 129])
def test_comparisons_follow_ieee_754(size: int) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, float("-inf"), 1.0])
    a = torch.cat([special, torch.randint(-2, 3, (size,)).float()])[-max(size, 7) :]
    b = torch.cat([special[[0, 1, 4, 2, 4, 5]].abs(), torch.randint(-2, 3, (size,)).float()])[-max(size, 7) :]
    for name in ("gt", "ge", "lt", "le", "eq", "ne"):
        assert_alike(lambda x, y, n=name: getattr(x, n)(y), a, b)
        assert_alike(lambda x, n=name: getattr(x, n)(1), a)
        assert_alike(lambda x, n=name: getattr(x, n)(0.1), a)
        assert_alike(lambda x, n=name: getattr(x[:, None], n)(x), a)


def test_comparisons_write_only_their_result() -> None:
    flags = torch.zeros(16, dtype=torch.bool, device="qpu")
    a = torch.ones(5, device="qpu")
    torch.gt(a, 0, out=flags[4:9])
    torch.gt(a[:3], 0, out=flags[11:14])
    assert flags.nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 11, 12, 13]


def test_where_and_masked_fill() -> None:
    x = torch.randn(7, 33)
    mask = torch.rand(7, 33) > 0.5
    assert_alike(lambda a, b: torch.where(mask.to(a.device), a, b), x, x.flip(0))
    assert_alike(lambda a: torch.where(mask.to(a.device), a, 0.0), x)
    assert_alike(lambda a: torch.where(mask.to(a.device)[0], 1.5, a), x)
    assert_alike(lambda a: torch.where(mask.to(a.device)[:, 1:], a[:, 1:], a[:, :-1]), x)
    assert_alike(lambda a, b: torch.where(a > b, a, b), torch.randn(5, 1), torch.randn(6))
    assert_alike(lambda a: a.masked_fill(mask.to(a.device), float("-inf")).softmax(-1), x)
    assert_alike(lambda a: a.masked_fill(mask[0].to(a.device), 2), x)


def test_moves_preserve_every_bit() -> None:
    x = torch.tensor([float("nan"), -0.0, 1e-40, float("-inf"), 2.0])
    there, mask = x.to("qpu"), torch.tensor([True, True, True, False, True]).to("qpu")
    torch_qpu.reset_counters()
    for moved in (
        torch.where(mask, there, there.flip(0).flip(0)),
        torch.cat([there[:2], there[2:]]),
        there.view(5, 1).index_select(0, torch.arange(5).to("qpu")).view(5),
    ):
        assert torch.equal(moved.cpu().view(torch.int32), x.view(torch.int32))
    assert {"where", "cat", "index_select"} <= set(torch_qpu.launches())


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.9, 1.5])
def test_interpolation_from_either_end(weight: float) -> None:
    a, b = torch.randn(7, 33), torch.randn(7, 33)
    assert_alike(lambda x, y: torch.lerp(x, y, weight), a, b)
    assert_alike(torch.lerp, a, b, torch.rand(7, 33), tolerance=1e-4)


# --- batches of matrices ---------------------------------------------------------------------------------------------


def test_batch_of_small_products_is_one_launch() -> None:
    for a, b in (((5, 9, 13), (5, 13, 33)), ((2, 1, 1), (2, 1, 1)), ((3, 8, 64), (3, 64, 16)), ((5, 9, 0), (5, 0, 3))):
        x, y = torch.randint(-4, 5, a).float(), torch.randint(-4, 5, b).float()
        torch_qpu.reset_counters()
        assert torch.equal(torch.bmm(x.to("qpu"), y.to("qpu")).cpu(), torch.bmm(x, y))
        assert sum(count.calls for count in torch_qpu.launches().values()) <= 1
    assert_alike(lambda p, q: torch.bmm(p, q.transpose(1, 2)), torch.randn(5, 9, 13), torch.randn(5, 3, 13))


def test_fully_masked_attention_is_zero() -> None:
    minus = float("-inf")
    x = torch.tensor([[minus, minus, minus], [1, minus, 1], [0, 0, 0]])
    found = torch.ops.aten._safe_softmax(x.to("qpu"), -1).cpu()
    torch.testing.assert_close(found, torch.ops.aten._safe_softmax(x, -1), rtol=1e-6, atol=0)
    assert found[0].tolist() == [0, 0, 0]


def test_attention_and_its_gradients() -> None:
    assert_alike(functional.scaled_dot_product_attention, *(torch.randn(2, 3, 5, 8) for _ in range(3)))
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert_alike(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device)),
        *(torch.randn(2, 3, 5, 8) for _ in range(3)),
    )
