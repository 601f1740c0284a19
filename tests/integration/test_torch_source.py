"""Tests of torch's source package, whose archives are checked against the pinned description on every use."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from apt_parts import Archive
from http_parts import served

from flow.context import Context
from flow.steps import torch_source
from images import apt
from images.flavour import load_suite
from recipes import recipe
from recipes.torch import source
from toolchain.config import load_config
from toolchain.errors import SourceUnavailable
from toolchain.files import sha256_of
from toolchain.manifest import Manifest

CONTENTS = {"small_1.0.orig.tar.xz": b"upstream's" * 99, "small_1.0-1.debian.tar.xz": b"the distribution's"}
ORIGINAL = "small_1.0.orig.tar.xz"
DSC = "small_1.0-1.dsc"


def sums(contents: dict[str, bytes]) -> str:
    """Return the checksum lines in a description or an index."""
    return "".join(f" {hashlib.sha256(text).hexdigest()} {len(text)} {name}\n" for name, text in contents.items())


class Package:
    """A source package in a signed local archive, and the recipe that pins it."""

    def __init__(self, archive: Archive, folder: Path) -> None:
        self.archive, self.folder = archive, folder
        self.pool = archive.folder / "pool"
        self.pool.mkdir(exist_ok=True)
        text = (
            "Format: 3.0 (quilt)\nSource: small\nBinary: small\nArchitecture: all\nVersion: 1.0-1\n"
            f"Maintainer: Nobody <nobody@example.org>\nChecksums-Sha256:\n{sums(CONTENTS)}Files:\n"
        )
        text += "".join(f" {hashlib.md5(made).hexdigest()} {len(made)} {name}\n" for name, made in CONTENTS.items())  # noqa: S324
        for name, content in {**CONTENTS, DSC: text.encode()}.items():
            (self.pool / name).write_bytes(content)
        self._index({**CONTENTS, DSC: text.encode()})
        data = recipe.load("torch")
        pins = {"package": "small", "trixie": "1.0-1", "trixie_sha256": sha256_of(self.pool / DSC)}
        self.recipe = dataclasses.replace(data, tables={**data.tables, "archive": pins})
        self.place = folder / "small-1.0-1"
        self.sources: tuple[apt.Source, ...] = ()

    def _index(self, contents: dict[str, bytes]) -> None:
        """Write and sign the archive's source index."""
        dist = self.archive.folder / "dists" / "stone"
        stanza = (
            "Package: small\nBinary: small\nVersion: 1.0-1\nMaintainer: Nobody <nobody@example.org>\n"
            f"Architecture: all\nFormat: 3.0 (quilt)\nDirectory: pool\nChecksums-Sha256:\n{sums(contents)}\n"
        )
        packed = gzip.compress(stanza.encode(), mtime=0)
        (dist / "main" / "source").mkdir(exist_ok=True)
        (dist / "main" / "source" / "Sources.gz").write_bytes(packed)
        lines = ["Suite: stone", "Codename: stone", "Architectures: armhf", "Components: main"]
        lines += ["Date: Thu, 01 Jan 2026 00:00:00 UTC", "SHA256:"]
        listed = sums({"main/source/Sources.gz": packed, "main/source/Sources": stanza.encode()})
        (dist / "Release").write_text("\n".join(lines) + "\n" + listed)
        self.archive.sign("stone")

    def obtain(self) -> source.Source:
        """Fetch and verify the source, as the step does."""
        log = self.folder / "log"
        return source.obtain(self.recipe, load_suite("trixie"), "archive", self.sources, self.folder, log)

    @property
    def missing(self) -> str:
        """Return what the step's ``missing`` check reports."""
        return source.missing(self.recipe, load_suite("trixie"), "archive", self.place)


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Package]:
    (tmp_path / "archive").mkdir()
    archive = Archive(tmp_path / "archive")
    with served(archive.folder) as uri:
        made = Package(archive, tmp_path / "sources")
        made.sources = (archive.source("stone", uri, "main"),)
        yield made
    archive.close()


def test_the_source_is_fetched_only_from_debian(package: Package) -> None:
    """If all archives were searched, those of Raspbian and Raspberry Pi would have to be available."""
    (debian,) = package.sources
    others = [dataclasses.replace(debian, uri="http://127.0.0.1:1", archive=name) for name in ("raspbian", "else")]
    package.sources = (*others, debian)
    assert package.obtain().files


@pytest.mark.parametrize("spoil", ["cut short", "changed", "gone"])
def test_a_damaged_archive_is_fetched_again(package: Package, warned: list[str], spoil: str) -> None:
    first = package.obtain()
    assert first.files == {name: sha256_of(package.pool / name) for name in sorted((*CONTENTS, DSC))}
    assert (package.missing, warned) == ("", [])
    path = package.place / ORIGINAL
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes(b"X" * 9 if spoil == "cut short" else b"X" * len(CONTENTS[ORIGINAL]))
    assert package.missing == f"{ORIGINAL} is missing or damaged"
    assert package.obtain() == first
    assert path.read_bytes() == CONTENTS[ORIGINAL]
    assert len(warned) == 1
    assert warned[0].startswith(f"{ORIGINAL} does not match the checksum in {DSC} (")
    assert package.missing == ""


def test_a_damaged_description_is_fetched_again(package: Package, warned: list[str]) -> None:
    first = package.obtain()
    path = package.place / DSC
    path.write_bytes(path.read_bytes()[:-9])
    assert package.missing == f"{DSC} is missing or damaged"
    assert package.obtain() == first
    assert len(warned) == 1
    assert warned[0].startswith(f"{DSC} does not match the checksum in the recipe (SHA-256 ")
    assert package.missing == ""


def test_a_source_other_than_the_pinned_one_is_rejected(package: Package, warned: list[str]) -> None:
    pins = {**package.recipe.tables["archive"], "trixie_sha256": "0" * 64}
    package.recipe = dataclasses.replace(package.recipe, tables={**package.recipe.tables, "archive": pins})
    for number in range(2):
        with pytest.raises(SourceUnavailable, match="not the source that the recipe pins") as caught:
            package.obtain()
        assert caught.value.found == sha256_of(package.pool / DSC)
        assert len(warned) == number, "the files of the previous run must be checked again"


def test_other_files_next_to_the_package_are_ignored(package: Package) -> None:
    first = package.obtain()
    (package.place / "notes.txt").write_text("mine")
    assert package.obtain() == first


@pytest.mark.usefixtures("apt_without_delays")
def test_a_damaged_archive_is_never_used(package: Package, warned: list[str]) -> None:
    package.obtain()
    (package.place / ORIGINAL).write_bytes(b"X")
    mirror, package.sources = (
        package.sources,
        tuple(dataclasses.replace(item, uri="http://127.0.0.1:9/debian") for item in package.sources),
    )
    with pytest.raises(SourceUnavailable, match="cannot be fetched"):
        package.obtain()
    assert len(warned) == 1
    package.sources = mirror
    package.obtain()


def test_a_wrong_archive_is_reported_with_both_checksums(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = apt.fetch_source

    def fetched_badly(sources: tuple[apt.Source, ...], name: str, version: str, folder: Path, log: Path) -> None:
        fetch(sources, name, version, folder, log)
        (folder / ORIGINAL).write_bytes(b"X")

    monkeypatch.setattr(apt, "fetch_source", fetched_badly)
    with pytest.raises(SourceUnavailable, match=r"small 1\.0-1 is damaged") as caught:
        package.obtain()
    assert caught.value.expected == f"{ORIGINAL} with SHA-256 {hashlib.sha256(CONTENTS[ORIGINAL]).hexdigest()}"
    assert caught.value.found == f"SHA-256 {hashlib.sha256(b'X').hexdigest()}, 1 bytes"


def test_the_step_detects_a_damaged_source(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load", lambda _: package.recipe)
    with Context(load_config({"build": {"folder": str(tmp_path)}})) as context:
        step = torch_source.step(context)
        found = package.obtain()
        facts = {"kind": "archive", "folder": found.folder.name, "identity": found.identity, "files": found.files}
        recorded = Manifest(step="torch-source", key="", inputs={}, facts=facts)
        assert step.missing(recorded) == ""
        (package.place / ORIGINAL).write_bytes(b"X")
        assert step.missing(recorded) == f"{ORIGINAL} is missing or damaged"
