"""Measure libqpu's kernel library: cycles in the emulator's model of a Raspberry Pi 3, and compile times on this PC."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Goal, Result
from benchmarks.workspace import Workspace
from toolchain import process, progress
from toolchain.config import ROOT
from toolchain.errors import CommandFailed
from toolchain.jobs import compile_jobs

RULE = (
    "MODEL: clock cycles in the emulator's model of a Raspberry Pi 3; not measured on hardware. A share is the "
    "minimum time that the model's bus, or its pipes, need for the kernel, divided by the kernel's time. Its range "
    "results from the ranges of the model's parameters; the note names the assumption with the largest effect. The "
    "naive kernels are those of a course project, compiled without optimisation and run on 4 QPUs. Measured on this "
    "PC: the compile time (minimum of five) and the time of a call (median)."
)

SHARES = {
    "add, 6 QPUs": ("elementwise add, share of the bus", 80.0),
    "matvec 100 x 100000, 12 QPUs": ("matrix-vector 100 x 10^5, share of the bus", 80.0),
    "matmul 512^3, 12 QPUs": ("matrix-matrix 512^3, share of the pipes", 50.0),
}
"""The figure's name and the minimum share in per cent, by the kernel's name in the program."""

NAIVE_ADD = "naive add / add"
QPULIB_ADD = "naive add with QPULib's stores / add"
COMPILE = "compile the largest kernel"
CALL = "warm call, with 16 elements emulated"


def measure(workspace: Workspace) -> Result:
    """Compile libqpu for this PC and run its benchmark. Raises CommandFailed, ProgramMissing."""
    folder = workspace.folder / "libqpu"
    with progress.step("compile libqpu for this PC"):
        options = ("-DBUILD_TESTING=ON", "-DCMAKE_BUILD_TYPE=Release")
        process.run(["cmake", "-S", ROOT / "libqpu", "-B", folder, "-G", "Ninja", *options])
        jobs = str(compile_jobs(workspace.config.build))
        process.run(["cmake", "--build", folder, "--parallel", jobs, "--target", "bench-kernels"], limit_s=1800)
    with progress.step("kernels on the emulator"):
        found = _run(folder / "tests" / "bench-kernels")
    return Result(name="kernels", title="Kernel library", rule=RULE, figures=figures(found["figures"]), facts=found)


def figures(lines: Sequence[Mapping[str, Any]]) -> tuple[Figure, ...]:
    """Convert the benchmark's output to figures. The shares of kernels that ``SHARES`` does not name come last."""
    shares = {item["kernel"]: item for item in lines if "share" in item}
    promised = [
        Figure(
            name=name,
            value=100 * shares[kernel]["share"],
            unit="%",
            goal=Goal(least, at_most=False),
            note=_range(shares[kernel]),
        )
        for kernel, (name, least) in SHARES.items()
    ]
    add = shares["add, 6 QPUs"]
    promised.append(
        Figure(name=NAIVE_ADD, value=add["timesNaive"], unit="×", goal=Goal(3, at_most=False), note="model")
    )
    qpulib = shares["naive add, QPULib's stores"]
    promised.append(Figure(name=QPULIB_ADD, value=qpulib["clocks"] / add["clocks"], unit="×", note="model"))
    largest = max((item for item in lines if "compileMs" in item), key=lambda item: float(item["compileMs"]))
    promised.append(
        Figure(
            name=COMPILE, value=largest["compileMs"], unit="ms", goal=Goal(10), note=f"{largest['kernel']}, on this PC"
        )
    )
    call = next(item for item in lines if "callUs" in item)
    promised.append(Figure(name=CALL, value=call["callUs"], unit="µs", goal=Goal(20), note="on this PC"))
    others = [
        Figure(name=f"  {name}", value=100 * item["share"], unit="%", note=f"of the {item['limit']}; {_range(item)}")
        for name, item in shares.items()
        if name not in SHARES
    ]
    return (*promised, *others)


def _range(item: Mapping[str, Any]) -> str:
    """Return a note on a kernel: the range of its share (see ``RULE``), and the modelled time with its range.

    The note also names the assumption of the model that has the largest effect on the share.
    """
    return (
        f"model: {100 * item['shareLow']:.1f} to {100 * item['shareHigh']:.1f} %, mostly due to {item['movedBy']}; "
        f"{1e3 * item['seconds']:.2f} ms, {1e3 * item['secondsLow']:.2f} to {1e3 * item['secondsHigh']:.2f} ms"
    )


def _run(program: Path) -> dict[str, Any]:
    done = subprocess.run([program, "--json", "--ranges"], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise CommandFailed(
            "libqpu's benchmark failed", found=f"exit status {done.returncode}", tail=done.stderr[-2000:]
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
