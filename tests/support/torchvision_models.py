"""torchvision networks with random weights for profile-remote, named as MODULE:FUNCTION."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import models

from benchmarks.models.networks import settled


def mobilenet_v2(side: int = 32) -> Any:
    """Return the network and an image, which is small by default."""
    return settled(models.mobilenet_v2()), (torch.randn(1, 3, side, side),)


def resnet18(side: int = 32) -> Any:
    """Return the network and an image, which is small by default."""
    return settled(models.resnet18()), (torch.randn(1, 3, side, side),)


def short_mobilenet_v2() -> Any:
    """Return a network with each kind of block of MobileNetV2, which TVM compiles in a third of the time."""
    network = models.mobilenet_v2(inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 320, 1, 2]])
    return settled(network), (torch.randn(1, 3, 32, 32),)


def large_mobilenet_v2() -> Any:
    return mobilenet_v2(224)


def large_resnet18() -> Any:
    return resnet18(224)
