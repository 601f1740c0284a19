"""Run test files in the native environment."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from flow import native_environment as native
from toolchain import files, process
from toolchain.config import Config
from toolchain.errors import ChecksFailed
from toolchain.steps import Made

_LIMIT_S = 2400.0


def run_tests(config: Config, folder: Path, names: Sequence[str], report: str) -> Made:
    """Run the tests; return the JUnit report and the numbers of passed and skipped tests.

    ``report`` is the base name of the report and the log. Raises ChecksFailed with the last lines of pytest's output.
    """
    junit = native.folder_of(config) / f"{report}.xml"
    # The project's own pytest configuration requires plug-ins that this environment does not have.
    pytest: list[str | Path] = [native.python_of(config), "-m", "pytest", "-c", os.devnull]
    with files.replacing(junit) as aside:
        done = process.run(
            [
                *(*pytest, "-p", "no:cacheprovider", "-q", "-W", "error"),
                f"--rootdir={folder}",
                f"--confcutdir={folder}",
                f"--junitxml={aside}",
                *(str(folder / name) for name in names),
            ],
            cwd=native.folder_of(config),
            env=native.environment_of(config),
            limit_s=_LIMIT_S,
            check=False,
            log=native.folder_of(config) / f"{report}.log",
        )
        if done.returncode != 0:
            tail = "\n".join(done.output.splitlines()[-60:])
            raise ChecksFailed(
                f"the device tests fail on this machine ({process.explain_exit(done.returncode)})\n{tail}",
                expected=f"{' and '.join(names)} to pass on libqpu's interpreter",
                found=done.output.strip().splitlines()[-1] if done.output.strip() else "no output",
                fix=f"read the full output in native/{report}.log in the build folder",
            )
        counts = _counts(aside)
    return Made(artefacts=(junit,), facts=counts)


def _counts(junit: Path) -> dict[str, int]:
    """Return the numbers of passed and skipped tests."""
    found = {"tests": 0, "skipped": 0, "failures": 0, "errors": 0}
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):  # noqa: S314 (pytest wrote this file)
        for name in found:
            found[name] += int(suite.get(name, "0"))
    return {
        "passed": found["tests"] - found["skipped"] - found["failures"] - found["errors"],
        "skipped": found["skipped"],
    }
