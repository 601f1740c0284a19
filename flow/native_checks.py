"""The extension and its suites on this machine, without any ARM: minutes become seconds.

Five steps, each with a manifest in ``native/`` of the build folder and run again only when its inputs change:

``native-python``   a virtual environment with PyPI's torch and what builds and tests an extension
``native-libqpu``   libqpu by CMake, installed to ``native/libqpu``
``native-qpu-ops``  the wheel by plain ``pip wheel``, installed into the environment
``native-suite``    what of tests/device is about torch, as it runs on the board, on libqpu's interpreter
``native-breadth``  tests/native: the device "qpu" with PyTorch's own samples, networks, processes and torch.compile
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes import recipe
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.errors import ChecksFailed, CommandFailed
from toolchain.jobs import compile_jobs
from toolchain.steps import Decision, Made, Pipeline, Step

TORCH = "torch==2.13.0"
TORCH_NEEDS = (
    "filelock==4.2.11",
    "fsspec==2026.9.0",
    "jinja2==3.1.6",
    "networkx==3.6.1",
    "sympy==1.14.0",
    "typing-extensions==4.16.0",
)
"""What torch imports on a CPU. Its metadata asks for gigabytes of CUDA libraries too where PyPI's wheel is CUDA's."""
TOOLS = ("expecttest==0.3.0", "numpy==2.4.6", "pybind11==3.1.0", "pytest==9.2.0", "setuptools==84.2.1", "wheel==0.48.0")

SUITE = ("test_ops.py", "test_torch.py", "test_torch_qpu.py")
BREADTH = (
    "test_qpu_compiled.py",
    "test_qpu_layers.py",
    "test_qpu_learning.py",
    "test_qpu_nan.py",
    "test_qpu_networks.py",
    "test_qpu_operators.py",
    "test_qpu_processes.py",
    "test_qpu_profiler.py",
    "test_qpu_pytorch.py",
    "test_qpu_recurrent.py",
    "test_qpu_training.py",
)
_SOURCES = ("setup.py", "backend/*.py", "pyproject.toml", "csrc/**/*", "src/**/*.py*", "src/**/py.typed")
_INSTALL_LIMIT_S = 3600.0
_SUITE_LIMIT_S = 2400.0


@dataclass(frozen=True, kw_only=True)
class NativeChecks:
    """What the suite found on this machine, and what it ran on; for further runs with the same parts."""

    python: Path
    """Interpreter of the environment that has torch and the extension."""
    environment: Mapping[str, str]
    """To be laid over the caller's environment: where the loader finds libqpu."""
    wheel: Path
    junit: Path
    passed: int
    skipped: int
    breadth_passed: int
    breadth_skipped: int
    torch: str
    backend: str
    decisions: tuple[Decision, ...]

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.passed} tests of the board's and {self.breadth_passed} of the PC's passed, "
            f"{self.skipped + self.breadth_skipped} skipped: torch {self.torch}, "
            f"{self.backend} backend of libqpu, on this machine; not measured on hardware"
        )


def folder_of(config: Config) -> Path:
    """Where the steps work."""
    return config.build_root / "native"


def environment_of(config: Config) -> dict[str, str]:
    """Variables under which the environment's Python finds libqpu and nothing of the caller's packages."""
    return {"LD_LIBRARY_PATH": str(folder_of(config) / "libqpu" / "lib"), "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}


def python_of(config: Config) -> Path:
    """The environment's interpreter."""
    return folder_of(config) / "venv" / "bin" / "python"


def plan(config: Config, *, force: bool = False) -> list[Decision]:
    """Which steps would run, and why."""
    pipeline = _pipeline(config)
    return pipeline.plan(force=frozenset(step.name for step in pipeline.steps) if force else frozenset())


def ready_python(config: Config) -> Path:
    """Make the environment alone, where it is not there yet; its interpreter."""
    with files.locked(folder_of(config)):
        pipeline = _pipeline(config)
        pipeline.execute(pipeline.plan()[:1])
    return python_of(config)


def check_natively(config: Config, *, force: bool = False) -> NativeChecks:
    """Build libqpu and the extension for this machine and run the suite against them.

    Raises ChecksFailed with the end of pytest's output, CommandFailed when something does not install or compile.
    """
    pipeline = _pipeline(config)
    with files.locked(folder_of(config)):  # the environment serves other extensions' checks too
        decisions = plan(config, force=force)
        if decisions[0].runs:
            pipeline.execute(decisions[:1])
    left = [dataclasses.replace(decisions[0], forced=False), *decisions[1:]]
    manifests = {manifest.step: manifest for manifest in pipeline.execute(left)}
    suite, breadth = manifests["native-suite"], manifests["native-breadth"]
    return NativeChecks(
        python=python_of(config),
        environment=environment_of(config),
        wheel=manifests["native-qpu-ops"].artefact(".whl").path,
        junit=suite.artefact(".xml").path,
        passed=suite.facts["passed"],
        skipped=suite.facts["skipped"],
        breadth_passed=breadth.facts["passed"],
        breadth_skipped=breadth.facts["skipped"],
        torch=manifests["native-python"].facts["torch"],
        backend=manifests["native-qpu-ops"].facts["backend"],
        decisions=tuple(decisions),
    )


def _pipeline(config: Config) -> Pipeline:
    here = ROOT / "recipes" / "qpu_ops"
    suite, breadth = ROOT / "tests" / "device", ROOT / "tests" / "native"
    interpreter = f"{sys.implementation.cache_tag} {sysconfig.get_platform()} {sys.version.split()[0]}"
    return Pipeline(
        folder_of(config),
        (
            Step(
                name="native-python",
                title="native Python with torch",
                inputs={"packages": " ".join((TORCH, *TORCH_NEEDS, *TOOLS)), "interpreter": interpreter},
                action=lambda _: _make_environment(config),
                missing=lambda _: "" if python_of(config).exists() else "its environment is gone",
            ),
            Step(
                name="native-libqpu",
                title="native libqpu",
                inputs={"sources": recipe.load("libqpu").fingerprint()},
                action=lambda _: _build_libqpu(config, ROOT / "libqpu"),
            ),
            Step(
                name="native-qpu-ops",
                title="native extension wheel",
                inputs={"sources": files.tree_fingerprint(here, *_SOURCES)},
                needs=("native-python", "native-libqpu"),
                action=lambda _: _build_extension(config, here),
            ),
            Step(
                name="native-suite",
                title="device suite on this machine",
                inputs={"tests": files.tree_fingerprint(suite, *SUITE)},
                needs=("native-qpu-ops",),
                action=lambda _: _run_suite(config, suite, SUITE),
            ),
            Step(
                name="native-breadth",
                title="the device qpu on this machine",
                inputs={"tests": files.tree_fingerprint(breadth, "*.py") + files.tree_fingerprint(suite, SUITE[-1])},
                needs=("native-qpu-ops",),
                action=lambda _: _run_suite(config, breadth, BREADTH),
            ),
        ),
    )


def _pip(config: Config, *words: str) -> None:
    process.run(
        [python_of(config), "-m", "pip", "--disable-pip-version-check", "--no-input", *words],
        env=environment_of(config),
        limit_s=_INSTALL_LIMIT_S,
        log=folder_of(config) / "pip.log",
        fix="the package index must be reachable; see native/pip.log in the build folder",
    )


def _make_environment(config: Config) -> Made:
    folder = folder_of(config) / "venv"
    files.require_space(folder.parent, 3000, "torch for this machine")
    files.remove(folder)
    process.run([sys.executable, "-m", "venv", folder], limit_s=300, fix="apt-get install python3-venv")
    _pip(config, "install", "--quiet", *TOOLS, *TORCH_NEEDS)
    _pip(config, "install", "--quiet", "--no-deps", TORCH)
    try:
        version = _torch_version(config)
    except CommandFailed:
        # A CUDA build does not load without the CUDA libraries.
        _pip(config, "install", "--quiet", TORCH)
        version = _torch_version(config)
    return Made(facts={"torch": version})


def _torch_version(config: Config) -> str:
    done = process.run(
        [python_of(config), "-c", "import torch; torch.ones(2).sum(); print(torch.__version__)"],
        env=environment_of(config),
        limit_s=300,
        merge_stderr=False,
    )
    return done.output.strip()


def _build_libqpu(config: Config, source: Path) -> Made:
    folder = folder_of(config)
    jobs = config.build.jobs or os.cpu_count() or 1
    log = folder / "libqpu.log"
    with files.scratch_folder(folder, "libqpu") as scratch:
        build = scratch / "build"
        prefix = scratch / "prefix"
        process.run(
            [
                "cmake",
                "-S",
                source,
                "-B",
                build,
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DCMAKE_INSTALL_PREFIX={folder}/libqpu",
                "-DCMAKE_INSTALL_LIBDIR=lib",
            ],
            log=log,
            limit_s=300,
        )
        process.run(["cmake", "--build", build, "--parallel", str(jobs)], log=log)
        process.run(["cmake", "--install", build, "--prefix", prefix], log=log, limit_s=300)
        files.remove(folder / "libqpu")
        prefix.rename(folder / "libqpu")
    library = (folder / "libqpu" / "lib" / "libqpu.so").resolve(strict=True)
    # Headers, tools and Python modules too: the extension and the suite are made again when one of these changes.
    return Made(artefacts=(library,), facts={"installed": files.tree_fingerprint(folder / "libqpu")})


def _build_extension(config: Config, source: Path) -> Made:
    folder = folder_of(config)
    with files.scratch_folder(folder, "qpu_ops") as scratch:
        # setuptools writes into the source folder.
        shutil.copytree(source, scratch / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        process.run(
            [
                python_of(config),
                "-m",
                "pip",
                "--disable-pip-version-check",
                "wheel",
                "--wheel-dir",
                scratch / "wheel",
                scratch / "source",
            ],
            env={
                **environment_of(config),
                "LIBQPU_PREFIX": str(folder / "libqpu"),
                "MAX_JOBS": str(compile_jobs(config.build)),
            },
            log=folder / "qpu_ops.log",
            fix="see native/qpu_ops.log in the build folder",
        )
        (built,) = (scratch / "wheel").glob("*.whl")
        files.remove(folder / "wheels")
        (scratch / "wheel").rename(folder / "wheels")
    wheel = folder / "wheels" / built.name
    _pip(config, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    backend = process.run(
        [python_of(config), "-c", "import qpu_ops; print(qpu_ops.backend().name)"],
        env=environment_of(config),
        limit_s=300,
        merge_stderr=False,
    )
    return Made(artefacts=(wheel,), facts={"backend": backend.output.strip()})


def _run_suite(config: Config, suite: Path, names: Sequence[str]) -> Made:
    log = "suite.log" if names == SUITE else "breadth.log"
    junit = folder_of(config) / log.replace(".log", ".xml")
    with files.replacing(junit) as aside:
        done = process.run(
            # A configuration of its own: the project's names plug-ins that this environment does not have.
            [
                python_of(config),
                "-m",
                "pytest",
                "-c",
                os.devnull,
                f"--rootdir={suite}",
                f"--confcutdir={suite}",
                "-p",
                "no:cacheprovider",
                "-q",
                "-W",
                "error",
                f"--junitxml={aside}",
                *(str(suite / name) for name in names),
            ],
            cwd=folder_of(config),
            env=environment_of(config),
            limit_s=_SUITE_LIMIT_S,
            check=False,
            log=folder_of(config) / log,
        )
        if done.returncode != 0:
            tail = "\n".join(done.output.splitlines()[-60:])
            raise ChecksFailed(
                f"the device suite fails on this machine ({process.explain_exit(done.returncode)})\n{tail}",
                expected=f"{' and '.join(names)} to pass on libqpu's interpreter",
                found=done.output.strip().splitlines()[-1] if done.output.strip() else "no output",
                fix=f"all of the output is in native/{log} of the build folder",
            )
        counts = _counts(aside)
    return Made(artefacts=(junit,), facts=counts)


def _counts(junit: Path) -> dict[str, int]:
    """How many tests passed and were skipped, from pytest's own report."""
    found = {"tests": 0, "skipped": 0, "failures": 0, "errors": 0}
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):  # noqa: S314 (written by pytest just now)
        for name in found:
            found[name] += int(suite.get(name, "0"))
    return {
        "passed": found["tests"] - found["skipped"] - found["failures"] - found["errors"],
        "skipped": found["skipped"],
    }
