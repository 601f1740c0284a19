"""Compare the time of an exact export of the image with that of ``docker export | tar``, whose copy is not exact."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from pathlib import Path

from benchmarks.measure import Figure, Goal, Result, median_of, quantity, ratio, timed
from benchmarks.workspace import Workspace, size_of
from engine.connect import connect
from engine.containers import container
from nfsroot import unpack
from toolchain import files, process, progress

EXACT = "exact copy of the image"
SCALED = "exact copy, scaled to 430 MB"
PLAIN = "docker export | tar --extract"
WHOLE = "export-nfsroot, the whole task"
PEAK = "peak memory of Python, export-nfsroot"

GOAL_BYTES = 430e6
GOAL_SECONDS = 2.0

RULE = (
    "Copies: one warm-up run, which caches the image's layers, then the median of the timed runs. Each copy goes into "
    "a new folder; all are removed at the end, because ext4 without a journal checks each recently freed inode before "
    "it allocates one. No copy is synced to disk. The whole task: one run in a separate process."
)


def measure(workspace: Workspace) -> Result:
    """Measure how long an exact copy of the image, a copy with docker and tar, and ``export-nfsroot`` take.

    Raises any error that occurs while copying.
    """
    workspace.ensure_built()
    config = workspace.config
    reference = config.image_reference("system")
    with contextlib.closing(connect()) as client:
        source = unpack.find_image(client, reference, config.image.target)
        with files.scratch_folder(workspace.folder, "export") as scratch:
            trees = (scratch / f"tree-{number}" for number in itertools.count())
            methods = []

            def exact() -> None:
                methods.append(unpack.unpack(client, source, next(trees)))

            def plain() -> None:
                (tree := next(trees)).mkdir()
                with container(client, reference, ["true"], architecture=config.image.target) as box:
                    process.run(["sh", "-c", plain_way(str(box.id), tree)])

            with progress.step("exact copy"):
                seconds = timed(exact, times=workspace.times, warm_up=1)
            size = size_of(scratch / "tree-0")
            with progress.step(PLAIN):
                plain_seconds = timed(plain, times=workspace.times, warm_up=1)
    with progress.step("export-nfsroot"):
        task = workspace.task("export-nfsroot")
    copied = median_of(EXACT, seconds, note=f"{quantity(size / 1e6, 'MB')}, read by {methods[-1]}")
    tarred = median_of(PLAIN, plain_seconds, note="adds, empties and changes files in /etc and /dev")
    return Result(
        name="export",
        title="Export of the image",
        rule=RULE,
        figures=(
            copied,
            Figure(name="  its rate", value=size / 1e6 / copied.value, unit="MB/s"),
            Figure(
                name=SCALED,
                value=copied.value * GOAL_BYTES / size,
                goal=Goal(GOAL_SECONDS),
                note="at this rate; the image is larger",
            ),
            tarred,
            ratio("docker export | tar / exact copy", tarred, copied),
            Figure(name=WHOLE, value=task.seconds, note="copy, hashes, audit, and files next to the tree"),
            Figure(name=PEAK, value=task.peak_mb, unit="MB", goal=Goal(200), note="VmHWM of the task"),
        ),
        facts={"bytes": size, "method": methods[-1], "layers": len(source.layers)},
    )


def plain_way(box: str, tree: Path) -> str:
    """Return the command line ``docker export | tar``, in which tar preserves owners and file capabilities."""
    docker = process.require_program("docker", "to export a container in the conventional way")
    unpacked = shlex.join(
        ["tar", "--extract", f"--directory={tree}", "--numeric-owner", "-p", "--xattrs", "--xattrs-include=*"]
    )
    return f"{shlex.quote(str(docker))} export {box} | {unpacked}"
