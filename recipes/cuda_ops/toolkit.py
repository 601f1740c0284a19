"""Find a CUDA toolkit of the pinned release: in a configured folder, on this system, or in packages from PyPI.

Only the parts that a compilation needs are required: nvcc with its programs, the headers, and the static runtime
library for the wheel's machine. Neither a driver nor a GPU is needed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.recipe import Recipe
from toolchain import files, process, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed, NetworkUnreachable, UserError
from wheels.pip import run_pip

PYPI = "pypi"
"""The value of ``cuda.toolkit`` that selects the packages from PyPI, even if the system has a toolkit."""
SYSTEM = Path("/usr/local/cuda")
_NEEDED = ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/cuda_bf16.h")
_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """The folder of nvcc and its programs, and the folder of the runtime library for the wheel's machine."""

    home: Path
    runtime: Path
    """Folder with libcudart_static.a."""
    origin: str
    """Description of the toolkit's origin, for manifests and messages."""


def obtain(recipe: Recipe, config: Config, target: Architecture) -> Toolkit:
    """Find the toolkit, or fetch it. Raises UserError or NetworkUnreachable."""
    home, origin = _home(recipe, config)
    if target == host_architecture():
        runtime = _runtime_in(home)
        if runtime is None:
            raise _unusable(recipe, home, "no libcudart_static.a")
    else:
        runtime = _foreign_runtime(recipe, config, target)
    return Toolkit(home=home, runtime=runtime, origin=origin)


def identity(recipe: Recipe, config: Config) -> str:
    """Return a description of the toolkit as a step input, without fetching the toolkit."""
    if config.cuda.toolkit not in ("", PYPI):
        return f"{config.cuda.toolkit} {release_of(ROOT / config.cuda.toolkit)}"
    found = None if config.cuda.toolkit else _system(recipe)
    return f"{found} {recipe.settings['release']}" if found else f"PyPI {recipe.settings['packages']}"


def release_of(home: Path) -> str:
    """Return the release that a toolkit's nvcc reports, such as ``13.0``; empty if nvcc does not run."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return ""
    try:
        said = process.output_of([nvcc, "--version"])
    except CommandFailed:
        return ""
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else ""


def fault_of(recipe: Recipe, home: Path) -> str:
    """Return the reason why a folder cannot be used as the toolkit; empty if it can."""
    missing = [name for name in _NEEDED if not (home / name).is_file()]
    if missing:
        return f"no {', '.join(missing)}"
    wanted, found = recipe.settings["release"], release_of(home)
    return "" if found == wanted else f"release {found or 'unknown'}"


def _home(recipe: Recipe, config: Config) -> tuple[Path, str]:
    if config.cuda.toolkit not in ("", PYPI):
        home = ROOT / config.cuda.toolkit
        if fault := fault_of(recipe, home):
            raise _unusable(recipe, home, fault)
        return home.resolve(), f"CUDA {recipe.settings['release']} at {home}"
    if not config.cuda.toolkit and (system := _system(recipe)) is not None:
        return system.resolve(), f"CUDA {recipe.settings['release']} on this system"
    folder = config.build_root / "cuda" / f"toolkit-{recipe.settings['release']}"
    home = folder / "nvidia" / f"cu{recipe.settings['release'].partition('.')[0]}"
    if fault_of(recipe, home):
        _install(recipe.settings["packages"].split(), folder, ())
        if fault := fault_of(recipe, home):
            raise _unusable(recipe, home, fault)
    return home, f"CUDA {recipe.settings['release']} from PyPI"


def _system(recipe: Recipe) -> Path | None:
    for home in (os.environ.get("CUDA_HOME", ""), str(SYSTEM)):
        if home and not fault_of(recipe, Path(home)) and _runtime_in(Path(home)) is not None:
            return Path(home)
    return None


def _runtime_in(home: Path) -> Path | None:
    for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (home / name / "libcudart_static.a").is_file():
            return (home / name).resolve()
    return None


def _foreign_runtime(recipe: Recipe, config: Config, target: Architecture) -> Path:
    folder = config.build_root / "cuda" / f"runtime-{target.debian}-{recipe.settings['release']}"
    home = folder / "nvidia" / f"cu{recipe.settings['release'].partition('.')[0]}"
    if _runtime_in(home) is None:
        machine = target.wheel_platform.removeprefix("linux_")
        platforms = [f"--platform=manylinux_2_{glibc}_{machine}" for glibc in (17, 27, 28)]
        _install([recipe.settings["runtime"]], folder, ("--only-binary=:all:", *platforms))
    found = _runtime_in(home)
    if found is None:
        raise _unusable(recipe, home, f"no libcudart_static.a for {target.debian}")
    return found


def _install(packages: list[str], folder: Path, options: tuple[str, ...]) -> None:
    """Install wheels into a folder, which is created only on success."""
    files.require_space(folder.parent, 600, "CUDA's compiler")
    with files.scratch_folder(folder.parent, folder.name) as scratch, progress.step(f"fetch {' '.join(packages)}"):
        made = scratch / "made"
        run_pip(
            ["install", "--quiet", "--no-deps", "--no-compile", f"--target={made}", *options, *packages],
            what="CUDA's compiler",
            log=folder.parent / "pip.log",
            fix="set another index in pip.conf, or set cuda.toolkit to the folder of a toolkit",
            missing=NetworkUnreachable,
            limit_s=_LIMIT_S,
        )
        files.remove(folder)
        made.rename(folder)


def _unusable(recipe: Recipe, home: Path, found: str) -> UserError:
    return UserError(
        f"the wheel cannot be built with the CUDA toolkit in {home}",
        expected=f"CUDA release {recipe.settings['release']} with {', '.join(_NEEDED)} and libcudart_static.a",
        found=found,
        fix="set cuda.toolkit to the folder of a complete toolkit of this release, or to pypi to fetch one",
    )
