"""The paths of an export's files.

The exported tree contains only the board's files; all metadata is next to it. For an export to ``…/nfsroot``::

    nfsroot/                 mode 0700: no other user of the PC has access to the board's files
    nfsroot/tree/            the root filesystem, with the board's owners and modes
    nfsroot.manifest.json    image, hashes, counts, findings of the audit
    nfsroot.files/           the marker that identifies the tree, keys, and files rendered from templates
    nfsroot.boards/          with nfs.overlay: each board's own files, by serial number or hardware address
    .nfsroot.lock            held by an export, so that only one export runs at a time
    .nfsroot.served          held by each server of the tree, so that no export replaces a tree in use
    .nfsroot.export/         the next tree while an export runs

The marker identifies trees by inode and birth time. Another folder with the same name is not accepted, even if the file
system has reused a removed tree's inode.

A board writes as root and can create setuid programs. A user of the PC who can enter the tree could become root by
running such a program, so ``nfsroot/`` has mode 0700. The tree itself cannot have this mode, because its mode is that
of ``/`` on the board. Earlier versions exported the tree to ``nfsroot/`` itself; ``move_in`` converts such an export.
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
    """The paths of one export; ``place`` is the folder or the tarball given by the user."""

    place: Path

    @classmethod
    def of(cls, config: Config) -> Layout:
        """Return the layout of the configured export."""
        return cls(config.nfsroot)

    @property
    def tree(self) -> Path:
        """The root filesystem."""
        return self.place / "tree"

    @property
    def manifest(self) -> Path:
        """The export's manifest."""
        return self.place.with_name(f"{self.place.name}.manifest.json")

    @property
    def folder(self) -> Path:
        """The folder with the files that accompany the tree."""
        return self.place.with_name(f"{self.place.name}.files")

    @property
    def boards(self) -> Path:
        """The boards' persistent folders and host keys (``nfs.overlay``), by serial number or hardware address."""
        return self.place.with_name(f"{self.place.name}.boards")

    @property
    def lock(self) -> Path:
        """The lock that an export holds while it runs."""
        return self.place.with_name(f".{self.place.name}.lock")

    @property
    def served(self) -> Path:
        """The lock that servers of the tree share, and that an export holds exclusively while it replaces the tree."""
        return self.place.with_name(f".{self.place.name}.served")

    @property
    def aside(self) -> Path:
        """The folder, on the tree's file system, in which the next export is prepared."""
        return self.place.with_name(f".{self.place.name}.export")

    @property
    def moving(self) -> Path:
        """A temporary folder that receives an earlier version's tree. This folder is then renamed to ``place``."""
        return self.place.with_name(f".{self.place.name}.moving")

    @property
    def client_key(self) -> Path:
        """The private key for SSH logins as root on the board."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The known_hosts file, in which the board's host keys are valid for every address."""
        return self.folder / "ssh_known_hosts"

    @property
    def tftp(self) -> Path:
        """The TFTP folder for boards without a card: config.txt, cmdline.txt, kernel, initramfs, device trees."""
        return self.folder / "tftp"

    @property
    def marker(self) -> Path:
        """The marker that identifies exported trees."""
        return self.folder / files.MARKER


def identity_of(folder: Path) -> str:
    """Return a folder's unique identity: inode and birth time, ``INODE@NANOSECONDS``.

    On a file system without birth times (ext4 with small inodes), the identity is only the inode, which may be reused.
    """
    inode, birth = folder.stat().st_ino, _birth_of(folder)
    return f"{inode}@{birth}" if birth else f"{inode}"


def _birth_of(folder: Path) -> int:
    """Return the birth time in nanoseconds from statx(2), which Python does not provide; 0 if unknown."""
    found = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    if libc.statx(_AT_FDCWD, os.fsencode(folder), 0, ctypes.c_uint(_STATX_BTIME), found) != 0:
        return 0
    (valid,) = struct.unpack_from("=I", found, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
    return int(seconds) * 10**9 + int(nanoseconds) if valid & _STATX_BTIME else 0


def named_trees(layout: Layout) -> frozenset[str]:
    """Return the identities of the trees that the marker lists; none if the marker is missing or invalid."""
    try:
        marker = json.loads(layout.marker.read_text())
        # Markers from earlier versions contain only inodes.
        return frozenset(str(tree) for tree in marker.get("trees", marker.get("inodes", ())))
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, TypeError):
        return frozenset()


def is_named(layout: Layout) -> bool:
    """Return whether the marker contains the full identity, or at least the inode, of the folder at the tree's path."""
    return _named(layout, layout.tree)


def _named(layout: Layout, folder: Path) -> bool:
    found = identity_of(folder)
    return not named_trees(layout).isdisjoint({found, found.partition("@")[0]})


def is_ours(layout: Layout) -> bool:
    """Return whether an export created the folder at the tree's path; only such a folder may be replaced.

    If the marker has only the inode, the folder must also contain one of the export's host keys.
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
    """Write the marker that identifies these trees as created by this program."""
    files.write_text_atomically(layout.marker, marker_of(trees))


def marker_of(trees: frozenset[str]) -> str:
    """Return the text of a marker that identifies these trees."""
    return json.dumps({"trees": sorted(trees)}) + "\n"


def require_export(layout: Layout) -> Manifest:
    """Return the manifest of a complete export.

    If the caller is root, the folder that contains the tree is made private. For an ordinary user, who cannot access
    the tree, this function only reads the manifest. Raises ArtefactMissing if there is no export or if its folder was
    replaced, and InUse if an earlier version's tree must be moved but is in use.
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
            f"{layout.tree} is not the exported tree",
            expected=f"the folder that {layout.marker} identifies",
            found=f"a tree at {layout.place}, which all users can enter"
            if bare
            else "another folder"
            if there
            else "no folder",
            fix=f"run {caller.as_root('./inv export-nfsroot')}, which moves it to a folder that only root can enter"
            if bare
            else f"run {caller.command('export-nfsroot')}",
        )
    if is_root:
        keep_private(layout)
    return found


def keep_private(layout: Layout) -> None:
    """Restrict access to the tree's parent folder to root. The caller must be root."""
    os.chown(layout.place, 0, 0, follow_symlinks=False)
    layout.place.chmod(0o700)


def move_in(layout: Layout) -> None:
    """Move an earlier version's tree, which all users can enter, into a folder that only root can enter.

    The caller must be root and must hold the export's locks. Raises InUse if something is mounted in the tree.
    """
    if layout.moving.is_dir() and not os.path.lexists(layout.place):
        layout.moving.rename(layout.place)  # left by a run that was killed between the two renames
    if not _is_bare(layout):
        return
    require_unmounted(layout.place, "moved")
    files.remove(layout.moving)
    layout.moving.mkdir(mode=0o700)
    with files.swapping():
        layout.place.rename(layout.moving / layout.tree.name)
        layout.moving.rename(layout.place)
    progress.warn(
        f"the exported tree was moved to {layout.tree}, in a folder that only root can enter: "
        "run ./inv export-nfsroot and update the kernel command line of boards that use the old path"
    )


def _is_bare(layout: Layout) -> bool:
    """Return whether the export's folder is itself the tree, as in earlier versions."""
    return layout.place.is_dir() and not layout.place.is_symlink() and _ours(layout, layout.place)


@contextlib.contextmanager
def _unused(layout: Layout) -> Iterator[None]:
    refusal = InUse(
        f"{layout.place} must be moved into a folder that only root can enter, but it is in use",
        expected=f"no lock on {layout.lock} or {layout.served}",
        found="a lock",
        fix="stop the export, ./inv serve-nfsroot or the test that uses the tree, then try again",
    )
    with files.held(layout.lock, refusal), files.held(layout.served, refusal):
        yield
