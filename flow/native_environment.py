"""The virtual environment for building and testing extensions on this machine: ``native/`` in the build folder."""

from __future__ import annotations

from pathlib import Path

from toolchain import process
from toolchain.config import Config

TOOLS = ("expecttest==0.3.0", "numpy==2.4.6", "pybind11==3.1.0", "pytest==9.2.0", "setuptools==84.2.1", "wheel==0.48.0")
_INSTALL_LIMIT_S = 3600.0


def folder_of(config: Config) -> Path:
    """Return the environment's folder."""
    return config.build_root / "native"


def python_of(config: Config) -> Path:
    """Return the environment's interpreter."""
    return folder_of(config) / "venv" / "bin" / "python"


def environment_of(config: Config) -> dict[str, str]:
    """Return the environment variables that make the interpreter find libqpu and ignore the caller's packages."""
    library = folder_of(config) / "libqpu" / "lib"
    return {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(library / "python"), "PYTHONNOUSERSITE": "1"}


def pip(config: Config, *words: str) -> None:
    """Run pip in the environment."""
    process.run(
        [python_of(config), "-m", "pip", "--disable-pip-version-check", "--no-input", *words],
        env=environment_of(config),
        limit_s=_INSTALL_LIMIT_S,
        log=folder_of(config) / "pip.log",
        fix="check that the package index is reachable; see native/pip.log in the build folder",
    )


def python_output(config: Config, code: str) -> str:
    """Run ``code`` in the environment, and return its standard output."""
    done = process.run([python_of(config), "-c", code], env=environment_of(config), limit_s=300, merge_stderr=False)
    return done.output.strip()
