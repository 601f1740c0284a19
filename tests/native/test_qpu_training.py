"""Networks that learn on the QPUs what they learn on the CPU: digits, drawn here."""

from __future__ import annotations

import pytest
import torch
import torch_qpu
from torch import nn

MARGIN = 0.03
"""By which the accuracy on the QPUs may be below the CPU's."""

GLYPHS = (
    "0110 1001 1001 1001 1001 0110",
    "0010 0110 0010 0010 0010 0111",
    "0110 1001 0001 0010 0100 1111",
    "1110 0001 0110 0001 0001 1110",
    "1001 1001 1111 0001 0001 0001",
    "1111 1000 1110 0001 0001 1110",
    "0110 1000 1110 1001 1001 0110",
    "1111 0001 0010 0010 0100 0100",
    "0110 1001 0110 1001 1001 0110",
    "0110 1001 0111 0001 0001 0110",
)


def digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 12 x 12 pixels with a digit somewhere, of some brightness, in noise; and which digit it is."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [torch.tensor([[float(p) for p in row] for row in glyph.split()]) for glyph in GLYPHS]
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 1, 12, 12, generator=generator) * 0.15
    for image, label in zip(images, labels.tolist(), strict=True):
        y, x = torch.randint(2, 4, (2,), generator=generator).tolist()
        image[0, y : y + 6, x : x + 4] += shapes[label] * (0.8 + 0.4 * torch.rand(1, generator=generator))
    return images, labels


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def accuracy(network: nn.Module, device: str, epochs: int) -> float:
    """Of a network trained from the same start, in the same order, on unseen images."""
    images, labels = digits(500, seed=1)
    unseen, truth = digits(300, seed=2)
    network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=8e-3)
    order = torch.Generator().manual_seed(3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(25):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[batch].to(device)), labels[batch].to(device))
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return (network(unseen.to(device)).argmax(1).cpu() == truth).double().mean().item()


@pytest.mark.parametrize(("name", "epochs"), [("perceptron", 4), ("lenet", 5)])
def test_a_network_learns_digits_as_well_as_on_the_cpu(name: str, epochs: int) -> None:
    found = {}
    for device in ("cpu", "qpu"):
        torch.manual_seed(7)
        torch_qpu.reset_counters()
        network = perceptron() if name == "perceptron" else lenet()
        found[device] = accuracy(network, device, epochs)
    assert torch_qpu.launches()["mm"].calls > 0
    assert found["cpu"] > 0.8
    assert found["qpu"] > found["cpu"] - MARGIN, found
