"""Split the suite between boards according to measured durations (``./inv test-on-pi --shard``).

Test files are not split, because the tests in a file share fixtures. The durations come from the JUnit files of earlier
runs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree


def suite_files(suite: Path) -> list[str]:
    """The test files in a suite, sorted by name."""
    return sorted(path.name for path in suite.glob("test_*.py"))


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Return each test file's duration in seconds: the sum of its tests' mean durations in the JUnit files.

    A run with ``--select`` contains only some tests from a file, so the means are computed per test.
    """
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 - a file of this program
            if case.find("error") is None and case.find("skipped") is None:
                times[case.get("classname", ""), case.get("name", "")].append(float(case.get("time", "0")))
    found: defaultdict[str, float] = defaultdict(float)
    for (module, _), seconds in times.items():
        found[f"{module.partition('.')[0]}.py"] += statistics.fmean(seconds)
    return dict(found)


def split(names: Sequence[str], seconds: Mapping[str, float], parts: int) -> list[list[str]]:
    """Distribute test files, or tests given by node ID, over at most ``parts`` lists, none of which is empty.

    The longest files are distributed first, each to the list with the smallest total so far. Tests of the same file
    stay together. The duration of a file without a measurement is assumed to be the mean of the measured durations.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        files[name.partition("::")[0]].append(name)
    known = [seconds[name] for name in files if name in seconds]
    mean = statistics.fmean(known) if known else 1.0
    made: list[list[str]] = [[] for _ in range(min(parts, len(files)))]
    load = [0.0] * len(made)
    for name in sorted(files, key=lambda name: -seconds.get(name, mean)):
        least = min(range(len(made)), key=lambda number: (load[number], len(made[number])))
        made[least] += files[name]
        load[least] += seconds.get(name, mean)
    return made
