"""Which package of the distribution has a file that a build did not find: by the archive's Contents indices.

An index (``dists/SUITE/COMPONENT/Contents-ARCHITECTURE.gz``) is fetched when a build first misses a file, and kept
until the mirror is asked anew. It only serves to name a package in a message; what is installed comes by the verified
lists.
"""

from __future__ import annotations

import contextlib
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from images import apt
from images.recorded_sources import sources_of
from toolchain import files, progress
from toolchain.config import Config
from toolchain.manifest import Manifest

_LIMIT_S = 60.0
_GNU = r"(?:[\w-]+-linux-\w+/)?"
_MOST = 3
"""So many missing files are looked up: those that the output names last."""
_MISSING = re.compile(
    r"fatal error: '?(?P<header>[\w./+-]+)'?(?:: No such file or directory| file not found)"
    r"|cannot find -l(?P<library>[\w.+-]+)"
    r"|(?:No package|Package) '(?P<described>[\w.+-]+)'(?:,| found| was)"
    r'|Dependency "(?P<dependency>[\w.+-]+)" not found'
)


@dataclass(frozen=True)
class Missing:
    """A file that a build did not find: its name, and patterns of its path in a root."""

    name: str
    pattern: str
    near: str
    """Where a compiler finds it without being told."""


def missing_in(output: str) -> list[Missing]:
    """Headers, libraries and pkg-config files that a compiler, linker or pkg-config missed; the last few, each once."""
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


def advice(output: str, config: Config) -> str:
    """What to do about the files that a build did not find, a line each; empty where its output names none."""
    wanted = missing_in(output)
    if not wanted:
        return ""
    owners: dict[Missing, list[str]] = {}
    searched = False
    for index in _indices(config):
        searched = True
        owners |= owners_in(index, [item for item in wanted if item not in owners])
        if len(owners) == len(wanted):
            break
    return "\n".join(_line(item, owners.get(item, []), searched=searched) for item in wanted)


def owners_in(index: Path, wanted: Sequence[Missing]) -> dict[Missing, list[str]]:
    """The packages that have each file, of those files that the index has.

    Where a header lies in a folder that a compiler searches by itself, packages that have it elsewhere are left out.
    """
    near: dict[Missing, set[str]] = {}
    far: dict[Missing, set[str]] = {}
    pattern = re.compile("|".join(rf"(?:{item.pattern})" for item in wanted).encode())
    # A damaged index is as good as none.
    with contextlib.suppress(OSError, EOFError), gzip.open(index) as stream:
        for line in filter(pattern.match, stream):
            path, _, where = line.decode(errors="replace").rpartition(" ")
            packages = {name.rpartition("/")[2] for name in where.strip().split(",")}
            for item in wanted:
                if re.fullmatch(item.pattern, path.strip()):
                    is_near = re.fullmatch(item.near, path.strip()) is not None
                    (near if is_near else far).setdefault(item, set()).update(packages)
    return {item: sorted(found) for item, found in {**far, **near}.items()}


def _line(item: Missing, packages: Sequence[str], *, searched: bool) -> str:
    if not packages:
        if searched:
            return f"{item.name} is missing, and no package of the distribution has a file of that name."
        return f"{item.name} is missing. --package=NAME installs a package of the distribution for this build."
    options = " or ".join(f"--package={name}" for name in packages[:4])
    return f"{item.name} is missing. The distribution has it: add {options}"


def _indices(config: Config) -> Iterator[Path]:
    """The indices of the target's main archive, fetched where they are not there; none without a network."""
    mirror = config.target_root / "mirror.manifest.json"
    manifest = Manifest.read(mirror)
    for source in sources_of(manifest) if manifest else ():
        if source.pocket.name != "main" or config.image.target.debian not in source.architectures:
            continue
        for component in source.components:
            for architecture in (config.image.target.debian, "all"):
                place = config.target_root / "contents" / f"{source.pocket.suite}-{component}-{architecture}.gz"
                current = place.is_file() and place.stat().st_mtime >= mirror.stat().st_mtime
                if current or _fetched(source, component, architecture, place):
                    yield place


def _fetched(source: apt.Source, component: str, architecture: str, place: Path) -> bool:
    uri = f"{source.uri.rstrip('/')}/dists/{source.pocket.suite}/{component}/Contents-{architecture}.gz"
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            progress.step("which package has the missing files"),
            requests.get(uri, timeout=_LIMIT_S, stream=True) as answer,
            files.replacing(place) as aside,
        ):
            answer.raise_for_status()
            with aside.open("wb") as sink:
                for block in answer.iter_content(1 << 20):
                    sink.write(block)
    except (requests.RequestException, OSError):
        return False
    return True
