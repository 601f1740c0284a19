"""What tasks that were killed left behind: found by who knows how they name it, removed where nobody uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toolchain import files, progress

_NAMED = 3
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def clear(found: Iterable[Path], base: Path) -> None:
    """Remove these files and folders below ``base``, and say in one line how many bytes that gave back.

    What stays: links, what is another user's to remove, what is mounted or has a mount below, a scratch folder that its
    maker still holds (toolchain.files), and what any process names: a killed task's programs go on for a while.
    """
    with contextlib.ExitStack() as stack:
        free = [path for path in map(files.absolute, found) if _may_go(path, stack)]
        kept = {*_used(free), *_mounted(free)} if free else set()
        gone: list[Path] = []
        size = 0
        for path in free:
            if path in kept:
                continue
            taken = files.size_of(path) if path.is_dir() else path.lstat().st_blocks * 512
            try:
                files.remove(path)
            except OSError as fault:
                progress.warn(f"what a killed task left stays: {path} ({progress.human_size(taken)}): {fault}")
                continue
            gone.append(path)
            size += taken
    if gone:
        names = [str(path.relative_to(files.absolute(base))) for path in gone]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        told = ", ".join(names[:_NAMED]) + more
        progress.say(f"    what killed tasks left is removed: {told} ({progress.human_size(size)})")


def _may_go(path: Path, stack: contextlib.ExitStack) -> bool:
    """Whether it is there, ours to remove, and held by nobody; a folder is held from here on."""
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
    """Those whose names, which are random or of one process, another process has: as a word, a place or a mount."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            seen = b"\n".join(_places(entry))
            yield from (path for path in paths if os.fsencode(path.name) in seen)


def _places(process: Path) -> Iterator[bytes]:
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
    """Those at which, or below which, something is mounted."""
    table = Path("/proc/self/mountinfo").read_bytes().splitlines()
    plain = (_ESCAPED.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4]) for line in table)
    points = [Path(os.fsdecode(point)) for point in plain]
    yield from (path for path in paths if any(point.is_relative_to(path) for point in points))
