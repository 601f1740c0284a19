"""Files that other steps rely on: written aside, then renamed, and identified by content."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from toolchain import caller
from toolchain.errors import DiskFull, ForeignFolder, RootNeeded, UserError

MARKER = ".pitorch-owned"
"""Name of the file that marks a folder as ours: only such folders are ever deleted."""

NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|enough free space|Wrote only \d+ of \d+ bytes")
"""How programs say that a disk is full, or a quota used up; the last is GNU tar's way, the one before it apt's."""

_BLOCK = 1 << 20
_LOOK_EVERY_S = 0.05


def absolute(path: Path) -> Path:
    """Made absolute, no link on the way and no ``..`` left; the last component is not followed."""
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


_LONGEST_NAME = 255
_LONGEST_PATH = 4095
_VIRTUAL = ("/proc", "/sys")
"""Where the kernel shows its own state: nobody can make a file or folder there."""


def path_fault(path: Path) -> str:
    """Why a path can name no file or folder that is read or made here; empty where it can.

    Limits are those of limits.h (NAME_MAX, PATH_MAX). Nothing is made, and what may not be looked at is let pass.
    """
    name = os.fspath(path)
    if "\0" in name:
        return "expected a path without a NUL character"
    try:
        encoded = os.fsencode(absolute(path))
    except (OSError, RuntimeError, UnicodeEncodeError) as fault:  # RuntimeError: a loop of links
        return f"expected a path that can be followed ({getattr(fault, 'strerror', None) or fault})"
    if max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        return f"expected a path whose parts have at most {_LONGEST_NAME} bytes each"
    if len(encoded) > _LONGEST_PATH:
        return f"expected a path of at most {_LONGEST_PATH} bytes"
    place = Path(os.fsdecode(encoded))
    if any(place.is_relative_to(virtual) for virtual in _VIRTUAL):
        return f"expected a path outside {' and '.join(_VIRTUAL)}, where nothing can be made"
    above = next((parent for parent in place.parents if os.path.lexists(parent)), Path("/"))
    if not os.path.isdir(above):  # noqa: PTH112 (Path's raises where it may not look)
        return f"expected a path below a folder, and {above} is none"
    return ""


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def tree_fingerprint(root: Path, *patterns: str) -> str:
    """SHA-256 over names, modes and contents of the files below ``root`` that match a glob pattern.

    Without a pattern every file counts. Byte-code caches never do.
    """
    digest = hashlib.sha256()
    found = {path for pattern in (patterns or ("**/*",)) for path in root.glob(pattern)}
    for path in sorted(found):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        executable = "x" if os.access(path, os.X_OK) else "-"
        digest.update(f"{path.relative_to(root)}\0{executable}\0{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def write_text_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write ``text`` beside ``path`` and rename it into place, so that no reader sees half of it."""
    with replacing(path) as aside:
        aside.write_text(text)
        aside.chmod(mode)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside ``path`` to write to; it replaces ``path`` when the block succeeds, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        remove(aside)
        raise


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder of our own below ``parent``, removed on any exit.

    It is held as long as we live: what a killed task left is told from what one works in (toolchain.leftovers).
    """
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while not _hold(folder := Path(tempfile.mkdtemp(prefix=f".{prefix}.", dir=parent)), stack):
            continue
        stack.callback(remove, folder)
        yield folder


def _hold(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Hold a new folder, where its file system has locks; false where it was taken for a leftover just before."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
    return folder.is_dir()


@contextlib.contextmanager
def locked(folder: Path, *, lock_file: bool = True) -> Iterator[None]:
    """Let one process at a time run the block; the others wait. The folder is created if it does not exist.

    The lock is a file named ``lock`` in it, which stays; without ``lock_file`` it is the folder itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, flags = (folder / "lock", os.O_WRONLY | os.O_CREAT) if lock_file else (folder, os.O_RDONLY | os.O_DIRECTORY)
    handle = os.open(path, flags, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def held(lock: Path, refusal: UserError, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file, which is made and stays. Raises ``refusal`` where another process holds it: nobody waits.

    One that is another user's can be held by whoever may read it; PermissionError where that may not be, or not made.
    """
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(lock.open("a"))
        except PermissionError:
            if not lock.exists():
                raise
            handle = stack.enter_context(lock.open())
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise refusal from fault
        yield


def belongs_to_another(folder: Path, found: str) -> RootNeeded:
    """The error where a build folder may not be written to."""
    return RootNeeded(
        f"{folder} belongs to another user",
        expected="a build folder that you may write to",
        found=found,
        fix=f"as whatever built there: {caller.as_root('./inv TASK')}; or set build.folder to a folder of your own",
    )


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    """A few renames that belong together: the signals that end a task wait for them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # A handler of one that came just now may raise out of this call, when they are blocked already.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def remove(path: Path) -> None:
    """Remove a file, link or whole folder; absence is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes that a folder takes on the disk, as far as this user may look into it."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += (Path(place) / name).lstat().st_blocks * 512
    return found


def require_owned(folder: Path) -> None:
    """Refuse to go on when ``folder`` exists, is not empty and does not carry our marker.

    Raises ForeignFolder, also for what is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ForeignFolder(
            f"{folder} would be replaced, but it is not ours",
            expected="an absent folder, or one of ours",
            found="a file",
            fix="name another folder, or move the file away yourself",
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ForeignFolder(
            f"{folder} would be replaced, but it is not ours",
            expected=f"an absent or empty folder, or one with our marker {MARKER}",
            found=f"a folder with {sum(1 for _ in folder.iterdir())} entries and no marker",
            fix="name another folder, or empty this one yourself",
        )


def require_space(folder: Path, needed_mib: int, purpose: str) -> None:
    """Raise DiskFull unless ``folder`` (or its nearest existing parent) has ``needed_mib`` MiB free."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_mib = shutil.disk_usage(existing).free >> 20
    if free_mib < needed_mib:
        raise DiskFull(
            f"not enough room for {purpose}",
            expected=f"{needed_mib} MiB free at {existing}",
            found=f"{free_mib} MiB",
            fix="free some space there, or point build.folder in invoke.yaml at a larger disk",
        )


@contextlib.contextmanager
def least_room(folder: Path) -> Iterator[list[int]]:
    """The fewest bytes that were free at ``folder`` (or its nearest existing parent) since the block began.

    It is looked at again and again: what fails for want of room may take away what it wrote, and then there is room.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    least = [shutil.disk_usage(existing).free]
    ended = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):
            least[0] = min(least[0], shutil.disk_usage(existing).free)

    def watch() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            look()

    watcher = threading.Thread(target=watch, name="least-room", daemon=True)
    watcher.start()
    try:
        yield least
    finally:
        ended.set()
        watcher.join()
        look()


def full_disk(said: str, purpose: str, folder: Path) -> DiskFull | None:
    """The error where a program said that a disk or quota is full, with its line; None where it did not."""
    lines = (line.strip() for line in said.splitlines() if NO_ROOM.search(line))
    if (found := next(lines, None)) is None:
        return None
    return DiskFull(
        f"no room for {purpose}",
        expected=f"free space at {folder}",
        found=found,
        fix="free some space there, or point build.folder in invoke.yaml at a larger disk",
    )


@contextlib.contextmanager
def room_for(purpose: str, folder: Path) -> Iterator[None]:
    """Raise DiskFull where the block, which writes below ``folder``, meets a full disk or quota."""
    try:
        yield
    except OSError as fault:
        # copytree's own error has no number, but the words of all that it met.
        words = NO_ROOM.search(str(fault)) if isinstance(fault, shutil.Error) else None
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT) and words is None:
            raise
        raise DiskFull(
            f"no room for {purpose}",
            expected=f"free space at {folder}",
            found=words[0] if words else fault.strerror or "",
            fix="free some space there, or point build.folder in invoke.yaml at a larger disk",
        ) from fault


def pack(
    folder: Path, tar: Path, *, epoch: int, beside: Path | None = None, leave_out: re.Pattern[str] | None = None
) -> None:
    """Write a folder as a reproducible tar: sorted, owned by root, no time stamp newer than ``epoch``.

    The same tree gives the same bytes. Nothing is compressed: an image's layer is made of it. ``beside`` is a second
    folder laid over the first. What ``leave_out`` matches wholly (names relative to the first, with ``/``) is left out,
    a folder with all that is in it. Raises DiskFull.
    """
    found = dict(_below(folder, leave_out))
    if beside is not None:
        found |= _below(beside)
    with (
        room_for(tar.name, tar.parent),
        replacing(tar) as aside,
        tarfile.TarFile(aside, mode="w", format=tarfile.PAX_FORMAT, copybufsize=_BLOCK) as archive,
    ):
        for name, path in sorted(found.items(), key=lambda item: item[0].split("/")):
            member = archive.gettarinfo(path, name)
            if member is None:  # a socket: no tar can hold one
                continue
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = min(int(member.mtime), epoch)
            if member.isreg():
                with path.open("rb") as content:
                    archive.addfile(member, content)
            else:
                archive.addfile(member)


def _below(folder: Path, leave_out: re.Pattern[str] | None = None, inside: str = "") -> Iterator[tuple[str, Path]]:
    """What is below a folder: names relative to it, and paths."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = inside + entry.name
            if leave_out is not None and leave_out.fullmatch(name):
                continue
            yield name, Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), leave_out, f"{name}/")
