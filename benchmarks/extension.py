"""Build an extension wheel in three ways: emulated, with a native compiler in the container, and cross-compiled.

The benchmark compares two durations: that of the whole build by ``pip wheel`` in the container, and that of the
compiler and linker calls alone. For each of the three ways, these calls use the command lines and folders of a wheel
build.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import docker

from benchmarks.measure import Figure, Goal, Result, median_of, ratio, timed
from benchmarks.workspace import Workspace
from engine.connect import connect
from engine.containers import run_in
from flow.compilers import native_compiler
from flow.context import Context
from flow.steps import qpu_ops
from images.build_tools import together
from images.native import Mounts
from recipes import recipe
from recipes.qpu_ops.incremental import compiler_commands
from toolchain import files, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.errors import CommandFailed

SOURCE = "/usr/src/extension"
WHEEL_EMULATED = "whole wheel, emulated compiler"
WHEEL_NATIVE = "whole wheel, native compiler in the container"
WHEEL_CROSS = "whole wheel, cross-compiled in the builder image"
COMPILED = {
    "emulated": "compile and link, emulated",
    "native": "compile and link, native in the container",
    "cross": "compile and link, plain cross compiler",
}

RULE = (
    "Emulated: one run. Native and plain cross: the median of alternating runs; the build that determines the command "
    "lines is the warm-up. The time of a whole wheel includes starting its container; other times do not. One "
    "compiler runs at a time."
)


@dataclass(frozen=True)
class Subject:
    """The extension to build, and the mounts for every container that builds it."""

    title: str
    source: Path
    mounts: Mounts


@dataclass(frozen=True)
class Spent:
    """The time of the compiler calls in seconds: wall-clock time, and CPU time (user and system) of all processes."""

    seconds: float
    cpu: float


def cpu_of(samples: Sequence[Spent]) -> float:
    """Return the median CPU time in seconds."""
    return statistics.median(item.cpu for item in samples)


def spent_in(output: str) -> Spent:
    """Return the wall-clock and CPU times at the end of a replay script's output.

    Raises CommandFailed if they are missing.
    """
    took = re.search(r"^took (\d+) ns$", output, re.MULTILINE)
    # times(1p) prints the user and system time of the shell, and on the next line the times of its children.
    parts = [int(minutes) * 60 + float(rest) for minutes, rest in re.findall(r"(\d+)m([0-9.]+)s", output)[-4:]]
    if took is None or len(parts) != 4:
        raise CommandFailed("the output does not report the time spent in the compiler", tail=output[-2000:])
    return Spent(int(took[1]) / 1e9, sum(parts))


@dataclass(frozen=True)
class Way:
    """One way to build the extension: the container's image, its architecture and its mounts."""

    image: str
    architecture: Architecture
    mounts: Mounts = field(default_factory=Mounts)
    wheel: str = "python3 -m pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir /usr/src/out ."
    """The script that builds the whole wheel."""


def subject_of(workspace: Workspace) -> Subject:
    """Return the extension to build: the QPU extension if torch is in the image, otherwise a sample extension."""
    context = Context(workspace.config)
    manifests = workspace.manifests()
    if not manifests["torch-site"].facts["version"]:
        sample = Path(__file__).parent / "sample_extension"
        return Subject("a sample extension, because there is no torch wheel", sample, Mounts())
    packages = f"usr/local/lib/python{context.suite.python}/dist-packages"
    prefix = str(manifests["libqpu"].facts["prefix"])
    paths = {
        f"/{packages}": context.torch_site / packages,
        prefix: context.libqpu_stage / prefix.removeprefix("/"),
    }
    return Subject("qpu_ops", recipe.load("qpu_ops").folder, Mounts(paths, {"LIBQPU_PREFIX": prefix}))


def measure(workspace: Workspace) -> Result:
    """Replay the compiler calls in each of the three ways, and build the whole wheel; return the times and ratios.

    The wheel of the sample extension is not cross-compiled. Raises CommandFailed with the compiler's error.
    """
    workspace.ensure_workbench()
    config = workspace.config
    context = Context(config)
    subject = subject_of(workspace)
    compiler = native_compiler(context)
    with (
        contextlib.closing(connect(timeout_s=3600)) as client,
        files.scratch_folder(workspace.folder, "extension") as scratch,
    ):
        dev = config.image_reference("dev")
        target = config.image.target
        ways = {
            "emulated": Way(dev, target, subject.mounts),
            "native": Way(dev, target, together(subject.mounts, compiler)),
            "cross": Way(config.image_reference("builder"), host_architecture(), subject.mounts),
        }
        trial = Trial(workspace, client, subject, scratch)
        with progress.step("determine the compiler's command lines"):
            commands = trial.command_lines(ways["native"])
        samples: dict[str, list[Spent]] = {name: [] for name in ways}
        objects: dict[str, dict[str, str]] = {}
        for _ in range(workspace.times):
            for name in ("native", "cross"):
                with progress.step(COMPILED[name]):
                    samples[name].append(trial.replay(ways[name], commands))
                    objects[name] = trial.objects()
        with progress.step(COMPILED["emulated"]):
            samples["emulated"].append(trial.replay(ways["emulated"], commands))
            objects["emulated"] = trial.objects()
        wheels: dict[str, list[float]] = {"native": [], "emulated": [], "cross": []}
        has_torch = bool(subject.mounts.paths)
        if has_torch:  # only the build of the QPU extension supports cross-compilation
            ways["cross"] = _of_the_main_job(context, workspace, ways["cross"])
        again = ["native", "cross"] if has_torch else ["native"]
        for name in [*again * workspace.times, "emulated"]:
            with progress.step(f"whole wheel, {name}"):
                wheels[name].append(trial.whole_wheel(ways[name]))
    compiled = {
        name: median_of(title, [item.seconds for item in samples[name]], note=f"CPU {cpu_of(samples[name]):.1f} s")
        for name, title in COMPILED.items()
    }
    by_cpu = {name: Figure(name=name, value=cpu_of(found)) for name, found in samples.items()}
    wheel = {
        "emulated": median_of(WHEEL_EMULATED, wheels["emulated"]),
        "native": median_of(WHEEL_NATIVE, wheels["native"], note="emulated Python and pip included"),
    }
    if wheels["cross"]:
        wheel["cross"] = median_of(WHEEL_CROSS, wheels["cross"], note="as in the main job")
    same = {name: "identical" if found == objects["emulated"] else "DIFFERENT" for name, found in objects.items()}
    return Result(
        name="extension",
        title=f"Extension wheel: {subject.title}",
        rule=RULE,
        figures=(
            *compiled.values(),
            ratio("emulated / native in the container", compiled["emulated"], compiled["native"], goal=Goal(6, False)),
            ratio("native in the container / plain cross", compiled["native"], compiled["cross"], goal=Goal(1.15)),
            ratio("  by CPU time: emulated / native", by_cpu["emulated"], by_cpu["native"]),
            ratio("  by CPU time: native / plain cross", by_cpu["native"], by_cpu["cross"]),
            *wheel.values(),
            ratio("whole wheel: emulated / native in the container", wheel["emulated"], wheel["native"]),
        ),
        notes=(
            f"objects compared with the emulated compiler's: native in the container {same['native']}, "
            f"plain cross {same['cross']}",
        ),
        facts={"commands": commands, "objects": objects},
    )


def _of_the_main_job(context: Context, workspace: Workspace, way: Way) -> Way:
    place = qpu_ops.place(context, workspace.manifests())
    return replace(way, mounts=together(way.mounts, Mounts({}, dict(place.environment))), wheel=place.script)


class Trial:
    """Builds the extension in a scratch folder. Each build starts from a clean copy of the source."""

    def __init__(self, workspace: Workspace, client: docker.DockerClient, subject: Subject, scratch: Path) -> None:
        self._workspace, self._client, self._subject = workspace, client, subject
        self._source = scratch / "source"
        self._out = scratch / "out"
        self._log = workspace.results / "logs" / "extension.log"

    def command_lines(self, way: Way) -> list[list[str]]:
        """Build the extension with setup.py; return the compiler's command lines.

        Raises CommandFailed if the build did not run a compiler.
        """
        self._fresh()
        output = self._run(way, "python3 setup.py build_ext --build-lib build/lib --build-temp build/temp")
        commands = compiler_commands(output)
        if not commands:
            raise CommandFailed(
                "the extension's build ran no compiler",
                expected="compiler command lines in the build's output",
                found=f"{len(output.splitlines())} lines of output without a compiler command line",
                tail=output[-2000:],
            )
        return commands

    def replay(self, way: Way, commands: Sequence[Sequence[str]]) -> Spent:
        """Run the command lines one after the other, and return the time that they take inside the container."""
        self._fresh()
        for words in commands:
            product = self._source / words[words.index("-o") + 1]
            product.parent.mkdir(parents=True, exist_ok=True)
        script = "; ".join(
            ("began=$(date +%s%N)", *map(shlex.join, commands), "echo took $(( $(date +%s%N) - began )) ns", "times")
        )
        return spent_in(self._run(way, script))

    def objects(self) -> dict[str, str]:
        """Return the SHA-256 hash of each object file, by path."""
        return {
            str(path.relative_to(self._source)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self._source.rglob("*.o"))
        }

    def whole_wheel(self, way: Way) -> float:
        """Return the time in seconds that the script takes to build a wheel, including the start of the container."""
        self._fresh()
        (seconds,) = timed(lambda: self._run(way, way.wheel), times=1)
        if not list(self._out.glob("*.whl")):
            raise CommandFailed("the build did not produce a wheel", found="an empty folder")
        return seconds

    def _fresh(self) -> None:
        for folder in (self._source, self._out):
            files.remove(folder)
        self._out.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "target.py", "native.py")
        shutil.copytree(self._subject.source, self._source, ignore=ignored)

    def _run(self, way: Way, script: str) -> str:
        return run_in(
            self._client,
            way.image,
            ["sh", "-euc", script],
            architecture=way.architecture,
            binds=[f"{self._source}:{SOURCE}:rw", f"{self._out}:/usr/src/out:rw", *way.mounts.binds()],
            environment={
                "SOURCE_DATE_EPOCH": str(self._workspace.config.image.source_date_epoch),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PIP_ROOT_USER_ACTION": "ignore",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "MAX_JOBS": "1",
                **way.mounts.environment,
            },
            workdir=SOURCE,
            log=self._log,
        ).output
