"""Find the finished wheel in a wheelhouse or in the artefact cache, and compute its key.

``build-tvm-ffi`` puts the wheel into a wheelhouse and into the artefact cache; ``push-artefacts`` and
``pull-artefacts`` share the cache within a team. Images contain the wheel if ``remote.ffi_in_image`` is set.
"""

from __future__ import annotations

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
"""Name of the recipe and of the artefact."""


def require_target(data: Recipe, target: Architecture, suite: Suite) -> None:
    """Raise PlatformMismatch or RecipeInvalid for a target that the recipe does not support."""
    name = data.settings["distribution"]
    if target.bits != 32:
        raise PlatformMismatch(
            f"{name} does not have to be built for {target.debian}",
            expected="a 32-bit target (armhf)",
            found=f"image.architecture: {target.debian}; the package index has a wheel for this architecture",
            fix=f"on the board, run pip install {name}=={data.settings['version']} in a virtual environment",
        )
    if reason := data.tables["refused"].get(suite.name):
        raise RecipeInvalid(
            f"{name} cannot be built for {suite.name}",
            expected="a distribution release that provides the tools for building the wheel",
            found=str(reason),
            fix="set image.suite to trixie",
        )


def recipe_key(data: Recipe, target: Architecture, suite: Suite) -> str:
    """Hash everything in this repository that determines the wheel."""
    return artefacts.key_of(data.fingerprint(), suite.name, target.debian)


def key(config: Config) -> str:
    """Return the recipe's key for this configuration; empty if the recipe does not support the configuration."""
    data, target, suite = recipe.load(NAME), config.image.target, load_suite(config.image.suite)
    try:
        require_target(data, target, suite)
    except (PlatformMismatch, RecipeInvalid):
        return ""
    return recipe_key(data, target, suite)


def listing(config: Config) -> str:
    """Return the available wheels as a step input: one line per wheel with its name, size and modification time."""
    data, wanted = recipe.load(NAME), key(config)
    lines = []
    for folder in wheelhouses(config):
        for path in sorted(folder.glob(data.outputs[0])):
            status = path.stat()
            lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    cached = artefacts.keys_of_recipe(config, NAME, wanted) if wanted else ()
    return "\n".join([*lines, f"key {wanted}", f"cached {' '.join(cached)}" if cached else "not cached"])


def find(config: Config) -> tuple[Path, str]:
    """Find the wheel of the recipe's version for this configuration; return it and its origin.

    A wheel in a wheelhouse is chosen by its name, tag and contents. Raises the same exceptions as ``require_target``;
    ArtefactMissing if there is no wheel; ArtefactDamaged, WheelUnusable or PlatformMismatch if its contents do not
    match its name.
    """
    data, target, suite = recipe.load(NAME), config.image.target, load_suite(config.image.suite)
    require_target(data, target, suite)
    name, version = data.settings["distribution"], data.settings["version"]
    found, refused = wheels.candidates(wheelhouses(config), name, wheels.tags_for(target, suite))
    refused += [f"{item.path.name}: another version" for item in found if str(item.version) != version]
    chosen = [(item.path, f"from {item.path.parent}") for item in found if str(item.version) == version]
    if not chosen:
        cached = artefacts.of_recipe(config, NAME, recipe_key(data, target, suite)) or ()
        chosen = [(path, "from the artefact cache") for path in cached if path.suffix == ".whl"]
    if not chosen:
        raise ArtefactMissing(
            f"remote.ffi_in_image is set, but there is no wheel of {name} for the image",
            expected=f"{name} {version} for {target.debian}, in a wheelhouse or in the artefact cache",
            found="; ".join(refused) or "none",
            fix="run ./inv build-tvm-ffi, or ./inv pull-artefacts if a registry has the wheel",
        )
    wheels.audit(chosen[0][0], target)
    return chosen[0]
