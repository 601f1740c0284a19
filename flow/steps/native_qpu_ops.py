"""Build the QPU extension wheel for this machine and install it into the native environment."""

from __future__ import annotations

import shutil
from pathlib import Path

from flow import native_environment as native
from flow.context import Context
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.jobs import compile_jobs
from toolchain.steps import Made, Step

_FOLDER = ROOT / "recipes" / "qpu_ops"
_SOURCES = ("setup.py", "backend/*.py", "pyproject.toml", "csrc/**/*", "src/**/*.py*", "src/**/py.typed")


def step(context: Context) -> Step:
    """Return the step that builds the wheel with ``pip wheel``, as a user would."""
    return Step(
        name="native-qpu-ops",
        title="native extension wheel",
        code=__name__,
        inputs={"sources": files.tree_fingerprint(_FOLDER, *_SOURCES)},
        needs=("native-python", "native-libqpu"),
        action=lambda _: _make(context.config),
    )


def _make(config: Config) -> Made:
    folder = native.folder_of(config)
    with files.scratch_folder(folder, "qpu_ops") as scratch:
        # setuptools writes into the source folder, so a copy is built.
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(_FOLDER, scratch / "source", ignore=ignored)
        pip: list[str | Path] = [native.python_of(config), "-m", "pip", "--disable-pip-version-check"]
        process.run(
            [*pip, "wheel", "--wheel-dir", scratch / "wheel", scratch / "source"],
            env={
                **native.environment_of(config),
                "LIBQPU_PREFIX": str(folder / "libqpu"),
                "MAX_JOBS": str(compile_jobs(config.build)),
            },
            log=folder / "qpu_ops.log",
            fix="read the full output in native/qpu_ops.log in the build folder",
        )
        (built,) = (scratch / "wheel").glob("*.whl")
        files.remove(folder / "wheels")
        (scratch / "wheel").rename(folder / "wheels")
    wheel = folder / "wheels" / built.name
    native.pip(config, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    backend = native.python_output(config, "import qpu_ops; print(qpu_ops.backend().name)")
    return Made(artefacts=(wheel,), facts={"backend": backend})
