"""The product of two square matrices with SIZE rows each, computed in blocks that fit into the caches.

The kernel uses one thread, so that results from different boards can be compared per core.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

SIZE = 256
TOLERANCE = (1e-4, 1e-4)
OPENCL_TOLERANCE = (0.0, 5e-4)
"""The OpenCL result must agree with the reference to three decimal places."""

BLOCK = 32
"""The number of rows and columns in a block of the result.

A block fills 4 KiB, a quarter of a Cortex-A53's L1 data cache.
"""
DEPTH = 4


def module(size: int) -> Any:
    """A function (a, b, c) that writes the product of a and b to c."""
    import tvm
    from tvm import s_tir, te

    a = te.placeholder((size, size), "float32", name="a")
    b = te.placeholder((size, size), "float32", name="b")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    plain = te.create_prim_func([a, b, c]).with_attr("global_symbol", "gemm")
    schedule = s_tir.Schedule(tvm.IRModule({"gemm": plain}))
    block = schedule.get_sblock("c", "gemm")
    i, j, k = schedule.get_loops(block)
    # If the size is not a multiple of BLOCK, use smaller blocks, because partial blocks would add a condition to the
    # inner loop.
    side, depth = math.gcd(size, BLOCK), math.gcd(size, DEPTH)
    i_outer, i_inner = schedule.split(i, [None, side])
    j_outer, j_inner = schedule.split(j, [None, side])
    k_outer, k_inner = schedule.split(k, [None, depth])
    schedule.reorder(i_outer, j_outer, k_outer, i_inner, k_inner, j_inner)
    schedule.vectorize(j_inner)
    schedule.decompose_reduction(block, k_outer)
    return schedule.mod


def launch(size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The number of the OpenCL kernel's work items along both dimensions, in total and per work group.

    A work group computes TILE × TILE elements (see gemm.cl).
    """
    groups = math.ceil(size / 64)
    return (groups * 16, groups * 16), (16, 16)


def inputs(size: int, random: numpy.random.Generator) -> list[Any]:
    """The kernel's inputs: two square matrices."""
    return [random.standard_normal((size, size), dtype=numpy.float32) for _ in range(2)]


def reference(a: Any, b: Any) -> Any:
    """The product in double precision, rounded once to float32."""
    return (a.astype(numpy.float64) @ b.astype(numpy.float64)).astype(numpy.float32)


def operations(size: int) -> int:
    """The number of floating-point operations in one run."""
    return 2 * size**3
