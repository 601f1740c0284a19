"""Measure a clean image build, a build without changes, and emulated RUN instructions that install the packages."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from benchmarks.measure import Figure, Goal, Result, median_of, quantity, ratio, timed
from benchmarks.workspace import Workspace
from engine.connect import connect
from engine.proxies import build_environment
from flow import main_job
from images import apt, archive, recorded_sources, rootfs, system
from toolchain import files, process, progress
from toolchain.errors import CommandFailed
from toolchain.manifest import Artefact, Manifest

CLEAN = "clean build-image"
AGAIN = "build-image again, nothing changed"
OURS = "root filesystem, built natively"
EMULATED = "the same packages, installed by emulated RUN instructions"
PEAK = "peak memory of Python, build-image"

_LEAN = rootfs.HERE / "overlay/lean"
"""The folder with configuration files that make dpkg and Debian's byte compiler skip parts of the packages."""
_PLAIN_STEPS = ("mirror", "tools", "rootfs")
"""The steps that build the root filesystem from scratch."""

RULE = (
    "Clean: an empty build folder, no image and no downloaded package; one run, downloads included. Again: one warm-up "
    "run, then the median of the timed runs. Both run the task in a separate process. Root filesystem and RUN "
    "instructions: one run each, with nothing in parallel, downloads included; the time to create the minimal root is "
    "not counted."
)


def measure(workspace: Workspace) -> Result:
    """Measure a clean build, a build without changes, and the installation of packages by emulated RUN instructions.

    Raises the tasks' errors.
    """
    workspace.clean()
    with progress.step("clean build-image"):
        clean = workspace.task("build-image")
    steps = workspace.manifests()
    built = Figure(name=CLEAN, value=clean.seconds, goal=Goal(120), note=_contents(steps))
    spent = tuple(
        Figure(name=f"  step {name}", value=item.seconds, note="two steps at once") for name, item in steps.items()
    )
    with progress.step("build-image again"):
        again = median_of(AGAIN, _again(workspace), goal=Goal(5), note="whole process, no step ran")
    peak = Figure(name=PEAK, value=clean.peak_mb, unit="MB", goal=Goal(200), note="VmHWM of the clean build")
    figures = [built, *spent, again, peak]
    notes = [] if steps["torch"].facts["wheel"] else ["WITHOUT torch: there is no wheel, so the goal was not tested"]
    if workspace.config.image.flavour == "debian":
        with progress.step("root filesystem alone"):
            ours = Figure(name=OURS, value=root_alone(workspace), note=f"steps {', '.join(_PLAIN_STEPS)}, alone")
        minimal, seconds = by_run_lines(workspace, steps)
        plain = Figure(
            name=EMULATED, value=seconds, note=f"from a minimal root ({quantity(minimal, 's')}, not counted)"
        )
        figures += [ours, plain, ratio("emulated / native", plain, ours)]
    else:
        notes.append(f"RUN instructions are measured only for the flavour debian, not {workspace.config.image.flavour}")
    return Result(
        name="build",
        title="Image build",
        rule=RULE,
        figures=tuple(figures),
        notes=tuple(notes),
        facts={"packages": steps["rootfs"].inputs["packages"].split(), "torch": steps["torch"].facts["version"]},
    )


def _contents(steps: Mapping[str, Manifest]) -> str:
    version = steps["torch"].facts["version"]
    return f"with torch {version} from a wheel" if version else "WITHOUT torch: no wheel"


def _again(workspace: Workspace) -> tuple[float, ...]:
    before = workspace.stamps()
    seconds = timed(lambda: workspace.task("build-image"), times=workspace.times, warm_up=1)
    require_same_stamps(before, workspace.stamps())
    return seconds


def require_same_stamps(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise CommandFailed if a step ran although nothing had changed, because the measured time would include it."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise CommandFailed(
            "build-image ran steps although nothing changed",
            expected="no step to run",
            found=", ".join(changed),
            fix="run ./inv build-image --plan to see why the steps run; do not change sources while benchmarks run",
        )


def root_alone(workspace: Workspace) -> float:
    """Build the root filesystem from scratch, and return the time in seconds. No other step runs meanwhile."""
    config = workspace.config
    for folder in config.build_root.glob("archives/*"):
        files.remove(folder)
    built = main_job.build_image(config, only=("rootfs",), again=_PLAIN_STEPS)
    return sum(built.manifest(name).seconds for name in _PLAIN_STEPS)


def dockerfile(base: str, packages: list[str], settings: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a Dockerfile that writes files and then installs packages with apt, which runs under emulation.

    ``settings`` maps the path of each file to its contents.
    """
    written = "".join(
        f"RUN mkdir -p {shlex.quote(str(PurePosixPath(path).parent))} && "
        f"printf '%s\\n' {shlex.join(text.splitlines())} >{shlex.quote(path)}\n"
        for path, text in settings.items()
    )
    return (
        f"FROM {base}\n"
        "ENV DEBIAN_FRONTEND=noninteractive\n"
        f"{written}"
        "RUN apt-get update\n"
        f"RUN apt-get install --yes --no-install-recommends {' '.join(packages)}\n"
    )


def lean_settings() -> dict[str, str]:
    """Return the configuration files that make dpkg and Debian's byte compiler skip parts of packages.

    The result maps the path of each file to its contents.
    """
    found = sorted(path for path in _LEAN.rglob("*") if path.is_file())
    return {f"/{path.relative_to(_LEAN)}": path.read_text() for path in found}


def by_run_lines(workspace: Workspace, steps: Mapping[str, Manifest]) -> tuple[float, float]:
    """Create a minimal root filesystem, then install the packages with emulated RUN instructions.

    Return the durations of these two steps in seconds.
    """
    config = workspace.config
    target = config.image.target
    tar = workspace.folder / "minimal.tar"
    with progress.step("create a minimal root with mmdebstrap"):
        (minimal,) = timed(lambda: minimal_root(workspace, steps["mirror"], tar), times=1)
    packages = sorted(set(steps["rootfs"].inputs["packages"].split()) | set(_torch_packages(steps)))
    with contextlib.ExitStack() as stack:
        stack.callback(files.remove, tar)
        client = stack.enter_context(contextlib.closing(connect(timeout_s=3600)))
        base = f"{config.image.name}/minimal:{config.image.label}"
        layer = archive.Layer(Artefact.of(tar))
        archive.load(client, [layer], base, target, epoch=config.image.source_date_epoch)
        settings = {} if config.image.documentation else lean_settings()
        text = dockerfile(base, packages, settings)
        with progress.step(f"{len(packages)} packages with emulated RUN instructions"):
            (seconds,) = timed(
                lambda: system.build(client, f"{config.image.name}/run-lines:{config.image.label}", text, [], target),
                times=1,
            )
    return minimal, seconds


def _torch_packages(steps: Mapping[str, Manifest]) -> list[str]:
    return steps["rootfs"].inputs["torch packages"].split() if steps["torch"].facts["wheel"] else []


def minimal_root(workspace: Workspace, mirror: Manifest, tar: Path) -> None:
    """Create a minimal root filesystem for the target with mmdebstrap alone.

    The packages come from the pockets that the step ``mirror`` verified.

    Raises CommandFailed.
    """
    image = workspace.config.image
    program = process.require_program("mmdebstrap", "to build root filesystems")
    sources = []
    for source in recorded_sources.sources_of(mirror):
        suite = mirror.facts["names"].get(source.pocket.suite, source.pocket.suite)
        sources.append(replace(source, pocket=replace(source.pocket, suite=suite)))
    # This PC's apt configuration determines whether expired indices are accepted.
    option = process.run(["apt-config", "dump", "Acquire::Check-Valid-Until"]).output.strip().rstrip(";")
    with files.replacing(tar) as staged:
        named = staged.with_suffix(".tar")
        try:
            process.run(
                [
                    *(program, "--mode=root", "--variant=minbase", f"--architectures={image.architecture}"),
                    *("--format=tar", '--aptopt=APT::Sandbox::User "root"', "--include=ca-certificates"),
                    *([f"--aptopt={option}"] if option else []),
                    *(image.suite, named, "-"),
                ],
                stdin=apt.sources_text(tuple(sources), (image.architecture,)).encode(),
                env=build_environment(),
                log=workspace.results / "logs" / "minimal.log",
            )
            named.rename(staged)
        finally:
            files.remove(named)
