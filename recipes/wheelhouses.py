"""The wheelhouses: folders with wheels that the user provides."""

from __future__ import annotations

from pathlib import Path

from toolchain.config import ROOT, Config


def wheelhouses(config: Config) -> list[Path]:
    """The configured folders, absolute."""
    return [ROOT / folder for folder in config.torch.wheelhouse]
