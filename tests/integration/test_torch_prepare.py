"""Tests of recipes/torch/inside/prepare on a small source, with the programs of torch's builder."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
from git_parts import git

from flow import roots
from flow.context import Context
from flow.main_job import Built
from images import rootfs
from images.flavour import load_suite
from images.recorded_sources import sources_of
from recipes import recipe
from recipes.torch import source
from toolchain.config import Config

PREPARE = Path(__file__).resolve().parents[2] / "recipes" / "torch" / "inside" / "prepare"
# The packages of torch_builder in images/packages.toml that prepare uses, and a shell.
PACKAGES = ("dash", "coreutils", "dpkg-dev", "patch", "xz-utils", "flatbuffers-compiler")
SCHEMA = "namespace small;\ntable Module { name: string; }\nroot_type Module;\n"
CONTROL = """Source: small
Maintainer: Nobody <nobody@example.org>

Package: small
Architecture: all
Description: small
"""
CHANGELOG = """small (1.0-1) unstable; urgency=low

  * Small.

 -- Nobody <nobody@example.org>  Wed, 01 Jan 2025 00:00:00 +0000
"""


def replaces(before: str, after: str) -> str:
    """Make a patch for the small source's only line."""
    return f"Why.\n\n--- a/words.txt\n+++ b/words.txt\n@@ -1 +1 @@\n-{before}\n+{after}\n"


class Room:
    """A root that contains the programs that the script needs, and in /usr/src the builder container's mounts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "usr/src/torch"
        self.source = root / "usr/src/source"
        self.patches = root / "usr/src/recipe/patches/2.6.0"

    def empty(self) -> None:
        """Make the script's folder, an empty folder for the source, and patches for both kinds of source."""
        shutil.rmtree(self.root / "usr/src", ignore_errors=True)
        for folder in (self.home, self.source, self.patches / "archive", self.patches / "git"):
            folder.mkdir(parents=True)
        inside = self.root / "usr/src/recipe/inside"
        inside.mkdir()
        shutil.copy(PREPARE, inside)
        (self.patches / "0001-first.patch").write_text(replaces("upstream", "first"))
        (self.patches / "0002-second.patch").write_text(replaces("first", "second"))
        (self.patches / "archive/0001-archive.patch").write_text(replaces("second", "the archive's"))
        (self.patches / "git/0001-git.patch").write_text(replaces("second", "upstream's tag"))

    def call(self, *argv: str, at: str = "/usr/src/torch") -> subprocess.CompletedProcess[str]:
        """Run a program from the root in one of the root's folders."""
        entered = ["chroot", str(self.root), "/bin/sh", "-c", 'cd "$1" && shift && "$@"', "sh", at, *argv]
        environment = {"PATH": "/usr/bin:/bin:/usr/sbin", "LC_ALL": "C.UTF-8"}
        return subprocess.run(entered, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def prepare(self, kind: str) -> subprocess.CompletedProcess[str]:
        """Run the script as the build does."""
        return self.call("/usr/src/recipe/inside/prepare", "/usr/src/source", kind, "2.6.0")

    def plain_source(self, folder: Path) -> None:
        """Write upstream's files."""
        (folder / "torch/csrc/jit/serialization").mkdir(parents=True)
        (folder / "torch/csrc/jit/serialization/mobile_bytecode.fbs").write_text(SCHEMA)
        (folder / "words.txt").write_text("upstream\n")

    def source_package(self) -> None:
        """Write a source package: upstream's tar, the distribution's tar, and their description."""
        tree = self.source / "small-1.0"
        self.plain_source(tree)
        pack = ("tar", "--create", "--xz", "--file", "small_1.0.orig.tar.xz", tree.name)
        packed = self.call(*pack, at="/usr/src/source")
        assert packed.returncode == 0, packed.stderr
        (tree / "debian/source").mkdir(parents=True)
        (tree / "debian/source/format").write_text("3.0 (quilt)\n")
        (tree / "debian/control").write_text(CONTROL)
        (tree / "debian/changelog").write_text(CHANGELOG)
        made = self.call("dpkg-source", "--build", tree.name, at="/usr/src/source")
        assert made.returncode == 0, made.stderr
        shutil.rmtree(tree)

    def left(self) -> list[str]:
        """List the names in the build folder."""
        return sorted(path.name for path in self.home.iterdir())


@pytest.fixture(scope="module")
def programs(built: Built, product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Room:
    folder = tmp_path_factory.mktemp("prepare")
    with Context(product_config) as context:
        spec = roots.root_spec(context, "small-tools", PACKAGES, built.manifest("mirror"), (context.native,))
    rootfs.build_tools(spec, folder / "root", folder / "log", standing_in=())
    root = folder / "root"
    for name in ("bin", "sbin", "lib", "lib64"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").mkdir(exist_ok=True)
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/null").touch()
    return Room(root)


@pytest.fixture
def room(programs: Room) -> Room:
    programs.empty()
    return programs


def test_a_source_package_is_unpacked_patched_and_completed(room: Room) -> None:
    room.source_package()
    done = room.prepare("archive")
    assert done.returncode == 0, done.stderr
    reported = [line for line in done.stdout.splitlines() if line.startswith("applying")]
    assert reported == ["applying 0001-first.patch", "applying 0002-second.patch", "applying 0001-archive.patch"]
    assert room.left() == ["pytorch"]
    tree = room.home / "pytorch"
    assert (tree / "words.txt").read_text() == "the archive's\n"
    assert (tree / "third_party/googletest").is_dir()
    made = (tree / "torch/csrc/jit/serialization/mobile_bytecode_generated.h").read_text()
    assert "struct ModuleBuilder" in made
    assert "struct ModuleT" not in made, "the header must not contain the object-based API, which is optional"


def test_an_upstream_tag_is_copied_and_patched(room: Room) -> None:
    room.plain_source(room.source)
    done = room.prepare("git")
    assert done.returncode == 0, done.stderr
    assert (room.home / "pytorch/words.txt").read_text() == "upstream's tag\n"
    assert not (room.home / "pytorch/torch/csrc/jit/serialization/mobile_bytecode_generated.h").exists()
    assert (room.source / "words.txt").read_text() == "upstream\n", "the source must not change"
    assert room.left() == ["pytorch"]


def test_a_patch_that_fails_leaves_no_source_tree(room: Room) -> None:
    room.plain_source(room.source)
    second = room.patches / "0002-second.patch"
    fits = second.read_text()
    second.write_text(replaces("what another release has", "second"))
    done = room.prepare("git")
    assert done.returncode != 0
    assert "FAILED" in done.stdout
    assert "pytorch" not in room.left()
    second.write_text(fits)
    assert room.prepare("git").returncode == 0, "leftovers of the first run must be removed"
    assert room.left() == ["pytorch"]


def test_an_archive_with_a_wrong_checksum_is_rejected(room: Room) -> None:
    room.source_package()
    archive = room.source / "small_1.0.orig.tar.xz"
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(bytes(content))
    done = room.prepare("archive")
    assert done.returncode != 0
    assert "sum" in done.stderr, done.stderr
    assert room.left() == []


@pytest.mark.expensive
def test_our_patches_apply_to_upstreams_tree(room: Room, built: Built, product_config: Config, tmp_path: Path) -> None:
    """With ``--source=git``, the source is a tag in upstream's repository, without the distribution's patches.

    In this test, the tree comes from the distribution's archive of upstream's release, which lacks submodules. The
    fetch, the pin and the patches are the same as for upstream's repository. The test is expensive because it fetches
    50 MB.
    """
    data, suite = recipe.load("torch"), load_suite("trixie")
    log = tmp_path / "log"
    package = source.obtain(data, suite, "archive", sources_of(built.manifest("mirror")), tmp_path / "sources", log)
    shutil.copytree(package.folder, room.source, dirs_exist_ok=True)
    (description,) = room.source.glob("*.dsc")
    unpacked = room.call(
        *("dpkg-source", "--skip-patches", "--no-copy", "--extract", description.name, "upstream"),
        at="/usr/src/source",
    )
    assert unpacked.returncode == 0, unpacked.stderr
    upstream = tmp_path / "upstream"
    shutil.move(room.source / "upstream", upstream)
    shutil.rmtree(upstream / "debian")
    git(upstream, "init", "--quiet")
    git(upstream, "add", "--all", "--force")
    git(upstream, "commit", "--quiet", "--message=as released")
    git(upstream, "tag", data.tables["git"]["tag"])
    pins = {**data.tables["git"], "url": upstream.as_uri(), "commit": git(upstream, "rev-parse", "HEAD")}
    pinned = dataclasses.replace(data, tables={**data.tables, "git": pins})
    fetched = source.obtain(pinned, suite, "git", (), tmp_path / "sources", log)
    room.empty()
    for folder in (room.source, room.patches):
        shutil.rmtree(folder)
    shutil.copytree(fetched.folder, room.source, symlinks=True)
    patches = PREPARE.parents[1] / "patches" / data.settings["version"]
    shutil.copytree(patches, room.patches)
    done = room.prepare("git")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    applied = [line.removeprefix("applying ") for line in done.stdout.splitlines() if line.startswith("applying")]
    wanted = [*sorted(patches.glob("*.patch")), *sorted(patches.glob("git/*.patch"))]
    assert applied == [path.name for path in wanted]
    assert "saving rejects" not in done.stdout
    assert (room.home / "pytorch/version.txt").read_text() == "2.6.0\n"
