"""Where this PC's pip gets packages from, carried into build containers.

pip is asked for its settings (``pip config list``: pip.conf files and PIP_* variables together, in pip's own order of
precedence); those about indices, certificates and proxies are handed on as PIP_* variables. What they name on this
PC's disk (a folder of wheels, a ``file://`` index, a certificate) is mounted at the same path, read-only. Values may
hold passwords: they go into the container's environment only, never onto a command line or into a log.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from toolchain import process

_OF_INDICES = (
    # Not retries: it is by pip's words about them that an absent network is told from an absent package.
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host"),
    *("cert", "client-cert", "proxy", "timeout", "default-timeout", "constraint", "build-constraint"),
)
_LISTS = ("extra-index-url", "find-links", "trusted-host", "constraint", "build-constraint")
_SECTIONS = ("global", "download", "wheel", ":env:")
"""Sections that count for ``pip wheel``, the later wins."""
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class PipSettings:
    """Environment of a container, and what must be mounted for it: container path to host path."""

    environment: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    def binds(self) -> list[str]:
        """As the engine's API takes them."""
        return [f"{source}:{target}:ro" for target, source in self.paths.items()]


def of_this_pc(find_links: Sequence[str] = (), constraints: Sequence[str] = ()) -> PipSettings:
    """What pip on this PC goes by.

    ``find_links`` are further folders of wheels in the container, ``constraints`` further files on this PC (absolute
    paths), or addresses.
    """
    told = process.run([sys.executable, "-m", "pip", "config", "list"], merge_stderr=False, limit_s=60).output
    settings = parse(told)
    if constraints:
        settings["constraint"] = " ".join([*settings.get("constraint", "").split(), *constraints])
    return carried(settings, os.environ, find_links)


def parse(told: str) -> dict[str, str]:
    """Settings out of ``pip config list``: lines of ``section.name='value'``, the value as Python writes it."""
    found: dict[str, dict[str, str]] = {}
    for line in told.splitlines():
        name, equals, text = line.partition("=")
        section, _, key = name.rpartition(".")
        if not equals or section not in _SECTIONS:
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue
        found.setdefault(section, {})[key.replace("_", "-")] = " ".join(str(value).split())
    return {key: value for section in _SECTIONS for key, value in found.get(section, {}).items()}


def carried(settings: Mapping[str, str], environ: Mapping[str, str], find_links: Sequence[str]) -> PipSettings:
    """The container's environment for pip's settings, and the mounts that they need."""
    environment = {f"PIP_{key.upper().replace('-', '_')}": settings[key] for key in _OF_INDICES if settings.get(key)}
    environment |= {name: environ[name] for name in _CERTIFICATES if environ.get(name)}
    words = [
        word
        for name, value in environment.items()
        for word in (value.split() if name.removeprefix("PIP_").lower().replace("_", "-") in _LISTS else [value])
    ]
    named = [path for path in map(_local, words) if path is not None and path.exists()]
    # An index in files has its files beside it.
    folders = [path.parent if path.name == "simple" and path.is_dir() else path for path in named]
    paths = {str(path): path.resolve() for path in folders}
    if find_links:
        known = environment.get("PIP_FIND_LINKS", "")
        environment["PIP_FIND_LINKS"] = " ".join([*known.split(), *find_links])
    return PipSettings(environment, paths)


def _local(word: str) -> Path | None:
    """The path on this PC that a setting names, or None."""
    parts = urlsplit(word)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(word) if word.startswith("/") else None
