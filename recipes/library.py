"""Compile a library for the target root in a container."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker

from engine.containers import run_in
from recipes.recipe import Recipe
from recipes.register import register
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import Config

TREE, STAGE = "/usr/src/build", "/usr/src/stage"
"""Paths in the container: the build tree, and the folder below which the library is installed."""

_SKIPPED = frozenset({".git", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Build:
    """How a library is compiled and installed.

    If ``cross`` is true, the image runs on this PC without emulation, and the library is cross-compiled.
    """

    cross: bool
    commands: Sequence[Sequence[str]]
    """The commands install the library below ``STAGE``."""
    sources: Mapping[str, Path]
    """Folders by their path in the container."""
    label: str = ""
    """Each label has its own build tree."""
    fix: str
    """Advice for failed commands."""


def build(
    client: docker.DockerClient,
    image: str,
    image_id: str,
    recipe: Recipe,
    plan: Build,
    config: Config,
    tar: Path,
    log: Path,
) -> None:
    """Compile a library in an image, and pack the files for the target root into ``tar``.

    There is one build tree per image, so only files that depend on a changed file are recompiled. A copy of the sources
    and the tree are mounted at fixed paths, so the product does not depend on the checkout's path. Raises CommandFailed
    with the last lines of the compiler's output.
    """
    target, prefix = config.image.target, recipe.settings["prefix"]
    work = config.target_root / "work" / f"{recipe.name}-{image_id.removeprefix('sha256:')[:12]}"
    tree, stage = work / f"tree{plan.label}", work / f"stage{plan.label}"
    files.remove(stage)
    stage.mkdir(parents=True)
    tree.mkdir(exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    copies = {place: work / f"sources{plan.label}" / str(number) for number, place in enumerate(plan.sources)}
    for place, copy in copies.items():
        _update_copy(plan.sources[place], copy)
    owner = work.stat()
    give_back = f"trap 'chown -R {owner.st_uid}:{owner.st_gid} {STAGE} {TREE}' EXIT; "
    run_in(
        client,
        image,
        ["sh", "-euc", give_back + " && ".join(map(shlex.join, plan.commands))],
        architecture=host_architecture() if plan.cross else target,
        binds=[
            *(f"{copy}:{place}:ro" for place, copy in copies.items()),
            f"{tree}:{TREE}:rw",
            f"{stage}:{STAGE}:rw",
        ],
        environment={"SOURCE_DATE_EPOCH": str(config.image.source_date_epoch)},
        log=log,
        fix=plan.fix,
    )
    installed = stage / prefix.removeprefix("/")
    recipe.require_outputs(installed)
    register(stage, installed, prefix)
    files.pack(stage, tar, epoch=config.image.source_date_epoch)


def _update_copy(folder: Path, copy: Path) -> None:
    """Make ``copy`` equal to ``folder``, except for folders in _SKIPPED. Write only files that differ.

    ninja recompiles what depends on a file that is newer than the object. A changed file can be older than the object,
    for example if a backup was restored or the folder belongs to another checkout. The changed files in the copy are
    always newer.
    """
    wanted = set()
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for path in (Path(place, name) for name in [*names, *folders]):
            if path.is_symlink() or path.is_file():
                wanted.add(path.relative_to(folder))
    parents = {parent for name in wanted for parent in name.parents}
    for path in sorted(copy.rglob("*")):
        if path.relative_to(copy) not in (parents if path.is_dir() and not path.is_symlink() else wanted):
            files.remove(path)
    for name in wanted:
        with contextlib.suppress(FileNotFoundError):  # for example, an editor has removed its temporary file
            _update_file(folder / name, copy / name)


def _update_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not target.is_symlink() or target.readlink() != path.readlink():
            files.remove(target)
            target.symlink_to(path.readlink())
        return
    if target.is_symlink():
        target.unlink()
    if target.is_file() and target.read_bytes() == path.read_bytes():
        shutil.copymode(path, target)
    else:
        shutil.copy(path, target)
