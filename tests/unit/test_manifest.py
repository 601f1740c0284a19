"""Tests of manifests: writing, reading, and the detection of changed files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from toolchain.errors import ArtefactDamaged, ArtefactMissing, UserError
from toolchain.manifest import Artefact, Manifest, all_warnings, require


def made_in(folder: Path, *, names: tuple[str, ...] = ("root.tar",)) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"content of {name}")
    return Manifest(
        step="rootfs",
        key="k" * 64,
        inputs={"suite": "trixie"},
        artefacts=tuple(Artefact.of(folder / name) for name in names),
        facts={"image": "sha256:1", "packages": ["a", "b"]},
        warnings=("pocket left out",),
        seconds=1.23456,
    )


def test_a_written_manifest_is_read_back(tmp_path: Path) -> None:
    """The manifest has no commit, like those outside a checkout."""
    manifest = made_in(tmp_path)
    manifest.write(tmp_path / "rootfs.manifest.json")
    assert "source" not in json.loads((tmp_path / "rootfs.manifest.json").read_text())
    assert Manifest.read(tmp_path / "rootfs.manifest.json") == dataclasses.replace(manifest, seconds=1.235)


def test_relative_paths_allow_moving_the_folder(tmp_path: Path) -> None:
    (tmp_path / "old" / "manifests").mkdir(parents=True)
    made_in(tmp_path / "old" / "products").write(tmp_path / "old" / "manifests" / "m.json")
    assert str(tmp_path) not in (tmp_path / "old" / "manifests" / "m.json").read_text()
    (tmp_path / "old").rename(tmp_path / "new")
    read = Manifest.read(tmp_path / "new" / "manifests" / "m.json")
    assert read is not None
    assert read.artefacts[0].path == tmp_path / "new" / "products" / "root.tar"
    read.artefacts[0].verify()


def test_the_same_manifest_gives_the_same_text(tmp_path: Path) -> None:
    made_in(tmp_path).write(tmp_path / "one.json")
    dataclasses.replace(made_in(tmp_path), inputs=dict(made_in(tmp_path).inputs)).write(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert (tmp_path / "one.json").read_text().endswith("}\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "{}",
        '{"schema": 1}',
        '{"schema": 2}',
        '{"schema": 1, "step": "s", "key": "k", "inputs": {}, "artefacts": [1], "facts": {}, "warnings": []}',
        '{"schema": 1, "step": "s", "key": "k", "inputs": {}, "artefacts": [{}], "facts": {}, "warnings": []}',
        b"\xff\xfe",
    ],
)
def test_an_invalid_manifest_is_ignored(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert Manifest.read(path) is None


def test_an_earlier_schema_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    made_in(tmp_path).write(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"schema": 0}))
    assert Manifest.read(path) is None


def test_a_missing_manifest_is_none(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path / "m.json") is None
    (tmp_path / "file").write_text("")
    assert Manifest.read(tmp_path / "file" / "m.json") is None


@pytest.mark.timeout(20)
def test_a_manifest_must_be_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            Manifest.read(tmp_path / name)
    Manifest(step="s", key="k", inputs={}).write(tmp_path / "made")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("made")
    assert Manifest.read(tmp_path / "link") is not None


def test_the_product_covers_names_contents_and_facts(tmp_path: Path) -> None:
    one, two = made_in(tmp_path / "one"), made_in(tmp_path / "two")
    assert dataclasses.replace(two, seconds=9, inputs={}, key="x", warnings=()).product == one.product
    assert dataclasses.replace(one, facts={}).product != one.product
    assert made_in(tmp_path / "two", names=("other.tar",)).product != one.product
    (tmp_path / "two" / "root.tar").write_text("changed")
    changed = dataclasses.replace(one, artefacts=(Artefact.of(tmp_path / "two" / "root.tar"),))
    assert changed.product != one.product


def test_an_artefact_is_found_by_its_suffix(tmp_path: Path) -> None:
    manifest = made_in(tmp_path, names=("a.tar", "b.whl"))
    assert manifest.artefact(".whl").path.name == "b.whl"
    with pytest.raises(ArtefactMissing, match=r"made 0 files whose names end in '\.deb'") as caught:
        manifest.artefact(".deb")
    assert caught.value.fix == "run the step again: ./inv build-image --again=rootfs"
    with pytest.raises(ArtefactMissing, match="made 2 files"):
        made_in(tmp_path, names=("a.tar", "b.tar")).artefact(".tar")


def test_a_changed_file_is_detected(tmp_path: Path) -> None:
    artefact = made_in(tmp_path).artefacts[0]
    artefact.verify()
    artefact.path.write_text("Content of root.tar")
    with pytest.raises(ArtefactDamaged, match="does not match its manifest") as damaged:
        artefact.verify()
    assert damaged.value.exit_code == 26
    assert artefact.sha256 in damaged.value.expected
    artefact.path.unlink()
    with pytest.raises(ArtefactMissing, match="is missing") as missing:
        artefact.verify()
    assert missing.value.exit_code == 25


def test_a_missing_product_names_the_task_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match=r"fix: +run \./inv build-image"):
        require(tmp_path / "system.manifest.json", "build-image")
    made_in(tmp_path).write(tmp_path / "system.manifest.json")
    assert require(tmp_path / "system.manifest.json", "build-image").step == "rootfs"


def test_all_warnings_removes_duplicates_in_order(tmp_path: Path) -> None:
    one = made_in(tmp_path)
    two = dataclasses.replace(one, warnings=("first", "pocket left out", "second"))
    assert all_warnings([one, two]) == ["pocket left out", "first", "second"]
    assert all_warnings([]) == []
