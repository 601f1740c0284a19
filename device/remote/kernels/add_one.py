"""Add 1 to each of SIZE floats."""

from __future__ import annotations

from typing import Any

import numpy

SIZE = 1024
TOLERANCE = (0.0, 0.0)
"""The relative and absolute tolerance. The sum is the same on every machine that rounds float32 to nearest."""
QPU_TOLERANCE = (2.0**-22, 0.0)
"""One unit in the last place, because QPUs round towards zero."""


def module(size: int) -> Any:
    """A function (a, b) that writes a + 1 to b."""
    import tvm
    from tvm import te

    a = te.placeholder((size,), "float32", name="a")
    b = te.compute((size,), lambda i: a[i] + 1.0, name="b")
    return tvm.IRModule({"add_one": te.create_prim_func([a, b]).with_attr("global_symbol", "add_one")})


def launch(size: int) -> tuple[tuple[int], None]:
    """The number of the OpenCL kernel's work items, and None, which lets the driver choose the work-group size."""
    return (size,), None


def inputs(size: int, random: numpy.random.Generator) -> list[Any]:
    """The kernel's input: one vector."""
    return [random.standard_normal(size, dtype=numpy.float32)]


def reference(a: Any) -> Any:
    """The result that numpy computes."""
    return a + numpy.float32(1)


def operations(size: int) -> int:
    """The number of floating-point operations in one run."""
    return size
