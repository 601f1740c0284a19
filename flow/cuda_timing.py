"""``./inv cuda-timing``: run the wheel's timing tool with a Python that has torch; say what is missing if it cannot.

The tool itself, ``cuda_ops.timing``, is in the wheel: a GPU machine needs nothing of this repository for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flow import cuda_checks as native
from toolchain import process
from toolchain.config import ROOT, Config
from toolchain.errors import ArtefactMissing, CommandFailed, GpuMissing, UserError

NO_GPU = 3
"""The tool's exit status where there is no GPU (cuda_ops/timing.py)."""
_USAGE = 2
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Timed:
    """What the tool printed, and the folder with what it wrote."""

    text: str
    folder: Path


def measure(config: Config, *, op: str, inputs: Sequence[str] = (), runs: int = 10, timeline: bool = False) -> Timed:
    """Time an operation. Raises GpuMissing, UserError for names that are none, ArtefactMissing without the wheel."""
    python = native.interpreter(config)
    site = config.build_root / "cuda" / "site"
    environment = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    folder = config.build_root / "cuda" / "timing"
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"--op={op}", *(f"--input={text}" for text in inputs), f"--runs={runs}"]
    words += [f"--json={folder / 'timing.json'}"]
    words += [f"--timeline={folder / 'timeline.json'}"] if timeline else []
    argv: list[str | Path] = [python, "-m", "cuda_ops.timing", *words]
    done = process.run(argv, env=environment, limit_s=_LIMIT_S, check=False)
    said = done.output.strip()
    if done.returncode == NO_GPU:
        raise GpuMissing(
            "there is no CUDA GPU to time",
            expected="a GPU, its driver, and a torch built for CUDA",
            found=f"{python} sees none",
            fix="run it on a machine with one, or name a Python with such a torch in cuda.python",
        )
    if done.returncode == _USAGE:
        raise UserError("cuda-timing cannot time that", found=said.splitlines()[-1], fix="./inv --help cuda-timing")
    if "No module named" in said and done.returncode:
        raise ArtefactMissing(
            f"{python} cannot import what cuda-timing needs",
            expected="the wheel that ./inv build-cuda-wheel makes, and torch",
            found=said.splitlines()[-1],
            fix="run ./inv build-cuda-wheel --check, or install the wheel into the Python that cuda.python names",
        )
    if done.returncode:
        raise CommandFailed(
            "cuda-timing failed", returncode=done.returncode, tail=said, found=process.explain_exit(done.returncode)
        )
    draw(folder / "timing.json", folder / "timing.png")
    return Timed(said, folder)


def draw(figures: Path, picture: Path) -> None:
    """Draw what was measured, by this Python: the one with torch may have no matplotlib."""
    tool = ROOT / "recipes" / "cuda_ops" / "src" / "cuda_ops" / "timing.py"
    process.run([sys.executable, "-I", tool, f"--draw={figures}", f"--plot={picture}"], limit_s=_LIMIT_S)
