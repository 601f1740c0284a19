"""Rendering: a pure function of a template and its values; an undefined name is an error."""

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
    """The file that ``templates/NAME.j2`` makes of ``values``."""
    return _environment.get_template(f"{name}.j2").render(**values)
