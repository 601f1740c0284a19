"""Byte-compile Python modules for the target with a native Python of the same version.

Byte code does not depend on the machine, so a native Python of the same version writes the same files as the emulated
Python, in a seventh of the time. The native Python is in the tools folder, because this PC's own Python may have a
different version. The native Python runs in a chroot in a separate mount namespace.
"""

from __future__ import annotations

import os
from pathlib import Path

from images.flavour import Suite
from toolchain.errors import CommandFailed
from toolchain.process import run

_SCRIPT = """
    mkdir -p "$0/dev" "$0/mnt"
    mount --rbind /dev "$0/dev"
    mount --bind "$1" "$0/mnt"
    exec chroot "$0" "/usr/bin/python$2" -I -c "$3"
"""
# compileall's workers, which take files from a queue, wrote different bytes in one of five builds. The probable cause
# (inferred, not proven) is that marshal's output depends on whether an object has several references, and that files
# compiled by the same process share objects. Here each process compiles the same files every time and starts in the
# same state.
_COMPILE = """
import compileall, os, py_compile, sys
modules = sorted(os.path.join(folder, name) for folder, _, names in os.walk("/mnt") for name in names
                 if name.endswith(".py"))
running = 0
for first in range(0, len(modules), 64):
    if running == os.cpu_count():
        os.wait()
        running -= 1
    running += 1
    if os.fork() == 0:
        for path in modules[first:first + 64]:
            compileall.compile_file(path, stripdir="/mnt", prependdir="/", quiet=2,
                                    invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
        os._exit(0)
while running:
    os.wait()
    running -= 1
"""


def compile_tree(root: Path, tools: Path, suite: Suite, *, epoch: int) -> None:
    """Compile every module below the staged root ``root``.

    The byte code contains the paths on the target. Every module's time stamp is set to ``epoch``. On import, Python
    compares this time stamp with the one in the byte code; unlike validation by hash (PEP 552), the comparison does not
    read the source. Modules that do not compile (templates, code for other versions) are skipped, as in pip. Raises
    CommandFailed if no module was compiled.
    """
    for module in root.rglob("*.py"):
        os.utime(module, (epoch, epoch), follow_symlinks=False)
    program = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-euc", _SCRIPT]
    done = run([*program, tools, root, suite.python, _COMPILE], check=False, limit_s=900)
    modules = sum(1 for _ in root.rglob("*.py"))
    if modules and not any(root.rglob(f"*.{suite.python_tag.replace('cp', 'cpython-')}.pyc")):
        raise CommandFailed(
            f"no module below {root} could be byte-compiled",
            returncode=done.returncode,
            tail=done.output,
            expected=f"byte code of {modules} modules, compiled by {tools}/usr/bin/python{suite.python}",
            found="none",
            fix="run ./inv build-image --again=tools",
        )
