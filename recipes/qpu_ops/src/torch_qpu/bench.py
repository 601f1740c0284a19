"""Benchmark PyTorch's operators on the QPUs and on the CPU.

    python -m torch_qpu.bench [--quick] [--output FILE.json] [--plot FILE.svg]

Prints a table to standard output. For each operator and size, it contains the times of a plain scalar loop on the CPU
(only for matrix-vector multiplication), of torch on the CPU (with its BLAS), and of the QPUs:

    compute      the time of the kernels alone
    end to end   the time from CPU tensors to a CPU tensor: both copies, launches, and the kernels

The table also contains GFLOPS, GB/s, and the share of the limiting resource that is used. This resource is either
arithmetic (96 floating-point operations per V3D clock) or memory (the bytes per clock that it can transfer in the
emulator's model of the board).

A second table counts the launches of a training step for small networks with different optimisers. On a board, every
launch takes about 0.1 ms, regardless of what it computes.

If the machine has QPUs, all values are measured. Otherwise, the emulator runs the kernels, and the columns marked
*model* contain values from its model of a board (QPU_BOARD, by default a Pi 3). These values apply to the kernels
alone, since the emulator does not model the CPU. Unless QPU_MODEL is set, each modelled share is given with the range
of its values for QPU_MODEL=fast and QPU_MODEL=slow. The CPU columns are always measured on the machine that runs this
script, so values from a PC do not apply to a Pi's CPU. The output names the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_qpu
from torch_qpu import _C
from torch_qpu.device import MODEL_BACKENDS

SCHEMA = 2
REPEATS = 5
FLOPS_PER_CLOCK = 96
"""Each of the 12 QPUs performs an addition and a multiplication of 16 elements every four clocks."""
BYTES_PER_CLOCK = 4.5
"""The QPUs' bus transfers, reads and stores together: the model's value for a Pi 3. Not measured on hardware."""
CLOCK_HZ = 400e6
"""The V3D clock of a Pi 3, used if the emulator does not report one."""

Operation = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operator with operands of one size."""

    operator: str
    size: str
    function: Operation
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    moved: int
    """Minimum number of bytes that must be read and written."""


@dataclass(frozen=True)
class Row:
    """The results for a case. Times are in seconds; a time that was not measured is None."""

    operator: str
    size: str
    cpu_naive_s: float | None
    cpu_torch_s: float
    qpu_compute_s: float
    qpu_end_to_end_s: float | None
    qpu_gflops: float
    qpu_gbytes_per_s: float
    share_of_limit: float
    share_low: float
    share_high: float
    """The largest share within the ranges of the model's parameters, or the measured share."""
    limit: str
    """The limiting resource: "arithmetic" or "memory"."""
    faster: str | None
    """The faster device end to end, "cpu" or "qpu"; None unless both were measured on the same machine."""


def cases(quick: bool) -> list[Case]:
    """Return the table's cases; if ``quick`` is true, only those that the emulator runs within seconds."""
    found = []
    for width in (10, 100, 1000) if quick else (1, 10, 100, 1000, 10000):
        found.append(
            Case("mv", f"100x{width}", torch.mv, ((100, width), (width,)), 200 * width, 4 * (101 * width + 100))
        )
    for n in (16, 64) if quick else (16, 64, 128, 192):
        found.append(Case("mm", f"{n}x{n}x{n}", torch.mm, ((n, n), (n, n)), 2 * n**3, 12 * n * n))
    for n in (1000, 16384) if quick else (1000, 16384, 262144):
        found.append(Case("add", str(n), torch.add, ((n,), (n,)), n, 12 * n))
        found.append(Case("sigmoid", str(n), torch.sigmoid, ((n,),), 30 * n, 8 * n))
        found.append(Case("sum", str(n), torch.sum, ((n,),), n, 4 * n))
    found.append(Case("softmax", "64x100", lambda a: a.softmax(-1), ((64, 100),), 64 * 100 * 25, 8 * 6400))
    found.append(
        Case(
            "conv2d",
            "8x1x28x28, 6 of 5x5",
            torch.nn.functional.conv2d,
            ((8, 1, 28, 28), (6, 1, 5, 5)),
            2 * 8 * 6 * 24 * 24 * 25,
            4 * (8 * 784 + 150 + 8 * 6 * 576),
        )
    )
    return found


@dataclass(frozen=True)
class Step:
    """One training step: forward pass, loss, backward pass, and the optimiser's update."""

    network: str
    optimizer: str
    launches: int
    of_optimizer: int
    """Launches of the update alone."""
    fallbacks: int
    """Operators that ran on the CPU."""


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classes(self.layers(self.words(x)).mean(1))
        return found


def _convolutional() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(64, 4))


def steps() -> list[Step]:
    """Count the operations in the second step of each training run; the first step also creates optimiser state."""
    networks: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
        "convolution and batch norm": (_convolutional, torch.randn(4, 1, 8, 8)),
        "transformer encoder, 2 layers": (_Encoder, torch.randint(0, 20, (4, 12))),
    }
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.001),
        "Adam(fused=True)": lambda p: torch.optim.Adam(p, lr=0.001, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.001),
    }
    found = []
    for network, (make, x) in networks.items():
        for name, optimizer in optimizers.items():
            model, there, y = make().to("qpu"), x.to("qpu"), torch.tensor([0, 1, 2, 3]).to("qpu")
            chosen = optimizer(model.parameters())
            for _ in range(2):
                torch_qpu.reset_counters()
                chosen.zero_grad()
                nn.functional.cross_entropy(model(there), y).backward()
                before = _launched()
                chosen.step()
            found.append(Step(network, name, _launched(), _launched() - before, sum(torch_qpu.fallbacks().values())))
    return found


def _launched() -> int:
    return sum(count.calls for count in torch_qpu.launches().values())


def table_of_steps(rows: list[Step]) -> str:
    """Return a human-readable table."""
    lines = [
        "launches per training step",
        f"{'network':>32} {'optimiser':>18} {'launches':>9} {'update':>7} {'CPU':>4}",
    ]
    lines += [
        f"{row.network:>32} {row.optimizer:>18} {row.launches:>9} {row.of_optimizer:>7} {row.fallbacks:>4}"
        for row in rows
    ]
    return "\n".join(lines)


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _naive(case: Case, operands: list[torch.Tensor]) -> float | None:
    if case.operator != "mv":
        return None
    try:
        import cpu_cpp
    except ImportError:
        return None
    return statistics.median(float(cpu_cpp.cpu_timed(*operands).compute_s) for _ in range(REPEATS))


def _limit_s(case: Case, clock: float, bytes_per_clock: float) -> tuple[float, str]:
    """Return the theoretical minimum time of a case in seconds, and the resource that determines it."""
    arithmetic, memory = case.flops / (FLOPS_PER_CLOCK * clock), case.moved / (bytes_per_clock * clock)
    return max((arithmetic, "arithmetic"), (memory, "memory"))


def _launches(case: Case, there: list[torch.Tensor], repeats: int) -> list[Any]:
    """Return the kernel launches of ``repeats`` calls of the operator.

    Raises AssertionError if the CPU did part of the work.
    """
    with torch_qpu.profile() as record:
        for _ in range(repeats):
            case.function(*there)
    launches = [event for event in record.events if event.kind == "launch"]
    if not launches or any(event.kind == "fallback" for event in record.events):
        raise AssertionError(f"{case.operator} {case.size}: part of the operation did not run on the QPUs")
    return launches


def _modelled(case: Case, there: list[torch.Tensor]) -> tuple[float, float, str]:
    """Return the modelled time in seconds, the used share of the limiting resource, and the name of this resource."""
    launches = _launches(case, there, 1)
    _, clock, bytes_per_clock = _C.model()
    compute = sum(event.clocks for event in launches) / clock
    limit, binds = _limit_s(case, clock, bytes_per_clock)
    return compute, limit / compute, binds


def _at_ends(case: Case, there: list[torch.Tensor]) -> list[float]:
    """Return the used share of the limiting resource with the fastest and with the slowest model parameters.

    The list is empty if QPU_MODEL is set.
    """
    if os.environ.get("QPU_MODEL"):
        return []
    shares = []
    try:
        for end in ("fast", "slow"):
            os.environ["QPU_MODEL"] = end
            shares.append(_modelled(case, there)[1])
    finally:
        os.environ.pop("QPU_MODEL", None)
    return shares


def measure(case: Case, *, model: bool) -> Row:
    """Measure one row. Raises AssertionError if the QPUs' result is wrong, because its time would be meaningless."""
    torch.manual_seed(0)
    operands = [torch.randn(shape) for shape in case.shapes]
    there = [operand.to("qpu") for operand in operands]
    expected = case.function(*(operand.double() for operand in operands))
    found = case.function(*there).cpu().double()
    scale = max(expected.abs().max().item(), 1.0) * math.sqrt(max(map(torch.numel, operands)))
    if not torch.all((found - expected).abs() <= 1e-5 * scale):
        raise AssertionError(f"{case.operator} {case.size}: wrong result from the QPUs")
    if model:
        compute, share, binds = _modelled(case, there)
        shares = [share, *_at_ends(case, there)]
        end_to_end = None
    else:
        compute = sum(event.duration_ns for event in _launches(case, there, REPEATS)) / 1e9 / REPEATS
        limit, binds = _limit_s(case, CLOCK_HZ, BYTES_PER_CLOCK)
        share = limit / compute
        shares = [share]
        end_to_end = _seconds(lambda: case.function(*(operand.to("qpu") for operand in operands)).cpu(), REPEATS)
    cpu = _seconds(lambda: case.function(*operands), REPEATS)
    return Row(
        case.operator,
        case.size,
        _naive(case, operands),
        cpu,
        compute,
        end_to_end,
        case.flops / compute / 1e9,
        case.moved / compute / 1e9,
        share,
        min(shares),
        max(shares),
        binds,
        None if end_to_end is None else "cpu" if cpu < end_to_end else "qpu",
    )


def machine(model: bool) -> dict[str, Any]:
    """Describe the machine and the software with which the figures were measured."""
    name, reason = _C.backend()
    path = Path("/proc/device-tree/model")
    board = path.read_text(errors="replace").rstrip("\0\n ") if path.is_file() else ""
    cpu = board if board.startswith("Raspberry Pi") else f"a {platform.machine()} machine, not a Raspberry Pi"
    return {
        "cpu": cpu,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "backend": name,
        "backend_reason": reason,
        "model": model,
        "qpu_label": f"model of a {_C.model()[0]} by the {name}; not measured on hardware"
        if model
        else f"measured on {board}",
        "cpu_label": f"measured on {cpu}",
    }


def table(rows: list[Row], facts: dict[str, Any]) -> str:
    """Return a human-readable table."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value * 1e6:,.1f}"

    mark = " (model)" if facts["model"] else ""
    heads: tuple[str, ...] = ("operator", "size", "CPU loop", "CPU torch")
    heads += (f"QPU{mark}", "QPU end to end", f"GFLOPS{mark}", f"GB/s{mark}")
    lines = [
        f"CPU:  {facts['cpu_label']}",
        f"QPUs: {facts['qpu_label']}",
        "",
        "microseconds; - means not measured",
        " ".join(f"{head:>{20 if i == 1 else 14}}" for i, head in enumerate(heads)) + f"  {'of limit':>30}  faster",
    ]
    for row in rows:
        cells = (
            row.operator,
            row.size,
            seconds(row.cpu_naive_s),
            seconds(row.cpu_torch_s),
            seconds(row.qpu_compute_s),
            seconds(row.qpu_end_to_end_s),
            f"{row.qpu_gflops:.2f}",
            f"{row.qpu_gbytes_per_s:.2f}",
        )
        ends = f" ({100 * row.share_low:.0f} to {100 * row.share_high:.0f})" if row.share_low < row.share_high else ""
        share = f"{100 * row.share_of_limit:.0f} %{ends} of {row.limit}"
        lines.append(
            " ".join(f"{c:>{20 if i == 1 else 14}}" for i, c in enumerate(cells))
            + f"  {share:>30}  {row.faster or '-'}"
        )
    if facts["model"]:
        lines.append("CPU and QPU times are for different machines and do not show which is faster on a board.")
    else:
        lines.append("For rows marked cpu, keep the tensors on the CPU.")
    return "\n".join(lines)


def plot(rows: list[Row], facts: dict[str, Any]) -> str:
    """Return an SVG chart with a bar per row and method on a logarithmic axis."""
    colours = {"CPU loop": "#999999", "CPU torch": "#4477aa", "QPU": "#cc6633"}
    values = []
    for row in rows:
        times = (row.cpu_naive_s, row.cpu_torch_s, row.qpu_compute_s)
        values.append((f"{row.operator} {row.size}", dict(zip(colours, times, strict=True))))
    known = [v for _, bars in values for v in bars.values() if v]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    left, width, step = 220, 620, 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{70 + step * len(values)}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="10" y="18">seconds; CPU: {facts["cpu_label"]}</text>',
        f'<text x="10" y="34">QPU: {facts["qpu_label"]}</text>',
    ]
    for power in range(low, high + 1):
        x = left + width * (power - low) / max(high - low, 1)
        parts.append(f'<line x1="{x}" y1="56" x2="{x}" y2="{60 + step * len(values)}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 12}" y="52">1e{power}</text>')
    for i, (label, bars) in enumerate(values):
        top = 64 + step * i
        parts.append(f'<text x="10" y="{top + 22}">{label}</text>')
        for j, (name, value) in enumerate(bars.items()):
            if not value:
                continue
            length = width * (math.log10(value) - low) / max(high - low, 1)
            parts.append(
                f'<rect x="{left}" y="{top + 12 * j}" width="{max(length, 1):.1f}" height="10" fill="{colours[name]}">'
                f"<title>{name}: {value:.3g} s</title></rect>"
            )
    legend = " ".join(
        f'<tspan fill="{colour}">■ {name}{" (model)" if facts["model"] and name == "QPU" else ""}</tspan>'
        for name, colour in colours.items()
    )
    parts.append(f'<text x="{left}" y="{66 + step * len(values)}">{legend}</text></svg>')
    return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def main(words: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_qpu.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--output", type=Path, help="write the figures as JSON to this file")
    parser.add_argument("--plot", type=Path, help="write a chart as SVG")
    options = parser.parse_args(words)
    if not os.environ.get("QPU_BACKEND") and _C.backend()[0] in MODEL_BACKENDS:
        os.environ["QPU_BACKEND"] = "emulator"
    model = _C.backend()[0] in MODEL_BACKENDS
    if _C.backend()[0] == "interpreter":
        print("the interpreter has no timing model: unset QPU_BACKEND or set QPU_BACKEND=emulator", file=sys.stderr)
        return 2
    rows = [measure(case, model=model) for case in cases(options.quick)]
    facts = machine(model)
    trained = steps()
    print(table(rows, facts), table_of_steps(trained), sep="\n\n")
    document = {
        "schema": SCHEMA,
        "machine": facts,
        "rows": [asdict(row) for row in rows],
        "steps": [asdict(row) for row in trained],
    }
    if options.output is not None:
        _write(options.output, json.dumps(document, indent=1))
    if options.plot is not None:
        _write(options.plot, plot(rows, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
