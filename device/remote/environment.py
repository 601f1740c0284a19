"""TVM for this PC: installed on first use into the build folder, apart from the project's own environment.

It is large (415 MB) and only this task needs it, so ``.venv`` does not hold it. The versions are those of the optional
group ``remote`` in pyproject.toml; a folder is named after them and appears whole or not at all.
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
    """Where TVM is installed."""

    site: Path

    @property
    def variables(self) -> Mapping[str, str]:
        """What a Python process needs to import TVM and our modules."""
        return {
            "PYTHONPATH": os.pathsep.join([str(self.site), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, module: str, *words: str) -> list[str]:
        """The command line that runs a Python module there."""
        return [sys.executable, "-m", module, *words]


def ready(config: Config) -> TvmEnvironment:
    """Install TVM unless it is there. Raises NetworkUnreachable, WheelUnusable, DiskFull, or CommandFailed."""
    wanted = tvm_server.pins()
    key = hashlib.sha256("\n".join([*wanted, sys.version]).encode()).hexdigest()[:12]
    site = config.build_root / "remote" / f"tvm-{key}"
    if not site.is_dir():
        files.require_space(config.build_root, _NEEDED_MIB, "TVM")
        log = config.build_root / "remote" / "pip.log"
        with files.locked(config.build_root / "remote"):
            if not site.is_dir():
                with progress.step(f"install {wanted[0]} (first use; log: {log})"), files.replacing(site) as aside:
                    _install(wanted, aside, log)
    return TvmEnvironment(site)


def _install(wanted: tuple[str, ...], site: Path, log: Path) -> None:
    def unfound(name: str) -> WheelUnusable:
        return WheelUnusable(
            "TVM cannot be installed",
            expected=f"a wheel of {name} for this machine's Python {sys.version.split()[0]}",
            found="none in the package index",
            fix="TVM has wheels for x86-64 and aarch64 Linux: compile kernels on such a PC",
        )

    words = ["install", "--no-deps", "--only-binary=:all:"]
    run_pip([*words, "--target", site, *wanted], what=", ".join(wanted), log=log, unfound=unfound, limit_s=_LIMIT_S)
