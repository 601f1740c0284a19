"""TVM for this PC, installed in the build folder on first use.

TVM is large (415 MB) and only one task needs it, so it is not part of ``.venv``. The optional group ``remote`` in
pyproject.toml pins the versions. The name of TVM's folder contains a hash of the pinned versions, and the folder is
created atomically.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flow import native_environment
from recipes.tvm_server import build as tvm_server
from toolchain import files, progress
from toolchain.config import ROOT, Config
from toolchain.errors import WheelUnusable
from wheels.pip import run_pip

_NEEDED_MIB = 1024
_TORCH_NEEDED_MIB = 1536
_SYMPY_NEEDS = "mpmath==1.3.0"
"""SymPy, which torch.export uses, imports this package."""
_TORCHVISION = ("torchvision==0.28.0", "pillow==13.0.0")
"""torchvision for the pinned PyTorch. Many models are built from torchvision's networks."""
_LIMIT_S = 1800.0


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
    return TvmEnvironment(_installed(config, "tvm", tvm_server.pins(), _NEEDED_MIB))


def ready_for_models(config: Config) -> TvmEnvironment:
    """TVM for this PC, with PyTorch and torchvision to export models. Raises the same errors as ``ready``."""
    tvm = ready(config)
    pins = (native_environment.TORCH, *native_environment.TORCH_NEEDS, _SYMPY_NEEDS, *_TORCHVISION)
    torch = _installed(config, "torch", pins, _TORCH_NEEDED_MIB)
    return TvmEnvironment(tvm.site, (torch,))


def _installed(config: Config, name: str, pins: tuple[str, ...], needed_mib: int) -> Path:
    key = hashlib.sha256("\n".join([*pins, sys.version]).encode()).hexdigest()[:12]
    site = config.build_root / "remote" / f"{name}-{key}"
    if not site.is_dir():
        files.require_space(config.build_root, needed_mib, pins[0])
        log = config.build_root / "remote" / "pip.log"
        with files.locked(config.build_root / "remote"):
            if not site.is_dir():
                with progress.step(f"install {pins[0]} (first use; log: {log})"), files.replacing(site) as staged:
                    _install(pins, staged, log)
    return site


def _install(pins: tuple[str, ...], site: Path, log: Path) -> None:
    run_pip(
        ["install", "--no-deps", "--only-binary=:all:", "--target", site, *pins],
        what=f"{pins[0]} for Python {sys.version.split()[0]}",
        log=log,
        fix="run the task on an x86-64 or aarch64 Linux PC, for which TVM and PyTorch publish wheels",
        missing=WheelUnusable,
        limit_s=_LIMIT_S,
    )
