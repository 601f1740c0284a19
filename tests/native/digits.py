"""Train a network on generated images of digits and compare its accuracy on the QPUs and the CPU.

    QPU_BACKEND=emulator python digits.py lenet

trains the network from the same initial weights, once on the CPU and once on the QPUs. QPU_BACKEND can be any libqpu
backend. The program prints both accuracies on unseen images, and the operators that ran on the CPU, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch_qpu
from torch import nn
from torch_qpu import _C

MARGIN = 0.03
"""The amount by which the accuracy on the QPUs may be below that on the CPU."""
EPOCHS = {"perceptron": 4, "lenet": 5}

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
    """Generate noisy 12 x 12 images with a digit at a random position and brightness; return images and digits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [torch.tensor([[float(p) for p in row] for row in glyph.split()]) for glyph in GLYPHS]
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 1, 12, 12, generator=generator) * 0.15
    for image, label in zip(images, labels.tolist(), strict=True):
        y, x = torch.randint(2, 4, (2,), generator=generator).tolist()
        image[0, y : y + 6, x : x + 4] += shapes[label] * (0.8 + 0.4 * torch.rand(1, generator=generator))
    return images, labels


def perceptron() -> nn.Module:
    """Return a network with 144 inputs, 48 hidden units and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 10))


def lenet() -> nn.Module:
    """Return a network of two convolutions, each followed by pooling, and two linear layers."""
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


NETWORKS = {"perceptron": perceptron, "lenet": lenet}


def accuracy(name: str, device: str, epochs: int) -> float:
    """Train a network from fixed initial weights on images in a fixed order; return its accuracy on unseen images."""
    torch.manual_seed(7)
    network = NETWORKS[name]().to(device)
    images, labels = digits(500, seed=1)
    unseen, truth = digits(300, seed=2)
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
        return float((network(unseen.to(device)).argmax(1).cpu() == truth).double().mean())


def compared(name: str, epochs: int) -> dict[str, Any]:
    """Return both accuracies, and the seconds, launches and fallbacks of training and evaluation on the QPUs."""
    on_cpu = accuracy(name, "cpu", epochs)
    torch_qpu.reset_counters()
    began = time.perf_counter()
    on_qpu = accuracy(name, "qpu", epochs)
    return {
        "network": name,
        "epochs": epochs,
        "backend": _C.backend()[0],
        "cpu": on_cpu,
        "qpu": on_qpu,
        "seconds": round(time.perf_counter() - began, 1),
        "launches": sum(count.calls for count in torch_qpu.launches().values()),
        "fallbacks": torch_qpu.fallbacks(),
    }


def main(words: list[str] | None = None) -> int:
    """Print the comparison; return 0 if the accuracy on the QPUs is less than MARGIN below that on the CPU."""
    parser = argparse.ArgumentParser(prog="digits.py", description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--epochs", type=int, help="number of passes over all images")
    options = parser.parse_args(words)
    found = compared(options.network, EPOCHS[options.network] if options.epochs is None else options.epochs)
    print(json.dumps(found, indent=1))
    return 0 if found["qpu"] > found["cpu"] - MARGIN else 1


if __name__ == "__main__":
    sys.exit(main())
