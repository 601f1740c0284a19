"""Build libqpu for this PC: for its tests, for the native extension, and for kernels that run on this PC."""

from __future__ import annotations

import contextlib
import json
import sys
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
    tree = (config.build_root / "libqpu-native").resolve()  # as CMake records it
    sources = recipe.load("libqpu").sources
    jobs = str(compile_jobs(config.build))
    command: list[str | Path] = ["cmake", "--build", tree, "--parallel", jobs, "--target", *targets]
    with files.locked(tree):
        cache = tree / "CMakeCache.txt"
        recorded = {f"CMAKE_CACHEFILE_DIR:INTERNAL={tree}", f"CMAKE_HOME_DIRECTORY:INTERNAL={sources}"}
        if cache.is_file() and not recorded <= {*cache.read_text().splitlines()}:
            # The checkout was moved or copied, or another checkout uses the same build folder. CMake would reject the
            # old absolute paths.
            files.remove(cache)
            files.remove(tree / "CMakeFiles")
        process.run(["cmake", "-S", sources, "-B", tree, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options])
        _clean_if_ninja_misses_a_change(tree, sources)
        if "no work to do" not in process.run([*command, "--", "-n"]).output:
            with progress.step("compile libqpu for this PC"):
                process.run(command, limit_s=1800)
    return tree


def _clean_if_ninja_misses_a_change(tree: Path, sources: Path) -> None:
    """Remove all objects if a source has changed but its time stamp is older than the previous build.

    Examples are a restored backup and a replaced folder. ninja compiles only files that are newer than their objects.
    """
    record = tree / "sources.json"
    found = {}
    for path in sources.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # for example, an editor has removed its temporary file
            if path.is_file():
                found[str(path.relative_to(sources))] = path.stat()
    known, since = ({}, sys.maxsize)
    if record.is_file():
        known, since = json.loads(record.read_text()), record.stat().st_mtime_ns
    # Programs can set a file's mtime, but not its ctime.
    if any(known.get(name) != item.st_ctime_ns and item.st_mtime_ns <= since for name, item in found.items()):
        process.run(["cmake", "--build", tree, "--target", "clean"])
    # Written before the build, so that it is also correct if the build fails.
    files.write_text_atomically(record, json.dumps({name: item.st_ctime_ns for name, item in found.items()}))
