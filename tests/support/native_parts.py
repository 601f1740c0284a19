"""Options for clang-tidy and CMake in the tests of native code."""

from __future__ import annotations

import pytest

_INCLUDE = "-bugprone-suspicious-include"
CLANG_TIDY_LEFT_OUT = (
    pytest.param(f"{_INCLUDE},-clang-analyzer-*", id="syntax"),
    pytest.param(_INCLUDE, id="analyzer", marks=pytest.mark.expensive),
)
"""Values of clang-tidy's --checks. The analyzer follows paths through functions; it takes two thirds of the time."""

LIBQPU_OPTIONS = ("-DBUILD_TESTING=ON", "-DQPU_WARNINGS_AS_ERRORS=ON")
"""CMake's options for libqpu in the tests. With other options, its objects would be compiled again."""
