"""The wheel once it is made: its key, and where it is found again: in a wheelhouse, or in the artefact cache.

``build-tvm-ffi`` puts it into both; ``push-artefacts`` and ``pull-artefacts`` share the second with a team. An image
gets it by ``remote.ffi_in_image``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from images.flavour import Suite, load_suite
from recipes import recipe
from recipes.recipe import Recipe
from toolchain.architecture import Architecture
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, PlatformMismatch, RecipeInvalid
from wheels import artefacts
from wheels import find as wheels
from wheels.wheelhouse import wheelhouses

NAME = "tvm_ffi"
"""The recipe's, and the artefact's."""


def require_target(data: Recipe, target: Architecture, suite: Suite) -> None:
    """Raise PlatformMismatch or RecipeInvalid for a target that the wheel is not built for."""
    name = data.settings["distribution"]
    if target.bits != 32:
        raise PlatformMismatch(
            f"{name} needs no build for {target.debian}",
            expected="a 32-bit target: armhf",
            found=f"image.architecture: {target.debian}, which the package index has a wheel for",
            fix=f"pip install {name}=={data.settings['version']} on the board",
        )
    if reason := data.tables["refused"].get(suite.name):
        raise RecipeInvalid(
            f"{name} cannot be built for {suite.name}",
            expected="a release whose tools its build takes",
            found=str(reason),
            fix="set image.suite to trixie",
        )


def recipe_key(data: Recipe, target: Architecture, suite: Suite) -> str:
    """SHA-256 of what makes the wheel, as far as this repository states it."""
    stated = [data.fingerprint(), suite.name, target.debian]
    return hashlib.sha256("\n".join(stated).encode()).hexdigest()


def key(config: Config) -> str:
    """The recipe's key for this configuration; empty where it builds no wheel for it."""
    data, target, suite = recipe.load(NAME), config.image.target, load_suite(config.image.suite)
    try:
        require_target(data, target, suite)
    except (PlatformMismatch, RecipeInvalid):
        return ""
    return recipe_key(data, target, suite)


def listing(config: Config) -> str:
    """What there is to choose from, as an input of a step: names, sizes and times, one a line."""
    data, wanted = recipe.load(NAME), key(config)
    lines = []
    for folder in wheelhouses(config):
        for path in sorted(folder.glob(data.outputs[0])):
            status = path.stat()
            lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    cached = artefacts.keys_of_recipe(config, NAME, wanted) if wanted else ()
    return "\n".join([*lines, f"key {wanted}", f"cached {' '.join(cached)}" if cached else "not cached"])


def find(config: Config) -> tuple[Path, str]:
    """The wheel of the recipe's version for this configuration, and where it is from.

    A wheelhouse's is taken by its name, tag and contents. Raises as ``require_target``; ArtefactMissing where there is
    none; ArtefactDamaged, WheelUnusable, PlatformMismatch for one that is not what its name says.
    """
    data, target, suite = recipe.load(NAME), config.image.target, load_suite(config.image.suite)
    require_target(data, target, suite)
    name, version = data.settings["distribution"], data.settings["version"]
    found, refused = wheels.candidates(wheelhouses(config), name, wheels.tags_for(target, suite))
    refused += [f"{item.path.name}: another version" for item in found if str(item.version) != version]
    chosen = [(item.path, f"from {item.path.parent}") for item in found if str(item.version) == version]
    if not chosen:
        kept = artefacts.of_recipe(config, NAME, recipe_key(data, target, suite)) or ()
        chosen = [(path, "from the artefact cache") for path in kept if path.suffix == ".whl"]
    if not chosen:
        raise ArtefactMissing(
            f"there is no wheel of {name} for the image, and remote.ffi_in_image is set",
            expected=f"{name} {version} for {target.debian}, in a wheelhouse or in the artefact cache",
            found="; ".join(refused) or "none",
            fix="run ./inv build-tvm-ffi, or ./inv pull-artefacts where a registry has it",
        )
    wheels.audit(chosen[0][0], target)
    return chosen[0]
