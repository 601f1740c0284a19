"""Cross-compile apache-tvm-ffi in its builder image, for platforms that have no wheel in the package index.

The package's own build backend creates the wheel. The target is specified by CMake options, and by the environment
variables that CPython uses for its own cross builds.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import docker

from engine.containers import run_in
from images.flavour import Suite
from recipes.cmake import cross_options
from recipes.recipe import Recipe
from recipes.torch import audit
from toolchain import progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs

HOME = "/usr/src/tvm-ffi"
"""The build's folder in the container, which does not depend on the checkout's name."""
_LIMIT_S = 3 * 3600.0


def build(
    client: docker.DockerClient,
    builder: str,
    recipe: Recipe,
    config: Config,
    suite: Suite,
    archive: Path,
    tools: Path,
    scratch: Path,
    log: Path,
) -> Path:
    """Run the script inside/build in the image ``builder``; return the path of the wheel, which is not audited yet.

    ``archive`` is the source archive, and ``tools`` the folder with the build tools. The build writes to ``scratch``.
    """
    cache = config.build_root / "ccache"
    cache.mkdir(parents=True, exist_ok=True)
    owner = scratch.stat()
    script = f'trap \'chown -R "$0" {HOME} /usr/src/ccache\' EXIT; /usr/src/recipe/inside/build "$1"'
    with progress.bar("compile TVM's FFI") as bar:
        lines = 0

        def show(line: str) -> None:
            nonlocal lines
            lines += 1
            bar.update(lines, note=line.strip()[:60])

        run_in(
            client,
            builder,
            ["sh", "-euc", script, f"{owner.st_uid}:{owner.st_gid}", f"/usr/src/{archive.name}"],
            architecture=host_architecture(),
            binds=[
                f"{scratch}:{HOME}:rw",
                f"{archive.resolve()}:/usr/src/{archive.name}:ro",
                f"{tools.resolve()}:/usr/src/tools:ro",
                f"{recipe.folder}:/usr/src/recipe:ro",
                f"{cache}:/usr/src/ccache:rw",
            ],
            environment=_environment(recipe, config, suite),
            workdir=HOME,
            limit_s=_LIMIT_S,
            log=log,
            on_line=show,
            fix=f"read the compiler's messages above or in {log}, and correct the recipe in recipes/tvm_ffi",
        )
    out = scratch / "out"
    recipe.require_outputs(out)
    return next(out.glob(recipe.outputs[0]))


def _environment(recipe: Recipe, config: Config, suite: Suite) -> dict[str, str]:
    target, python = config.image.target, suite.python
    options = {**recipe.tables["options"]}
    # The package itself maps source paths for only one of its libraries.
    options["CMAKE_CXX_FLAGS"] = f"{options.get('CMAKE_CXX_FLAGS', '')} -ffile-prefix-map={HOME}/source=.".strip()
    settings = {
        "CMAKE_C_COMPILER": f"{target.gnu}-gcc",
        "CMAKE_C_COMPILER_LAUNCHER": "ccache",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "Python_EXECUTABLE": "/usr/bin/python3",
        "Python_INCLUDE_DIR": f"/usr/include/python{python}",
        "Python_LIBRARY": f"/usr/lib/{target.gnu}/libpython{python}.so",
        **options,
    }
    crossed = [item for item in cross_options(target, "/") if "_INSTALL_" not in item]
    return {
        "CMAKE_ARGS": shlex.join([*crossed, *(f"-D{name}={value}" for name, value in settings.items())]),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(compile_jobs(config.build)),
        "_PYTHON_HOST_PLATFORM": target.wheel_platform.replace("_", "-"),
        "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{target.gnu}",
        "PYTHONPATH": "/usr/src/tools",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SOURCE_DATE_EPOCH": recipe.settings["epoch"],
        "CCACHE_DIR": "/usr/src/ccache",
        "CCACHE_COMPILERCHECK": "content",
        "LC_ALL": "C.UTF-8",
    }


def examine(wheel: Path, target: Architecture, suite: Suite) -> audit.Examined:
    """Run the same audit as for the torch wheel.

    The wheel must be stripped, and must not contain paths from its build. Raises WheelUnusable or PlatformMismatch.
    """
    fix = "correct the recipe in recipes/tvm_ffi, and run ./inv build-tvm-ffi to build the wheel again"
    return audit.examine_stripped(wheel, target, suite, flags="", home=HOME, fix=fix)
