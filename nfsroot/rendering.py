"""Render templates; an undefined name is an error."""

from __future__ import annotations

from pathlib import Path

import jinja2

FOLDER = Path(__file__).resolve().parent / "templates"

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    autoescape=False,  # noqa: S701 - configuration files, not HTML
)


def render(name: str, **values: object) -> str:
    """Render ``templates/NAME.j2`` with ``values``."""
    return _environment.get_template(f"{name}.j2").render(**values)
