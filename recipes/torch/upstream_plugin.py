"""Pytest plugin for the target's container: selects the tests to run and writes their names to a file."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the three options."""
    group = parser.getgroup("upstream")
    group.addoption("--leave-out", action="append", default=[], metavar="PATTERN", help="tests to exclude (fnmatch)")
    group.addoption(
        "--part", default="1/1", metavar="K/N", help="run every Nth test in name order, starting with the Kth"
    )
    group.addoption("--tell-collected", metavar="FILE", help="JSON file for the names of all tests and of the part")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the part, without the excluded ones, and write the names."""
    patterns: list[str] = config.getoption("--leave-out")
    part, parts = map(int, config.getoption("--part").split("/"))
    whole = sorted(item.nodeid for item in items)
    mine = whole[part - 1 :: parts]
    wanted = {name for name in mine if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
    if place := config.getoption("--tell-collected"):
        Path(place).write_text(json.dumps({"whole": whole, "part": mine}))
