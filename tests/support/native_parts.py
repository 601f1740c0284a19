"""Options for clang-tidy and CMake in the tests of native code."""

from __future__ import annotations

import pytest

_INCLUDE = "-bugprone-suspicious-include"
CLANG_TIDY_LEFT_OUT = (
    pytest.param(f"{_INCLUDE},-clang-analyzer-*", id="syntax"),
    pytest.param(_INCLUDE, id="analyzer", marks=pytest.mark.expensive),
)
"""The values of --checks. The analyzer, which follows paths through functions, takes two thirds of the time."""

LIBQPU_OPTIONS = ("-DBUILD_TESTING=ON", "-DQPU_WARNINGS_AS_ERRORS=ON")
"""CMake's options for libqpu in the tests. With other options, its objects would be compiled again."""
