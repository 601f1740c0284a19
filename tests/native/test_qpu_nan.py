"""Tests of NaN and Inf on the QPUs: conformance to IEEE 754, ``check_finite`` and anomaly mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch_qpu
from torch import nn
from torch.nn import functional
from torch_qpu import fusion

Function = Callable[[torch.Tensor], torch.Tensor]

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, -NAN, INF, -INF, -3.0, -1.0, 0.0, 0.5, 2.0]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    torch_qpu.reset_counters()
    torch._dynamo.reset()
    yield
    torch_qpu.check_finite(False)


def ramp(a: torch.Tensor) -> torch.Tensor:
    """Return 1, 2, 3, … with the shape and the device of a vector."""
    return torch.arange(1.0, a.numel() + 1).to(a.device)


def image(a: torch.Tensor) -> torch.Tensor:
    """Return a vector as an image with one row."""
    return a.view(1, 1, 1, -1)


def scores(a: torch.Tensor) -> torch.Tensor:
    """Return a matrix of two rows: the scores ``a``, and scores without NaN."""
    return torch.stack([a, ramp(a)])


def counted(a: torch.Tensor, number: float) -> torch.Tensor:
    """Return a tensor without dimensions after an operator on lists has added a number to it in place."""
    torch._foreach_add_([a], number)
    return a


def class_loss(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, torch.tensor([0, 1], device=x.device))


def gradient_at_nan(function: Function) -> Function:
    """Return the gradient of a function as a function of its operand."""

    def gradient(a: torch.Tensor) -> torch.Tensor:
        x = a.detach().requires_grad_()
        function(x).sum().backward()
        return x.grad

    return gradient


def gradient_of_nan(function: Function) -> Function:
    """Return the gradient of a function as a function of the incoming gradient."""

    def gradient(a: torch.Tensor) -> torch.Tensor:
        x = ramp(a).requires_grad_()
        y = function(x)
        y.backward(a.view(y.shape))
        return x.grad

    return gradient


def updated(make: Callable[..., torch.optim.Optimizer], **options: object) -> Function:
    """Return the parameter after an optimiser's step as a function of the gradient."""

    def update(a: torch.Tensor) -> torch.Tensor:
        parameter = nn.Parameter(ramp(a))
        parameter.grad = a.clone()
        make([parameter], lr=0.1, **options).step()
        return parameter.detach()

    return update


KEPT: dict[str, Function] = {
    "abs": torch.abs,
    "cat": lambda a: torch.cat([a, ramp(a)]),
    "clamp": lambda a: a.clamp(-1, 1),
    "clamp from below": lambda a: a.clamp_min(0),
    "clamp by tensors": lambda a: a.clamp(torch.full_like(a, -1), torch.ones_like(a)),
    "div": lambda a: a / torch.full_like(a, 2),
    "div by itself": lambda a: a / a,
    "exp": torch.exp,
    "index_select": lambda a: a.view(-1, 1).index_select(0, torch.arange(a.numel(), device=a.device)),
    "leaky_relu": functional.leaky_relu,
    "log": torch.log,
    "masked_fill": lambda a: a.masked_fill(ramp(a) > 7, 0.0),
    "max of rows": lambda a: a.expand(2, -1).max(1).values,
    "maximum": lambda a: torch.maximum(a, torch.ones_like(a)),
    "minimum": lambda a: torch.minimum(torch.ones_like(a), a),
    "neg": torch.neg,
    "pow of 1/2": lambda a: a**0.5,
    "pow of -1": lambda a: a**-1,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "where": lambda a: torch.where(ramp(a) > 7, ramp(a), a),
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
    "gradient: leaky_relu": gradient_of_nan(functional.leaky_relu),
    "gradient: relu": gradient_of_nan(torch.relu),
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
    for value in VALUES[:3]:  # a single special value, in a view far from the beginning of its storage
        b = torch.ones(200)
        b[133] = value
        assert same(KEPT[name](b[95:140][-9:].to("qpu")), KEPT[name](b[95:140][-9:]))


# For infinite inputs, some of these functions return NaN on the CPU and a number on the QPUs.
ACTIVATIONS: dict[str, Function] = {
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
    "gradient at NaN: elu": gradient_at_nan(functional.elu),
    "gradient at NaN: gelu by tanh": gradient_at_nan(lambda a: functional.gelu(a, approximate="tanh")),
    "gradient at NaN: silu": gradient_at_nan(functional.silu),
    "gradient at NaN: softplus": gradient_at_nan(functional.softplus),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_nan_of_either_sign(name: str) -> None:
    a = torch.tensor([NAN, -NAN, 1.0, -2.0, 0.0])
    assert same(ACTIVATIONS[name](a.to("qpu")), ACTIVATIONS[name](a))
    assert torch_qpu.launches()


NOT_KEPT: dict[str, Function] = {
    "add": lambda a: a + 1,
    "sub": lambda a: 1 - a,
    "mul": lambda a: a * a,
    "addcmul": lambda a: torch.addcmul(a, a, a),
    "addcdiv": lambda a: torch.addcdiv(ramp(a), a, ramp(a)),
    "addcdiv with a divisor": lambda a: torch.addcdiv(ramp(a), ramp(a), a),
    "lerp from": lambda a: torch.lerp(a, ramp(a), 0.25),
    "lerp to": lambda a: torch.lerp(ramp(a), a, 0.25),
    "square": lambda a: a**2,
    "pow": lambda a: a**3,
    "mm": lambda a: a.view(1, -1) @ torch.ones_like(a).view(-1, 1),
    "mv": lambda a: torch.ones_like(a).view(1, -1) @ a,
    "linear": lambda a: functional.linear(a.view(1, -1), ramp(a).view(1, -1)),
    "addmm": lambda a: torch.addmm(a.view(1, -1), torch.ones_like(a[:1]).view(1, 1), ramp(a).view(1, -1)),
    "bmm": lambda a: a.view(1, 1, -1) @ ramp(a).view(1, -1, 1),
    "baddbmm": lambda a: torch.baddbmm(torch.ones_like(a[:1]).view(1, 1, 1), a.view(1, 1, -1), ramp(a).view(1, -1, 1)),
    "baddbmm with an addend": lambda a: torch.baddbmm(
        a.view(1, 1, -1), torch.ones_like(a[:1]).view(1, 1, 1), ramp(a).view(1, 1, -1)
    ),
    "sum of rows": lambda a: a.expand(2, -1).sum(1),
    "sum of columns": lambda a: scores(a).sum(0),
    "mean of rows": lambda a: a.expand(2, -1).mean(1),
    "mean of columns": lambda a: scores(a).mean(0),
    "avg_pool2d": lambda a: functional.avg_pool2d(image(a), (1, 2), 1),
    "adaptive_avg_pool2d": lambda a: functional.adaptive_avg_pool2d(image(a), 1),
    "cross_entropy": lambda a: class_loss(scores(a)),
    "nll_loss": lambda a: functional.nll_loss(a.view(1, -1), torch.tensor([1], device=a.device)),
    "conv2d": lambda a: functional.conv2d(a.view(1, 1, 1, -1), torch.ones_like(a).view(1, 1, 1, -1)),
    "batch_norm in eval": lambda a: functional.batch_norm(
        a.view(-1, 1), torch.zeros_like(a[:1]), torch.ones_like(a[:1])
    ),
    "gradient: avg_pool2d": gradient_of_nan(lambda x: functional.avg_pool2d(image(x), 1)),
    "gradient: conv2d": gradient_of_nan(lambda x: functional.conv2d(image(x), torch.ones_like(image(x[:1])))),
    "gradient: bias of conv2d": gradient_of_nan(
        lambda x: functional.conv2d(torch.ones_like(image(x)), torch.ones_like(image(x[:1])), x[:1])
    ),
    "gradient: weight of conv2d": lambda a: gradient_at_nan(lambda w: functional.conv2d(image(a), image(w)))(ramp(a)),
    "gradient: cross_entropy": gradient_at_nan(lambda a: class_loss(scores(a))),
    "gradient: embedding": gradient_of_nan(
        lambda x: functional.embedding(torch.tensor([0], device=x.device), x.view(1, -1))
    ),
    "gradient: gelu": gradient_of_nan(functional.gelu),
    "gradient: layer_norm": gradient_of_nan(lambda x: functional.layer_norm(x, x.shape)),
    "gradient: bias of layer_norm": gradient_of_nan(lambda x: functional.layer_norm(ramp(x), x.shape, None, x)),
    "gradient: log_softmax": gradient_of_nan(lambda x: x.log_softmax(0)),
    "gradient: max_pool2d": gradient_of_nan(lambda x: functional.max_pool2d(image(x), 1)),
    "gradient: mm": gradient_of_nan(lambda x: x.view(-1, 1) @ torch.ones_like(x[:1]).view(1, 1)),
    "gradient: sigmoid": gradient_of_nan(torch.sigmoid),
    "gradient: softmax": gradient_of_nan(lambda x: x.softmax(0)),
    "gradient: tanh": gradient_of_nan(torch.tanh),
    "gradient at NaN: gelu": gradient_at_nan(functional.gelu),
    "gradient at NaN: log_softmax": gradient_at_nan(lambda a: a.log_softmax(0)),
    "gradient at NaN: sigmoid": gradient_at_nan(torch.sigmoid),
    "gradient at NaN: softmax": gradient_at_nan(lambda a: a.softmax(0)),
    "Adam": updated(torch.optim.Adam),
    "Adam, fused": updated(torch.optim.Adam, fused=True),
    "AdamW": updated(torch.optim.AdamW),
    "AdamW, fused": updated(torch.optim.AdamW, fused=True),
    "SGD": updated(torch.optim.SGD),
    "SGD, fused": updated(torch.optim.SGD, fused=True, momentum=0.9),
}


@pytest.mark.parametrize("name", NOT_KEPT)
@pytest.mark.parametrize("value", [NAN, -NAN])
def test_nan_that_becomes_inf_does_not_vanish(name: str, value: float) -> None:
    a = torch.tensor([1.0, value, 2.0])
    expected = NOT_KEPT[name](a)
    found = NOT_KEPT[name](a.to("qpu")).cpu()
    assert expected.isnan().any()
    assert torch.equal(expected.isfinite(), found.isfinite())
    assert torch_qpu.launches()


VANISHES: dict[str, Function] = {
    "times 0": lambda a: a * 0,
    "product with 0": lambda a: a.view(1, -1) @ torch.zeros_like(a).view(-1, 1),
    "maximum with a negative NaN": torch.max,
    "maximum of a window": lambda a: functional.max_pool2d(a.view(1, 1, 1, -1), (1, a.numel())),
    "Inf - Inf": lambda a: a - a,
    "gradient at NaN: sqrt": gradient_at_nan(torch.sqrt),
    "gradient: weight of layer_norm": gradient_of_nan(lambda x: functional.layer_norm(ramp(x), x.shape, x)),
    "mask of a gradient": lambda a: torch.ops.aten.threshold_backward(a, torch.zeros_like(a), 0.5) * 0,
}


ALL = {**KEPT, **ACTIVATIONS, **NOT_KEPT, **VANISHES}
INPUTS = (torch.tensor(VALUES), torch.tensor([1.0, -NAN, 2.0, 0, 3, 4, 5, 6, 7]), torch.arange(-4.0, 5.0))


@pytest.mark.parametrize("name", ALL)
def test_check_finite_matches_the_cpu(name: str) -> None:
    torch_qpu.check_finite(True)
    for a in INPUTS:
        assert same(ALL[name](a.to("qpu")), ALL[name](a)), a


def result(function: Function, a: torch.Tensor) -> torch.Tensor | str:
    """Return a function's result, or the text of its error."""
    try:
        return function(a)
    except RuntimeError as fault:
        return str(fault)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_matches_the_cpu(name: str) -> None:
    with torch.autograd.set_detect_anomaly(True):
        for a in INPUTS:
            found, expected = result(ALL[name], a.to("qpu")), result(ALL[name], a)
            if isinstance(expected, str):
                assert "returned nan values" in expected
                assert found == expected
            else:
                assert not isinstance(found, str), found
                assert same(found, expected), a


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
    assert "chain" in torch_qpu.launches(), "without checks, operations must be fused again"


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


@pytest.mark.parametrize("number", [1e39, -1e300])
def test_numbers_beyond_float32_match_the_cpu(number: float) -> None:
    a = torch.tensor([-1.0, 0.0, 2.0])
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x * number,
        lambda x: x + number,
        lambda x: x - torch.tensor(number, dtype=torch.float64),
        lambda x: torch.maximum(x, torch.tensor(number, dtype=torch.float64)),
    )
    for function in functions:
        assert same(function(a.to("qpu")), function(a))


@pytest.mark.parametrize("number", [NAN, INF, -INF, 1e39])
def test_numbers_for_lists_match_the_cpu(number: float) -> None:
    a = torch.tensor([-1.0, 0.0, 2.0])
    functions: tuple[Function, ...] = (
        lambda x: torch._foreach_mul([x], number)[0],
        lambda x: torch._foreach_mul([x], [number])[0],
        lambda x: torch._foreach_mul([x], torch.tensor(number, dtype=torch.float64))[0],
        lambda x: torch._foreach_mul([x], torch.tensor(number).to(x.device))[0],
        lambda x: torch._foreach_div([x], number)[0],
        lambda x: counted(x.sum(), number),
    )
    for function in functions:
        assert same(function(a.to("qpu")), function(a))


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_non_finite_factors_match_the_cpu(number: float) -> None:
    a = torch.tensor([[-1.0, 0.0], [0.0, 2.0]])
    functions: tuple[Function, ...] = (
        lambda x: torch.addmm(x, x, x, alpha=number),
        lambda x: torch.addmm(x, x, x, beta=number),
        lambda x: torch.baddbmm(x[None], x[None], x[None], alpha=number),
        lambda x: torch.baddbmm(x[None], x[None], x[None], beta=number),
        lambda x: torch.addmv(x[0], x, x[1], alpha=number),
        lambda x: torch.addmv(x[0], x, x[1], beta=number),
        lambda x: torch.lerp(x, x + x, number),
        lambda x: functional.leaky_relu(x, number),
        lambda x: functional.elu(x, number),
        lambda x: functional.softplus(x, 1, number),
    )
    for function in functions:
        assert same(function(a.to("qpu")), function(a))


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_non_finite_tensors_of_one_element_match_the_cpu(number: float) -> None:
    a = torch.tensor(number)
    functions: tuple[Function, ...] = (
        lambda x: x + 1,
        lambda x: x * 0,
        lambda x: x.view(1, 1) - x,
        lambda x: torch.ones(3, 2).to(x.device).t() * x,
    )
    for function in functions:
        assert same(function(a.to("qpu")), function(a))


def test_gradient_clipping_keeps_nan() -> None:
    parameters = [nn.Parameter(torch.ones(3, device="qpu")) for _ in range(2)]
    for parameter, value in zip(parameters, (1.0, NAN), strict=True):
        parameter.grad = torch.full((3,), value, device="qpu")
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert all(parameter.grad.isnan().all() for parameter in parameters)


@pytest.mark.parametrize("number", [NAN, INF, -INF, 1e39])
def test_fused_kernels_contain_only_finite_numbers(number: float) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * number + 1)

    a = torch.tensor([-1.0, 0.0, 2.0])
    compiled = torch.compile(function, backend=fusion.compile_graph, dynamic=False)
    assert same(compiled(a.to("qpu")), function(a.to("qpu")).cpu())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_compiled_gelu_keeps_nan_and_has_no_fallbacks(approximate: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x, approximate=approximate)

    compiled = torch.compile(function, backend=fusion.compile_graph, dynamic=False)
    a = torch.tensor([NAN, -NAN, 1.0, -2.0, 0.0])
    torch_qpu.reset_counters()
    assert same(compiled(a.to("qpu")), function(a))
    assert same(gradient_of_nan(compiled)(a[2:].to("qpu")), gradient_of_nan(function)(a[2:]))
    assert torch_qpu.fallbacks() == {}


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
    assert (torch.tensor([INF, 1.0], device="qpu") * 0).tolist() == [0, 0], (
        "after anomaly mode, Inf * 0 must be 0 again"
    )
    assert torch_qpu.fallbacks() == {}
