"""Tests that imports between packages and inside ``flow`` go in one direction, and that no import is circular."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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

COPIED = (
    *("recipes/qpu_ops/src", "recipes/qpu_ops/backend", "recipes/qpu_ops/setup.py", "recipes/cuda_ops/src"),
    *("benchmarks/cpu/workloads.py", "benchmarks/models/on_target.py", "device/remote/loader/torch_session.py"),
    "benchmarks/models/networks.py",
)
"""Code that cannot import this project: the sources of wheels, which are built in their own folder; scripts for the
target's Python; and models, which a process with PyTorch imports."""


def modules(package: str) -> list[Path]:
    if package == "tasks":
        return [ROOT / "tasks.py"]
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if "__pycache__" not in path.parts and "build" not in path.relative_to(ROOT).parts]


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the absolute names of all modules that a file imports, at any level, with line numbers."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((item.name, node.lineno) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *((node.module,) if node.module else ()))), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    above = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for name, line in imports(path)
        if name.split(".")[0] in above
    ]
    assert wrong == []


def imported_modules(path: Path) -> set[Path]:
    """Return the project's files that a file imports directly."""
    found = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            names = [f"{module}.{item.name}" for item in node.names]
            names += [module] if not all(_file(name) for name in names) else []
        found |= {file for name in names if (file := _file(name))}
    return found


def _file(module: str) -> Path | None:
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path if path.is_file() else None


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
        assert any(name.split(".")[0] in ORDER for path in modules(package) for name, _ in imports(path)), package


def test_nothing_imports_the_tasks() -> None:
    sources = [path for package in (*ORDER, "tests") for path in modules(package)]
    assert [path for path in sources for name, _ in imports(path) if name.split(".")[0] == "tasks"] == []


def test_toolchain_imports_no_large_package() -> None:
    heavy = {"docker", "labgrid", "torch", "numpy", "matplotlib"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in modules("toolchain")
        for name, line in imports(path)
        if name.split(".")[0] in heavy
    ]
    assert wrong == []


def test_a_start_imports_only_the_toolchain() -> None:
    """With more imports, each start of ``./inv`` and each completion in a shell would take several times as long."""
    code = "import sys, tasks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded & set(ORDER) == {"registry", "tasks", "toolchain"}
    assert loaded & {"docker", "labgrid", "numpy", "requests", "securesystemslib"} == set()


def test_no_module_imports_torch_at_the_top() -> None:
    """The toolchain must work without torch."""
    wrong = []
    for package in ORDER:
        for path in modules(package):
            if path.relative_to(ROOT).as_posix().startswith(COPIED):
                continue
            top = [item for item in ast.parse(path.read_text()).body if isinstance(item, (ast.Import, ast.ImportFrom))]
            names = [ast.unparse(item) for item in top]
            wrong += [f"{path}: {name}" for name in names if name.split()[1].split(".")[0] == "torch"]
    assert wrong == []


def test_no_package_hides_one_of_the_standard_library() -> None:
    """Programs that run in the checkout would import the project's package instead of the standard library's."""
    assert set(ORDER) & sys.stdlib_module_names == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import engine.start\n", {"engine.start"}),
        ("def f():\n    from device import suite\n", {"device"}),
        ("from . import steps\n", {"toolchain"}),
        ("from ..images import engine\n", {"images"}),
        ("import importlib\nimportlib.import_module('tasks')\n", {"importlib", "tasks"}),
    ],
)
def test_every_form_of_import_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: set[str]
) -> None:
    (tmp_path / "toolchain").mkdir()
    path = tmp_path / "toolchain" / "module.py"
    path.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert {name for name, _ in imports(path)} == expected
