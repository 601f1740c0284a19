"""Benchmark ``models``: count the instructions of each model, compiled by TVM and in eager PyTorch (float32, int8)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu import compare, counts, emulation
from benchmarks.measure import Figure, Result, text_of, titled_table
from benchmarks.workspace import Workspace
from device.remote import eager, models, targets
from flow import extracted_tools, pipelines
from flow.build_lock import build_lock
from flow.context import Context
from toolchain import files, progress

RULE = (
    "Executed instructions of the second call, in QEMU, with one thread and batch size 1; calls from Python are "
    "included. When a block starts, all its instructions are counted; a conditional instruction counts whether or not "
    "its condition holds. "
    "MODEL of the cost: instructions are not cycles. Times are the median of three calls UNDER EMULATION, without the "
    "plugin. Nothing here was measured on hardware. TVM uses its default schedules."
)
MODELS = ("cnn", "lstm", "transformer", "small_mobilenet_v2", "small_resnet18")
"""Functions in ``networks.py``. The small networks have inputs of 32×32."""
HOW = ("TVM", "torch float32", "torch int8")
_SCRIPT = Path(__file__).with_name("on_target.py")
_TARGETS = {"armhf": "armv7", "arm64": "aarch64"}


@dataclass(frozen=True)
class Cell:
    """The measurements of a model in one of the variants in ``HOW``.

    If the model was not run, ``reason`` states why.
    """

    instructions: int = 0
    seconds: float = 0.0
    reason: str = ""


def measure(workspace: Workspace) -> Result:
    """Compile the models for the target, then count their instructions and measure their run times under emulation.

    Raises PlatformMismatch for other targets, ArtefactMissing if there is no torch wheel, CommandFailed if a program
    fails, and the same errors as ``models.compile_for``.
    """
    config = workspace.user
    workspace.require_target("models", *_TARGETS)
    target = targets.load(_TARGETS[config.image.target.debian])
    tools = extracted_tools.cpu_tools(config)
    log = workspace.results / "logs" / "models.log"
    with (
        build_lock(config.target_root),
        Context(config) as context,
        files.scratch_folder(workspace.folder, "models") as scratch,
    ):
        pipeline = pipelines.cpu_job(context)
        made = {item.step: item for item in pipeline.execute(pipeline.plan())}
        for name in MODELS:
            with progress.step(f"compile {name} for {target.title}"):
                models.compile_for(config, f"benchmarks.models.networks:{name}", target, scratch / name)
        plugin = scratch / "count.so"
        counts.compile_plugin(tools, plugin)
        inside = emulation.INSIDE
        binds = {_SCRIPT: f"{inside}/on_target.py", eager.SCRIPT: f"{inside}/torch_session.py"}
        binds |= {scratch / name: f"{inside}/{name}" for name in MODELS}
        found = {}
        for mode in ("count", "time"):
            out = scratch / mode
            out.mkdir()
            with progress.step(f"{mode} the models in the emulator"):
                emulation.run(
                    context,
                    tools,
                    compare.site_of(context, made),
                    [f"{inside}/on_target.py", mode, "/out/rows.json", *(f"{inside}/{name}" for name in MODELS)],
                    binds=binds,
                    out=out,
                    log=log,
                    plugin=plugin if mode == "count" else None,
                )
            found[mode] = json.loads((out / "rows.json").read_text())
        regions = counts.read(scratch / "count" / "counts")
    return result(cells(found["count"], found["time"], regions), f"torch {made['torch'].facts['version']}", target.name)


def cells(
    counted: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]], regions: Mapping[int, counts.Region]
) -> dict[str, dict[str, Cell]]:
    """Combine the rows of both runs of ``on_target.py``: return the measurements by model and by variant (``HOW``)."""
    made: dict[str, dict[str, Cell]] = {}
    for one, other in zip(counted, timed, strict=True):
        instructions = regions[one["region"]].instructions if one["region"] else 0
        made.setdefault(one["model"], {})[one["how"]] = Cell(instructions, other["seconds"], one["reason"])
    return made


def result(made: Mapping[str, Mapping[str, Cell]], torch: str, target: str) -> Result:
    """Return the benchmark's result: the table, and the ratios of TVM's instruction counts to PyTorch's."""
    figures = [
        Figure(
            name=f"{name}, {target}: instructions, TVM / {how}",
            value=row["TVM"].instructions / row[how].instructions,
            unit="×",
        )
        for name, row in made.items()
        for how in HOW[1:]
        if row[how].instructions
    ]
    facts = {name: {how: vars(cell) for how, cell in row.items()} for name, row in made.items()}
    return Result(
        name="models",
        title="Models run with both TVM and eager PyTorch",
        rule=RULE,
        figures=tuple(figures),
        tables=table(made, torch, target),
        facts={"torch": torch, "target": target, "models": facts},
    )


def table(made: Mapping[str, Mapping[str, Cell]], torch: str, target: str) -> str:
    """Return the table of instruction counts and of times under emulation."""
    shown = titled_table(f"{target}, {torch}")
    shown.add_column("model", no_wrap=True)
    for how in HOW:
        shown.add_column(f"instructions, millions: {how}", justify="right")
    for how in HOW:
        shown.add_column(f"ms, emulated: {how}", justify="right")
    for name, row in made.items():
        counted = [f"{row[how].instructions / 1e6:.3g}" if row[how].instructions else "–" for how in HOW]
        timed = [f"{row[how].seconds * 1e3:.3g}" if row[how].seconds else "–" for how in HOW]
        shown.add_row(name, *counted, *timed)
    cells = ((name, how, cell) for name, row in made.items() for how, cell in row.items())
    return text_of(shown, *(f"not run: {name}, {how}: {cell.reason}" for name, how, cell in cells if cell.reason))
