"""What an export consists of and where each part lies.

The exported tree holds the board's files and nothing else, so everything about it lies beside it. For an export to
``…/nfsroot``::

    nfsroot/                 root's alone (mode 0700): no other user of the PC reaches what a board writes
    nfsroot/tree/            the root filesystem, owners and modes as on the board
    nfsroot.manifest.json    image, hashes, counts, what the audit found and fixed
    nfsroot.files/           the marker that makes the tree ours, keys, and the files rendered from templates
    .nfsroot.lock            held by an export, so that there is one at a time
    .nfsroot.served          held by every server of the tree, so that no export changes it under a board
    .nfsroot.export/         where the next tree is written; gone when no export runs

The marker names the trees it stands for by inode and time of birth: another folder under the same name is not ours,
even where the file system gave it the inode of a tree that was removed.

A board writes as root, setuid programs too. In a folder that others can enter, a program that is setuid root makes
every user of the PC root, hence mode 0700. The mode cannot be the tree's own: on the board, it is that of ``/``.
Earlier versions had the tree at ``nfsroot/`` itself; ``move_in`` moves such a one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nfsroot.tree import follow, require_unmounted
from toolchain import caller, files, manifest, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, InUse
from toolchain.manifest import Manifest

_AT_FDCWD = -100
_STATX_BTIME = 0x800


@dataclass(frozen=True)
class Layout:
    """The paths of one export; ``place`` is the folder (or the tarball) that the user names."""

    place: Path

    @classmethod
    def of(cls, config: Config) -> Layout:
        """The export that the configuration names."""
        return cls(config.nfsroot)

    @property
    def tree(self) -> Path:
        """The root filesystem."""
        return self.place / "tree"

    @property
    def manifest(self) -> Path:
        """What was exported."""
        return self.place.with_name(f"{self.place.name}.manifest.json")

    @property
    def folder(self) -> Path:
        """Everything that accompanies the tree."""
        return self.place.with_name(f"{self.place.name}.files")

    @property
    def lock(self) -> Path:
        """Held while an export runs."""
        return self.place.with_name(f".{self.place.name}.lock")

    @property
    def served(self) -> Path:
        """Held, shared, while servers serve the tree, and alone while an export replaces it."""
        return self.place.with_name(f".{self.place.name}.served")

    @property
    def aside(self) -> Path:
        """Where the next export is prepared; on the same file system as the tree."""
        return self.place.with_name(f".{self.place.name}.export")

    @property
    def moving(self) -> Path:
        """The next ``place``, while a tree of an earlier version is moved into it."""
        return self.place.with_name(f".{self.place.name}.moving")

    @property
    def client_key(self) -> Path:
        """Private key that logs in to the board as root."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The board's host keys, valid for every address it is reached at."""
        return self.folder / "ssh_known_hosts"

    @property
    def exports(self) -> Path:
        """Line for /etc/exports of the kernel server."""
        return self.folder / "exports"

    @property
    def ganesha_conf(self) -> Path:
        """Configuration of the user-space server."""
        return self.folder / "ganesha.conf"

    @property
    def tftp(self) -> Path:
        """What a board without a card fetches: config.txt, cmdline.txt, kernel, initramfs, device trees."""
        return self.folder / "tftp"

    @property
    def cmdline(self) -> Path:
        """Kernel command line of the board."""
        return self.tftp / "cmdline.txt"

    @property
    def config_txt(self) -> Path:
        """The firmware's configuration."""
        return self.tftp / "config.txt"

    @property
    def helper(self) -> Path:
        """enter-nfsroot, to be copied to the board."""
        return self.folder / "enter-nfsroot"

    @property
    def marker(self) -> Path:
        """Says which trees are ours."""
        return self.folder / files.MARKER


def identity_of(folder: Path) -> str:
    """What tells a folder from every other, removed ones too: its inode and when it was born, ``INODE@NANOSECONDS``.

    Where the file system does not know when (ext4 with small inodes) the inode alone: such a number is given again.
    """
    inode, birth = folder.stat().st_ino, _birth_of(folder)
    return f"{inode}@{birth}" if birth else f"{inode}"


def _birth_of(folder: Path) -> int:
    """When the folder was made, in nanoseconds (statx(2), which Python does not have); 0 where nobody knows."""
    found = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    if libc.statx(_AT_FDCWD, os.fsencode(folder), 0, ctypes.c_uint(_STATX_BTIME), found) != 0:
        return 0
    (told,) = struct.unpack_from("=I", found, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
    return int(seconds) * 10**9 + int(nanoseconds) if told & _STATX_BTIME else 0


def named_trees(layout: Layout) -> frozenset[str]:
    """The trees that the marker stands for, as ``identity_of`` has them; empty without a (whole) marker."""
    try:
        said = json.loads(layout.marker.read_text())
        # Markers of before have inodes alone.
        return frozenset(str(tree) for tree in said.get("trees", said.get("inodes", ())))
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, TypeError):
        return frozenset()


def is_named(layout: Layout) -> bool:
    """Whether the folder at the tree's place is one that the marker stands for, by its inode at least."""
    return _named(layout, layout.tree)


def _named(layout: Layout, folder: Path) -> bool:
    found = identity_of(folder)
    return not named_trees(layout).isdisjoint({found, found.partition("@")[0]})


def is_ours(layout: Layout) -> bool:
    """Whether the folder at the tree's place may be replaced: the marker stands for it beyond doubt.

    Where all that is known is an inode, the folder must also have a host key that the export noted: no other one does.
    """
    return _ours(layout, layout.tree)


def _ours(layout: Layout, folder: Path) -> bool:
    found = identity_of(folder)
    if "@" in found and found in named_trees(layout):
        return True
    return _named(layout, folder) and _has_our_key(layout, folder)


def _has_our_key(layout: Layout, tree: Path) -> bool:
    try:
        known = layout.known_hosts.read_bytes().split(b"\n")
        keys = follow(tree, "etc/ssh").glob("ssh_host_*_key.pub")
        return any(b"* " + key.read_bytes().strip() in known for key in keys)
    except OSError:
        return False


def write_marker(layout: Layout, trees: frozenset[str]) -> None:
    """Make these trees ours."""
    files.write_text_atomically(layout.marker, marker_of(trees))


def marker_of(trees: frozenset[str]) -> str:
    """What a marker says."""
    return json.dumps({"trees": sorted(trees)}) + "\n"


def require_export(layout: Layout) -> Manifest:
    """The manifest of an export that is whole. As root, the folder that holds the tree is made private.

    An ordinary user cannot look into that folder, and gets the manifest alone. Raises ArtefactMissing when there is no
    export, or when the folder at its place is another one; InUse when a tree of an earlier version is to be moved and
    is in use.
    """
    found = manifest.require(layout.manifest, "export-nfsroot")
    is_root = os.geteuid() == 0
    if is_root and (_is_bare(layout) or layout.moving.is_dir()):
        with _unused(layout):
            move_in(layout)
    try:
        there = stat.S_ISDIR(layout.tree.stat().st_mode)
        whole = there and is_named(layout)
    except PermissionError:
        return found
    except (FileNotFoundError, NotADirectoryError):
        there = whole = False
    if not whole:
        bare = _is_bare(layout)
        raise ArtefactMissing(
            f"{layout.tree} is not the tree that was exported",
            expected=f"the folder that {layout.marker} names",
            found=f"a tree at {layout.place}, open to all users"
            if bare
            else "another folder"
            if there
            else "no folder",
            fix=f"as root, which moves it: {caller.as_root('./inv export-nfsroot')}"
            if bare
            else "run ./inv export-nfsroot",
        )
    if is_root:
        keep_private(layout)
    return found


def keep_private(layout: Layout) -> None:
    """Let root alone into the folder that holds the tree. The caller is root."""
    os.chown(layout.place, 0, 0, follow_symlinks=False)
    layout.place.chmod(0o700)


def move_in(layout: Layout) -> None:
    """Move a tree of an earlier version, which is open to all users, into a folder that only root can enter.

    The caller is root and holds the locks. Raises InUse where something is mounted in it.
    """
    if layout.moving.is_dir() and not os.path.lexists(layout.place):
        layout.moving.rename(layout.place)  # left by a run that was killed between the two renames below
    if not _is_bare(layout):
        return
    require_unmounted(layout.place, "moved")
    files.remove(layout.moving)
    layout.moving.mkdir(mode=0o700)
    with files.swapping():
        layout.place.rename(layout.moving / layout.tree.name)
        layout.moving.rename(layout.place)
    progress.warn(
        f"the exported tree is now {layout.tree}, in a folder that only root can enter: "
        "run ./inv export-nfsroot, and give boards that name the old path the new command line"
    )


def _is_bare(layout: Layout) -> bool:
    """Whether the tree is where earlier versions had it: it is the named folder itself."""
    return layout.place.is_dir() and not layout.place.is_symlink() and _ours(layout, layout.place)


@contextlib.contextmanager
def _unused(layout: Layout) -> Iterator[None]:
    refusal = InUse(
        f"{layout.place} must be moved into a folder that only root can enter, and is in use",
        expected=f"nobody holds {layout.lock} or {layout.served}",
        found="a lock",
        fix="end the export, ./inv serve-nfsroot or the test that uses it, then try again",
    )
    with files.held(layout.lock, refusal), files.held(layout.served, refusal):
        yield
