"""Compute the key of the torchvision and torchaudio wheels that match an image's torch wheel.

Tasks use the key to look for finished wheels. This code is not in ``build``, because any change to that module causes
the step to run again, and the search for torch does not affect the wheels.
"""

from __future__ import annotations

import dataclasses

from images.flavour import load_suite
from recipes.companions.build import NAME, recipe_key, unfit
from recipes.recipe import load
from recipes.torch import resolve
from toolchain import files
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, PlatformMismatch, WheelUnusable


def key(config: Config) -> str:
    """Return the key for this configuration and the torch wheel of its image.

    Returns an empty string if the image contains neither torchvision nor torchaudio, or if no torch wheel is suitable.
    """
    if not config.image.companions:
        return ""
    any_torch = dataclasses.replace(config, torch=dataclasses.replace(config.torch, required=False))
    try:
        return key_with(config, resolve.resolve(any_torch))
    except (ArtefactDamaged, PlatformMismatch, WheelUnusable):
        return ""


def key_with(config: Config, torch: resolve.Resolution) -> str:
    """Return the key for the torch wheel that was found for the image.

    Returns an empty string if the image contains neither torchvision nor torchaudio, or if no torch wheel is suitable.
    """
    if not config.image.companions or torch.wheel is None or unfit(torch.version):
        return ""
    return recipe_key(load(NAME), config.image.target, load_suite(config.image.suite), files.sha256_of(torch.wheel))
