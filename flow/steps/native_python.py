"""Create a virtual environment with PyPI's torch and the packages for building and testing an extension."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from flow import native_environment as native
from flow.context import Context
from toolchain import files, process
from toolchain.config import Config
from toolchain.errors import CommandFailed
from toolchain.steps import Made, Pipeline, Step


def ready(config: Config) -> Path:
    """Create the environment unless it exists, and return its interpreter. Raises the step's UserError."""
    folder = native.folder_of(config)
    with files.locked(folder), Context(config) as context:
        pipeline = Pipeline(folder, [step(context)])
        pipeline.execute(pipeline.plan())
    return native.python_of(config)


def step(context: Context) -> Step:
    """Return the step that creates the environment and installs the packages."""
    config = context.config
    packages = (native.TORCH, *native.TORCH_NEEDS, *native.TOOLS)
    interpreter = f"{sys.implementation.cache_tag} {sysconfig.get_platform()} {sys.version.split()[0]}"
    return Step(
        name="native-python",
        title="native Python with torch",
        code=__name__,
        inputs={"packages": " ".join(packages), "interpreter": interpreter},
        action=lambda _: _make(config),
        missing=lambda _: "" if native.python_of(config).exists() else "its environment is missing",
    )


def _make(config: Config) -> Made:
    folder = native.folder_of(config) / "venv"
    files.require_space(folder.parent, 3000, "torch for this machine")
    files.remove(folder)
    process.run([sys.executable, "-m", "venv", folder], limit_s=300, fix="run apt-get install python3-venv as root")
    native.pip(config, "install", "--quiet", *native.TOOLS, *native.TORCH_NEEDS)
    native.pip(config, "install", "--quiet", "--no-deps", native.TORCH)
    try:
        version = _torch_version(config)
    except CommandFailed:
        # A CUDA build of torch does not load without the CUDA libraries.
        native.pip(config, "install", "--quiet", native.TORCH)
        version = _torch_version(config)
    return Made(facts={"torch": version})


def _torch_version(config: Config) -> str:
    return native.python_output(config, "import torch; torch.ones(2).sum(); print(torch.__version__)")
