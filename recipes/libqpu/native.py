"""Build libqpu for this PC: for its tests, for the native extension, and for kernels that run on this PC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes import recipe
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.jobs import compile_jobs


def build(config: Config, *targets: str, options: Sequence[str] = ()) -> Path:
    """Compile the CMake targets ``targets`` and return the build tree. Later calls compile only what has changed.

    CMake stores ``options``, so they also apply to later calls. Raises CommandFailed or ProgramMissing.
    """
    for program in ("cmake", "ninja"):
        process.require_program(program, "to compile libqpu for this PC")
    tree = config.build_root / "libqpu-native"
    sources = recipe.load("libqpu").sources
    jobs = str(compile_jobs(config.build))
    command: list[str | Path] = ["cmake", "--build", tree, "--parallel", jobs, "--target", *targets]
    with files.locked(tree):
        cache = tree / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={tree}\n" not in cache.read_text():
            files.remove(cache)  # The checkout was moved or copied; CMake would reject the old absolute paths.
            files.remove(tree / "CMakeFiles")
        process.run(["cmake", "-S", sources, "-B", tree, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options])
        if "no work to do" not in process.run([*command, "--", "-n"]).output:
            with progress.step("compile libqpu for this PC"):
                process.run(command, limit_s=1800)
    return tree
