"""Tests that imports between packages and inside ``flow`` go in one direction, and that no import is circular."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolchain import closure
from toolchain.config import ROOT

ORDER = (
    *(
        "toolchain",
        "engine",
        "images",
        "registry",
        "wheels",
        "recipes",
        "flow",
        "nfsroot",
        "sdcard",
        "device",
        "doctor",
        "benchmarks",
    ),
    "tasks",
)
"""Each package may import itself and the packages before it."""

ORDER_IN_FLOW = ("helpers", "steps", "pipelines", "jobs")
"""Parts of ``flow``: each may import itself and the parts before it. Helpers are modules that a step imports."""

LARGE = {"docker", "labgrid", "torch", "numpy", "matplotlib"}
"""Packages that the toolchain does not import."""


def modules(package: str) -> list[Path]:
    if package == "tasks":
        return [ROOT / "tasks.py"]
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if "__pycache__" not in path.parts and "build" not in path.relative_to(ROOT).parts]


def imports(path: Path) -> frozenset[str]:
    """Return the names of all modules that a file imports, at any level, and of the packages that contain them."""
    return closure.imported(path.read_bytes(), ".".join(path.relative_to(ROOT).parent.parts))


@pytest.mark.parametrize("package", [*ORDER, "tests"])
def test_imports_go_one_way(package: str) -> None:
    above = {"tests", *ORDER[ORDER.index(package) + 1 :]} if package in ORDER else {"tasks"}
    wrong = above | (LARGE if package == "toolchain" else set())
    found = {path.relative_to(ROOT): imports(path) & wrong for path in modules(package)}
    assert {path: names for path, names in found.items() if names} == {}


def imported_modules(path: Path) -> set[Path]:
    """Return the project's files that a file imports directly, without those of packages."""
    found = {ROOT / name for module in imports(path) if (name := closure.path_of(module))}
    return {file for file in found if file.name != "__init__.py"}


def part_of_flow(path: Path, helpers: set[Path]) -> str:
    if path.parent.name == "steps":
        return "steps"
    if path.name in ("pipelines.py", "__init__.py"):
        return "pipelines"
    return "helpers" if path in helpers else "jobs"


def test_imports_in_flow_go_one_way() -> None:
    paths = modules("flow")
    steps = [path for path in paths if path.parent.name == "steps"]
    helpers: set[Path] = set()
    waiting = {file for path in steps for file in imported_modules(path)}
    while waiting:
        path = waiting.pop()
        if path.is_relative_to(ROOT / "flow") and path not in helpers and path not in steps:
            helpers.add(path)
            waiting |= imported_modules(path)
    assert not [path.name for path in helpers if path.name.endswith("_job.py") or path.name == "pipelines.py"]
    wrong = [
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path in paths
        for other in imported_modules(path)
        if other.is_relative_to(ROOT / "flow")
        and ORDER_IN_FLOW.index(part_of_flow(path, helpers)) < ORDER_IN_FLOW.index(part_of_flow(other, helpers))
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    graph = {path: imported_modules(path) for package in ORDER for path in modules(package)}
    finished: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        cycle = [*above[above.index(path) :], path] if path in above else []
        assert not cycle, " → ".join(str(item.relative_to(ROOT)) for item in cycle)
        if path not in finished:
            for other in sorted(graph.get(path, ())):
                visit(other, (*above, path))
            finished.add(path)

    for path in graph:
        visit(path, ())


def test_every_package_contains_modules() -> None:
    for package in ORDER:
        assert modules(package), package
        assert any(imports(path) & set(ORDER) for path in modules(package)), package


def test_a_start_imports_only_the_toolchain() -> None:
    """With more imports, each start of ``./inv`` and each completion in a shell would take several times as long."""
    code = "import sys, tasks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded & set(ORDER) == {"registry", "tasks", "toolchain"}
    assert loaded & {"docker", "labgrid", "numpy", "requests", "securesystemslib"} == set()


def test_no_package_hides_one_of_the_standard_library() -> None:
    """Programs that run in the checkout would import the project's package instead of the standard library's."""
    assert set(ORDER) & sys.stdlib_module_names == set()
