"""Test the CUDA operator wheel on this machine with PyPI's torch. Without a GPU, the tests run on the CPU.

The same wheel is tested with each requested torch release in a separate environment: ``cuda/torch-VERSION`` in the
build folder. An environment contains all dependencies of its torch release. For PyPI's torch, these include gigabytes
of CUDA libraries.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from flow import native_environment as native
from flow.steps import native_python
from toolchain import files, process, progress
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import ChecksFailed, PlatformMismatch, UserError, WheelUnusable
from wheels import for_this_pc
from wheels.pip import run_pip

SUITE = ROOT / "tests" / "cuda" / "test_cuda_ops.py"
OLDEST = Version("2.10")
"""The oldest release that the library supports (setup.py: TORCH_AT_LEAST)."""
_LIMIT_S = 1200.0
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The test results. ``reasons`` states why tests were skipped."""

    torch: str
    passed: int
    skipped: int
    reasons: tuple[str, ...]

    def summary(self) -> str:
        """The results as one line of text."""
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.passed} tests passed, {self.skipped} skipped{reasons}: torch {self.torch}, on this machine"


def require_checkable(architecture: str, *, check: bool, torch: Sequence[str]) -> None:
    """Check, before the wheel is built, that this machine can run the requested tests.

    Raises PlatformMismatch if the wheel is for another machine, and the same exceptions as ``other_torch``.
    """
    for version in torch:
        _require_release(version)
    here = host_architecture().debian
    if (check or torch) and architecture != here:
        raise PlatformMismatch(
            f"a wheel for {architecture} cannot be tested on this machine",
            expected=f"a wheel for {here}, or a build with neither --check nor --torch",
            found=f"--architecture={architecture}",
            fix="omit --check and --torch; to test the wheel, run benchmarks/cuda/on_gpu.py on the other machine",
        )


def _require_release(version: str) -> None:
    if not _RELEASE.fullmatch(version) or Version(version) < OLDEST:
        raise WheelUnusable(
            f"the wheel does not support torch {version}",
            expected=f"release {OLDEST} or later, such as {for_this_pc.TORCH.partition('==')[2]}",
            found=version,
            fix="pass a supported release to --torch, in the form X.Y.Z",
        )


def other_torch(config: Config, version: str) -> Path:
    """Return the interpreter of the environment with this torch release; create the environment if necessary.

    Raises WheelUnusable for an unsupported release, SourceUnavailable if the package index does not have the release,
    or NetworkUnreachable if the index does not respond.
    """
    _require_release(version)
    folder = config.build_root / "cuda" / f"torch-{version}"
    python = folder / "bin" / "python"
    stamp = folder / "ready"
    tools = [pin for pin in native.TOOLS if pin.startswith(("expecttest", "numpy", "pytest", "setuptools"))]
    wanted = " ".join((f"torch=={version}", *tools, platform.python_version()))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    log = folder.parent / f"torch-{version}.log"
    files.require_space(folder.parent, 12000, f"torch {version} and its dependencies")
    # An environment cannot be moved, so it is not built under a temporary name. The stamp file marks a complete
    # environment.
    files.remove(folder)
    with progress.step(f"fetch torch {version}"):
        process.run([sys.executable, "-m", "venv", folder], limit_s=300, fix="run apt-get install python3-venv as root")
        try:
            run_pip(
                ["install", "--quiet", f"torch=={version}", *tools],
                what=f"torch {version} for Python {platform.python_version()}",
                log=log,
                fix="run pip index versions torch to list the releases, and pass one of them to --torch",
                python=python,
                limit_s=3600,
            )
        except UserError:
            files.remove(folder)
            raise
    files.write_text_atomically(stamp, wanted)
    return python


def install(config: Config, wheel: Path) -> Mapping[str, str]:
    """Install the wheel into a separate folder; return the environment variables that make Python find it."""
    site = config.build_root / "cuda" / "site"
    with files.scratch_folder(site.parent, site.name) as scratch:
        made = scratch / "made"
        process.run(
            [
                native_python.ready(config),
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "--quiet",
                "--no-deps",
                "--no-index",
                f"--target={made}",
                wheel,
            ],
            limit_s=300,
        )
        files.remove(site)
        made.rename(site)
    # Without this variable, torch would load any torch_qpu that is installed in the environment.
    no_backends = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", **no_backends}


def check(config: Config, wheel: Path, *, torch: str = "") -> Checked:
    """Install the wheel and run its tests.

    ``torch`` is the torch release to use. If it is empty, the tests use the native environment's torch.

    Raises ChecksFailed with the last lines of pytest's output, and the same exceptions as ``other_torch``.
    """
    environment = install(config, wheel)
    python = other_torch(config, torch) if torch else native.python_of(config)
    log = config.build_root / "cuda" / (f"suite-torch-{torch}.log" if torch else "suite.log")
    done = process.run(
        [
            python,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            f"--rootdir={SUITE.parent}",
            f"--confcutdir={SUITE.parent}",
            "-p",
            "no:cacheprovider",
            "-q",
            "-rs",
            "-W",
            "error",
            str(SUITE),
        ],
        env=environment,
        limit_s=_LIMIT_S,
        check=False,
        log=log,
    )
    last = done.output.strip().splitlines()[-1] if done.output.strip() else "no output"
    if done.returncode != 0:
        raise ChecksFailed(
            "the tests of the CUDA operators fail on this machine\n" + "\n".join(done.output.splitlines()[-60:]),
            expected=f"{SUITE.name} to pass",
            found=last,
            fix=f"read the full output in {log}",
        )
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped)", last)}
    reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] [^ ]+: (.+)$", done.output, re.MULTILINE)))
    ran = process.output_of([python, "-c", "import torch; print(torch.__version__)"])
    return Checked(torch=ran, passed=counts.get("passed", 0), skipped=counts.get("skipped", 0), reasons=tuple(reasons))


def interpreter(config: Config) -> Path:
    """Return the Python interpreter for ``cuda-timing``.

    This is the configured interpreter or, if none is configured, that of the native environment. If that environment
    does not exist, the interpreter of this process is returned. A path without a folder is the name of a program on
    PATH.
    """
    if given := config.cuda.python:
        return ROOT / given if "/" in given else Path(given)
    ours = native.python_of(config)
    return ours if ours.exists() else Path(sys.executable)
