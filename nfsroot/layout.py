"""What an export consists of and where each part lies.

The exported tree holds the board's files and nothing else, so everything about it lies beside it. For a tree at
``…/nfsroot``::

    nfsroot/                 the root filesystem, owners and modes as on the board
    nfsroot.manifest.json    image, hashes, counts, what the audit found and mended
    nfsroot.files/           the marker that makes the tree ours, keys, and the files rendered from templates
    .nfsroot.lock            held by an export, so that there is one at a time
    .nfsroot.served          held by every server of the tree, so that no export changes it under a board
    .nfsroot.export/         where the next tree is written; gone when no export runs

The marker names the trees it stands for by inode and time of birth: another folder under the same name is not ours,
even where the file system gave it the inode of a tree that was removed.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from nfsroot.tree import follow
from toolchain import files, manifest
from toolchain.config import Config
from toolchain.errors import ArtefactMissing
from toolchain.manifest import Manifest

_AT_FDCWD = -100
_STATX_BTIME = 0x800


@dataclass(frozen=True)
class Layout:
    """The paths of one export; ``tree`` is the root filesystem (or the tarball)."""

    tree: Path

    @classmethod
    def of(cls, config: Config) -> Layout:
        """The export that the configuration names."""
        return cls(config.nfsroot)

    @property
    def manifest(self) -> Path:
        """What was exported."""
        return self.tree.with_name(f"{self.tree.name}.manifest.json")

    @property
    def folder(self) -> Path:
        """Everything that accompanies the tree."""
        return self.tree.with_name(f"{self.tree.name}.files")

    @property
    def lock(self) -> Path:
        """Held while an export runs."""
        return self.tree.with_name(f".{self.tree.name}.lock")

    @property
    def served(self) -> Path:
        """Held, shared, while servers serve the tree, and alone while an export replaces it."""
        return self.tree.with_name(f".{self.tree.name}.served")

    @property
    def aside(self) -> Path:
        """Where the next export is prepared; on the same file system as the tree."""
        return self.tree.with_name(f".{self.tree.name}.export")

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
    found = identity_of(layout.tree)
    return not named_trees(layout).isdisjoint({found, found.partition("@")[0]})


def is_ours(layout: Layout) -> bool:
    """Whether the folder at the tree's place may be replaced: the marker stands for it beyond doubt.

    Where all that is known is an inode, the folder must also have a host key that the export noted: no other one does.
    """
    found = identity_of(layout.tree)
    if "@" in found and found in named_trees(layout):
        return True
    return is_named(layout) and _has_our_key(layout)


def _has_our_key(layout: Layout) -> bool:
    try:
        known = layout.known_hosts.read_bytes().split(b"\n")
        keys = follow(layout.tree, "etc/ssh").glob("ssh_host_*_key.pub")
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
    """The manifest of an export that is whole.

    Raises ArtefactMissing when there is none, or when the folder at its place is another one.
    """
    found = manifest.require(layout.manifest, "export-nfsroot")
    if not layout.tree.is_dir() or not is_named(layout):
        raise ArtefactMissing(
            f"{layout.tree} is not the tree that was exported",
            expected=f"the folder that {layout.marker} names",
            found="another folder" if layout.tree.is_dir() else "no folder",
            mend="run ./inv export-nfsroot",
        )
    return found
