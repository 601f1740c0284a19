"""Multiply a matrix by a vector with a plain scalar loop on the CPU, as a baseline for the QPUs.

The loop runs in one thread, accumulates each row from left to right in one float32 sum, and uses no vector
instructions. It is only a baseline: the fastest implementation on the CPU is torch.mv. Dtypes, shapes and errors are
the same as in matrix_cpp.

Accuracy of a float32 score, for rows of W elements: |score - exact| <= W u / (1 - W u) * sum(|a_w b_w|), u = 2**-24.
"""

from __future__ import annotations

import time

import torch
from qpu_ops import Timed, _native, require_tensors

__all__ = ["Timed", "cpu", "cpu_timed"]


def cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply the matrix ``a`` by the vector ``b``.

    Return a new tensor of shape (H,) with one score for each row of ``a``. The tensor does not require gradients.
    """
    require_tensors("cpu", a, b)
    return _native.cpu(a, b)[0]


def cpu_timed(a: torch.Tensor, b: torch.Tensor) -> Timed:
    """Return the result of ``cpu``, the time of the loop alone, and the time of the whole call, both in seconds."""
    began = time.perf_counter()
    require_tensors("cpu_timed", a, b)
    result, compute_s = _native.cpu(a, b)
    return Timed(result, compute_s, time.perf_counter() - began)
