"""Measure the compile time of a few of torch's object files, and estimate the duration of an emulated build of torch.

The sources and command lines are from the build tree of ``./inv build-torch``; ccache is removed from the command
lines. All of these sources belong to c10, because c10 does not include headers of other libraries, which exist only in
the builder image. Three variants of GCC compile the object files: an emulated compiler, a native compiler in the
emulated container, and a plain cross compiler. The recipe's own compiler is also measured.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

from benchmarks.extension import Spent, Way, cpu_of, spent_in
from benchmarks.measure import Figure, Goal, Result, median_of, quantity, ratio
from benchmarks.workspace import Workspace
from engine.connect import connect
from engine.containers import run_in
from flow import torch_job
from flow.compilers import native_compiler
from flow.context import Context
from recipes.torch import build as building
from toolchain import progress
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import ArtefactMissing

SOURCES = ("c10/core/TensorImpl.cpp", "c10/core/SymInt.cpp", "c10/core/DispatchKeySet.cpp")
TITLES = {
    "emulated": "three objects, emulated compiler",
    "native": "three objects, native compiler in the container",
    "cross": "three objects, plain cross compiler",
    "recipe": "three objects, the recipe's compiler",
}
GOAL = Goal(2700)
"""The goal for a build without ccache: 45 minutes."""
RULE = (
    "One compiler at a time, no ccache, timed inside the container. The first three use GCC with the same "
    "command line, without warning options; the recipe's compiler uses the command line of the build. Emulated: "
    "one run; others: the median of alternating runs. The emulated total is an estimate: the time of the build, "
    "multiplied by the ratio of emulated GCC to the recipe's compiler. The time of the build is the recorded time, "
    "which depends on the load during the build."
)


def measure(workspace: Workspace) -> Result:
    """Measure the compile time of the objects with each compiler.

    Raises ArtefactMissing if the user's build folder does not contain a build tree of torch.
    """
    user = workspace.user
    workspace.ensure_workbench()
    with Context(user) as context:
        builder = torch_job.ready_builder(context)
        commands = command_lines(builder)
        compiler = native_compiler(Context(workspace.config))
        dev = workspace.config.image_reference("dev")
        target = user.image.target
        ways = {
            "emulated": Way(dev, target),
            "native": Way(dev, target, compiler),
            "cross": Way(user.image_reference("torch-builder"), host_architecture()),
            "recipe": Way(user.image_reference("torch-builder"), host_architecture()),
        }
        samples: dict[str, list[Spent]] = {name: [] for name in ways}
        with contextlib.closing(connect(timeout_s=7200)) as client:
            gcc = {name: f"{target.gnu}-g++" if name == "cross" else "g++" for name in ("emulated", "native", "cross")}
            for name in [*["native", "cross", "recipe"] * workspace.times, "emulated"]:
                with progress.step(TITLES[name]):
                    script = script_of([for_gcc(words, gcc[name]) for words in commands] if name in gcc else commands)
                    done = run_in(
                        client,
                        ways[name].image,
                        ["sh", "-uc", script],
                        architecture=ways[name].architecture,
                        binds=[f"{builder.home}:/usr/src/torch:ro", *ways[name].mounts.binds()],
                        environment=ways[name].mounts.environment,
                        limit_s=7200,
                        log=workspace.results / "logs" / "torch.log",
                    )
                    samples[name].append(spent_in(done.output))
    figures = {
        name: median_of(title, [item.seconds for item in samples[name]], note=f"CPU {cpu_of(samples[name]):.1f} s")
        for name, title in TITLES.items()
    }
    slower = figures["emulated"].value / figures["recipe"].value
    built, notes = figures_of_the_build(builder, slower)
    return Result(
        name="torch",
        title="torch from source",
        rule=RULE,
        figures=(
            *figures.values(),
            ratio("emulated / native in the container", figures["emulated"], figures["native"]),
            ratio("emulated / plain cross", figures["emulated"], figures["cross"]),
            ratio("native in the container / plain cross", figures["native"], figures["cross"]),
            ratio("plain cross / the recipe's", figures["cross"], figures["recipe"]),
            *built,
        ),
        notes=notes,
        facts={"sources": SOURCES},
    )


def figures_of_the_build(builder: building.Builder, slower: float) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """Return the figures for the build that created the build tree, and a note for each missing time.

    ``slower`` is the factor by which emulation increases the compile time. If some objects came from ccache, the result
    omits the total time of all objects, and does not compare the time of the whole build with a goal.
    """
    hits, calls = builder.cache_use()
    cached = f"{hits} of {calls} compiler calls were ccache hits"
    figures: list[Figure] = []
    notes = []
    runs = builder.runs()
    ended = next((number for number, run in enumerate(runs, 1) if run.finished), 0)
    if not ended or not all(run.seconds for run in runs[:ended]):
        notes.append("the time of the whole build is left out: the record of its runs is incomplete")
    else:
        phases: dict[str, float] = {}
        for run in runs[:ended]:
            for name, seconds in run.seconds.items():
                phases[name] = phases.get(name, 0.0) + seconds
        times = ", ".join(f"{name} {quantity(seconds, 's')}" for name, seconds in phases.items())
        runs_note = f"; in {ended} runs" if ended > 1 else ""
        figures.append(
            Figure(
                name="the whole build, all phases",
                value=sum(phases.values()),
                goal=GOAL if calls and not hits else None,
                note=f"{times}{runs_note}; {cached}",
            )
        )
    if not calls:
        notes.append("the time of all objects is left out: the number of ccache hits in that build is unknown")
    elif hits:
        notes.append(f"the time of all objects is left out: {cached} in that build")
    else:
        whole = sum(seconds_of_objects(builder.home))
        figures += [
            Figure(name="all objects of the last build, one after the other", value=whole),
            Figure(name="all objects emulated (estimate)", value=whole * slower, note=f"{whole:.0f} s × {slower:.1f}"),
        ]
    return tuple(figures), tuple(notes)


def has_tree(user: Config) -> bool:
    """Return whether the user's build folder contains a build tree of torch."""
    return any(user.target_root.glob("work/torch-*/pytorch/build/compile_commands.json"))


def command_lines(builder: building.Builder) -> list[list[str]]:
    """Return the build's command lines for the sources, with ccache removed. Raises ArtefactMissing."""
    listed = builder.home / "pytorch" / "build" / "compile_commands.json"
    if not listed.is_file():
        raise ArtefactMissing(
            "there is no build tree for the current torch recipe and builder",
            expected=str(listed),
            found="no such file",
            fix="run ./inv build-torch --again first (there is no build tree for a cached or downloaded wheel)",
        )
    found = []
    for item in json.loads(listed.read_text()):
        if item["file"].endswith(SOURCES):
            words = shlex.split(item["command"])
            found.append(words[1:] if words[0].endswith("ccache") else words)
    return found


def seconds_of_objects(home: Path) -> list[float]:
    """Return the compile time of each object in ninja's log.

    The sum of these times exceeds the elapsed time, because objects were compiled in parallel.
    """
    rows = (home / "pytorch" / "build" / ".ninja_log").read_text().splitlines()[1:]
    parts = [row.split("\t") for row in rows]
    return [(int(item[1]) - int(item[0])) / 1000 for item in parts if item[3].endswith((".o", ".gch"))]


def for_gcc(words: list[str], program: str) -> list[str]:
    """Convert one of the build's command lines for GCC: remove warning options and options that only Clang supports."""
    made = [program]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-Xclang", "-target"):
            next(rest)
        elif not word.startswith(("-W", "--target=", "-Qunused-", "-fclang-", "-fcolor-")):
            made.append(word)
    return made


def script_of(commands: list[list[str]]) -> str:
    """Return a script that compiles all sources, writes the objects to /tmp, and prints the elapsed and CPU times."""
    lines = ["cd /usr/src/torch/pytorch/build || exit 1", "began=$(date +%s%N)"]
    for words in commands:
        out = words.index("-o")
        lines.append(shlex.join([*words[: out + 1], "/tmp/object.o", *words[out + 2 :]]) + " || exit 1")  # noqa: S108
    return "\n".join([*lines, "echo took $(( $(date +%s%N) - began )) ns", "times"])
