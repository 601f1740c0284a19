"""libqpu for the target: cross-compiled in the native builder image, or compiled in the target's development root.

The build tree is kept per builder image, so a changed source recompiles what depends on it and no more. Sources and
build tree are mounted at fixed paths: the product does not depend on where the checkout lies.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import docker

from engine.containers import run_in
from recipes.recipe import Recipe
from toolchain import files
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs

LOADER_CONFIG = "etc/ld.so.conf.d/pitorch.conf"
STATE_CONFIG = "etc/tmpfiles.d/pitorch.conf"
"""Makes the folder in which processes tell each other who uses the QPUs."""
_FLAGS = {
    # The loops that -O3 is worth for ask for it themselves; of the rest it makes a longer build.
    "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG",
    # GCC 7 changed how some arguments are passed, and tells so at every such function of the standard library.
    "CMAKE_CXX_FLAGS": "-Wno-psabi",
}
PYTHON_PATH = "usr/lib/python3/dist-packages/pitorch.pth"


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
    """Configure, compile and install libqpu, and pack what the target root gets into ``tar``.

    ``builder`` is an image of this PC's architecture with a cross compiler or, without ``cross``, one of the target's.
    Raises CommandFailed with the compiler's last lines.
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
        fix="the compiler's words are above; the sources are in libqpu",
    )
    installed = stage / prefix.removeprefix("/")
    recipe.require_outputs(installed)
    register(stage, installed, prefix)
    files.pack(stage, tar, epoch=config.image.source_date_epoch)


def compile_options(target: Architecture, prefix: str, *, cross: bool) -> list[str]:
    """CMake's options for where the product will lie and, with ``cross``, for the builder image's cross compiler."""
    if cross:
        return cross_options(target, prefix)
    settings = {"CMAKE_BUILD_TYPE": "Release", "CMAKE_INSTALL_PREFIX": prefix, "CMAKE_INSTALL_LIBDIR": "lib"}
    return [f"-D{name}={value}" for name, value in settings.items()]


def cross_options(target: Architecture, prefix: str) -> list[str]:
    """CMake's options for the builder image's cross compiler and for where the product will lie."""
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.wheel_platform.removeprefix("linux_"),
        "CMAKE_CXX_COMPILER": f"{target.gnu}-g++",
        "CMAKE_STRIP": f"/usr/bin/{target.gnu}-strip",
        "CMAKE_FIND_ROOT_PATH_MODE_PROGRAM": "NEVER",
        "CMAKE_LIBRARY_ARCHITECTURE": target.gnu,
        "CMAKE_INSTALL_PREFIX": prefix,
        "CMAKE_INSTALL_LIBDIR": "lib",
    }
    return [f"-D{name}={value}" for name, value in settings.items()]


def register(stage: Path, installed: Path, prefix: str) -> None:
    """Tell the loader, the shell, Python and pkg-config where a library lies that is staged below ``stage``.

    ``installed`` is the prefix's folder there; programs in its ``bin`` are linked, and its ``lib/python`` is put on
    Python's path, where it has any.
    """
    loader = stage / LOADER_CONFIG
    loader.parent.mkdir(parents=True, exist_ok=True)
    loader.write_text(f"{prefix}/lib\n")
    programs, pkgconfig = stage / "usr/local/bin", stage / "usr/local/lib/pkgconfig"
    programs.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in installed.glob("bin/*")):
        (programs / name).symlink_to(f"{prefix}/bin/{name}")
    if (installed / "lib/python").is_dir():
        path = stage / PYTHON_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{prefix}/lib/python\n")
        state = stage / STATE_CONFIG
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text("d /run/qpu 2770 root video -\n")
    # No link: the file finds its prefix by where it lies, and pkg-config takes a link's place for that.
    pkgconfig.mkdir(parents=True, exist_ok=True)
    relocatable = (installed / "lib/pkgconfig/qpu.pc").read_text()
    (pkgconfig / "qpu.pc").write_text(re.sub(r"(?m)^prefix=.*$", f"prefix={prefix}", relocatable))
