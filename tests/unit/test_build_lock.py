"""Tests of the lock on a target's folder, and of the removal of leftovers from killed builds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ordinary_user import run_python
from registry_parts import small_disk
from test_flow import needs_root, public

from flow.build_lock import build_lock
from toolchain import files, leftovers
from toolchain.config import ROOT
from toolchain.errors import RootNeeded

__all__ = ["public"]


@needs_root
def test_a_build_folder_of_another_user_is_rejected(tmp_path: Path, public: Path) -> None:
    theirs = public / "theirs"
    theirs.mkdir(mode=0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(RootNeeded, match="belongs to another user") as caught, build_lock(theirs):
            raise AssertionError("the block must not run")
    finally:
        os.seteuid(0)
    assert "build.folder" in caught.value.fix


BRING_UP_TO_DATE = """
import sys
from pathlib import Path
from flow.build_lock import build_lock
from toolchain.steps import Made, Pipeline, Step

def action(_):
    print("ran")
    return Made()

folder, version = Path(sys.argv[1]), sys.argv[2]
with build_lock(folder):
    if version == "twice":
        with build_lock(folder):
            print("both")
    pipeline = Pipeline(folder, (Step(name="image", title="image", inputs={"version": version}, action=action),))
    pipeline.execute(pipeline.plan())
"""


@needs_root
def test_others_can_only_use_the_products_of_root(open_checkout: Path, public: Path) -> None:
    """For example, a user can run ``shell`` after ``sudo ./inv build-image``."""
    theirs = public / "theirs"

    def as_user(version: str) -> subprocess.CompletedProcess[str]:
        words = ("-c", BRING_UP_TO_DATE, str(theirs), version)
        return run_python(open_checkout, *words, environment={"HOME": str(public)})

    subprocess.run([sys.executable, "-c", BRING_UP_TO_DATE, theirs, "1"], cwd=ROOT, check=True)
    used = as_user("1")
    assert (used.returncode, used.stdout) == (0, ""), used.stderr
    refused = as_user("2").stderr
    assert "RootNeeded: " in refused
    assert "belongs to another user" in refused
    assert "the folder is not writable, and the step 'image' must run" in refused
    assert "sudo" in refused
    assert "UserError: another build is running" in as_user("twice").stderr


KILLED = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from flow.build_lock import build_lock
from toolchain import files
folder = Path(sys.argv[1])
with build_lock(folder), files.replacing(folder / "rootfs.tar") as aside, ExitStack() as stack:
    places = [(folder, "tools"), (folder / "work", "wheel"), (folder / "mirror", "pockets")]
    places += [(folder.parent / "archives", "apt"), (folder.parent / "sources", "pytorch")]
    for place, name in places:
        (stack.enter_context(files.scratch_folder(place, name)) / "large").write_bytes(os.urandom(1 << 20))
    aside.write_text("half")
    aside.with_name(aside.name + ".tar").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_next_build_removes_leftovers_of_a_killed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Leftovers can take up gigabytes. Other files in the folders are not removed."""
    folder = tmp_path / "target"
    ended = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (folder / ".rootfs.tar.17.scratch").mkdir()
    assert len(list(folder.iterdir())) == 7
    theirs = {
        *(folder / name for name in ("lock", ".nfsroot.export", ".nfsroot.lock", ".mine", "rootfs.tar", "tools")),
        *(folder / name for name in (".tools.tar", "a.17.part", "work", "mirror")),
        *(folder / "work" / name for name in ("libqpu-0123456789ab", ".wheel", ".cache.settings")),
        *(tmp_path / "archives" / name for name in ("trixie-armhf-rootfs", ".wheel.abcdefgh")),
    }
    for kept in theirs:
        if not kept.exists():
            kept.mkdir()
    with build_lock(folder):
        left = {path for place in (folder, folder / "work", tmp_path / "archives") for path in place.iterdir()}
        assert left == theirs
        assert [*(folder / "mirror").iterdir(), *(tmp_path / "sources").iterdir()] == []
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r" *removed files that killed tasks left behind: (\S+, ){2}\S+ and 5 more \(5\.0 MiB\)", said
    ), said
    with build_lock(folder):
        assert capsys.readouterr().err == ""


def test_folders_in_use_are_not_leftovers(tmp_path: Path) -> None:
    """Builds of another target or of a wheel, and exports, do not hold this target's lock."""
    folder = tmp_path / "target"
    with (
        files.scratch_folder(folder / "work", "wheel") as wheel,
        files.scratch_folder(tmp_path / "archives", "apt") as packages,
        files.scratch_folder(folder, "overlay") as layers,
        build_lock(folder),
    ):
        assert all(path.is_dir() for path in (wheel, packages, layers))
    assert [path for place in ("target", "target/work", "archives") for path in (tmp_path / place).glob(".*")] == []


def test_a_file_that_its_task_renames_is_not_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / ".pytorch.tar.gz.99.part"
    part.write_text("finished")

    def rename(**_: object) -> list[object]:
        part.rename(tmp_path / "pytorch.tar.gz")
        return []

    monkeypatch.setattr(psutil, "disk_partitions", rename)
    leftovers.clear([part], tmp_path)
    assert capsys.readouterr().err == ""
    assert (tmp_path / "pytorch.tar.gz").read_text() == "finished"


@pytest.mark.parametrize("way", ["place", "word", "file"])
def test_programs_of_a_killed_task_keep_their_folder(tmp_path: Path, way: str) -> None:
    place = tmp_path / "target" / "work" / ".wheel.abcdefgh.scratch"
    place.mkdir(parents=True)
    (place / "file").touch()
    words = ["sh", "-c", "echo; read x", *([f"Dir::Log={place}"] if way == "word" else [])]
    with (
        (place / "file").open() as opened,
        subprocess.Popen(
            words,
            cwd=place if way == "place" else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=opened if way == "file" else None,
        ) as running,
    ):
        opened.close()
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        with build_lock(tmp_path / "target"):
            assert (place / "file").exists()
        running.communicate(b"\n")
    with build_lock(tmp_path / "target"):
        assert not place.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / ".wheel.abcdefgh.scratch"
    elsewhere.mkdir(parents=True)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "work").symlink_to(elsewhere.parent)
    (folder / ".tools.abcdefgh.scratch").symlink_to(elsewhere)
    with build_lock(folder):
        pass
    (folder / "work").unlink()
    (folder / "work").mkdir()
    (folder / "work" / ".wheel.abcdefgh.scratch").symlink_to(elsewhere)
    with build_lock(folder):
        assert (folder / "work" / ".wheel.abcdefgh.scratch").is_symlink()
    assert (folder / ".tools.abcdefgh.scratch").is_symlink()
    assert elsewhere.is_dir()


def test_a_leftover_with_a_mount_below_stays(tmp_path: Path) -> None:
    place = tmp_path / "a target" / "work" / ".wheel.abcdefgh.scratch"
    place.mkdir(parents=True)
    with small_disk(place / "below it", "1m") as disk:
        (disk / "file").touch()
        with build_lock(tmp_path / "a target"):
            assert (disk / "file").exists()
    with build_lock(tmp_path / "a target"):
        assert not place.exists()


def test_a_mount_point_is_not_a_leftover(tmp_path: Path) -> None:
    place = tmp_path / ".tools.abcdefgh.scratch"
    with small_disk(place, "1m"):
        (place / "file").touch()
        with build_lock(tmp_path):
            assert (place / "file").exists()
    with build_lock(tmp_path):
        assert not place.exists()
