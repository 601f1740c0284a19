"""Build the extension for this machine as a user would, and test it with libqpu's interpreter, without any ARM code.

::

    native-python ──┬── native-qpu-ops ──┬── native-suite
    native-libqpu ──┘                    └── native-breadth
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from flow import native_environment as native
from flow.context import Context
from flow.steps import native_python
from recipes import recipe
from recipes.libqpu import native as native_libqpu
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.jobs import compile_jobs
from toolchain.manifest import Manifest
from toolchain.steps import Made, Pipeline, Step

_CODE = "tests.support.native_checks"
_QPU_OPS = ROOT / "recipes" / "qpu_ops"
_SOURCES = ("setup.py", "backend/*.py", "pyproject.toml", "csrc/**/*", "src/**/*.py*", "src/**/py.typed")
_DEVICE = ROOT / "tests" / "device"
_NATIVE = ROOT / "tests" / "native"


def native_checks(context: Context) -> Pipeline:
    """Return the steps that build and test the extension."""
    config = context.config
    libqpu = Step(
        name="native-libqpu",
        title="native libqpu",
        code=_CODE,
        inputs={"sources": recipe.load("libqpu").fingerprint()},
        action=lambda _: _libqpu(config),
    )
    qpu_ops = Step(
        name="native-qpu-ops",
        title="native extension wheel",
        code=_CODE,
        inputs={"sources": files.tree_fingerprint(_QPU_OPS, *_SOURCES)},
        needs=("native-python", "native-libqpu"),
        action=lambda _: _qpu_ops(config),
    )
    names = ("test_ops.py", "test_torch.py", "test_torch_qpu.py")
    suite = _pytest(config, "suite", _DEVICE, names, files.tree_fingerprint(_DEVICE, *names, "our_torch.py"))
    # One of the tests in tests/native runs test_torch_qpu.py in tests/device.
    tests = files.tree_fingerprint(_NATIVE, "*.py") + files.tree_fingerprint(_DEVICE, "test_torch_qpu.py")
    breadth = _pytest(config, "breadth", _NATIVE, sorted(path.name for path in _NATIVE.glob("test_*.py")), tests)
    steps = (native_python.step(context), libqpu, qpu_ops, suite, breadth)
    return Pipeline(native.folder_of(config), steps)


def _libqpu(config: Config) -> Made:
    folder = native.folder_of(config)
    tree = native_libqpu.build(config, "tools/all")
    with files.scratch_folder(folder, "libqpu") as scratch:
        prefix = scratch / "prefix"
        with files.locked(tree):
            process.run(["cmake", "--install", tree, "--prefix", prefix], limit_s=300)
        files.remove(folder / "libqpu")
        prefix.rename(folder / "libqpu")
    library = (folder / "libqpu" / "lib" / "libqpu.so").resolve(strict=True)
    # The installed headers, tools and Python modules are part of the product: the extension and the tests use them.
    return Made(artefacts=(library,), facts={"installed": files.tree_fingerprint(folder / "libqpu")})


def _qpu_ops(config: Config) -> Made:
    """Build the wheel with ``pip wheel``, as a user would, and install it."""
    folder = native.folder_of(config)
    with files.scratch_folder(folder, "qpu_ops") as scratch:
        # setuptools writes into the source folder, so a copy is built.
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(_QPU_OPS, scratch / "source", ignore=ignored)
        pip: list[str | Path] = [native.python_of(config), "-m", "pip", "--disable-pip-version-check"]
        process.run(
            [*pip, "wheel", "--wheel-dir", scratch / "wheel", scratch / "source"],
            env={
                **native.environment_of(config),
                "LIBQPU_PREFIX": str(folder / "libqpu"),
                "CXXFLAGS": "-DNDEBUG -O1",  # -O2, as in the wheel for the Pi, takes a third longer
                "MAX_JOBS": str(compile_jobs(config.build)),
            },
            log=folder / "qpu_ops.log",
        )
        (built,) = (scratch / "wheel").glob("*.whl")
        files.remove(folder / "wheels")
        (scratch / "wheel").rename(folder / "wheels")
    wheel = folder / "wheels" / built.name
    native.pip(config, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    backend = native.python_output(config, "import qpu_ops; print(qpu_ops.backend().name)")
    return Made(artefacts=(wheel,), facts={"backend": backend})


def _pytest(config: Config, name: str, folder: Path, names: Sequence[str], tests: str) -> Step:
    """Return the step that runs test files; ``tests`` is their fingerprint."""

    def action(_: Mapping[str, Manifest]) -> Made:
        # The project's own pytest configuration requires plug-ins that this environment does not have.
        pytest: list[str | Path] = [native.python_of(config), "-m", "pytest", "-c", os.devnull, "-q", "-W", "error"]
        places = [f"--rootdir={folder}", f"--confcutdir={folder}", "-p", "no:cacheprovider"]
        done = process.run(
            [*pytest, *places, *(folder / name for name in names)],
            cwd=native.folder_of(config),
            env=native.environment_of(config),
            limit_s=2400,
            check=False,
            log=native.folder_of(config) / f"{name}.log",
        )
        assert done.returncode == 0, f"{process.explain_exit(done.returncode)}\n{done.output[-5000:]}"
        # The interpreter may print more when it exits.
        (summary,) = re.findall(r"^\d+ passed.* in [\d.]+s.*$", done.output, re.MULTILINE)
        counts = re.findall(r"(\d+) (passed|skipped)", summary)
        return Made(facts={"skipped": 0, **{outcome: int(count) for count, outcome in counts}})

    return Step(
        name=f"native-{name}",
        title=f"tests in {folder.relative_to(ROOT)}",
        code=_CODE,
        inputs={"tests": tests},
        needs=("native-qpu-ops",),
        action=action,
    )
