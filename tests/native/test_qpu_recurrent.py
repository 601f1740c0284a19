"""Tests of nn.LSTM, nn.GRU and their cells on the QPUs, compared with the CPU in float64.

The bound applies to the errors of results and gradients, relative to each tensor's largest element.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_qpu
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BOUND = 2e-5

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261125)


def outcome(
    make: Callable[[], nn.Module], inputs: list[torch.Tensor], device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the results, and the gradients of their weighted sum with respect to inputs and parameters."""
    torch.manual_seed(1)
    module = make().to(device, dtype)
    leaves = [t.to(device, dtype).requires_grad_() for t in inputs]
    state: tuple[torch.Tensor, ...] = tuple(leaves[1:])
    found = module(leaves[0], *((state if len(state) > 1 else state[0],) if state else ()))
    results = flat(found)
    loss = sum((r * torch.linspace(-1, 1, r.numel()).view(r.shape).to(r)).sum() for r in results)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    made = [*results, *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())]
    return [t.detach().cpu().double() for t in made if t is not None]


def flat(found: object) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    assert isinstance(found, tuple)
    return [t for part in found for t in flat(part)]


def assert_close(make: Callable[[], nn.Module], *inputs: torch.Tensor) -> None:
    expected = outcome(make, list(inputs), "cpu", torch.float64)
    found = outcome(make, list(inputs), "qpu", torch.float32)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max().item() <= BOUND * max(theirs.abs().max().item(), 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(5, 7),
    "lstm of two layers, both ways": lambda: nn.LSTM(5, 17, 2, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(5, 16, bias=False),
    "lstm with projections": lambda: nn.LSTM(5, 9, proj_size=4),
    "lstm of one": lambda: nn.LSTM(5, 1),
    "gru": lambda: nn.GRU(5, 7),
    "gru of two layers, both ways": lambda: nn.GRU(5, 17, 2, bidirectional=True),
    "gru without biases": lambda: nn.GRU(5, 16, bias=False),
    "rnn": lambda: nn.RNN(5, 7),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_and_their_gradients_match_the_cpu(name: str) -> None:
    assert_close(NETWORKS[name], torch.randn(3, 4, 5))
    fallbacks = {name for name in torch_qpu.fallbacks() if "thnn" in name}
    assert fallbacks == set(), "cells must run on the QPUs"


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize("size", [(1, 1), (13, 15), (4, 16), (3, 33), (30, 70)], ids=str)
def test_cells_of_any_size(size: tuple[int, int], bias: bool) -> None:
    rows, columns = size
    x, h, c = torch.randn(rows, 6), torch.randn(rows, columns), torch.randn(rows, columns)
    torch_qpu.reset_counters()
    assert_close(lambda: nn.LSTMCell(6, columns, bias=bias), x, h, c)
    assert_close(lambda: nn.GRUCell(6, columns, bias=bias), x, h)
    assert torch_qpu.fallbacks() == {}
    launched = {name: count.calls for name, count in torch_qpu.launches().items() if "cell" in name}
    assert launched == {"lstm_cell": 1, "lstm_cell_backward": 1, "gru_cell": 1, "gru_cell_backward": 1}


@pytest.mark.parametrize("count", [1, 5, 12])
def test_cells_do_not_depend_on_the_number_of_qpus(count: int) -> None:
    gates, state = torch.randn(7, 4 * 37).to("qpu"), torch.randn(7, 37).to("qpu")
    expected = torch.ops.aten._thnn_fused_lstm_cell(gates, gates, state)
    torch_qpu.set_qpus(count)
    try:
        found = torch.ops.aten._thnn_fused_lstm_cell(gates, gates, state)
    finally:
        torch_qpu.set_qpus(0)
    assert all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in zip(found, expected, strict=True))


def test_gradient_from_a_single_cell_result() -> None:
    for index in (0, 1):
        grads = []
        for device in ("cpu", "qpu"):
            torch.manual_seed(2)
            cell = nn.LSTMCell(3, 5).to(device)
            x = torch.linspace(-1, 1, 12).view(4, 3).to(device).requires_grad_()
            cell(x)[index].sum().backward()
            grads.append(x.grad.cpu())
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell], ids=["lstm", "gru"])
def test_cells_have_second_derivatives(kind: type[nn.Module]) -> None:
    found = []
    for device in ("cpu", "qpu"):
        torch.manual_seed(3)
        cell = kind(3, 4).to(device)
        x = torch.linspace(-1, 1, 6).view(2, 3).to(device).requires_grad_()
        (first,) = torch.autograd.grad(flat(cell(x))[0].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0].cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_other_dtypes_match_the_cpu(kind: type[nn.Module], dtype: torch.dtype) -> None:
    torch_qpu.reset_counters()
    found = outcome(lambda: kind(3, 4), [torch.randn(2, 3, 3)], "qpu", dtype)
    assert any("thnn" in name for name in torch_qpu.fallbacks())
    assert not any("cell" in name for name in torch_qpu.launches())
    torch.manual_seed(20261125)
    expected = outcome(lambda: kind(3, 4), [torch.randn(2, 3, 3)], "cpu", torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_packed_sequences() -> None:
    lengths = torch.tensor([4, 2, 1])
    outcomes = []
    for device in ("cpu", "qpu"):
        torch.manual_seed(4)
        network = nn.LSTM(3, 5, batch_first=True).to(device)
        x = torch.linspace(-1, 1, 36).view(3, 4, 3).to(device)
        packed, (h, _) = network(pack_padded_sequence(x, lengths, batch_first=True))
        padded, found = pad_packed_sequence(packed, batch_first=True)
        assert torch.equal(found, lengths)
        outcomes.append((padded.detach().cpu(), h.detach().cpu()))
    for ours, theirs in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_cells_with_wrong_shapes_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="input has inconsistent"):
        nn.LSTMCell(3, 4).to("qpu")(torch.ones(2, 5, device="qpu"))
    gates = torch.ones(2, 12, device="qpu")
    with pytest.raises(RuntimeError, match="both biases"):
        torch.ops.aten._thnn_fused_gru_cell(gates, gates, gates[:, :4], gates[0], None)


def test_nan_in_a_gate_reaches_the_result() -> None:
    for name, gates in (("lstm", 4), ("gru", 3)):
        operator = getattr(torch.ops.aten, f"_thnn_fused_{name}_cell")
        for gate in range(gates):
            values = torch.zeros(2, gates * 3)
            values[1, gate * 3 + 2] = float("nan")
            hy = operator(values.to("qpu"), torch.zeros(2, gates * 3).to("qpu"), torch.ones(2, 3).to("qpu"))[0].cpu()
            assert not hy[1, 2].isfinite(), (name, gate)
            assert hy.isfinite().sum() == 5


def test_nan_in_the_state_that_a_cell_keeps_stays_nan() -> None:
    x, state, broken = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 4)
    broken[0, 1] = float("nan")
    lstm, gru = nn.LSTMCell(3, 4).to("qpu"), nn.GRUCell(3, 4).to("qpu")
    for result in lstm(x.to("qpu"), (state.to("qpu"), broken.to("qpu"))):
        assert torch.equal(result.cpu().isnan(), broken.isnan())
    assert torch.equal(gru(x.to("qpu"), broken.to("qpu")).cpu().isnan(), broken.isnan())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_sequence_classifier_learns_as_on_the_cpu(kind: type[nn.Module]) -> None:
    """The network learns which half of a sequence has the larger sum."""
    x = torch.randn(64, 6, 1)
    y = (x[:, :3].sum((1, 2)) > x[:, 3:].sum((1, 2))).long()
    right = {}
    for device in ("cpu", "qpu"):
        torch.manual_seed(5)
        network, head = kind(1, 8, batch_first=True).to(device), nn.Linear(8, 2).to(device)
        optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=0.05)
        there, classes = x.to(device), y.to(device)
        for _ in range(25):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(network(there)[0][:, -1]), classes).backward()
            optimizer.step()
        right[device] = (head(network(there)[0][:, -1]).argmax(1).cpu() == y).float().mean().item()
    assert right["cpu"] > 0.8
    assert right["qpu"] > right["cpu"] - 0.05
