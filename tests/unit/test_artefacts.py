"""Tests of the artefact cache: storing, verifying and replacing entries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from registry_parts import small_disk
from wheel_parts import make_wheel

from toolchain import progress
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactDamaged, DiskFull
from toolchain.files import sha256_of
from toolchain.manifest import Artefact
from wheels import artefacts

KEY = "0123456789abcdef" * 4
OTHER_KEY = "f" * 64


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"build": {"folder": str(tmp_path / "build")}})


def products(folder: Path, *, content: str = "x = 1\n") -> list[Path]:
    """Make a wheel, a symbol archive, and a provenance statement for both."""
    wheel = make_wheel(folder, {"thing.py": content})
    symbols = folder / "thing.symbols.tar.xz"
    symbols.write_bytes(b"symbols of " + content.encode())
    subjects = [{"name": item.name, "digest": {"sha256": sha256_of(item)}} for item in (wheel, symbols)]
    statement = folder / "thing.provenance.json"
    statement.write_text(json.dumps({"_type": "https://in-toto.io/Statement/v1", "subject": subjects}))
    return [wheel, symbols, statement]


def place_of(config: Config, key: str = KEY) -> Path:
    return config.build_root / "artefacts" / "thing" / key


def test_stored_files_are_returned_unchanged(config: Config, tmp_path: Path) -> None:
    made = products(tmp_path)
    stored = artefacts.put(config, "thing", KEY, made)
    found = artefacts.get(config, "thing", KEY)
    assert found == stored
    assert {path.name: path.read_bytes() for path in found} == {path.name: path.read_bytes() for path in made}
    assert {path.parent for path in found} == {place_of(config)}
    assert sorted(path.name for path in (config.build_root / "artefacts" / "thing").iterdir()) == [KEY]


def test_manifest_has_size_and_sha256_of_each_file(config: Config, tmp_path: Path) -> None:
    made = products(tmp_path)
    artefacts.put(config, "thing", KEY, made)
    document = json.loads((place_of(config) / "manifest.json").read_text())
    stated = {item["path"]: (item["size"], item["sha256"]) for item in document["artefacts"]}
    assert stated == {path.name: (path.stat().st_size, sha256_of(path)) for path in made}
    assert (document["step"], document["key"]) == ("thing", KEY)


def test_other_keys_and_names_are_not_found(config: Config, tmp_path: Path) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path))
    assert artefacts.get(config, "thing", OTHER_KEY) is None
    assert artefacts.get(config, "other", KEY) is None


def test_newest_entry_of_a_recipe_is_returned(config: Config, tmp_path: Path) -> None:
    recipe = "a" * 64
    older = artefacts.put(config, "thing", KEY, products(tmp_path / "older"), recipe=recipe)
    assert artefacts.of_recipe(config, "thing", recipe) == older
    newer = artefacts.put(config, "thing", OTHER_KEY, products(tmp_path / "newer", content="x = 2\n"), recipe=recipe)
    os.utime(place_of(config, OTHER_KEY) / "manifest.json", ns=(1 << 62, 1 << 62))
    artefacts.put(config, "thing", "e" * 64, products(tmp_path / "foreign"), recipe="b" * 64)
    artefacts.put(config, "thing", "d" * 64, products(tmp_path / "no-recipe"))
    assert artefacts.keys_of_recipe(config, "thing", recipe) == (OTHER_KEY, KEY)
    assert artefacts.of_recipe(config, "thing", recipe) == newer
    assert artefacts.get(config, "thing", KEY) == older
    assert artefacts.of_recipe(config, "thing", "c" * 64) is None


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("where", [0, -1])
def test_damaged_entries_are_renamed(config: Config, tmp_path: Path, which: int, where: int) -> None:
    stored = artefacts.put(config, "thing", KEY, products(tmp_path))
    spoilt = bytearray(stored[which].read_bytes())
    spoilt[where] ^= 1
    stored[which].chmod(0o644)
    stored[which].write_bytes(spoilt)
    with pytest.raises(ArtefactDamaged) as caught:
        artefacts.get(config, "thing", KEY)
    assert stored[which].name in str(caught.value)
    assert "SHA-256" in caught.value.expected
    assert artefacts.get(config, "thing", KEY) is None, "the entry must be gone, so that the next run builds it again"
    (aside,) = (config.build_root / "artefacts" / "thing").iterdir()
    assert aside.name.startswith(f"{KEY}.damaged-")
    assert str(aside) in caught.value.fix
    assert (aside / stored[which].name).read_bytes() == bytes(spoilt), "the damaged file must not be deleted"


@pytest.mark.parametrize("content", ["x = 1\n", "x = 2\n"], ids=["same bytes", "other bytes"])
def test_entry_replaced_during_a_read_is_not_renamed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Another process replaces a damaged entry while this process verifies the entry."""
    monkeypatch.setattr(progress, "warn", lambda _: None)
    stored = artefacts.put(config, "thing", KEY, products(tmp_path / "old"))
    stored[0].chmod(0o644)
    stored[0].write_bytes(b"damaged")
    verify = Artefact.verify
    new: list[tuple[Path, ...]] = []

    def verify_late(item: Artefact) -> None:
        try:
            verify(item)
        except ArtefactDamaged:
            new.append(artefacts.put(config, "thing", KEY, products(tmp_path / "new", content=content)))
            raise

    monkeypatch.setattr(Artefact, "verify", verify_late)
    assert artefacts.get(config, "thing", KEY) == new[0]
    assert len(new) == 1
    assert [path.name for path in place_of(config).parent.iterdir()] == [KEY]
    assert new[0][-1].read_bytes() == (tmp_path / "new" / new[0][-1].name).read_bytes()


def test_concurrent_readers_rename_a_damaged_entry_once(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = artefacts.put(config, "thing", KEY, products(tmp_path))
    stored[0].unlink()
    verify = Artefact.verify
    first: list[str] = []

    def verify_late(item: Artefact) -> None:
        monkeypatch.setattr(Artefact, "verify", verify)
        with pytest.raises(ArtefactDamaged):
            artefacts.get(config, "thing", KEY)
        first.extend(path.name for path in place_of(config).parent.iterdir())
        verify(item)

    monkeypatch.setattr(Artefact, "verify", verify_late)
    assert artefacts.get(config, "thing", KEY) is None
    assert [path.name for path in place_of(config).parent.iterdir()] == first


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_invalid_manifest_is_damage(config: Config, tmp_path: Path, text: str) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path))
    (place_of(config) / "manifest.json").write_text(text)
    with pytest.raises(ArtefactDamaged, match="not a complete artefact"):
        artefacts.get(config, "thing", KEY)
    assert artefacts.get(config, "thing", KEY) is None


def test_missing_file_is_damage(config: Config, tmp_path: Path) -> None:
    stored = artefacts.put(config, "thing", KEY, products(tmp_path))
    stored[0].unlink()
    with pytest.raises(ArtefactDamaged, match="is missing"):
        artefacts.get(config, "thing", KEY)


def test_manifest_cannot_name_files_in_other_folders(config: Config, tmp_path: Path) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path))
    path = place_of(config) / "manifest.json"
    document = json.loads(path.read_text())
    document["artefacts"][0]["path"] = "../../../elsewhere"
    path.write_text(json.dumps(document))
    with pytest.raises(ArtefactDamaged, match="lists files in other folders"):
        artefacts.get(config, "thing", KEY)


def test_entry_in_the_folder_of_another_key_is_damage(config: Config, tmp_path: Path) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path))
    place_of(config).rename(place_of(config, OTHER_KEY))
    with pytest.raises(ArtefactDamaged):
        artefacts.get(config, "thing", OTHER_KEY)


def test_storing_again_replaces_all_files(config: Config, tmp_path: Path) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path / "first"))
    wheel = make_wheel(tmp_path / "second", {"thing.py": "x = 1\n"})
    assert artefacts.put(config, "thing", KEY, [wheel]) == artefacts.get(config, "thing", KEY)
    assert sorted(path.name for path in place_of(config).iterdir()) == ["manifest.json", wheel.name]


def test_other_bytes_with_the_same_key_cause_a_warning(config: Config, tmp_path: Path, warned: list[str]) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path / "first"))
    artefacts.put(config, "thing", KEY, products(tmp_path / "same"))
    assert warned == []
    artefacts.put(config, "thing", KEY, products(tmp_path / "other", content="x = 2\n"))
    assert len(warned) == 2
    assert all("not reproducible" in line for line in warned)


def test_statement_with_other_digests_is_refused(config: Config, tmp_path: Path) -> None:
    made = products(tmp_path)
    made[1].write_bytes(b"other symbols")
    with pytest.raises(ArtefactDamaged, match="describes other files"):
        artefacts.put(config, "thing", KEY, made)
    assert artefacts.get(config, "thing", KEY) is None


@pytest.mark.parametrize(
    "text", ["", "{}", '{"subject": [{}]}', '{"subject": [{"name": "a", "digest": {"sha256": "b"}}]}']
)
def test_invalid_statement_is_refused(config: Config, tmp_path: Path, text: str) -> None:
    made = products(tmp_path)
    made[2].write_text(text)
    with pytest.raises(ArtefactDamaged):
        artefacts.put(config, "thing", KEY, made)


def test_missing_file_creates_no_entry(config: Config, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        artefacts.put(config, "thing", KEY, [*products(tmp_path), tmp_path / "nothing.whl"])
    assert not place_of(config).exists()


@pytest.mark.parametrize(
    ("name", "key"),
    [("../thing", KEY), ("Thing", KEY), ("", KEY), ("thing", ""), ("thing", "../" + KEY), ("thing", "xyz")],
)
def test_invalid_names_and_keys_are_refused(config: Config, tmp_path: Path, name: str, key: str) -> None:
    with pytest.raises(ValueError, match="invalid artefact name or key"):
        artefacts.put(config, name, key, products(tmp_path))
    with pytest.raises(ValueError, match="invalid artefact name or key"):
        artefacts.get(config, name, key)


def test_full_disk_keeps_the_old_entry(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        config = load_config({"build": {"folder": str(disk / "build")}})
        first = artefacts.put(config, "thing", KEY, products(tmp_path / "small"))
        before = first[0].read_bytes()
        large = tmp_path / "large.whl"
        large.write_bytes(os.urandom(4 << 20))
        with pytest.raises(DiskFull, match="disk space"):
            artefacts.put(config, "thing", KEY, [large])
        assert artefacts.get(config, "thing", KEY) == first
        assert first[0].read_bytes() == before
        assert [path.name for path in place_of(config).parent.iterdir()] == [KEY]


PUT = """
import os, signal, sys
from pathlib import Path
from wheels import artefacts
from toolchain.config import load_config
folder, name, key, number = sys.argv[1:5]

def between(event, arguments):
    if event == "os.rename" and os.fspath(arguments[1]).endswith("/replaced"):
        moved.append(True)
    elif event == "os.rename" and moved:
        os.kill(os.getpid(), int(number))

moved = []
sys.addaudithook(between)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
artefacts.put(load_config({"build": {"folder": folder}}), name, key, [Path(item) for item in sys.argv[5:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_between_renames_loses_no_entry(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path / "old"))
    new = products(tmp_path / "new", content="x = 2\n")
    words = [sys.executable, "-c", PUT, str(config.build_root), "thing", KEY, str(int(number)), *map(str, new)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (7, -signal.SIGINT), done.stderr
    found = artefacts.get(config, "thing", KEY)
    assert found is not None
    assert {path.name: path.read_bytes() for path in found} == {path.name: path.read_bytes() for path in new}
    assert [path.name for path in place_of(config).parent.iterdir()] == [KEY]


def test_concurrent_builds_leave_one_complete_entry(config: Config, tmp_path: Path) -> None:
    made = [products(tmp_path / str(number)) for number in range(6)]
    failed: list[BaseException] = []

    def put(paths: list[Path]) -> None:
        try:
            artefacts.put(config, "thing", KEY, paths)
        except BaseException as fault:
            failed.append(fault)

    threads = [threading.Thread(target=put, args=(paths,)) for paths in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert artefacts.get(config, "thing", KEY)
    assert [path.name for path in place_of(config).parent.iterdir()] == [KEY]


def test_entries_lists_all_entries(config: Config, tmp_path: Path) -> None:
    artefacts.put(config, "thing", KEY, products(tmp_path / "a"))
    artefacts.put(config, "thing", OTHER_KEY, products(tmp_path / "b"))
    (config.build_root / "artefacts" / "notes").mkdir()
    (place_of(config).parent / f"{KEY}.damaged-1").mkdir()
    assert [(item.name, item.key) for item in artefacts.entries(config)] == [("thing", KEY), ("thing", OTHER_KEY)]
    assert [item.tag for item in artefacts.entries(config)] == [f"thing-{KEY[:40]}", f"thing-{OTHER_KEY[:40]}"]
