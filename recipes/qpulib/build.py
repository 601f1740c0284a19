"""Build upstream QPULib instead of libqpu: fetch it at a pinned commit and compile it as upstream does.

The source is the folder ``qpu.upstream_source``, or ``sources/qpulib`` in the build folder. If ``sources/qpulib`` does
not exist, it is fetched. A git tree must be at the pinned commit and unchanged. A folder without ``.git`` (an unpacked
archive) is used as it is, with a warning that is recorded in the manifest.

Each combination of mode, DEBUG setting and compiler has its own build tree, so only files that depend on a changed file
are recompiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.cmake import compile_options
from recipes.git import fetch, git
from recipes.library import STAGE, TREE, Build
from recipes.recipe import Recipe
from toolchain import files, process
from toolchain.config import Config
from toolchain.errors import CommandFailed, SourceUnavailable
from toolchain.jobs import compile_jobs

FETCHED = "pitorch-fetched"
"""The file in ``.git`` that marks this module's checkouts. Only these checkouts are replaced when the pin changes."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How QPULib is compiled: ``mode`` is ``emulation`` or ``qpu``, and ``debug`` corresponds to upstream's DEBUG=1."""

    mode: str
    debug: bool

    @property
    def label(self) -> str:
        """The name of the build tree."""
        return f"{self.mode}-debug" if self.debug else self.mode

    @classmethod
    def of(cls, config: Config) -> Variant:
        """Return the configured variant."""
        return cls(mode=config.qpu.upstream_mode, debug=config.qpu.upstream_debug)


@dataclass(frozen=True)
class Checkout:
    """Upstream's source. If the folder is not a git tree, ``commit`` is empty, and ``warning`` states this."""

    folder: Path
    commit: str
    warning: str = ""


def pin(recipe: Recipe) -> str:
    """Return the pinned commit.

    Raises SourceUnavailable unless the pin is a full hash of 40 hexadecimal digits. A branch could change.
    """
    commit = recipe.settings["commit"]
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceUnavailable(
            "upstream QPULib is not pinned to a commit",
            expected="the full hash of a commit, 40 hexadecimal digits",
            found=repr(commit),
            fix=f"set commit in {recipe.folder}/recipe.toml to the full hash of a commit",
        )
    return commit


def identity(recipe: Recipe, config: Config) -> str:
    """Return the step's input: the pinned commit, or the fingerprint of a folder that is not a git tree."""
    folder = config.qpulib_source
    if folder.is_dir() and not (folder / ".git").exists():
        return f"tree {files.tree_fingerprint(folder, 'Lib/**/*')[:16]}"
    return f"commit {pin(recipe)}"


def obtain(recipe: Recipe, config: Config) -> Checkout:
    """Fetch upstream's source if necessary, and verify it. Raises SourceUnavailable or ProgramMissing."""
    folder = config.qpulib_source
    if not folder.exists():
        if config.qpu.upstream_source:
            raise _unavailable(recipe, folder, "the folder in qpu.upstream_source does not exist")
        _fetch(recipe, folder)
    elif (folder / ".git" / FETCHED).is_file() and git(folder, "rev-parse", "HEAD") != pin(recipe):
        _fetch(recipe, folder)
    return verify(recipe, folder)


def verify(recipe: Recipe, folder: Path) -> Checkout:
    """Check that a folder contains upstream's unchanged source at the pinned commit.

    Raises SourceUnavailable for another commit, changed files, or a folder without Lib/QPULib.h and Lib/**/*.cpp.
    """
    if not any(folder.glob("Lib/**/*.cpp")) or not (folder / "Lib" / "QPULib.h").is_file():
        raise _unavailable(recipe, folder, f"no Lib/QPULib.h, or no Lib/**/*.cpp, in {folder}")
    if not (folder / ".git").exists():
        warning = (
            f"upstream QPULib in {folder} is not a git tree, so the commit ({pin(recipe)[:12]}) cannot be verified"
        )
        return Checkout(folder, "", warning)
    found = git(folder, "rev-parse", "HEAD")
    if found != pin(recipe):
        raise _unavailable(recipe, folder, f"{folder} is at commit {found}")
    if changed := git(folder, "status", "--porcelain", "--untracked-files=all"):
        names = ", ".join(line.split(maxsplit=1)[1] for line in changed.splitlines()[:5])
        raise _unavailable(recipe, folder, f"changed files in {folder}: {names}")
    return Checkout(folder, found)


def _unavailable(recipe: Recipe, folder: Path, found: str) -> SourceUnavailable:
    url, commit = recipe.settings["url"], pin(recipe)
    return SourceUnavailable(
        "the source of upstream QPULib is not available",
        expected=f"{url} at commit {commit}, or an unchanged checkout of it in {folder}",
        found=found,
        fix=(
            "if this machine needs a proxy, set https_proxy, http_proxy or all_proxy; without network access, run git "
            f"clone {url} QPULib && git -C QPULib checkout {commit} on another machine, and copy the folder QPULib to "
            f"{folder}, or set INVOKE_QPU_UPSTREAM_SOURCE to the copy"
        ),
    )


def _fetch(recipe: Recipe, folder: Path) -> None:
    """Fetch only the pinned commit, verify it, and replace ``folder`` with it."""
    process.require_program("git", "to fetch upstream QPULib")
    url, commit = recipe.settings["url"], pin(recipe)
    with files.scratch_folder(folder.parent, folder.name) as scratch:
        aside = scratch / "checkout"
        try:
            fetch(url, commit, aside)
        except CommandFailed as fault:
            raise _unavailable(recipe, folder, fault.found) from fault
        verify(recipe, aside)
        (aside / ".git" / FETCHED).write_text(f"{url} {commit}\n")
        files.remove(folder)
        aside.rename(folder)


def commands(
    variant: Variant, *, recipe: str, source: str, tree: str, stage: str, jobs: int, options: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the commands that configure, compile and install. ``options`` is the result of ``compile_options``."""
    configure = (
        *("cmake", "-S", recipe, "-B", tree, "-G", "Ninja", *options),
        "-DCMAKE_BUILD_TYPE=",
        f"-DQPULIB_SOURCE={source}",
        f"-DQPULIB_MODE={variant.mode}",
        f"-DQPULIB_DEBUG={'ON' if variant.debug else 'OFF'}",
    )
    strip = () if variant.debug else ("--strip",)
    install = ("env", f"DESTDIR={stage}", "cmake", "--install", tree, *strip)
    return configure, ("cmake", "--build", tree, "--parallel", str(jobs), "--verbose"), install


def plan(recipe: Recipe, checkout: Checkout, config: Config, *, cross: bool) -> Build:
    """Return the plan for configuring, compiling and installing QPULib."""
    variant, home, source = Variant.of(config), "/usr/src/recipe", "/usr/src/qpulib"
    options = compile_options(config.image.target, recipe.settings["prefix"], cross=cross)
    jobs = compile_jobs(config.build)
    return Build(
        cross=cross,
        commands=commands(variant, recipe=home, source=source, tree=TREE, stage=STAGE, jobs=jobs, options=options),
        sources={home: recipe.folder, source: checkout.folder},
        label=f"-{variant.label}",
        fix="read the compiler's messages above; the source code is upstream's, not this project's",
    )
