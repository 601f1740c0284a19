"""Write and read a wheel's provenance: an in-toto statement with a SLSA provenance predicate, version 1.

The statement contains the SHA-256 of the wheel, the source (its files, or upstream's commit), every package in the
builder image with its version, the compiler, the options, and the recipe's key. The statement does not contain
paths or host names from this PC.

Types are URIs (in-toto's TypeURI), packages are package URLs (ECMA-427), and a resource has a URI, a digest or its
content (in-toto's ResourceDescriptor).
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from recipes.torch.build import Built, Plan
from recipes.torch.source import Source
from toolchain.errors import ArtefactDamaged
from toolchain.files import sha256_of, write_text_atomically

BUILD_TYPE = "tag:pitorch,2026:recipes/torch/v1"
"""A tag URI (RFC 4151), which is not a link: docs/torch.md describes this type of build."""
BUILDER = "tag:pitorch,2026:torch-builder/v1"
"""The builder image on the user's PC."""
_PACKAGE_URL = re.compile(r"pkg:deb/debian/([^@?]+)@([^@?]+)\?arch=([^&]+)")


def path_for(wheel: Path) -> Path:
    """Return the path of a wheel's statement."""
    return wheel.with_name(wheel.name.removesuffix(".whl") + ".provenance.json")


def artefact_key(recipe_key: str, versions: Mapping[str, str]) -> str:
    """Return a finished wheel's key: the SHA-256 of the recipe's key and of the versions used to compile the wheel.

    ``versions`` contains the version of the compiler and of every package of the builder image, by NAME:ARCH.
    """
    stated = {"recipe": recipe_key, "versions": dict(sorted(versions.items()))}
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def write(
    built: Built, plan: Plan, source: Source, *, key: str, versions: Mapping[str, str], began: float, path: Path
) -> Path:
    """Write the statement about a build, and return its path. ``began`` is in Unix seconds."""
    dependencies = [
        *_source(plan, source),
        *({"uri": package_url(name, version)} for name, version in sorted(versions.items()) if ":" in name),
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
                "builder": {"id": BUILDER},
                "metadata": {"startedOn": _moment(began), "finishedOn": _moment(time.time())},
                "byproducts": [
                    _byproduct("seconds", {name: round(value, 1) for name, value in built.seconds.items()}),
                    _byproduct("ccache", {"hits": built.cache_hits, "calls": built.cache_calls}),
                ],
            },
        },
    }
    write_text_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
    return path


def package_url(name: str, version: str) -> str:
    """Return the package URL of Debian's package NAME:ARCHITECTURE.

    An example is ``pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=armhf``. All characters except letters, digits,
    ``.-_~`` and the colon are encoded (ECMA-427, 5.4).
    """
    package, _, architecture = name.partition(":")
    return f"pkg:deb/debian/{quote(package, safe=':')}@{quote(version, safe=':')}?arch={quote(architecture, safe=':')}"


def versions_of(wheel: Path) -> dict[str, str]:
    """Return the versions of the compiler and packages in a wheel's statement; empty if it lists none.

    The caller must have checked the statement with ``read``.
    """
    definition = json.loads(path_for(wheel).read_text())["predicate"]["buildDefinition"]
    compiler = definition.get("internalParameters", {}).get("compiler", "")
    uris = [item.get("uri", "") for item in definition.get("resolvedDependencies", [])]
    named = [parts for uri in uris if (parts := _PACKAGE_URL.fullmatch(uri))]
    packages = {f"{unquote(parts[1])}:{unquote(parts[3])}": unquote(parts[2]) for parts in named}
    return {**packages, **({"compiler": compiler} if compiler else {})}


def _source(plan: Plan, source: Source) -> list[dict[str, Any]]:
    """Describe the source by the files of a source package, or by upstream's commit, which also pins the submodules."""
    if source.kind == "git":
        table = plan.recipe.tables["git"]
        uri = f"git+{table['url']}@refs/tags/{table['tag']}"
        return [{"uri": uri, "digest": {"gitCommit": source.identity.removeprefix("git ")}}]
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(source.files.items())]


def _byproduct(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    """Return a byproduct that contains ``values`` twice: as encoded JSON and as readable annotations."""
    content = base64.b64encode(json.dumps(values, sort_keys=True).encode()).decode()
    return {"name": f"{name}.json", "mediaType": "application/json", "content": content, "annotations": dict(values)}


def read(path: Path, wheel: Path) -> dict[str, Any]:
    """Compare a wheel's SHA-256 with that in its statement; return the external parameters. Raises ArtefactDamaged."""
    try:
        document = json.loads(path.read_text())
        stated = {item["name"]: item["digest"]["sha256"] for item in document["subject"]}
        parameters: dict[str, Any] = document["predicate"]["buildDefinition"]["externalParameters"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise ArtefactDamaged(
            f"{path.name} is not a provenance statement", found=str(fault), fix="build or fetch the wheel again"
        ) from fault
    found = sha256_of(wheel)
    if stated.get(wheel.name) != found:
        raise ArtefactDamaged(
            f"{wheel.name} does not match its provenance",
            expected=f"SHA-256 {stated.get(wheel.name, '(the provenance has none for this file name)')}",
            found=found,
            fix="build or fetch the wheel again",
        )
    return parameters


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
