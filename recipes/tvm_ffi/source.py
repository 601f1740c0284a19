"""Fetch apache-tvm-ffi's source archive and its build tools from the configured package index.

pip fetches both with this PC's settings (indices, proxies, certificates, folders of wheels). The archive's SHA-256 is
pinned; pip verifies it, and it is verified again before each use.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from images.flavour import Suite
from recipes.recipe import Recipe
from toolchain import files, progress
from toolchain.architecture import host_architecture
from wheels.pip import download_pinned, for_target, run_pip

_FIX = "check the index (pip config list) and the pins in recipes/tvm_ffi/recipe.toml"


def identity(recipe: Recipe) -> str:
    """Return the pins that identify the source and the build tools, as text. Nothing is fetched."""
    names = ("distribution", "version", "sha256", "tools")
    return " ".join(recipe.settings[name] for name in names)


def tools(recipe: Recipe, suite: Suite, folder: Path, log: Path) -> Path:
    """Return a folder with the build tools for this PC and the suite's Python; fetch them if necessary.

    Raises the same exceptions as ``obtain``.
    """
    pins = recipe.settings["tools"].split()
    key = hashlib.sha256("\n".join([*pins, suite.python]).encode()).hexdigest()[:12]
    place = folder / f"tvm-ffi-tools-{key}"
    if not place.is_dir():
        words = ["install", "--no-deps", "--no-compile", *for_target(host_architecture(), suite)]
        with progress.step(f"fetch {', '.join(pins)}"), files.replacing(place) as aside:
            run_pip([*words, "--target", aside, *pins], what=", ".join(pins), log=log, fix=_FIX)
    return place


def obtain(recipe: Recipe, backend: Path, folder: Path, log: Path) -> Path:
    """Fetch the source archive into ``folder`` unless it is already there. ``backend`` is the folder from ``tools``.

    Raises NetworkUnreachable, or SourceUnavailable if the index lacks the archive or the archive's SHA-256 is not the
    pinned one.
    """
    name, version, digest = (recipe.settings[key] for key in ("distribution", "version", "sha256"))
    return download_pinned(
        name,
        version,
        digest,
        folder / f"{name.replace('-', '_')}-{version}.tar.gz",
        words=[f"--no-binary={name}", "--no-build-isolation"],
        log=log,
        fix=_FIX,
        # pip reads the archive's metadata. With these two settings, this requires no compiler, CMake or other package.
        environment={"PYTHONPATH": str(backend.resolve()), "SKBUILD_WHEEL_CMAKE": "false"},
    )
