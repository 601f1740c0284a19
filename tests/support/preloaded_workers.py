"""Runs the Python programs of profile-remote in forked processes of an interpreter that has imported TVM and PyTorch.

In a new interpreter, each program would import TVM and PyTorch again, which takes longer than compiling a small model.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from device.remote.environment import TvmEnvironment
from toolchain import process
from toolchain.config import ROOT

OF_KERNELS = ("tvm", "tvm.s_tir", "tvm.te")
OF_MODELS = ("tvm.relax.frontend.torch", "torch._dynamo", "torch.export")


@contextlib.contextmanager
def preloaded_workers(folder: Path) -> Iterator[None]:
    """Make ``TvmEnvironment.command`` use pitorch.preloaded, whose server uses ``folder``.

    The server stays in the network namespace in which the first program was started. It is stopped at the end.
    """
    path = os.pathsep.join

    def preloaded(environment: TvmEnvironment, *words: str) -> list[str]:
        packages = path([environment.variables["PYTHONPATH"], str(ROOT / "libqpu" / "python")])
        # A server with another locale would be restarted. process.run sets this one.
        variables = [f"XDG_RUNTIME_DIR={folder}", f"PYTHONPATH={packages}", "LC_ALL=C.UTF-8", "LANGUAGE="]
        return ["env", *variables, sys.executable, "-m", "pitorch.preloaded", *words]

    def command(environment: TvmEnvironment, *words: str) -> list[str]:
        used.append(environment)
        if words[0] == "-m":
            code = f"import runpy; runpy.run_module({words[1]!r}, run_name='__main__', alter_sys=True)"
            words = ("-c", code, *words[2:])
        modules = OF_MODELS if environment.others else OF_KERNELS
        return preloaded(environment, *(f"--import={name}" for name in modules), *words)

    used: list[TvmEnvironment] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TvmEnvironment, "command", command)
        yield
    if used:
        process.run(preloaded(used[-1], "--stop"), limit_s=60)
