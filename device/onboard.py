"""Describe the board, run pytest once and time the kernels.

The board runs this program in the folder that contains the tests.

The program requires only Python 3.11 or later and pytest. All tests run in a single process, because on an emulated
board, starting Python again takes as long as running a hundred tests.

The program prints its results to standard output as lines of JSON. Each line is an object, whose key ``pitorch`` maps
to the type of the line. All other output goes to standard error. The program prints these lines, in this order:

    {"pitorch": "facts", …}                       the board, see ``facts``
    {"pitorch": "collected", "nodeids": […]}      the tests that pytest will run
    {"pitorch": "start", "nodeid": …}             before each test
    {"pitorch": "result", "nodeid": …, "outcome": "passed|failed|skipped|error", "seconds": …, "text": …}
    {"pitorch": "timing", "document": …}          the document from timing.py, or {"reason": …} if there is none
    {"pitorch": "end", "status": …, "seconds": …} pytest's exit status

If there is no ``end`` line, the connection to the board was lost. If the status is not 0, 1 or 5, or a collected test
has no result, pytest exited early.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Say = Callable[..., None]

DISTRIBUTIONS = ("torch", "numpy", "pytest", "pitorch-qpu-ops")
COMPONENTS = {
    "torch": "torch",
    "dot_cpp": "the QPU extension wheel",
    "matrix_cpp": "the QPU extension wheel",
    "cpu_cpp": "the QPU extension wheel",
    "qpu_ops": "the QPU extension wheel",
    "torch_qpu": "the QPU extension wheel",
}
"""Modules that an image may lack, with the component that contains them."""

_PROBE_LIMIT_S = 300.0


def facts() -> dict[str, Any]:
    """Return the board's properties, each from its authoritative source; missing values are empty."""
    release = dict(line.rstrip("\n").split("=", 1) for line in _text("/etc/os-release").splitlines() if "=" in line)
    return {
        "model": _text("/proc/device-tree/model").rstrip("\0"),
        "compatible": [word for word in _text("/proc/device-tree/compatible").split("\0") if word],
        "firmware": firmware(),
        "hostname": platform.node(),
        "kernel": platform.release(),
        "kernel_machine": platform.machine(),
        "pointer_bits": struct.calcsize("P") * 8,
        "wheel_platform": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
        "distribution": release.get("PRETTY_NAME", "").strip('"'),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count() or 0,
        "memory_kib": _memory_kib(),
        "root": next((line for line in _text("/proc/mounts").splitlines() if line.split()[1:2] == ["/"]), ""),
        "init": _text("/proc/1/comm").strip(),
        "unix_time": int(time.time()),
        "distributions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "records": {name: digest for name in DISTRIBUTIONS if (digest := _record(name))},
        "libqpu": _libqpu(),
        "qpu_info": _qpu_info(),
    }


def firmware(tree: Path = Path("/proc/device-tree")) -> dict[str, str]:
    """Return the revision code (hex) and the serial number, which only a Pi's firmware writes to the device tree.

    The device trees in kernel packages contain neither value, so an emulator that uses one of these device trees
    reports only the Pi's model name.
    """
    try:
        revision = (tree / "system" / "linux,revision").read_bytes().hex()
    except OSError:
        revision = ""
    return {"revision": revision, "serial_number": _text(str(tree / "serial-number")).rstrip("\0\n")}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _memory_kib() -> int:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1])
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _record(name: str) -> str:
    """Compute the SHA-256 of a wheel's RECORD, which contains the hashes of all files in the wheel."""
    try:
        text = importlib.metadata.distribution(name).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _libqpu() -> dict[str, str]:
    """Return the path of the libqpu library that the dynamic loader would use, and its SHA-256."""
    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
    if ldconfig is None:
        return {}
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        if line.strip().startswith("libqpu.so.1 "):
            path = Path(line.rpartition("=> ")[2].strip())
            if path.is_file():
                return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {}


def _qpu_info() -> Any:
    """Return the output of ``qpu-info --json``, or an object with the reason why there is none."""
    if shutil.which("qpu-info") is None:
        return {"absent": "qpu-info is not installed"}
    try:
        done = subprocess.run(
            ["qpu-info", "--json"], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
        )
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as fault:
        return {"absent": f"qpu-info --json did not print JSON: {fault}"}


class Reporter:
    """A pytest plugin that reports the start and end of each test."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._seconds: dict[str, float] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Report the tests that will run."""
        self._say("collected", nodeids=[item.nodeid for item in session.items])

    def pytest_collectreport(self, report: Any) -> None:
        """Report an error for a file that cannot be imported."""
        nodeid = f"{report.nodeid}::collection"
        if report.failed:
            self._say("result", nodeid=nodeid, outcome="error", seconds=0.0, text=str(report.longrepr))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._say("result", nodeid=nodeid, outcome="skipped", seconds=0.0, text=_reason(reason))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report the start of a test, so that a crash of the board can be attributed to it."""
        self._seconds[nodeid] = 0.0
        self._worst[nodeid] = ("passed", "")
        self._say("start", nodeid=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Combine the results of a test's three phases: set-up, call and tear-down."""
        nodeid = report.nodeid
        self._seconds[nodeid] = self._seconds.get(nodeid, 0.0) + report.duration
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
            sections = "".join(f"\n--- {name} ---\n{text}" for name, text in report.sections)
            self._worst[nodeid] = (outcome, report.longreprtext + sections)
        elif report.skipped and self._worst[nodeid][0] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._worst[nodeid] = ("skipped", _reason(reason))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Report the result of the test."""
        outcome, text = self._worst.pop(nodeid)
        self._say("result", nodeid=nodeid, outcome=outcome, seconds=round(self._seconds.pop(nodeid), 4), text=text)


def _reason(text: str) -> str:
    return text.removeprefix("Skipped: ")


def absent_components(path: Path) -> list[str]:
    """Find the image components that a test file imports but that are not installed.

    A test file cannot skip its own tests if a component is missing, because the imports at the top of the file fail
    first. A component that is installed but cannot be imported is broken, not missing, and fails the suite.
    """
    tree = ast.parse(path.read_text(), str(path))
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    gone = {
        component
        for module, component in COMPONENTS.items()
        if module in imported and importlib.util.find_spec(module) is None
    }
    return sorted(gone)


def run_tests(folder: Path, targets: Sequence[str], keyword: str, say: Say) -> int:
    """Run pytest in this process and return its exit status. Files that import a missing component are skipped."""
    import pytest

    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", "--import-mode=importlib"]
    words += ["--continue-on-collection-errors", "-W", "error::pytest.PytestUnknownMarkWarning"]
    if keyword:
        words += ["-k", keyword]
    chosen = []
    for target in targets or sorted(path.name for path in folder.glob("test_*.py")):
        path = folder / target.partition("::")[0]
        gone = absent_components(path) if path.is_file() else []
        if gone:
            text = f"the image is built without {' and '.join(gone)}"
            say("result", nodeid=f"{path.name}::all", outcome="skipped", seconds=0.0, text=text)
        else:
            chosen.append(str(folder / target))
    if not chosen:
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return int(pytest.main([*words, *chosen], plugins=[Reporter(say)]))


def run_timing(folder: Path, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Return the document from timing.py or, if there is none, ``{"reason": …}``.

    The script runs in a separate process, so that memory used by the tests cannot slow it down.
    """
    script = folder / "timing.py"
    if not script.is_file():
        return {"reason": "timing.py is not part of this suite"}
    if not _version("pitorch-qpu-ops"):
        return {"reason": "the extension wheel pitorch-qpu-ops is not installed"}
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"timing.py did not finish within {limit_s:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return {"reason": f"timing.py failed with status {done.returncode}: {' '.join(last)}"}
    try:
        document = json.loads(done.stdout)
    except ValueError as fault:
        return {"reason": f"timing.py printed no JSON: {fault}"}
    return document if isinstance(document, dict) else {"reason": "timing.py printed no JSON object"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Describe the board, run the tests and time the kernels; return pytest's exit status."""
    parser = argparse.ArgumentParser(description="Run the device suite on this board.")
    parser.add_argument("targets", nargs="*", help="test files or node IDs, relative to the suite's folder")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--keyword", default="")
    parser.add_argument("--timing", action="append", default=[], help="an argument for timing.py (repeatable)")
    parser.add_argument(
        "--timing-limit", type=float, default=0.0, help="time limit for timing.py in seconds (0: do not run it)"
    )
    options = parser.parse_args(arguments)

    began = time.monotonic()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    # From now on, all other output goes to standard error.
    os.dup2(2, 1)

    def say(what: str, **content: Any) -> None:
        lines.write(json.dumps({"pitorch": what, **content}) + "\n")
        lines.flush()

    os.environ["PITORCH_BOARD"] = "1"
    say("facts", **facts())
    try:
        import pytest
    except ImportError:
        say("fault", summary="pytest is not installed on the board", fix="add python3-pytest to the image")
        return 4
    status = run_tests(options.folder, options.targets, options.keyword, say)
    if options.timing_limit > 0:
        ran = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        none = {"reason": f"no test ran, or some of the selected tests did not run (pytest's status {status})"}
        timed = run_timing(options.folder, options.timing, options.timing_limit) if ran else none
        say("timing", document=timed)
    say("end", status=status, seconds=round(time.monotonic() - began, 3))
    return status


if __name__ == "__main__":
    sys.exit(main())
