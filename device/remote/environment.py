"""TVM for this PC, installed in the build folder on first use (wheels/for_this_pc.py).

The optional group ``remote`` in pyproject.toml pins the versions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.tvm_server import build as tvm_server
from toolchain.config import ROOT, Config
from wheels import for_this_pc

_NEEDED_MIB = 1024
_TORCHVISION_NEEDED_MIB = 64
_TORCHVISION = ("torchvision==0.28.0", "pillow==13.0.0")
"""torchvision for the pinned PyTorch. Many models are built from torchvision's networks."""


@dataclass(frozen=True)
class TvmEnvironment:
    """An installation of TVM."""

    site: Path
    others: tuple[Path, ...] = ()

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that allow Python to import TVM and this project."""
        return {
            "PYTHONPATH": os.pathsep.join(map(str, [self.site, *self.others, ROOT])),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TVM_USE_RUNTIME_LIB": "0",  # 1 omits the compiler, which TVM's tracker and proxy do not need
        }

    def command(self, *words: str) -> list[str]:
        """The command line that runs this PC's Python with the arguments ``words``."""
        return [sys.executable, *words]


def ready(config: Config) -> TvmEnvironment:
    """Install TVM unless it is already installed.

    Raises NetworkUnreachable, WheelUnusable, DiskFull, or CommandFailed.
    """
    return TvmEnvironment(for_this_pc.installed(config, "tvm", tvm_server.pins(), _NEEDED_MIB))


def ready_for_models(config: Config) -> TvmEnvironment:
    """TVM for this PC, with PyTorch and torchvision to export models. Raises the same errors as ``ready``."""
    tvm = ready(config)
    torchvision = for_this_pc.installed(config, "torchvision", _TORCHVISION, _TORCHVISION_NEEDED_MIB)
    return TvmEnvironment(tvm.site, (for_this_pc.torch(config), torchvision))
