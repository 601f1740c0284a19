"""Run a Python program natively, as the target's Python would run it: ``as_target.py PYTHON (SCRIPT | -m MODULE) …``.

This works for programs that only process text and start other programs. PYTHON is the path by which the target's
Python was called. The description of the machine (``os.uname``, ``sys.maxsize``, ``sysconfig``) is that of the
target, and ``sys.executable`` starts the target's Python. Modules are those of the target's Python, except for compiled
modules of the standard library, which are native. Compiled modules of other packages are for the target and cannot be
loaded; their source is imported instead. Cython contains compiled modules and their source. If the package index has a
native wheel with the same source, the program imports Cython from this wheel, because the compiled modules are faster.
Byte code, which is the same for all machines, is written to a separate folder.
"""

import fcntl
import filecmp
import os
import subprocess
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

_PYTHON = "/usr/libexec/pitorch/bin/python"
_OWN = "/usr/libexec/pitorch/lib/"
_FETCHED = "/var/tmp/pitorch-native/"  # noqa: S108 (in the build's container)
_PIP = """
import runpy, sys
sys.path.append("/usr/lib/python3/dist-packages")
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_native = os.uname()


def _uname() -> os.uname_result:
    return os.uname_result((*_native[:4], os.environ["PITORCH_MACHINE"]))


def _as_target(python: str) -> None:
    sys.dont_write_bytecode = False
    os.uname = _uname
    sys.maxsize = 2 ** (int(os.environ["PITORCH_BITS"]) - 1) - 1
    sys.implementation._multiarch = os.environ["PITORCH_MULTIARCH"]  # type: ignore[attr-defined]
    sys.executable = sys._base_executable = python  # type: ignore[attr-defined]
    sys.prefix = sys.base_prefix = sys.exec_prefix = sys.base_exec_prefix = "/usr"
    compiled = [path for path in sys.path if path.startswith(_OWN) and path.endswith("/lib-dynload")]
    target = f"/usr/lib/{compiled[0].split('/')[-2]}"
    # The first entry, which is the folder of this script, is omitted.
    sys.path[:] = [path for path in sys.path[1:] if not path.startswith(_OWN)] + [target, *compiled]
    *others, of_folders = sys.path_hooks
    of_source = FileFinder.path_hook((SourceFileLoader, SOURCE_SUFFIXES))
    sys.path_hooks[:] = [*others, lambda path: (of_folders if path.startswith((_OWN, _FETCHED)) else of_source)(path)]
    sys.path_importer_cache.clear()
    import site  # reads the prefixes when it is imported

    site.main()


def _use_native_cython() -> None:
    """Import a native wheel of the installed Cython if the wheel's source is identical to the installed source.

    A version does not identify a source, because the distribution's package has patches and a project can install any
    commit.
    """
    from importlib import metadata

    try:
        installed = metadata.distribution("cython")
        folder = Path(_FETCHED, f"cython-{installed.version}")
        new, site = folder / "new", folder / "site"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # several translations start at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not site.is_dir():
                words = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", f"--target={new}"]
                argv = [_PYTHON, "-I", "-c", _PIP, "install", *words, f"cython=={installed.version}"]
                done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True)
                sources = [str(path.relative_to(new)) for path in new.rglob("*.py")]
                _, *others = filecmp.cmpfiles(new, str(installed.locate_file("")), sources, shallow=False)
                if done.returncode == 0 and not any(others):
                    new.rename(site)
                else:
                    site.mkdir()
    except (OSError, metadata.PackageNotFoundError):
        return
    sys.path.insert(0, str(site))


def _main() -> None:
    _, python, word, *rest = sys.argv
    _as_target(python)
    if (rest[0] if word == "-m" else Path(word).name).startswith("cython"):
        _use_native_cython()
    import runpy

    if word == "-m":
        sys.argv = [python, *rest[1:]]
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [word, *rest]
        sys.path.insert(0, os.path.realpath(word).rpartition("/")[0])
        runpy.run_path(word, run_name="__main__")


_main()
