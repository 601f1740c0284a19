"""Imports go one way: tasks → benchmarks → device → nfsroot → recipes → images → toolchain; nothing imports tasks."""

from __future__ import annotations

import ast
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
        "device",
        "doctor",
        "benchmarks",
    ),
    "tasks",
)
"""The house from the ground up: each may import what stands before it, and itself."""

COPIED = ("recipes/qpu_ops/src", "recipes/qpu_ops/backend", "recipes/qpu_ops/setup.py", "recipes/cuda_ops/src")
"""Parts that are built elsewhere, from their own folder: they know nothing of this package's layout."""


def modules(package: str) -> list[Path]:
    if package == "tasks":
        return [ROOT / "tasks.py"]
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if "__pycache__" not in path.parts and "build" not in path.relative_to(ROOT).parts]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every name that a file imports, absolute, wherever in the file, and its line."""
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


def test_there_is_something_in_every_room() -> None:
    for package in ORDER:
        assert modules(package), package
        assert any(name.split(".")[0] in ORDER for path in modules(package) for name, _ in imports(path)), package


def test_nothing_imports_the_tasks() -> None:
    sources = [path for package in (*ORDER, "tests") for path in modules(package)]
    assert [path for path in sources for name, _ in imports(path) if name.split(".")[0] == "tasks"] == []


def test_the_leaves_import_no_docker_and_start_fast() -> None:
    heavy = {"docker", "labgrid", "torch", "numpy", "matplotlib"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in modules("toolchain")
        for name, line in imports(path)
        if name.split(".")[0] in heavy
    ]
    assert wrong == []


def test_torch_is_imported_only_where_it_is_used() -> None:
    """The toolchain does not depend on torch: no module imports it at its top."""
    wrong = []
    for package in ORDER:
        for path in modules(package):
            if path.relative_to(ROOT).as_posix().startswith(COPIED):
                continue
            top = [item for item in ast.parse(path.read_text()).body if isinstance(item, (ast.Import, ast.ImportFrom))]
            names = [ast.unparse(item) for item in top]
            wrong += [f"{path}: {name}" for name in names if name.split()[1].split(".")[0] == "torch"]
    assert wrong == []


def test_no_module_is_named_as_one_of_the_standard_library() -> None:
    """A top-level name of ours would hide it from every program that runs in the checkout."""
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
def test_every_way_to_import_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: set[str]
) -> None:
    (tmp_path / "toolchain").mkdir()
    path = tmp_path / "toolchain" / "module.py"
    path.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert {name for name, _ in imports(path)} == expected
