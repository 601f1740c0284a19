"""Provide native build tools in an emulated container, in addition to the native compiler (images.native).

A build spends much of its time in programs that only process text and start the compiler: the shell, CMake, pkg-config,
pip, Meson and Cython. Native programs of the same version produce the same text seven to fifteen times faster. Like the
native compiler, the native build tools are mounted over the emulated programs.

Programs whose output depends on the machine that they are compiled for are still emulated: ``uname``, ``arch``, dpkg,
perl, bash (``MACHTYPE``), and programs that print machine words, such as od. CMake detects the target by calling
``uname``. pkg-config reads the target's paths from the environment; only its variable ``pc_path`` still contains this
PC's paths.

pip, Meson and Cython are Python programs; the package that is built determines the versions of Meson and Cython. A
small program (``stand_in/python.c``) replaces the target's Python. The replacement runs pip, Meson and Cython with a
native Python that reports the target's properties (``stand_in/as_target.py``). It runs all other Python programs, such
as the package's own build scripts, with the target's Python. The command ``INSTALL`` installs the replacement;
containers that do not run this command use the target's Python. If a ``setup.py`` calls Cython in its own process,
Cython is still emulated.
"""

from __future__ import annotations

from pathlib import Path

from images.flavour import Suite
from images.native import Mounts
from toolchain.architecture import Architecture

HERE = Path(__file__).resolve().parent / "stand_in"
PLACE = "/usr/libexec/pitorch"
INSTALL = f"{PLACE}/install"
"""The program that installs the replacement for Python; run it as root in the container."""

_PROGRAMS = (
    *("dash", "cmake", "pkgconf", "basename", "cat", "chmod", "cmp", "cp", "cut", "dirname", "echo", "env", "expr"),
    *("false", "find", "grep", "head", "install", "ln", "mkdir", "mktemp", "mv", "printf", "readlink", "realpath"),
    *("rm", "rmdir", "sed", "sort", "tail", "tee", "test", "[", "touch", "tr", "true", "uniq", "wc", "xargs"),
)


def tool_mounts(tools: Path, target: Architecture, suite: Suite) -> Mounts:
    """Return the mounts that add the native build tools to a dev container with the native compiler."""
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
    # pkgconf contains the search paths of the machine that it was built for.
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
    """Return the union of two sets of mounts."""
    return Mounts({**first.paths, **second.paths}, {**first.environment, **second.environment})
