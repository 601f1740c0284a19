"""``verify``: that a wheel built again is the same, bit for bit.

*Sampled*: some objects of the kept build tree, drawn at random (by a seed that is printed), are compiled once more
without the compiler's cache and compared. *Full*: the whole wheel is built once more in a tree of its own, without the
cache, and compared with the one that was built before: here, for the artefact cache, or for this repository. That one
must be of the same compiler and packages, by its provenance: another compiler's wheel is another one.
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
from flow import main_steps as flow
from flow import torch_job as job
from recipes.torch import build as building
from recipes.torch import provenance, resolve
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, NotReproducible

_TREE = "/usr/src/torch/pytorch/build"
_SHOWN = 8


@dataclass(frozen=True)
class Verified:
    """What was compared: names of what was built again, and the seconds that took."""

    mode: str
    names: tuple[str, ...]
    seed: int
    seconds: float

    def summary(self) -> str:
        """One line."""
        what = f"{len(self.names)} objects" if self.mode == "sampled" else self.names[0]
        drawn = f", drawn with seed {self.seed}" if self.mode == "sampled" else ""
        return f"{what} built again to the same bytes in {self.seconds:.0f} s{drawn}"


def verify_torch(config: Config, *, sample: int = 20, full: bool = False, seed: int | None = None) -> Verified:
    """Build again and compare.

    Raises NotReproducible with the names that differ, ArtefactMissing without a whole build. What does not
    compile at all is no other object: CommandFailed, DiskFull, MemoryExhausted, as by ``Builder.run``.
    """
    ensure_running(config)
    with flow.alone(config.target_root), job.TorchFlow(config) as made:
        if full:
            before = wheels_to_compare(config)
            builder = made.builder()
            return _full(made, builder, *made_alike(before, builder.versions()))
        builder = made.builder()
        return sampled(builder, sample, random.SystemRandom().randrange(1 << 32) if seed is None else seed)


def sampled(builder: building.Builder, sample: int, seed: int) -> Verified:
    """Compile ``sample`` objects of the builder's tree again. Raises as ``verify_torch``."""
    began = time.monotonic()
    listed = builder.home / "pytorch" / "build" / "compile_commands.json"
    if not listed.is_file():
        raise ArtefactMissing(
            "there is no build tree of torch to draw objects from",
            expected=f"{listed.name} in {listed.parent}",
            found="no such file",
            fix="run ./inv build-torch --again (a kept or fetched wheel has no tree), or use --full",
        )
    # A precompiled header is no object. What unites the sources of a folder ends in .cxx too, and is one.
    commands = [item for item in json.loads(listed.read_text()) if "/cmake_pch." not in item["file"]]
    if not commands or sample < 1:
        raise ArtefactMissing(
            "there is nothing to compare", expected="at least one object", found=f"{sample} asked for"
        )
    # S311: objects are drawn so that a run can be repeated, not so that nobody can guess them.
    drawn = random.Random(seed).sample(commands, min(sample, len(commands)))  # noqa: S311
    _require_made(listed.parent, [_object_of(item) for item in drawn])
    differing, names = [], []
    with progress.bar("torch: objects compiled again", total=len(drawn)) as bar:
        for number, item in enumerate(drawn):
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
        raise NotReproducible(
            f"{len(differing)} of {len(drawn)} objects of torch are not the same when compiled again",
            expected="the same bytes",
            found=", ".join(differing),
            fix=f"--seed={seed} draws the same ones; the log is {builder.log}",
        )
    return Verified("sampled", tuple(names), seed, time.monotonic() - began)


def _object_of(command: Mapping[str, str]) -> str:
    """Where a command of the database writes to, from the build's folder."""
    words = shlex.split(command["command"])
    return words[words.index("-o") + 1]


def _require_made(tree: Path, objects: Sequence[str]) -> None:
    """Raise ArtefactMissing for objects that no build has come to: the database is there since configure."""
    absent = [name for name in objects if not (tree / name).is_file()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ArtefactMissing(
            "the build tree of torch is not complete",
            expected="every object that was drawn: a build that came to its end",
            found=f"no {absent[0].rsplit('/', 1)[-1]}{more}",
            fix="run ./inv build-torch --again, which goes on from there",
        )


def _full(made: job.TorchFlow, builder: building.Builder, wheel: Path, where: str) -> Verified:
    began = time.monotonic()
    progress.say(f"    compared with {wheel.name}, {where}")
    again = builder.elsewhere("again")
    again.discard()
    out = made.root / "torch-again"
    built = again.build(out)
    first, second = files.sha256_of(wheel), files.sha256_of(built.wheel)
    if first != second:
        raise NotReproducible(
            "torch's wheel is not the same when built again",
            expected=f"SHA-256 {first}",
            found=f"SHA-256 {second}",
            fix=f"compare {wheel} with {built.wheel} (diffoscope shows what differs)",
        )
    again.discard()
    files.remove(out)
    return Verified("full", (f"{wheel.name} ({where})",), 0, time.monotonic() - began)


def wheels_to_compare(config: Config) -> list[tuple[Path, str]]:
    """Wheels that the recipe as it is now made before, and where from. Raises ArtefactMissing where none is.

    A wheel of another recipe would be another one however well the build repeats itself.
    """
    refused: list[str] = []
    spoilt: list[resolve.Spoilt] = []
    found = [(wheel, where) for wheel, _, where in resolve.of_this_recipe(config, refused, spoilt)]
    if found:
        resolve.warn_of(spoilt)
        return found
    if spoilt:
        raise spoilt[0].fault
    raise ArtefactMissing(
        "there is no wheel to compare with",
        expected="one that this recipe made",
        found="; ".join(refused) or "none",
        fix="run ./inv build-torch",
    )


def made_alike(wheels: Sequence[tuple[Path, str]], versions: Mapping[str, str]) -> tuple[Path, str]:
    """The first that was compiled with these versions, as ``Builder.versions`` has them.

    Raises ArtefactMissing with what differs where none was.
    """
    told = []
    for wheel, where in wheels:
        before = provenance.versions_of(wheel)
        names = sorted(name for name in {*before, *versions} if before.get(name) != versions.get(name))
        if not names:
            return wheel, where
        moved = [f"{name} {before.get(name, 'absent')} → {versions.get(name, 'absent')}" for name in names]
        more = [f"and {len(moved) - _SHOWN} more"] if len(moved) > _SHOWN else []
        told.append(f"{wheel.name} ({where}): {', '.join([*moved[:_SHOWN], *more])}")
    raise ArtefactMissing(
        "there is no wheel to compare with: the builder image has another compiler or other packages now",
        expected="one that was compiled with what the builder image has",
        found="; ".join(told),
        fix="run ./inv build-torch, which makes one with these, then this task again",
    )
