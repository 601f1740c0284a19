"""A kernel of the QPUs: C++ on libqpu beside the kernel's Python file, compiled to a library that the loader runs.

The Python file makes the arrays and the reference as for any kernel; the C++ has its name and ends in ``.cpp``. It
includes ``kernel.hpp``, which turns it into a library of a plain kernel (``loader/kernel.h``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from device.remote.address import Address
from device.remote.loader_session import SOURCE
from device.remote.targets import Target
from recipes import recipe
from toolchain import process, progress
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import ArtefactMissing, CommandFailed, UserError
from toolchain.jobs import compile_jobs

_LIBQPU = ROOT / "libqpu"


@dataclass(frozen=True)
class Built:
    """A kernel's library, and the folders that its own libraries are found in on this PC."""

    library: Path
    folders: tuple[Path, ...]


def on_this_pc(target: Target) -> Target:
    """The target with this PC's machine: libqpu's emulator runs its kernels here."""
    return dataclasses.replace(target, architecture=host_architecture())


def build(config: Config, target: Target, address: Address, path: Path, library: Path) -> Built:
    """Compile the kernel beside ``path`` to ``library``, for the machine behind ``address``.

    Raises UserError with the compiler's words, ArtefactMissing without a libqpu for the board.
    """
    source = path.with_suffix(".cpp")
    if not source.is_file():
        raise UserError(
            f"{path.stem} is no kernel of the QPUs",
            expected=f"{source.name} beside {path.name}",
            found="no such file",
            fix="docs/remote.md says what it defines",
        )
    here = address.kind == "local"
    folder = native_libqpu(config) if here else _boards_libqpu(config)
    wanted = on_this_pc(target) if here else target
    compiler = process.require_program(wanted.linker(config.remote.linker), f"to compile for {target.title}")
    words = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"]
    words += [f"-I{_LIBQPU / 'include'}", f"-I{SOURCE}", str(source), "-o", str(library), f"-L{folder}", "-lqpu"]
    # The board's own libraries satisfy libqpu there; they need not be on this PC.
    words += [] if here else ["-Wl,--allow-shlib-undefined"]
    try:
        process.run([compiler, *words], limit_s=900)
    except CommandFailed as fault:
        raise UserError(
            "the kernel does not compile",
            expected=f"{source} to be C++ on libqpu",
            found=next((line for line in fault.tail.splitlines() if "error" in line), fault.found),
            fix="docs/libqpu.md has the language, docs/remote.md what the file defines",
        ) from fault
    return Built(library, (folder,) if here else ())


def native_libqpu(config: Config) -> Path:
    """The folder of libqpu for this PC, brought up to date. Raises CommandFailed, ProgramMissing."""
    for program in ("cmake", "ninja"):
        process.require_program(program, "to compile libqpu for this PC")
    folder = config.build_root / "libqpu-native"
    process.run(["cmake", "-S", _LIBQPU, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"])
    jobs = str(compile_jobs(config.build))
    pending = process.run(["cmake", "--build", folder, "--target", "qpu", "--", "-n"]).output
    if "no work to do" not in pending:
        with progress.step("compile libqpu for this PC"):
            process.run(["cmake", "--build", folder, "--parallel", jobs, "--target", "qpu"], limit_s=1800)
    return folder


def _boards_libqpu(config: Config) -> Path:
    prefix = str(recipe.load("libqpu").settings["prefix"]).removeprefix("/")
    folder = config.target_root / "libqpu" / prefix / "lib"
    if not (folder / "libqpu.so").exists():
        raise ArtefactMissing(
            "there is no libqpu for the board",
            expected=f"{folder}/libqpu.so",
            found="no such file",
            fix="./inv build-image --only libqpu",
        )
    return folder
