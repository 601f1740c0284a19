"""Kernel files for tests: a correct one, and others with a single error each."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from device.remote import environment, profiling, targets
from nfsroot.private_network import private_network
from toolchain.config import Config
from toolchain.process import run

RIGHT = """
    import numpy

    SIZE = 96

    def module(size):
        import tvm
        from tvm import te

        a = te.placeholder((size,), "float32", name="a")
        b = te.compute((size,), lambda i: a[i] * 2.0, name="b")
        return tvm.IRModule({"twice": te.create_prim_func([a, b]).with_attr("global_symbol", "twice")})

    def inputs(size, random):
        return [random.standard_normal(size, dtype=numpy.float32)]

    def reference(a):
        return a * numpy.float32(2)
"""

CRASHING = """
    import numpy

    SIZE = 16

    def module(size):
        import tvm
        from tvm import te

        a = te.placeholder((size,), "float32", name="a")
        where = te.placeholder((size,), "int32", name="where")
        b = te.compute((size,), lambda i: a[where[i]], name="b")
        return tvm.IRModule({"crash": te.create_prim_func([a, where, b]).with_attr("global_symbol", "crash")})

    def inputs(size, random):
        return [numpy.ones(size, "float32"), numpy.full(size, 2**29 - 5, "int32")]

    def reference(a, where):
        return a
"""

TEMPORARY = """
    import numpy

    SIZE = 40000

    def module(size):
        import tvm
        from tvm import te

        a = te.placeholder((size,), "float32", name="a")
        once = te.compute((size,), lambda i: a[i] * 2.0, name="once")
        b = te.compute((size,), lambda i: once[size - 1 - i] + once[i], name="b")
        return tvm.IRModule({"temporary": te.create_prim_func([a, b]).with_attr("global_symbol", "temporary")})

    def inputs(size, random):
        return [random.standard_normal(size, dtype=numpy.float32)]

    def reference(a):
        return a[::-1] * numpy.float32(2) + a * numpy.float32(2)
"""

PARALLEL = """
    import numpy

    SIZE = 1024

    def module(size):
        import tvm
        from tvm import s_tir, te

        a = te.placeholder((size,), "float32", name="a")
        b = te.compute((size,), lambda i: a[i] + 1.0, name="b")
        plain = tvm.IRModule({"many": te.create_prim_func([a, b]).with_attr("global_symbol", "many")})
        schedule = s_tir.Schedule(plain)
        schedule.parallel(schedule.get_loops(schedule.get_sblock("b", "many"))[0])
        return schedule.mod

    def inputs(size, random):
        return [random.standard_normal(size, dtype=numpy.float32)]

    def reference(a):
        return a + numpy.float32(1)
"""


def write(folder: Path, text: str = RIGHT, *replaced: tuple[str, str]) -> Path:
    """Write a kernel's file. Each pair in ``replaced`` is a string and its replacement."""
    made = textwrap.dedent(text)
    for old, new in replaced:
        assert old in made
        made = made.replace(old, new)
    path = folder / "kernel.py"
    path.write_text(made)
    return path


# Runs in a process with TVM, and exports two kernels as TVM itself does: a plain one and one with a parallel loop.
EXPORT = """
import json, pathlib, sys
import tvm
from tvm import s_tir, te
from tvm.support import cc
from tvm.target import Target
from device.remote import compiling

kernel, folder = map(pathlib.Path, sys.argv[1:3])
target, linker = json.loads(sys.argv[3]), sys.argv[4]
compiling.export(kernel, compiling.load(kernel, 32), target, linker, folder / "plain.so", standalone=False)
a = te.placeholder((64,), "float32", name="a")
b = te.compute((64,), lambda i: a[i] + 1.0, name="b")
made = tvm.IRModule({"many": te.create_prim_func([a, b]).with_attr("global_symbol", "many")})
schedule = s_tir.Schedule(made)
schedule.parallel(schedule.get_loops(schedule.get_sblock("b", "many"))[0])
built = tvm.compile(schedule.mod, target=Target(target))
built.export_library(str(folder / "many.so"), fcompile=cc.cross_compiler(linker))
"""


@contextlib.contextmanager
def out_of_reach() -> Iterator[None]:
    """Create a private network, because TVM's servers let every client run code as the tests' user."""
    with private_network() if os.geteuid() == 0 else contextlib.nullcontext():
        yield


def export(config: Config, folder: Path, target_name: str) -> None:
    """Write plain.so (``gemm`` of 32 rows) and many.so to ``folder``, exported by TVM for a target."""
    tvm, target = environment.ready(config), targets.load(target_name)
    words: list[str | Path] = [profiling.KERNELS / "gemm.py", folder, json.dumps(dict(target.tvm)), target.linker("")]
    run([sys.executable, "-c", EXPORT, *words], env=tvm.variables, limit_s=600)
