"""Benchmark ``cpu``: count the workloads' instructions with the image's torch wheel and, optionally, a second wheel."""

from __future__ import annotations

import concurrent.futures
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cpu import counts, emulation, model
from benchmarks.measure import Figure, Goal, Result, text_of, titled_table
from benchmarks.workspace import Workspace
from flow import extracted_tools, pipelines
from flow.build_lock import build_lock
from flow.context import Context
from toolchain import files, process, progress
from toolchain.errors import ArtefactMissing
from toolchain.manifest import Manifest
from wheels import byte_code
from wheels import find as wheels

RULE = (
    "Executed instructions of the second call, in QEMU, with one thread. When a block starts, all its "
    "instructions are counted; a conditional instruction counts whether or not its condition holds. "
    f"MODEL: llvm-mca estimates the cycles of the {model.BLOCKS} hottest blocks on {model.CPU}, each in a loop and "
    "with all data in the L1 cache. The sum is scaled to all instructions. It was not measured on hardware."
)
IMPORT = "import torch"
_SCRIPT = Path(__file__).resolve().parent / "workloads.py"
_NETWORKS = _SCRIPT.parents[1] / "models" / "networks.py"
_SHOWN_BLOCKS = 3


@dataclass(frozen=True)
class Row:
    """The instruction counts and modelled cycles of a workload. If the workload was not run, ``reason`` states why."""

    name: str
    reason: str = ""
    by_class: Counter[str] | None = None
    resident_kib: int = 0
    cycles: model.Modelled | None = None
    hottest: tuple[Mapping[str, Any], ...] = ()
    """The code of the hottest blocks, for the result file."""

    @property
    def instructions(self) -> int:
        """The total number of executed instructions."""
        return self.by_class.total() if self.by_class else 0


def measure(workspace: Workspace) -> Result:
    """Count the workloads' instructions with the image's wheel and, if ``workspace.against`` is set, with that wheel.

    Raises PlatformMismatch for a target other than armhf, ArtefactMissing if a wheel is missing, and CommandFailed if
    a program fails.
    """
    config = workspace.user
    workspace.require_target("cpu", "armhf")
    against = Path(workspace.against) if workspace.against else None
    if against and not against.is_file():
        raise ArtefactMissing(
            "the wheel to compare with is missing",
            expected="--against set to the path of a torch wheel",
            found=f"no file {against}",
            fix="pass the path of an existing wheel to --against",
        )
    tools = extracted_tools.cpu_tools(config)
    with build_lock(config.target_root), Context(config) as context:
        pipeline = pipelines.cpu_job(context)
        made = {item.step: item for item in pipeline.execute(pipeline.plan())}
        sites = [(f"torch {made['torch'].facts['version']}", site_of(context, made))]
        with files.scratch_folder(workspace.folder, "cpu") as scratch:
            if against:
                sites.append((against.name, _unpacked(context, against, scratch)))
            plugin = scratch / "count.so"
            counts.compile_plugin(tools, plugin)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                runs = [
                    pool.submit(_rows, workspace, context, tools, plugin, site, scratch / str(number), name)
                    for number, (name, site) in enumerate(sites)
                ]
                try:
                    rows = [run.result() for run in runs]
                except BaseException:
                    process.interrupt_all()  # because the pool would otherwise wait for the other container
                    raise
    return result(rows[0], rows[1] if len(rows) > 1 else None, [name for name, _ in sites])


def site_of(context: Context, made: Mapping[str, Manifest]) -> Path:
    """Return the folder that contains torch. Raises ArtefactMissing."""
    if not made["torch"].facts["wheel"]:
        raise ArtefactMissing(
            "there is no torch wheel to benchmark",
            expected="a wheel in a wheelhouse, the artefact cache or this repository",
            found="none",
            fix="run ./inv build-torch",
        )
    return emulation.packages(context.torch_site, context)


def _unpacked(context: Context, wheel: Path, scratch: Path) -> Path:
    """Unpack a wheel in the same way as the image build does. Raises PlatformMismatch or WheelUnusable."""
    with progress.step(f"unpack {wheel.name}"):
        wheels.audit(wheel, context.target)
        root = scratch / "against"
        root.mkdir()
        wheels.unpack(wheel, root, context.suite)
        byte_code.compile_tree(root, context.tools, context.suite, epoch=context.epoch)
    return emulation.packages(root, context)


def _rows(
    workspace: Workspace, context: Context, tools: Path, plugin: Path, site: Path, out: Path, name: str
) -> list[Row]:
    """Run the workloads in a container with the target's root filesystem, and estimate their cycles with a model."""
    out.mkdir()
    with progress.step(f"count the instructions of {name}"):
        emulation.run(
            context,
            tools,
            site,
            [f"{emulation.INSIDE}/workloads.py", "/out/rows.json"],
            binds={_SCRIPT: f"{emulation.INSIDE}/workloads.py", _NETWORKS: f"{emulation.INSIDE}/networks.py"},
            out=out,
            log=workspace.results / "logs" / "cpu.log",
            plugin=plugin,
        )
    regions = counts.read(out / "counts")
    rows = []
    with progress.step(f"model the hottest blocks of {name}"):
        for item in json.loads((out / "rows.json").read_text()):
            if not item["region"]:
                rows.append(Row(item["name"], item["reason"]))
                continue
            region = regions[item["region"]]
            cycles = None if item["name"] == IMPORT else model.modelled(tools, region)
            hottest = _hottest(region, cycles) if cycles else ()
            rows.append(Row(item["name"], "", region.by_class, region.resident_kib, cycles, hottest))
    return rows


def _hottest(region: counts.Region, cycles: model.Modelled) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {
            "share": round(times * len(block.instructions) / region.instructions, 3),
            "executions": times,
            "model cycles": round(per_run, 2),
            "code": [item.text for item in block.instructions],
        }
        for (block, times), per_run in zip(region.hottest(_SHOWN_BLOCKS), cycles.per_block, strict=False)
    )


def result(rows: Sequence[Row], before: Sequence[Row] | None, names: Sequence[str]) -> Result:
    """Return the benchmark's result, with figures and tables."""
    facts = {
        name: [
            {
                "name": row.name,
                "reason": row.reason,
                "by class": dict(row.by_class or {}),
                "resident KiB": row.resident_kib,
                "model cycles": round(row.cycles.total) if row.cycles else None,
                "modelled share": round(row.cycles.share, 3) if row.cycles else None,
                "hottest blocks": row.hottest,
            }
            for row in side
        ]
        for name, side in zip(("this wheel", "against"), (rows, before or ()), strict=True)
    }
    return Result(
        name="cpu",
        title="torch on the CPU: import cost and performance goals",
        rule=RULE,
        figures=figures(rows, before),
        tables=tables(rows, before, names),
        facts={"wheels": list(names), **facts},
    )


def figures(rows: Sequence[Row], before: Sequence[Row] | None) -> tuple[Figure, ...]:
    """Return the cost of ``import torch``, and the ratios of this wheel to the other one and of int8 to float32."""
    new = {row.name: row for row in rows}
    old = {row.name: row for row in before or ()}
    start = new[IMPORT]
    found = [
        Figure(name="import torch, instructions", value=start.instructions / 1e6, unit="M"),
        Figure(name="import torch, resident memory after it", value=start.resident_kib * 1024 / 1e6, unit="MB"),
    ]
    conv, mobile, linear = "conv 3×3, 64→64 on 56×56", "MobileNetV2 224×224", "linear 1×1024×1024"
    pairs = [
        *((f"{name}: instructions, this / other wheel", new[name], old.get(name), 1 / 3) for name in ("mm 256³", conv)),
        *((f"{name}, int8 / float32", new.get(f"{name}, int8"), new[name], 1 / 2) for name in (linear, conv)),
        (f"{mobile}, int8 / other wheel's float32", new.get(f"{mobile}, int8"), old.get(mobile), 1 / 4),
        ("import torch: instructions, this / other wheel", start, old.get(IMPORT), 0.6),
    ]
    for name, one, other, limit in pairs:
        if one and other and one.instructions and other.instructions:
            found.append(_ratio(name, one.instructions / 1e6, other.instructions / 1e6, limit, "M"))
    if before:
        memory = [side[IMPORT].resident_kib * 1024 / 1e6 for side in (new, old)]
        found.append(_ratio("import torch: memory, this / other wheel", memory[0], memory[1], 0.75, "MB"))
    for name in ("mm 256³", conv):
        cycles = [side[name].cycles for side in (new, old) if name in side]
        millions = [item.total / 1e6 for item in cycles if item]
        if len(millions) == 2:
            label = f"{name}: cycles (model), this / other wheel"
            found.append(_ratio(label, millions[0], millions[1], 1 / 2, "M"))
    return tuple(found)


def _ratio(name: str, one: float, other: float, limit: float, unit: str) -> Figure:
    note = f"{_millions(one)} / {_millions(other)} {unit}"
    return Figure(name=name, value=one / other, unit="×", goal=Goal(limit), note=note)


def tables(rows: Sequence[Row], before: Sequence[Row] | None, names: Sequence[str]) -> str:
    """Return two tables: each wheel's instructions and modelled cycles, and this wheel's instruction mix in percent."""
    old = {row.name: row for row in before or ()}
    titles = [f"instr., {name}" for name in ("this wheel", "other wheel", "ratio")]
    cycles = [f"cycles (model), {name}" for name in ("this wheel", "other wheel", "ratio")]
    if not before:
        titles, cycles = ["instructions"], ["cycles (model)"]
    table = _table(f"{' against '.join(names)}: millions", [*titles, *cycles, "modelled"])
    for row in rows:
        other = old.get(row.name, Row(row.name))
        counted = [row.instructions / 1e6, other.instructions / 1e6]
        modelled = [side.cycles.total / 1e6 if side.cycles else 0.0 for side in (row, other)]
        share = f"{100 * row.cycles.share:.0f} %" if row.cycles else "–"
        cells = [_compared(counted), _compared(modelled)]
        if not before:
            cells = [[group[0]] for group in cells]
        table.add_row(row.name, *(cell for group in cells for cell in group), share)
    classes = _table("Classes of instructions, this wheel: % of the executed instructions", counts.CLASSES)
    for row in rows:
        if row.by_class:
            shares = [100 * row.by_class[kind] / row.instructions for kind in counts.CLASSES]
            classes.add_row(row.name, *(f"{share:.1f}" for share in shares))
    return text_of(table, classes, *(f"not run: {row.name}: {row.reason}" for row in rows if row.reason))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = titled_table(title)
    table.add_column("workload", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _compared(values: Sequence[float]) -> list[str]:
    one, other = values
    return [_millions(one), _millions(other), f"{one / other:.2f}" if one and other else "–"]


def _millions(value: float) -> str:
    if not value:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
