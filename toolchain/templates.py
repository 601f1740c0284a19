"""Render Jinja templates. If a template uses an undefined name, an exception is raised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jinja2


def render(template: Path, values: Mapping[str, object], *, trim_blocks: bool = False, html: bool = False) -> str:
    """Render a template with these values, and return the text.

    With ``trim_blocks``, a block tag on its own line leaves no blank line. With ``html``, values are escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=trim_blocks,
        lstrip_blocks=trim_blocks,
        keep_trailing_newline=True,
        autoescape=html,  # noqa: S701 - the other templates are configuration files
    )
    # YAML has no surrogate pairs, which JSON uses to escape characters such as emoji.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template(template.name).render(values)
