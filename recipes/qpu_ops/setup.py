"""Build the extension: `pip wheel .`, or `python setup.py bdist_wheel`.

libqpu is looked for in the folder that LIBQPU_PREFIX names (its include/ and lib/), else where pkg-config knows it.
It is linked by its soname and no folder is recorded in the extension: at run time the loader finds libqpu.so.1
through /etc/ld.so.conf.d, or LD_LIBRARY_PATH.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

# The recipe's own modules lie in this folder too: its wheel.py must not be taken for the package wheel.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]

import torch  # noqa: E402
from setuptools import Extension, setup  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402


def libqpu_flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags for libqpu; ends with the mend when there is none."""
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
            "  mend:     set LIBQPU_PREFIX to the prefix that libqpu was installed to"
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
        "  mend:     build and install recipes/libqpu, then LIBQPU_PREFIX=/its/prefix pip wheel ."
    )


def pybind11_folders() -> list[str]:
    """Where pybind11's headers are: in torch, in a Python package, or in the compiler's own folders."""
    if Path(torch.__file__).with_name("include").joinpath("pybind11").is_dir():
        return []
    try:
        import pybind11
    except ModuleNotFoundError:
        return []
    return [pybind11.get_include()]


def compile_side_by_side() -> None:
    """As many sources at once as MAX_JOBS says (PyTorch's variable), where pybind11's helper for that is installed."""
    try:
        from pybind11.setup_helpers import ParallelCompile
    except ModuleNotFoundError:
        return
    ParallelCompile("MAX_JOBS", default=1).install()


compile_side_by_side()
compile_flags, link_flags = libqpu_flags()
# -ffile-prefix-map and -g0: the same sources give the same bytes, wherever they lie.
compile_flags += [
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
    return CppExtension(
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
            "chains.cpp",
            "learning.cpp",
            "memory.cpp",
            "module.cpp",
            "operations.cpp",
            "profiler.cpp",
            "trace.cpp",
        ),
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=False)},
)
