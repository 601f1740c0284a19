"""Compile a library for the target root in a container."""

from __future__ import annotations

import shlex
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

    There is one build tree per image, so only files that depend on a changed file are recompiled. The sources and the
    tree are mounted at fixed paths, so the product does not depend on the checkout's path. Raises CommandFailed with
    the last lines of the compiler's output.
    """
    target, prefix = config.image.target, recipe.settings["prefix"]
    work = config.target_root / "work" / f"{recipe.name}-{image_id.removeprefix('sha256:')[:12]}"
    tree, stage = work / f"tree{plan.label}", work / f"stage{plan.label}"
    files.remove(stage)
    stage.mkdir(parents=True)
    tree.mkdir(exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    owner = work.stat()
    script = [*map(shlex.join, plan.commands), f"chown -R {owner.st_uid}:{owner.st_gid} {STAGE} {TREE}"]
    run_in(
        client,
        image,
        ["sh", "-euc", " && ".join(script)],
        architecture=host_architecture() if plan.cross else target,
        binds=[
            *(f"{folder.resolve()}:{place}:ro" for place, folder in plan.sources.items()),
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
