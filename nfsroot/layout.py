"""What an export consists of and where each part lies.

The exported tree holds the board's files and nothing else, so everything about it lies beside it. For a tree at
``…/nfsroot``::

    nfsroot/                 the root filesystem, owners and modes as on the board
    nfsroot.manifest.json    image, hashes, counts, what the audit found and mended
    nfsroot.files/           the marker that makes the tree ours, keys, and the files rendered from templates
    .nfsroot.lock            held by an export, so that there is one at a time
    .nfsroot.served          held by every server of the tree, so that no export changes it under a board
    .nfsroot.export/         where the next tree is written; gone when no export runs

The marker names the trees it stands for by inode: another folder under the same name is not ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from toolchain import files, manifest
from toolchain.config import Config
from toolchain.errors import ArtefactMissing
from toolchain.manifest import Manifest


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


def owned_inodes(layout: Layout) -> frozenset[int]:
    """Inodes of the trees that the marker stands for; empty without a (whole) marker."""
    try:
        return frozenset(int(inode) for inode in json.loads(layout.marker.read_text())["inodes"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return frozenset()


def write_marker(layout: Layout, inodes: frozenset[int]) -> None:
    """Make these trees ours."""
    files.write_text_atomically(layout.marker, json.dumps({"inodes": sorted(inodes)}) + "\n")


def require_export(layout: Layout) -> Manifest:
    """The manifest of an export that is whole.

    Raises ArtefactMissing when there is none, or when the folder at its place is another one.
    """
    found = manifest.require(layout.manifest, "export-nfsroot")
    if not layout.tree.is_dir() or layout.tree.stat().st_ino not in owned_inodes(layout):
        raise ArtefactMissing(
            f"{layout.tree} is not the tree that was exported",
            expected=f"the folder that {layout.marker} names",
            found="another folder" if layout.tree.is_dir() else "no folder",
            mend="run ./inv export-nfsroot",
        )
    return found
