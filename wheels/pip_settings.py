"""Pass the package indices in this PC's pip configuration to build containers.

``pip config list`` prints the settings from pip.conf files and PIP_* variables. The settings for indices, certificates
and proxies are passed as PIP_* variables. Local paths in these settings (a folder of wheels, a ``file://`` index, a
certificate) are mounted read-only at the same path. Values may contain passwords, so they are passed only in the
container's environment, never on a command line or in a log.
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
    # "retries" is not passed, because only the messages about retries distinguish a missing network from a missing
    # package.
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host"),
    *("cert", "client-cert", "proxy", "timeout", "default-timeout", "constraint", "build-constraint"),
)
_LISTS = ("extra-index-url", "find-links", "trusted-host", "constraint", "build-constraint")
_EXPANDED = ("find-links", "cert", "client-cert")
"""The settings in which pip replaces ``~`` by the home folder."""
_SECTIONS = ("global", "download", "wheel", ":env:")
"""Sections that apply to ``pip wheel``; later ones take precedence."""
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class PipSettings:
    """A container's environment and mounts."""

    environment: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The mounts: a map from container path to host path."""

    def binds(self) -> list[str]:
        """Return the mounts in the format of the engine's API."""
        return [f"{source}:{target}:ro" for target, source in self.paths.items()]


def of_this_pc(find_links: Sequence[str] = (), constraints: Sequence[str] = ()) -> PipSettings:
    """Return the environment and mounts for this PC's pip settings.

    ``find_links`` lists additional folders with wheels in the container; ``constraints`` lists the URLs of additional
    constraints files.
    """
    argv = [sys.executable, "-m", "pip", "config", "list"]
    fix = "correct the file that pip names below"
    settings = parse(process.run(argv, merge_stderr=False, limit_s=60, fix=fix).output)
    if constraints:
        settings["constraint"] = " ".join([*settings.get("constraint", "").split(), *constraints])
    return for_container(settings, os.environ, find_links)


def parse(listing: str) -> dict[str, str]:
    """Return the settings in ``pip config list``'s output: ``section.name='value'``. Values are Python literals."""
    found: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
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


def for_container(settings: Mapping[str, str], environ: Mapping[str, str], find_links: Sequence[str]) -> PipSettings:
    """Return the container's environment and mounts for the given settings."""
    environment = {
        f"PIP_{key.upper().replace('-', '_')}": _expanded(settings[key]) if key in _EXPANDED else settings[key]
        for key in _OF_INDICES
        if settings.get(key)
    }
    environment |= {name: environ[name] for name in _CERTIFICATES if environ.get(name)}
    words = [
        word
        for name, value in environment.items()
        for word in (value.split() if name.removeprefix("PIP_").lower().replace("_", "-") in _LISTS else [value])
    ]
    named = [path for path in map(_local, words) if path is not None and path.exists()]
    # In a local index, the wheels are next to the folder "simple".
    folders = [path.parent if path.name == "simple" and path.is_dir() else path for path in named]
    paths = {str(path): path.resolve() for path in folders}
    if find_links:
        known = environment.get("PIP_FIND_LINKS", "")
        environment["PIP_FIND_LINKS"] = " ".join([*known.split(), *find_links])
    return PipSettings(environment, paths)


def _expanded(value: str) -> str:
    return " ".join(map(os.path.expanduser, value.split(" ")))  # Path.expanduser raises if there is no such user


def _local(word: str) -> Path | None:
    """Return the local path in a setting, or None if the setting contains none."""
    parts = urlsplit(word)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(word) if word.startswith("/") else None
