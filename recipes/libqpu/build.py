"""Build libqpu for the target: cross-compile it in the native builder image, or compile it in the development root.

There is one build tree per builder image, so only files that depend on a changed source are recompiled. The sources and
the build tree are mounted at fixed paths, so the product does not depend on the checkout's path.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import docker

from engine.containers import run_in
from recipes.cmake import compile_options
from recipes.recipe import Recipe
from recipes.register import register
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs

_FLAGS = {
    # The loops that benefit from -O3 request it in the source. For the other code, it would only lengthen the build.
    "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG",
    # GCC 7 changed how some arguments are passed, and prints a note for every such function in the standard library.
    "CMAKE_CXX_FLAGS": "-Wno-psabi",
}


def build(
    client: docker.DockerClient,
    builder: str,
    builder_id: str,
    recipe: Recipe,
    config: Config,
    tar: Path,
    log: Path,
    *,
    cross: bool = True,
) -> None:
    """Configure, compile and install libqpu, and pack the files for the target root into ``tar``.

    With ``cross``, ``builder`` is an image for this PC that contains the cross compiler; otherwise, it is an image for
    the target. Raises CommandFailed with the last lines of the compiler's output.
    """
    target = config.image.target
    prefix = recipe.settings["prefix"]
    work = config.target_root / "work" / f"libqpu-{builder_id.removeprefix('sha256:')[:12]}"
    stage = work / "stage"
    files.remove(stage)
    stage.mkdir(parents=True)
    (work / "tree").mkdir(exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    flags = [f"-D{name}={value}" for name, value in _FLAGS.items()]
    options = shlex.join([*compile_options(target, prefix, cross=cross), *flags])
    script = " && ".join(
        (
            f"cmake -S /usr/src/libqpu -B /usr/src/build -G Ninja {options}",
            f"cmake --build /usr/src/build --parallel {compile_jobs(config.build)}",
            "DESTDIR=/usr/src/stage cmake --install /usr/src/build --strip",
            f"chown -R {work.stat().st_uid}:{work.stat().st_gid} /usr/src/stage /usr/src/build",
        )
    )
    run_in(
        client,
        builder,
        ["sh", "-euc", script],
        architecture=host_architecture() if cross else target,
        binds=[
            f"{recipe.sources}:/usr/src/libqpu:ro",
            f"{work / 'tree'}:/usr/src/build:rw",
            f"{stage}:/usr/src/stage:rw",
        ],
        environment={"SOURCE_DATE_EPOCH": str(config.image.source_date_epoch)},
        log=log,
        fix="read the compiler's messages above, and correct the sources in libqpu",
    )
    installed = stage / prefix.removeprefix("/")
    recipe.require_outputs(installed)
    register(stage, installed, prefix)
    files.pack(stage, tar, epoch=config.image.source_date_epoch)
