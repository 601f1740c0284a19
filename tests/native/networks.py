"""Small networks of common types as plain modules, and a function that trains them on either device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_qpu
from torch import nn
from torch.nn import functional

CLASSES = 4
PAD = 0
"""The number of the word that fills sequences up to the batch's length."""


class Inverted(nn.Module):  # type: ignore[misc]
    """MobileNetV2's block: a wider layer, a depthwise convolution, and a narrower layer."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int) -> None:
        super().__init__()
        hidden = inputs * factor
        self.adds = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *((nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()) if factor > 1 else ()),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of the same size or, if the stride is 2, of half the size."""
        found: torch.Tensor = self.layers(x)
        return x + found if self.adds else found


class MobileNetV2(nn.Module):  # type: ignore[misc]
    """A MobileNetV2 with all of its block types, but with fewer channels and repeats."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Inverted(4, 4, 1, 1), Inverted(4, 6, 2, 3), Inverted(6, 6, 1, 3), Inverted(6, 8, 2, 3)]
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU6(),
            *blocks,
            nn.Conv2d(8, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [batch, 3, height, width] to [batch, CLASSES]."""
        x = functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1)
        found: torch.Tensor = self.classifier(x)
        return found


class Residual(nn.Module):  # type: ignore[misc]
    """ResNet18's block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.short = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of the same size or, if the stride is 2, of half the size."""
        y = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(y)) + self.short(x), inplace=True)


class ResNet18(nn.Module):  # type: ignore[misc]
    """A ResNet18 with all of its eighteen layers, but with fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        widths = (4, 4, 6, 8, 10)
        blocks: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            blocks += [Residual(inputs, outputs, 1 if i == 0 else 2), Residual(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [batch, 3, height, width] to [batch, CLASSES]."""
        found: torch.Tensor = self.classifier(self.pool(self.blocks(self.stem(x))).flatten(1))
        return found


class Encoder(nn.Module):  # type: ignore[misc]
    """A transformer encoder over words, which ignores the padding PAD."""

    def __init__(self, words: int = 20, width: int = 32, heads: int = 4, layers: int = 2, length: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words [batch, length] to [batch, CLASSES]."""
        y = self.layers(self.words(x) + self.places, src_key_padding_mask=x == PAD)
        found: torch.Tensor = self.classifier(y.mean(1))
        return found


class Recurrent(nn.Module):  # type: ignore[misc]
    """A classifier with an LSTM whose four gates and two states are computed explicitly."""

    def __init__(self, words: int = 20, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.words = nn.Embedding(words, width)
        self.of_input, self.of_state = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden)
        self.classifier = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words [batch, length] to [batch, CLASSES]."""
        gates = self.of_input(self.words(x))
        state = cell = gates.new_zeros(len(x), self.hidden)
        states = []
        for step in gates.unbind(1):
            enter, keep, new, leave = (step + self.of_state(state)).chunk(4, 1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(state)
        found: torch.Tensor = self.classifier(torch.stack(states, 1).amax(1))
        return found


class Lstm(nn.Module):  # type: ignore[misc]
    """A classifier like Recurrent, but with ``nn.LSTM``."""

    def __init__(self, words: int = 20, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cells = nn.LSTM(width, hidden, batch_first=True)
        self.classifier = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words [batch, length] to [batch, CLASSES]."""
        found: torch.Tensor = self.classifier(self.cells(self.words(x))[0].mean(1))
        return found


@dataclass(frozen=True)
class Trained:
    """The results of some training steps."""

    losses: list[float]
    launches: int
    """The launches in the last step."""
    fallbacks: dict[str, int]
    """The fallbacks in the last step."""
    correct: float
    """The fraction of the examples that the network classifies correctly at the end."""


def images(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate images with a bright quadrant, whose position is the class."""
    classes = torch.arange(count) % CLASSES
    x = torch.randn(count, 3, size, size) * 0.5
    half = size // 2
    for i, c in enumerate(classes.tolist()):
        x[i, :, c // 2 * half :, c % 2 * half :][:, :half, :half] += 1.5
    return x, classes


def sentences(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate sequences of word numbers with padding. The first word, one of four, determines the class."""
    x = torch.randint(5, 20, (count, length))
    x[torch.arange(length) >= torch.randint(length // 2, length + 1, (count, 1))] = PAD
    classes = torch.arange(count) % CLASSES
    x[:, 0] = classes + 1
    return x, classes


def train(
    device: str,
    make: Callable[[], nn.Module],
    data: tuple[torch.Tensor, torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    steps: int,
) -> Trained:
    """Train a network, starting from the same weights on each device."""
    torch.manual_seed(20261125)
    network = make().to(device)
    chosen = optimizer(network.parameters())
    x, y = (t.to(device) for t in data)
    losses = []
    for _ in range(steps):
        torch_qpu.reset_counters()
        chosen.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        chosen.step()
        launches = sum(count.calls for count in torch_qpu.launches().values())
        fallbacks = torch_qpu.fallbacks()
        losses.append(loss.item())
    network.eval()
    with torch.no_grad():
        correct = (network(x).argmax(1) == y).float().mean().item()
    return Trained(losses, launches, fallbacks, correct)
