"""``verify``: check that building a wheel again produces identical bytes.

*Sampled*: randomly chosen objects of the build tree are compiled again without ccache and compared with the originals;
the seed is printed. *Full*: the whole wheel is built again without ccache in a separate tree and compared with an
earlier wheel. This earlier wheel was built here, or comes from the artefact cache or this repository; its provenance
must state the same compiler and packages.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.start import ensure_running
from flow import torch_job
from flow.build_lock import build_lock
from flow.context import Context
from images.flavour import load_suite
from recipes.recipe import load
from recipes.torch import build as building
from recipes.torch import provenance, resolve
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ChecksFailed

_TREE = "/usr/src/torch/pytorch/build"
_SHOWN = 8


@dataclass(frozen=True)
class Verified:
    """The mode (``sampled`` or ``full``), the names of the compared files, and the duration in seconds."""

    mode: str
    names: tuple[str, ...]
    seed: int
    seconds: float

    def summary(self) -> str:
        """The result as one line of text."""
        subject = f"{len(self.names)} objects" if self.mode == "sampled" else self.names[0]
        seed = f", chosen with seed {self.seed}" if self.mode == "sampled" else ""
        return f"{subject} built again with identical bytes in {self.seconds:.0f} s{seed}"


def verify_torch(config: Config, *, sample: int = 20, full: bool = False, seed: int | None = None) -> Verified:
    """Rebuild a sample of objects or the whole wheel, and compare the result with the earlier build.

    Raises RecipeInvalid, before the engine is started, for a target that the recipe does not build. Raises ChecksFailed
    with the names of the files whose bytes differ, or ArtefactMissing if there is no complete build. If an object does
    not compile, raises DiskFull or CommandFailed, as ``Builder.run`` does.
    """
    building.Plan.of(load("torch"), config, load_suite(config.image.suite))
    ensure_running(config)
    with build_lock(config.target_root), Context(config) as context:
        if full:
            before = wheels_to_compare(config)
            builder = torch_job.ready_builder(context)
            return _full(context.root, builder, *made_alike(before, builder.versions()))
        builder = torch_job.ready_builder(context)
        return sampled(builder, sample, random.SystemRandom().randrange(1 << 32) if seed is None else seed)


def sampled(builder: building.Builder, sample: int, seed: int) -> Verified:
    """Compile ``sample`` objects of the builder's tree again. Raises the same exceptions as ``verify_torch``."""
    began = time.monotonic()
    listed = builder.home / "pytorch" / "build" / "compile_commands.json"
    if not listed.is_file():
        raise ArtefactMissing(
            "there is no build tree of torch from which to select object files",
            expected=f"{listed.name} in {listed.parent}",
            found="no such file",
            fix="run ./inv build-torch --again to make a build tree (a cached wheel has none), or use --full",
        )
    # A precompiled header is not an object. The .cxx files of unity builds are kept, because they produce objects.
    commands = [item for item in json.loads(listed.read_text()) if "/cmake_pch." not in item["file"]]
    if not commands or sample < 1:
        raise ArtefactMissing(
            "there are no object files to compare", expected="at least one object", found=f"{sample} requested"
        )
    # S311 does not apply, because the choice must be repeatable rather than unpredictable.
    chosen = random.Random(seed).sample(commands, min(sample, len(commands)))  # noqa: S311
    _require_made(listed.parent, [_object_of(item) for item in chosen])
    differing, names = [], []
    with progress.bar("torch: objects compiled again", total=len(chosen)) as bar:
        for number, item in enumerate(chosen):
            words = shlex.split(item["command"])
            out = _object_of(item)
            words[words.index("-o") + 1] = "/tmp/again.o"  # noqa: S108
            name = out.rsplit("/", 1)[-1].removesuffix(".o")
            names.append(name)
            bar.update(number, note=name)
            script = f"cd {_TREE}; {shlex.join(words)}; ! cmp {shlex.quote(out)} /tmp/again.o || echo the same bytes"
            said = builder.run(["sh", "-euc", script], environment={"CCACHE_DISABLE": "1"})
            if "the same bytes" not in said:
                differing.append(name)
    if differing:
        raise ChecksFailed(
            f"{len(differing)} of {len(chosen)} object files of torch differ when they are compiled again",
            expected="identical object files",
            found=", ".join(differing),
            fix=f"to compile the same objects again, pass --seed={seed}; the compiler's messages are in {builder.log}",
        )
    return Verified("sampled", tuple(names), seed, time.monotonic() - began)


def _object_of(command: Mapping[str, str]) -> str:
    """Return the output file of a command in the compilation database, relative to the build folder."""
    words = shlex.split(command["command"])
    return words[words.index("-o") + 1]


def _require_made(tree: Path, objects: Sequence[str]) -> None:
    """Raise ArtefactMissing if any object has not been compiled.

    This check is necessary because the compilation database also lists objects that have not been compiled.
    """
    absent = [name for name in objects if not (tree / name).is_file()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ArtefactMissing(
            "the build tree of torch is not complete",
            expected="a build tree that contains every chosen object",
            found=f"missing: {absent[0].rsplit('/', 1)[-1]}{more}",
            fix="run ./inv build-torch --again to complete the build",
        )


def _full(root: Path, builder: building.Builder, wheel: Path, where: str) -> Verified:
    began = time.monotonic()
    progress.say(f"    building the wheel again, to compare it with {wheel.name} ({where})")
    again = builder.elsewhere("again")
    again.discard()
    out = root / "torch-again"
    built = again.build(out)
    first, second = files.sha256_of(wheel), files.sha256_of(built.wheel)
    if first != second:
        raise ChecksFailed(
            "building torch's wheel again produced a different file",
            expected=f"SHA-256 {first}",
            found=f"SHA-256 {second}",
            fix=f"compare {wheel} with {built.wheel}, for example with diffoscope",
        )
    again.discard()
    files.remove(out)
    return Verified("full", (f"{wheel.name} ({where})",), 0, time.monotonic() - began)


def wheels_to_compare(config: Config) -> list[tuple[Path, str]]:
    """Return earlier wheels with the recipe's current key, and their origins.

    If there is no such wheel, raises ArtefactMissing, or the error of the first unusable wheel if one was found.
    """
    refused: list[str] = []
    unusable: list[resolve.Unusable] = []
    found = [(wheel, where) for wheel, _, where in resolve.of_this_recipe(config, refused, unusable)]
    if found:
        resolve.warn_of(unusable)
        return found
    if unusable:
        raise unusable[0].fault
    raise ArtefactMissing(
        "there is no wheel to compare with",
        expected="a wheel with the current key of the recipe",
        found="; ".join(refused) or "none",
        fix="run ./inv build-torch",
    )


def made_alike(wheels: Sequence[tuple[Path, str]], versions: Mapping[str, str]) -> tuple[Path, str]:
    """Return the first wheel that was compiled with these compiler and package versions (``Builder.versions``).

    If there is no such wheel, raises ArtefactMissing with a list of the differences.
    """
    differences = []
    for wheel, where in wheels:
        before = provenance.versions_of(wheel)
        names = sorted(name for name in {*before, *versions} if before.get(name) != versions.get(name))
        if not names:
            return wheel, where
        changes = [f"{name} {before.get(name, 'absent')} → {versions.get(name, 'absent')}" for name in names]
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        differences.append(f"{wheel.name} ({where}): {', '.join([*changes[:_SHOWN], *more])}")
    raise ArtefactMissing(
        "there is no wheel to compare with: the compiler or packages of the builder image have changed",
        expected="a wheel that was compiled with the versions in the builder image",
        found="; ".join(differences),
        fix="run ./inv build-torch, and then this task again",
    )
