"""Convert package sources to and from the form in which the manifest of the step ``mirror`` records them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images.apt import Source
from images.flavour import Pocket
from toolchain.manifest import Manifest


def sources_of(mirror: Manifest) -> tuple[Source, ...]:
    """Return the verified sources that the manifest records."""
    return tuple(source_of(record) for record in mirror.facts["sources"])


def record_of(source: Source) -> dict[str, Any]:
    """Return a source as JSON, without default values, so that manifests of earlier versions remain valid."""
    record = {**dataclasses.asdict(source), "keyring": str(source.keyring)}
    defaults = {item.name: item.default for item in dataclasses.fields(source)}
    return {name: value for name, value in record.items() if value != defaults[name]}


def source_of(record: Mapping[str, Any]) -> Source:
    """Return the source that ``record_of`` recorded."""
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list | tuple)}
    pocket, keyring = Pocket(**record["pocket"]), Path(record["keyring"])
    return Source(**{**record, **lists, "pocket": pocket, "keyring": keyring})
