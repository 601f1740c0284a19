"""Build the wheel of the package PACKAGE for the torch in TORCH_FILES: python3 setup.py bdist_wheel.

A table in recipe.toml describes the package. The working folder contains the source. torch is not imported: the
compiler and the tag of the wheel come from the settings of the target's Python (_PYTHON_SYSCONFIGDATA_NAME,
_PYTHON_HOST_PLATFORM).
"""

import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import pybind11
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

NAME, TORCH = os.environ["PACKAGE"], Path(os.environ["TORCH_FILES"])
JOBS = max(1, int(os.environ.get("MAX_JOBS", "1")))
RECIPE = tomllib.loads(Path(__file__).resolve().parents[1].joinpath("recipe.toml").read_text())
PACKAGE = RECIPE["package"][NAME]


class ParallelBuild(build_ext):  # type: ignore[misc]
    """Builds all modules in parallel, with up to MAX_JOBS compilers. File names omit the ABI tag, as upstream's do."""

    parallel: int | None
    compiler: Any

    def finalize_options(self) -> None:
        """Set the number of parallel builds to the number of modules."""
        super().finalize_options()
        self.parallel = len(self.distribution.ext_modules)

    def build_extensions(self) -> None:
        """Limit the number of compilers that run at once."""
        slots, spawn = threading.BoundedSemaphore(JOBS), self.compiler.spawn

        def spawn_in_slot(*arguments: object, **settings: object) -> None:
            with slots:
                spawn(*arguments, **settings)

        self.compiler.spawn = spawn_in_slot
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """The path of a module."""
        return fullname.replace(".", "/") + ".so"


def sources(module: str, text: str) -> list[str]:
    """The files to compile: C files, and for each line of C++ patterns a file that includes all matching C++ files."""
    found: list[str] = []
    for number, line in enumerate(text.strip().splitlines()):
        paths = [path for pattern in line.split() for path in sorted(Path(PACKAGE["include"]).glob(pattern))]
        if line.endswith(".c"):
            found += map(str, paths)
            continue
        joined = Path(f"{module}-{number}.cpp")
        joined.write_text("".join(f'#include "{path}"\n' for path in paths))
        found.append(str(joined))
    return found


def extension(module: str, text: str) -> Extension:
    """A module that must be imported after torch, because it uses the libraries that torch loads."""
    return Extension(
        module,
        sources(module, text),
        include_dirs=[
            ".",
            PACKAGE["include"],
            *map(str, (TORCH / "include", TORCH / "include/torch/csrc/api/include")),
            pybind11.get_include(),
        ],
        library_dirs=[str(TORCH / "lib")],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        language="c++",
        extra_compile_args=[
            *("-std=c++17", "-O2", "-g0", "-Wno-psabi", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1"),
            f"-ffile-prefix-map={Path.cwd()}=.",
            *RECIPE["flags"]["compile"].split(),
        ],
        extra_link_args=[*RECIPE["flags"].get(module, "").split(), "-Wl,--as-needed", "-Wl,-s"],
    )


ParallelCompile("MAX_JOBS", default=1).install()
version = f'__version__ = "{PACKAGE["version"]}"\ngit_version = "Unknown"\n'
Path(PACKAGE["folder"], NAME, "version.py").write_text(version)
setup(
    name=NAME,
    version=PACKAGE["version"],
    description=PACKAGE["summary"],
    license="BSD-2-Clause" if NAME == "torchaudio" else "BSD-3-Clause",
    install_requires=PACKAGE["requires"].split(", "),
    package_dir={"": PACKAGE["folder"]},
    packages=find_packages(PACKAGE["folder"], exclude=("test*", "tools*", "examples*")),
    ext_modules=[extension(module, text) for module, text in RECIPE["modules"][NAME].items()],
    cmdclass={"build_ext": ParallelBuild},
)
