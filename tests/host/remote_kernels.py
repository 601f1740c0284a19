"""Kernels' files that tests write: each right but for one thing."""

from __future__ import annotations

import textwrap
from pathlib import Path

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
    """A kernel's file, with each first text of ``replaced`` as its second."""
    made = textwrap.dedent(text)
    for old, new in replaced:
        assert old in made
        made = made.replace(old, new)
    path = folder / "kernel.py"
    path.write_text(made)
    return path
