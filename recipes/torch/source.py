"""Fetch and verify torch's source: Debian's source package (default), or upstream's tag.

apt fetches the package from the images' mirror and verifies its signature chain (signed index → Sources → ``.dsc`` file
→ archives). In addition, the recipe pins the SHA-256 of the ``.dsc`` file. On every use, the archives are compared with
the checksums in the ``.dsc`` file, and damaged archives are fetched again.

git fetches upstream's tag with its submodules; the tag must refer to the pinned commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from images import apt
from images.flavour import Suite
from recipes.git import fetch, git
from recipes.recipe import Recipe
from toolchain import files, process, progress
from toolchain.errors import CommandFailed, SourceUnavailable

_OTHERS = "status --porcelain --untracked-files=normal --ignored"
"""The git arguments that list all files outside the commit, including ignored ones, which would be copied too."""
_OTHERS_WITHIN = f'found=$(git {_OTHERS}) && test -z "$found" || echo "$displaypath: $found"'
"""The shell command that does the same in each submodule, because git does not list the ignored files of submodules."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source on this PC. ``identity`` identifies the source's content by version and digest, or by the commit."""

    kind: str
    """``archive`` or ``git``."""
    folder: Path
    identity: str
    files: dict[str, str]
    """The SHA-256 of each file of a source package."""


def identity(recipe: Recipe, suite: Suite, kind: str) -> str:
    """Return text that identifies the source that the recipe pins. Nothing is fetched.

    Raises SourceUnavailable for a release without a pin, and for any ``kind`` other than archive or git.
    """
    if kind not in ("archive", "git"):
        raise SourceUnavailable(
            "this configuration does not build torch from source",
            expected="torch.source: archive or git",
            found=f"torch.source: {kind}",
            fix="run ./inv build-torch --source=archive",
        )
    if kind == "git":
        return f"git {recipe.tables['git']['commit']}"
    version, digest = _pinned(recipe, suite)
    return f"archive {recipe.tables['archive']['package']} {version} {digest}"


def obtain(recipe: Recipe, suite: Suite, kind: str, sources: tuple[apt.Source, ...], folder: Path, log: Path) -> Source:
    """Fetch the source into ``folder`` unless it is already there, and verify it. Raises SourceUnavailable."""
    return _git(recipe, folder, log) if kind == "git" else _archive(recipe, suite, sources, folder, log)


def _pinned(recipe: Recipe, suite: Suite) -> tuple[str, str]:
    table = recipe.tables["archive"]
    if suite.name not in table:
        known = ", ".join(sorted(key.removesuffix("_sha256") for key in table if key.endswith("_sha256")))
        raise SourceUnavailable(
            f"the torch recipe does not pin a source package for {suite.name}",
            expected=f"one of {known}",
            found=f"image.suite: {suite.name}",
            fix=f"set image.suite to {known}, or put a wheel for Python {suite.python} into wheelhouse/",
        )
    return table[suite.name], table[f"{suite.name}_sha256"]


def _archive(recipe: Recipe, suite: Suite, sources: tuple[apt.Source, ...], folder: Path, log: Path) -> Source:
    package = recipe.tables["archive"]["package"]
    version, digest = _pinned(recipe, suite)
    place = folder / f"{package}-{version}"
    description = _description(place, package, version)
    damage: dict[str, str] = {}
    if description.is_file():
        found = files.sha256_of(description)
        damage = _damage(description) if found == digest else {description.name: f"SHA-256 {found}"}
    for name, seen in damage.items():
        origin = "the recipe" if name == description.name else description.name
        progress.warn(f"{name} does not match the checksum in {origin} ({seen}): the source is fetched again")
    if damage or not description.is_file():
        with files.scratch_folder(folder, package) as scratch:
            fetched = scratch / "fetched"
            fetched.mkdir()
            main = tuple(item for item in sources if item.pocket.name == "main" and item.archive == "debian")
            apt.fetch_source(main or sources, package, version, fetched, log)
            files.remove(place)
            fetched.rename(place)
    found = files.sha256_of(description) if description.is_file() else "no file"
    if found != digest:
        raise SourceUnavailable(
            f"{package} {version} is not the source that the recipe pins",
            expected=f"{description.name} with SHA-256 {digest}",
            found=found,
            fix="check the mirror (image.mirror); to use a new revision of the package, change the pin in recipe.toml",
        )
    sums = _sums(description)
    if damage := _damage(description):
        raise SourceUnavailable(
            f"{package} {version} is damaged, although it has just been fetched",
            expected=", ".join(f"{name} with SHA-256 {sums[name]}" for name in damage),
            found=", ".join(damage.values()),
            fix="check the mirror (image.mirror) and this PC's disk, and run the task again",
        )
    listed = dict(sorted({**sums, description.name: digest}.items()))
    return Source(kind="archive", folder=place, identity=identity(recipe, suite, "archive"), files=listed)


def missing(recipe: Recipe, suite: Suite, kind: str, place: Path) -> str:
    """Check a source's folder. Return a description of missing or damaged files, or an empty string.

    For upstream's checkout, only the existence of the folder is checked; ``obtain`` verifies its contents with git.
    """
    if not place.is_dir():
        return "its folder is missing"
    if kind == "git":
        return ""
    version, digest = _pinned(recipe, suite)
    description = _description(place, recipe.tables["archive"]["package"], version)
    if not description.is_file() or files.sha256_of(description) != digest:
        return f"{description.name} is missing or damaged"
    damage = _damage(description)
    return f"{', '.join(damage)} is missing or damaged" if damage else ""


def _damage(description: Path) -> dict[str, str]:
    """Return the archives that do not match a ``.dsc`` file's checksums, with their SHA-256 and size, or "no file"."""
    damage = {}
    for name, stated in _sums(description).items():
        path = description.with_name(name)
        found = files.sha256_of(path) if path.is_file() else ""
        if found != stated:
            damage[name] = f"SHA-256 {found}, {path.stat().st_size} bytes" if found else "no file"
    return damage


def _description(place: Path, package: str, version: str) -> Path:
    return place / f"{package}_{version.partition(':')[2] or version}.dsc"


def _sums(description: Path) -> dict[str, str]:
    """Return the SHA-256 that a ``.dsc`` file lists for each archive, by the archive's name (Debian Policy, 5.6.24)."""
    found: dict[str, str] = {}
    within = False
    for line in description.read_text().splitlines():
        if not line.startswith(" "):
            within = line.startswith("Checksums-Sha256:")
        elif within:
            digest, _, name = line.split()
            found[name] = digest
    return found


def _git(recipe: Recipe, folder: Path, log: Path) -> Source:
    table = recipe.tables["git"]
    url, tag, commit = table["url"], table["tag"], table["commit"]
    place = folder / f"pytorch-{tag}"
    process.require_program("git", "to fetch torch's source")
    if not place.is_dir():
        with files.scratch_folder(folder, "pytorch") as scratch:
            aside = scratch / "pytorch"
            try:
                fetch(url, f"refs/tags/{tag}", aside, submodules=True, log=log)
            except CommandFailed as fault:
                raise SourceUnavailable(
                    "torch's source cannot be fetched from upstream",
                    expected=f"{url} at {tag}, with its submodules",
                    found=fault.found,
                    fix="connect to the network (if this machine needs a proxy, set https_proxy or all_proxy), or use "
                    "the default, --source=archive, which needs only the distribution's mirror",
                ) from fault
            aside.rename(place)
    found = git(place, "rev-parse", "HEAD", log=log)
    if found != commit:
        raise SourceUnavailable(
            f"upstream's {tag} is not the commit that the recipe pins",
            expected=commit,
            found=found,
            fix=f"find out why upstream moved the tag; then delete {place} and run the task again",
        )
    changed = git(place, *_OTHERS.split(), "--ignore-submodules=none", log=log).splitlines()
    submodules = git(place, "submodule", "status", "--recursive", log=log).splitlines()
    changed += [line for line in submodules if line[0] in "-+U"]
    changed += git(place, "submodule", "--quiet", "foreach", "--recursive", _OTHERS_WITHIN, log=log).splitlines()
    if changed:
        raise SourceUnavailable(
            f"{place} differs from upstream's {tag}",
            expected="the pinned commit with its submodules, and no other files",
            found="; ".join(line.strip() for line in changed[:5]),
            fix=f"move your own files elsewhere, delete {place}, and run the task again; put your own patches into "
            f"recipes/torch/patches/{recipe.settings['version']}/git",
        )
    return Source(kind="git", folder=place, identity=f"git {commit}", files={})
