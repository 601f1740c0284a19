"""Hash root filesystem trees deterministically, and resolve paths without leaving the tree.

The hash is the SHA-256 of the records of all entries, which are sorted by the bytes of their paths. The fields of a
record are separated by NUL, and a line feed ends the record. The fields are path, type with permission bits (octal
``st_mode``), uid, gid, content (a regular file's SHA-256, a link's target, or a device's numbers), the first path of
the hard-link group (empty if there is none), and extended attributes. Times and the labels of the host's security
module are not included, so an image has the same hash on every machine.
"""

# Names in a root filesystem are bytes, but pathlib supports only text.
# ruff: noqa: PTH115, PTH118, PTH120

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import psutil

from toolchain.architecture import ARCHITECTURES
from toolchain.errors import InUse

_BLOCK = 1 << 18
_HOST_XATTRS = ("security.selinux", "security.ima", "security.evm", "trusted.overlay.")
_SYMLINK_LIMIT = 40


@dataclass(frozen=True)
class _Entry:
    head: bytes
    tail: bytes
    inode: int
    """The inode number if the file has several names; otherwise 0."""
    mode: int
    size: int


@dataclass
class TreeHash:
    """A tree's records, kept so that a few changed entries do not require a second full pass."""

    root: Path
    _entries: dict[bytes, _Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, *, on_bytes: Callable[[int], object] = lambda _: None) -> TreeHash:
        """Read a whole tree; call ``on_bytes`` with the number of content bytes read so far."""
        made = cls(root)
        top = os.fsencode(root)
        paths = list(_walk(top))
        done = 0
        # Hashing releases the GIL, so with two threads, one can read while the other hashes.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
            hashed = pool.map(lambda part: [_entry(top, path) for path in part], chunks)
            for chunk, entries in zip(chunks, hashed, strict=True):
                made._entries.update(zip(chunk, entries, strict=True))
                done += sum(entry.size for entry in entries)
                on_bytes(done)
        return made

    def refresh(self, changed: Iterable[str | bytes]) -> None:
        """Reread the entries at the given paths (relative to the root), and their parent folders.

        The records of removed entries, and of all entries below them, are dropped.
        """
        top = os.fsencode(self.root)
        wanted: set[bytes] = {b"."}
        for name in changed:
            path = os.path.normpath(os.fsencode(name).lstrip(b"/") or b".")
            wanted.add(path)
            while (path := os.path.dirname(path)) not in (b"", b"."):
                wanted.add(path)
        for path in wanted:
            full = os.path.join(top, path)
            below = [item for item in self._entries if item.startswith(path + b"/")] if path != b"." else []
            for item in below:
                if not os.path.lexists(os.path.join(top, item)):
                    del self._entries[item]
            if not os.path.lexists(full):
                self._entries.pop(path, None)
                continue
            self._entries[path] = _entry(top, path)

    @property
    def sha256(self) -> str:
        """The hash of the tree."""
        first: dict[int, bytes] = {}
        groups: dict[int, int] = {}
        ordered = sorted(self._entries)
        for path in ordered:
            if inode := self._entries[path].inode:
                first.setdefault(inode, path)
                groups[inode] = groups.get(inode, 0) + 1
        digest = hashlib.sha256()
        for path in ordered:
            entry = self._entries[path]
            leader = first[entry.inode] if groups.get(entry.inode, 0) > 1 else b""
            digest.update(b"\0".join((path, entry.head, leader, entry.tail)) + b"\n")
        return digest.hexdigest()

    def counts(self) -> Mapping[str, int]:
        """Return the number of entries of each type, and the number of content bytes."""
        names = {
            stat.S_IFREG: "files", stat.S_IFDIR: "folders", stat.S_IFLNK: "symlinks",
            stat.S_IFCHR: "devices", stat.S_IFBLK: "devices", stat.S_IFIFO: "fifos", stat.S_IFSOCK: "sockets",
        }  # fmt: skip
        found = dict.fromkeys(["files", "folders", "symlinks", "devices", "fifos", "sockets", "setuid", "hardlinks"], 0)
        seen: set[int] = set()
        size = 0
        for entry in self._entries.values():
            found[names[stat.S_IFMT(entry.mode)]] += 1
            if stat.S_ISREG(entry.mode) and entry.mode & (stat.S_ISUID | stat.S_ISGID):
                found["setuid"] += 1
            if entry.inode and entry.inode in seen:
                found["hardlinks"] += 1
            else:
                size += entry.size
            seen.add(entry.inode)
        return {**found, "bytes": size}


def _walk(top: bytes) -> Iterator[bytes]:
    """Yield ``.``, then the path of each file and folder below ``top``, relative to ``top``; do not follow links."""
    yield b"."
    waiting = [b""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(top, folder) if folder else top) as listing:
            for item in listing:
                path = os.path.join(folder, item.name) if folder else item.name
                yield path
                if item.is_dir(follow_symlinks=False):
                    waiting.append(path)


def _entry(top: bytes, path: bytes) -> _Entry:
    full = os.path.join(top, path)
    found = os.lstat(full)
    payload = b""
    size = 0
    if stat.S_ISREG(found.st_mode):
        payload, size = _content(full).encode(), found.st_size
    elif stat.S_ISLNK(found.st_mode):
        payload = os.readlink(full)
    elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        payload = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}".encode()
    head = b"\0".join((b"%o" % found.st_mode, b"%d" % found.st_uid, b"%d" % found.st_gid, payload))
    tail = b"\0".join(os.fsencode(name) + b"=" + value.hex().encode() for name, value in xattrs_of(full))
    inode = found.st_ino if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode) else 0
    return _Entry(head, tail, inode, found.st_mode, size)


def xattrs_of(path: bytes) -> list[tuple[str, bytes]]:
    """Return a file's extended attributes, sorted by name, except the host's; empty if they are not supported."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return []
    return [
        (name, os.getxattr(path, name, follow_symlinks=False))
        for name in sorted(names)
        if not name.startswith(_HOST_XATTRS)
    ]


def _content(path: bytes) -> str:
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while block := os.read(descriptor, _BLOCK):
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def inside(root: Path, path: str) -> Path:
    """Resolve ``path`` in the tree as the board would resolve it, but do not follow the last component.

    Absolute link targets are relative to the tree's root, and ``..`` never leads out of the tree. Raises OSError for
    link loops.
    """
    resolved: list[str] = []
    waiting = list(reversed(PurePosixPath("/", path).parts[1:]))
    followed = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            resolved = resolved[:-1]
            continue
        here = root.joinpath(*resolved, part)
        if waiting and here.is_symlink():
            followed += 1
            if followed > _SYMLINK_LIMIT:
                raise _loop(root, path)
            target = PurePosixPath(os.readlink(here))
            if target.is_absolute():
                resolved = []
            waiting.extend(reversed([item for item in target.parts if item != "/"]))
            continue
        resolved.append(part)
    return root.joinpath(*resolved)


def follow(root: Path, path: str) -> Path:
    """Resolve ``path`` as ``inside`` does, but also follow the last component."""
    for _ in range(_SYMLINK_LIMIT):
        found = inside(root, path)
        if not found.is_symlink():
            return found
        target = os.readlink(found)
        parent = "/" + str(found.parent.relative_to(root))
        path = target if target.startswith("/") else f"{parent}/{target}"
    raise _loop(root, path)


def _loop(root: Path, path: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(root / path.lstrip("/")))


def file_in(root: Path, path: str | Path) -> Path | None:
    """Return the regular file at ``path`` in the tree, or None if there is none; resolve links as the board would."""
    try:
        found = follow(root, str(path))
        return found if found.is_file() else None
    except OSError:
        return None


def architectures_of(root: Path) -> list[str]:
    """Return the Debian names of the architectures for which a root filesystem has a library folder."""
    return [row.debian for row in ARCHITECTURES.values() if follow(root, f"usr/lib/{row.gnu}").is_dir()]


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points at or below a folder in this process's mount namespace (proc(5), mountinfo)."""
    top = os.path.realpath(folder)
    points = (mount.mountpoint for mount in psutil.disk_partitions(all=True))
    return [point for point in points if point == top or point.startswith(top + "/")]


def require_unmounted(folder: Path, purpose: str) -> None:
    """Raise InUse if something is mounted at or below ``folder``, because removal would delete the mounted files."""
    if found := mounts_below(folder):
        raise InUse(
            f"{folder} cannot be {purpose}: something is mounted there",
            expected="no mount point at or below that folder",
            found=", ".join(found[:5]),
            fix=f"run umount -R {found[0]}",
        )
