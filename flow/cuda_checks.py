"""The wheel on this machine: installed beside PyPI's torch and put through its tests; without a GPU, on the CPU.

The same file goes beside every torch that is asked for: each has an environment of its own in ``cuda/torch-VERSION`` of
the build folder, with what that torch itself asks for (for PyPI's, gigabytes of CUDA libraries).
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
from flow import native_job
from toolchain import files, process, progress
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import ChecksFailed, PlatformMismatch, SourceUnavailable, UserError, WheelUnusable
from wheels.pip import run_pip

SUITE = ROOT / "tests" / "cuda" / "test_cuda_ops.py"
OLDEST = Version("2.10")
"""What the library needs (setup.py: TORCH_AT_LEAST)."""
_LIMIT_S = 1200.0
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the suite found. ``reasons`` say why tests were skipped."""

    torch: str
    passed: int
    skipped: int
    reasons: tuple[str, ...]

    def summary(self) -> str:
        """One line."""
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.passed} tests passed, {self.skipped} skipped{why}: torch {self.torch}, on this machine"


def require_checkable(architecture: str, *, check: bool, torch: Sequence[str]) -> None:
    """Whether this machine can run a wheel's tests as asked for, before it is built.

    Raises PlatformMismatch for another machine's wheel, and as ``other_torch`` for a release.
    """
    for version in torch:
        _require_release(version)
    here = host_architecture().debian
    if (check or torch) and architecture != here:
        raise PlatformMismatch(
            f"a wheel for {architecture} cannot be tested on this machine",
            expected=f"a wheel for {here}, or neither --check nor --torch",
            found=f"--architecture={architecture}",
            fix="build it without them; recipes/cuda_ops/on_gpu.py runs its tests on a machine with such a GPU",
        )


def _require_release(version: str) -> None:
    if not _RELEASE.fullmatch(version) or Version(version) < OLDEST:
        raise WheelUnusable(
            f"the wheel is not for torch {version}",
            expected=f"a release from {OLDEST} on, as {native.TORCH.partition('==')[2]}",
            found=version,
            fix="name another",
        )


def other_torch(config: Config, version: str) -> Path:
    """The interpreter of an environment with that release of torch, made where it is not there yet.

    Raises WheelUnusable for what is no such release, SourceUnavailable where the package index does not have it,
    NetworkUnreachable.
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
    files.require_space(folder.parent, 12000, f"torch {version} and what it needs")
    # An environment cannot be moved, so this one is whole when its stamp is there.
    files.remove(folder)
    with progress.step(f"fetch torch {version}"):
        process.run([sys.executable, "-m", "venv", folder], limit_s=300, fix="apt-get install python3-venv")

        def unfound(name: str) -> SourceUnavailable:
            return SourceUnavailable(
                f"the package index does not have {name}",
                expected="a release for this Python and machine",
                found=f"none for Python {platform.python_version()} (whole log: {log})",
                fix="pip index versions torch lists what there is",
            )

        try:
            run_pip(
                ["install", "--quiet", f"torch=={version}", *tools],
                what=f"torch {version}",
                log=log,
                unfound=unfound,
                python=python,
                limit_s=3600,
            )
        except UserError:
            files.remove(folder)
            raise
    files.write_text_atomically(stamp, wanted)
    return python


def install(config: Config, wheel: Path) -> Mapping[str, str]:
    """Unpack the wheel apart, so that environments stay as they are; the variables under which Python finds it."""
    site = config.build_root / "cuda" / "site"
    with files.scratch_folder(site.parent, site.name) as scratch:
        made = scratch / "made"
        process.run(
            [
                native_job.ready_python(config),
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
    # torch_qpu may be in that environment, and would be loaded with torch.
    alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", **alone}


def check(config: Config, wheel: Path, *, torch: str = "") -> Checked:
    """Install the wheel and run its suite, beside the native checks' torch or another release of it.

    Raises ChecksFailed with the end of pytest's output, and as ``other_torch``.
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
            "the suite of CUDA operators fails on this machine\n" + "\n".join(done.output.splitlines()[-60:]),
            expected=f"{SUITE.name} to pass",
            found=last,
            fix=f"all of the output is in {log}",
        )
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped)", last)}
    reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] [^ ]+: (.+)$", done.output, re.MULTILINE)))
    ran = process.output_of([python, "-c", "import torch; print(torch.__version__)"])
    return Checked(torch=ran, passed=counts.get("passed", 0), skipped=counts.get("skipped", 0), reasons=tuple(reasons))


def interpreter(config: Config) -> Path:
    """The Python that ``cuda-timing`` runs: the configured one, else the one that the wheel is tested with."""
    if config.cuda.python:
        return ROOT / config.cuda.python
    ours = native.python_of(config)
    return ours if ours.exists() else Path(sys.executable)
