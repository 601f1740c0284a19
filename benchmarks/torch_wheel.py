"""torch's compile: the same few objects three ways, and what the whole would cost emulated.

The objects come from the build tree that ``./inv build-torch`` left, by the command lines of its build, without ccache.
They are sources of c10, which read no library's headers but their own: those of the others are in the builder image
only. One compiler is compared with itself, GCC; what the recipe's own takes for them is told beside it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from benchmarks.extension import Spent, Way, cpu_of, spent_in
from benchmarks.measure import Figure, Goal, Result, median_of, quantity, ratio
from benchmarks.workspace import Workspace
from engine import daemon as engine
from engine.containers import run_in
from flow import torch_job
from flow.context import Context
from flow.native_compiler import native_compiler
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
"""Of a build without ccache: 45 minutes."""
RULE = (
    "One compiler at a time, no ccache, timed inside the container. The first three are GCC by one command line, "
    "without warnings; the recipe's is the build's own. Emulated: one run; the others: the median, taken in turns. "
    "The whole emulated is the build's own seconds times what GCC emulated takes beside the recipe's: an estimate. "
    "What the build took is what it noted itself, with whatever else the machine did then."
)


def measure(workspace: Workspace) -> Result:
    """Compile the objects three ways. Raises ArtefactMissing without a build tree of torch in the user's folder."""
    user = workspace.user
    workspace.ensure_workbench()
    with Context(user) as context:
        builder = torch_job.ready_builder(context)
        commands = command_lines(builder)
        compiler = native_compiler(Context(workspace.config))
        dev = workspace.config.image_reference("dev")
        target = user.image.target
        ways = {
            "emulated": Way(dev, target, (), {}),
            "native": Way(dev, target, tuple(compiler.binds()), dict(compiler.environment)),
            "cross": Way(user.image_reference("torch-builder"), host_architecture(), (), {}),
            "recipe": Way(user.image_reference("torch-builder"), host_architecture(), (), {}),
        }
        samples: dict[str, list[Spent]] = {name: [] for name in ways}
        client = engine.connect(timeout_s=7200)
        try:
            gcc = {name: f"{target.gnu}-g++" if name == "cross" else "g++" for name in ("emulated", "native", "cross")}
            for name in [*["native", "cross", "recipe"] * workspace.times, "emulated"]:
                with progress.step(TITLES[name]):
                    script = script_of([for_gcc(words, gcc[name]) for words in commands] if name in gcc else commands)
                    done = run_in(
                        client,
                        ways[name].image,
                        ["sh", "-uc", script],
                        architecture=ways[name].architecture,
                        binds=[f"{builder.home}:/usr/src/torch:ro", *ways[name].binds],
                        environment=ways[name].environment,
                        limit_s=7200,
                        log=workspace.results / "logs" / "torch.log",
                    )
                    samples[name].append(spent_in(done.output))
        finally:
            client.close()
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
    """What the tree's build took, and why a figure is missing; ``slower`` is how many times slower emulation is.

    An object that the compiler's cache answered took no time to compile: where there is one, nothing is said of all,
    and the whole has no goal.
    """
    hits, calls = builder.cache_use()
    answered = f"ccache answered {hits} of {calls} compiler calls"
    figures: list[Figure] = []
    notes = []
    runs = builder.runs()
    ended = next((number for number, run in enumerate(runs, 1) if run.finished), 0)
    if not ended or not all(run.seconds for run in runs[:ended]):
        notes.append("what the whole build took is left out: not every run at that tree was noted to its end")
    else:
        phases: dict[str, float] = {}
        for run in runs[:ended]:
            for name, seconds in run.seconds.items():
                phases[name] = phases.get(name, 0.0) + seconds
        told = ", ".join(f"{name} {quantity(seconds, 's')}" for name, seconds in phases.items())
        goes = f"; in {ended} runs" if ended > 1 else ""
        figures.append(
            Figure(
                name="the whole build, all phases",
                value=sum(phases.values()),
                goal=GOAL if calls and not hits else None,
                note=f"{told}{goes}; {answered}",
            )
        )
    if not calls:
        notes.append("what all objects took is left out: it is not known what ccache answered in that build")
    elif hits:
        notes.append(f"what all objects took is left out: {answered} in that build")
    else:
        whole = sum(seconds_of_objects(builder.home))
        figures += [
            Figure(name="all objects of the last build, one after the other", value=whole),
            Figure(name="all objects emulated (estimate)", value=whole * slower, note=f"{whole:.0f} s × {slower:.1f}"),
        ]
    return tuple(figures), tuple(notes)


def has_tree(user: Config) -> bool:
    """Whether a build from source has left its tree."""
    return any(user.target_root.glob("work/torch-*/pytorch/build/compile_commands.json"))


def command_lines(builder: building.Builder) -> list[list[str]]:
    """The build's own command lines for the sources, without launcher. Raises ArtefactMissing."""
    listed = builder.home / "pytorch" / "build" / "compile_commands.json"
    if not listed.is_file():
        raise ArtefactMissing(
            "there is no build tree of torch to take command lines from",
            expected=str(listed),
            found="no such file",
            fix="run ./inv build-torch --again first (a kept or fetched wheel has no tree)",
        )
    found = []
    for item in json.loads(listed.read_text()):
        if item["file"].endswith(SOURCES):
            words = shlex.split(item["command"])
            found.append(words[1:] if words[0].endswith("ccache") else words)
    return found


def seconds_of_objects(home: Path) -> list[float]:
    """What each object of the tree took, by ninja's log: seconds by the clock, with others beside it."""
    rows = (home / "pytorch" / "build" / ".ninja_log").read_text().splitlines()[1:]
    parts = [row.split("\t") for row in rows]
    return [(int(item[1]) - int(item[0])) / 1000 for item in parts if item[3].endswith((".o", ".gch"))]


def for_gcc(words: list[str], program: str) -> list[str]:
    """A command line of the build for GCC: without warnings, and without what Clang alone knows."""
    kept = [program]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-Xclang", "-target"):
            next(rest)
        elif not word.startswith(("-W", "--target=", "-Qunused-", "-fclang-", "-fcolor-")):
            kept.append(word)
    return kept


def script_of(commands: list[list[str]]) -> str:
    """Compile all of them to /tmp, and tell the seconds."""
    lines = ["cd /usr/src/torch/pytorch/build || exit 1", "began=$(date +%s%N)"]
    for words in commands:
        out = words.index("-o")
        lines.append(shlex.join([*words[: out + 1], "/tmp/object.o", *words[out + 2 :]]) + " || exit 1")  # noqa: S108
    return "\n".join([*lines, "echo took $(( $(date +%s%N) - began )) ns", "times"])
