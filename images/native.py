"""Provide the native compiler in an emulated container.

In a container of the target's architecture, every program runs under qemu-user, which makes the compiler seven to ten
times slower. GCC's cross compiler of the same version produces the same bytes, so its programs are mounted over those
of the emulated compiler, such as ``/usr/bin/TRIPLET-gcc-N``. Every program that calls the compiler (``pip wheel``,
make, CMake or ``gcc`` itself) then runs the native compiler, regardless of the path by which the compiler is called.
Images are not changed, and the mounts are removed together with the container.

The read-only mounts are:

- the PC's dynamic loader and libraries at their multiarch paths, which differ from those of the target;
- ``cc1plus`` and the driver's other programs at ``/usr/libexec/gcc-cross``;
- a *farm* of symbolic links at ``/usr/lib/gcc-cross`` and ``/usr/TRIPLET``, where the cross compiler searches for
  headers and start files. Each link points to the container's file, so both compilers read the same files (Debian's
  cross compiler has the sysroot ``/``; the C library's headers need no link);
- the programs of the compiler and binutils, mounted over the emulated programs of the same name.

Both compilers write the same objects and programs, byte for byte. Only the intermediate data in ``-flto`` objects
differs, because it depends on the word size of the machine that runs the compiler; the linked programs are identical.

The mounts are not used for a distribution whose compiler generates different code by default (``compiles_for`` in
images.flavour).

The cross compiler does not search /usr/local/include by default; C_INCLUDE_PATH and CPLUS_INCLUDE_PATH add this folder.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from images.flavour import Suite
from toolchain import files
from toolchain.architecture import Architecture, host_architecture

_PROGRAMS = (
    *("gcc", "g++", "cpp", "gcc-ar", "gcc-nm", "gcc-ranlib"),
    *("ar", "as", "ld.bfd", "ld.gold", "nm", "objcopy", "objdump", "ranlib", "readelf", "strip", "size", "strings"),
)
_STAND_INS = ("make", "ninja")


@dataclass(frozen=True)
class Mounts:
    """Read-only bind mounts (container path to host path), and the environment variables that these mounts require."""

    paths: dict[str, Path] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def binds(self) -> list[str]:
        """Return the mounts in a format of the engine's API that allows several mounts to have the same source."""
        return [f"{source}:{target}:ro" for target, source in self.paths.items()]


def make_farm(folder: Path, dev_tar: Path, target: Architecture, suite: Suite) -> None:
    """Create ``folder`` with the symbolic links that the cross compiler needs for a dev root.

    An existing folder is replaced.

    ``dev_tar`` is the dev root's tar archive; its entries determine which links are created.
    """
    gnu, gcc = target.gnu, suite.gcc
    gcc_folder = f"usr/lib/gcc/{gnu}/{gcc}"
    cxx_folder = f"usr/include/c++/{gcc}"
    cxx_target = f"usr/include/{gnu}/c++/{gcc}"
    names: dict[str, set[str]] = {gcc_folder: set(), cxx_folder: set()}
    with tarfile.open(dev_tar, "r:") as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            for wanted, found in names.items():
                if path.startswith(wanted + "/"):
                    found.add(path[len(wanted) + 1 :].split("/", 1)[0])
    with files.scratch_folder(folder.parent, folder.name) as scratch:
        tree = scratch / "farm"
        compiler = tree / "gcc-cross" / gnu / gcc
        compiler.mkdir(parents=True)
        for name in sorted(names[gcc_folder]):
            (compiler / name).symlink_to(f"/{gcc_folder}/{name}")
        headers = tree / gnu / "include" / "c++" / gcc
        headers.mkdir(parents=True)
        for name in sorted(names[cxx_folder] - {gnu}):
            (headers / name).symlink_to(f"/{cxx_folder}/{name}")
        (headers / gnu).symlink_to(f"/{cxx_target}")
        files.remove(folder)
        tree.rename(folder)


def compiler_mounts(tools: Path, farm: Path, target: Architecture, suite: Suite) -> Mounts:
    """Return the compiler's mounts for a container created from the dev image."""
    host = host_architecture().gnu
    gnu, gcc = target.gnu, suite.gcc
    paths = {
        f"/usr/lib/{host}": tools / "usr/lib" / host,
        "/lib64": tools / "usr/lib64",
        "/usr/libexec/gcc-cross": tools / "usr/libexec/gcc-cross",
        "/usr/lib/gcc-cross": farm / "gcc-cross",
        f"/usr/{gnu}": farm / gnu,
    }
    candidates = [f"{gnu}-{name}{suffix}" for name in _PROGRAMS for suffix in ("", f"-{gcc}")]
    for name in (*candidates, *_STAND_INS):
        program = tools / "usr/bin" / name
        if program.is_file() and not program.is_symlink():
            paths[f"/usr/bin/{name}"] = program
    search = "/usr/local/include"
    return Mounts(paths, {"C_INCLUDE_PATH": search, "CPLUS_INCLUDE_PATH": search})
