"""Options for clang-tidy and CMake in the tests of native code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

CLANG_TIDY_LEFT_OUT = (
    pytest.param("-clang-analyzer-*", id="syntax"),
    pytest.param("", id="analyzer", marks=pytest.mark.expensive),
)
"""Values of clang-tidy's --checks. The analyzer follows paths through functions; it takes two thirds of the time."""

LIBQPU_OPTIONS = ("-DBUILD_TESTING=ON", "-DQPU_WARNINGS_AS_ERRORS=ON")
"""CMake's options for libqpu in the tests. With other options, its objects would be compiled again."""


def join_sources(sources: Iterable[Path], unit: Path) -> Path:
    """Write the sources' text to one file and return it. clang-tidy visits headers only once per file.

    The sources are not joined by #include, because some checks skip included files.
    """
    seen = set[str]()
    with unit.open("w") as stream:
        for source in sources:
            lines = source.read_text().splitlines(keepends=True)
            stream.writelines(line for line in lines if line not in seen)
            seen.update(line for line in lines if line.startswith("#include"))
    return unit
