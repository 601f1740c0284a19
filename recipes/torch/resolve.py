"""Find the torch wheel for the image: wheelhouse → artefact cache → own build → the wheel kept in this repository.

A wheelhouse's wheel is taken by its name, tag and contents: whoever puts it there answers for it. The other three are
ours, and taken only when their provenance states the key that the recipe has now: changed flags, options or patches are
never met with an old wheel. Each wheel is looked into before it is used: archive, RECORD, every ELF file's machine and
float ABI. Without one the image is built without torch, and says so loudly.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from images.flavour import load_suite
from recipes import artefacts, wheels
from recipes.recipe import HERE, load
from recipes.torch import provenance
from recipes.torch.build import Plan
from recipes.torch.source import identity as source_identity
from toolchain.config import ROOT, Config
from toolchain.errors import RecipeInvalid, SourceUnavailable, WheelUnusable
from toolchain.files import sha256_of

PREBUILT = HERE / "torch" / "prebuilt"
"""Where a wheel that this recipe built is kept with its provenance, so that a first build takes minutes."""


@dataclass(frozen=True)
class Resolution:
    """The wheel, or None with the reason."""

    wheel: Path | None
    version: str
    reason: str
    self_contained: bool = False
    """Whether it brings the libraries that it needs."""


def wheelhouses(config: Config) -> list[Path]:
    """The configured folders, absolute."""
    return [ROOT / folder for folder in config.torch.wheelhouse]


def products(config: Config) -> Path:
    """Where ``build-torch`` puts the wheel of a target."""
    return config.target_root / "torch"


def key(config: Config) -> str:
    """The key of the wheel that the recipe would build for this configuration; empty where it cannot build one."""
    suite = load_suite(config.image.suite)
    recipe = load("torch")
    try:
        return Plan.of(recipe, config, suite).key(source_identity(recipe, suite, config.torch.source))
    except (RecipeInvalid, SourceUnavailable):
        return ""


def listing(config: Config) -> str:
    """What there is to choose from, as an input of the step: names, sizes and times, one a line."""
    lines = []
    for folder in (*wheelhouses(config), products(config), PREBUILT):
        for path in sorted(folder.glob(f"{load('torch').settings['distribution']}-*.whl")):
            if path.is_file():
                status = path.stat()
                lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    wanted = key(config)
    cached = artefacts.kept_of_recipe(config, load("torch").settings["distribution"], wanted) if wanted else ()
    return "\n".join([*lines, f"key {wanted}", f"cached {' '.join(cached)}" if cached else "not cached"])


def resolve(config: Config) -> Resolution:
    """Look through all places. Raises WheelUnusable when ``torch.required`` is set and none has one that fits.

    A wheel that fits by name but is damaged or for another machine is an error at any rate.
    """
    target, suite = config.image.target, load_suite(config.image.suite)
    tags = wheels.tags_for(target, suite)
    distribution = load("torch").settings["distribution"]
    folders = wheelhouses(config)
    found, refused = wheels.candidates(folders, distribution, tags)
    chosen: list[tuple[Path, str, str]] = [(item.path, str(item.version), f"from {item.path.parent}") for item in found]
    if not chosen or config.torch.from_source:
        ours = list(of_this_recipe(config, refused))
        chosen = [*ours, *chosen] if config.torch.from_source else ours
    if chosen:
        path, version, reason = chosen[0]
        wheels.audit(path, target)
        return Resolution(path, version, reason, _is_self_contained(path))
    reason = _reason(folders, refused, f"{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}")
    if config.torch.required:
        raise WheelUnusable(
            "there is no torch wheel for the image, and torch.required is set",
            expected=f"torch-*-{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}.whl in a wheelhouse",
            found=reason,
            mend="run ./inv build-torch, put a wheel into a wheelhouse (torch.wheelhouse in invoke.yaml), or set "
            "torch.required: false",
        )
    return Resolution(None, "", reason)


def of_this_recipe(config: Config, refused: list[str]) -> Iterator[tuple[Path, str, str]]:
    """Wheels with the key that the recipe has now: path, version, where it is from.

    Why others are not taken is added to ``refused``. Raises ArtefactDamaged for one that is not as it was made.
    """
    distribution = load("torch").settings["distribution"]
    tags = wheels.tags_for(config.image.target, load_suite(config.image.suite))
    wanted = key(config)
    if wanted and (kept := artefacts.of_recipe(config, distribution, wanted)):
        for path in kept:
            if path.suffix == ".whl" and provenance.read(provenance.beside(path), path).get("recipeKey") == wanted:
                yield path, str(parse_wheel_filename(path.name)[1]), "from the artefact cache"
    for folder, what in ((products(config), "built here"), (PREBUILT, "the wheel kept in this repository")):
        found, others = wheels.candidates([folder], distribution, tags)
        refused += others
        for item in found:
            statement = provenance.beside(item.path)
            if not statement.is_file():
                refused.append(f"{item.path.name} ({what}) has no provenance")
            elif not wanted or provenance.read(statement, item.path).get("recipeKey") != wanted:
                refused.append(f"{item.path.name} ({what}) is of another recipe key: ./inv build-torch builds it anew")
            else:
                yield item.path, str(item.version), what


def _is_self_contained(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("torch.libs/") for name in archive.namelist())


def _reason(folders: Sequence[Path], refused: Sequence[str], wanted: str) -> str:
    if refused:
        return f"no wheel is tagged {wanted} and taken: " + "; ".join(refused)
    return "no torch wheel in " + ", ".join(str(folder) for folder in folders)


def identity(resolution: Resolution) -> str:
    """SHA-256 of the wheel, or an empty string."""
    return sha256_of(resolution.wheel) if resolution.wheel else ""
