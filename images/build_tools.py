"""Native build tools in an emulated container, in addition to the native compiler (images.native).

A build spends much of its time in programs that only read and write text and start the compiler: the shell, CMake,
pkg-config, pip, Meson, Cython. Native programs of the same version write the same text seven to fifteen times faster.
They are mounted over the emulated programs, like the compiler.

Programs whose output depends on the machine that they are compiled for stay emulated: ``uname``, ``arch``, dpkg, perl,
bash (``MACHTYPE``), and programs that print words of the machine's width. CMake calls ``uname``, so it detects the
target. pkg-config gets the target's paths from the environment; only its variable ``pc_path`` still contains the paths
of this PC.

pip, Meson and Cython are Python programs; the project determines the versions of Meson and Cython. The target's Python
is replaced by a small program (``stand_in/python.c``). It runs these three with a native Python that describes itself
as the target's (``stand_in/as_target.py``), and everything else, such as the package's own build scripts, with the
target's Python. ``INSTALL`` installs the replacement; containers that do not run that command have the target's Python.
Cython that a ``setup.py`` calls within its own process stays emulated.
"""

from __future__ import annotations

from pathlib import Path

from images.flavour import Suite
from images.native import Mounts
from toolchain.architecture import Architecture

HERE = Path(__file__).resolve().parent / "stand_in"
PLACE = "/usr/libexec/pitorch"
INSTALL = f"{PLACE}/install"
"""Program that installs the replacement of Python; run it as root in the container."""

_PROGRAMS = (
    *("dash", "cmake", "pkgconf"),
    *(
        "basename",
        "cat",
        "chmod",
        "cmp",
        "cp",
        "cut",
        "dirname",
        "echo",
        "env",
        "expr",
        "false",
        "find",
        "grep",
        "head",
    ),
    *("install", "ln", "mkdir", "mktemp", "mv", "printf", "readlink", "realpath", "rm", "rmdir", "sed", "sort", "tail"),
    *("tee", "test", "[", "touch", "tr", "true", "uniq", "wc", "xargs"),
)


def tool_mounts(tools: Path, target: Architecture, suite: Suite) -> Mounts:
    """Additional mounts for a container of the dev image that has the native compiler's mounts."""
    gnu = target.gnu
    found = {f"/usr/bin/{name}": tools / "usr/bin" / name for name in _PROGRAMS}
    paths = {place: program for place, program in found.items() if program.is_file() and not program.is_symlink()}
    paths |= {
        f"{PLACE}/bin/python": tools / f"usr/bin/python{suite.python}",
        f"{PLACE}/lib/python{suite.python}": tools / f"usr/lib/python{suite.python}",
        f"{PLACE}/python.c": HERE / "python.c",
        f"{PLACE}/as_target.py": HERE / "as_target.py",
        INSTALL: HERE / "install",
    }
    # pkgconf contains the paths of its own machine.
    folders = [f"/usr/{local}lib/{gnu}" for local in ("local/", "")]
    searched = [f"{folders[0]}/pkgconfig", "/usr/local/lib/pkgconfig", "/usr/local/share/pkgconfig"]
    searched += [f"{folders[1]}/pkgconfig", "/usr/lib/pkgconfig", "/usr/share/pkgconfig"]
    return Mounts(
        paths,
        {
            "PITORCH_MACHINE": target.wheel_platform.removeprefix("linux_"),
            "PITORCH_MULTIARCH": gnu,
            "PITORCH_BITS": str(target.bits),
            "PKG_CONFIG_LIBDIR": ":".join(searched),
            "PKG_CONFIG_SYSTEM_LIBRARY_PATH": f"/lib:/lib/{gnu}:/usr/lib:/usr/lib/{gnu}",
            "PKG_CONFIG_SYSTEM_INCLUDE_PATH": "/usr/include",
        },
    )


def together(first: Mounts, second: Mounts) -> Mounts:
    """Combine two sets of mounts."""
    return Mounts({**first.paths, **second.paths}, {**first.environment, **second.environment})
