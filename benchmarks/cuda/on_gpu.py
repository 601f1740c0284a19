"""Run all GPU tests and measurements with one command, on a machine without this repository's other tools.

::

    python3 benchmarks/cuda/on_gpu.py --wheel PATH --out FOLDER      # a wheel built by ./inv build-cuda-wheel
    python3 benchmarks/cuda/on_gpu.py --build 90+PTX --out FOLDER    # or build it here with the local CUDA toolkit

The script requires torch with CUDA, numpy and pytest; CuPy, matplotlib and compute-sanitizer are used if they are
installed. The script installs the wheel into a separate folder, and runs the speed comparison, cuda-timing and
array-exp. It then runs all tests, and afterwards repeats a selection of them under compute-sanitizer. The script writes
``gpu.json`` and the other output to FOLDER. If a test run or a measurement was skipped, ``gpu.json`` states the reason.
The exit status is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "cuda_ops"
TESTS = ROOT / "tests" / "cuda" / "test_cuda_ops.py"

KERNELS = "softmax_in_any_layout or softmax_of_long_rows or matvec_cut"
SANITIZED = {
    "memcheck": "not (2_to_the_31 or compiled_function or timeline or current_stream or every_stream or cuda_graph "
    "or failed_allocation)",
    "initcheck": f"elementwise_agrees or launch_form_writes or {KERNELS}",
    "racecheck": KERNELS,
    "synccheck": KERNELS,
}
"""The tests that each tool of compute-sanitizer checks; GPU tests only.

memcheck skips the tests that use tens of GiB, and those that run other programs or other libraries' kernels. It also
skips the tests that check when kernels run or when memory is allocated, because memcheck changes both. The other tools
are slower, so each checks a smaller set of tests. The set for initcheck runs every kernel; the sets for racecheck and
synccheck run every kernel that shares memory among threads.
"""


def run(argv: Sequence[str | Path], log: Path, *, environment: dict[str, str], limit_s: float) -> tuple[int, str]:
    """Run a program and write its output to ``log``; return its status (124 after a timeout) and its output."""
    words = [str(word) for word in argv]
    print("$", " ".join(words), flush=True)
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as fault:
        kept = fault.stdout or b""
        status, output = 124, kept.decode(errors="replace") if isinstance(kept, bytes) else kept
    log.write_text(output)
    return status, output


def build(architectures: str, folder: Path, log: Path) -> Path:
    """Build the pitorch-cuda-ops wheel with the local CUDA toolkit, and return the path of the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "cuda_ops"
        for name in ("csrc", "src"):
            shutil.copytree(RECIPE / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy2(RECIPE / name, source / name)
        argv: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            folder,
            source,
        ]
        environment = {"CUDA_OPS_ARCHITECTURES": architectures}
        status, output = run(argv, log, environment=environment, limit_s=900)
    if status:
        sys.exit(f"failed to build the wheel\n{output[-3000:]}")
    return next(folder.glob("*.whl"))


def tests(out: Path, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run the whole suite; return the numbers of tests, skips, failures and errors, and the reason for each skip."""
    report = out / "tests.xml"
    argv = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={TESTS.parent}", "-p", "no:cacheprovider"]
    argv += ["-q", "-rs", "-W", "error", f"--junitxml={report}", str(TESTS)]
    status, output = run(argv, out / "tests.log", environment=environment, limit_s=limit_s)
    print("\n".join(output.splitlines()[-12:]))
    counts = {"tests": 0, "skipped": 0, "failures": 0, "errors": 0}
    if report.is_file():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):  # noqa: S314 (written by pytest above)
            for name in counts:
                counts[name] += int(suite.get(name, "0"))
    return {"status": status, **counts, "skips": [line for line in output.splitlines() if line.startswith("SKIPPED")]}


def sanitizer(out: Path, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run each tool of compute-sanitizer on the tests that ``SANITIZED`` selects for the tool."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        return {"skipped": "compute-sanitizer is not installed"}
    found = {}
    for tool, select in SANITIZED.items():
        argv: list[str | Path] = [program, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all"]
        if tool in ("racecheck", "synccheck"):
            # Check only this project's kernels, because torch's use of shared memory is out of scope.
            argv.append("--kernel-regex=kns=cuda_ops")
        argv += [sys.executable, "-m", "pytest", "-c", os.devnull]
        argv += [f"--rootdir={TESTS.parent}", "-p", "no:cacheprovider", "-q"]
        argv += ["-k", f"not ([cpu or -cpu) and ({select})", TESTS]
        # Without the caching allocator, every tensor is a separate allocation with checked bounds.
        watched = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        began = time.monotonic()
        status, output = run(argv, out / f"sanitizer-{tool}.log", environment=watched, limit_s=limit_s)
        last = [line for line in output.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        passed = [line for line in output.splitlines() if " passed" in line]
        found[tool] = {
            "status": status,
            "summary": last[-1].lstrip("= ") if last else "",
            "tests": passed[-1] if passed else "",
            "seconds": round(time.monotonic() - began, 1),
        }
        print(tool, found[tool], flush=True)
    return found


def main() -> int:
    """Run the tests and measurements, except those that ``--skip`` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--wheel", type=Path, help="path of a pitorch-cuda-ops wheel")
    parser.add_argument("--build", metavar="ARCHITECTURES", help="build the wheel here, for these GPU architectures")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--skip", action="append", default=[], choices=["tests", "sanitizer", "speed", "timing"])
    options = parser.parse_args()
    if (options.wheel is None) == (options.build is None):
        parser.error("expected either --wheel or --build")
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    document: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        wheel = options.wheel or build(options.build, Path(scratch), out / "build.log")
        argv: list[str | Path] = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        status, output = run([*argv, "--target", site, wheel], out / "install.log", environment={}, limit_s=300)
        if status:
            sys.exit(f"failed to install the wheel\n{output[-2000:]}")
        environment = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        facts = "import json, torch; from torch import cuda; "
        facts += "print(json.dumps([torch.__version__, cuda.get_device_name(), cuda.device_count()]))"
        status, output = run([sys.executable, "-c", facts], out / "facts.log", environment=environment, limit_s=120)
        if status:
            sys.exit(f"torch found no usable GPU\n{output[-2000:]}")
        torch, device, count = json.loads(output.splitlines()[-1])
        made = hashlib.sha256(wheel.read_bytes()).hexdigest()
        document |= {"wheel": wheel.name, "wheel_sha256": made, "torch": torch, "device": device, "devices": count}
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "speed": lambda: speed(out, environment),
            "timing": lambda: timing(out, environment),
            "tests": lambda: tests(out, environment, 400),
            "sanitizer": lambda: sanitizer(out, environment, 240),
        }
        for name, part in parts.items():
            document[name] = {"skipped": "by request"} if name in options.skip else part()
            (out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(failed(document[name]) for name in parts) else 0


def failed(part: dict[str, Any]) -> bool:
    """Return whether a result, or a result nested in it, has a nonzero exit status."""
    return bool(part.get("status")) or any(failed(item) for item in part.values() if isinstance(item, dict))


def speed(out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run speed.py in a separate process."""
    result = out / "speed.json"
    argv: list[str | Path] = [sys.executable, Path(__file__).with_name("speed.py"), result]
    status, output = run(argv, out / "speed.log", environment=environment, limit_s=400)
    print(output, flush=True)
    return {"status": status, **(json.loads(result.read_text()) if result.is_file() else {})}


def timing(out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run cuda-timing with its default sizes, and array-exp with 10^7 elements."""
    argv: list[str | Path] = [sys.executable, "-m", "cuda_ops.timing", f"--json={out / 'timing.json'}"]
    argv += [f"--plot={out / 'timing.png'}", f"--timeline={out / 'timeline.json'}"]
    status, output = run(argv, out / "timing.log", environment=environment, limit_s=200)
    print(output, flush=True)
    argv = [sys.executable, "-m", "cuda_ops.array_exp", "-l", "10000000"]
    other, text = run(argv, out / "array-exp.log", environment=environment, limit_s=200)
    print(text, flush=True)
    figures = out / "timing.json"
    said = text[text.find("exp of") :].strip().splitlines()
    lines = output.splitlines()
    traced = next((number for number, line in enumerate(lines) if line.startswith("timeline: ")), len(lines))
    return {
        "status": status or other,
        "cuda_timing": json.loads(figures.read_text()) if figures.is_file() else {},
        "array_exp": said,
        "timeline": [line.strip() for line in lines[traced + 1 :] if " runs, median " in line],
    }


if __name__ == "__main__":
    sys.exit(main())
