"""Measure the time of a GPU operation with four methods, and show which method measures the kernel.

A call to a CUDA operation adds a kernel to a queue (the stream) and returns immediately. A host clock that is read
before and after the call measures the kernel only if the queue was empty before the call, and if the host
synchronises (waits for the GPU) after it::

    sync before   sync after   what the host clock measures
    yes           yes          the kernel, its launch and the wait for its end
    yes           no           only the launch
    no            yes          the launch, everything that was queued earlier, and the kernel
    no            no           only the launch, or the time until a full queue has a free entry

The reference is the time between CUDA events, which are time stamps that the GPU records in the queue. If all calls
between two events are queued before the GPU starts the first call, this time does not depend on the host.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REGIMES = (("sync", "sync"), ("sync", "none"), ("none", "sync"), ("none", "none"))
NO_GPU = 3
"""The exit status if there is no GPU."""

_CYCLES_PER_CALL = 60_000
"""The number of clock cycles for which the GPU waits per call that must be queued: about 30 µs."""
_NSYS_LIMIT_S = 300.0

_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64"}
_INPUT = re.compile(rf"({'|'.join(_TYPES)})\[(\d+(?:,\d+)*)\]")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_INPUTS = {
    "exp": ("f32[1048576]",),
    "axpy": ("2.0", "f32[1048576]", "f32[1048576]"),
    "softmax": ("f32[4096,1024]",),
    "matvec": ("f32[4096,4096]", "f32[4096]"),
}
"""Default inputs of cuda_ops' operations. The default inputs of all other operations are two vectors."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The times of all calls in microseconds, as measured by the host clock with one of the four methods."""

    before: str
    after: str
    samples_us: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name in the table, for example ``sync / none``."""
        return f"{self.before} / {self.after}"

    @property
    def median_us(self) -> float:
        """The median time of a call in microseconds."""
        return statistics.median(self.samples_us)

    @property
    def first_us(self) -> float:
        """The time of the first call. Without synchronisation before the call, it includes the queued warm-up calls."""
        return self.samples_us[0]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """All measurements of one operation. ``events_us`` contains the GPU's time per call for each batch of calls."""

    operation: str
    inputs: tuple[str, ...]
    device: str
    torch: str
    warm_up: int
    runs: int
    queued: int
    """Number of calls in the queue at the start of the measurements that do not synchronise before the call."""
    regimes: tuple[Regime, ...]
    events_us: tuple[float, ...]
    single_event_us: float
    """The time between events around one call. It includes idle time of the GPU during the launch."""

    @property
    def kernel_us(self) -> float:
        """The reference time in microseconds: the GPU's time per call, as the median over all batches of calls."""
        return statistics.median(self.events_us)

    def regime(self, before: str, after: str) -> Regime:
        """Return the measurements of the method with these kinds of synchronisation before and after each call."""
        return next(item for item in self.regimes if (item.before, item.after) == (before, after))

    def as_json(self) -> dict[str, Any]:
        """Return all values, including derived values, for a JSON file."""
        return {
            **asdict(self),
            "kernel_us": self.kernel_us,
            "table": self.table().splitlines(),
            "sentence": self.sentence(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Timing:
        """Create the object from the result of ``as_json``."""
        known = {name: document[name] for name in cls.__dataclass_fields__}
        regimes = tuple(Regime(**{**item, "samples_us": tuple(item["samples_us"])}) for item in known.pop("regimes"))
        return cls(
            **{**known, "inputs": tuple(known["inputs"]), "events_us": tuple(known["events_us"])}, regimes=regimes
        )

    def table(self) -> str:
        """Return a table with a line for each method; the reference is last."""
        lines = [
            f"{self.operation}({', '.join(self.inputs)}) on {self.device}, torch {self.torch}",
            f"{self.warm_up} warm-up calls, {self.runs} timed calls; {self.queued} queued calls without sync before",
            "",
            f"{'sync before / after':22}{'first':>12}{'median':>12}{'minimum':>12}{'maximum':>12}{'/ kernel':>10}",
        ]
        for item in self.regimes:
            values = (item.first_us, item.median_us, min(item.samples_us), max(item.samples_us))
            numbers = "".join(f"{value:9.1f} µs" for value in values)
            lines.append(f"{item.name:22}{numbers}{item.median_us / self.kernel_us:9.2f}×")
        lines.append(f"{'events, one call':22}{'':12}{self.single_event_us:9.1f} µs")
        lines.append(f"{'events, many calls':22}{'':12}{self.kernel_us:9.1f} µs{'':24}{1:9.2f}×")
        return "\n".join(lines)

    def sentence(self) -> str:
        """Return an explanation of the values in the table."""
        both, launch = self.regime("sync", "sync"), self.regime("sync", "none")
        late = self.regime("none", "sync")
        words = (
            f"The kernel takes {self.kernel_us:.1f} µs, measured by CUDA events around calls that were all queued "
            f"before the first one started. With synchronisation before and after a call, the host clock measures "
            f"{both.median_us:.1f} µs: the kernel, and {both.median_us - self.kernel_us:.1f} µs for the launch and "
            f"the wait. Without synchronisation after the call, the {launch.median_us:.1f} µs are only the launch. "
            "Without synchronisation before the call, the first call takes "
        )
        if late.first_us > 1.25 * both.median_us:
            return words + f"{late.first_us:.1f} µs, which include the calls that were queued earlier."
        return words + (
            f"{late.first_us:.1f} µs, no longer than with it: this kernel is shorter than a launch, so the queue was "
            "already empty. With a longer kernel, this time would include the calls in the queue."
        )


def parse_input(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse an input such as ``f32[1024,16]`` into the name of a type and a shape. Raises ValueError."""
    found = _INPUT.fullmatch(text)
    if found is None:
        raise ValueError(f"expected TYPE[SIZE,…] with a type of {', '.join(_TYPES)}, or a number, found {text!r}")
    return _TYPES[found[1]], tuple(int(part) for part in found[2].split(","))


def inputs_of(name: str, named: Sequence[str] = ()) -> list[str]:
    """Return the given inputs, or the default inputs of an operation. Raises ValueError for an invalid input."""
    inputs = list(named) or list(_INPUTS.get(name.removeprefix("cuda_ops."), ("f32[1048576]",) * 2))
    for text in inputs:
        if _NUMBER.fullmatch(text) is None:
            parse_input(text)
    return inputs


def find_operation(name: str) -> Callable[..., Any]:
    """Find an operation by name: ``add2`` of cuda_ops, or a dotted name such as ``torch.add``. Raises ValueError."""
    dotted = name if "." in name else f"cuda_ops.{name}"
    module, _, rest = dotted.partition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in rest.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as fault:
        raise ValueError(f"there is no operation {name!r}: {fault}") from fault
    if not callable(found):
        raise ValueError(f"{name!r} is not an operation: it cannot be called")
    operation: Callable[..., Any] = found
    return operation


def measure(name: str, inputs: Sequence[str], *, warm_up: int = 10, runs: int = 10, queued: int = 10) -> Timing:
    """Measure the time of an operation on the current GPU with all four methods and with CUDA events.

    Raises ValueError for an unknown operation, and for inputs that the operation does not accept.
    """
    import torch

    operation = find_operation(name)
    tensors = [_tensor(text) for text in inputs]

    def call() -> None:
        operation(*tensors)

    try:
        call()
    except (TypeError, ValueError, RuntimeError) as fault:
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        raise ValueError(f"{name} does not accept the inputs ({', '.join(inputs)}): {reason}") from fault
    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    events = tuple(_batch_us(call, calls) for calls in [max(runs, 20)] * 5)
    regimes = []
    for before, after in REGIMES:
        torch.cuda.synchronize()
        for _ in range(warm_up if before == "sync" else queued):
            call()
        regimes.append(Regime(before=before, after=after, samples_us=_clocked(call, before, after, runs)))
    torch.cuda.synchronize()
    return Timing(
        operation=name,
        inputs=tuple(inputs),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        warm_up=warm_up,
        runs=runs,
        queued=queued,
        regimes=tuple(regimes),
        events_us=events,
        single_event_us=statistics.median(_batch_us(call, 1) for _ in range(runs)),
    )


def _tensor(text: str) -> Any:
    import torch

    if _NUMBER.fullmatch(text):
        return float(text)
    kind, shape = parse_input(text)
    if kind == "int64":
        return torch.randint(0, 100, shape, device="cuda")
    return torch.randn(shape, device="cuda", dtype=getattr(torch, kind))


def _clocked(call: Callable[[], None], before: str, after: str, runs: int) -> tuple[float, ...]:
    import torch

    samples = []
    for _ in range(runs):
        if before == "sync":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if after == "sync":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - began) * 1e6)
    return tuple(samples)


def _batch_us(call: Callable[[], None], calls: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # The GPU is kept busy until all calls are queued, so it then runs them without waiting for a launch.
    torch.cuda._sleep(_CYCLES_PER_CALL * calls)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def write_timeline(name: str, inputs: Sequence[str], path: Path, *, runs: int = 5) -> None:
    """Trace the host and the GPU during a few calls per method; write the trace for https://ui.perfetto.dev."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    operation = find_operation(name)
    tensors = [_tensor(text) for text in inputs]
    operation(*tensors)
    torch.cuda.synchronize()
    # acc_events keeps all events. Without it, torch warns that later cycles drop events, although there are no later
    # cycles.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        for before, after in REGIMES:
            with record_function(f"{before} / {after}"):
                _clocked(lambda: operation(*tensors), before, after, runs)
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))


def kernels_of(path: Path) -> dict[str, list[float]]:
    """Return the durations in microseconds of all runs of each kernel in a trace, by kernel name."""
    found: dict[str, list[float]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            found.setdefault(event["name"], []).append(float(event["dur"]))
    return found


def plot(timing: Timing, path: Path) -> None:
    """Plot the times of all calls on a logarithmic scale, with a line for the kernel's time. Requires matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for item in timing.regimes:
        axes.plot(range(1, len(item.samples_us) + 1), item.samples_us, marker="o", label=item.name)
    axes.axhline(timing.kernel_us, color="black", linestyle="--", label="CUDA events: the kernel")
    axes.set_yscale("log")
    axes.set_xlabel("timed call")
    axes.set_ylabel("µs on the host clock")
    axes.set_title(f"{timing.operation}({', '.join(timing.inputs)}) on {timing.device}")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", title="synchronisation before / after")
    figure.savefig(path, dpi=120)


def nsys_record(words: Sequence[str], folder: Path) -> str:
    """Repeat the measurement under ``nsys profile``; return a message about the result."""
    program = shutil.which("nsys")
    if program is None:
        return "nsys is not installed, so there is no report"
    report = folder / "cuda-timing.nsys-rep"
    report.unlink(missing_ok=True)  # remove the report of an earlier run
    argv = [program, "profile", "--force-overwrite=true", f"--output={report.with_suffix('')}"]
    argv += [sys.executable, "-m", "cuda_ops.timing", *words]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_NSYS_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"nsys did not write a report within {_NSYS_LIMIT_S:g} s"
    return (
        f"nsys report: {report}" if report.is_file() else f"nsys did not write a report: {done.stderr.strip()[-300:]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and its explanation; write the JSON file, plot and trace if requested."""
    parser = argparse.ArgumentParser(prog="cuda-timing", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--op", default="add2", help="an operation of cuda_ops, or a dotted name such as torch.add")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        help="an input: TYPE[SIZE,…] or a number (may be repeated; default: inputs for the operation)",
    )
    parser.add_argument("--runs", type=int, default=10, help="number of timed calls for each method")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file (requires matplotlib)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="plot the measurements from a file that --json wrote")
    parser.add_argument("--timeline", type=Path, help="write a trace for https://ui.perfetto.dev to this file")
    options = parser.parse_args(argv)
    if options.draw:
        if options.plot is None:
            parser.error("--draw requires --plot")
        plot(Timing.from_json(json.loads(options.draw.read_text())), options.plot)
        return 0
    if options.runs < 1 or options.warm_up < 0:
        parser.error("--runs must be at least 1, and --warm-up at least 0")
    try:
        inputs = inputs_of(options.op, options.input)
        find_operation(options.op)
    except ValueError as fault:
        parser.error(str(fault))
    import torch

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}"
        print(
            "cuda-timing: no CUDA GPU found\n"
            "  expected: torch.cuda.is_available()\n"
            f"  found:    {built}, which finds no GPU\n"
            "  fix:      run cuda-timing on a machine with a GPU, its driver, and a CUDA build of torch",
            file=sys.stderr,
        )
        return NO_GPU
    try:
        timing = measure(options.op, inputs, warm_up=options.warm_up, runs=options.runs, queued=options.warm_up)
    except ValueError as fault:
        parser.error(str(fault))
    print(timing.table())
    print()
    print(timing.sentence())
    if options.json:
        options.json.write_text(json.dumps(timing.as_json(), indent=2) + "\n")
    if options.plot:
        try:
            plot(timing, options.plot)
            print(f"plot: {options.plot}")
        except ImportError:
            print("no plot: matplotlib is not installed; use --draw with the JSON file on another machine")
    if options.timeline:
        write_timeline(options.op, inputs, options.timeline)
        print(f"timeline: {options.timeline} (open it in https://ui.perfetto.dev)")
        for kernel, lengths in kernels_of(options.timeline).items():
            print(f"  {len(lengths)} runs, median {statistics.median(lengths):.1f} µs: {kernel}")
        words = [f"--op={options.op}", *(f"--input={text}" for text in inputs)]
        print(nsys_record(words, options.timeline.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
