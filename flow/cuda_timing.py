"""``cuda-timing``: run the wheel's timing tool with a Python that has torch.

The tool, ``cuda_ops.timing``, is part of the wheel, so it also runs on machines without this repository.
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
from toolchain.errors import ArtefactMissing, CommandFailed, UserError

NO_GPU = 3
"""The tool's exit status if there is no GPU (cuda_ops/timing.py)."""
_USAGE = 2
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Timed:
    """The timing tool's output, and the folder with the files that the tool wrote."""

    text: str
    folder: Path


def measure(config: Config, *, op: str, inputs: Sequence[str] = (), runs: int = 10, timeline: bool = False) -> Timed:
    """Time an operation.

    Raises ProgramMissing if the Python interpreter does not exist, UserError if an argument is invalid or there is no
    GPU, ArtefactMissing if a module cannot be imported, or CommandFailed if the timing tool fails for another reason.
    """
    python = process.require_program(str(native.interpreter(config)), "for cuda-timing (setting cuda.python)")
    site = config.build_root / "cuda" / "site"
    environment = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    folder = config.build_root / "cuda" / "timing"
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"--op={op}", *(f"--input={text}" for text in inputs), f"--runs={runs}"]
    words += [f"--json={folder / 'timing.json'}"]
    words += [f"--timeline={folder / 'timeline.json'}"] if timeline else []
    argv: list[str | Path] = [python, "-m", "cuda_ops.timing", *words]
    done = process.run(argv, env=environment, limit_s=_LIMIT_S, check=False)
    output = done.output.strip()
    if done.returncode == NO_GPU:
        raise UserError(
            "there is no CUDA GPU to time the operation on",
            expected="a GPU, its driver, and torch built for CUDA",
            found=f"{python} finds no GPU",
            fix="run the task on a machine with a CUDA GPU, or set cuda.python to a Python interpreter whose torch is "
            "built for CUDA",
        )
    if done.returncode == _USAGE:
        raise UserError(
            "cuda-timing does not support these arguments",
            found=output.splitlines()[-1],
            fix="run ./inv --help cuda-timing",
        )
    if "No module named" in output and done.returncode:
        raise ArtefactMissing(
            f"{python} cannot import the modules that cuda-timing requires",
            expected="torch, and the wheel built by ./inv build-cuda-wheel",
            found=output.splitlines()[-1],
            fix="run ./inv build-cuda-wheel --check, or install the wheel for the interpreter that cuda.python names",
        )
    if done.returncode:
        raise CommandFailed(
            "cuda-timing failed", returncode=done.returncode, tail=output, found=process.explain_exit(done.returncode)
        )
    draw(folder / "timing.json", folder / "timing.png")
    return Timed(output, folder)


def draw(figures: Path, picture: Path) -> None:
    """Plot the results with the project's own Python, because the Python with torch may not have matplotlib."""
    tool = ROOT / "recipes" / "cuda_ops" / "src" / "cuda_ops" / "timing.py"
    process.run([sys.executable, "-I", tool, f"--draw={figures}", f"--plot={picture}"], limit_s=_LIMIT_S)
