"""Time matrix-vector multiplication: H = 100 rows, W = 10^0 .. 10^5 columns, with a plain loop, torch, and the QPUs.

    python timing.py [--quick] [--budget-s S] [--output FILE]

Prints a JSON document to standard output (and to FILE) and a human-readable table to standard error. There are two
times for each width and method, each the median of the repeats:

    compute_s      the loop or the kernel alone; null for torch, which does not report it
    end_to_end_s   the whole call: checks, copies to and from shared memory, launches and the computation

Each result is first compared with a float64 reference. The document contains the largest error as a fraction of the
stated bound. If an error exceeds its bound, the program exits with status 1 and prints no times, since times of
wrong results are meaningless. Widths that would exceed the time budget are listed as left out, with the reason. Times
that were not measured on a Raspberry Pi's own CPU and QPUs are labelled: they describe a model, not the hardware. A
machine counts as a Pi if its device tree contains a Pi's model and the revision code and serial number from the
firmware. A machine whose device tree contains only the model, such as an emulator, counts as unverified.
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
from pathlib import Path
from typing import Any, NamedTuple

import cpu_cpp
import matrix_cpp
import qpu_ops
import torch

SCHEMA = 1
WIDTHS = tuple(10**power for power in range(6))
QUICK_WIDTHS = WIDTHS[:4]
BUDGET_S = 300.0
MODEL_BACKENDS = ("interpreter", "emulator", "emulation")

PUBLISHED = {
    "what": "Raspberry Pi 3B, 2021: plain scalar C++ on the CPU against 4 QPUs; computation alone, 100 rows",
    "rows": [
        {"width": 1, "cpu_s": 0.000004, "qpu_s": 0.000164},
        {"width": 10, "cpu_s": 0.000023, "qpu_s": 0.000169},
        {"width": 100, "cpu_s": 0.000206, "qpu_s": 0.000171},
        {"width": 1000, "cpu_s": 0.002116, "qpu_s": 0.000388},
        {"width": 10000, "cpu_s": 0.021245, "qpu_s": 0.003079},
        {"width": 100000, "cpu_s": 0.214486, "qpu_s": 0.029622},
    ],
}
"""Published times for comparison with this table; not measured here."""


class WrongResult(Exception):
    """The error of a method's scores exceeds its stated bound."""


class Sample(NamedTuple):
    """The times of one call."""

    result: torch.Tensor
    compute_s: float | None
    end_to_end_s: float


def timed_torch(a: torch.Tensor, b: torch.Tensor) -> Sample:
    """Time the product in torch, with torch's default number of threads."""
    began = time.perf_counter()
    result = torch.mv(a, b)
    return Sample(result, None, time.perf_counter() - began)


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], Sample]] = {
    "cpu": lambda a, b: Sample(*cpu_cpp.cpu_timed(a, b)),
    "torch": timed_torch,
    "qpu": lambda a, b: Sample(*matrix_cpp.gpu_timed(a, b)),
}


def error_over_bound(method: str, found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Compute the largest error of a score as a fraction of the bound that the method's module states.

    torch does not state a bound, so the bound for a plain sum is used, which holds for any order of summation.
    """
    width = b.numel()
    terms, unit = (math.ceil(width / 16) + 1, 2.0**-23) if method == "qpu" else (width + 1, 2.0**-24)
    growth = terms * unit / (1 - terms * unit)
    worst = 0.0
    for row, score in zip(a, found, strict=True):
        products = row.double() * b.double()
        exact = products.sum()
        allowed = growth * products.abs().sum() + 2.0**-24 * exact.abs() + 2 * width * 2.0**-126
        worst = max(worst, ((score.double() - exact).abs() / allowed).item())
    return worst


def board_of(tree: Path) -> tuple[str, str]:
    """Return a device tree's model ("" if absent), and the reason why the tree is not a Pi's ("" if it is).

    The rule is the same as that of ``device.evidence.execution_of``.
    """

    def read(name: str) -> bytes:
        path = tree / name
        return path.read_bytes().rstrip(b"\0\n ") if path.is_file() else b""

    model = read("model").decode(errors="replace")
    words = [word for word in read("compatible").decode(errors="replace").split("\0") if word]
    revision, serial = read("system/linux,revision").strip(b"\0"), read("serial-number").strip(b"0")
    if not model.startswith("Raspberry Pi") or any("virt" in word or "qemu" in word.lower() for word in words):
        return model, f"not measured on a Raspberry Pi, but on: {model or f'{platform.machine()} machine'}" + (
            "" if model else " without a device tree"
        )
    if not revision or not serial:
        lacking = " and the ".join(
            name for name, found in (("revision code", revision), ("serial number", serial)) if not found
        )
        return model, f"unverified, not counted as measured: {model}, without the {lacking} that a Pi's firmware writes"
    return model, ""


def machine(tree: Path = Path("/proc/device-tree")) -> dict[str, Any]:
    """Describe the machine that was measured."""
    board, doubt = board_of(tree)
    backend = qpu_ops.backend()
    on_a_pi = not doubt
    on_qpus = on_a_pi and backend.name not in MODEL_BACKENDS
    where = board or f"{platform.machine()} machine without a device tree"
    if on_qpus:
        qpu_label = f"measured on the QPUs of {where}"
    elif backend.name in MODEL_BACKENDS:
        qpu_label = f"model: the {backend.name} backend on {where}; not measured on QPUs"
    else:
        qpu_label = f"the {backend.name} backend; {doubt}"
    return {
        "board": board,
        "machine": platform.machine(),
        "backend": backend.name,
        "backend_reason": backend.reason,
        "qpus": qpu_ops.settings()[0],
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "cpu_measured_on_hardware": on_a_pi,
        "qpu_measured_on_hardware": on_qpus,
        "cpu_label": f"measured on {where}" if on_a_pi else doubt,
        "qpu_label": qpu_label,
    }


def time_width(height: int, width: int, repeats: int, deadline: float) -> list[dict[str, Any]]:
    """Time one width: after a warm-up call, call each method 1 to ``repeats`` times, but not after the deadline."""
    generator = torch.Generator().manual_seed(width)
    a = torch.randn(height, width, generator=generator)
    b = torch.randn(width, generator=generator)
    rows = []
    for method, call in METHODS.items():
        error = error_over_bound(method, call(a, b).result, a, b)
        if not error <= 1:
            raise WrongResult(f"{method} at H={height}, W={width}: the error is {error:.3g} times the stated bound")
        samples: list[Sample] = []
        while not samples or (len(samples) < repeats and time.monotonic() < deadline):
            samples.append(call(a, b))
        computing = [sample.compute_s for sample in samples if sample.compute_s is not None]
        rows.append(
            {
                "height": height,
                "width": width,
                "method": method,
                "compute_s": statistics.median(computing) if computing else None,
                "end_to_end_s": statistics.median(sample.end_to_end_s for sample in samples),
                "repeats": len(samples),
                "error_over_bound": error,
            }
        )
    return rows


def measure(height: int, widths: tuple[int, ...], repeats: int, budget_s: float) -> dict[str, Any]:
    """Time all widths. A width is skipped if ten times the duration of the previous one exceeds the remaining time."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    last_s = 0.0
    for width in widths:
        left_s = budget_s - (time.monotonic() - began)
        if left_out or left_s <= 0 or 10 * last_s > left_s:
            reason = f"would take about {10 * last_s:.3g} s of the {max(left_s, 0):.3g} s left of {budget_s:.3g} s"
            left_out.append({"width": width, "reason": left_out[-1]["reason"] if left_out else reason})
            continue
        started = time.monotonic()
        rows += time_width(height, width, repeats, started + left_s / 4)
        last_s = time.monotonic() - started
    return {
        "schema": SCHEMA,
        "what": "matrix-vector multiplication, float32, seconds",
        "statistic": "median of the repeats, after one call to warm up",
        "height": height,
        "machine": machine(),
        "rows": rows,
        "left_out": left_out,
        "published": PUBLISHED,
        "seconds": round(time.monotonic() - began, 3),
    }


def table(document: dict[str, Any]) -> str:
    """Return the document as a human-readable table."""
    facts = document["machine"]
    lines = [
        f"H = {document['height']}, seconds, {document['statistic']}",
        f"CPU:  {facts['cpu_label']}",
        f"QPUs: {facts['qpu_label']} ({facts['qpus']} QPUs)",
        "",
        f"{'W':>7} {'CPU loop':>12} {'CPU call':>12} {'torch call':>12} {'QPU kernel':>12} {'QPU call':>12}",
    ]
    by_width: dict[int, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        by_width.setdefault(row["width"], {})[row["method"]] = row
    for width, methods in by_width.items():
        cells = [
            methods["cpu"]["compute_s"],
            methods["cpu"]["end_to_end_s"],
            methods["torch"]["end_to_end_s"],
            methods["qpu"]["compute_s"],
            methods["qpu"]["end_to_end_s"],
        ]
        lines.append(f"{width:>7} " + " ".join(f"{cell:>12.7f}" for cell in cells))
    lines += [f"{row['width']:>7} left out: {row['reason']}" for row in document["left_out"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the measurements and write the document."""
    parser = argparse.ArgumentParser(description="Time matrix-vector multiplication on the CPU and on the QPUs.")
    parser.add_argument("--quick", action="store_true", help=f"only widths up to {QUICK_WIDTHS[-1]}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="skip widths that would exceed this time")
    parser.add_argument("--height", type=int, default=100, help="rows of the matrix")
    parser.add_argument("--repeats", type=int, default=5, help="maximum number of timed calls per method and width")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.height < 1 or options.repeats < 1 or not options.budget_s > 0:
        parser.error("--height, --repeats and --budget-s must be greater than 0")
    try:
        document = measure(options.height, QUICK_WIDTHS if options.quick else WIDTHS, options.repeats, options.budget_s)
    except WrongResult as fault:
        print(fault, file=sys.stderr)
        return 1
    text = json.dumps(document, indent=2) + "\n"
    if options.output is not None:
        aside = options.output.with_name(f".{options.output.name}.{os.getpid()}.part")
        try:
            aside.write_text(text)
            aside.replace(options.output)
        finally:
            aside.unlink(missing_ok=True)
    print(table(document), file=sys.stderr)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
