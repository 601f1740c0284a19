"""Build libqpu for this machine."""

from __future__ import annotations

import os

from flow import native_environment as native
from flow.context import Context
from recipes import recipe
from recipes.recipe import Recipe
from toolchain import files, process
from toolchain.config import Config
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that compiles and installs the library with CMake."""
    data = recipe.load("libqpu")
    return Step(
        name="native-libqpu",
        title="native libqpu",
        code=__name__,
        inputs={"sources": data.fingerprint()},
        action=lambda _: _make(context.config, data),
    )


def _make(config: Config, data: Recipe) -> Made:
    folder = native.folder_of(config)
    jobs = config.build.jobs or os.cpu_count() or 1
    log = folder / "libqpu.log"
    with files.scratch_folder(folder, "libqpu") as scratch:
        build = scratch / "build"
        prefix = scratch / "prefix"
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_INSTALL_PREFIX={folder}/libqpu",
            "-DCMAKE_INSTALL_LIBDIR=lib",
        ]
        process.run(["cmake", "-S", data.sources, "-B", build, *options], log=log, limit_s=300)
        process.run(["cmake", "--build", build, "--parallel", str(jobs)], log=log)
        process.run(["cmake", "--install", build, "--prefix", prefix], log=log, limit_s=300)
        files.remove(folder / "libqpu")
        prefix.rename(folder / "libqpu")
    library = (folder / "libqpu" / "lib" / "libqpu.so").resolve(strict=True)
    # The installed headers, tools and Python modules are part of the product: the extension and the tests use them.
    return Made(artefacts=(library,), facts={"installed": files.tree_fingerprint(folder / "libqpu")})
