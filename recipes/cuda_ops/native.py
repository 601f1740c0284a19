"""The wheel on this machine: installed beside PyPI's torch and put through its tests; without a GPU, on the CPU."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.qpu_ops import native
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.errors import ChecksFailed

SUITE = ROOT / "tests" / "cuda" / "test_cuda_ops.py"
_LIMIT_S = 1200.0


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


def install(config: Config, wheel: Path) -> Mapping[str, str]:
    """Unpack the wheel apart, so that the environment stays as it is; the variables under which Python finds it."""
    site = config.build_root / "cuda" / "site"
    with files.scratch_folder(site.parent, site.name) as scratch:
        made = scratch / "made"
        process.run(
            [
                native.ready_python(config),
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


def check(config: Config, wheel: Path) -> Checked:
    """Install the wheel and run its suite. Raises ChecksFailed with the end of pytest's output."""
    environment = install(config, wheel)
    python = native.python_of(config)
    done = process.run(
        [
            python,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            f"--rootdir={SUITE.parent}",
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
        log=config.build_root / "cuda" / "suite.log",
    )
    last = done.output.strip().splitlines()[-1] if done.output.strip() else "no output"
    if done.returncode != 0:
        raise ChecksFailed(
            "the suite of CUDA operators fails on this machine\n" + "\n".join(done.output.splitlines()[-60:]),
            expected=f"{SUITE.name} to pass",
            found=last,
            mend="all of the output is in cuda/suite.log of the build folder",
        )
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped)", last)}
    reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] [^ ]+: (.+)$", done.output, re.MULTILINE)))
    torch = process.output_of([python, "-c", "import torch; print(torch.__version__)"])
    return Checked(
        torch=torch, passed=counts.get("passed", 0), skipped=counts.get("skipped", 0), reasons=tuple(reasons)
    )


def interpreter(config: Config) -> Path:
    """The Python that ``cuda-timing`` runs: the configured one, else the one that the wheel is tested with."""
    if config.cuda.python:
        return ROOT / config.cuda.python
    ours = native.python_of(config)
    return ours if ours.exists() else Path(sys.executable)
