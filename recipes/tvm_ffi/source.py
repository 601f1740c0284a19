"""Fetch apache-tvm-ffi's source archive and its build tools from the configured package index.

pip fetches both with this PC's settings (indices, proxies, certificates, folders of wheels). The archive's SHA-256 is
pinned; pip verifies it, and it is verified again before each use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from images.flavour import Suite
from recipes.recipe import Recipe
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.errors import SourceUnavailable
from wheels import find as wheels
from wheels.pip import run_pip

_LIMIT_S = 1800.0


def identity(recipe: Recipe) -> str:
    """Return text that identifies the source and the build tools by their pins. Nothing is fetched."""
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
        platforms = [f"--platform={name}" for name in wheels.platforms_for(host_architecture(), suite)]
        words = ["install", "--no-deps", "--no-compile", "--only-binary=:all:", "--implementation=cp"]
        words += [f"--python-version={suite.python}", *platforms]
        with files.replacing(place) as aside:
            _pip([*words, "--target", str(aside), *pins], log, ", ".join(pins))
    return place


def obtain(recipe: Recipe, backend: Path, folder: Path, log: Path) -> Path:
    """Fetch the source archive into ``folder`` unless it is already there. ``backend`` is the result of ``tools``.

    Raises NetworkUnreachable, or SourceUnavailable if the index lacks the archive or the archive's SHA-256 is not the
    pinned one.
    """
    name, version, digest = (recipe.settings[key] for key in ("distribution", "version", "sha256"))
    place = folder / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not place.is_file():
        with files.scratch_folder(folder, "tvm-ffi") as scratch:
            wanted = scratch / "wanted.txt"
            wanted.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
            words = ["download", "--no-deps", "--no-cache-dir", f"--no-binary={name}", "--no-build-isolation"]
            # pip reads the archive's metadata. With these two settings, this requires no compiler, CMake or other
            # package.
            environment = {"PYTHONPATH": str(backend.resolve()), "SKBUILD_WHEEL_CMAKE": "false"}
            words += ["--require-hashes", "--dest", str(scratch), "--requirement", str(wanted)]
            _pip(words, log, f"{name}=={version}", environment)
            fetched = scratch / place.name
            if not fetched.is_file():
                raise SourceUnavailable(
                    f"the package index does not have a source archive of {name} {version}",
                    expected=place.name,
                    found=", ".join(sorted(path.name for path in scratch.iterdir() if path != wanted)) or "nothing",
                    fix=f"read {log}, and check the index (pip config list)",
                )
            fetched.replace(place)
    found = files.sha256_of(place)
    if found != digest:
        raise _mismatch(recipe, found, f"delete {place} and run the task again")
    return place


def _pip(words: Sequence[str], log: Path, what: str, environment: Mapping[str, str] | None = None) -> None:
    fix = "check the index (pip config list) and the pins in recipes/tvm_ffi/recipe.toml"
    run_pip(words, what=what, log=log, fix=fix, environment=environment, limit_s=_LIMIT_S)


def _mismatch(recipe: Recipe, found: str, fix: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"the source of {recipe.settings['distribution']} is not the one that the recipe pins",
        expected=f"SHA-256 {recipe.settings['sha256']}",
        found=found,
        fix=fix,
    )
