"""Use the archive's Contents indices to find the packages that contain a build's missing files.

An index (``dists/SUITE/COMPONENT/Contents-ARCHITECTURE.gz``) is downloaded the first time that a build does not find a
file, and again after each update of the package lists. The index is used only for messages; packages are installed from
the verified lists.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3.exceptions

from images import apt
from toolchain import files, progress
from toolchain.config import Config

_LIMIT_S = 60.0
_GNU = r"(?:[\w-]+-linux-\w+/)?"
_MOST = 3
"""The maximum number of missing files that are looked up: the last ones in the output."""
_MISSING = re.compile(
    r"fatal error: '?(?P<header>[\w./+-]+)'?(?:: No such file or directory| file not found)"
    r"|cannot find -l(?P<library>[\w.+-]+)"
    r"|(?:No package|Package) '(?P<described>[\w.+-]+)'(?:,| found| was)"
    r'|Dependency "(?P<dependency>[\w.+-]+)" not found'
)


@dataclass(frozen=True)
class Missing:
    """A file that a build did not find."""

    name: str
    pattern: str
    """A regular expression for the file's path below ``/``."""
    default: str
    """A regular expression for the paths that compilers, linkers and pkg-config search by default."""


def missing_in(output: str) -> list[Missing]:
    """Return the last ``_MOST`` headers, libraries and pkg-config files that a build did not find; omit duplicates."""
    found: dict[Missing, None] = {}
    for line in _MISSING.finditer(output):
        if name := line["header"]:
            item = Missing(name, rf"usr/include/(?:\S+/)?{re.escape(name)}", rf"usr/include/{_GNU}{re.escape(name)}")
        elif name := line["library"]:
            pattern = rf"usr/lib/{_GNU}lib{re.escape(name)}\.(?:so|a)"
            item = Missing(f"lib{name}.so", pattern, pattern)
        else:
            name = line["described"] or line["dependency"]
            pattern = rf"usr/(?:lib|share)/{_GNU}pkgconfig/{re.escape(name)}\.pc"
            item = Missing(f"{name}.pc", pattern, pattern)
        found.pop(item, None)
        found[item] = None
    return list(found)[-_MOST:]


def advice(output: str, sources: Sequence[apt.Source], config: Config) -> str:
    """Return a line of advice for each missing file in a build's output, or an empty string if no file is missing.

    ``sources`` are the image's package sources.
    """
    wanted = missing_in(output)
    if not wanted:
        return ""
    owners: dict[Missing, list[str]] = {}
    searched = False
    for index in _indices(sources, config):
        searched = True
        owners |= owners_in(index, [item for item in wanted if item not in owners])
        if len(owners) == len(wanted):
            break
    return "\n".join(_line(item, owners.get(item, []), searched=searched) for item in wanted)


def owners_in(index: Path, wanted: Sequence[Missing]) -> dict[Missing, list[str]]:
    """Return, for each missing file that the index lists, the packages that contain it.

    If any package has the file in a default folder, packages that have it elsewhere are omitted.
    """
    default: dict[Missing, set[str]] = {}
    elsewhere: dict[Missing, set[str]] = {}
    pattern = re.compile("|".join(rf"(?:{item.pattern})" for item in wanted).encode())
    # A damaged index is treated like a missing one.
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(index) as stream:
        for line in filter(pattern.match, stream):
            path, _, where = line.decode(errors="replace").rpartition(" ")
            packages = {name.rpartition("/")[2] for name in where.strip().split(",")}
            for item in wanted:
                if re.fullmatch(item.pattern, path.strip()):
                    is_default = re.fullmatch(item.default, path.strip()) is not None
                    (default if is_default else elsewhere).setdefault(item, set()).update(packages)
    return {item: sorted(found) for item, found in {**elsewhere, **default}.items()}


def _line(item: Missing, packages: Sequence[str], *, searched: bool) -> str:
    if not packages:
        if searched:
            return f"{item.name} is missing, and no package of the distribution contains it."
        return f"{item.name} is missing. Use --package=NAME to install a package of the distribution for this build."
    options = " or ".join(f"--package={name}" for name in packages[:4])
    return f"{item.name} is missing. Add {options} to install it."


def _indices(sources: Sequence[apt.Source], config: Config) -> Iterator[Path]:
    """Yield the indices of the target's main archive.

    Indices that are missing or outdated are downloaded. An index that cannot be downloaded is omitted.
    """
    updated = (config.target_root / "mirror.manifest.json").stat().st_mtime if sources else 0.0
    for source in sources:
        if source.pocket.name != "main" or config.image.target.debian not in source.architectures:
            continue
        for component in source.components:
            for architecture in (config.image.target.debian, "all"):
                place = config.target_root / "contents" / f"{source.pocket.suite}-{component}-{architecture}.gz"
                current = place.is_file() and place.stat().st_mtime >= updated
                if current or _downloaded(source, component, architecture, place):
                    yield place


def _downloaded(source: apt.Source, component: str, architecture: str, place: Path) -> bool:
    uri = f"{source.uri.rstrip('/')}/dists/{source.pocket.suite}/{component}/Contents-{architecture}.gz"
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            progress.step("find packages with the missing files"),
            requests.get(uri, headers={"Accept-Encoding": "identity"}, timeout=_LIMIT_S, stream=True) as answer,
            files.replacing(place) as aside,
        ):
            answer.raise_for_status()
            with aside.open("wb") as sink:
                # Some servers declare the file as Content-Encoding: gzip, and iter_content would then decompress it.
                for block in answer.raw.stream(1 << 20, decode_content=False):
                    sink.write(block)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError):
        return False
    return True
