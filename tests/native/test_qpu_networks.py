"""Tests that networks of common types train on the QPUs as they do on the CPU, with few fallbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch_qpu
from networks import Encoder, Lstm, MobileNetV2, Recurrent, ResNet18, Trained, images, sentences, train
from torch import nn

MOST_FALLBACKS = 3
"""The maximum number of fallbacks in a training step."""
STEPS = 5
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "MobileNetV2": (MobileNetV2, lambda: images(8, 16)),
    "ResNet18": (ResNet18, lambda: images(8, 32)),
    "transformer encoder": (Encoder, lambda: sentences(8, 12)),
    "LSTM classifier": (Lstm, lambda: sentences(8, 8)),
    "LSTM classifier, written out": (Recurrent, lambda: sentences(8, 8)),
}


def compared(name: str, optimizer: Callable[..., torch.optim.Optimizer], steps: int = STEPS) -> tuple[Trained, Trained]:
    make, data = NETWORKS[name]
    torch.manual_seed(1)
    examples = data()
    return train("qpu", make, examples, optimizer, steps), train("cpu", make, examples, optimizer, steps)


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_falls_as_on_the_cpu_with_few_fallbacks(name: str) -> None:
    found, expected = compared(name, functools.partial(torch.optim.Adam, lr=0.01))
    assert found.losses == pytest.approx(expected.losses, rel=5e-3, abs=1e-3)
    assert found.losses[-1] < found.losses[0]
    assert sum(found.fallbacks.values()) <= MOST_FALLBACKS, found.fallbacks
    assert found.launches > 0


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object], int]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, 1),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, 5),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "fused": True}, 1),
    "SGD, fused, to all of it": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True, "fused": True},
        1,
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.01}, 7),
    "Adam, fused": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "fused": True}, 1),
    "Adam, fused, upwards": (torch.optim.Adam, {"lr": 0.01, "maximize": True, "fused": True}, 1),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, 8),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}, 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_launches_once_per_operation(name: str) -> None:
    make, options, most = OPTIMIZERS[name]
    torch.manual_seed(2)
    start = [torch.randn(shape) for shape in ((3, 5), (70,), (1,), (33, 4), ())]
    slopes = [[torch.randn(p.shape) for p in start] for _ in range(4)]
    ends = []
    for device in ("cpu", "qpu"):
        parameters = [nn.Parameter(p.to(device, copy=True)) for p in start]
        optimizer = make(parameters, **options)
        for step in slopes:
            for parameter, slope in zip(parameters, step, strict=True):
                parameter.grad = slope.to(device)
            torch_qpu.reset_counters()
            optimizer.step()
        ends.append([p.detach().cpu() for p in parameters])
    assert torch_qpu.fallbacks() == {}
    assert sum(count.calls for count in torch_qpu.launches().values()) <= most
    for found, expected in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_unsupported_optimizers_run_on_the_cpu() -> None:
    start, slope = torch.randn(9), torch.randn(9)
    ends = []
    for device in ("cpu", "qpu"):
        parameter = nn.Parameter(start.to(device, copy=True))
        optimizer = torch.optim.Adam([parameter], lr=0.1, amsgrad=True, fused=True)
        for _ in range(3):
            parameter.grad = slope.to(device)
            torch_qpu.reset_counters()
            optimizer.step()
        ends.append(parameter.detach().cpu())
    assert torch_qpu.fallbacks() == {"aten::_fused_adam_": 1}
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_lists_with_a_repeated_tensor_run_in_order() -> None:
    a = torch.ones(40, device="qpu")
    torch._foreach_add_([a, a], 1.0)
    assert a.tolist() == [3.0] * 40
    b = torch.arange(40.0).to("qpu")
    torch._foreach_mul_([b[:30], b[10:]], 2.0)
    assert b.tolist() == [i * (4.0 if 10 <= i < 30 else 2.0) for i in range(40)]


def test_unsupported_lists_run_on_the_cpu() -> None:
    whole, part = torch.arange(6).to("qpu"), torch.ones(4, 3, device="qpu").t()
    found = torch._foreach_add([whole, part], 2)
    assert found[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert torch.equal(found[1].cpu(), torch.full((3, 4), 3.0))
    with pytest.raises(RuntimeError, match=r"same|lengths|size"):
        torch._foreach_add([part], [part, part])
    assert [t.tolist() for t in torch._foreach_mul([torch.ones(2, device="qpu")] * 2, [2, 3])] == [[2, 2], [3, 3]]


def test_gradient_clipping_runs_on_the_qpus() -> None:
    norms = []
    for device in ("cpu", "qpu"):
        parameters = [nn.Parameter(torch.zeros(n, device=device)) for n in (5, 40)]
        for p in parameters:
            p.grad = torch.linspace(-3, 3, p.numel()).to(device)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        assert sum(p.grad.square().sum().item() for p in parameters) == pytest.approx(1, rel=1e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_clipping_many_gradients_runs_on_the_qpus() -> None:
    parameters = [nn.Parameter(torch.zeros(2, device="qpu")) for _ in range(300)]
    for p in parameters:
        p.grad = torch.ones(2, device="qpu")
    torch_qpu.reset_counters()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert torch_qpu.fallbacks() == {}
    assert norm.item() == pytest.approx(600**0.5, rel=1e-5)


def test_dropout_mask_matches_the_cpu() -> None:
    results = []
    for device in ("cpu", "qpu"):
        torch.manual_seed(9)
        x = torch.linspace(1, 2, 60).reshape(4, 15).to(device).requires_grad_()
        torch_qpu.reset_counters()
        y = nn.functional.dropout(x, 0.3)
        y.backward(torch.ones_like(y))
        results.append((y.detach().cpu(), x.grad.cpu()))
    assert torch_qpu.fallbacks() == {}
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
