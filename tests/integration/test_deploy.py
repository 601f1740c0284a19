"""Tests of deployments to an exported tree: replaced, removed and unchanged files, and refused layers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_parts import layer
from exports import mark_as_export
from waiting import eventually

from device import deploy
from flow import main_job
from nfsroot import export
from nfsroot.layout import Layout
from nfsroot.tree import TreeHash
from toolchain import files
from toolchain.config import ROOT, load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, ConfigError, InUse, PlatformMismatch
from toolchain.manifest import Artefact, Manifest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to create files with a board's owners")

SITE = "usr/local/lib/python3.13/dist-packages"


def exported_tree(folder: Path, content: Mapping[str, str]) -> Layout:
    """Make a small tree with an export's marker and manifest."""
    layout = Layout(folder / "nfsroot")
    layout.tree.mkdir(parents=True)
    for path, text in content.items():
        place = layout.tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    mark_as_export(layout, image_id="sha256:1", rootfs_sha256=TreeHash.of(layout.tree).sha256)
    return layout


LIBRARY = {
    "opt/pitorch/lib/libqpu.so.1.0": "library 2",
    "opt/pitorch/lib/libqpu.so.1": "->libqpu.so.1.0",
    "opt/pitorch/include/QPULib.h": "header",
}


@root_only
def test_only_changed_files_are_replaced(tmp_path: Path) -> None:
    layout = exported_tree(
        tmp_path, {"opt/pitorch/lib/libqpu.so.1.0": "library 1", "opt/pitorch/include/QPULib.h": "header", "etc/x": "y"}
    )
    header = layout.tree / "opt/pitorch/include/QPULib.h"
    header.chmod(0o644)
    inode = header.stat().st_ino
    before = Manifest.read(layout.manifest)
    with (layout.tree / "opt/pitorch/lib/libqpu.so.1.0").open() as in_use:
        done = deploy.put(layout, [layer(tmp_path / "libqpu.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])
        assert in_use.read() == "library 1", "a running program must keep its library"
    library = layout.tree / "opt/pitorch/lib/libqpu.so.1.0"
    assert library.read_text() == "library 2"
    assert (library.stat().st_mode & 0o7777, library.stat().st_mtime) == (0o644, 1735689600)
    assert (layout.tree / "opt/pitorch/lib/libqpu.so.1").readlink() == Path("libqpu.so.1.0")
    assert header.stat().st_ino == inode
    assert (layout.tree / "etc/x").read_text() == "y"
    (change,) = done.changes
    assert change.replaced == ("opt/pitorch/lib/libqpu.so.1.0", "opt/pitorch/lib/libqpu.so.1")
    assert (change.removed, change.unchanged, done.changed) == ((), 1, True)
    assert [line.split("  ") for line in done.checksums.splitlines()] == [
        [files.sha256_of(header), "/opt/pitorch/include/QPULib.h"],
        [files.sha256_of(library), "/opt/pitorch/lib/libqpu.so.1.0"],
    ]
    after = Manifest.read(layout.manifest)
    assert before is not None
    assert after is not None
    assert after.facts["rootfs_sha256"] == done.rootfs_sha256 == TreeHash.of(layout.tree).sha256
    assert after.facts["rootfs_sha256"] != before.facts["rootfs_sha256"]
    assert after.facts["image_id"] == before.facts["image_id"]
    assert after.facts["deployed"] == [{"layer": "libqpu.tar", "sha256": change.layer.sha256, "replaced": 2}]


@root_only
def test_manifest_of_the_tree_records_the_wheel_of_a_layer(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    wheel = tmp_path / "pitorch_qpu_ops-0.1.0-cp313-cp313-linux_armv7l.whl"
    wheel.write_text("wheel")
    layers = [
        layer(tmp_path / "libqpu.tar", LIBRARY),
        layer(tmp_path / "qpu-ops-site.tar", {f"{SITE}/cpu_cpp.py": "new"}),
    ]
    made = Artefact.of(wheel)
    deploy.put(layout, layers, owned_prefixes=["/opt/pitorch"], wheels={"qpu-ops-site.tar": made})
    after = Manifest.read(layout.manifest)
    assert after is not None
    noted = {item["layer"]: item.get("wheel") for item in after.facts["deployed"]}
    assert noted == {
        "libqpu.tar": None,
        "qpu-ops-site.tar": {"name": wheel.name, "size": 5, "sha256": made.sha256},
    }


@root_only
@pytest.mark.parametrize("name", ["libqpu.so.1.0", "libqpu.so.1"])
def test_boards_link_with_a_temporary_name_is_not_followed(tmp_path: Path, name: str) -> None:
    """A board writes to the tree as root, so it can create links to files of this PC."""
    layout = exported_tree(tmp_path, {"opt/pitorch/lib/other": ""})
    theirs = tmp_path / "file of the PC"
    theirs.write_text("secret")
    (layout.tree / f"opt/pitorch/lib/.{name}.{os.getpid()}.part").symlink_to(theirs)
    deploy.put(layout, [layer(tmp_path / "libqpu.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])
    assert theirs.read_text() == "secret"
    assert (layout.tree / "opt/pitorch/lib/libqpu.so.1").read_text() == "library 2"


@root_only
def test_temporary_files_of_a_killed_deployment_are_removed(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"opt/pitorch/lib/.libqpu.so.1.0.1.part": "part", f"{SITE}/.a[1].py.1.part": ""})
    made = layer(tmp_path / "made.tar", {**LIBRARY, f"{SITE}/a[1].py": "new"})
    deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    assert list(layout.tree.rglob("*.part")) == []


def test_export_during_a_deployment_is_refused(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    with deploy._locked(layout), pytest.raises(InUse, match="another export or deployment"), export.locked(layout):
        raise AssertionError("two runs hold the lock")


@root_only
def test_second_deployment_changes_nothing(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    made = layer(tmp_path / "libqpu.tar", LIBRARY)
    first = deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    stamp = layout.manifest.stat().st_mtime_ns
    second = deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    assert (first.changed, second.changed) == (True, False)
    assert second.rootfs_sha256 == first.rootfs_sha256
    assert layout.manifest.stat().st_mtime_ns == stamp


@root_only
def test_files_missing_from_the_new_layer_are_removed(tmp_path: Path) -> None:
    old = {
        "opt/pitorch/lib/libqpu.so.1.0": "library 2",
        "opt/pitorch/share/old/notes": "gone upstream",
        "opt/other/keep": "another package",
        f"{SITE}/cpu_cpp.py": "old",
        f"{SITE}/oldest_cpp.py": "old",
        f"{SITE}/__pycache__/oldest_cpp.cpython-313.pyc": "old",
        f"{SITE}/other.py": "another package",
        f"{SITE}/pitorch_qpu_ops-0.0.9.dist-info/RECORD": "cpu_cpp.py,,\noldest_cpp.py,,\n../../../../../etc/x,,\n"
        "../../../../../../../outside,,\npitorch_qpu_ops-0.0.9.dist-info/RECORD,,\n",
        "etc/x": "listed in RECORD, so the wheel installed it",
    }
    layout = exported_tree(tmp_path, old)
    (tmp_path / "outside").write_text("on the host")
    wheel = {f"{SITE}/cpu_cpp.py": "new", f"{SITE}/pitorch_qpu_ops-0.1.0.dist-info/RECORD": "cpu_cpp.py,,\n"}
    done = deploy.put(
        layout,
        [layer(tmp_path / "a.tar", LIBRARY), layer(tmp_path / "b.tar", wheel)],
        owned_prefixes=["/opt/pitorch"],
    )
    assert done.changes[0].removed == ("opt/pitorch/share/old/notes",)
    assert set(done.changes[1].removed) == {
        f"{SITE}/oldest_cpp.py",
        f"{SITE}/__pycache__/oldest_cpp.cpython-313.pyc",
        f"{SITE}/pitorch_qpu_ops-0.0.9.dist-info/RECORD",
        "etc/x",
    }
    assert not (layout.tree / "opt/pitorch/share").exists()
    assert not (layout.tree / SITE / "pitorch_qpu_ops-0.0.9.dist-info").exists()
    assert (layout.tree / SITE / "cpu_cpp.py").read_text() == "new"
    assert (layout.tree / SITE / "other.py").is_file()
    assert (layout.tree / "opt/other/keep").is_file()
    assert (tmp_path / "outside").is_file()


@root_only
def test_byte_code_of_a_replaced_module_is_removed(tmp_path: Path) -> None:
    """If the new source had the size and time stamp of the old one, Python would use the old byte code for it."""
    cache = f"{SITE}/__pycache__"
    layout = exported_tree(
        tmp_path,
        {f"{SITE}/m.py": "N = 1", f"{cache}/m.cpython-313.pyc": "of 1", f"{cache}/other.cpython-313.pyc": "stays"},
    )
    done = deploy.put(layout, [layer(tmp_path / "a.tar", {f"{SITE}/m.py": "N = 2"})], owned_prefixes=[])
    assert done.changes[0].removed == (f"{cache}/m.cpython-313.pyc",)
    assert (layout.tree / cache / "other.cpython-313.pyc").is_file()


@root_only
def test_links_of_the_board_cannot_escape_the_tree(tmp_path: Path) -> None:
    outside = tmp_path / "pc"
    outside.mkdir()
    layout = exported_tree(tmp_path, {"srv/pitorch/lib/old": "x"})
    (layout.tree / "opt").mkdir()
    (layout.tree / "opt/pitorch").symlink_to("/srv/pitorch")
    (layout.tree / "srv/pitorch/include").symlink_to("../../../../../../" + str(outside).lstrip("/"))
    (layout.tree / str(outside).lstrip("/")).mkdir(parents=True)
    deploy.put(layout, [layer(tmp_path / "libqpu.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])
    assert (layout.tree / "srv/pitorch/lib/libqpu.so.1.0").read_text() == "library 2"
    assert not (layout.tree / "srv/pitorch/lib/old").exists()
    assert list(outside.iterdir()) == []


@root_only
def test_error_before_the_renames_leaves_the_tree_unchanged(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"opt/pitorch/lib/libqpu.so.1.0": "library 1"})
    before = TreeHash.of(layout.tree).sha256
    manifest = layout.manifest.read_bytes()
    wrong = layer(tmp_path / "b.tar", {"opt/pitorch/lib": "a file where the tree has a folder"})
    with pytest.raises(ArtefactDamaged) as caught:
        deploy.put(layout, [layer(tmp_path / "a.tar", LIBRARY), wrong], owned_prefixes=["/opt/pitorch"])
    assert caught.value.found == "a folder"
    assert TreeHash.of(layout.tree).sha256 == before
    assert layout.manifest.read_bytes() == manifest


@root_only
def test_killed_deployment_can_be_repeated(tmp_path: Path) -> None:
    """A deployment that is killed after the renames, but before it records the hash, must not leave the old hash."""
    layout = exported_tree(tmp_path, {"opt/pitorch/lib/libqpu.so.1.0": "library 1"})
    made = layer(tmp_path / "libqpu.tar", LIBRARY)
    deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    manifest = Manifest.read(layout.manifest)
    assert manifest is not None
    replace(manifest, facts={**manifest.facts, "rootfs_sha256": ""}).write(layout.manifest)
    again = deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    assert not again.changed
    assert again.rootfs_sha256 == TreeHash.of(layout.tree).sha256


@root_only
def test_ctrl_c_while_writing_leaves_the_tree_unchanged(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"opt/pitorch/lib/libqpu.so.1.0": "library 1"})
    before = TreeHash.of(layout.tree).sha256
    tar = tmp_path / "big.tar"
    content = {f"opt/pitorch/lib/{number}": "x" * 4096 for number in range(20000)}
    made = layer(tar, content)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
            status = 2
        os._exit(status if status == 2 else 0)
    eventually(lambda: list((layout.tree / "opt/pitorch/lib").glob(".*.part")), interval_s=0.01)
    os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the deployment was interrupted before it finished"
    assert TreeHash.of(layout.tree).sha256 == before


@root_only
def test_damaged_layer_is_refused(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    made = layer(tmp_path / "libqpu.tar", LIBRARY)
    with made.path.open("r+b") as stream:
        stream.seek(600)
        stream.write(b"?")
    with pytest.raises(ArtefactDamaged, match="does not match its manifest"):
        deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    assert not (layout.tree / "opt").exists()


@root_only
def test_device_node_in_a_layer_is_refused(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    with tarfile.open(tmp_path / "odd.tar", "w") as archive:
        member = tarfile.TarInfo("dev-null")
        member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 3
        archive.addfile(member)
    with pytest.raises(ArtefactDamaged, match=r"odd\.tar cannot be deployed"):
        deploy.put(layout, [Artefact.of(tmp_path / "odd.tar")], owned_prefixes=[])


def test_folder_without_an_export_is_refused(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    made = layer(tmp_path / "libqpu.tar", LIBRARY)
    layout.tree.rename(tmp_path / "other")
    layout.tree.mkdir()
    with pytest.raises(ArtefactMissing) as caught:
        deploy.put(layout, [made], owned_prefixes=["/opt/pitorch"])
    assert "./inv export-nfsroot" in caught.value.fix
    assert list(layout.tree.iterdir()) == []


def test_deployment_during_an_export_is_refused(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    with layout.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="another export or deployment is writing"):
            deploy.put(layout, [layer(tmp_path / "libqpu.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])


@root_only
def test_manifest_of_an_export_that_has_just_ended_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = exported_tree(tmp_path, {"etc/x": "y"})
    take = files.held

    def export_and_take(*lock: Any) -> contextlib.AbstractContextManager[None]:
        mark_as_export(layout, image_id="sha256:2", rootfs_sha256="")
        return take(*lock)

    monkeypatch.setattr(files, "held", export_and_take)
    deploy.put(layout, [layer(tmp_path / "libqpu.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])
    manifest = Manifest.read(layout.manifest)
    assert manifest is not None
    assert manifest.facts["image_id"] == "sha256:2"


@root_only
def test_library_missing_from_the_loader_cache_is_a_warning(tmp_path: Path) -> None:
    layout = exported_tree(tmp_path, {"etc/ld.so.cache": "libqpu.so.1\0/opt/pitorch/lib/libqpu.so.1"})
    known = deploy.put(layout, [layer(tmp_path / "a.tar", LIBRARY)], owned_prefixes=["/opt/pitorch"])
    assert known.warnings == ()
    content = {path.replace("libqpu.so.1", "libqpu.so.2"): text for path, text in LIBRARY.items()}
    new = deploy.put(layout, [layer(tmp_path / "b.tar", content)], owned_prefixes=["/opt/pitorch"])
    assert new.warnings == ("libqpu.so.2 is missing from the board's loader cache: run ldconfig on the board",)


def test_extension_for_another_torch_is_refused(tmp_path: Path) -> None:
    record = f"{SITE}/torch-2.6.0.dist-info/RECORD"
    for name, text in (("tree", "one"), ("same", "one"), ("other", "another")):
        (tmp_path / name / record).parent.mkdir(parents=True)
        (tmp_path / name / record).write_text(text)
    (tmp_path / "none").mkdir()
    deploy.require_same_torch(tmp_path / "tree", tmp_path / "same")
    deploy.require_same_torch(tmp_path / "tree", tmp_path / "none")
    with pytest.raises(PlatformMismatch) as caught:
        deploy.require_same_torch(tmp_path / "tree", tmp_path / "other")
    assert "./inv export-nfsroot" in caught.value.fix
    with pytest.raises(PlatformMismatch) as caught:
        deploy.require_same_torch(tmp_path / "none", tmp_path / "other")
    assert caught.value.found == "no torch"


UPSTREAM = {
    "opt/pitorch/lib/libqpu.so.1": "library",
    "opt/pitorch/lib/libqpu.so": "library",
    "opt/pitorch/include/QPULib.h": "header",
    "opt/pitorch/lib/pkgconfig/qpu.pc": "flags",
}
OWN = {**UPSTREAM, "opt/pitorch/include/qpu.h": "header", "opt/pitorch/bin/qpu-info": "program"}


def test_a_tree_of_the_same_architecture_is_accepted(tmp_path: Path) -> None:
    for name, content in (("arm64", ARM64), ("armhf", ARMHF)):
        deploy.require_same_architecture(exported_tree(tmp_path / name, content).tree, name)
    deploy.require_same_architecture(exported_tree(tmp_path / "small", {"etc/x": "y"}).tree, "arm64")


@pytest.mark.parametrize(("content", "has"), [(OWN, "local"), (UPSTREAM, "upstream"), ({"etc/x": "y"}, "")])
def test_tree_with_the_other_qpu_library_is_refused(tmp_path: Path, content: Mapping[str, str], has: str) -> None:
    tree = exported_tree(tmp_path, content).tree
    assert deploy.library_of(tree) == has
    for chosen in deploy.LIBRARIES:
        if has in ("", chosen):
            deploy.require_same_library(tree, chosen)
            continue
        with pytest.raises(PlatformMismatch) as caught:
            deploy.require_same_library(tree, chosen)
        assert caught.value.exit_code == 26
        assert deploy.LIBRARIES[chosen][1] in caught.value.expected
        assert deploy.LIBRARIES[has][1] in caught.value.found
        assert f"./inv deploy --qpulib={has}" in caught.value.fix
        assert f"./inv build-image --qpulib={chosen}" in caught.value.fix


ARM64 = {"usr/lib/aarch64-linux-gnu/libc.so.6": "library"}
ARMHF = {"usr/lib/arm-linux-gnueabihf/libc.so.6": "library"}


@root_only
@pytest.mark.parametrize(
    ("choice", "content", "message"),
    [
        ([], UPSTREAM, "the exported tree contains a different QPU library"),
        (["--qpulib=upstream"], OWN, "the exported tree contains a different QPU library"),
        (["--architecture=armhf"], ARM64, "run ./inv deploy --architecture=arm64"),
        (["--architecture=arm64"], ARMHF, "run ./inv export-nfsroot --architecture=arm64"),
    ],
    ids=["upstream", "local", "arm64", "armhf"],
)
def test_an_unsuitable_tree_is_refused_before_the_build(
    tmp_path: Path, choice: list[str], content: Mapping[str, str], message: str
) -> None:
    layout = exported_tree(tmp_path, content)
    variables = {
        "INVOKE_NFS_FOLDER": str(layout.place),
        "INVOKE_BUILD_FOLDER": str(tmp_path / "build"),
        "DOCKER_HOST": f"unix://{tmp_path}/none",  # a build would fail here
    }
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "deploy", *choice],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 26, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "build").exists()


def test_plan_has_only_the_deployed_steps_and_their_needs(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    planned = [item.step.name for item in main_job.plan(config, only=deploy.STEPS)]
    assert planned[-2:] == list(deploy.STEPS)
    assert "mirror" in planned
    assert not {"rootfs", "system"} & set(planned)
    with pytest.raises(ConfigError, match="no step 'libcpu'"):
        main_job.plan(config, only=["libcpu"])
