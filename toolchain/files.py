"""Handle files and folders: atomic replacement, locks, fingerprints, full disks and reproducible tars."""

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

from toolchain import caller, process
from toolchain.errors import CommandFailed, DiskFull, RootNeeded, UserError

MARKER = ".pitorch-owned"
"""The name of the file that marks a folder as created by this project. Only marked folders are deleted."""

NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|enough free space|Wrote only \d+ of \d+ bytes")
"""Matches messages about a full disk or an exceeded quota. apt prints the third alternative, GNU tar the last one."""

_MORE_ROOM = "free some disk space, or set build.folder in invoke.yaml to a folder on a larger disk"
_BLOCK = 1 << 20
_POLL_S = 0.05
_UNFINISHED = re.compile(r"\..+\.(?:scratch|part|part\.tar)")
"""Matches the names of scratch folders and partly written files. mmdebstrap requires the suffix ``.tar``."""


def absolute(path: Path) -> Path:
    """Return the absolute path without ``..`` or symbolic links, except that the last component may be a link."""
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


_LONGEST_NAME = 255
_LONGEST_PATH = 4095
_VIRTUAL = ("/proc", "/sys")
"""The mount points of the kernel's file systems, in which files and folders cannot be created."""


def path_fault(path: Path) -> str:
    """Return the reason why no file or folder can have this path, or an empty string if one can.

    The limits are those in limits.h (NAME_MAX, PATH_MAX). A path must be UTF-8, because manifests, configuration files
    and the engine's API cannot contain other bytes. Nothing is created. Paths that cannot be examined are accepted.
    """
    name = os.fspath(path)
    if "\0" in name:
        return "expected a path without a NUL character"
    try:
        encoded = os.fsencode(absolute(path))
        encoded.decode()
    except UnicodeDecodeError:
        return "expected a path in UTF-8"
    except (OSError, RuntimeError, UnicodeEncodeError) as fault:  # RuntimeError: a loop of links
        return f"expected a path that can be resolved ({getattr(fault, 'strerror', None) or fault})"
    if max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        return f"expected a path whose parts have at most {_LONGEST_NAME} bytes each"
    if len(encoded) > _LONGEST_PATH:
        return f"expected a path of at most {_LONGEST_PATH} bytes"
    place = Path(os.fsdecode(encoded))
    if any(place.is_relative_to(virtual) for virtual in _VIRTUAL):
        return f"expected a path outside {' and '.join(_VIRTUAL)}, where nothing can be created"
    above = next((parent for parent in place.parents if os.path.lexists(parent)), Path("/"))
    if not os.path.isdir(above):  # noqa: PTH112 (Path.is_dir raises without permission)
        return f"expected a path below a folder, and {above} is not a folder"
    return ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def tree_fingerprint(root: Path, *patterns: str) -> str:
    """Return a SHA-256 of the names, execute permissions and contents of the files that match one of the glob patterns.

    The patterns are relative to ``root``. Without patterns, all files are included. Byte-code caches are always
    omitted.
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
    """Write ``text`` to a temporary file and rename it to ``path``, so that readers never see a partial file."""
    with replacing(path) as aside:
        aside.touch(mode)  # before the text is written, so that other users never have access to a secret
        aside.write_text(text)
        aside.chmod(mode)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``.

    On success, the temporary file or folder replaces ``path``; otherwise, it is removed.
    """
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
    """Yield a temporary folder below ``parent``; remove the folder on exit.

    This process locks the folder. The folders that killed tasks left behind are not locked and can thus be recognised
    (toolchain.leftovers).
    """
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while not _hold(folder := Path(tempfile.mkdtemp(prefix=f".{prefix}.", suffix=".scratch", dir=parent)), stack):
            continue
        stack.callback(remove, folder)
        yield folder


def _hold(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a new folder, if its file system supports locks; return false if another task has just removed it."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
    return folder.is_dir()


def unfinished_in(folder: Path) -> Iterator[Path]:
    """Yield all scratch folders and partly written files in ``folder``, both those in use and those of killed tasks."""
    if not folder.is_symlink():
        yield from (path for path in folder.glob(".*") if _UNFINISHED.fullmatch(path.name))


@contextlib.contextmanager
def locked(folder: Path, *, lock_file: bool = True) -> Iterator[None]:
    """Let only one process at a time run the block; other processes wait. The folder is created if necessary.

    The lock is the file ``lock`` in the folder or, without ``lock_file``, the folder itself.
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
def owned(folder: Path) -> Iterator[None]:
    """Create a folder with pitorch's marker, and hold the folder's lock while the block runs.

    Raises the same errors as ``require_owned``.
    """
    require_owned(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    with locked(folder):
        yield


@contextlib.contextmanager
def held(lock: Path, refusal: UserError, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file, which is created if necessary and never removed.

    Raises ``refusal`` immediately if another process holds the lock. If the lock file belongs to another user, read
    permission is sufficient. Raises PermissionError if the file cannot be read or created.
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
    """Return the error for a build folder that this user cannot write to."""
    return RootNeeded(
        f"{folder} belongs to another user",
        expected="a build folder that you may write to",
        found=found,
        fix=f"run the task as the owner of the folder: {caller.as_root('./inv TASK')}; or change build.folder",
    )


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    """Delay the signals that stop a task until the renames in the block are done."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # A pending signal's handler may raise an exception from this call, after the signals are blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def remove(path: Path) -> None:
    """Remove a file, link or folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Return a folder's disk usage in bytes, as far as this user can read the folder."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += (Path(place) / name).lstat().st_blocks * 512
    return found


def require_owned(folder: Path) -> None:
    """Raise UserError if ``folder`` is a file, or is not empty and does not contain pitorch's marker."""
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} would be replaced, but pitorch did not create it",
            expected="a path that does not exist, or a folder that pitorch created",
            found="a file",
            fix="choose another folder, or move the file away yourself",
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise UserError(
            f"{folder} would be replaced, but pitorch did not create it",
            expected=f"a path that does not exist yet, an empty folder, or a folder with pitorch's marker {MARKER}",
            found=f"a folder without the marker; number of entries: {sum(1 for _ in folder.iterdir())}",
            fix="choose another folder, or empty this folder yourself",
        )


def require_space(folder: Path, needed_mib: int, purpose: str) -> None:
    """Raise DiskFull unless ``folder`` (or its nearest existing parent) has ``needed_mib`` MiB free."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_mib = shutil.disk_usage(existing).free >> 20
    if free_mib < needed_mib:
        raise DiskFull(
            f"not enough disk space for {purpose}",
            expected=f"{needed_mib} MiB free at {existing}",
            found=f"{free_mib} MiB",
            fix=_MORE_ROOM,
        )


@contextlib.contextmanager
def least_room(folder: Path) -> Iterator[list[int]]:
    """Yield a list with one item: the smallest amount of free space, in bytes, that was seen since the block began.

    The file system is that of ``folder`` or of its nearest existing parent. The free space is polled, because a program
    that fails on a full disk may remove its files before it exits.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    least = [shutil.disk_usage(existing).free]
    ended = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):
            least[0] = min(least[0], shutil.disk_usage(existing).free)

    def watch() -> None:
        while not ended.wait(_POLL_S):
            look()

    watcher = threading.Thread(target=watch, name="least-room", daemon=True)
    watcher.start()
    try:
        yield least
    finally:
        ended.set()
        watcher.join()
        look()


def no_room(purpose: str, folder: Path, found: str) -> DiskFull:
    """Return the error for a full disk or an exceeded quota."""
    return DiskFull(f"no room for {purpose}", expected=f"free space at {folder}", found=found, fix=_MORE_ROOM)


def full_disk(said: str, purpose: str, folder: Path) -> DiskFull | None:
    """Return DiskFull if ``said``, the output of a program, reports a full disk or an exceeded quota, else None."""
    lines = (line.strip() for line in said.splitlines() if NO_ROOM.search(line))
    if (found := next(lines, None)) is None:
        return None
    return no_room(purpose, folder, found)


@contextlib.contextmanager
def room_for(purpose: str, folder: Path) -> Iterator[None]:
    """Raise DiskFull if the block, which writes below ``folder``, fails because of a full disk or an exceeded quota."""
    try:
        yield
    except OSError as fault:
        # copytree's error has no errno; its text contains the messages of all errors.
        words = NO_ROOM.search(str(fault)) if isinstance(fault, shutil.Error) else None
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT) and words is None:
            raise
        raise no_room(purpose, folder, words[0] if words else fault.strerror or "") from fault


@contextlib.contextmanager
def room_for_programs(purpose: str, folder: Path) -> Iterator[None]:
    """Raise DiskFull if the block, or a program that it runs, fails because of a full disk or an exceeded quota."""
    try:
        with room_for(purpose, folder):
            yield
    except CommandFailed as fault:
        if full := full_disk(fault.tail, purpose, folder):
            raise full from fault
        raise


def pack(
    folder: Path, tar: Path, *, epoch: int, overlay: Path | None = None, leave_out: re.Pattern[str] | None = None
) -> None:
    """Write a folder as a reproducible tar.

    The entries are sorted and owned by root, and their time stamps are not later than ``epoch``.

    The same tree produces the same bytes. The tar is not compressed, because it becomes an image layer. ``overlay`` is
    a second folder, whose files are added to the tar and replace files of the same name in ``folder``. A file or folder
    below ``folder`` is omitted if ``leave_out`` matches its whole relative name (with ``/``). Raises DiskFull.
    """
    found = dict(_below(folder, leave_out))
    if overlay is not None:
        found |= _below(overlay)
    with (
        room_for(tar.name, tar.parent),
        replacing(tar) as aside,
        tarfile.TarFile(aside, mode="w", format=tarfile.PAX_FORMAT, copybufsize=_BLOCK) as archive,
    ):
        for name, path in sorted(found.items(), key=lambda item: item[0].split("/")):
            member = archive.gettarinfo(path, name)
            if member is None:  # a socket, which a tar cannot contain
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
    """Yield the relative names and paths of all files and folders below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = inside + entry.name
            if leave_out is not None and leave_out.fullmatch(name):
                continue
            yield name, Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), leave_out, f"{name}/")


def unpack(tar: Path, folder: Path) -> None:
    """Extract a tar that ``pack`` wrote, and replace ``folder`` with the tar's contents. Raises DiskFull."""
    with scratch_folder(folder.parent, folder.name) as scratch:
        stage = scratch / "root"
        stage.mkdir()
        with room_for_programs(f"the contents of {tar.name}", folder.parent):
            process.run(["tar", "--extract", "--file", tar, "--directory", stage, "--no-same-owner"])
        remove(folder)
        stage.rename(folder)
