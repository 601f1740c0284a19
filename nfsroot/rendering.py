"""Render the configuration files for the servers and the board."""

from __future__ import annotations

from pathlib import Path

from toolchain import templates

FOLDER = Path(__file__).resolve().parent / "templates"


def render(name: str, **values: object) -> str:
    """Return the text of ``templates/NAME.j2``, rendered with ``values``."""
    return templates.render(FOLDER / f"{name}.j2", values)
