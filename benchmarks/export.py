"""The export: an exact copy of the image beside ``docker export | tar``, which is not exact."""

from __future__ import annotations

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
    "Copies: one that does not count (the image's layers are then in memory), then the median; each into a new folder, "
    "and all are removed in the end: ext4 without a journal looks at every inode that was freed in the last minutes "
    "before it takes one. Nothing is forced to the disk. The whole task: one run, in a process of its own."
)


def measure(workspace: Workspace) -> Result:
    """Copy the image both ways, then run the task. Raises RootNeeded and what the copies raise."""
    process.require_root("to give files to their owners", "./inv bench --name=export")
    workspace.ensure_built()
    config = workspace.config
    client = connect()
    reference = config.image_reference("system")
    try:
        source = unpack.find_image(client, reference, config.image.target)
        with files.scratch_folder(workspace.folder, "export") as scratch:
            trees = (scratch / f"tree-{number}" for number in itertools.count())
            roads = []

            def exact() -> None:
                roads.append(unpack.unpack(client, source, next(trees)))

            def plain() -> None:
                (tree := next(trees)).mkdir()
                with container(client, reference, ["true"], architecture=config.image.target) as box:
                    process.run(["sh", "-c", plain_way(str(box.id), tree)])

            with progress.step("exact copy"):
                seconds = timed(exact, times=workspace.times, warm_up=1)
            size = size_of(scratch / "tree-0")
            with progress.step(PLAIN):
                beside = timed(plain, times=workspace.times, warm_up=1)
    finally:
        client.close()
    with progress.step("export-nfsroot"):
        task = workspace.task("export-nfsroot")
    copied = median_of(EXACT, seconds, note=f"{quantity(size / 1e6, 'MB')}, read by {roads[-1]}")
    tarred = median_of(PLAIN, beside, note="adds, empties and alters files of /etc and /dev")
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
                note="by its rate; the image is larger",
            ),
            tarred,
            ratio("docker export | tar / exact copy", tarred, copied),
            Figure(name=WHOLE, value=task.seconds, note="copy, hashes, audit, the files beside the tree"),
            Figure(name=PEAK, value=task.peak_mb, unit="MB", goal=Goal(200), note="VmHWM of the task"),
        ),
        facts={"bytes": size, "road": roads[-1], "layers": len(source.layers)},
    )


def plain_way(box: str, tree: Path) -> str:
    """What one would type; with what it takes to keep owners and file capabilities."""
    docker = process.require_program("docker", "to export a container the plain way")
    unpacked = shlex.join(
        ["tar", "--extract", f"--directory={tree}", "--numeric-owner", "-p", "--xattrs", "--xattrs-include=*"]
    )
    return f"{shlex.quote(str(docker))} export {box} | {unpacked}"
