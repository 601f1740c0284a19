"""Build the wheel with ``pip wheel --no-build-isolation .`` and these environment variables.

``CUDA_OPS_ARCHITECTURES``  GPU architectures, such as ``75;80;86;90+PTX``. The wheel contains machine code for each;
                            ``+PTX`` adds code that the drivers of later GPUs translate. There is no default.
``CUDA_OPS_TORCH_INCLUDE``  torch's include folder; only its headers are used (default: that of the installed torch)
``CUDA_HOME``               the CUDA toolkit (default: /usr/local/cuda)
``CUDA_OPS_CUDART``         folder with libcudart_static.a (default: in the toolkit)
``CXX``                     the host compiler; a cross compiler produces a wheel for its target
``CUDA_OPS_JOBS``           number of architectures to compile at once (default: 1)
``CUDA_OPS_PLATFORM``       the wheel's platform tag (default: that of this machine)
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
KERNELS = ("elementwise.cu", "softmax.cu", "matvec.cu")
SOURCES = ("ops.cpp", "reference.cpp")
TORCH_AT_LEAST = "0x020a000000000000"
"""Version 2.10 in the format of torch/csrc/stable/version.h. The library uses no newer part of the stable interface."""


def refuse(summary: str, expected: str, found: str, fix: str) -> None:
    """Exit with an error message that contains a summary, the expected and the actual state, and a fix."""
    sys.exit(f"{summary}\n  expected: {expected}\n  found:    {found}\n  fix:      {fix}")


def gencode(text: str) -> list[str]:
    """Return the nvcc options for a list of architectures."""
    options = []
    for part in text.replace(",", ";").split(";"):
        found = re.fullmatch(r"(\d{2,3}[af]?)(\+PTX)?", part.strip())
        if found is None:
            refuse(
                "CUDA_OPS_ARCHITECTURES is invalid", "a list such as 75;80;86;90+PTX", repr(text), "correct the list"
            )
            continue
        number = found[1]
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if found[2]:
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options


def torch_headers() -> Path:
    """Return the include folder of torch."""
    given = os.environ.get("CUDA_OPS_TORCH_INCLUDE")
    if given is None:
        import importlib.util

        found = importlib.util.find_spec("torch")
        given = str(Path(found.origin).with_name("include")) if found and found.origin else "no torch is installed"
    if not Path(given, "torch/csrc/stable/library.h").is_file():
        refuse(
            "torch's headers were not found",
            "torch/csrc/stable/library.h in the folder of CUDA_OPS_TORCH_INCLUDE",
            given,
            "install torch 2.10 or newer, or set CUDA_OPS_TORCH_INCLUDE to its include folder",
        )
    return Path(given)


class Build(build_ext):  # type: ignore[misc]
    """Compiles the kernels with nvcc and the C++ sources with CXX, and links a library that is not a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's file name without the ABI tag of a Python version."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Any) -> None:
        """Compile the sources and link the library."""
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        nvcc = cuda / "bin" / "nvcc"
        if not nvcc.is_file():
            refuse("nvcc was not found", str(nvcc), "no such file", "set CUDA_HOME to a CUDA toolkit")
        cudart = Path(os.environ.get("CUDA_OPS_CUDART", ""))
        if not os.environ.get("CUDA_OPS_CUDART"):
            cudart = next(
                (cuda / name for name in ("lib64", "lib") if (cuda / name / "libcudart_static.a").is_file()), cuda
            )
        if not (cudart / "libcudart_static.a").is_file():
            refuse(
                "the CUDA runtime was not found",
                f"libcudart_static.a in {cudart}",
                "no such file",
                "set CUDA_OPS_CUDART to the folder of this file",
            )
        cxx = os.environ.get("CXX", "g++")
        architectures = gencode(os.environ.get("CUDA_OPS_ARCHITECTURES", ""))
        threads = os.environ.get("CUDA_OPS_JOBS", "1")
        torch = torch_headers()
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        common = ["-std=c++17", "-O3"]
        host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-ffile-prefix-map={HERE}=."]
        objects = []
        # Name the toolkit's header folders, because with a cross compiler, nvcc would search the target machine's
        # folder.
        headers = [f"-isystem={folder}" for folder in (cuda / "include", cuda / "include" / "cccl")]
        for name in KERNELS:
            objects.append(work / f"{name}.o")
            self.run_program(
                [
                    str(nvcc),
                    *common,
                    *headers,
                    *architectures,
                    f"-ccbin={cxx}",
                    f"-Xcompiler={','.join(host)}",
                    "--expt-relaxed-constexpr",
                    "-Xfatbin=-compress-all",
                    "-Werror=all-warnings",
                    f"--threads={threads}",
                    "-c",
                    f"csrc/{name}",
                    "-o",
                    str(objects[-1]),
                ]
            )
        for name in SOURCES:
            objects.append(work / f"{name}.o")
            defines = [f"-DTORCH_TARGET_VERSION={TORCH_AT_LEAST}"]
            self.run_program(
                [
                    *shlex.split(cxx),
                    *common,
                    *host,
                    *defines,
                    f"-isystem{torch}",
                    "-c",
                    f"csrc/{name}",
                    "-o",
                    str(objects[-1]),
                ]
            )
        # Linking requires only the name of torch's library, so use an empty library with that name.
        empty = work / "empty.cpp"
        empty.write_text("")
        self.run_program(
            [*shlex.split(cxx), "-shared", str(empty), "-Wl,-soname,libtorch.so", "-o", str(work / "libtorch.so")]
        )
        self.run_program(
            [
                *shlex.split(cxx),
                "-shared",
                "-o",
                str(out),
                *map(str, objects),
                f"-L{work}",
                "-Wl,--no-as-needed",
                "-ltorch",
                "-Wl,--as-needed",
                f"-L{cudart}",
                "-lcudart_static",
                "-lrt",
                "-ldl",
                "-lpthread",
                "-Wl,--exclude-libs,ALL",
                "-Wl,-soname,libcuda_ops.so",
                "-Wl,-s",
                "-Wl,--build-id=none",
            ]
        )

    def run_program(self, argv: list[str]) -> None:
        """Print the command and run it."""
        print(shlex.join(argv), flush=True)
        status = subprocess.run(argv, cwd=HERE, check=False).returncode
        if status:
            refuse(f"{argv[0]} failed", "exit status 0", str(status), "correct the error in its output above")


class Wheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and any Python 3, because the library does not depend on Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the three tags in the wheel's file name."""
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return "py3", "none", os.environ.get("CUDA_OPS_PLATFORM", here)


class Binary(Distribution):  # type: ignore[misc]
    """A distribution that contains a compiled library."""

    def has_ext_modules(self) -> bool:
        """Return True, because the distribution is not pure Python."""
        return True


setup(
    ext_modules=[Extension("cuda_ops.libcuda_ops", [])],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    distclass=Binary,
)
