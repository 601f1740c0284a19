"""Tests of the operators with torch.library, torch.export and torch.compile, and of the fused kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import qpu_ops  # noqa: F401 (registers torch.ops.qpu)
import torch
import torch_qpu
from torch import nn
from torch_qpu import fusion

PLAIN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "add": ((3, 5), (3, 5)),
    "mul": ((17,), (17,)),
    "mv": ((4, 18), (18,)),
    "mm": ((4, 6), (6, 3)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_operators_pass_opcheck(name: str) -> None:
    """``opcheck`` tests the schema, fake tensors, autograd registration and AOT dispatch on CPU tensors."""
    operator = getattr(torch.ops.qpu, name)
    a, b = (torch.randn(shape) for shape in PLAIN[name])
    torch.library.opcheck(operator.default, (a, b))
    torch.library.opcheck(operator.default, (a.requires_grad_(), b.requires_grad_()))
    torch.testing.assert_close(operator(a, b), getattr(torch, name)(a, b), rtol=1e-5, atol=1e-5)
    there = operator(a.detach().to("qpu"), b.detach().to("qpu"))
    assert there.device.type == "qpu"
    torch.testing.assert_close(there.cpu(), operator(a, b).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_operators_have_gradients_of_any_order(name: str) -> None:
    operator = getattr(torch.ops.qpu, name)
    leaves = [torch.randn(shape, requires_grad=True) for shape in PLAIN[name]]
    found = torch.autograd.grad(operator(*leaves).square().sum(), leaves, create_graph=True)
    expected = torch.autograd.grad(getattr(torch, name)(*leaves).square().sum(), leaves, create_graph=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    second = torch.autograd.grad(sum(g.sum() for g in found), leaves)
    expected = torch.autograd.grad(sum(g.sum() for g in expected), leaves)
    for ours, theirs in zip(second, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_large_matrices_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    for m, k, n in ((40, 3, 50), (3, 700, 2), (50, 60, 1), (1, 1, 2000)):
        a, b = torch.randint(-5, 6, (m, k)).float(), torch.randint(-5, 6, (k, n)).float()
        assert torch.equal(torch.ops.qpu.mm(a, b), a @ b)
    special = torch.tensor([[float("inf"), 0.0]])
    assert torch.ops.qpu.mm(special, torch.zeros(2, 1)).isnan().all()
    with pytest.raises(ValueError, match=r"\(M, K\) and b of shape \(K, N\)"):
        torch.ops.qpu.mm(torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("add", ((3, 5), (3, 6))),
        ("mul", ((3, 5), (5,))),
        ("mv", ((3, 5), (6,))),
        ("mv", ((3, 5), (5, 1))),
        ("mm", ((3, 5), (6, 2))),
        ("mm", ((3, 5), (5,))),
    ],
)
def test_shape_mismatch_error_names_both_shapes(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """The operator's implementation, its fake kernel and a trace with symbolic sizes all raise the same error."""
    operator = getattr(torch.ops.qpu, name)
    said = set()
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="expected") as caught:
            operator(*(torch.ones(shape, device=device) for shape in shapes))
        said.add(str(caught.value).split("expected", 1)[1].splitlines()[0])
        for shape in shapes:
            assert str(shape) in str(caught.value)
    assert len(said) == 1, "both devices must raise the same message"
    compiled = torch.compile(operator, backend="aot_eager", dynamic=True, fullgraph=True)
    with pytest.raises(Exception, match=r"found \(.*\) and \(.*\)"):
        compiled(*(torch.ones(shape) for shape in shapes))


def test_chain_passes_opcheck() -> None:
    a, b = torch.randn(5, 7).to("qpu"), torch.randn(5, 7).to("qpu")
    for operands in ([a, b], [a[0], b], [a[:0], b[:0]]):
        torch.library.opcheck(torch.ops.torch_qpu.chain.default, (operands, [0.5], "aan", "mul 0 1;add 3 2;tanh 4>4,5"))
    first, second = torch.ops.torch_qpu.chain([a, b], [0.5], "aan", "mul 0 1;add 3 2;tanh 4>4,5")
    torch.testing.assert_close(first.cpu(), a.cpu() * b.cpu() + 0.5)
    torch.testing.assert_close(second.cpu(), torch.tanh(a.cpu() * b.cpu() + 0.5))


def test_chain_with_gradients_raises() -> None:
    a = torch.randn(5, device="qpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.ops.torch_qpu.chain([a], [], "a", "neg 0>1")
    with torch.no_grad():
        assert torch.equal(torch.ops.torch_qpu.chain([a], [], "a", "neg 0>1")[0], -a)


@pytest.mark.parametrize(
    ("kinds", "steps", "why"),
    [
        ("a", "neg 0", "'>'"),
        ("a", "turn 0>1", "unknown step 'turn'"),
        ("a", "neg 1>1", "value 1 is used, but there are only 1"),
        ("a", "add 0>1", "1 operands, not 2"),
        ("a", "neg x>1", "'x' is not the number"),
        ("a", "neg 0>0,0,1,1", "stores 4 values"),
        ("aa", "neg 0>1", "kinds"),
    ],
)
def test_invalid_chains_raise_with_the_reason(kinds: str, steps: str, why: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=why):
        torch.ops.torch_qpu.chain([torch.ones(3, device="qpu")], [], kinds, steps)


def run_compiled(function: Callable[..., Any], *operands: torch.Tensor) -> tuple[Any, dict[str, int]]:
    """Return the result of the compiled function, and the kernels that one call launched."""
    compiled = torch.compile(function, backend=fusion.compile_graph, dynamic=False)
    compiled(*operands)
    torch_qpu.reset_counters()
    result = compiled(*operands)
    return result, {name: count.calls for name, count in torch_qpu.launches().items()}


def test_chain_of_operators_is_one_kernel() -> None:
    a, b = torch.randn(40, 50).to("qpu"), torch.randn(40, 50).to("qpu")

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.relu(x * 2 + y) - 0.5) * x

    result, launched = run_compiled(function, a, b)
    assert launched == {"chain": 1}
    torch.testing.assert_close(result.cpu(), function(a.cpu(), b.cpu()), rtol=1e-5, atol=1e-6)


def test_inputs_of_a_chain_are_computed_before_it() -> None:
    a = torch.randn(12, 12).to("qpu")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x) * 2
        z = y @ y
        return torch.tanh(z + 1) * y, y.sum(0)

    result, launched = run_compiled(function, a)
    assert launched["mm"] == 1
    assert launched["chain"] == 2
    for ours, theirs in zip(result, function(a.cpu()), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


def test_long_chains_are_split_at_the_kernel_limits() -> None:
    operands = [torch.randn(30).to("qpu") for _ in range(9)]

    def function(*x: torch.Tensor) -> torch.Tensor:
        total = x[0]
        for i, t in enumerate(x[1:]):
            total = total * (0.5 + i / 7) + t
        return total

    result, launched = run_compiled(function, *operands)
    assert set(launched) == {"chain"}
    assert 2 <= launched["chain"] <= 4
    torch.testing.assert_close(result.cpu(), function(*(t.cpu() for t in operands)), rtol=1e-5, atol=1e-5)


def test_integers_and_other_devices_are_not_fused() -> None:
    a = torch.arange(10).to("qpu")
    result, launched = run_compiled(lambda x: (x * 2 + 1).abs(), a)
    assert launched == {}
    assert result.tolist() == [2 * i + 1 for i in range(10)]
    b = torch.randn(5)
    result, launched = run_compiled(lambda x: torch.relu(x * 2 + 1), b)
    assert launched == {}
    assert torch.equal(result, torch.relu(b * 2 + 1))


def test_compiled_model_trains_like_the_original() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3), nn.Tanh()).to("qpu")
        x, y = torch.randn(5, 6).to("qpu"), torch.randn(5, 3).to("qpu")
        run = torch.compile(model, backend=fusion.compile_graph) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (run(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "qpu"])
def test_the_backends_of_torch_compile_run_on_the_device(backend: str) -> None:
    if backend == "qpu" and "qpu" not in torch._dynamo.list_backends():
        pytest.skip("the wheel's entry points are not installed")
    model = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4)).to("qpu").eval()
    )
    x = torch.randn(2, 1, 8, 8).to("qpu")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x).cpu(), model(x).cpu(), rtol=1e-5, atol=1e-5)


def test_model_on_the_device_can_be_exported() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to("qpu").eval()
    x = torch.randn(2, 4).to("qpu")
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x).cpu(), model(x).cpu())


def test_fusion_limits_match_the_kernels() -> None:
    source = inspect.getsource(fusion)
    assert "MOST_ARRAYS, MOST_NUMBERS, MOST_OUTPUTS = 4, 6, 3" in source
    a = torch.ones(3, device="qpu")
    with pytest.raises((RuntimeError, ValueError), match="more than 4 arrays or 6 numbers"):
        torch.ops.torch_qpu.chain([a] * 5, [], "aaaaa", "add 0 1>5")
    with pytest.raises((RuntimeError, ValueError), match="more than 4 arrays or 6 numbers"):
        torch.ops.torch_qpu.chain([a], [1.0] * 7, "annnnnnn", "add 0 1>8")


def test_chains_stay_one_kernel_if_the_batch_size_changes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.relu(x * 2 + y) - 0.5) * x

    compiled = torch.compile(function, backend=fusion.compile_graph)
    for rows in (32, 17, 32, 1, 5):
        a, b = torch.randn(rows, 50).to("qpu"), torch.randn(rows, 50).to("qpu")
        torch_qpu.reset_counters()
        result = compiled(a, b)
        assert {name: count.calls for name, count in torch_qpu.launches().items()} == {"chain": 1}, rows
        torch.testing.assert_close(result.cpu(), function(a.cpu(), b.cpu()), rtol=1e-5, atol=1e-6)


def test_gradients_stay_fused_with_sizes_as_numbers() -> None:
    compiled = torch.compile(lambda x: (torch.tanh(x * x + 1) * 0.5).mean(), backend=fusion.compile_graph)
    counts = []
    for rows in (32, 17, 32):
        leaf = torch.randn(rows, 50).to("qpu").requires_grad_()
        torch_qpu.reset_counters()
        compiled(leaf).backward()
        counts.append(sum(count.calls for count in torch_qpu.launches().values()))
        exact = leaf.detach().cpu().requires_grad_()
        (torch.tanh(exact * exact + 1) * 0.5).mean().backward()
        torch.testing.assert_close(leaf.grad.cpu(), exact.grad, rtol=1e-4, atol=1e-7)
    assert counts[0] == counts[1] == counts[2]


def test_tensors_of_different_sizes_use_separate_chains() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x * 2 + 1)).sum() + torch.relu(y * 3 + 1).sum()

    compiled = torch.compile(function, backend=fusion.compile_graph, dynamic=True)
    for rows in (8, 8, 9):
        a, b = torch.randn(rows, 3).to("qpu"), torch.randn(rows + 1, 3).to("qpu")
        torch.testing.assert_close(compiled(a, b).cpu(), function(a.cpu(), b.cpu()), rtol=1e-5, atol=1e-5)
