"""Remove files and folders that killed tasks left behind, unless a process still uses them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from toolchain import files, progress

_LISTED = 3


def clear(found: Iterable[Path], base: Path) -> None:
    """Remove the files and folders in ``found``, which killed tasks left below ``base``; print the freed space.

    Programs that a killed task started may still be running, so a file or folder is kept if another process uses a path
    that contains the file's or folder's name. The following are also kept: links, files and folders that this user may
    not remove, mount points, folders that contain a mount point, and scratch folders that a process still locks
    (toolchain.files).
    """
    with contextlib.ExitStack() as stack:
        unlocked = [path for path in map(files.absolute, found) if _removable(path, stack)]
        used = {*_used(unlocked), *_mounted(unlocked)} if unlocked else set()
        removed: list[Path] = []
        size = 0
        for path in unlocked:
            if path in used:
                continue
            path_size = 0
            try:
                path_size = files.size_of(path) if path.is_dir() else path.lstat().st_blocks * 512
                files.remove(path)
            except FileNotFoundError:  # a task for another target has finished and renamed its file
                continue
            except OSError as fault:
                progress.warn(
                    f"cannot remove {path} ({progress.human_size(path_size)}), which a killed task left behind: {fault}"
                )
                continue
            removed.append(path)
            size += path_size
    if removed:
        names = [str(path.relative_to(files.absolute(base))) for path in removed]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        listed = ", ".join(names[:_LISTED]) + more
        progress.say(f"    removed files that killed tasks left behind: {listed} ({progress.human_size(size)})")


def _removable(path: Path, stack: contextlib.ExitStack) -> bool:
    """Return whether this user can remove a file or an unlocked folder.

    A removable folder stays locked until ``stack`` is closed.
    """
    if not os.access(path.parent, os.W_OK, effective_ids=True):
        return False
    try:
        kind = path.lstat().st_mode
        if not stat.S_ISDIR(kind):
            return stat.S_ISREG(kind)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _used(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the paths that another process uses: as an argument, open file, working folder, program or mount point.

    The names are random or contain a process ID, so the name alone identifies a path.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            seen = b"\n".join(_uses(entry))
            yield from (path for path in paths if os.fsencode(path.name) in seen)


def _uses(process: Path) -> Iterator[bytes]:
    for name in ("cmdline", "mountinfo"):
        with contextlib.suppress(OSError):
            yield (process / name).read_bytes()
    links = [process / name for name in ("cwd", "root", "exe")]
    with contextlib.suppress(OSError):
        links += (process / "fd").iterdir()
    for link in links:
        with contextlib.suppress(OSError):
            yield os.fsencode(link.readlink())


def _mounted(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the paths that are mount points or contain one."""
    points = [Path(mount.mountpoint) for mount in psutil.disk_partitions(all=True)]
    yield from (path for path in paths if any(point.is_relative_to(path) for point in points))
