"""Tests of NaN and Inf on the QPUs: conformance to IEEE 754, ``check_finite`` and anomaly mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch_qpu
from torch.nn import functional
from torch_qpu import fusion

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, -NAN, INF, -INF, -3.0, -1.0, 0.0, 0.5, 2.0]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    torch_qpu.reset_counters()
    torch._dynamo.reset()
    yield
    torch_qpu.check_finite(False)


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "clamp": lambda a: a.clamp(-1, 1),
    "clamp from below": lambda a: a.clamp_min(0),
    "clamp by tensors": lambda a: a.clamp(torch.full_like(a, -1), torch.ones_like(a)),
    "div": lambda a: a / torch.full_like(a, 2),
    "div by itself": lambda a: a / a,
    "exp": torch.exp,
    "leaky_relu": functional.leaky_relu,
    "log": torch.log,
    "maximum": lambda a: torch.maximum(a, torch.ones_like(a)),
    "minimum": lambda a: torch.minimum(torch.ones_like(a), a),
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "softmax": lambda a: a.expand(9, 9).triu().softmax(1),
    "log_softmax": lambda a: a.expand(9, 9).triu().log_softmax(1),
    "softmax of long rows": lambda a: torch.cat([a, torch.linspace(-1, 1, 90).to(a)]).softmax(0),
    "layer_norm": lambda a: functional.layer_norm(a.repeat(4).view(4, 9).tril(), (9,)),
    "batch_norm": lambda a: functional.batch_norm(a.view(9, 1).expand(9, 9).tril(), None, None, training=True),
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "dot": lambda a: torch.dot(a, torch.ones_like(a)),
    "mse_loss": lambda a: functional.mse_loss(a, torch.zeros_like(a)),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found = found.detach().cpu()
    return bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True))


@pytest.mark.parametrize("name", KEPT)
def test_nan_and_inf_match_the_cpu(name: str) -> None:
    a = torch.tensor(VALUES)
    found, expected = KEPT[name](a.to("qpu")), KEPT[name](a)
    assert expected.isnan().any()
    assert same(found, expected), f"{found.cpu()}\n{expected}"
    assert torch_qpu.launches()
    for value in VALUES[:3]:  # alone, and far from the beginning
        b = torch.ones(200)
        b[133] = value
        assert same(KEPT[name](b[95:140][-9:].to("qpu")), KEPT[name](b[95:140][-9:]))


# For infinite inputs, some of these functions return NaN on the CPU and a number on the QPUs.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": functional.elu,
    "expm1": torch.expm1,
    "gelu": functional.gelu,
    "gelu by tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "selu": functional.selu,
    "silu": functional.silu,
    "softplus": functional.softplus,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_nan_of_either_sign(name: str) -> None:
    a = torch.tensor([NAN, -NAN, 1.0, -2.0, 0.0])
    assert same(ACTIVATIONS[name](a.to("qpu")), ACTIVATIONS[name](a))
    assert torch_qpu.launches()


NOT_KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda a: a + 1,
    "sub": lambda a: 1 - a,
    "mul": lambda a: a * a,
    "addcmul": lambda a: torch.addcmul(a, a, a),
    "square": lambda a: a**2,
    "mm": lambda a: a.view(1, -1) @ torch.ones_like(a).view(-1, 1),
    "mv": lambda a: torch.ones_like(a).view(1, -1) @ a,
    "sum of rows": lambda a: a.expand(2, -1).sum(1),
    "conv2d": lambda a: functional.conv2d(a.view(1, 1, 1, -1), torch.ones_like(a).view(1, 1, 1, -1)),
    "batch_norm in eval": lambda a: functional.batch_norm(
        a.view(-1, 1), torch.zeros_like(a[:1]), torch.ones_like(a[:1])
    ),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_nan_that_becomes_inf_does_not_vanish(name: str) -> None:
    a = torch.tensor([1.0, NAN, 2.0])
    expected = NOT_KEPT[name](a)
    found = NOT_KEPT[name](a.to("qpu")).cpu()
    assert torch.equal(expected.isfinite(), found.isfinite())


VANISHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times 0": lambda a: a * 0,
    "product with 0": lambda a: a.view(1, -1) @ torch.zeros_like(a).view(-1, 1),
    "maximum with a negative NaN": torch.max,
    "maximum of a window": lambda a: functional.max_pool2d(a.view(1, 1, 1, -1), (1, a.numel())),
    "Inf - Inf": lambda a: a - a,
    "mask of a gradient": lambda a: torch.ops.aten.threshold_backward(a, torch.zeros_like(a), 0.5) * 0,
}


@pytest.mark.parametrize("name", [*KEPT, *ACTIVATIONS, *NOT_KEPT, *VANISHES])
def test_check_finite_matches_the_cpu(name: str) -> None:
    function = {**KEPT, **ACTIVATIONS, **NOT_KEPT, **VANISHES}[name]
    torch_qpu.check_finite(True)
    for a in (torch.tensor(VALUES), torch.tensor([1.0, -NAN, 2.0, 0, 3, 4, 5, 6, 7]), torch.arange(-4.0, 5.0)):
        assert same(function(a.to("qpu")), function(a)), a


@pytest.mark.parametrize("name", ["add", "clamp", "div by itself", "log", "maximum", "mul", "sigmoid", "softmax"])
def test_check_finite_applies_to_fused_kernels(name: str) -> None:
    function = {**KEPT, **NOT_KEPT}[name]

    def chain(a: torch.Tensor) -> torch.Tensor:
        return (function(a) * 0 + 1) * 2

    a = torch.tensor(VALUES)
    compiled = torch.compile(chain, backend=fusion.compile_graph, dynamic=False)
    compiled(a.to("qpu"))
    torch_qpu.check_finite(True)
    assert same(compiled(a.to("qpu")), chain(a))
    torch_qpu.check_finite(False)
    torch_qpu.reset_counters()
    compiled(a.to("qpu"))
    assert "chain" in torch_qpu.launches(), "fused again without checks"


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_non_finite_scalars_are_computed_on_the_qpus(number: float) -> None:
    a = torch.tensor([-1.0, 0.0, 1.0, INF])
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x * number,
        lambda x: x + number,
        lambda x: torch.add(x, 1, alpha=number),
        lambda x: x.clamp(number, number),
        lambda x: x.clamp_min(number),
    )
    for function in functions:
        assert same(function(a.to("qpu")), function(a))
    one = torch.full((1,), number)
    assert same(a.to("qpu") * one.to("qpu"), a * one)


def test_nan_in_a_batch_reaches_running_statistics() -> None:
    states = []
    for device in ("cpu", "qpu"):
        layer = torch.nn.BatchNorm1d(2).to(device)
        x = torch.arange(8.0).view(4, 2).to(device)
        x[2, 1] = NAN
        x.requires_grad_()
        layer(x).sum().backward()
        states.append([t.detach().cpu() for t in (layer.running_mean, layer.running_var, x.grad)])
    for theirs, ours in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_anomaly_mode_finds_the_same_as_on_the_cpu() -> None:
    def broken(device: str) -> str:
        x = torch.tensor([0.0, 1.0], device=device, requires_grad=True)
        with (
            pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
            torch.autograd.detect_anomaly(),
            pytest.warns(UserWarning, match="Error detected in"),
            pytest.raises(RuntimeError) as caught,
        ):
            (x.sqrt() * 0).sum().backward()  # Inf times 0
        return str(caught.value)

    assert broken("qpu") == broken("cpu")
    assert "returned nan values" in broken("qpu")
    torch_qpu.reset_counters()
    assert (torch.tensor([INF, 1.0], device="qpu") * 0).tolist() == [0, 0], "not beyond the context"
    assert torch_qpu.fallbacks() == {}
