"""What one step hands to the next: a file, and beside it a manifest that says what the file is.

A manifest is JSON: the step's name and key, the inputs that made the key, the artefacts (path, size, SHA-256),
facts that later steps need (an image id, a package list), warnings that must not be forgotten, the seconds
the step took, and the commit of the checkout that made it. Paths are relative to the manifest, so a build folder can be
moved. The commit is no part of the key nor of the product: another one alone makes nothing anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain.errors import ArtefactDamaged, ArtefactMissing
from toolchain.files import sha256_of, write_text_atomically

SCHEMA = 1


@dataclass(frozen=True)
class Artefact:
    """A file that a step made. ``size`` is in bytes."""

    path: Path
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Artefact:
        """Measure a file."""
        return cls(path, path.stat().st_size, sha256_of(path))

    def verify(self) -> None:
        """Raise ArtefactMissing or ArtefactDamaged unless the file is as it was made."""
        if not self.path.is_file():
            raise ArtefactMissing(f"{self.path} is gone", fix="run the step that makes it again")
        found = Artefact.of(self.path)
        if found != self:
            raise ArtefactDamaged(
                f"{self.path} is not the file that its manifest states",
                expected=f"{self.size} bytes, SHA-256 {self.sha256}",
                found=f"{found.size} bytes, SHA-256 {found.sha256}",
                fix="delete it and run the step that makes it again",
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
    """``commit`` and ``dirty`` of the checkout that made it (toolchain.checkout); empty outside one."""

    @property
    def product(self) -> str:
        """SHA-256 over what was made: names and contents of the artefacts, and the facts."""
        made = [[item.path.name, item.sha256] for item in self.artefacts]
        text = json.dumps([made, dict(self.facts)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def artefact(self, suffix: str) -> Artefact:
        """The one artefact whose file name ends so."""
        found = [item for item in self.artefacts if item.path.name.endswith(suffix)]
        if len(found) != 1:
            raise ArtefactMissing(
                f"step {self.step} made {len(found)} files that end in {suffix!r}, expected one",
                fix=f"run the step again: ./inv build-image --again={self.step}",
            )
        return found[0]

    def write(self, path: Path) -> None:
        """Write the manifest, atomically; artefact paths become relative to it."""
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
        """The manifest at ``path``; None when there is none, or it is torn or of another schema."""
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
    """The manifest at ``path``, or ArtefactMissing that names the task which makes it."""
    manifest = Manifest.read(path)
    if manifest is None:
        raise ArtefactMissing(
            f"the product of `./inv {task}` is needed first",
            expected=f"its manifest at {path}",
            found="no readable manifest",
            fix=f"run ./inv {task}",
        )
    return manifest


def all_warnings(manifests: Sequence[Manifest]) -> list[str]:
    """Every warning, once, in order."""
    return list(dict.fromkeys(warning for manifest in manifests for warning in manifest.warnings))
