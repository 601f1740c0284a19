"""``array-exp -l N``: compute exp of each element of a vector with numpy, CuPy, torch and cuda_ops.

For each implementation, the program prints the number of decimal digits that agree with a result in double precision,
and the time per call. GPU times are measured with CUDA events before and after many calls. As the output states, the
times exclude copies to and from the GPU, the allocation of the input, and the first calls.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXCLUDED = (
    "excluded from the times: creating the input, copying it to the GPU, copying the result back, the first calls. "
    "Included: allocating the output."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The time per call of one implementation, or the reason why the implementation was skipped."""

    name: str
    seconds: float = math.nan
    digits: float = math.nan
    clock: str = ""
    skipped: str = ""


def digits_of_agreement(found: Any, exact: Any) -> float:
    """Return the number of decimal digits that agree in all elements: -log10 of the largest relative difference."""
    import numpy as np

    if len(found) == 0:
        return math.inf
    worst = float(np.max(np.abs(found.astype(np.float64) - exact) / np.abs(exact)))
    return math.inf if worst == 0 else -math.log10(worst) if worst > 0 else math.nan


def _timed_on_host(call: Callable[[], Any], runs: int) -> float:
    call()
    samples = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def _timed_by_events(call: Callable[[], Any], runs: int) -> float:
    import torch

    for _ in range(3):
        call()
    samples = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) / 1e3 / runs)
    return statistics.median(samples)


def compare(length: int, *, runs: int = 100) -> list[Row]:
    """Run all four implementations on ``length`` float32 values between -1 and 1, and measure their times."""
    import numpy as np
    import torch

    import cuda_ops

    x = np.random.default_rng().uniform(-1.0, 1.0, length).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    few = max(1, min(runs, 10))
    rows = [
        Row(
            name="numpy",
            seconds=_timed_on_host(lambda: np.exp(x), few),
            digits=digits_of_agreement(np.exp(x), exact),
            clock="host's clock, CPU",
        )
    ]
    gpu = torch.cuda.is_available()
    rows.append(_cupy(x, exact, runs) if gpu else Row(name="CuPy", skipped="no GPU found"))
    place = torch.from_numpy(x).cuda() if gpu else torch.from_numpy(x)
    for name, call in (("torch", torch.exp), ("cuda_ops", cuda_ops.exp)):
        seconds = (
            _timed_by_events(lambda call=call: call(place), runs)  # type: ignore[misc]
            if gpu
            else _timed_on_host(lambda call=call: call(place), few)  # type: ignore[misc]
        )
        rows.append(
            Row(
                name=name,
                seconds=seconds,
                digits=digits_of_agreement(call(place).cpu().numpy(), exact),
                clock="CUDA events" if gpu else "host's clock, CPU",
            )
        )
    return rows


def torchs_stream(cupy: Any) -> Any:
    """Return CuPy's object for torch's current stream. The object's class has had a different name since CuPy 14."""
    import torch

    stream = torch.cuda.current_stream()
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream)


def _cupy(x: Any, exact: Any, runs: int) -> Row:
    try:
        import cupy
    except ImportError as fault:
        return Row(name="CuPy", skipped=f"import failed: {fault}")
    place = cupy.asarray(x)
    with torchs_stream(cupy):
        seconds = _timed_by_events(lambda: cupy.exp(place), runs)
        found = cupy.asnumpy(cupy.exp(place))
    return Row(name="CuPy", seconds=seconds, digits=digits_of_agreement(found, exact), clock="CUDA events")


def table(length: int, rows: Sequence[Row]) -> str:
    """Format all results as text."""
    lines = [f"exp of {length} float32 values", "", f"{'':12}{'one call':>14}{'digits':>8}  clock"]
    base = rows[0].seconds
    for row in rows:
        if row.skipped:
            lines.append(f"{row.name:12}{'skipped':>14}{'':8}  {row.skipped}")
            continue
        times = f"{base / row.seconds:.1f}× numpy" if row.seconds else ""
        lines.append(f"{row.name:12}{row.seconds * 1e6:11.1f} µs{row.digits:8.1f}  {row.clock}; {times}")
    return "\n".join([*lines, "", EXCLUDED])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="array-exp", description="exp of a vector: numpy, CuPy, torch and cuda_ops")
    parser.add_argument("-l", "--length", type=int, required=True, help="number of elements")
    parser.add_argument("--runs", type=int, default=100, help="timed calls")
    options = parser.parse_args(argv)
    if options.length < 1 or options.runs < 1:
        parser.error("the length and the number of runs must be at least 1")
    print(table(options.length, compare(options.length, runs=options.runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
