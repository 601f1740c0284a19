"""Compare the operators' speed with that of torch, CuPy and a plain kernel. Requires a GPU and the wheel.

CUDA events before and after a batch of calls measure the time of the kernels. Softmax and matrix-vector multiplication
often run for less time than their launch takes, so each batch of these calls is timed as a CUDA graph. Launch times are
measured with the host's clock, for batches of calls that the GPU executes faster than the host launches them. The
candidates of a comparison alternate, one batch per round, so changes in the GPU's clock rate or the host's load affect
all candidates alike. The result is the median over all rounds.

``python speed.py out.json`` writes the results to ``out.json``. The script is independent of the rest of the
repository.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROUNDS = 9
LAUNCHES = 300
"""Calls per batch when launches are timed. The driver can queue more calls than this before it blocks the host."""
DATASHEET_GB_S = {"NVIDIA H200": 4800.0}
"""The memory bandwidth according to the vendor's datasheet."""

PLAIN_KERNEL = """
extern "C" __global__ void plain_add(float* c, const float* a, const float* b, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = a[i] + b[i];
}
"""
"""The kernel in the column ``plain kernel``: 32-bit indices, and one block of 1024 threads for each 1024 elements."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The median time per call of each candidate, in microseconds.

    ``moved`` is the number of bytes that a call must read and write.
    """

    name: str
    ours: str
    microseconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    ratios: Mapping[str, tuple[float, float, float]]
    """For each other candidate: the 10th, 50th and 90th percentiles of the ratios of our time to the candidate's."""
    moved: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)

    def as_json(self, limit_gb_s: float) -> dict[str, Any]:
        """Return the fields as JSON values, with the speedup of ``ours`` over each other candidate.

        If ``moved`` is set, add the data rates, and the percentage of the memory bandwidth that ``ours`` reaches.
        """
        mine = self.microseconds[self.ours]
        document = asdict(self) | {"faster_than": {k: v / mine for k, v in self.microseconds.items() if k != self.ours}}
        if self.moved:
            rates = {name: self.moved / value / 1e3 for name, value in self.microseconds.items()}
            document |= {"gb_s": rates, "percent_of_limit": 100 * rates[self.ours] / limit_gb_s}
        return document


def by_events(call: Callable[[], object], calls: int) -> float:
    """Make ``calls`` calls between two CUDA events, and return the time per call in microseconds."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def by_graph(call: Callable[[], object], calls: int) -> float:
    """Return the time per call in microseconds, measured with a CUDA graph of ``calls`` calls.

    The time does not include the launches.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return by_events(graph.replay, 5) / calls


def by_clock(call: Callable[[], object], calls: int) -> float:
    """Return the time that the host spends on a call, in microseconds."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent * 1e6 / calls


def compare(
    name: str,
    candidates: Mapping[str, Callable[[], object]],
    *,
    moved: int = 0,
    calls: int = 20,
    ours: str = "ours",
    clock: Callable[[Callable[[], object], int], float] = by_events,
    rounds: int = ROUNDS,
    skipped: Mapping[str, str] | None = None,
) -> Comparison:
    """Measure the candidates in turn, one batch of each per round, and print their median times."""
    samples: dict[str, list[float]] = {label: [] for label in candidates}
    for call in candidates.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for label, call in candidates.items():
            samples[label].append(clock(call, calls))
    made = Comparison(
        name=name,
        ours=ours,
        microseconds={label: statistics.median(values) for label, values in samples.items()},
        spread={label: (min(values), max(values)) for label, values in samples.items()},
        ratios={label: _tenths(samples[ours], values) for label, values in samples.items() if label != ours},
        moved=moved,
        skipped=skipped or {},
    )
    shown = "  ".join(f"{label} {value:.2f}" for label, value in made.microseconds.items())
    rate = f"  {moved / made.microseconds[ours] / 1e3:.0f} GB/s" if moved else ""
    print(f"{name}: {shown} µs{rate}", flush=True)
    return made


def _tenths(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Divide ``mine`` by ``others`` in each round, and return the 10th, 50th and 90th percentiles of the ratios."""
    each = statistics.quantiles((a / b for a, b in zip(mine, others, strict=True)), n=10, method="inclusive")
    return each[0], each[4], each[8]


def plain_add(a: Any, b: Any, c: Any) -> Callable[[], object]:
    """Return a function that launches the plain kernel on torch's stream. Raises ImportError if CuPy is missing."""
    import cupy
    from cuda_ops.array_exp import torchs_stream

    kernel = cupy.RawKernel(PLAIN_KERNEL, "plain_add")
    stream = torchs_stream(cupy)
    n = a.numel()
    pointers = tuple(cupy.from_dlpack(item) for item in (c, a, b))

    def call() -> None:
        with stream:
            kernel(((n + 1023) // 1024,), (1024,), (*pointers, cupy.int32(n)))

    return call


def additions() -> list[Comparison]:
    """Measure the time of add2 for 2^20 and 2^28 elements, and that of axpy for 2^28 elements.

    The operators are memory-bound at 2^28 elements.
    """
    import cuda_ops
    import torch

    done = []
    for n, calls in ((1 << 20, 200), (1 << 28, 20)):
        a, b = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        c = torch.empty_like(a)
        into: dict[str, Callable[[], object]] = {
            "ours": lambda a=a, b=b, c=c, n=n: cuda_ops.torch_launch_add2(c, a, b, n),  # type: ignore[misc]
            "torch": lambda a=a, b=b, c=c: torch.add(a, b, out=c),  # type: ignore[misc]
        }
        candidates = dict(into)
        skipped = {}
        try:
            import cupy
            from cuda_ops.array_exp import torchs_stream

            candidates["plain kernel"] = plain_add(a, b, c)
            x, y, z = (cupy.from_dlpack(item) for item in (a, b, c))
            stream = torchs_stream(cupy)

            def by_cupy(x: Any = x, y: Any = y, z: Any = z, stream: Any = stream) -> None:
                with stream:
                    cupy.add(x, y, z)

            candidates["CuPy"] = by_cupy
        except ImportError as fault:
            skipped["CuPy, plain kernel"] = str(fault)
        power = n.bit_length() - 1
        done.append(compare(f"add2 2^{power} float32", candidates, moved=12 * n, calls=calls, skipped=skipped))
        candidates = {"ours": lambda a=a, b=b: cuda_ops.add2(a, b), "torch": lambda a=a, b=b: torch.add(a, b)}  # type: ignore[misc]
        done.append(compare(f"add2 2^{power} float32, new result", candidates, moved=12 * n, calls=calls))
        done.append(compare(f"add2 2^{power} float32, in a graph", into, moved=12 * n, clock=by_graph))
    for kind in (torch.float16, torch.bfloat16):
        a, b = (torch.randn(1 << 28, device="cuda").to(kind) for _ in range(2))
        candidates = {"ours": lambda a=a, b=b: cuda_ops.add2(a, b), "torch": lambda a=a, b=b: torch.add(a, b)}  # type: ignore[misc]
        done.append(compare(f"add2 2^28 {str(kind)[6:]}, new result", candidates, moved=6 << 28))
        candidates = {
            "ours": lambda a=a, b=b: cuda_ops.axpy(0.5, a, b),  # type: ignore[misc]
            "torch": lambda a=a, b=b: torch.add(b, a, alpha=0.5),  # type: ignore[misc]
        }
        done.append(compare(f"axpy 2^28 {str(kind)[6:]}, new result", candidates, moved=6 << 28))
    return done


def exponentials() -> list[Comparison]:
    """Measure the time of exp for 10^7 float32 elements, and for 2^28 elements of each 16-bit type."""
    import cuda_ops
    import torch

    x = torch.rand(10**7, device="cuda") * 2 - 1
    candidates: dict[str, Callable[[], object]] = {"ours": lambda: cuda_ops.exp(x), "torch": lambda: torch.exp(x)}
    skipped = {}
    try:
        import cupy
        from cuda_ops.array_exp import torchs_stream

        there = cupy.from_dlpack(x)
        stream = torchs_stream(cupy)

        def by_cupy() -> None:
            with stream:
                cupy.exp(there)

        candidates["CuPy"] = by_cupy
    except ImportError as fault:
        skipped["CuPy"] = str(fault)
    done = [compare("exp 10^7 float32", candidates, moved=8 * 10**7, calls=200, skipped=skipped)]
    for kind in (torch.float16, torch.bfloat16):
        y = torch.randn(1 << 28, device="cuda").to(kind)
        both = {"ours": lambda y=y: cuda_ops.exp(y), "torch": lambda y=y: torch.exp(y)}
        done.append(compare(f"exp 2^28 {str(kind)[6:]}", both, moved=4 << 28))
    return done


SOFTMAX_SHAPES = (
    *((1 << 20, 128), (131072, 1000), (65536, 1001), (65536, 1024), (32768, 4096), (16384, 8191), (8192, 16384)),
    *((4096, 32768), (1024, 131072), (1 << 20, 100), (200000, 257), (1 << 20, 7)),
)
MATVEC_SHAPES = (
    *((16384, 16384), (8192, 8192), (4096, 4096), (65536, 1024), (1024, 65536), (100, 100000), (1000000, 100)),
    *((8191, 8191), (65536, 1001), (100, 99999), (2000000, 17), (5000, 1003), (2000, 5000), (4097, 4097)),
    *((1000, 1000), (5000, 2003), (3000, 3001), (20000, 501), (700, 14001), (60, 150001), (200, 40001)),
)


def rows() -> list[Comparison]:
    """Measure the time of softmax, and of matrix-vector multiplication with each matrix and with its transpose."""
    import cuda_ops
    import torch

    done = []
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        label = str(kind)[6:]
        for shape in SOFTMAX_SHAPES:
            x = torch.randn(shape, device="cuda", dtype=kind)
            both: dict[str, Callable[[], object]] = {
                "ours": lambda x=x: cuda_ops.softmax(x),  # type: ignore[misc]
                "torch": lambda x=x: torch.softmax(x, -1),  # type: ignore[misc]
            }
            done.append(compare(f"softmax {shape[0]} x {shape[1]} {label}", both, moved=2 * x.nbytes, clock=by_graph))
        for shape in MATVEC_SHAPES:
            matrix = torch.randn(shape, device="cuda", dtype=kind)
            for m, way in ((matrix, "matvec"), (matrix.t(), "matvec transposed")):
                v = torch.randn(m.shape[1], device="cuda", dtype=kind)
                both = {
                    "ours": lambda m=m, v=v: cuda_ops.matvec(m, v),  # type: ignore[misc]
                    "torch": lambda m=m, v=v: torch.mv(m, v),  # type: ignore[misc]
                }
                moved = m.nbytes + v.nbytes + m.shape[0] * m.itemsize
                done.append(compare(f"{way} {shape[0]} x {shape[1]} {label}", both, moved=moved, clock=by_graph))
    return done


def launches(which: str) -> list[Comparison]:
    """Measure the host time per call of add2. The arrays are so small that the host never waits for the GPU."""
    import cuda_ops
    import torch

    a, b = torch.randn(16, device="cuda"), torch.randn(16, device="cuda")
    op, direct = torch.ops.cuda_ops.add2.default, torch.ops.cuda_ops._add2.default
    candidates: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.add(a, b),
        "torch.ops.cuda_ops.add2.default": lambda: op(a, b),
        "torch.ops.cuda_ops.add2": lambda f=torch.ops.cuda_ops.add2: f(a, b),  # type: ignore[misc]
        "torch.ops.cuda_ops._add2": lambda: direct(a, b),
        "torch.ops.aten.add.Tensor": lambda f=torch.ops.aten.add.Tensor: f(a, b),  # type: ignore[misc]
        "cuda_ops.add2": lambda: cuda_ops.add2(a, b),
    }
    ours = "torch.ops.cuda_ops.add2.default"
    done = [compare(f"launch of add2, {which}", candidates, ours=ours, clock=by_clock, calls=LAUNCHES, rounds=61)]
    with torch.inference_mode():
        name = f"launch of add2, {which}, inference mode"
        done.append(compare(name, candidates, ours=ours, clock=by_clock, calls=LAUNCHES, rounds=31))
    return done


def other_launches() -> list[Comparison]:
    """Measure the host time per call of each operator except add2. One matrix has few but long rows (100 x 10000)."""
    import torch

    ops = torch.ops.cuda_ops
    x, square, vector = (torch.randn(shape, device="cuda") for shape in ((16,), (4, 4), (4,)))
    wide, long = torch.randn(100, 10000, device="cuda"), torch.randn(10000, device="cuda")
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "exp": (lambda: ops.exp.default(x), lambda: torch.exp(x)),
        "axpy": (lambda: ops.axpy.default(0.5, x, x), lambda: torch.add(x, x, alpha=0.5)),
        "softmax 4 x 4": (lambda: ops.softmax.default(square), lambda: torch.softmax(square, -1)),
        "matvec 4 x 4": (lambda: ops.matvec.default(square, vector), lambda: torch.mv(square, vector)),
        "matvec 100 x 10000": (lambda: ops.matvec.default(wide, long), lambda: torch.mv(wide, long)),
    }
    return [
        compare(f"launch of {name}", {"ours": mine, "torch": theirs}, clock=by_clock, calls=LAUNCHES, rounds=61)
        for name, (mine, theirs) in pairs.items()
    ]


def main() -> int:
    """Run all measurements and write the result."""
    import cuda_ops
    import torch

    name = torch.cuda.get_device_name()
    limit = DATASHEET_GB_S.get(name, 0.0)
    source = "datasheet"
    if not limit:
        facts = torch.cuda.get_device_properties(0)
        limit, source = 2e3 * facts.memory_clock_rate * facts.memory_bus_width / 8 / 1e9, "memory clock and bus width"
    done = [*launches("first"), *other_launches(), *additions(), *launches("second"), *exponentials(), *rows()]
    done += launches("third")
    document = {
        "device": name,
        "torch": torch.__version__,
        "cuda_ops": cuda_ops.__version__,
        "limit_gb_s": limit,
        "limit_from": source,
        "comparisons": [item.as_json(limit) for item in done],
    }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
