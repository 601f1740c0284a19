"""Upstream QPULib, opt-in: fetched at a pinned commit, compiled as its users do, installed in our libqpu's place.

The source comes from ``qpu.upstream_source``, or from ``sources/qpulib`` in the build folder, which is fetched when it
is absent. A git tree must be at the pinned commit and without changes; a folder without ``.git`` (an unpacked archive)
is taken as it is, with a warning that is kept in the manifest.

One build tree, that is one set of objects, is kept per mode, DEBUG and compiler, so a changed file recompiles what
depends on it and no more. The same commands run in the builder image with the cross compiler and, for the tests, on
this PC with its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import docker

from engine.containers import run_in
from engine.proxies import build_environment
from recipes.libqpu.build import compile_options, register
from recipes.recipe import Recipe
from toolchain import files, process
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import CommandFailed, SourceUnavailable
from toolchain.jobs import compile_jobs

FETCHED = "pitorch-fetched"
"""Name of the file in ``.git`` that marks a checkout as fetched by us: only such a one is replaced by a new pin."""

_FETCH_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How upstream is compiled: ``mode`` is emulation or qpu, ``debug`` its own DEBUG=1."""

    mode: str
    debug: bool

    @property
    def label(self) -> str:
        """Name of its object folder."""
        return f"{self.mode}-debug" if self.debug else self.mode

    @classmethod
    def of(cls, config: Config) -> Variant:
        """The configured one."""
        return cls(mode=config.qpu.upstream_mode, debug=config.qpu.upstream_debug)


@dataclass(frozen=True)
class Checkout:
    """Upstream's source. ``commit`` is empty where the folder is no git tree, and ``warning`` says so."""

    folder: Path
    commit: str
    warning: str = ""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the commands find things: in a container these are mount points."""

    recipe: str
    source: str
    tree: str
    stage: str


def pin(recipe: Recipe) -> str:
    """The pinned commit. Raises SourceUnavailable for anything but 40 hexadecimal digits: a branch would move."""
    commit = recipe.settings["commit"]
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceUnavailable(
            "upstream QPULib is not pinned to a commit",
            expected="40 hexadecimal digits",
            found=repr(commit),
            fix=f"edit {recipe.folder}/recipe.toml",
        )
    return commit


def identity(recipe: Recipe, config: Config) -> str:
    """The source as an input of the step: the pinned commit, or the fingerprint of a folder that is no git tree."""
    folder = config.qpulib_source
    if folder.is_dir() and not (folder / ".git").exists():
        return f"tree {files.tree_fingerprint(folder, 'Lib/**/*')[:16]}"
    return f"commit {pin(recipe)}"


def obtain(recipe: Recipe, config: Config) -> Checkout:
    """Upstream's source, verified; fetched where it is not there yet. Raises SourceUnavailable, ProgramMissing."""
    folder = config.qpulib_source
    if not folder.exists():
        if config.qpu.upstream_source:
            raise _unavailable(recipe, folder, "the folder that qpu.upstream_source names is not there")
        _fetch(recipe, folder)
    elif (folder / ".git" / FETCHED).is_file() and _git(folder, "rev-parse", "HEAD") != pin(recipe):
        _fetch(recipe, folder)
    return verify(recipe, folder)


def verify(recipe: Recipe, folder: Path) -> Checkout:
    """Check that a folder holds upstream's source at the pinned commit, unchanged.

    Raises SourceUnavailable for another commit, changed files, or a folder without Lib/QPULib.h and Lib/**/*.cpp.
    """
    if not any(folder.glob("Lib/**/*.cpp")) or not (folder / "Lib" / "QPULib.h").is_file():
        raise _unavailable(recipe, folder, f"no Lib/QPULib.h, or no Lib/**/*.cpp, in {folder}")
    if not (folder / ".git").exists():
        warning = (
            f"upstream QPULib in {folder} is no git tree: whether it is commit {pin(recipe)[:12]} cannot be verified"
        )
        return Checkout(folder, "", warning)
    found = _git(folder, "rev-parse", "HEAD")
    if found != pin(recipe):
        raise _unavailable(recipe, folder, f"{folder} is at commit {found}")
    if changed := _git(folder, "status", "--porcelain", "--untracked-files=all"):
        names = ", ".join(line.split(maxsplit=1)[1] for line in changed.splitlines()[:5])
        raise _unavailable(recipe, folder, f"changed files in {folder}: {names}")
    return Checkout(folder, found)


def _unavailable(recipe: Recipe, folder: Path, found: str) -> SourceUnavailable:
    url, commit = recipe.settings["url"], pin(recipe)
    return SourceUnavailable(
        "the source of upstream QPULib cannot be had",
        expected=f"{url} at commit {commit}, or an unchanged checkout of it in {folder}",
        found=found,
        fix=(
            f"where there is a network: git clone {url} QPULib && git -C QPULib checkout {commit}; put that folder at "
            f"{folder}, or set INVOKE_QPU_UPSTREAM_SOURCE to where it is. Proxies: https_proxy, http_proxy or all_proxy"
        ),
    )


def _git(folder: Path, *words: str) -> str:
    # A checkout may belong to another user, and lies inside our own, which must not be asked in its place.
    safe = ("-c", f"safe.directory={folder.resolve()}")
    done = process.run(
        ["git", *safe, "-C", folder, *words],
        env={
            **build_environment(),
            "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        },
        merge_stderr=False,
        limit_s=_FETCH_LIMIT_S,
    )
    return done.output.strip()


def _fetch(recipe: Recipe, folder: Path) -> None:
    """Fetch the pinned commit, and it alone, into ``folder``, which is replaced when that has succeeded."""
    process.require_program("git", "to fetch upstream QPULib")
    url, commit = recipe.settings["url"], pin(recipe)
    with files.scratch_folder(folder.parent, folder.name) as scratch:
        aside = scratch / "checkout"
        aside.mkdir()
        stalled = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
        try:
            _git(aside, "init", "--quiet")
            _git(aside, *stalled, "fetch", "--quiet", "--depth=1", "--no-tags", url, commit)
            _git(aside, "-c", "core.autocrlf=false", "checkout", "--quiet", "--detach", "FETCH_HEAD")
        except CommandFailed as fault:
            said = [line for line in fault.tail.splitlines() if line.strip()]
            raise _unavailable(recipe, folder, said[-1] if said else fault.found) from fault
        verify(recipe, aside)
        (aside / ".git" / FETCHED).write_text(f"{url} {commit}\n")
        files.remove(folder)
        aside.rename(folder)


def commands(places: Places, variant: Variant, *, jobs: int, options: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """What configures, compiles and installs; ``options`` are CMake's, for the compiler and the prefix."""
    configure = (
        *("cmake", "-S", places.recipe, "-B", places.tree, "-G", "Ninja", *options),
        "-DCMAKE_BUILD_TYPE=",
        f"-DQPULIB_SOURCE={places.source}",
        f"-DQPULIB_MODE={variant.mode}",
        f"-DQPULIB_DEBUG={'ON' if variant.debug else 'OFF'}",
    )
    strip = () if variant.debug else ("--strip",)
    install = ("env", f"DESTDIR={places.stage}", "cmake", "--install", places.tree, *strip)
    return configure, ("cmake", "--build", places.tree, "--parallel", str(jobs), "--verbose"), install


def build_native(
    recipe: Recipe, checkout: Checkout, variant: Variant, work: Path, *, jobs: int = 1, log: Path | None = None
) -> Path:
    """Build for this PC with its own compiler; the staged root. Raises CommandFailed with the compiler's last lines."""
    tree, stage = work / f"tree-{variant.label}", work / f"stage-{variant.label}"
    files.remove(stage)
    places = Places(recipe=str(recipe.folder), source=str(checkout.folder), tree=str(tree), stage=str(stage))
    prefix = recipe.settings["prefix"]
    options = (f"-DCMAKE_INSTALL_PREFIX={prefix}", "-DCMAKE_INSTALL_LIBDIR=lib")
    for argv in commands(places, variant, jobs=jobs, options=options):
        process.run(argv, log=log, fix="the compiler's words are above; the source is not ours")
    return _finished(recipe, stage)


def build(
    client: docker.DockerClient,
    builder: str,
    builder_id: str,
    recipe: Recipe,
    checkout: Checkout,
    config: Config,
    tar: Path,
    log: Path,
    *,
    cross: bool = True,
) -> None:
    """Compile in an image and pack what the target root gets into ``tar``.

    ``builder`` is an image of this PC's architecture with a cross compiler or, without ``cross``, one of the target's.
    Raises CommandFailed with the compiler's last lines.
    """
    variant = Variant.of(config)
    work = config.target_root / "work" / f"qpulib-{builder_id.removeprefix('sha256:')[:12]}"
    tree, stage = work / f"tree-{variant.label}", work / f"stage-{variant.label}"
    files.remove(stage)
    stage.mkdir(parents=True)
    tree.mkdir(exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    places = Places(recipe="/usr/src/recipe", source="/usr/src/qpulib", tree="/usr/src/build", stage="/usr/src/stage")
    options = compile_options(config.image.target, recipe.settings["prefix"], cross=cross)
    lines = [shlex.join(argv) for argv in commands(places, variant, jobs=compile_jobs(config.build), options=options)]
    lines.append(f"chown -R {work.stat().st_uid}:{work.stat().st_gid} {places.stage} {places.tree}")
    run_in(
        client,
        builder,
        ["sh", "-euc", " && ".join(lines)],
        architecture=host_architecture() if cross else config.image.target,
        binds=[
            f"{recipe.folder}:{places.recipe}:ro",
            f"{checkout.folder.resolve()}:{places.source}:ro",
            f"{tree}:{places.tree}:rw",
            f"{stage}:{places.stage}:rw",
        ],
        environment={"SOURCE_DATE_EPOCH": str(config.image.source_date_epoch)},
        log=log,
        fix="the compiler's words are above; the source is upstream's",
    )
    files.pack(_finished(recipe, stage), tar, epoch=config.image.source_date_epoch)


def _finished(recipe: Recipe, stage: Path) -> Path:
    prefix = recipe.settings["prefix"]
    installed = stage / prefix.removeprefix("/")
    recipe.require_outputs(installed)
    register(stage, installed, prefix)
    return stage
