"""Build the extension: `pip wheel .`, or `python setup.py bdist_wheel`.

libqpu is looked for in the folder that LIBQPU_PREFIX names (its include/ and lib/), else where pkg-config knows it.
It is linked by its soname and no folder is recorded in the extension: at run time the loader finds libqpu.so.1
through /etc/ld.so.conf.d, or LD_LIBRARY_PATH.

TORCH_FILES names the folder of a torch package of another machine: it is compiled against, by a cross compiler, and
not imported. What torch would say of itself is read in its files then, and the compiler and the names of the modules
come from the target Python's own settings (_PYTHON_SYSCONFIGDATA_NAME, _PYTHON_HOST_PLATFORM).
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

# The recipe's own modules lie in this folder too: its wheel.py must not be taken for the package wheel.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

TORCH_FILES = os.environ.get("TORCH_FILES", "")
if not TORCH_FILES:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension


def libqpu_flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags for libqpu; ends with the fix when there is none."""
    prefix = os.environ.get("LIBQPU_PREFIX", "")
    if prefix:
        header = Path(prefix, "include", "QPULib.h")
        libraries = [folder for folder in Path(prefix).glob("lib*") if any(folder.rglob("libqpu.so"))]
        if header.is_file() and libraries:
            folder = next(libraries[0].rglob("libqpu.so")).parent
            return [f"-I{header.parent.resolve()}"], [f"-L{folder.resolve()}", "-lqpu"]
        sys.exit(
            "libqpu is not in the folder that LIBQPU_PREFIX names\n"
            f"  expected: {prefix}/include/QPULib.h and {prefix}/lib/libqpu.so\n"
            f"  found:    {'no header' if not header.is_file() else 'no libqpu.so'}\n"
            "  fix:      set LIBQPU_PREFIX to the prefix that libqpu was installed to"
        )
    try:
        found = subprocess.run(["pkg-config", "--cflags", "--libs", "qpu"], capture_output=True, text=True, check=False)
        fault = found.stderr.strip()
    except FileNotFoundError:
        fault = "no program pkg-config"
    else:
        if found.returncode == 0:
            flags = shlex.split(found.stdout)
            linker = [flag for flag in flags if flag.startswith(("-L", "-l"))]
            return [flag for flag in flags if flag not in linker], linker
    sys.exit(
        "libqpu, which the extension links, is not found\n"
        "  expected: LIBQPU_PREFIX in the environment, or qpu.pc on pkg-config's path\n"
        f"  found:    {fault.splitlines()[0] if fault else 'neither'}\n"
        "  fix:      build and install libqpu, then LIBQPU_PREFIX=/its/prefix pip wheel ."
    )


def pybind11_folders() -> list[str]:
    """Where pybind11's headers are: in torch, in a Python package, or in the compiler's own folders."""
    folder = Path(TORCH_FILES or Path(torch.__file__).parent)
    if folder.joinpath("include", "pybind11").is_dir():
        return []
    try:
        import pybind11
    except ModuleNotFoundError:
        return []
    return [pybind11.get_include()]


def torch_extension(name: str, sources: list[str], *, include_dirs: list[str], **settings: list[str]) -> Extension:
    """As torch's CppExtension and BuildExtension would set it up, for the torch whose files lie in TORCH_FILES."""
    folder = Path(TORCH_FILES)
    library = (folder / "lib" / "libtorch_python.so").read_bytes()
    # Modules share pybind11's types with torch when they name its compiler as torch does. A torch that tells it in
    # another way leaves it to pybind11, which names the compiler that is used.
    told = re.search(rb"__pybind11_internals_v\d+(_gcc|_clang)(_libstdcpp|_libcpp)(_cxxabi\d+)__", library)
    values = [value.decode() for value in told.groups()] if told else []
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    abi = [f'-DPYBIND11_{key}="{value}"' for key, value in zip(names, values, strict=False)]
    headers = [folder / "include", folder / "include/torch/csrc/api/include"]
    return Extension(
        name,
        sources,
        include_dirs=[*include_dirs, *map(str, headers)],
        library_dirs=[str(folder / "lib")],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        language="c++",
        extra_compile_args=[
            *settings.pop("extra_compile_args"),
            # Assertions tell the names of headers: those of the target, and not where a cross compiler has them.
            f"-ffile-prefix-map=/usr/{sysconfig.get_config_var('MULTIARCH')}/include=/usr/include",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            *abi,
            f"-DTORCH_EXTENSION_NAME={name.rpartition('.')[2]}",
            "-D_GLIBCXX_USE_CXX11_ABI=1",
            "-std=c++17",
        ],
        **settings,
    )


def compile_side_by_side() -> None:
    """As many sources at once as MAX_JOBS says (PyTorch's variable), where pybind11's helper for that is installed."""
    try:
        from pybind11.setup_helpers import ParallelCompile
    except ModuleNotFoundError:
        return
    ParallelCompile("MAX_JOBS", default=1).install()


class BuildSideBySide(build_ext):  # type: ignore[misc]
    """Builds all modules at once, by as many compilers as MAX_JOBS says: one would begin when another is linked."""

    parallel: int | None
    compiler: Any

    def finalize_options(self) -> None:
        """As many modules as there are."""
        super().finalize_options()
        self.parallel = self.parallel or len(self.distribution.ext_modules)

    def build_extensions(self) -> None:
        """Let each compiler wait for a place."""
        places, spawn = threading.BoundedSemaphore(max(1, int(os.environ.get("MAX_JOBS", "1")))), self.compiler.spawn

        def spawn_in_a_place(*arguments: object, **settings: object) -> None:
            with places:
                spawn(*arguments, **settings)

        self.compiler.spawn = spawn_in_a_place
        super().build_extensions()


compile_side_by_side()
compile_flags, link_flags = libqpu_flags()
# -ffile-prefix-map and -g0: the same sources give the same bytes, wherever they lie. PyTorch's headers of the operators
# that are named, and not of all, are what its own macro for that asks for: the objects are the same, seconds earlier.
compile_flags += [
    "-DAT_PER_OPERATOR_HEADERS",
    "-O2",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    f"-ffile-prefix-map={Path.cwd()}=.",
]


def extension(name: str, folder: str, *sources: str) -> Extension:
    """A module of sources in a folder; it depends on every header and source there."""
    return (torch_extension if TORCH_FILES else CppExtension)(
        name,
        sources=[f"{folder}/{source}" for source in sources],
        depends=sorted(map(str, (*Path(folder).glob("*.h"), *Path(folder).glob("*.cpp")))),
        include_dirs=pybind11_folders(),
        extra_compile_args=compile_flags,
        extra_link_args=[*link_flags, "-Wl,--as-needed", "-Wl,-s"],
    )


setup(
    ext_modules=[
        extension("qpu_ops._native", "csrc", "bindings.cpp", "kernels.cpp"),
        extension(
            "torch_qpu._C",
            "csrc/device",
            "aten.cpp",  # half of all the work; they are compiled by name, so that no core waits for it at the end
            "aten_layers.cpp",
            "batches.cpp",
            "chains.cpp",
            "depthwise.cpp",
            "learning.cpp",
            "memory.cpp",
            "module.cpp",
            "moves.cpp",
            "profiler.cpp",
            "recurrent.cpp",
            "regions.cpp",
            "rows.cpp",
            "trace.cpp",
        ),
    ],
    cmdclass={
        "build_ext": BuildSideBySide
        if TORCH_FILES
        else BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=False)
    },
)
