"""A kernel for profile-remote that doubles its elements and sleeps, so that a long session needs no CPU time."""

from __future__ import annotations

from typing import Any

import numpy

SIZE = 100


def module(size: int) -> Any:
    """Return a kernel that sleeps for 1 ms per element."""
    import tvm
    from tvm import te, tirx

    a = te.placeholder((size,), "float32", name="a")
    slept = tirx.call_extern("int32", "usleep", 1000)
    b = te.compute((size,), lambda i: a[i] * 2.0 + slept.astype("float32"), name="b")
    return tvm.IRModule({"sleeping": te.create_prim_func([a, b]).with_attr("global_symbol", "sleeping")})


def inputs(size: int, random: Any) -> list[Any]:
    """Return random elements."""
    return [random.standard_normal(size, dtype=numpy.float32)]


def reference(a: Any) -> Any:
    """Return the doubled elements; usleep returns 0."""
    return a * numpy.float32(2)
