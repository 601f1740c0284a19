"""Read a recipe's data file, which lists the inputs and outputs of an artefact."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolchain.errors import ArtefactMissing, RecipeInvalid
from toolchain.files import tree_fingerprint

HERE = Path(__file__).resolve().parent
_TEXTS, _LISTS = ("name", "title", "source"), ("inputs", "outputs")
_SOURCES = ("tree", "archive", "git", "index")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe for one artefact. ``settings`` contains this recipe's own pins, prefixes and options."""

    name: str
    title: str
    source: str
    """tree (in this repository), archive (the distribution's source package), git (fetched at a pinned commit), or
    index (the package index's source archive, with a pinned SHA-256)."""
    inputs: tuple[str, ...]
    """Glob patterns for the source files below ``sources``."""
    outputs: tuple[str, ...]
    """Glob patterns. Each must match a product."""
    folder: Path
    """The folder of the data file."""
    sources: Path
    """The folder of the sources: the recipe's folder, or the folder in the checkout that ``tree`` names."""
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """TOML tables of strings (or of tables of strings) that are specific to this recipe, by name."""
    architectures: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """By architecture (Debian's name): the tables that replace those of the same name in ``tables``."""

    def for_architecture(self, name: str) -> Recipe:
        """Return the recipe with the architecture's own tables in place of the general tables of the same name."""
        return replace(self, tables={**self.tables, **self.architectures.get(name, {})}, architectures={})

    def fingerprint(self) -> str:
        """Return the SHA-256 of the input files and of the recipe's data, except comments and tables of other versions.

        The tables of ``architectures`` are not included, so that a change for one architecture does not affect the
        products for another.
        """
        data = [self.name, self.title, self.source, self.inputs, self.outputs, dict(self.settings), dict(self.tables)]
        parts = json.dumps(data, sort_keys=True) + tree_fingerprint(self.sources, *self.inputs)
        return hashlib.sha256(parts.encode()).hexdigest()

    def require_outputs(self, folder: Path) -> None:
        """Raise ArtefactMissing unless every output exists."""
        for pattern in self.outputs:
            if not any(folder.glob(pattern)):
                raise ArtefactMissing(
                    f"recipe {self.name} did not produce all of its outputs",
                    expected=f"a file that matches {pattern}",
                    found=", ".join(sorted(path.name for path in folder.iterdir())) or "an empty folder",
                    fix="read the recipe's log, and compare the files that were found with the outputs in "
                    f"recipes/{self.folder.name}/recipe.toml",
                )


def load(name: str) -> Recipe:
    """Load the recipe in the folder called ``name``. Raises RecipeInvalid, which lists all errors in the data file.

    A recipe for several versions has a table ``versions.X`` for each. The table for the recipe's ``version`` is merged
    into the recipe's other data, and the version replaces ``{version}`` in the inputs. A table ``architectures.X``
    applies to the architecture X (``Recipe.for_architecture``).
    """
    path = HERE / name / "recipe.toml"
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as fault:
        known = ", ".join(sorted(item.parent.name for item in HERE.glob("*/recipe.toml")))
        raise RecipeInvalid(
            f"there is no recipe {name!r}", expected=f"one of {known}", found=f"no file {path}"
        ) from fault
    except tomllib.TOMLDecodeError as fault:
        raise RecipeInvalid(f"{path} is not valid TOML", found=str(fault), fix="correct the file") from fault
    if faults := _faults(data):
        raise RecipeInvalid(f"{path} is not a valid recipe", found="; ".join(faults), fix="correct the file")
    version = data.get("version", "")
    data.update(data.pop("versions", {}).get(version, {}))
    architectures = data.pop("architectures", {})
    return Recipe(
        name=data["name"],
        title=data["title"],
        source=data["source"],
        inputs=tuple(item.replace("{version}", version) for item in data["inputs"]),
        outputs=tuple(data["outputs"]),
        folder=path.parent,
        sources=HERE.parent / data["tree"] if "tree" in data else path.parent,
        settings={
            key: value
            for key, value in data.items()
            if key not in (*_TEXTS, *_LISTS, "tree") and isinstance(value, str)
        },
        tables={key: value for key, value in data.items() if isinstance(value, dict)},
        architectures=architectures,
    )


def _faults(data: Mapping[str, object]) -> list[str]:
    faults = [f"{key}: expected a string" for key in _TEXTS if not isinstance(data.get(key), str)]
    for key in _LISTS:
        value = data.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            faults.append(f"{key}: expected a list of glob patterns")
    if "source" in data and data["source"] not in _SOURCES:
        faults.append(f"source: expected one of {', '.join(_SOURCES)}, found {data['source']!r}")
    versions = data.get("versions")
    if isinstance(versions, dict) and data.get("version") not in versions:
        faults.append(f"version: expected one of {', '.join(versions)}, found {data.get('version')!r}")
    if data.get("outputs") == []:
        faults.append("outputs: expected at least one glob pattern")
    others = sorted(key for key in data if key not in (*_TEXTS, *_LISTS))
    return faults + [fault for key in others for fault in _not_texts(key, data[key])]


def _not_texts(name: str, value: object) -> list[str]:
    if isinstance(value, dict):
        return [fault for key, item in value.items() for fault in _not_texts(f"{name}.{key}", item)]
    return [] if isinstance(value, str) else [f"{name}: expected a string"]
