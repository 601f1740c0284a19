"""QPU kernels: compile a C++ file that uses libqpu to a library for the loader.

As with any kernel, a Python file creates the arrays and the reference. The C++ file must be in the same folder and have
the same name with the suffix ``.cpp``. It must include ``kernel.hpp``, which implements the loader's plain C interface
(``loader/kernel.h``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from device.remote.address import Address
from device.remote.loader_session import SOURCE
from device.remote.targets import Target
from recipes import recipe
from recipes.libqpu import native
from toolchain import process
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import ArtefactMissing, CommandFailed, UserError

_LIBQPU = ROOT / "libqpu"


def on_this_pc(target: Target) -> Target:
    """Return the target with this PC's architecture, because kernels for libqpu's emulator run on the PC itself."""
    return dataclasses.replace(target, architecture=host_architecture())


def build(config: Config, target: Target, address: Address, path: Path, library: Path) -> list[Path]:
    """Compile the ``.cpp`` file next to ``path`` for the machine at ``address``, and write the result to ``library``.

    Returns the folders on this PC that contain the library's dependencies, or an empty list if the machine is a board.

    Raises UserError with the compiler's error, and ArtefactMissing if there is no libqpu for the board.
    """
    source = path.with_suffix(".cpp")
    if not source.is_file():
        raise UserError(
            f"{path.stem} is not a QPU kernel",
            expected=f"{source.name} next to {path.name}",
            found="no such file",
            fix="write that file (docs/remote.md describes its contents), or choose another kernel",
        )
    here = address.kind == "local"
    folder = native.build(config, "qpu") if here else _boards_libqpu(config)
    wanted = on_this_pc(target) if here else target
    compiler = process.require_program(wanted.linker(config.remote.linker), f"to compile for {target.title}")
    words = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"]
    words += [f"-I{_LIBQPU / 'include'}", f"-I{SOURCE}", str(source), "-o", str(library), f"-L{folder}", "-lqpu"]
    # libqpu's dependencies are on the board, but may be missing on this PC.
    words += [] if here else ["-Wl,--allow-shlib-undefined"]
    try:
        process.run([compiler, *words], limit_s=900)
    except CommandFailed as fault:
        raise UserError(
            "the kernel does not compile",
            expected=f"valid C++ code that uses libqpu, in {source}",
            found=next((line for line in fault.tail.splitlines() if "error" in line), fault.found),
            fix="correct the file: docs/libqpu.md describes the language, and docs/remote.md the contents of the file",
        ) from fault
    return [folder] if here else []


def _boards_libqpu(config: Config) -> Path:
    prefix = str(recipe.load("libqpu").settings["prefix"]).removeprefix("/")
    folder = config.target_root / "libqpu" / prefix / "lib"
    if not (folder / "libqpu.so").exists():
        raise ArtefactMissing(
            "libqpu for the board is missing",
            expected=f"{folder}/libqpu.so",
            found="no such file",
            fix="run ./inv build-image --only libqpu",
        )
    return folder
