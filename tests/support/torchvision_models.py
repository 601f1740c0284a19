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


def large_mobilenet_v2() -> Any:
    return mobilenet_v2(224)


def large_resnet18() -> Any:
    return resnet18(224)
