"""Fetch and verify the mirror's package lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flow.context import Context
from images import apt
from images.recorded_sources import record_of
from toolchain import progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that fetches and verifies the archives' keys and the package lists."""
    wanted = apt.sources_for(context.config, context.keyrings)

    def missing(_: Manifest) -> str:
        if not all(item.keyring.is_file() for item in wanted if item.keyring.parent == context.keyrings):
            return "the key of an archive is missing"
        return "" if (context.root / "mirror" / "lists").is_dir() else "its package lists are missing"

    def action(_: Mapping[str, Manifest]) -> Made:
        apt.fetch_keys(context.config, context.keyrings)
        verified = apt.verify(wanted, context.root / "mirror", strict=context.image.strict)
        for warning in verified.warnings:
            progress.warn(warning)
        return Made(
            facts={
                "indices": verified.indices,
                "sources": [record_of(item) for item in verified.sources],
                "names": verified.names,
            },
            warnings=verified.warnings,
        )

    return Step(
        name="mirror",
        title="apt mirror",
        code=__name__,
        inputs={
            "sources": "; ".join(item.line for item in wanted),
            "strict": str(context.image.strict),
            **({"limits": limits} if (limits := _limits(wanted)) else {}),
        },
        action=action,
        missing=missing,
    )


def _limits(sources: Sequence[apt.Source]) -> str:
    """Return as text the archives from which only certain packages may be used, and the names of these packages."""
    return "; ".join(dict.fromkeys(f"{item.archive}: {' '.join(item.only)}" for item in sources if item.only))
