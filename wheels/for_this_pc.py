"""Packages from PyPI for this PC, installed in the build folder on first use.

The packages are large (TVM 415 MB, PyTorch 700 MB) and only some tasks need them, so they are not part of ``.venv``.
Each set of pinned versions has a folder, whose name contains a hash of the versions. The folder is created atomically.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from toolchain import files, leftovers, process, progress
from toolchain.config import Config
from toolchain.errors import CommandFailed, WheelUnusable
from wheels.pip import run_pip

TORCH = "torch==2.13.0"
TORCH_NEEDS = (
    "filelock==4.2.11",
    "fsspec==2026.9.0",
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "sympy==1.14.0",
    "typing-extensions==4.16.0",
)
"""The packages that a CPU build of torch imports, directly or indirectly."""
_TORCH_MIB = 1536
_CUDA_MIB = 8192
_LIMIT_S = 3600.0
_LIBRARY_MISSING = "cannot open shared object file"
"""Part of the dynamic loader's message about a missing library."""


def torch(config: Config) -> Path:
    """Return a folder with PyTorch and its dependencies. Raises the errors of ``installed``.

    pip prefers a CPU build, if its index offers one. PyPI has only CUDA builds for Linux, which cannot be imported
    without the CUDA libraries. These libraries are then installed as well.
    """
    pins = (TORCH, *TORCH_NEEDS)

    def install(site: Path, log: Path) -> None:
        _install(["--no-deps", *pins], site, log)
        try:
            _import_torch(site, log)
        except CommandFailed as fault:
            if _LIBRARY_MISSING not in fault.tail:
                raise
            progress.say("this build of PyTorch requires CUDA libraries; installing them (several GB)")
            files.remove(site)
            files.require_space(site, _CUDA_MIB, f"{TORCH} with the CUDA libraries")
            _install(pins, site, log)
            _import_torch(site, log)

    return _once(config, "torch", pins, _TORCH_MIB, install)


def installed(config: Config, name: str, pins: Sequence[str], needed_mib: int) -> Path:
    """Return a folder with exactly these packages; install them unless they are already installed.

    Raises NetworkUnreachable, WheelUnusable, DiskFull, or CommandFailed.
    """
    return _once(config, name, pins, needed_mib, lambda site, log: _install(["--no-deps", *pins], site, log))


def _once(
    config: Config, name: str, pins: Sequence[str], needed_mib: int, install: Callable[[Path, Path], None]
) -> Path:
    key = hashlib.sha256("\n".join([*pins, sys.version]).encode()).hexdigest()[:12]
    folder = config.build_root / "packages"
    site = folder / f"{name}-{key}"
    if not site.is_dir():
        log = folder / "pip.log"
        with files.locked(folder):
            leftovers.clear(files.unfinished_in(folder), folder.parent)
            if not site.is_dir():
                files.require_space(folder, needed_mib, pins[0])
                with progress.step(f"install {pins[0]} (first use; log: {log})"), files.replacing(site) as staged:
                    install(staged, log)
    return site


def _install(words: Sequence[str], site: Path, log: Path) -> None:
    named = next(word for word in words if not word.startswith("-"))
    # pip unpacks the wheels in TMPDIR. /tmp may be too small, and after Ctrl-C, pip would leave its files there.
    with files.scratch_folder(site.parent, "pip") as scratch:
        run_pip(
            ["install", "--only-binary=:all:", "--target", site, *words],
            what=f"{named} for Python {sys.version.split()[0]}",
            log=log,
            fix="run the task on an x86-64 or aarch64 Linux PC, for which TVM and PyTorch publish wheels",
            missing=WheelUnusable,
            environment={"TMPDIR": str(scratch)},
            limit_s=_LIMIT_S,
        )


def _import_torch(site: Path, log: Path) -> None:
    process.run(
        [sys.executable, "-c", "import torch"],
        env={"PYTHONPATH": str(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        limit_s=600,
        log=log,
        fix=f"correct the error above (complete log: {log}), then run the task again",
    )
