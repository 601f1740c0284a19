"""Build libqpu for the target: cross-compile it in the native builder image, or compile it in the development root."""

from __future__ import annotations

from recipes.cmake import compile_options
from recipes.library import STAGE, TREE, Build
from recipes.recipe import Recipe
from toolchain.config import Config
from toolchain.jobs import compile_jobs

_HOME = "/usr/src/libqpu"
_FLAGS = (
    # The source enables -O3 for the loops that benefit from it. For the other code, -O3 would only lengthen the build.
    "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG",
    # GCC 7 changed how some arguments are passed, and prints a note for every such function in the standard library.
    "-DCMAKE_CXX_FLAGS=-Wno-psabi",
)


def plan(recipe: Recipe, config: Config, *, cross: bool) -> Build:
    """Return the build of libqpu: its source folder, and the commands that configure, compile and install it."""
    options = (*compile_options(config.image.target, recipe.settings["prefix"], cross=cross), *_FLAGS)
    return Build(
        cross=cross,
        commands=(
            ("cmake", "-S", _HOME, "-B", TREE, "-G", "Ninja", *options),
            ("cmake", "--build", TREE, "--parallel", str(compile_jobs(config.build))),
            ("env", f"DESTDIR={STAGE}", "cmake", "--install", TREE, "--strip"),
        ),
        sources={_HOME: recipe.sources},
        fix="read the compiler's messages above, and correct the sources in libqpu",
    )
