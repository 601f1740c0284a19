"""A plugin of pytest, loaded in the target's container: leaves tests out, and writes down which there are."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the three options."""
    group = parser.getgroup("upstream")
    group.addoption(
        "--leave-out", action="append", default=[], metavar="PATTERN", help="tests that are not run (fnmatch)"
    )
    group.addoption("--part", default="1/1", metavar="K/N", help="of the names in order, every Nth from the Kth on")
    group.addoption("--tell-collected", metavar="FILE", help="JSON: the names of all tests, and of the part's")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part's tests without those that are left out, and write the names down."""
    patterns: list[str] = config.getoption("--leave-out")
    part, parts = map(int, config.getoption("--part").split("/"))
    whole = sorted(item.nodeid for item in items)
    mine = whole[part - 1 :: parts]
    wanted = {name for name in mine if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
    if place := config.getoption("--tell-collected"):
        Path(place).write_text(json.dumps({"whole": whole, "part": mine}))
