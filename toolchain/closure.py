"""Find the code that determines a product: this project's modules that a module imports, directly or indirectly.

The import statements in each file are parsed, but no module is imported. The modules in ``LEAVES`` are omitted.
"""

from __future__ import annotations

import ast
import functools
import hashlib

from toolchain.config import ROOT

LEAVES = frozenset(
    {
        "engine",  # runs the given command in a container of the given image
        "registry",  # transfers finished artefacts and verifies their SHA-256
        "toolchain.caller",  # determines who called ./inv, and from where
        "toolchain.checkout",  # determines the commit that manifests record
        "toolchain.config",  # parses settings; relevant values are step inputs
        "toolchain.errors",  # defines error messages
        "toolchain.jobs",  # determines how many compilers run at once
        "toolchain.leftovers",  # removes files of killed tasks
        "toolchain.manifest",  # records the products
        "toolchain.process",  # runs the given command
        "toolchain.progress",  # prints progress
        "toolchain.reaper",  # ends the programs of a killed task
        "toolchain.steps",  # decides which steps run
        "toolchain.text",  # formats printed text
    }
)
"""Modules, and packages with all their modules, that cannot change the bytes of a product.

Import closures contain neither these modules nor modules that only these modules import.
"""


def digests(module: str) -> dict[str, str]:
    """Return the SHA-256 of each file in a module's closure, by path relative to the checkout."""
    found: dict[str, str] = {}
    waiting = [module]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        path = path_of(name)
        if path is None:
            continue
        content = (ROOT / path).read_bytes()
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        has_code, names = _parsed(content, package)
        if has_code:
            found[path] = hashlib.sha256(content).hexdigest()
        new = {item for item in names if not _is_leaf(item)} - seen
        seen |= new
        waiting += new
    return dict(sorted(found.items()))


def path_of(module: str) -> str | None:
    """Return the file of a module or package of this project, or None for anything else."""
    base = module.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (ROOT / path).is_file()), None)


def _is_leaf(module: str) -> bool:
    return module in LEAVES or module.partition(".")[0] in LEAVES


def imported(content: bytes, package: str) -> frozenset[str]:
    """Return all imported names that may be names of modules, and the names of the packages that contain them."""
    return _parsed(content, package)[1]


@functools.lru_cache(maxsize=1024)
def _parsed(content: bytes, package: str) -> tuple[bool, frozenset[str]]:
    """Return whether a file has code, and the imported names.

    Most ``__init__.py`` files consist of a docstring and have no code. The syntax trees are not kept, because each
    garbage collection would visit them.
    """
    module = ast.parse(content)
    has_code = any(not isinstance(item, ast.Expr) for item in module.body)
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{item.name}" for item in node.names)}
    parts = (name.split(".") for name in names)
    return has_code, frozenset(".".join(words[:end]) for words in parts for end in range(1, len(words) + 1))
