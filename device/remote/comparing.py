"""The comparison of a kernel's result with its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy


@dataclass(frozen=True)
class Difference:
    """The first element in memory order that is out of tolerance, and the number of such elements."""

    index: tuple[int, ...]
    expected: float
    found: float
    count: int
    total: int


def first_difference(found: Any, expected: Any, *, relative: float, absolute: float) -> Difference | None:
    """The first difference, or None if all elements agree. NaN equals NaN.

    Raises ValueError if the shapes or types differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"expected {expected.dtype} of shape {expected.shape}, found {found.dtype} of shape {found.shape}"
        )
    agree = numpy.isclose(found, expected, rtol=relative, atol=absolute, equal_nan=True)
    if agree.all():
        return None
    where = numpy.unravel_index(int(numpy.argmin(agree)), agree.shape)
    index = tuple(int(part) for part in where)
    wrong = int(agree.size - numpy.count_nonzero(agree))
    return Difference(index, float(expected[index]), float(found[index]), wrong, int(agree.size))
