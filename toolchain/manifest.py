"""A manifest describes the files that a step created, and passes facts to later steps.

A manifest is a JSON file with the step's name and key, the key's inputs, the artefacts (path, size, SHA-256), facts for
later steps (such as an image ID or a package list), warnings, the duration in seconds, and the checkout's commit. Paths
are relative to the manifest, so that a build folder can be moved. The commit is part of neither the key nor the
product, so a different commit alone does not cause a step to run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import caller
from toolchain.errors import ArtefactDamaged, ArtefactMissing, UserError
from toolchain.files import sha256_of, write_text_atomically

SCHEMA = 1


@dataclass(frozen=True)
class Artefact:
    """A file that a step created. ``size`` is in bytes."""

    path: Path
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Artefact:
        """Return the artefact for a file, with its size and SHA-256."""
        return cls(path, path.stat().st_size, sha256_of(path))

    def verify(self) -> None:
        """Raise ArtefactMissing if the file is missing, or ArtefactDamaged if it has changed since it was created."""
        if not self.path.is_file():
            raise ArtefactMissing(f"{self.path} is missing", fix="run the task that creates the file")
        found = Artefact.of(self.path)
        if found != self:
            raise ArtefactDamaged(
                f"{self.path} does not match its manifest",
                expected=f"{self.size} bytes, SHA-256 {self.sha256}",
                found=f"{found.size} bytes, SHA-256 {found.sha256}",
                fix="delete the file, then run the task that creates the file",
            )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of one finished step."""

    step: str
    key: str
    inputs: Mapping[str, str]
    artefacts: tuple[Artefact, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    source: Mapping[str, Any] = field(default_factory=dict)
    """``commit`` and ``dirty`` of the checkout (toolchain.checkout); empty outside a checkout."""

    @property
    def product(self) -> str:
        """The SHA-256 of the product: the artefacts' names and contents, and the facts."""
        made = [[item.path.name, item.sha256] for item in self.artefacts]
        text = json.dumps([made, dict(self.facts)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def artefact(self, suffix: str) -> Artefact:
        """Return the only artefact whose file name has this suffix."""
        found = [item for item in self.artefacts if item.path.name.endswith(suffix)]
        if len(found) != 1:
            raise ArtefactMissing(
                f"step {self.step} made {len(found)} files whose names end in {suffix!r}, expected exactly one",
                fix=f"run the step again: ./inv build-image --again={self.step}",
            )
        return found[0]

    def write(self, path: Path) -> None:
        """Write the manifest atomically, with relative artefact paths."""
        document = {
            "schema": SCHEMA,
            "step": self.step,
            "key": self.key,
            "inputs": dict(self.inputs),
            "artefacts": [
                {"path": os.path.relpath(item.path, path.parent), "size": item.size, "sha256": item.sha256}
                for item in self.artefacts
            ],
            "facts": dict(self.facts),
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            **({"source": dict(self.source)} if self.source else {}),
        }
        write_text_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Return the manifest at ``path``, or None if it does not exist, is incomplete or has another schema.

        Raises UserError if it is not a regular file, or OSError if it cannot be read.
        """
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading a FIFO would block
            raise UserError(
                f"{path} is not a regular file",
                expected="a manifest, or no file with this name",
                found="a FIFO, a socket or a device",
                fix=f"remove {path}, and run the task again",
            )
        try:
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                return None
            return cls(
                step=document["step"],
                key=document["key"],
                inputs=document["inputs"],
                artefacts=tuple(
                    Artefact(Path(os.path.normpath(path.parent / item["path"])), item["size"], item["sha256"])
                    for item in document["artefacts"]
                ),
                facts=document["facts"],
                warnings=tuple(document["warnings"]),
                seconds=document["seconds"],
                source=dict(document.get("source", {})),
            )
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None


def require(path: Path, task: str) -> Manifest:
    """Return the manifest at ``path``. Raises ArtefactMissing, with advice to run ``task``, if it cannot be read."""
    manifest = Manifest.read(path)
    if manifest is None:
        raise ArtefactMissing(
            f"the output of `./inv {task}` is required",
            expected=f"its manifest at {path}",
            found="no readable manifest",
            fix=f"run {caller.command(task)}",
        )
    return manifest


def is_made_from(made: Manifest, need: Manifest) -> bool:
    """Return whether a step used the product that the manifest ``need`` describes."""
    return made.inputs.get(f"needs:{need.step}") == need.product


def have_same_needs(one: Manifest, other: Manifest) -> bool:
    """Return whether two steps need some of the same steps, and used the same products of all of these.

    For example, the system image and its bill of materials must have the same needs.
    """
    shared = {name for name in one.inputs if name.startswith("needs:")} & other.inputs.keys()
    return bool(shared) and all(one.inputs[name] == other.inputs[name] for name in shared)


def all_warnings(manifests: Sequence[Manifest]) -> list[str]:
    """Return all warnings without duplicates, in order."""
    return list(dict.fromkeys(warning for manifest in manifests for warning in manifest.warnings))
