"""Tests of operators for training, except matrix products: gradients of image operators, batch statistics, and losses.

With integers that are small enough for float32 to compute without rounding, results are identical to the CPU's.
Otherwise, the CPU computes in float64 and the bound is given in units in the last place (ULP, 2^-23 of a magnitude).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_qpu
from torch import nn
from torch.nn import functional

ULP = 2.0**-23


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261121)


def whole(*shape: int, most: int = 4) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape).to(torch.float32)


def gradients(
    function: Callable[..., torch.Tensor], operands: list[torch.Tensor], device: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the result and the gradients of its weighted sum; fail if an operator falls back to the CPU."""
    leaves = [operand.detach().clone().to(device).requires_grad_() for operand in operands]
    torch_qpu.reset_counters()
    result = function(*leaves)
    weights = (torch.arange(result.numel()) % 5 - 2.0).reshape(result.shape).to(device)
    result.backward(weights)
    assert torch_qpu.fallbacks() == {}
    return result.detach().cpu(), [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


def assert_same(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> None:
    """Check that the result and the gradients are identical to the CPU's."""
    found, expected = (gradients(function, list(operands), device) for device in ("qpu", "cpu"))
    assert torch.equal(found[0], expected[0])
    assert len(found[1]) == len(operands)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)


# --- convolution -----------------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, object]]] = {
    "plain": ((2, 3, 7, 8), (4, 3, 3, 3), {}),
    "one of all": ((1, 1, 3, 3), (1, 1, 3, 3), {}),
    "one pixel": ((3, 2, 5, 4), (5, 2, 1, 1), {}),
    "padding": ((2, 2, 6, 5), (3, 2, 3, 3), {"padding": (1, 2)}),
    "padding beyond the kernel": ((1, 2, 4, 4), (2, 2, 2, 2), {"padding": 3}),
    "stride": ((2, 2, 9, 9), (3, 2, 3, 3), {"stride": 2}),
    "rows left over by the stride": ((2, 2, 10, 12), (3, 2, 3, 2), {"stride": (3, 4)}),
    "dilation": ((2, 2, 9, 8), (3, 2, 3, 2), {"dilation": (2, 3)}),
    "all": ((2, 4, 11, 9), (6, 2, 3, 2), {"stride": (2, 1), "padding": 1, "dilation": (1, 2), "groups": 2}),
    "groups of one": ((2, 3, 5, 5), (3, 1, 3, 3), {"groups": 3, "padding": 1}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolution(name: str) -> None:
    shape, kernels, options = CONVOLUTIONS[name]
    assert_same(
        lambda a, w, b: functional.conv2d(a, w, b, **options),
        whole(*shape),
        whole(*kernels),
        whole(kernels[0]),
    )


def test_unneeded_convolution_gradients_are_not_computed() -> None:
    x, layer = whole(2, 1, 6, 6).to("qpu"), nn.Conv2d(1, 2, 3).to("qpu")
    layer.bias.requires_grad_(False)
    torch_qpu.reset_counters()
    layer(x).sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    assert torch_qpu.launches()["conv2d"].calls == 2, "expected the forward pass and the gradient of the weights"
    assert torch_qpu.fallbacks() == {}


def test_unsupported_convolutions_have_gradients() -> None:
    for shape, kernels, function in (
        ((1, 2, 4, 4, 4), (2, 2, 2, 2, 2), functional.conv3d),
        ((1, 2, 4, 4), (2, 3, 2, 2), functional.conv_transpose2d),
    ):
        grads = []
        for device in ("cpu", "qpu"):
            torch.manual_seed(1)
            leaves = [whole(*size).to(device).requires_grad_() for size in (shape, kernels)]
            function(*leaves).square().sum().backward()
            grads.append([leaf.grad.cpu() for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- pooling ---------------------------------------------------------------------------------------------------------

POOLINGS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "plain": ((2, 3, 8, 6), {"kernel_size": 2}),
    "without a batch": ((3, 7, 9), {"kernel_size": (3, 2)}),
    "one of all": ((1, 1, 1, 1), {"kernel_size": 1}),
    "windows that meet": ((2, 2, 9, 11), {"kernel_size": 3, "stride": (1, 2)}),
    "windows apart": ((2, 2, 9, 11), {"kernel_size": 2, "stride": 4}),
    "padding": ((2, 3, 7, 6), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "dilation": ((2, 2, 9, 10), {"kernel_size": (2, 3), "stride": 1, "padding": 1, "dilation": (3, 2)}),
    "many planes": ((5, 9, 4, 4), {"kernel_size": 2}),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_indices_and_gradients_of_pooling(name: str) -> None:
    shape, options = POOLINGS[name]
    x = whole(*shape, most=2)  # a small range, so that some elements are equal
    x.view(-1)[:: x.numel() // 2 + 1] = float("-inf")
    found, places = functional.max_pool2d(x.to("qpu"), return_indices=True, **options)
    expected, where = functional.max_pool2d(x, return_indices=True, **options)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(places.cpu(), where)
    assert_same(lambda a: functional.max_pool2d(a, **options), whole(*shape, most=2))


def test_pooling_with_ceil_mode_matches_the_cpu() -> None:
    x = whole(1, 2, 5, 5)
    grads = []
    for device in ("cpu", "qpu"):
        leaf = x.clone().to(device).requires_grad_()
        functional.max_pool2d(leaf, 2, ceil_mode=True).square().sum().backward()
        grads.append(leaf.grad.cpu())
    assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="pad"):
        functional.max_pool2d(x.to("qpu").requires_grad_(), 2, padding=2)


# --- batch normalisation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(6, 3), (4, 3, 5), (3, 2, 9, 8), (2, 13, 3, 3), (1, 1, 2, 1), (20, 1, 1, 70)], ids=str
)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_normalisation(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    """Results, gradients and statistics differ from those in float64 by at most 256 ULP of the largest magnitude."""
    x = torch.randn(shape) * 3 + 1
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    outcomes = []
    for device, dtype in (("cpu", torch.float64), ("qpu", torch.float32)):
        torch.manual_seed(3)
        layer = kind(shape[1], affine=affine).train(training)
        with torch.no_grad():
            for tensor in (*layer.parameters(), layer.running_mean, layer.running_var):
                tensor.copy_(torch.rand(shape[1]) + 0.5)
        layer.to(device, dtype)
        leaf = x.to(device, dtype).requires_grad_()
        torch_qpu.reset_counters()
        result = layer(leaf)
        result.backward((torch.arange(x.numel()) % 7 - 3.0).reshape(shape).to(device, dtype))
        assert set(torch_qpu.fallbacks()) <= {"aten::add_.Tensor", "aten::add.out"}, (
            "only the counter of batches may be computed on the CPU"
        )
        made = [result, leaf.grad, layer.running_mean, layer.running_var]
        made += [parameter.grad for parameter in layer.parameters()]
        outcomes.append([tensor.detach().cpu().double() for tensor in made])
    # With few elements (such as two), the gradient is a difference of numbers that are much larger than the gradient.
    scale = max(1.0, outcomes[0][0].abs().max().item()) * 10
    for theirs, ours in zip(*outcomes, strict=True):
        greatest = max(theirs.abs().max().item(), scale)
        assert (ours - theirs).abs().max().item() <= 256 * ULP * greatest


def test_batch_norm_without_statistics_or_with_one_element() -> None:
    layer = nn.BatchNorm2d(2, track_running_stats=False).to("qpu")
    x = torch.randn(2, 2, 3, 3)
    expected = nn.BatchNorm2d(2, track_running_stats=False)(x)
    torch.testing.assert_close(layer(x.to("qpu")).cpu(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 2, 1, 1, device="qpu"))
    mean = nn.BatchNorm1d(3, momentum=None).to("qpu")
    for _ in range(2):
        mean(torch.ones(4, 3, device="qpu"))
    torch.testing.assert_close(mean.running_mean.cpu(), torch.ones(3))


# --- losses ----------------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (3, 10), (2, 15), (2, 16), (17, 17), (5, 63), (2, 64), (3, 65), (13, 200)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("function", [functional.softmax, functional.log_softmax], ids=["softmax", "log_softmax"])
def test_softmax_and_log_softmax(function: Callable[..., torch.Tensor], size: tuple[int, int]) -> None:
    """The error is at most 64 ULP of (1 + |result|)."""
    x, weights = torch.randn(size) * 4, torch.randn(size)
    for dimension in (1, 0):
        exact = x.double().requires_grad_()
        expected = function(exact, dimension)
        expected.backward(weights.double())
        leaf = x.to("qpu").requires_grad_()
        torch_qpu.reset_counters()
        found = function(leaf, dimension)
        found.backward(weights.to("qpu"))
        assert torch_qpu.fallbacks() == {}
        assert torch.all((found.detach().cpu() - expected).abs() <= 64 * ULP * (1 + expected.abs()))
        bound = 64 * ULP * (1 + weights.abs().sum(dimension, keepdim=True))
        assert torch.all((leaf.grad.cpu() - exact.grad).abs() <= bound * (1 + expected.abs()))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "plain"])
def test_nll_loss_and_cross_entropy(size: tuple[int, int], reduction: str, weighted: bool) -> None:
    """The error is at most 256 ULP of the sum of the magnitudes."""
    x = torch.randn(size)
    targets = torch.randint(0, size[1], size[:1])
    targets[1::4] = -100  # the index that the losses ignore
    weight = torch.rand(size[1]) + 0.5 if weighted else None
    exact = x.double().requires_grad_()
    expected = functional.cross_entropy(
        exact, targets, None if weight is None else weight.double(), reduction=reduction
    )
    expected.sum().backward()
    leaf = x.to("qpu").requires_grad_()
    torch_qpu.reset_counters()
    found = functional.cross_entropy(
        leaf, targets.to("qpu"), None if weight is None else weight.to("qpu"), reduction=reduction
    )
    found.sum().backward()
    assert torch_qpu.fallbacks() == {}
    assert found.shape == expected.shape
    assert torch.all((found.detach().cpu() - expected).abs() <= 256 * ULP * (1 + expected.abs()))
    assert torch.all((leaf.grad.cpu() - exact.grad).abs() <= 256 * ULP * (1 + exact.grad.abs()))


def test_invalid_targets_raise_and_device_recovers() -> None:
    x = torch.randn(20, 5, device="qpu")
    for wrong in (5, -1, 1 << 40, -(1 << 40)):
        targets = torch.zeros(20, dtype=torch.int64)
        targets[17] = wrong
        with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
            functional.nll_loss(x, targets.to("qpu"))
    assert functional.nll_loss(x, targets.clamp(0, 4).to("qpu")).shape == ()
    large = functional.nll_loss(x, torch.full((20,), 1 << 40).to("qpu"), ignore_index=1 << 40, reduction="sum")
    assert large.item() == 0
    assert functional.nll_loss(x, torch.full((20,), -100).to("qpu")).isnan()


def test_unsupported_losses_run_on_the_cpu() -> None:
    x, pixels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    torch.testing.assert_close(
        functional.cross_entropy(x.to("qpu"), pixels.to("qpu")).cpu(), functional.cross_entropy(x, pixels)
    )
    assert functional.nll_loss(torch.randn(0, 4, device="qpu"), pixels[:0, 0, 0].to("qpu"), reduction="sum").item() == 0
    with pytest.raises((RuntimeError, ValueError), match="size"):
        functional.nll_loss(x[:, :, 0, 0].to("qpu"), pixels[:1, 0, 0].to("qpu"))
    with pytest.raises(RuntimeError, match=r"expected.*Long|not implemented|scalar type"):
        functional.nll_loss(x[:, :, 0, 0].to("qpu"), torch.zeros(2, device="qpu"))


# --- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 12])
def test_results_do_not_depend_on_the_number_of_qpus(count: int) -> None:
    torch_qpu.set_qpus(count)
    try:
        assert_same(lambda a: functional.max_pool2d(a, 3, 2, 1), whole(2, 7, 9, 9))
        assert_same(lambda a: a.sum(0), whole(50, 20))
        assert_same(lambda a: a.sum(1), whole(2, 9000))
        assert_same(lambda a, w: functional.conv2d(a, w, padding=1), whole(2, 2, 6, 6), whole(3, 2, 3, 3))
        x, y = torch.randn(40, 7).to("qpu"), torch.randint(0, 7, (40,)).to("qpu")
        found = functional.cross_entropy(x, y)
        torch.testing.assert_close(found.cpu(), functional.cross_entropy(x.cpu(), y.cpu()))
    finally:
        torch_qpu.set_qpus(0)
