"""Which of four ways to time a GPU operation is right: ``cuda-timing``, and ``./inv cuda-timing``.

A call of a CUDA operation only puts it into a queue (the stream) and returns. A clock that is read before and after
the call measures the kernel only if the queue was empty before, and was waited for after::

    sync before   sync after   what the clock sees
    yes           yes          the kernel, and what starting and waiting cost
    yes           no           the launch alone
    no            yes          the kernel, and first of all whatever was queued earlier
    no            no           the launch alone; when the queue is full, whatever makes room in it

The reference are CUDA events: time stamps that the GPU itself takes, in the queue. Around many calls that all were
queued before the GPU came to the first, they give the kernel's time with nothing of the host in it.
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
"""Exit status without a GPU."""

_CYCLES_PER_CALL = 60_000
"""Clocks of the GPU for which it is kept waiting, for each call to be queued: some 30 µs."""
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
"""Default inputs of our operations; other operations get two vectors."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What a clock of the host saw in one of the four ways. Times are in microseconds, one for each timed call."""

    before: str
    after: str
    samples_us: tuple[float, ...]

    @property
    def name(self) -> str:
        """As ``sync / none``."""
        return f"{self.before} / {self.after}"

    @property
    def median_us(self) -> float:
        """The middle one."""
        return statistics.median(self.samples_us)

    @property
    def first_us(self) -> float:
        """The first timed call: without a wait before it, it sees the warm-up's end."""
        return self.samples_us[0]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """All of it for one operation. ``events_us`` are of the GPU: one for each batch, divided by the calls in it."""

    operation: str
    inputs: tuple[str, ...]
    device: str
    torch: str
    warm_up: int
    runs: int
    queued: int
    """Calls that were in the queue when the regimes without a wait before began."""
    regimes: tuple[Regime, ...]
    events_us: tuple[float, ...]
    single_event_us: float
    """Events around one call: what the GPU itself sees of it, with the gaps that a launch leaves."""

    @property
    def kernel_us(self) -> float:
        """The reference: the median of the batches."""
        return statistics.median(self.events_us)

    def regime(self, before: str, after: str) -> Regime:
        """One of the four."""
        return next(item for item in self.regimes if (item.before, item.after) == (before, after))

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            **asdict(self),
            "kernel_us": self.kernel_us,
            "table": self.table().splitlines(),
            "sentence": self.sentence(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Timing:
        """As ``as_json`` wrote it."""
        known = {name: document[name] for name in cls.__dataclass_fields__}
        regimes = tuple(Regime(**{**item, "samples_us": tuple(item["samples_us"])}) for item in known.pop("regimes"))
        return cls(
            **{**known, "inputs": tuple(known["inputs"]), "events_us": tuple(known["events_us"])}, regimes=regimes
        )

    def table(self) -> str:
        """A line for each way, the reference last."""
        lines = [
            f"{self.operation}({', '.join(self.inputs)}) on {self.device}, torch {self.torch}",
            f"{self.warm_up} calls to warm up, {self.runs} timed; {self.queued} calls queued where none is waited for",
            "",
            f"{'wait before / after':22}{'first':>12}{'median':>12}{'least':>12}{'most':>12}{'/ kernel':>10}",
        ]
        for item in self.regimes:
            values = (item.first_us, item.median_us, min(item.samples_us), max(item.samples_us))
            numbers = "".join(f"{value:9.1f} µs" for value in values)
            lines.append(f"{item.name:22}{numbers}{item.median_us / self.kernel_us:9.2f}×")
        lines.append(f"{'events, one call':22}{'':12}{self.single_event_us:9.1f} µs")
        lines.append(f"{'events, many calls':22}{'':12}{self.kernel_us:9.1f} µs{'':24}{1:9.2f}×")
        return "\n".join(lines)

    def sentence(self) -> str:
        """Which number is the kernel's, and why."""
        both, launch = self.regime("sync", "sync"), self.regime("sync", "none")
        late = self.regime("none", "sync")
        words = (
            f"The kernel takes {self.kernel_us:.1f} µs: that is what the GPU's own events say of calls that were all "
            f"queued before. A clock with a wait on both sides says {both.median_us:.1f} µs, which is the kernel and "
            f"{both.median_us - self.kernel_us:.1f} µs of starting it and waiting for it; without the wait after, "
            f"{launch.median_us:.1f} µs is the launch alone. Without the wait before, the first call "
        )
        if late.first_us > 1.25 * both.median_us:
            return words + f"seems to take {late.first_us:.1f} µs: what was queued earlier is in it."
        return (
            words + f"takes {late.first_us:.1f} µs, no longer than with it: this kernel is shorter than a launch, so "
            "the queue was empty already. With a longer one the queue would be in that number."
        )


def parse_input(text: str) -> tuple[str, tuple[int, ...]]:
    """``f32[1024,16]`` as a type's name and a shape. Raises ValueError."""
    found = _INPUT.fullmatch(text)
    if found is None:
        raise ValueError(f"expected TYPE[SIZE,…] with a type of {', '.join(_TYPES)}, or a number, found {text!r}")
    return _TYPES[found[1]], tuple(int(part) for part in found[2].split(","))


def inputs_of(name: str, named: Sequence[str] = ()) -> list[str]:
    """The inputs that were named, or an operation's own. Raises ValueError for one that is none."""
    inputs = list(named) or list(_INPUTS.get(name.removeprefix("cuda_ops."), ("f32[1048576]",) * 2))
    for text in inputs:
        if _NUMBER.fullmatch(text) is None:
            parse_input(text)
    return inputs


def find_operation(name: str) -> Callable[..., Any]:
    """``add2`` of cuda_ops, or any dotted name: ``torch.add``, ``torch.ops.aten.mm.default``. Raises ValueError."""
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
    """Time an operation on the current GPU in all four ways and by events.

    Raises ValueError for wrong names, and for inputs that the operation does not take.
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
        raise ValueError(f"{name} does not take ({', '.join(inputs)}): {reason}") from fault
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
    # The GPU is kept busy while the calls are queued: it then does them one after the other and waits for no launch.
    torch.cuda._sleep(_CYCLES_PER_CALL * calls)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def write_timeline(name: str, inputs: Sequence[str], path: Path, *, runs: int = 5) -> None:
    """Write a trace of a few calls in each way, with what the host and the GPU did, for https://ui.perfetto.dev."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    operation = find_operation(name)
    tensors = [_tensor(text) for text in inputs]
    operation(*tensors)
    torch.cuda.synchronize()
    # acc_events: all are kept; without it torch warns that a later cycle, of which there is none here, drops them.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        for before, after in REGIMES:
            with record_function(f"{before} / {after}"):
                _clocked(lambda: operation(*tensors), before, after, runs)
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))


def kernels_of(path: Path) -> dict[str, tuple[float, ...]]:
    """What ran on the GPU by a trace: for each kernel's name how long each run took, in microseconds.

    Raises ValueError for a file that is not a trace in Chrome's format (a list of events, of which the complete
    ones have a begin and a length), in which a viewer would show nothing.
    """
    try:
        document = json.loads(path.read_text())
        found: dict[str, list[float]] = {}
        for event in document["traceEvents"]:
            if event["ph"] != "X":
                continue
            begin, length = float(event["ts"]), float(event["dur"])
            if begin < 0 or length < 0 or not {"name", "pid", "tid"} <= event.keys():
                raise ValueError(f"{path} has an event that is nowhere in time: {event}")
            if event.get("cat") == "kernel":
                found.setdefault(event["name"], []).append(length)
    except (KeyError, TypeError, json.JSONDecodeError) as fault:
        raise ValueError(f"{path} is not a trace: {fault!r}") from fault
    return {name: tuple(lengths) for name, lengths in found.items()}


def plot(timing: Timing, path: Path) -> None:
    """Draw every timed call of every way, on a logarithmic scale, next to the kernel's time. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for item in timing.regimes:
        axes.plot(range(1, len(item.samples_us) + 1), item.samples_us, marker="o", label=f"wait {item.name}")
    axes.axhline(timing.kernel_us, color="black", linestyle="--", label="GPU's events: the kernel")
    axes.set_yscale("log")
    axes.set_xlabel("timed call")
    axes.set_ylabel("µs by the clock")
    axes.set_title(f"{timing.operation}({', '.join(timing.inputs)}) on {timing.device}")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def nsys_record(words: Sequence[str], folder: Path) -> str:
    """Run the same under ``nsys profile`` where that is installed; what came of it, in words."""
    program = shutil.which("nsys")
    if program is None:
        return "nsys is not installed: no report of it"
    report = folder / "cuda-timing.nsys-rep"
    report.unlink(missing_ok=True)  # an earlier one says nothing of this run
    argv = [program, "profile", "--force-overwrite=true", f"--output={report.with_suffix('')}"]
    argv += [sys.executable, "-m", "cuda_ops.timing", *words]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_NSYS_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"nsys made no report within {_NSYS_LIMIT_S:g} s"
    return f"nsys report: {report}" if report.is_file() else f"nsys made no report: {done.stderr.strip()[-300:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the sentence; write JSON, plot and trace where asked for."""
    parser = argparse.ArgumentParser(prog="cuda-timing", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--op", default="add2", help="an operation of cuda_ops, or a dotted name such as torch.add")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        help="TYPE[SIZE,…] or a number, once an input (default: its own)",
    )
    parser.add_argument("--runs", type=int, default=10, help="timed calls in each way")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw a picture here (needs matplotlib)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing: draw what --json wrote earlier")
    parser.add_argument("--timeline", type=Path, help="write a trace here, for https://ui.perfetto.dev")
    options = parser.parse_args(argv)
    if options.draw:
        if options.plot is None:
            parser.error("--draw needs --plot, a name for the picture")
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
            f"  found:    {built}, which sees none\n"
            "  fix:      run it on a machine with a GPU, its driver, and a torch built for CUDA",
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
            print("plot: none, since matplotlib is not installed; --draw makes it of the JSON elsewhere")
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
