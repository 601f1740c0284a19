"""Find the torch wheel for the image: wheelhouse → artefact cache → own build → the wheel kept in this repository.

A wheelhouse's wheel is taken by its name, tag and contents: whoever puts it there answers for it. The other three are
ours, and taken only when their provenance states the key that the recipe has now: changed flags, options or patches are
never met with an old wheel. Each wheel is looked into before it is used: archive, RECORD, every ELF file's machine and
float ABI; one that fails is passed over with a warning where the next place has one to use. Without any the image is
built without torch, and says so loudly.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from images.flavour import load_suite
from recipes.recipe import HERE, load
from recipes.torch import provenance
from recipes.torch.build import Plan
from recipes.torch.source import identity as source_identity
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, PlatformMismatch, RecipeInvalid, SourceUnavailable, WheelUnusable
from toolchain.files import sha256_of
from wheels import artefacts
from wheels import find as wheels
from wheels.wheelhouse import wheelhouses

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
    warnings: tuple[str, ...] = ()
    """Wheels that would have come first, and why they cannot be used."""


@dataclass(frozen=True)
class Spoilt:
    """A wheel that would have been taken and cannot be used: where from, and why."""

    where: str
    fault: ArtefactDamaged | PlatformMismatch | WheelUnusable

    def __str__(self) -> str:
        found = f" ({self.fault.found})" if self.fault.found else ""
        return f"a torch wheel is passed over, {self.where}: {self.fault.summary}{found}"


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
    cached = artefacts.keys_of_recipe(config, load("torch").settings["distribution"], wanted) if wanted else ()
    return "\n".join([*lines, f"key {wanted}", f"cached {' '.join(cached)}" if cached else "not cached"])


def resolve(config: Config) -> Resolution:
    """Look through all places. Raises WheelUnusable when ``torch.required`` is set and none has one that fits.

    Of each wheelhouse the newest that fits counts: none is passed over for an older one beside it. A wheel that is
    damaged or for another machine is a warning where the next place has one to use, and else an error at any rate.
    """
    target, suite = config.image.target, load_suite(config.image.suite)
    tags = wheels.tags_for(target, suite)
    distribution = load("torch").settings["distribution"]
    folders = wheelhouses(config)
    found, refused = wheels.candidates(folders, distribution, tags)
    newest: dict[Path, wheels.Candidate] = {}
    for item in found:
        newest.setdefault(item.path.parent, item)
    theirs = [(item.path, str(item.version), f"from {folder}") for folder, item in newest.items()]
    spoilt: list[Spoilt] = []
    ours = of_this_recipe(config, refused, spoilt)
    for path, version, reason in itertools.chain(*((ours, theirs) if config.torch.from_source else (theirs, ours))):
        try:
            wheels.audit(path, target)
        except (WheelUnusable, PlatformMismatch) as fault:
            spoilt.append(Spoilt(reason, fault))
            continue
        return Resolution(path, version, reason, _is_self_contained(path), warn_of(spoilt))
    if spoilt:
        raise spoilt[0].fault
    reason = _reason(folders, refused, f"{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}")
    if config.torch.required:
        raise WheelUnusable(
            "there is no torch wheel for the image, and torch.required is set",
            expected=f"torch-*-{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}.whl in a wheelhouse",
            found=reason,
            fix="run ./inv build-torch, put a wheel into a wheelhouse (torch.wheelhouse in invoke.yaml), or set "
            "torch.required: false",
        )
    return Resolution(None, "", reason)


def warn_of(spoilt: Sequence[Spoilt]) -> tuple[str, ...]:
    """Say which wheels are passed over, and why; the warnings."""
    warnings = tuple(map(str, spoilt))
    for warning in warnings:
        progress.warn(warning)
    return warnings


def of_this_recipe(config: Config, refused: list[str], spoilt: list[Spoilt]) -> Iterator[tuple[Path, str, str]]:
    """Wheels with the key that the recipe has now: path, version, where it is from.

    Why others are not taken is added to ``refused``; those that are not as they were made, to ``spoilt``. With
    ``torch.from_source`` the very one that ``build-torch`` left comes first: the newest of the cache may be another's.
    """
    wanted = key(config)
    cached = _cached(config, wanted, spoilt)
    built = _placed(config, products(config), "built here", wanted, refused, spoilt)
    first = (built, cached) if config.torch.from_source else (cached, built)
    return itertools.chain(
        *first, _placed(config, PREBUILT, "the wheel kept in this repository", wanted, refused, spoilt)
    )


def _cached(config: Config, wanted: str, spoilt: list[Spoilt]) -> Iterator[tuple[Path, str, str]]:
    distribution = load("torch").settings["distribution"]
    for whole_key in artefacts.keys_of_recipe(config, distribution, wanted) if wanted else ():
        what = "from the artefact cache"
        try:
            kept = artefacts.get(config, distribution, whole_key) or ()
            mine = [path for path in kept if path.suffix == ".whl" and _key_of(path) == wanted]
        except ArtefactDamaged as fault:
            spoilt.append(Spoilt(what, fault))
            continue
        for path in mine:
            yield path, str(parse_wheel_filename(path.name)[1]), what


def _placed(
    config: Config, folder: Path, what: str, wanted: str, refused: list[str], spoilt: list[Spoilt]
) -> Iterator[tuple[Path, str, str]]:
    tags = wheels.tags_for(config.image.target, load_suite(config.image.suite))
    found, others = wheels.candidates([folder], load("torch").settings["distribution"], tags)
    refused += others
    for item in found:
        if not provenance.beside(item.path).is_file():
            refused.append(f"{item.path.name} ({what}) has no provenance")
            continue
        try:
            stated = _key_of(item.path)
        except ArtefactDamaged as fault:
            spoilt.append(Spoilt(what, fault))
            continue
        if not wanted or stated != wanted:
            refused.append(f"{item.path.name} ({what}) is of another recipe key: ./inv build-torch builds it anew")
        else:
            yield item.path, str(item.version), what


def _key_of(wheel: Path) -> str:
    """The recipe's key that the statement beside a wheel tells. Raises ArtefactDamaged."""
    return str(provenance.read(provenance.beside(wheel), wheel).get("recipeKey", ""))


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
