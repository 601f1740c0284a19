"""Determine the package sources of a configuration."""

from __future__ import annotations

from flow.context import Context
from images import apt


def sources(context: Context) -> tuple[apt.Source, ...]:
    """Return all configured package sources, verified or not."""
    return apt.sources_for(context.config, context.keyrings)
