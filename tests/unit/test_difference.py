"""Tests of ``diff`` on small trees, tars and bills of materials."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import urllib3.exceptions
from rich.console import Console

from nfsroot import difference
from nfsroot.difference import Change, Difference
from nfsroot.unpack import SourceImage
from toolchain.config import load_config
from toolchain.errors import CommandFailed, EngineUnavailable, UserError

CONFIG = load_config({})
RECORD = "usr/local/lib/python3.13/dist-packages/torch-2.6.0.dist-info/RECORD"


def paragraph(name: str, version: str, status: str = "install ok installed") -> str:
    return f"Package: {name}\nStatus: {status}\nArchitecture: armhf\nVersion: {version}\nDescription: a\n b: c\n"


def tree(folder: Path, packages: dict[str, str], files: dict[str, str]) -> Path:
    status = "\n".join(paragraph(name, version) for name, version in packages.items())
    gone = paragraph("gone", "1", "deinstall ok config-files")
    for name, content in {"var/lib/dpkg/status": f"{status}\n{gone}", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def sbom(path: Path, packages: dict[str, str], torch: str) -> Path:
    def item(purl: str, version: str, sha256: str) -> dict[str, object]:
        return {"purl": purl, "version": version, "hashes": [{"alg": "SHA-256", "content": sha256}]}

    debian = [item(f"pkg:deb/debian/{name}@{text}?arch=armhf", text, "") for name, text in packages.items()]
    source = item("pkg:deb/debian/dpkg@1?arch=source", "1", "")
    document = {"bomFormat": "CycloneDX", "components": [*debian, source, item("pkg:pypi/torch@2.6.0", "2.6.0", torch)]}
    path.write_text(json.dumps(document))
    return path


def compare(old: Path, new: Path) -> Difference:
    return difference.compare(CONFIG, str(old), str(new), folder=Path("/"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    old = tree(tmp_path / "old", {"dpkg": "1", "apt": "3"}, {"bin/a": "a", "bin/same": "s", RECORD: "one"})
    new = tree(tmp_path / "new", {"dpkg": "2", "zlib1g": "1"}, {"bin/b": "bb", "bin/same": "s", RECORD: "other"})
    return old, new


def test_packages_wheels_and_files_of_trees(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    assert [(item.name, item.old, item.new) for item in found.packages] == [
        ("apt:armhf", "3", ""),
        ("dpkg:armhf", "1", "2"),
        ("zlib1g:armhf", "", "1"),
    ]
    assert [item.name for item in found.wheels] == ["torch"]
    assert found.files is not None
    sizes = {item.name: (item.old_size, item.new_size) for item in found.files}
    assert (sizes["/bin/a"], sizes["/bin/b"]) == ((1, None), (None, 2))
    assert "/bin/same" not in sizes
    assert sizes[f"/{RECORD}"] == (3, 5)


def test_tree_equals_its_tar(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, _ = pair
    (old / "bin/link").symlink_to("same")
    os.link(old / "bin/same", old / "bin/hard")
    with tarfile.open(tmp_path / "old.tar.gz", "w:gz") as archive:
        archive.add(old, ".")
    found = compare(old, tmp_path / "old.tar.gz")
    assert (found.packages, found.wheels, found.files) == ((), (), ())
    assert found.old.size == found.new.size > 0


def test_changed_mode_and_link_are_differences(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, _ = pair
    new = tree(tmp_path / "other", {"dpkg": "1", "apt": "3"}, {"bin/a": "a", "bin/same": "s", RECORD: "one"})
    (new / "bin/a").chmod(0o4755)
    (old / "bin/l").symlink_to("a")
    (new / "bin/l").symlink_to("b")
    found = compare(old, new)
    assert found.files is not None
    assert [item.name for item in found.files] == ["/bin/a", "/bin/l"]
    assert found.files[0].new.startswith("-rwsr-xr-x ")


def test_bills_of_materials(tmp_path: Path) -> None:
    old = sbom(tmp_path / "old.json", {"dpkg": "1"}, "ab" * 32)
    new = sbom(tmp_path / "new.json", {"dpkg": "1:2+b1"}, "cd" * 32)
    found = compare(old, new)
    assert found.packages == (Change("dpkg:armhf", "1", "1:2+b1"),)
    assert found.wheels == (Change("torch", f"2.6.0 ({'ab' * 6})", f"2.6.0 ({'cd' * 6})"),)
    assert found.files is None


def test_bill_of_materials_and_tree(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = compare(sbom(tmp_path / "old.json", {"dpkg": "1", "apt": "3"}, "ab" * 32), pair[0])
    assert (found.packages, found.wheels, found.files) == ((), (), None)


def test_output_as_table_and_json(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    screen = io.StringIO()
    found.print(Console(file=screen, width=120))
    assert "packages: 3 differ" in screen.getvalue()
    assert "bytes: " in screen.getvalue()
    document = json.loads(found.as_json())
    assert document["bytes"]["new"] - document["bytes"]["old"] == found.new.size - found.old.size
    assert document["packages"][1] == {
        "name": "dpkg:armhf", "old": "1", "new": "2", "old_size": None, "new_size": None,
    }  # fmt: skip


def test_control_characters_are_not_printed(pair: tuple[Path, Path]) -> None:
    old, new = pair
    (new / "bin/\x1b]0;title\x07").write_text("")
    (new / os.fsdecode(b"bin/caf\xe9")).write_text("")
    tree(new, {"dpkg": "1\x1b[2J"}, {})
    screen = io.StringIO()
    compare(old, new).print(Console(file=screen, width=120))
    shown = screen.getvalue()
    assert "\x1b" not in shown
    assert r"/bin/\x1b]0;title\x07" in shown
    assert r"/bin/caf\udce9" in shown
    assert r"1\x1b[2J" in shown


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"components": [{}]}', '{"spdxVersion": 1, "packages": 3}'])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x\.json is not a bill of materials"):
        compare(tmp_path / "x.json", tmp_path / "x.json")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(UserError, match="is not a readable root filesystem"):
        compare(tmp_path / "text", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a root filesystem"):
        compare(tmp_path / "empty", tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        compare(tmp_path / "nothing", tmp_path)


@pytest.mark.parametrize("name", ["b.tar.xz", "b.tar.gz", "b.tar.bz2"])
def test_damaged_archives_are_refused(tmp_path: Path, name: str) -> None:
    content = " ".join(map(str, range(100_000)))
    path = tmp_path / name
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:  # type: ignore[call-overload]
        archive.add(tree(tmp_path / "tree", {"dpkg": "1"}, {"x": content, "y": content[::-1]}), ".")
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 40] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="is not a readable root filesystem"):
        compare(path, tmp_path / "tree")


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_the_end_of_an_archive_is_checked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"b.tar.{kind}"
    with tarfile.open(path, f"w:{kind}") as archive:  # type: ignore[call-overload]
        archive.add(tree(tmp_path / "tree", {"dpkg": "1"}, {}), ".")
    whole = path.read_bytes()
    compare(path, tmp_path / "tree")
    for damaged in (whole[:-1], whole[:-8], whole[:-3] + bytes([whole[-3] ^ 0x10]) + whole[-2:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is not a readable root filesystem"):
            compare(path, tmp_path / "tree")


def test_damage_that_only_a_checksum_detects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        archive.add(tree(tmp_path / "tree", {"dpkg": "1"}, {"x": "content"}), ".")
    path.write_bytes(path.read_bytes().replace(b"content", b"Content"))
    with pytest.raises(UserError, match="is not a readable root filesystem") as caught:
        compare(path, tmp_path / "tree")
    assert "CRC" in caught.value.found


def test_a_damaged_list_of_packages_is_refused(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"dpkg": "1"}, {})
    status = tree(tmp_path / "new", {"dpkg": "1"}, {}) / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("Version", "Wersion"))
    with pytest.raises(UserError, match="is not a readable root filesystem") as caught:
        compare(old, tmp_path / "new")
    assert caught.value.found == "a package without the field Version"


def test_an_archive_with_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(tree(tmp_path / "tree", {"dpkg": "1"}, {"x": "", "y": ""}), ".")
    with tarfile.open(path) as archive:
        offset = archive.getmember("./y").offset
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="is not a readable root filesystem") as caught:
        compare(path, tmp_path / "tree")
    assert caught.value.found == f"a damaged header at offset {offset}"


def test_a_hard_link_without_its_target_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tree(tmp_path / "tree", {"dpkg": "1"}, {}), ".")
        link = tarfile.TarInfo("usr/link")
        link.type, link.linkname = tarfile.LNKTYPE, "usr/missing"
        archive.addfile(link)
    with pytest.raises(UserError, match="is not a readable root filesystem") as caught:
        compare(tmp_path / "x.tar", tmp_path / "tree")
    assert caught.value.found == "the hard link usr/link to usr/missing, which is not in the archive before the link"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (None, CommandFailed),
        (urllib3.exceptions.ProtocolError("IncompleteRead"), EngineUnavailable),
        (requests.ConnectionError("connection reset"), EngineUnavailable),
    ],
)
def test_incomplete_export_of_an_image_is_reported(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, kind: type[UserError]
) -> None:
    """The engine's stream ends in the first file, with or without an error."""

    def export() -> Iterator[bytes]:
        item = tarfile.TarInfo("file")
        item.size = 5000
        yield item.tobuf() + bytes(1000)
        if fault is not None:
            raise fault

    source = SourceImage(reference="name", id="id", digests=(), size=5000, layers=())
    monkeypatch.setattr(difference, "connect", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(difference, "find_image", lambda *_: source)
    monkeypatch.setattr(difference, "container", lambda *_, **__: nullcontext(SimpleNamespace(export=export)))
    with pytest.raises(kind, match="export"):
        difference.read(CONFIG, "name", Path("/nonexistent"))
