"""A plugin of pytest, loaded in the target's container: leaves tests out, and tells which there are."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("upstream")
    group.addoption(
        "--leave-out", action="append", default=[], metavar="PATTERN", help="tests that are not run (fnmatch)"
    )
    group.addoption("--tell-collected", metavar="FILE", help="JSON: the names of all tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the named tests out of those that are to run, and write all names down."""
    patterns: list[str] = config.getoption("--leave-out")
    names = [item.nodeid for item in items]
    left_out = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
    if place := config.getoption("--tell-collected"):
        Path(place).write_text(json.dumps(names))
