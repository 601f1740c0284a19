"""Tests of atomic replacement, folder ownership, fingerprints, reproducible tars, full disks and locks."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest
from registry_parts import small_disk

from toolchain import files, leftovers
from toolchain.errors import DiskFull, UserError


def write(path: Path, text: str = "", *, mode: int = 0o644, mtime: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    if mtime:
        os.utime(path, (mtime, mtime))
    return path


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_sha256_of_hashes_the_content(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"z" * size)
    assert files.sha256_of(path) == hashlib.sha256(b"z" * size).hexdigest()


def test_write_text_atomically_sets_mode_and_creates_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text"
    files.write_text_atomically(path, "öne\n", mode=0o600)
    assert path.read_text() == "öne\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["text"]


def test_a_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = {letter * 400_000 for letter in "ab"}
    files.write_text_atomically(path, "a" * 400_000)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            for text in sorted(texts):
                files.write_text_atomically(path, text)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {path.read_text() for _ in range(200)}
    finally:
        stop.set()
        writer.join()
    assert seen <= texts


@pytest.mark.parametrize("fault", [ValueError("broken"), KeyboardInterrupt()])
def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path, fault: BaseException) -> None:
    path = write(tmp_path / "file", "old")

    def fail() -> None:
        with files.replacing(path) as aside:
            aside.write_text("half")
            assert path.read_text() == "old"
            raise fault

    with pytest.raises(type(fault)):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_without_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "file", "old")
    with pytest.raises(FileNotFoundError), files.replacing(path):
        pass
    assert path.read_text() == "old"


def test_a_scratch_folder_is_always_removed(tmp_path: Path) -> None:
    with files.scratch_folder(tmp_path / "work", "one") as first, files.scratch_folder(tmp_path / "work", "one") as two:
        assert first != two
        write(first / "deep" / "file", "x", mode=0o400)
        (first / "link").symlink_to(tmp_path)

    def fail() -> None:
        with files.scratch_folder(tmp_path / "work", "three"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list((tmp_path / "work").iterdir()) == []
    assert tmp_path.is_dir()


def test_a_scratch_folder_removed_as_leftover_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task may remove a new folder before it is locked."""
    made: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_lose_the_first(prefix: str, suffix: str, dir: Path) -> str:  # noqa: A002 (tempfile's name)
        made.append(Path(make(prefix=prefix, suffix=suffix, dir=dir)))
        if len(made) == 1:
            leftovers.clear(made, tmp_path)
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    with files.scratch_folder(tmp_path, "one") as scratch:
        assert [path.exists() for path in made] == [False, True]
        leftovers.clear(made, tmp_path)
        assert scratch.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_remove_handles_files_folders_links_and_absence(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept" / "file")
    link = tmp_path / "link"
    link.symlink_to(kept.parent)
    dangling = tmp_path / "dangling"
    dangling.symlink_to("nowhere")
    for path in (link, dangling, write(tmp_path / "file"), write(tmp_path / "folder" / "file").parent):
        files.remove(path)
        assert not path.is_symlink()
        assert not path.exists()
    files.remove(tmp_path / "never was")
    assert kept.is_file()


def test_only_our_own_or_empty_folders_are_replaced(tmp_path: Path) -> None:
    files.require_owned(tmp_path / "absent")
    folder = tmp_path / "folder"
    folder.mkdir()
    files.require_owned(folder)
    write(folder / "precious")
    with pytest.raises(UserError, match="number of entries: 1") as caught:
        files.require_owned(folder)
    assert caught.value.exit_code == 10
    assert (folder / "precious").exists()
    write(folder / files.MARKER)
    files.require_owned(folder)


def test_a_folder_is_not_a_marker(tmp_path: Path) -> None:
    (tmp_path / "folder" / files.MARKER).mkdir(parents=True)
    with pytest.raises(UserError):
        files.require_owned(tmp_path / "folder")


def test_a_file_in_place_of_the_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a file"):
        files.require_owned(write(tmp_path / "file", "precious"))


def test_free_space_is_checked_at_the_nearest_parent(tmp_path: Path) -> None:
    files.require_space(tmp_path / "not" / "yet" / "there", 1, "a test")
    with pytest.raises(DiskFull, match="not enough disk space for the moon") as caught:
        files.require_space(tmp_path / "not" / "there", 1 << 40, "the moon")
    assert str(tmp_path) in caught.value.expected
    assert caught.value.exit_code == 21


def fingerprint_tree(root: Path) -> Path:
    write(root / "a.cpp", "int a;")
    write(root / "sub" / "b.cpp", "int b;")
    write(root / "sub" / "b.h", "#pragma once")
    write(root / "run", "#!/bin/sh", mode=0o755)
    return root


def test_fingerprint_covers_names_modes_and_contents(tmp_path: Path) -> None:
    one, two = fingerprint_tree(tmp_path / "one"), fingerprint_tree(tmp_path / "two")
    os.utime(two / "a.cpp", (1, 1))
    (two / "empty folder").mkdir()
    write(two / "__pycache__" / "x.pyc", "cache")
    assert files.tree_fingerprint(one) == files.tree_fingerprint(two)


@pytest.mark.parametrize("change", ["content", "name", "mode", "new", "gone"])
def test_each_change_changes_the_fingerprint(tmp_path: Path, change: str) -> None:
    root = fingerprint_tree(tmp_path / "tree")
    before = files.tree_fingerprint(root)
    if change == "content":
        write(root / "a.cpp", "int c;")
    elif change == "name":
        (root / "a.cpp").rename(root / "c.cpp")
    elif change == "mode":
        (root / "run").chmod(0o644)
    elif change == "new":
        write(root / "sub" / "c.cpp")
    else:
        (root / "run").unlink()
    assert files.tree_fingerprint(root) != before


def test_a_file_that_matches_two_patterns_counts_once(tmp_path: Path) -> None:
    root = fingerprint_tree(tmp_path)
    sources = files.tree_fingerprint(root, "**/*.cpp")
    assert files.tree_fingerprint(root, "**/*.cpp", "sub/*.cpp") == sources
    write(root / "sub" / "b.h", "changed")
    assert files.tree_fingerprint(root, "**/*.cpp") == sources
    assert files.tree_fingerprint(root, "**/*.h") != sources


def packed(folder: Path, tar: Path, epoch: int = 1000) -> bytes:
    files.pack(folder, tar, epoch=epoch)
    return tar.read_bytes()


def tree_to_pack(root: Path, *, mtime: int) -> Path:
    write(root / "etc" / "conf", "x", mtime=mtime)
    write(root / "bin" / "tool", "#!/bin/sh\n", mode=0o755, mtime=mtime)
    (root / "bin" / "link").symlink_to("tool")
    (root / "empty").mkdir()
    os.link(root / "etc" / "conf", root / "etc" / "twin")
    for folder in (root / "etc", root / "bin", root / "empty"):
        folder.chmod(0o755)
    return root


def test_pack_does_not_depend_on_the_creation_time(tmp_path: Path) -> None:
    now = int(time.time())
    one = packed(tree_to_pack(tmp_path / "one", mtime=now), tmp_path / "one.tar")
    two = packed(tree_to_pack(tmp_path / "two", mtime=now - 5000), tmp_path / "two.tar")
    assert one == two
    (tmp_path / "two" / "etc" / "conf").write_text("y")
    assert packed(tmp_path / "two", tmp_path / "two.tar") != one


def test_pack_sets_owner_and_limits_times_to_the_epoch(tmp_path: Path) -> None:
    root = tree_to_pack(tmp_path / "root", mtime=500)
    (root / "bin" / "tool").chmod(0o4755)
    if os.geteuid() == 0:
        os.chown(root / "etc" / "conf", 1234, 1234)
    packed(root, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:
        members = {item.name: item for item in archive}
    assert list(members) == sorted(members)
    assert set(members) == {"bin", "bin/link", "bin/tool", "empty", "etc", "etc/conf", "etc/twin"}
    assert {(item.uid, item.gid, item.uname, item.gname) for item in members.values()} == {(0, 0, "", "")}
    assert max(item.mtime for item in members.values()) <= 1000
    assert members["etc/conf"].mtime == 500
    assert members["bin/tool"].mode & 0o7777 == 0o4755
    assert members["bin/link"].linkname == "tool"
    assert members["etc/twin"].islnk()
    assert members["etc/twin"].linkname == "etc/conf"


def test_a_packed_tree_unpacks_unchanged(tmp_path: Path) -> None:
    root = tree_to_pack(tmp_path / "root", mtime=500)
    packed(root, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:
        # Python 3.12 requires a filter for trusted archives.
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall(tmp_path / "copy")  # noqa: S202
    assert files.tree_fingerprint(tmp_path / "copy") == files.tree_fingerprint(root)
    assert (tmp_path / "copy" / "bin" / "link").readlink() == Path("tool")


def test_pack_includes_pipes_and_omits_sockets(tmp_path: Path) -> None:
    root = tree_to_pack(tmp_path / "root", mtime=500)
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
        packed(root, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert archive.getmember("fifo").isfifo()
        assert "socket" not in archive.getnames()


def test_pack_merges_two_folders_and_omits_patterns(tmp_path: Path) -> None:
    root = tree_to_pack(tmp_path / "root", mtime=500)
    overlay = tmp_path / "overlay"
    write(overlay / "etc" / "conf", "other", mtime=400)
    (overlay / "sbin").symlink_to("bin")
    files.pack(
        root, tmp_path / "out.tar", epoch=1000, overlay=overlay, leave_out=re.compile(r"empty|bin/t.*|etc/twin|onf")
    )
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert archive.getnames() == ["bin", "bin/link", "etc", "etc/conf", "sbin"]
        content = archive.extractfile("etc/conf")
        assert content is not None
        assert content.read() == b"other"
        assert archive.getmember("etc/conf").mtime == 400


def test_a_full_disk_while_writing_raises_diskfull(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="no room for the thing") as caught, files.room_for("the thing", tmp_path):
        Path("/dev/full").write_bytes(b"x")
    assert caught.value.found == "No space left on device"
    assert str(tmp_path) in caught.value.expected
    with pytest.raises(FileNotFoundError), files.room_for("the thing", tmp_path):
        (tmp_path / "absent").read_bytes()


def test_a_full_disk_while_copying_or_packing_raises_diskfull(tmp_path: Path) -> None:
    write(tmp_path / "from" / "large", "x" * 200_000)
    write(tmp_path / "from" / "small")
    with small_disk(tmp_path / "disk", "64k") as disk:
        tar = write(disk / "out.tar", "old")
        with pytest.raises(DiskFull, match=r"no room for out\.tar"):
            files.pack(tmp_path / "from", tar, epoch=1)
        assert [path.read_text() for path in disk.iterdir()] == ["old"]
        with pytest.raises(DiskFull, match="no room for the thing") as caught, files.room_for("the thing", disk):
            shutil.copytree(tmp_path / "from", disk / "to")
        assert caught.value.found == "No space left on device"
    os.mkfifo(tmp_path / "from" / "pipe")
    with pytest.raises(shutil.Error), files.room_for("the thing", tmp_path):
        shutil.copytree(tmp_path / "from", tmp_path / "to")
