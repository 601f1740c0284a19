"""Models with random weights: a small CNN, an LSTM, a transformer layer, MobileNetV2 and ResNet18.

``profile-remote --model benchmarks.models.networks:cnn`` compiles one of the models. MobileNetV2 and ResNet18 have the
same layers and numbers of parameters as torchvision's models. These two models are defined here because torch.nn does
not contain them. In these networks, FloatFunctional modules compute the sums, so that eager quantization can replace
these modules (``benchmarks/cpu/workloads.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CLASSES = 1000
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""MobileNetV2's stages: expansion factor, output channels, number of blocks, stride of the first block."""


def _convolution(given: int, made: int, side: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(given, made, side, stride, side // 2, groups=groups, bias=False),
        nn.BatchNorm2d(made),
    ]


class Cnn(nn.Module):  # type: ignore[misc]
    """A network with convolutions, batch normalisation, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3)
        self.classifier = nn.Linear(16 * 6 * 6, 10)

    def forward(self, image: Any) -> Any:
        """Return the probabilities."""
        x = torch.max_pool2d(torch.relu(self.norm(self.first(image))), 2)
        return torch.softmax(self.classifier(torch.relu(self.second(x)).flatten(1)), 1)


class Lstm(nn.Module):  # type: ignore[misc]
    """An LSTM that returns its linear head's result for the last step (selected by a negative index) and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, series: Any) -> Any:
        """Return the head's result for the last step, and the state."""
        y, (state, _) = self.lstm(series)
        return self.head(y[:, -1]), state


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """A block that expands the channels, filters each one separately, and combines them into the output channels."""

    def __init__(self, given: int, made: int, stride: int, expansion: int, activation: type[nn.Module]) -> None:
        super().__init__()
        hidden = given * expansion
        expand = [*_convolution(given, hidden, 1), activation()] if expansion > 1 else []
        depthwise = [*_convolution(hidden, hidden, 3, stride=stride, groups=hidden), activation()]
        self.layers = nn.Sequential(*expand, *depthwise, *_convolution(hidden, made, 1))
        self.sum = nn.quantized.FloatFunctional() if stride == 1 and given == made else None

    def forward(self, x: Any) -> Any:
        """Return the output of the layers, to which the input is added if it has the same shape."""
        y = self.layers(x)
        return self.sum.add(x, y) if self.sum else y


class BasicBlock(nn.Module):  # type: ignore[misc]
    """A block of two convolutions and a shortcut."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        first = _convolution(given, made, 3, stride=stride)
        self.layers = nn.Sequential(*first, nn.ReLU(), *_convolution(made, made, 3))
        same = stride == 1 and given == made
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(given, made, 1, stride=stride))
        self.sum = nn.quantized.FloatFunctional()

    def forward(self, x: Any) -> Any:
        """Return the ReLU of the sum of the convolutions' output and the shortcut."""
        return self.sum.add_relu(self.layers(x), self.shortcut(x))


def settled(network: Any) -> Any:
    """Set the running statistics of the batch normalisation layers to those of random images.

    With the initial statistics, all outputs of MobileNetV2 with random weights are below 1e-8.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(torch.randn(16, 3, 64, 64))
    return network


def unsettled_mobilenet_v2(activation: type[nn.Module] = nn.ReLU6) -> Any:
    """Return MobileNetV2 (Sandler et al., 2018), which has 3.5 million parameters."""
    layers: list[nn.Module] = [*_convolution(3, 32, 3, stride=2), activation()]
    channels = 32
    for expansion, made, blocks, stride in STAGES:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, made, stride if block == 0 else 1, expansion, activation))
            channels = made
    layers += [*_convolution(channels, 1280, 1), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, CLASSES))


def unsettled_resnet18() -> Any:
    """Return ResNet18 (He et al., 2015), which has 11.7 million parameters."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for made, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(channels, made, stride), BasicBlock(made, made, 1)]
        channels = made
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def mobilenet_v2(side: int = 224) -> Any:
    """Return MobileNetV2, and a random image of ``side``×``side`` pixels as its input."""
    return settled(unsettled_mobilenet_v2()), (torch.randn(1, 3, side, side),)


def resnet18(side: int = 224) -> Any:
    """Return ResNet18, and a random image of ``side``×``side`` pixels as its input."""
    return settled(unsettled_resnet18()), (torch.randn(1, 3, side, side),)


def cnn() -> Any:
    """Return the CNN, and a random image of 16×16 pixels as its input."""
    return Cnn(), (torch.randn(1, 1, 16, 16),)


def lstm() -> Any:
    """Return the LSTM, and a random series of 12 steps as its input."""
    return Lstm(), (torch.randn(1, 12, 16),)


def transformer() -> Any:
    """Return a transformer encoder layer, and a random sequence of 10 steps as its input."""
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.randn(1, 10, 32),)


def small_mobilenet_v2() -> Any:
    """Return MobileNetV2, and a random image of 32×32 pixels as its input."""
    return mobilenet_v2(32)


def small_resnet18() -> Any:
    """Return ResNet18, and a random image of 32×32 pixels as its input."""
    return resnet18(32)
