"""Create a virtual environment with PyPI's torch and the packages for building and testing an extension."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from flow import native_environment as native
from flow.context import Context
from toolchain import files, process
from toolchain.config import Config
from toolchain.steps import Made, Pipeline, Step
from wheels import for_this_pc


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
    packages = (for_this_pc.TORCH, *for_this_pc.TORCH_NEEDS, *native.TOOLS)
    interpreter = f"{sys.implementation.cache_tag} {sysconfig.get_platform()} {sys.version.split()[0]}"
    return Step(
        name="native-python",
        title="native Python with torch",
        code=__name__,
        inputs={"packages": " ".join(packages), "interpreter": interpreter},
        action=lambda _: _make(config),
        missing=lambda _: _missing(config),
    )


def _missing(config: Config) -> str:
    if not native.python_of(config).exists():
        return "its environment is missing"
    pointer = _pointer(config)
    return "" if pointer.exists() and Path(pointer.read_text().rstrip()).is_dir() else "its torch is missing"


def _pointer(config: Config) -> Path:
    """Return the file that adds torch's folder to the environment's search path."""
    version = sys.version_info
    packages = f"lib/python{version.major}.{version.minor}/site-packages"
    return native.folder_of(config) / "venv" / packages / "torch.pth"


def _make(config: Config) -> Made:
    folder = native.folder_of(config) / "venv"
    files.require_space(folder.parent, 500, "the packages for building extensions")
    files.remove(folder)
    process.run([sys.executable, "-m", "venv", folder], limit_s=300, fix="run apt-get install python3-venv as root")
    native.pip(config, "install", "--quiet", *native.TOOLS)
    _pointer(config).write_text(f"{for_this_pc.torch(config)}\n")
    version = native.python_output(config, "import torch; torch.ones(2).sum(); print(torch.__version__)")
    return Made(facts={"torch": version})
