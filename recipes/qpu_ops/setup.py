"""Build the extension with `pip wheel .` or `python setup.py bdist_wheel`.

libqpu is expected in include/ and lib/ in the folder that LIBQPU_PREFIX names. If this variable is not set, pkg-config
finds libqpu. libqpu is linked by its soname, and the extension does not contain a search path, so at run time the
loader finds libqpu.so.1 through /etc/ld.so.conf.d or LD_LIBRARY_PATH.

For cross-compilation, TORCH_FILES is set to the folder of a torch package for the target machine. The extension is
compiled against this package. Instead of importing torch, this script reads torch's properties from the package's
files. The compiler and the modules' file names come from the target Python's settings (_PYTHON_SYSCONFIGDATA_NAME,
_PYTHON_HOST_PLATFORM).
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

# Remove this folder from the search path, so that the recipe's modules do not shadow installed packages.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

TORCH_FILES = os.environ.get("TORCH_FILES", "")
if not TORCH_FILES:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension


def libqpu_flags() -> tuple[list[str], list[str]]:
    """Return compiler and linker flags for libqpu. Exits with an error message if libqpu is not found."""
    prefix = os.environ.get("LIBQPU_PREFIX", "")
    if prefix:
        header = Path(prefix, "include", "QPULib.h")
        libraries = [folder for folder in Path(prefix).glob("lib*") if any(folder.rglob("libqpu.so"))]
        if header.is_file() and libraries:
            folder = next(libraries[0].rglob("libqpu.so")).parent
            # For arm64, qpu.pc contains this option, because unaligned accesses to GPU memory cause a fault.
            settings = folder / "pkgconfig" / "qpu.pc"
            aligned = ["-mstrict-align"] if settings.is_file() and "-mstrict-align" in settings.read_text() else []
            return [f"-I{header.parent.resolve()}", *aligned], [f"-L{folder.resolve()}", "-lqpu"]
        sys.exit(
            "libqpu is not in the folder LIBQPU_PREFIX\n"
            f"  expected: {prefix}/include/QPULib.h and {prefix}/lib/libqpu.so\n"
            f"  found:    {'no header' if not header.is_file() else 'no libqpu.so'}\n"
            "  fix:      set LIBQPU_PREFIX to the prefix that libqpu was installed to"
        )
    try:
        found = subprocess.run(["pkg-config", "--cflags", "--libs", "qpu"], capture_output=True, text=True, check=False)
        fault = found.stderr.strip()
    except FileNotFoundError:
        fault = "pkg-config is not installed"
    else:
        if found.returncode == 0:
            flags = shlex.split(found.stdout)
            linker = [flag for flag in flags if flag.startswith(("-L", "-l"))]
            return [flag for flag in flags if flag not in linker], linker
    sys.exit(
        "libqpu is required by the extension and was not found\n"
        "  expected: LIBQPU_PREFIX in the environment, or qpu.pc in pkg-config's search path\n"
        f"  found:    {fault.splitlines()[0] if fault else 'neither'}\n"
        "  fix:      build and install libqpu, then run LIBQPU_PREFIX=/its/prefix pip wheel ."
    )


def pybind11_folders() -> list[str]:
    """Return the folders of pybind11's headers: in torch, in a Python package, or in the compiler's default folders."""
    folder = Path(TORCH_FILES or Path(torch.__file__).parent)
    if folder.joinpath("include", "pybind11").is_dir():
        return []
    try:
        import pybind11
    except ModuleNotFoundError:
        return []
    return [pybind11.get_include()]


def torch_extension(name: str, sources: list[str], *, include_dirs: list[str], **settings: list[str]) -> Extension:
    """Describe an extension for the torch package in TORCH_FILES, as torch's CppExtension and BuildExtension would."""
    folder = Path(TORCH_FILES)
    library = (folder / "lib" / "libtorch_python.so").read_bytes()
    # Modules share pybind11's types with torch if they use the same identifier for the compiler. If torch does not
    # contain this identifier, pybind11 derives it from the compiler in use.
    identifier = re.search(rb"__pybind11_internals_v\d+(_gcc|_clang)(_libstdcpp|_libcpp)(_cxxabi\d+)__", library)
    values = [value.decode() for value in identifier.groups()] if identifier else []
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
            # Assertions contain the paths of headers. Use the paths on the target instead of the cross compiler's.
            f"-ffile-prefix-map=/usr/{sysconfig.get_config_var('MULTIARCH')}/include=/usr/include",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            *abi,
            f"-DTORCH_EXTENSION_NAME={name.rpartition('.')[2]}",
            "-D_GLIBCXX_USE_CXX11_ABI=1",
            "-std=c++17",
        ],
        **settings,
    )


def compile_in_parallel() -> None:
    """If pybind11's ParallelCompile is installed, compile up to MAX_JOBS (PyTorch's variable) sources in parallel."""
    try:
        from pybind11.setup_helpers import ParallelCompile
    except ModuleNotFoundError:
        return
    ParallelCompile("MAX_JOBS", default=1).install()


class ParallelBuild(build_ext):  # type: ignore[misc]
    """Builds all modules in parallel, with up to MAX_JOBS compilers in total, so that no module waits for another."""

    parallel: int | None
    compiler: Any

    def finalize_options(self) -> None:
        """Set the number of parallel builds to the number of modules, unless it is already set."""
        super().finalize_options()
        self.parallel = self.parallel or len(self.distribution.ext_modules)

    def build_extensions(self) -> None:
        """Limit the number of compilers that run at once."""
        slots, spawn = threading.BoundedSemaphore(max(1, int(os.environ.get("MAX_JOBS", "1")))), self.compiler.spawn

        def spawn_in_slot(*arguments: object, **settings: object) -> None:
            with slots:
                spawn(*arguments, **settings)

        self.compiler.spawn = spawn_in_slot
        super().build_extensions()


compile_in_parallel()
compile_flags, link_flags = libqpu_flags()
# With -ffile-prefix-map and -g0, the same sources produce the same bytes in any folder. AT_PER_OPERATOR_HEADERS is
# PyTorch's macro for including only the headers of the operators in use. It saves seconds and does not change objects.
compile_flags += [
    "-DAT_PER_OPERATOR_HEADERS",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    f"-ffile-prefix-map={Path.cwd()}=.",
]


def extension(name: str, folder: str, *sources: str) -> Extension:
    """Describe a module that is built from some sources in a folder and depends on all headers and sources there."""
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
            "aten.cpp",  # half of the work; compiled first (in name order), so that no core waits for it at the end
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
        "build_ext": ParallelBuild
        if TORCH_FILES
        else BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=False)
    },
)
