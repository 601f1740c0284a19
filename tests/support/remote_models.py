"""Models for profile-remote: MODULE:FUNCTION names one; each returns a module and its example inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Cnn(nn.Module):
    """Convolutions, a batch normalisation, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3)
        self.classifier = nn.Linear(16 * 6 * 6, 10)

    def forward(self, image: Any) -> Any:
        """The probabilities."""
        x = torch.max_pool2d(torch.relu(self.norm(self.first(image))), 2)
        return torch.softmax(self.classifier(torch.relu(self.second(x)).flatten(1)), 1)


class Lstm(nn.Module):
    """Two outputs; the first one uses a negative index."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, series: Any) -> Any:
        """The head's result for the last step, and the state."""
        y, (state, _) = self.lstm(series)
        return self.head(y[:, -1]), state


class Bessel(nn.Module):
    """An operator that TVM's importer lacks."""

    def forward(self, x: Any) -> Any:
        """The Bessel function."""
        return torch.special.bessel_j0(x)


def cnn() -> Any:
    return Cnn(), (torch.randn(1, 1, 16, 16),)


def lstm() -> Any:
    return Lstm(), (torch.randn(1, 12, 16),)


def transformer() -> Any:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.randn(1, 10, 32),)


def same() -> Any:
    """Integers, and an output that is the input."""

    class Same(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1, x

    return Same(), (torch.arange(6, dtype=torch.int64).reshape(2, 3),)


def unsupported() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Bessel()), (torch.randn(2, 4),)


def no_inputs() -> Any:
    return nn.Linear(4, 4)
