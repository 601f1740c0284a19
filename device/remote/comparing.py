"""Compare a kernel's result with the expected result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy


def first_difference(found: Any, expected: Any, *, relative: float, absolute: float) -> dict[str, Any] | None:
    """Find the first element, in memory order, that is outside the tolerance, and count all such elements.

    Returns None if all elements agree. Two NaNs agree.

    Raises ValueError if the shapes or types differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"expected {expected.dtype} of shape {expected.shape}, found {found.dtype} of shape {found.shape}"
        )
    if found.dtype.kind in "iu" and relative == absolute == 0:
        agree = numpy.equal(found, expected)  # isclose converts to float64, which rounds large integers
    else:
        agree = numpy.isclose(found, expected, rtol=relative, atol=absolute, equal_nan=True)
    if agree.all():
        return None
    where = numpy.unravel_index(int(numpy.argmin(agree)), agree.shape)
    index = tuple(int(part) for part in where)
    return {
        "index": index,
        "expected": float(expected[index]),
        "value": float(found[index]),
        "count": int(agree.size - numpy.count_nonzero(agree)),
        "total": int(agree.size),
    }


def blank(like: Any) -> Any:
    """Return an array for a result, filled with a value that no kernel computes.

    Elements that a kernel does not write keep this value and are thus detected.
    """
    return numpy.full_like(like, numpy.nan if like.dtype.kind == "f" else 77)


def tolerance_of(expected: Any, relative: float, absolute: float, least: float = 0.0) -> tuple[float, float]:
    """The relative and absolute tolerance for a result of a model. Integers must be equal.

    If all expected values are below 1 in magnitude, the absolute tolerance is multiplied by the largest magnitude. With
    a fixed tolerance, a result that is all zeros would be accepted if the expected values were very small. The absolute
    tolerance is at least ``least``.
    """
    if expected.dtype.kind in "iu":
        return 0.0, 0.0
    largest = float(numpy.abs(numpy.nan_to_num(expected)).max()) if expected.size else 0.0
    return relative, max(absolute * min(1.0, largest or 1.0), least)


def first_mismatch(
    found: Sequence[Any], expected: Sequence[Any], tolerances: Sequence[tuple[float, float]]
) -> dict[str, Any] | None:
    """Return the first difference, the tolerance and the index of the result that differs.

    Returns None if all results agree.
    """
    for number, (ours, theirs, allowed) in enumerate(zip(found, expected, tolerances, strict=True)):
        wrong = first_difference(ours, theirs, relative=allowed[0], absolute=allowed[1])
        if wrong is not None:
            return {"output": number, "outputs": len(expected), **wrong, "tolerance": allowed}
    return None
