"""Find the torch wheel for the image: wheelhouse → artefact cache → own build → repository → package index.

A wheel in a wheelhouse is chosen by its name, tag and contents; the user is responsible for it. Wheels in the artefact
cache, in ``build-torch``'s folder and in the repository were built by this project's recipe; they are used only if
their provenance states the recipe's current key, so an old wheel is never used after flags, options or patches have
changed. For targets that have no prebuilt wheel, a wheel from the package index is pinned by its SHA-256
(published.toml). ``torch.source`` can restrict the search to one source. Before a wheel is used, an audit checks its
archive and RECORD, and the machine and float ABI of every ELF file. If a wheel fails the audit and another source has a
usable one, the failed wheel is skipped with a warning. If there is no usable wheel, a warning is printed, and the image
is built without torch.
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
from recipes.torch import provenance, published
from recipes.torch.build import Plan
from recipes.torch.source import identity as source_identity
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, PlatformMismatch, RecipeInvalid, SourceUnavailable, WheelUnusable
from wheels import artefacts
from wheels import find as wheels
from wheels.wheelhouse import wheelhouses

PREBUILT = HERE / "torch" / "prebuilt"
"""The folder with this repository's wheel and its provenance. With this wheel, a first build takes only minutes."""


@dataclass(frozen=True)
class Resolution:
    """The wheel for the image, or None and the reason why there is none."""

    wheel: Path | None
    version: str
    reason: str
    self_contained: bool = False
    """Whether the wheel includes the libraries that it requires."""
    warnings: tuple[str, ...] = ()
    """The wheels with higher priority that cannot be used, with the reasons."""


@dataclass(frozen=True)
class Unusable:
    """A wheel that would have been chosen, but cannot be used: its origin, and the error."""

    origin: str
    fault: ArtefactDamaged | PlatformMismatch | WheelUnusable

    def __str__(self) -> str:
        found = f" ({self.fault.found})" if self.fault.found else ""
        return f"a torch wheel is skipped ({self.origin}): {self.fault.summary}{found}"


def products(config: Config) -> Path:
    """Return the folder in which ``build-torch`` puts a target's wheel."""
    return config.target_root / "torch"


def key(config: Config) -> str:
    """Return the key of the wheel that the recipe builds for this configuration, or "" if it cannot build one."""
    suite = load_suite(config.image.suite)
    recipe = load("torch")
    try:
        return Plan.of(recipe, config, suite).key(source_identity(recipe, suite, config.torch.source))
    except (RecipeInvalid, SourceUnavailable):
        return ""


def listing(config: Config) -> str:
    """Return a list of the available wheels as a step input.

    Each wheel in a folder has one line with its name, size and modification time. Further lines list the recipe's key,
    the cached wheels with this key, and the pinned wheels of the package index.
    """
    lines = []
    for folder in (*wheelhouses(config), products(config), PREBUILT):
        for path in sorted(folder.glob(f"{load('torch').settings['distribution']}-*.whl")):
            if path.is_file():
                status = path.stat()
                lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    wanted = key(config)
    cached = artefacts.keys_of_recipe(config, load("torch").settings["distribution"], wanted) if wanted else ()
    lines += [f"key {wanted}", f"cached {' '.join(cached)}" if cached else "not cached"]
    return "\n".join([*lines, *(f"published {pin.file} {pin.sha256}" for pin in published.pins(config))])


def resolve(config: Config, *, fetch: bool = False) -> Resolution:
    """Search all sources. Raises WheelUnusable if ``torch.required`` is set and there is no suitable wheel.

    With ``fetch``, the package index's wheel is fetched if it is needed and has not been fetched before; this raises
    the same exceptions as ``published.obtain``.

    In each wheelhouse, only the newest suitable wheel is considered. A wheel that is damaged, or was built for another
    machine, causes a warning if another source has a usable wheel, and an error otherwise.
    """
    if config.torch.source == "distribution":
        return Resolution(None, "", "torch.source is distribution, so the image has python3-torch")
    target, suite = config.image.target, load_suite(config.image.suite)
    tags = wheels.tags_for(target, suite)
    distribution = load("torch").settings["distribution"]
    folders = wheelhouses(config)
    found, refused = wheels.candidates(folders, distribution, tags)
    newest: dict[Path, wheels.Candidate] = {}
    for item in found:
        newest.setdefault(item.path.parent, item)
    of_the_user = [(item.path, str(item.version), f"from {folder}") for folder, item in newest.items()]
    unusable: list[Unusable] = []
    ours = of_this_recipe(config, refused, unusable)
    of_the_index = _published(config, refused, fetch=fetch)
    own = (ours, of_the_user) if config.torch.from_source else (of_the_user, ours)
    alone = {"wheelhouse": of_the_user, "pypi": of_the_index}
    for path, version, reason in alone.get(config.torch.source, itertools.chain(*own, of_the_index)):
        try:
            wheels.audit(path, target)
        except (WheelUnusable, PlatformMismatch) as fault:
            unusable.append(Unusable(reason, fault))
            continue
        return Resolution(path, version, reason, _is_self_contained(path), warn_of(unusable))
    if unusable:
        raise unusable[0].fault
    reason = _reason(folders, refused, f"{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}")
    if config.torch.required:
        raise WheelUnusable(
            "torch.required is set, but there is no torch wheel for the image",
            expected=f"torch-*-{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}.whl in a wheelhouse",
            found=reason,
            fix="run ./inv build-torch, put a wheel into a wheelhouse (torch.wheelhouse in invoke.yaml), or set "
            "torch.required: false",
        )
    return Resolution(None, "", reason)


def warn_of(unusable: Sequence[Unusable]) -> tuple[str, ...]:
    """Print and return a warning for each skipped wheel."""
    warnings = tuple(map(str, unusable))
    for warning in warnings:
        progress.warn(warning)
    return warnings


def of_this_recipe(config: Config, refused: list[str], unusable: list[Unusable]) -> Iterator[tuple[Path, str, str]]:
    """Yield the path, version and origin of each wheel with the recipe's current key.

    The reasons for rejecting other wheels are added to ``refused``; damaged wheels are added to ``unusable``. With
    ``torch.from_source``, the wheel from ``build-torch`` comes first, because the newest one in the cache may differ
    from it.
    """
    wanted = key(config)
    cached = _cached(config, wanted, unusable)
    built = _placed(config, products(config), "built here", wanted, refused, unusable)
    first = (built, cached) if config.torch.from_source else (cached, built)
    return itertools.chain(*first, _placed(config, PREBUILT, "the wheel in this repository", wanted, refused, unusable))


def _cached(config: Config, wanted: str, unusable: list[Unusable]) -> Iterator[tuple[Path, str, str]]:
    distribution = load("torch").settings["distribution"]
    for artefact_key in artefacts.keys_of_recipe(config, distribution, wanted) if wanted else ():
        origin = "from the artefact cache"
        try:
            cached = artefacts.get(config, distribution, artefact_key) or ()
            mine = [path for path in cached if path.suffix == ".whl" and _key_of(path) == wanted]
        except ArtefactDamaged as fault:
            unusable.append(Unusable(origin, fault))
            continue
        for path in mine:
            yield path, str(parse_wheel_filename(path.name)[1]), origin


def _placed(
    config: Config, folder: Path, origin: str, wanted: str, refused: list[str], unusable: list[Unusable]
) -> Iterator[tuple[Path, str, str]]:
    tags = wheels.tags_for(config.image.target, load_suite(config.image.suite))
    found, others = wheels.candidates([folder], load("torch").settings["distribution"], tags)
    refused += others
    for item in found:
        if not provenance.path_for(item.path).is_file():
            refused.append(f"{item.path.name} ({origin}) has no provenance")
            continue
        try:
            stated = _key_of(item.path)
        except ArtefactDamaged as fault:
            unusable.append(Unusable(origin, fault))
            continue
        if not wanted or stated != wanted:
            refused.append(f"{item.path.name} ({origin}) has a different recipe key: ./inv build-torch builds it again")
        else:
            yield item.path, str(item.version), origin


def _published(config: Config, refused: list[str], *, fetch: bool) -> Iterator[tuple[Path, str, str]]:
    """Yield the package index's wheel that is pinned for the target, if there is one."""
    pins = published.pins(config)[:1]
    if not pins and config.torch.source == "pypi":
        refused.append(f"torch.source is pypi, and no wheel is pinned for {config.image.label}")
    for pin in pins:
        if fetch or published.place(pin, config).is_file():
            yield published.obtain(pin, config), pin.version, "from the package index, with the pinned SHA-256"
        else:
            task = f"./inv build-image --architecture={config.image.architecture}"
            refused.append(f"{pin.file} has not been downloaded: {task} fetches it")


def _key_of(wheel: Path) -> str:
    """Return the recipe key in a wheel's provenance. Raises ArtefactDamaged."""
    return str(provenance.read(provenance.path_for(wheel), wheel).get("recipeKey", ""))


def _is_self_contained(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("torch.libs/") for name in archive.namelist())


def _reason(folders: Sequence[Path], refused: Sequence[str], wanted: str) -> str:
    if refused:
        return f"no usable wheel is tagged {wanted}: " + "; ".join(refused)
    return "no torch wheel in " + ", ".join(str(folder) for folder in folders)
