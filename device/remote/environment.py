"""TVM for this PC, installed in the build folder on first use.

It is large (415 MB) and only one task needs it, so it is not part of ``.venv``. The versions are those of the optional
group ``remote`` in pyproject.toml. The folder's name contains their hash, and the folder is created atomically.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.tvm_server import build as tvm_server
from toolchain import files, progress
from toolchain.config import ROOT, Config
from toolchain.errors import WheelUnusable
from wheels.pip import run_pip

_NEEDED_MIB = 1024
_LIMIT_S = 1800.0


@dataclass(frozen=True)
class TvmEnvironment:
    """An installation of TVM."""

    site: Path

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables with which Python can import TVM and this project."""
        return {
            "PYTHONPATH": os.pathsep.join([str(self.site), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, module: str, *words: str) -> list[str]:
        """The command line that runs a Python module."""
        return [sys.executable, "-m", module, *words]


def ready(config: Config) -> TvmEnvironment:
    """Install TVM unless it is installed. Raises NetworkUnreachable, WheelUnusable, DiskFull, or CommandFailed."""
    pins = tvm_server.pins()
    key = hashlib.sha256("\n".join([*pins, sys.version]).encode()).hexdigest()[:12]
    site = config.build_root / "remote" / f"tvm-{key}"
    if not site.is_dir():
        files.require_space(config.build_root, _NEEDED_MIB, "TVM")
        log = config.build_root / "remote" / "pip.log"
        with files.locked(config.build_root / "remote"):
            if not site.is_dir():
                with progress.step(f"install {pins[0]} (first use; log: {log})"), files.replacing(site) as staged:
                    _install(pins, staged, log)
    return TvmEnvironment(site)


def _install(pins: tuple[str, ...], site: Path, log: Path) -> None:
    def not_found(name: str) -> WheelUnusable:
        return WheelUnusable(
            "TVM cannot be installed",
            expected=f"a wheel of {name} for this machine's Python {sys.version.split()[0]}",
            found="none in the package index",
            fix="compile kernels on an x86-64 or aarch64 Linux PC, for which TVM has wheels",
        )

    words = ["install", "--no-deps", "--only-binary=:all:"]
    run_pip([*words, "--target", site, *pins], what=", ".join(pins), log=log, unfound=not_found, limit_s=_LIMIT_S)
