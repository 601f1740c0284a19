"""Tests of the export: exact copies, atomic replacement, protected folders, and files next to the tree."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import docker
import jinja2
import nasty_image
import pytest
from nasty_image import tree_listing
from ordinary_user import run_python
from registry_parts import second_engine, small_disk
from waiting import eventually

from engine.connect import connect, engine_lost
from nfsroot import boot_files, serve, unpack
from nfsroot.boot_files import boot_parts, write_boot_files
from nfsroot.export import _aside, export, print_result
from nfsroot.layout import Layout, identity_of, named_trees, require_export, write_marker
from nfsroot.rendering import render
from nfsroot.tree import TreeHash, follow, inside
from toolchain import process
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import (
    ArtefactMissing,
    CommandFailed,
    ConfigError,
    DiskFull,
    EngineUnavailable,
    InUse,
    PlatformMismatch,
    RootNeeded,
    UserError,
    of_system,
)
from toolchain.files import MARKER

NAME = f"pitorch-test-{os.getpid()}"
ARMHF = ARCHITECTURES["armhf"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: an export sets the owners of files")

Function = TypeVar("Function", bound=Callable[..., None])


def needs_engine_and_root(function: Function) -> Function:
    for mark in (pytest.mark.engine, needs_root):
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def client(engine_if_root: None) -> docker.DockerClient:
    try:
        return connect()
    except EngineUnavailable as fault:
        pytest.skip(f"needs a Docker engine: {fault.summary}")


@pytest.fixture(scope="module")
def reference(client: docker.DockerClient) -> Iterator[str]:
    made = f"{NAME}/system:trixie-armhf"
    layers = [nasty_image.layer(nasty_image.lower_layer()), nasty_image.layer(nasty_image.upper_layer())]
    nasty_image.load(client, made, layers)
    yield made
    client.images.remove(made, force=True)


@pytest.fixture(scope="module")
def heavy(client: docker.DockerClient) -> Iterator[str]:
    """Build an image that takes a long time to copy: 240 files of 1 MiB each."""
    made = f"{NAME}-heavy/system:trixie-armhf"
    block = os.urandom(1 << 20)
    members = [nasty_image.folder("etc"), *(nasty_image.entry(f"file{number}", block) for number in range(240))]
    nasty_image.load(client, made, [nasty_image.layer(members)])
    yield made
    client.images.remove(made, force=True)


def config_for(reference: str, **sections: dict[str, object]) -> Config:
    return load_config({"image": {"name": reference.split("/")[0]}, **sections})


@pytest.fixture
def config(reference: str) -> Config:
    return config_for(reference)


def expected_tree() -> dict[bytes, tuple[object, ...]]:
    """Compute the tree that the two layers must produce according to the OCI image specification."""
    tree: dict[str, tuple[tarfile.TarInfo, bytes, str]] = {}

    def drop(path: str) -> None:
        for name in [item for item in tree if item == path or item.startswith(f"{path}/")]:
            del tree[name]

    for members in (nasty_image.lower_layer(), nasty_image.upper_layer()):
        for info, _ in members:
            parent, _, name = info.name.rstrip("/").rpartition("/")
            if name == ".wh..wh..opq":
                kept = tree[parent]
                drop(parent)
                tree[parent] = kept
            elif name.startswith(".wh."):
                drop(f"{parent}/{name.removeprefix('.wh.')}")
        for info, data in members:
            path = info.name.rstrip("/")
            if "/.wh." in f"/{path}":
                continue
            if path in tree and not (info.isdir() and tree[path][0].isdir()):
                drop(path)
            if info.islnk():
                tree[path] = (*tree[info.linkname][:2], info.linkname)
            else:
                tree[path] = (info, data, path)
    kinds = {tarfile.REGTYPE: 0o100000, tarfile.DIRTYPE: 0o040000, tarfile.SYMTYPE: 0o120000, tarfile.CHRTYPE: 0o020000,
             tarfile.BLKTYPE: 0o060000, tarfile.FIFOTYPE: 0o010000}  # fmt: skip
    listed: dict[bytes, tuple[object, ...]] = {}
    groups: dict[int, bytes] = {}
    for path, (info, data, _) in sorted(tree.items()):
        content: object = None
        if info.isreg():
            content = nasty_image.sha256(data)
        elif info.issym():
            content = os.fsencode(info.linkname)
        xattrs = tuple(
            (key.removeprefix("SCHILY.xattr."), value.encode("utf-8", "surrogateescape"))
            for key, value in info.pax_headers.items()
        )
        place = os.fsencode(path)
        leader = place if info.isdir() else groups.setdefault(id(info), place)
        listed[place] = (
            oct(kinds[info.type] | info.mode), info.uid, info.gid, os.makedev(info.devmajor, info.devminor),
            int(info.mtime) * 10**9, content, xattrs, leader,
        )  # fmt: skip
    return listed


def without_root(listing: dict[bytes, tuple[object, ...]]) -> dict[bytes, tuple[object, ...]]:
    """Remove the root folder's entry: it is not part of a layer, and the engine sets its time."""
    return {path: facts for path, facts in listing.items() if path != b"."}


# Exactness


@needs_engine_and_root
@pytest.mark.parametrize("method", ["overlay", "layers"])
def test_both_methods_are_exact(client: docker.DockerClient, reference: str, tmp_path: Path, method: str) -> None:
    source = unpack.find_image(client, reference, ARMHF)
    if method == "overlay" and not source.layers:
        pytest.skip("the engine does not store images as overlay2 on this machine")
    chosen = source if method == "overlay" else dataclasses.replace(source, layers=())
    assert unpack.unpack(client, chosen, tmp_path / "tree") == method
    found, wanted = without_root(tree_listing(tmp_path / "tree")), expected_tree()
    assert found.keys() == wanted.keys()
    assert {path: facts for path, facts in found.items() if facts != wanted[path]} == {}
    assert [item for item in tmp_path.iterdir() if item.name != "tree"] == []


@needs_engine_and_root
def test_other_storage_drivers_give_the_same_tree(
    reference: str, client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = export(config_for(reference), destination=tmp_path / "here", fix=False)
    folder = tmp_path / "engine"
    folder.mkdir()
    with second_engine(folder) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        layers = [nasty_image.layer(nasty_image.lower_layer()), nasty_image.layer(nasty_image.upper_layer())]
        nasty_image.load(connect(), reference, layers)
        there = export(config_for(reference), destination=tmp_path / "there", fix=False)
    expected, found = here.manifest.facts, there.manifest.facts
    assert found["method"] == "layers"
    assert found["rootfs_sha256"] == expected["rootfs_sha256"]
    assert found["image_id"] == expected["image_id"]


@needs_engine_and_root
def test_only_the_fixes_change_the_hash(config: Config, tmp_path: Path) -> None:
    raw = export(config, destination=tmp_path / "raw", fix=False)
    fixed = export(config, destination=tmp_path / "fixed")
    plain, changed_facts = raw.manifest.facts, fixed.manifest.facts
    assert plain["rootfs_sha256"] == plain["image_tree_sha256"] == changed_facts["image_tree_sha256"]
    assert raw.findings == ()
    assert changed_facts["rootfs_sha256"] != changed_facts["image_tree_sha256"]
    assert changed_facts["rootfs_sha256"] == TreeHash.of(tmp_path / "fixed" / "tree").sha256, (
        "the hash that is updated by entry must equal a full hash"
    )
    before, after = tree_listing(tmp_path / "raw" / "tree"), tree_listing(tmp_path / "fixed" / "tree")

    def untimed(facts: tuple[object, ...] | None) -> tuple[object, ...] | None:
        return facts if facts is None else facts[:4] + facts[5:]

    changed = {path for path in {*before, *after} if untimed(before.get(path)) != untimed(after.get(path))}
    named = {os.fsencode(item.path.lstrip("/")) for item in fixed.findings}
    unnamed = {
        path
        for path in changed
        if path not in named and not path.startswith((b"etc/ssh/ssh_host_", b"root/.ssh", b"usr/local"))
    }
    assert unnamed == set(), "the findings must name every changed entry"


@needs_engine_and_root
def test_a_tarball_has_the_same_tree(config: Config, tmp_path: Path) -> None:
    first = export(config, tarball=tmp_path / "one" / "root.tar", fix=False)
    second = export(config, tarball=tmp_path / "two.tar.gz", destination=tmp_path / "tree", fix=False)
    assert first.layout is None
    assert not (tmp_path / "one" / "root").exists()
    assert first.tarball is not None
    assert second.tarball is not None
    first.tarball.verify()
    assert stat.S_IMODE(first.tarball.path.stat().st_mode) == 0o600, "the tree contains the board's private keys"
    (tmp_path / "unpacked").mkdir()
    subprocess.run(
        ["tar", "-C", tmp_path / "unpacked", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-xpf",
         first.tarball.path], check=True,
    )  # fmt: skip
    assert without_root(tree_listing(tmp_path / "unpacked")) == expected_tree()
    assert gzip_content(second.tarball.path) == first.tarball.path.read_bytes()
    assert json.loads((tmp_path / "one" / "root.tar.manifest.json").read_text())["facts"]["rootfs_sha256"]


def gzip_content(path: Path) -> bytes:
    return subprocess.run(["gzip", "-dc", path], capture_output=True, check=True).stdout


# Replacement, refusal, interruption


@needs_engine_and_root
def test_files_next_to_the_tree(config: Config, tmp_path: Path) -> None:
    result = export(config, destination=tmp_path / "nfsroot")
    layout = result.layout
    assert layout is not None
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        ".nfsroot.lock", ".nfsroot.served", "nfsroot", "nfsroot.files", "nfsroot.manifest.json",
    ]  # fmt: skip
    assert layout.client_key.stat().st_mode & 0o777 == 0o600
    assert stat.S_IMODE(layout.place.stat().st_mode) == 0o700, "no other user must have access to the tree"
    assert stat.S_IMODE(layout.tree.stat().st_mode) == 0o755
    keys = [line.removeprefix("* ") for line in layout.known_hosts.read_text().splitlines()]
    assert keys == [
        (layout.tree / f"etc/ssh/ssh_host_{kind}_key.pub").read_text().strip() for kind in ("ecdsa", "ed25519")
    ]
    authorized = (layout.tree / "root/.ssh/authorized_keys").read_text().splitlines()
    assert authorized == [layout.client_key.with_suffix(".pub").read_text().strip()]
    assert os.access(layout.folder / "enter-nfsroot", os.X_OK)
    assert named_trees(layout) == {identity_of(layout.tree)}
    manifest = require_export(layout)
    assert manifest.facts == result.manifest.facts
    assert {item["check"] for item in manifest.facts["findings"]} >= {"hostname", "fstab", "capabilities", "dev"}
    assert manifest.facts["counts"]["fifos"] == 1
    assert manifest.facts["counts"]["hardlinks"] == 1
    assert manifest.facts["left_out"] == ["trixie-security"], "the pockets in the image's label"
    assert [text for text in result.manifest.warnings if "trixie-security" in text] == [manifest.warnings[0]]
    assert len(manifest.source.get("commit", "")) in (0, 40)


@needs_engine_and_root
def test_another_folder_is_printed_with_its_setting(
    reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(reference, nfs={"folder": str(tmp_path / "nfsroot")})
    print_result(export(config), config)
    assert "INVOKE_NFS_FOLDER" not in capsys.readouterr().err
    print_result(export(config, tarball=tmp_path / "root.tar"), config)
    assert "INVOKE_NFS_FOLDER" not in capsys.readouterr().err
    made = export(config, destination=tmp_path / "an other")
    print_result(made, config)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "INVOKE_NFS_FOLDER" in line)
    setting, *_, task = shlex.split(line)
    assert task == "serve-nfsroot"
    name, _, value = setting.partition("=")
    assert Layout.of(load_config({}, environment={name: value})) == made.layout


@needs_engine_and_root
@pytest.mark.parametrize(
    "sections",
    [
        {"nfs": {"folder": "link/nfsroot"}},
        {"nfs": {"folder": "real/../link/nfsroot"}},
        {"build": {"folder": "link"}},
        {"build": {"folder": "link/.."}},
    ],
    ids=["nfs.folder by a link", "nfs.folder by ..", "build.folder by a link", "build.folder by .."],
)
def test_boards_get_the_served_path(reference: str, tmp_path: Path, sections: dict[str, dict[str, str]]) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    absolute: dict[str, dict[str, object]] = {
        name: {key: f"{tmp_path}/{value}" for key, value in section.items()} for name, section in sections.items()
    }
    config = config_for(reference, **absolute)
    exported = export(config).layout
    assert exported == Layout.of(config)
    reports = re.search(r"nfsroot=[\d.]+:([^,]+),", (exported.tftp / "cmdline.txt").read_text())
    assert reports is not None
    assert Path(reports[1]) == exported.tree == exported.tree.resolve()
    for program in ("ganesha.nfsd", "nfs-ls"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"needs {program}, to serve the exported tree")
    with serve.running_server(Layout.of(config).tree) as server:
        assert serve.probe(server, Path(reports[1])) == ""


@needs_engine_and_root
def test_a_second_export_keeps_the_login_key(config: Config, tmp_path: Path) -> None:
    first = export(config, destination=tmp_path / "nfsroot")
    assert first.layout is not None
    layout = first.layout
    login, hosts = layout.client_key.read_bytes(), layout.known_hosts.read_text()
    (layout.tree / "written-by-the-board").touch()
    second = export(config, destination=tmp_path / "nfsroot")
    assert not (layout.tree / "written-by-the-board").exists()
    assert layout.client_key.read_bytes() == login
    assert layout.known_hosts.read_text() != hosts
    assert second.manifest.facts["image_tree_sha256"] == first.manifest.facts["image_tree_sha256"]
    assert not layout.aside.exists()


@needs_engine_and_root
def test_an_unrelated_folder_is_not_replaced(config: Config, tmp_path: Path) -> None:
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="was not created by an export") as caught:
        export(config, destination=foreign)
    assert caught.value.exit_code == 10
    assert (foreign / "thesis.tex").read_text() == "years of work"
    assert sorted(item.name for item in tmp_path.iterdir()) == [".home.lock", ".home.served", "home"]


@needs_engine_and_root
def test_a_folder_in_place_of_the_tree_is_not_replaced(config: Config, tmp_path: Path) -> None:
    export(config, destination=tmp_path / "nfsroot")
    (tmp_path / "nfsroot").rename(tmp_path / "away")
    (tmp_path / "nfsroot").mkdir()
    (tmp_path / "nfsroot" / "mine").touch()
    with pytest.raises(UserError, match="no marker identifies"):
        export(config, destination=tmp_path / "nfsroot")
    assert (tmp_path / "nfsroot" / "mine").exists()


def in_the_place_of(tree: Path) -> None:
    """Replace the exported tree with a user's folder, which gets the same inode number if the file system reuses it."""
    number, spares = tree.stat().st_ino, tree.with_name("spares")
    shutil.rmtree(tree)
    spares.mkdir()
    for name in range(5000):
        made = spares / f"{name}"
        made.mkdir()
        if made.stat().st_ino == number:
            break
    (made / "thesis.tex").write_text("years of work")
    made.rename(tree)
    shutil.rmtree(spares)


@pytest.fixture
def ext4(tmp_path: Path, inode_size: int) -> Iterator[Path]:
    """Mount a private ext4 file system. With 128-byte inodes, the file system does not record birth times."""
    image, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    with image.open("wb") as made:
        made.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", f"{inode_size}", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True).returncode:
        pytest.skip("needs loop devices, for a separate file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@needs_engine_and_root
@pytest.mark.parametrize("inode_size", [256])
def test_a_folder_with_a_reused_inode_is_not_replaced(config: Config, ext4: Path) -> None:
    layout = export(config, destination=ext4 / "nfsroot").layout
    assert layout is not None
    number = layout.tree.stat().st_ino
    in_the_place_of(layout.tree)
    assert layout.tree.stat().st_ino == number
    with pytest.raises(UserError, match="no marker identifies"):
        export(config, destination=layout.place)
    with pytest.raises(ArtefactMissing, match="not the exported tree"):
        require_export(layout)
    assert (layout.tree / "thesis.tex").read_text() == "years of work"


@needs_engine_and_root
@pytest.mark.parametrize("inode_size", [128])
def test_host_keys_identify_a_tree_without_birth_time(config: Config, ext4: Path) -> None:
    layout = Layout(ext4 / "nfsroot")
    export(config, destination=layout.place)
    assert named_trees(layout) == {str(layout.tree.stat().st_ino)}
    (layout.tree / "written-by-the-board").touch()
    export(config, destination=layout.place)
    assert not (layout.tree / "written-by-the-board").exists(), "the tree must be recognised and replaced"
    number = layout.tree.stat().st_ino
    in_the_place_of(layout.tree)
    assert layout.tree.stat().st_ino == number
    with pytest.raises(UserError, match="no host key of the export"):
        export(config, destination=layout.place)
    assert (layout.tree / "thesis.tex").read_text() == "years of work"


@needs_engine_and_root
def test_a_marker_of_an_earlier_version_is_valid(config: Config, tmp_path: Path) -> None:
    """Markers that earlier versions wrote contain only inode numbers."""
    layout = Layout(tmp_path / "nfsroot")
    export(config, destination=layout.place)
    layout.marker.write_text(json.dumps({"inodes": [layout.tree.stat().st_ino]}))
    require_export(layout)
    export(config, destination=layout.place)
    assert named_trees(layout) == {identity_of(layout.tree)}
    layout.marker.write_text(json.dumps({"inodes": [layout.tree.stat().st_ino]}))
    layout.known_hosts.write_text("")
    with pytest.raises(UserError, match="no host key of the export"):
        export(config, destination=layout.place)


@needs_engine_and_root
def test_a_tree_of_an_earlier_version_is_replaced(config: Config, tmp_path: Path) -> None:
    """In earlier versions, the tree was the given folder itself, and all users could enter it."""
    layout = Layout(tmp_path / "nfsroot")
    export(config, destination=layout.place)
    layout.tree.rename(tmp_path / "moved")
    layout.place.rmdir()
    (tmp_path / "moved").rename(layout.place)
    (layout.place / "written-by-the-board").touch()
    export(config, destination=layout.place)
    assert list(layout.place.iterdir()) == [layout.tree]
    assert stat.S_IMODE(layout.place.stat().st_mode) == 0o700
    assert not (layout.tree / "written-by-the-board").exists()
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        ".nfsroot.lock", ".nfsroot.served", "nfsroot", "nfsroot.files", "nfsroot.manifest.json",
    ]  # fmt: skip


@needs_engine_and_root
def test_a_folder_with_other_entries_is_not_replaced(config: Config, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "nfsroot")
    export(config, destination=layout.place)
    (layout.place / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="2 entries"):
        export(config, destination=layout.place)
    assert (layout.place / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("said", ["", "null", "[]", '{"trees": 1}', '{"inodes": null}', "{}"])
def test_an_invalid_marker_identifies_no_tree(tmp_path: Path, said: str) -> None:
    layout = Layout(tmp_path / "nfsroot")
    layout.folder.mkdir()
    layout.marker.write_text(said)
    assert named_trees(layout) == frozenset()
    write_marker(layout, frozenset({"7@8"}))
    assert named_trees(layout) == {"7@8"}


@needs_engine_and_root
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_a_link_is_not_replaced(config: Config, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "nfsroot"
    if kind == "file":
        place.write_text("x")
    else:
        (tmp_path / "real").mkdir()
        place.symlink_to("real")
    with pytest.raises(UserError, match="is not a folder"):
        export(config, destination=place)
    assert place.is_symlink() == (kind == "link")


@needs_engine_and_root
def test_an_empty_folder_is_replaced(config: Config, tmp_path: Path) -> None:
    (tmp_path / "nfsroot").mkdir()
    assert export(config, destination=tmp_path / "nfsroot").layout is not None


@needs_engine_and_root
def test_a_tree_with_mounts_is_not_removed(config: Config, tmp_path: Path) -> None:
    export(config, destination=tmp_path / "nfsroot")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    subprocess.run(["mount", "--bind", precious, tmp_path / "nfsroot" / "tree" / "tmp"], check=True)
    try:
        with pytest.raises(InUse, match="something is mounted there"):
            export(config, destination=tmp_path / "nfsroot")
    finally:
        subprocess.run(["umount", tmp_path / "nfsroot" / "tree" / "tmp"], check=True)
    assert (precious / "data").exists()


@needs_engine_and_root
def test_a_mount_point_is_refused_before_the_copy(config: Config, tmp_path: Path) -> None:
    place = tmp_path / "nfsroot"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    try:
        with pytest.raises(UserError, match="is a mount point") as caught:
            export(config, destination=place)
        assert f"{place}/nfsroot" in caught.value.fix
        assert export(config, destination=place / "nfsroot").layout is not None
    finally:
        subprocess.run(["umount", place], check=True)
    assert list(place.iterdir()) == []


@needs_engine_and_root
def test_two_exports_of_a_tree_exclude_each_other(config: Config, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "nfsroot")
    with layout.lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="another export") as caught:
            export(config, destination=layout.place)
    assert caught.value.exit_code == 29
    export(config, destination=layout.place)


RUN = """
import sys
from pathlib import Path
from nfsroot.export import _aside, export, print_result
from toolchain.config import load_config
export(load_config({"image": {"name": sys.argv[1]}}), destination=Path(sys.argv[2]))
"""


@needs_engine_and_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_keeps_the_old_tree(
    config: Config, heavy: str, tmp_path: Path, number: signal.Signals
) -> None:
    place = tmp_path / "nfsroot"
    before = export(config, destination=place)
    old = tree_listing(place / "tree")
    login = Layout(place).known_hosts.read_text()
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, heavy.split("/")[0], str(place)],
        cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    started = Layout(place).aside / "tree"
    eventually(lambda: started.is_dir() and any(started.iterdir()), interval_s=0.002, task=child)
    child.send_signal(number)
    child.wait(30)
    assert child.returncode != 0
    assert tree_listing(place / "tree") == old
    assert Layout(place).known_hosts.read_text() == login
    assert require_export(Layout(place)).facts["image_id"] == before.manifest.facts["image_id"]
    if number == signal.SIGINT:
        assert not Layout(place).aside.exists(), "an export that is interrupted by Ctrl-C must clean up"
    again = export(config_for(heavy), destination=place)
    assert again.manifest.facts["counts"]["files"] >= 240
    assert (place / "tree" / "file239").stat().st_size == 1 << 20
    assert not Layout(place).aside.exists(), "the next export must remove the remains of the killed one"


@needs_engine_and_root
@pytest.mark.parametrize("moved", ["tree", "folder"])
def test_an_export_killed_between_renames_is_undone(config: Config, tmp_path: Path, moved: str) -> None:
    """On a file system without atomic exchange, the killed export has moved one folder aside.

    The next export moves the folder back, then fails too.
    """
    layout = Layout(tmp_path / "nfsroot")
    before = export(config, destination=layout.place)
    old, marker = tree_listing(layout.tree), layout.marker.read_text()
    place: Path = getattr(layout, moved)
    layout.aside.mkdir()
    (layout.aside / MARKER).touch()
    place.rename(layout.aside / f"{place.name}.old")
    with small_disk(tmp_path / "full", "16k") as full, pytest.raises(DiskFull):
        export(config, destination=layout.place, tarball=full / "root.tar")
    assert tree_listing(layout.tree) == old
    assert layout.marker.read_text() == marker
    assert require_export(layout).facts["image_id"] == before.manifest.facts["image_id"]
    assert not layout.aside.exists()
    export(config, destination=layout.place)


def test_an_interrupted_removal_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which a folder's entries are removed depends on the file system."""
    layout = Layout(tmp_path / "nfsroot")
    unlink = os.unlink

    def interrupt(path: str, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "file of the old tree":
            raise KeyboardInterrupt
        unlink(path, dir_fd=dir_fd)

    layout.aside.mkdir()
    (layout.aside / MARKER).touch()
    (layout.aside / "tree").mkdir()
    (layout.aside / "tree" / "file of the old tree").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt), _aside(layout):
            raise AssertionError("the removal was not interrupted")
    with _aside(layout):
        pass
    assert list(tmp_path.iterdir()) == []


@needs_engine_and_root
def test_missing_space_is_reported_before_writing(heavy: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        with pytest.raises(DiskFull, match="not enough disk space"):
            export(config_for(heavy), destination=disk / "nfsroot")
        assert sorted(item.name for item in disk.iterdir()) == [".nfsroot.lock", ".nfsroot.served"]


@needs_engine_and_root
@pytest.mark.parametrize("method", ["overlay", "layers"])
def test_a_full_disk_is_reported_at_every_point(
    config: Config, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of inodes determines the step at which the disk fills up (lock, copy, boot files, audit), if any."""
    if method == "layers":
        monkeypatch.setattr(unpack, "_local_layers", lambda _: ())
    reports = set()
    for files in range(1, 200, 3):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=1g,nr_inodes={files}", "tmpfs", tmp_path], check=True)
        try:
            if export(config, destination=tmp_path / "nfsroot").layout:
                break
        except DiskFull as fault:
            reports.add(str(fault.found))
            assert {item.name for item in tmp_path.iterdir()} <= {".nfsroot.lock", ".nfsroot.served"}, files
        finally:
            subprocess.run(["umount", tmp_path], check=True)
    else:
        pytest.fail("the export failed with every number of inodes")
    program = "cp:" if method == "overlay" else "tar:"
    assert any(words.startswith(program) for words in reports), "expected an error message from the program that copies"
    assert {"No space left on device"} < reports, "expected an error message from this project's code too"
    assert all("No space left on device" in words for words in reports)


@contextlib.contextmanager
def relay_that_breaks_off(place: Path, after: int) -> Iterator[None]:
    """Run a relay to the engine's socket that closes each connection after forwarding ``after`` bytes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen()
    ends: list[socket.socket] = []

    def forward(source: socket.socket, sink: socket.socket, limit: int) -> None:
        with contextlib.suppress(OSError):
            while limit > 0 and (block := source.recv(1 << 16)):
                sink.sendall(block)
                limit -= len(block)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect("/var/run/docker.sock")
                ends.extend((client, server))
                threading.Thread(target=forward, args=(client, server, 1 << 40), daemon=True).start()
                threading.Thread(target=forward, args=(server, client, after), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        for end in (listener, *ends):
            end.close()


@needs_engine_and_root
def test_a_lost_engine_connection_is_reported(heavy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/var/run/docker.sock").exists() or os.environ.get("DOCKER_HOST"):
        pytest.skip("needs the engine at its usual socket")
    monkeypatch.setattr(unpack, "_local_layers", lambda _: ())
    with tempfile.TemporaryDirectory() as folder, relay_that_breaks_off(Path(folder) / "s", 50 << 20):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/s")
        with pytest.raises(EngineUnavailable, match="stopped responding while it exported the image") as caught:
            export(config_for(heavy), destination=tmp_path / "nfsroot")
    assert caught.value.fix == engine_lost("", caught.value).fix
    assert sorted(item.name for item in tmp_path.iterdir()) == [".nfsroot.lock", ".nfsroot.served"]


def test_an_engine_lost_before_the_export_is_reported() -> None:
    """The engine closes the connection before it responds."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with (
            contextlib.closing(docker.DockerClient(base_url=f"unix://{folder}/s", version="1.41")) as client,
            pytest.raises(EngineUnavailable, match="stopped responding while it was asked for system"),
        ):
            unpack.find_image(client, "system", ARMHF)


@needs_engine_and_root
def test_image_removed_during_the_export_is_reported(client: docker.DockerClient, heavy: str, tmp_path: Path) -> None:
    source = unpack.find_image(client, heavy, ARMHF)
    gone = dataclasses.replace(source, id="sha256:" + "0" * 64, layers=())
    with pytest.raises(CommandFailed, match="failed to export the image"):
        unpack.unpack(client, gone, tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


@needs_engine_and_root
@pytest.mark.parametrize(
    ("folder", "tarball"), [("file/below/x", None), (None, "file/below/x.tar"), ("nfsroot", "file/below/x.tar")]
)
def test_an_unusable_destination_is_reported(
    config: Config, tmp_path: Path, folder: str | None, tarball: str | None
) -> None:
    (tmp_path / "file").touch()
    destination, packed = tmp_path / folder if folder else None, tmp_path / tarball if tarball else None
    with pytest.raises(UserError, match="cannot export to") as caught:
        export(config, destination=destination, tarball=packed)
    assert "Not a directory" in caught.value.found
    assert "--folder" in caught.value.fix


@needs_engine_and_root
@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_disk_is_reported(config: Config, tmp_path: Path, there: bool) -> None:
    """The read-only disk contains an earlier export or no export."""
    if there:
        export(config, destination=tmp_path / "nfsroot")
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
    try:
        with pytest.raises(UserError, match="cannot export to") as caught:
            export(config, destination=tmp_path / "nfsroot")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "Read-only file system" in caught.value.found


@needs_engine_and_root
@pytest.mark.parametrize("next_to", [False, True])
def test_a_folder_as_tarball_is_refused(config: Config, tmp_path: Path, next_to: bool) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        export(config, tarball=tmp_path / "folder", destination=tmp_path / "nfsroot" if next_to else None)


@needs_engine_and_root
def test_the_layers_method_uses_constant_memory(heavy: str, tmp_path: Path) -> None:
    script = (
        "import sys, dataclasses, re; from pathlib import Path; from engine.connect import connect; "
        "from nfsroot import unpack; from toolchain.architecture import ARCHITECTURES as A; c = connect(); "
        "s = dataclasses.replace(unpack.find_image(c, sys.argv[1], A['armhf']), layers=()); "
        "unpack.unpack(c, s, Path(sys.argv[2])); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = process.run([sys.executable, "-c", script, heavy, tmp_path / "tree"], cwd=ROOT, merge_stderr=False)
    assert (tmp_path / "tree" / "file0").stat().st_size == 1 << 20
    assert int(done.output) < 200 * 1024, "the peak memory in KiB; the image has 240 MiB"


# Bad input


@needs_engine_and_root
def test_a_missing_image_is_reported_with_the_task(client: docker.DockerClient, tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match="image nowhere/system:trixie-armhf not found") as caught:
        export(config_for("nowhere/x"), destination=tmp_path / "nfsroot")
    assert "build-image" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
@pytest.mark.parametrize("name", ["New.tar", "old system.tar", "café.tar", "a:b:c", "caf\udce9"])
def test_a_name_that_no_image_can_have_is_reported(client: docker.DockerClient, name: str) -> None:
    with pytest.raises(ArtefactMissing, match=r"image [\w.: \\]+ not found"):
        unpack.find_image(client, name, ARMHF)


@needs_engine_and_root
def test_an_image_for_another_platform_is_refused(client: docker.DockerClient, tmp_path: Path) -> None:
    name = f"{NAME}-amd64"
    layer = nasty_image.layer([nasty_image.folder("etc")])
    nasty_image.load(client, f"{name}/system:trixie-armhf", [layer], architecture="amd64", variant="")
    try:
        with pytest.raises(PlatformMismatch) as caught:
            export(config_for(name), destination=tmp_path / "nfsroot")
        assert caught.value.expected == "linux/arm/v7"
        assert caught.value.found == "linux/amd64"
    finally:
        client.images.remove(f"{name}/system:trixie-armhf", force=True)


def applied(root: Path, *layers: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Apply layers, whose entries belong to the calling user, to a new tree, and return the tree."""
    root.mkdir()
    for number, members in enumerate(layers):
        for info, _ in members:
            info.uid, info.gid = os.getuid(), os.getgid()
        tar = root.parent / f"{number}.tar"
        tar.write_bytes(nasty_image.layer(members))
        unpack.apply_layer(tar, root)
    return root


def link(name: str, target: Path | str) -> tuple[tarfile.TarInfo, bytes]:
    return nasty_image.entry(name, kind=tarfile.SYMTYPE, link=str(target), mode=0o777)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return nasty_image.entry(name, kind=tarfile.LNKTYPE, link=target)


UNSAFE_LAYERS = {
    "file": [nasty_image.entry("link/new")],
    "file further below": [nasty_image.entry("./link/below/new")],
    "target of a hard link": [hard_link("copy", "link/kept")],
    "whiteout": [nasty_image.entry("link/.wh.kept")],
    "opaque folder": [nasty_image.entry("link/.wh..wh..opq")],
    "link in the same layer": [link("usr/other", "../link"), nasty_image.entry("usr/other/new")],
    "hard link to a link": [hard_link("other", "link"), nasty_image.entry("other/new")],
    "parent folder": [nasty_image.entry("usr/../../outside/new")],
    "whiteout of the parent folder": [nasty_image.entry(".wh...")],
}


@pytest.mark.parametrize("members", UNSAFE_LAYERS.values(), ids=UNSAFE_LAYERS.keys())
def test_a_layer_that_leads_out_of_the_tree_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    outside = tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "kept").write_text("unchanged")
    with pytest.raises(CommandFailed, match="an entry in a layer of the image is unsafe"):
        applied(tmp_path / "tree", [nasty_image.folder("usr"), link("link", outside)], members)
    assert sorted(path.name for path in outside.rglob("*")) == ["below", "kept"]
    assert (outside / "kept").read_text() == "unchanged"
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == ["link", "usr"]


def test_a_layer_can_replace_a_link_by_a_folder(tmp_path: Path) -> None:
    below = [link("a", "/usr/lib"), link("b", "/usr/lib"), nasty_image.folder("usr"), nasty_image.folder("usr/lib")]
    above = [
        *(nasty_image.folder("a"), nasty_image.entry("a/.wh..wh..opq"), nasty_image.entry("a/new")),
        *(nasty_image.entry(".wh.b"), nasty_image.entry("b/new")),
        *(nasty_image.entry("usr/lib/real"), link("c", "usr/lib"), hard_link("d", "usr/lib/real")),
    ]
    tree = applied(tmp_path / "tree", below, above)
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*")) == [
        *("a", "a/new", "b", "b/new", "c", "d", "usr", "usr/lib", "usr/lib/real"),
    ]
    assert not (tree / "a").is_symlink()


def test_a_damaged_layer_is_reported_before_it_is_unpacked(tmp_path: Path) -> None:
    """GNU tar skips a damaged header and unpacks the entries behind it, which the checks have not read."""
    (tmp_path / "tree").mkdir()
    layer = bytearray(nasty_image.layer([nasty_image.folder("a"), nasty_image.folder("b"), nasty_image.folder("c")]))
    layer[512] ^= 0xFF
    (tmp_path / "layer.tar").write_bytes(layer)
    with pytest.raises(CommandFailed, match="a layer of the image is damaged"):
        unpack.apply_layer(tmp_path / "layer.tar", tmp_path / "tree")
    assert list((tmp_path / "tree").iterdir()) == []


@needs_root
def test_an_ordinary_user_gets_the_sudo_command(open_checkout: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pitorch-export-") as folder:
        Path(folder).chmod(0o777)
        words = ("-m", "toolchain.cli", "export-nfsroot", f"--folder={folder}/nfsroot")
        ended = run_python(open_checkout, *words, environment={"HOME": folder})
        assert ended.returncode == RootNeeded.exit_code, ended.stderr
        assert "root is needed" in ended.stderr
        assert f"sudo ./inv export-nfsroot --folder={folder}/nfsroot" in ended.stderr
        assert list(Path(folder).iterdir()) == []


@needs_root
def test_a_missing_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EngineUnavailable):
        export(load_config({}), destination=tmp_path / "nfsroot")


# Paths in a tree, and the tree's hash


def test_links_never_lead_out_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "usr").mkdir()
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "up").symlink_to("../../../../etc")
    (tmp_path / "etc" / "passwd").symlink_to("/../../etc/shadow")
    assert inside(tmp_path, "/lib/x") == tmp_path / "usr/lib/x"
    assert inside(tmp_path, "up/passwd") == tmp_path / "etc/passwd"
    assert inside(tmp_path, "../../etc/passwd") == tmp_path / "etc/passwd"
    assert follow(tmp_path, "etc/passwd") == tmp_path / "etc/shadow"


@pytest.mark.parametrize(("resolve", "path"), [(inside, "/loop/x"), (follow, "loop")])
def test_a_loop_of_links_is_reported_with_its_path(
    tmp_path: Path, resolve: Callable[[Path, str], Path], path: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels") as caught:
        resolve(tmp_path, path)
    assert str(of_system(caught.value)).startswith(f"{tmp_path}/")


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "file").chmod(0o600),
        lambda root: (root / "file").write_text("other"),
        lambda root: (root / "file").rename(root / "name"),
        lambda root: (root / "link").unlink(),
        lambda root: ((root / "link").unlink(), (root / "link").symlink_to("elsewhere")),
        lambda root: ((root / "twin").unlink(), (root / "twin").write_text("content")),
        lambda root: os.setxattr(root / "file", "user.x", b"1"),
        lambda root: os.mkfifo(root / "fifo"),
        lambda root: (root / "folder").rmdir(),
    ],
    ids=["mode", "content", "name", "removed", "target", "hard-link", "xattr", "added", "folder"],
)
def test_every_change_but_times_changes_the_hash(tmp_path: Path, change: object) -> None:
    root = tmp_path / "tree"
    (root / "folder").mkdir(parents=True)
    (root / "file").write_text("content")
    os.link(root / "file", root / "twin")
    (root / "link").symlink_to("file")
    hashed = TreeHash.of(root)
    before = hashed.sha256
    os.utime(root / "file", (1, 1))
    assert TreeHash.of(root).sha256 == before
    assert callable(change)
    change(root)
    after = TreeHash.of(root).sha256
    assert after != before
    hashed.refresh(["file", "twin", "link", "name", "fifo", "folder"])
    assert hashed.sha256 == after, "an update by entry must give the same hash as a full pass"


# The auxiliary files next to the tree


@pytest.fixture
def bootable(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "boot").mkdir(parents=True)
    for release in ("6.12.9-armmp", "6.12.107-armmp"):
        (tree / "boot" / f"vmlinuz-{release}").write_text(f"kernel {release}")
        (tree / "boot" / f"initrd.img-{release}").write_text(f"initramfs {release}")
    folder = tree / "usr/lib/linux-image-6.12.107-armmp"
    folder.mkdir(parents=True)
    for name in ("bcm2837-rpi-3-b.dtb", "bcm2836-rpi-2-b.dtb", "imx6q-sabrelite.dtb"):
        (folder / name).write_text(name)
    return tree


def written(bootable: Path, tmp_path: Path, **nfs: object) -> tuple[Path, list[str]]:
    final = Layout(tmp_path / "served" / "nfsroot")
    config = load_config({"nfs": {"address": "192.168.77.1", **nfs}})
    warnings = write_boot_files(config, final, bootable, tmp_path / "aside")
    return tmp_path / "aside" / "nfsroot.files", warnings


def test_the_newest_kernel_and_its_files_are_selected(bootable: Path) -> None:
    parts = boot_parts(bootable)
    assert parts.kernel is not None
    assert parts.initramfs is not None
    assert parts.kernel.name == "vmlinuz-6.12.107-armmp"
    assert parts.initramfs.name == "initrd.img-6.12.107-armmp"
    assert list(parts.device_trees) == ["bcm2836-rpi-2-b.dtb", "bcm2837-rpi-3-b.dtb"]
    assert parts.missing() == ["bootcode.bin, start.elf, fixup.dat, start4.elf, fixup4.dat (package raspi-firmware)"]


def test_links_between_boot_files_stay_in_the_tree(bootable: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("this PC")
    outside.chmod(0o600)
    boot, trees = bootable / "boot", bootable / "usr/lib/linux-image-6.12.107-armmp"
    # Links in the tree, relative and absolute, as packages and users create them.
    (boot / "vmlinuz-6.12.107-armmp").rename(trees / "image")
    (boot / "vmlinuz-6.12.107-armmp").symlink_to("/usr/lib/linux-image-6.12.107-armmp/image")
    (trees / "bcm2837-rpi-3-b-plus.dtb").symlink_to("bcm2837-rpi-3-b.dtb")
    (boot / "vmlinuz").symlink_to("vmlinuz-6.12.9-armmp")
    (boot / "start.elf").write_text("start.elf")
    (boot / "start4.elf").symlink_to("/boot/start.elf")
    # Links that lead out of the tree, or to themselves.
    (boot / "vmlinuz-6.13.0-armmp").symlink_to(outside)
    (boot / "initrd.img-6.12.107-armmp").unlink()
    (boot / "initrd.img-6.12.107-armmp").symlink_to(f"../../../../../../../../..{outside}")
    (trees / "bcm2711-rpi-4-b.dtb").symlink_to(outside)
    (boot / "fixup.dat").symlink_to(outside)
    (boot / "fixup4.dat").symlink_to("fixup4.dat")
    (boot / "firmware").symlink_to(tmp_path)
    (tmp_path / "bcm2711-rpi-400.dtb").write_text("this PC")
    folder, _ = written(bootable, tmp_path)
    made = {path.name: path.read_text() for path in (folder / "tftp").iterdir()}
    assert made.keys() == {
        "cmdline.txt", "config.txt", "vmlinuz", "start.elf", "start4.elf",
        "bcm2836-rpi-2-b.dtb", "bcm2837-rpi-3-b.dtb", "bcm2837-rpi-3-b-plus.dtb",
    }  # fmt: skip
    assert made["vmlinuz"] == "kernel 6.12.107-armmp"
    assert made["bcm2837-rpi-3-b-plus.dtb"] == "bcm2837-rpi-3-b.dtb"
    assert made["start4.elf"] == "start.elf"


def test_boot_files_of_a_board(bootable: Path, tmp_path: Path) -> None:
    folder, warnings = written(bootable, tmp_path)
    assert (folder / "tftp/cmdline.txt").read_text() == (
        "console=serial0,115200 console=tty1 boot=nfs4 root=/dev/nfs "
        f"nfsroot=192.168.77.1:{tmp_path}/served/nfsroot/tree,vers=4.1 rw ip=dhcp net.ifnames=0\n"
    )
    settings = [
        line for line in (folder / "tftp/config.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert settings == [
        "arm_64bit=0", "kernel=vmlinuz", "initramfs initrd.img followkernel",
        "[pi2]", "device_tree=bcm2836-rpi-2-b.dtb", "[pi3]", "device_tree=bcm2837-rpi-3-b.dtb", "[all]",
        "enable_uart=1", "gpu_mem=128", "camera_auto_detect=0", "display_auto_detect=0",
    ]  # fmt: skip
    assert (folder / "tftp/vmlinuz").read_text() == "kernel 6.12.107-armmp"
    assert (folder / "tftp/initrd.img").read_text() == "initramfs 6.12.107-armmp"
    assert (folder / "tftp/bcm2837-rpi-3-b.dtb").exists()
    assert any("raspi-firmware" in warning for warning in warnings)


FILTERS = {
    "2B": {"pi2"},
    "3B": {"pi3"},
    "3B+": {"pi3", "pi3+"},
    "Zero 2 W": {"pi0", "pi0w", "pi02"},
    "Zero W": {"pi0", "pi0w"},
    "4B": {"pi4"},
    "400": {"pi4", "pi400"},
    "CM4": {"pi4", "cm4"},
    "5": {"pi5"},
}
"""Sections of config.txt that a board reads, according to the firmware's documentation."""


def read_by(board: str, text: str) -> dict[str, str]:
    """Evaluate config.txt as a board's firmware does: only matching sections apply, and later lines take precedence."""
    found: dict[str, str] = {}
    reads = True
    for line in text.splitlines():
        if section := re.fullmatch(r"\[(.+)\]", line):
            reads = section[1] == "all" or section[1] in FILTERS[board]
        elif reads and "=" in line and not line.startswith("#"):
            name, _, found[name] = line.partition("=")
    return found


def test_each_board_gets_its_own_device_tree(bootable: Path, tmp_path: Path) -> None:
    folder = bootable / "usr/lib/linux-image-6.12.107-armmp"
    for name in (
        *("bcm2837-rpi-3-b-plus.dtb", "bcm2837-rpi-3-a-plus.dtb", "bcm2837-rpi-zero-2-w.dtb"),
        *("bcm2711-rpi-4-b.dtb", "bcm2711-rpi-400.dtb", "bcm2711-rpi-cm4-io.dtb"),
    ):
        (folder / name).touch()
    made, _ = written(bootable, tmp_path)
    text = (made / "tftp/config.txt").read_text()
    read = {board: read_by(board, text) for board in FILTERS}
    assert {board: found.get("device_tree") for board, found in read.items()} == {
        "2B": "bcm2836-rpi-2-b.dtb",
        "3B": "bcm2837-rpi-3-b.dtb",
        "3B+": "bcm2837-rpi-3-b-plus.dtb",
        "Zero 2 W": "bcm2837-rpi-zero-2-w.dtb",
        "Zero W": None,
        "4B": "bcm2711-rpi-4-b.dtb",
        "400": "bcm2711-rpi-400.dtb",
        "CM4": "bcm2711-rpi-cm4-io.dtb",
        "5": None,
    }
    assert all((made / "tftp" / found["device_tree"]).is_file() for found in read.values() if "device_tree" in found)
    assert {(found["kernel"], found["enable_uart"], found["gpu_mem"]) for found in read.values()} == {
        ("vmlinuz", "1", "128")
    }


def test_the_firmware_selects_raspberry_pi_device_trees(bootable: Path, tmp_path: Path) -> None:
    """The firmware selects one of the Raspberry Pi kernel's device trees by its file name."""
    folder = bootable / "usr/lib/linux-image-6.12.107-armmp"
    names = ("bcm2710-rpi-3-b.dtb", "bcm2711-rpi-4-b.dtb", "bcm2712-rpi-5-b.dtb", "bcm2712d0-rpi-5-b.dtb")
    for name in names:
        (folder / name).touch()
    made, _ = written(bootable, tmp_path)
    text = (made / "tftp/config.txt").read_text()
    assert "device_tree" not in text
    assert "[" not in text
    assert "Not for" not in text
    assert all((made / "tftp" / name).is_file() for name in names)


ALL_BOARDS = {"bcm2837-rpi-3-b.dtb", "bcm2711-rpi-4-b.dtb", "bcm2712-rpi-5-b.dtb"}
WITHOUT_PI_5 = ALL_BOARDS - {"bcm2712-rpi-5-b.dtb"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("# CONFIG_BCMGENET is not set\n", {"bcm2837-rpi-3-b.dtb"}),  # linux-image-armmp 6.12
        ("CONFIG_BCMGENET=m\nCONFIG_MACB=m\n", WITHOUT_PI_5),  # linux-image-arm64 6.12
        ("CONFIG_BCMGENET=y\nCONFIG_MFD_RP1=y\n", ALL_BOARDS),  # linux-image-rpi-v8
    ],
    ids=["armmp", "arm64", "rpi-v8"],
)
def test_boards_whose_ethernet_the_kernel_drives_can_boot(tmp_path: Path, settings: str, expected: set[str]) -> None:
    tree = tmp_path / "tree"
    folder = tree / "usr/lib/linux-image-6.12.118+deb13-arm64/broadcom"
    firmware = tree / "usr/lib/raspi-firmware"
    for place in (folder, firmware, tree / "boot"):
        place.mkdir(parents=True)
    (tree / "boot/vmlinuz-6.12.118+deb13-arm64").touch()
    (tree / "boot/config-6.12.118+deb13-arm64").write_text(settings)
    for name in ALL_BOARDS:
        (folder / name).touch()
    for name in ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat"):
        (firmware / name).write_text(name)
    config = load_config({"nfs": {"address": "192.168.77.1"}, "image": {"architecture": "arm64"}})
    warnings = write_boot_files(config, Layout(tmp_path / "served/nfsroot"), tree, tmp_path / "aside")
    assert not any("raspi-firmware" in warning for warning in warnings)
    tftp = tmp_path / "aside/nfsroot.files/tftp"
    assert {item.name for item in tftp.glob("*.dtb")} == expected
    assert (tftp / "start4.elf").read_text() == "start4.elf"
    text = (tftp / "config.txt").read_text()
    assert "arm_64bit=1\n" in text
    assert read_by("3B", text)["device_tree"] == "bcm2837-rpi-3-b.dtb"
    pi_4 = "bcm2711-rpi-4-b.dtb"
    assert read_by("4B", text).get("device_tree") == (pi_4 if pi_4 in expected else None)
    assert ("# Not for a Pi 4: " in text) is (pi_4 not in expected)
    assert ("# Not for a Pi 5: " in text) is (expected != ALL_BOARDS)


def test_a_kernel_without_initramfs_gets_tcp(bootable: Path, tmp_path: Path) -> None:
    for item in bootable.glob("boot/initrd*"):
        item.unlink()
    folder, _ = written(bootable, tmp_path, port=12049)
    line = (folder / "tftp/cmdline.txt").read_text()
    assert "boot=nfs4" not in line
    assert ",vers=4.1,proto=tcp,port=12049 " in line
    assert line.rstrip().endswith("rootwait")
    assert "initramfs" not in (folder / "tftp/config.txt").read_text()


def test_the_exports_line_of_the_kernel_server(bootable: Path, tmp_path: Path) -> None:
    folder, _ = written(bootable, tmp_path, subnet="10.1.0.0/16")
    assert (folder / "exports").read_text().splitlines()[-1] == (
        f"{tmp_path}/served/nfsroot/tree 10.1.0.0/16(rw,sync,no_root_squash,no_subtree_check)"
    )


@pytest.mark.parametrize("persistent", [[], ["/home", "/var/lib/app"]])
def test_a_shared_tree_is_read_only_for_each_kind_of_server(
    bootable: Path, tmp_path: Path, persistent: list[str]
) -> None:
    folder, _ = written(bootable, tmp_path, overlay=True, persistent=persistent)
    place = tmp_path / "served/nfsroot"
    assert (folder / "exports").read_text().splitlines()[-2:] == [
        f"{place}/tree 192.168.77.0/24(ro,sync,no_root_squash,no_subtree_check)",
        f"{place}.boards 192.168.77.0/24(rw,sync,no_root_squash,no_subtree_check)",
    ]
    assert Path(f"{place}.boards").stat().st_mode & 0o777 == 0o700
    arguments = f"pitorch.overlay pitorch.boards={place}.boards"
    arguments += " pitorch.persistent=/home,/var/lib/app" if persistent else ""
    assert (folder / "tftp/cmdline.txt").read_text().rstrip().endswith(arguments)
    if shutil.which("ganesha.nfsd") is not None:
        assert re.findall(r"Access_Type = R[OW]", (folder / "ganesha.conf").read_text()) == [
            "Access_Type = RO",
            "Access_Type = RW",
        ]


def test_non_ascii_paths_are_not_escaped_in_the_exports_file(bootable: Path, tmp_path: Path) -> None:
    """exports(5): an escape is three octal digits, which is one byte."""
    final = Layout(tmp_path / "größe – 日本😀" / "nfsroot")
    write_boot_files(load_config({"nfs": {"address": "192.168.77.1"}}), final, bootable, tmp_path / "aside")
    line = (tmp_path / "aside/nfsroot.files/exports").read_text().splitlines()[-1]
    assert line.startswith(f"{tmp_path}/größe\\040–\\040日本😀/nfsroot/tree 192.168.77.0/24(")


def test_blanks_in_the_path_are_escaped_with_a_warning(bootable: Path, tmp_path: Path) -> None:
    final = Layout(tmp_path / "two words" / "nfsroot")
    config = load_config({"nfs": {"address": "192.168.77.1"}})
    warnings = write_boot_files(config, final, bootable, tmp_path / "aside")
    folder = tmp_path / "aside" / "nfsroot.files"
    assert f"{tmp_path}/two\\040words/nfsroot/tree 192.168.77.0/24(" in (folder / "exports").read_text()
    assert any("invalid on a kernel command line" in warning for warning in warnings)


def test_dhcp_with_and_without_another_server(bootable: Path, tmp_path: Path) -> None:
    folder, _ = written(bootable, tmp_path)
    proxy, alone = ((folder / name).read_text() for name in ("dnsmasq.conf", "dnsmasq-alone.conf"))
    assert "dhcp-range=192.168.77.0,proxy,255.255.255.0\n" in proxy
    assert "option:router" not in proxy
    assert re.search(r"dhcp-range=192\.168\.77\.\d+,192\.168\.77\.\d+,255\.255\.255\.0,1h\n", alone)
    assert "dhcp-option=option:router,192.168.77.1\n" in alone
    for made in (proxy, alone):
        assert 'pxe-service=0,"Raspberry Pi Boot"\n' in made
        assert f"tftp-root={tmp_path}/served/nfsroot.files/tftp\n" in made
        assert "port=0\n" in made, "no DNS server"
    if (program := shutil.which("dnsmasq", path="/usr/sbin:/usr/bin")) is not None:
        for name in ("dnsmasq.conf", "dnsmasq-alone.conf"):
            subprocess.run([program, "--test", "-C", folder / name], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("servers", "option"),
    [
        (("2001:db8::53", "192.0.2.53"), ["dhcp-option=option:dns-server,192.0.2.53"]),
        (("2001:db8::53",), []),
    ],
)
def test_dhcp_offers_only_ipv4_name_servers(
    bootable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: tuple[str, ...], option: list[str]
) -> None:
    monkeypatch.setattr(boot_files, "nameservers_of_host", lambda: servers)
    folder, _ = written(bootable, tmp_path)
    alone = folder / "dnsmasq-alone.conf"
    assert [line for line in alone.read_text().splitlines() if "dns-server" in line] == option
    if (program := shutil.which("dnsmasq", path="/usr/sbin:/usr/bin")) is not None:
        subprocess.run([program, "--test", "-C", alone], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("subnet", "server", "first", "last"),
    [
        ("192.168.77.0/24", "192.168.77.1", "192.168.77.51", "192.168.77.102"),
        ("192.168.77.0/24", "192.168.77.60", "192.168.77.61", "192.168.77.102"),
        ("192.168.77.0/24", "192.168.77.102", "192.168.77.51", "192.168.77.101"),
        ("10.1.0.0/16", "10.1.0.1", "10.1.51.51", "10.1.102.102"),
        ("10.0.0.0/8", "10.0.0.1", "10.51.51.51", "10.102.102.102"),
        ("192.168.77.0/27", "192.168.77.1", "192.168.77.7", "192.168.77.13"),
        ("192.168.77.8/29", "192.168.77.9", "192.168.77.10", "192.168.77.14"),
        ("192.168.77.8/29", "192.168.77.13", "192.168.77.9", "192.168.77.12"),
        ("192.168.77.4/30", "192.168.77.5", "192.168.77.6", "192.168.77.6"),
        ("192.168.77.4/30", "192.168.77.6", "192.168.77.5", "192.168.77.5"),
    ],
)
def test_boards_get_free_addresses_of_the_subnet(
    bootable: Path, tmp_path: Path, subnet: str, server: str, first: str, last: str
) -> None:
    folder, _ = written(bootable, tmp_path, subnet=subnet, address=server)
    alone = (folder / "dnsmasq-alone.conf").read_text()
    mask = ipaddress.IPv4Network(subnet).netmask
    assert f"dhcp-range={first},{last},{mask},1h\n" in alone
    network, ends = ipaddress.IPv4Network(subnet), [ipaddress.IPv4Address(end) for end in (first, last)]
    assert all(end in network for end in ends)
    assert not {network.network_address, network.broadcast_address, ipaddress.IPv4Address(server)} & set(ends)
    assert not ends[0] <= ipaddress.IPv4Address(server) <= ends[1]
    if (program := shutil.which("dnsmasq", path="/usr/sbin:/usr/bin")) is not None:
        subprocess.run([program, "--test", "-C", folder / "dnsmasq-alone.conf"], check=True, capture_output=True)


@pytest.mark.parametrize("subnet", ["192.168.77.4/31", "192.168.77.5/32"])
def test_a_subnet_without_free_address_is_reported(bootable: Path, tmp_path: Path, subnet: str) -> None:
    folder, warnings = written(bootable, tmp_path, subnet=subnet, address="192.168.77.5")
    assert any("no free address for a board" in warning for warning in warnings)
    assert (folder / "dnsmasq.conf").exists()
    assert not (folder / "dnsmasq-alone.conf").exists()


def test_a_64_bit_target_has_64_bit_boot_files(bootable: Path) -> None:
    boots = {"boots_pi_4": True, "boots_pi_5": True}
    made = render("config.txt", bits=64, kernel="k", initramfs="", device_trees={}, **boots, gpu_memory_mib=64)
    assert "arm_64bit=1\nkernel=k\nenable_uart=1\n" in made


def test_an_undefined_name_in_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("exports", path="/x")


def test_a_pc_outside_the_subnet_causes_a_warning(bootable: Path, tmp_path: Path) -> None:
    _, warnings = written(bootable, tmp_path, subnet="10.1.0.0/16")
    assert any("this PC's address 192.168.77.1 is not" in warning for warning in warnings)


def test_a_host_name_as_address_is_refused(bootable: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nfs\.address: expected an IPv4 address"):
        written(bootable, tmp_path, address="my-pc.local")
