"""Where a wheel comes from: an in-toto statement with a SLSA provenance predicate, version 1.

It names the wheel by SHA-256, the source's files, every package of the builder image with its version, the compiler,
the options, and the recipe's key. It holds no path and no host name.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.torch.build import Built, Plan
from recipes.torch.source import Source
from toolchain.errors import ArtefactDamaged
from toolchain.files import sha256_of, write_text_atomically

BUILD_TYPE = "pitorch/recipes/torch/1"


def beside(wheel: Path) -> Path:
    """Where a wheel's statement lies."""
    return wheel.with_name(wheel.name.removesuffix(".whl") + ".provenance.json")


def artefact_key(recipe_key: str, versions: Mapping[str, str]) -> str:
    """The key of a finished wheel: SHA-256 over the recipe's and over what it was compiled with.

    ``versions`` are the compiler's own word and the version of every package of the builder image, by NAME:ARCH.
    """
    stated = {"recipe": recipe_key, "versions": dict(sorted(versions.items()))}
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def write(
    built: Built, plan: Plan, source: Source, *, key: str, versions: Mapping[str, str], began: float, path: Path
) -> Path:
    """Write the statement about what was built; its path. ``began`` is in Unix seconds."""
    dependencies: list[dict[str, Any]] = [
        {"name": name, "digest": {"sha256": digest}} for name, digest in sorted(source.files.items())
    ]
    dependencies += [
        {"uri": f"pkg:deb/debian/{name.partition(':')[0]}@{version}?arch={name.partition(':')[2]}"}
        for name, version in sorted(versions.items())
        if ":" in name
    ]
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": item.name, "digest": {"sha256": sha256_of(item)}} for item in (built.wheel, built.symbols)
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "recipeKey": key,
                    "source": source.identity,
                    "suite": plan.suite.name,
                    "architecture": plan.config.image.architecture,
                    "variant": plan.variant,
                    "options": dict(sorted(plan.options.items())),
                },
                "internalParameters": {
                    "compiler": versions.get("compiler", ""),
                    "vendored": [dict(item) for item in built.vendored],
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": "pitorch torch-builder image"},
                "metadata": {"startedOn": _moment(began), "finishedOn": _moment(time.time())},
                "byproducts": [
                    {
                        "name": "seconds",
                        "annotations": {name: round(value, 1) for name, value in built.seconds.items()},
                    },
                    {
                        "name": "ccache",
                        "annotations": {"hits": built.cache_hits, "calls": built.cache_calls},
                    },
                ],
            },
        },
    }
    write_text_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
    return path


def read(path: Path, wheel: Path) -> dict[str, Any]:
    """A statement's external parameters, after checking that it speaks of this very wheel. Raises ArtefactDamaged."""
    try:
        document = json.loads(path.read_text())
        stated = {item["name"]: item["digest"]["sha256"] for item in document["subject"]}
        parameters: dict[str, Any] = document["predicate"]["buildDefinition"]["externalParameters"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise ArtefactDamaged(
            f"{path.name} is no provenance statement", found=str(fault), mend="build or fetch the wheel anew"
        ) from fault
    found = sha256_of(wheel)
    if stated.get(wheel.name) != found:
        raise ArtefactDamaged(
            f"{wheel.name} is not the wheel that its provenance speaks of",
            expected=f"SHA-256 {stated.get(wheel.name, 'of another name')}",
            found=found,
            mend="build or fetch the wheel anew",
        )
    return parameters


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
