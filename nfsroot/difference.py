"""Implement ``diff``, which lists the packages, wheels and files that differ between two systems.

A system is an image in the engine, an exported tree, a tar archive of a root filesystem, or a bill of materials. A bill
of materials does not list files. For the other kinds of systems, packages are read from dpkg's status file, and wheels
from their RECORD files in /usr/local and /opt.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from debian.deb822 import Deb822
from packageurl import PackageURL
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.connect import connect
from engine.containers import container
from nfsroot.unpack import ChunkReader, find_image, reported_errors, require_end
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import CommandFailed, UserError
from toolchain.text import one_line, printable

_STATUS = "var/lib/dpkg/status"
_OF_EXPORT = frozenset({".dockerenv", "dev/console", "etc/resolv.conf", "etc/hostname", "etc/hosts"})
"""Files that the engine adds or truncates in a container's tree."""
_SHOWN = 30
_FORMS = "an image in the engine, a folder or tar archive with a root filesystem, or a bill of materials (.json)"


@dataclass(frozen=True)
class Wheel:
    """An installed wheel, or a library in a bill of materials.

    ``digest`` is ``record:`` with the SHA-256 of the list of installed files, or ``file:`` with the SHA-256 of the file
    itself. Only digests of the same kind can be compared.
    """

    version: str
    digest: str


@dataclass(frozen=True)
class File:
    """An entry of a file tree.

    ``size`` is in bytes; ``identity`` is the entry's type, mode, owner, and SHA-256 or link target.
    """

    size: int
    identity: str


@dataclass
class System:
    """A system's contents. ``files`` is None for a bill of materials."""

    name: str
    packages: dict[str, str] = field(default_factory=dict)
    wheels: dict[str, Wheel] = field(default_factory=dict)
    files: dict[str, File] | None = None

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(item.size for item in (self.files or {}).values())


@dataclass(frozen=True)
class Change:
    """An item that differs.

    ``old`` is empty if the old system lacks the item, and ``new`` is empty if the new system lacks it. Sizes are in
    bytes; only files have a size.
    """

    name: str
    old: str
    new: str
    old_size: int | None = None
    new_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between two systems. ``files`` is None if either system is a bill of materials."""

    old: System
    new: System
    packages: tuple[Change, ...]
    wheels: tuple[Change, ...]
    files: tuple[Change, ...] | None

    def as_json(self) -> str:
        """Return all differences as JSON, for other programs."""
        document = {
            "schema": 1,
            "old": self.old.name,
            "new": self.new.name,
            "packages": [asdict(item) for item in self.packages],
            "wheels": [asdict(item) for item in self.wheels],
            "files": None if self.files is None else [asdict(item) for item in self.files],
            "bytes": None if self.files is None else {"old": self.old.size, "new": self.new.size},
        }
        return json.dumps(document, indent=2) + "\n"

    def print(self, console: Console | None = None) -> None:
        """Print one table for each kind of difference. The last table shows only the files whose sizes differ most."""
        out = console or progress.make_console()
        _print_changes(out, "packages", self.packages)
        _print_changes(out, "wheels and libraries", self.wheels)
        if self.files is None:
            out.print("files: not compared, because a bill of materials does not list them")
            return
        largest = sorted(self.files, key=lambda item: (-abs((item.new_size or 0) - (item.old_size or 0)), item.name))
        _print_changes(out, "files", largest, shown=_SHOWN)
        sizes = f"{progress.human_size(self.old.size)} → {progress.human_size(self.new.size)}"
        out.print(f"bytes: {sizes} ({self.new.size - self.old.size:+,})")


def _print_changes(out: Console, title: str, changes: tuple[Change, ...] | list[Change], shown: int = 1000) -> None:
    if not changes:
        out.print(f"{title}: no difference")
        return
    table = Table(title=f"{title}: {len(changes)} differ", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "old", "new"):
        table.add_column(heading, overflow="fold")
    for item in changes[:shown]:
        old, new = (_cell(text, size) for text, size in ((item.old, item.old_size), (item.new, item.new_size)))
        table.add_row(*(Text(printable(text)) for text in (item.name, old, new)))
    out.print(table)
    if len(changes) > shown:
        out.print(f"and {len(changes) - shown} more; use --json to list them all")


def _cell(text: str, size: int | None) -> str:
    return (text or "–") if size is None else f"{size:,}"


def compare(config: Config, old: str, new: str, *, folder: Path) -> Difference:
    """Return the differences between two systems.

    ``old`` and ``new`` are paths (relative to ``folder``) or image names.

    Raises UserError if a name does not refer to a system. For an image, also raises ArtefactMissing, PlatformMismatch,
    CommandFailed and EngineUnavailable.
    """
    before, after = (read(config, name, folder) for name in (old, new))
    both = before.files is not None and after.files is not None
    return Difference(
        old=before,
        new=after,
        packages=tuple(_changes(before.packages, after.packages)),
        wheels=tuple(_changed_wheels(before.wheels, after.wheels)),
        files=tuple(_changed_files(before.files or {}, after.files or {})) if both else None,
    )


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield Change(name, old.get(name, ""), new.get(name, ""))


def _changed_wheels(old: Mapping[str, Wheel], new: Mapping[str, Wheel]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        before, after = old.get(name, Wheel("", "")), new.get(name, Wheel("", ""))
        kinds = {item.digest.partition(":")[0] for item in (before, after)}
        if before.version == after.version and (before.digest == after.digest or len(kinds) == 2):
            continue
        with_digest = before.version == after.version
        yield Change(name, _of_wheel(before, with_digest), _of_wheel(after, with_digest))


def _of_wheel(wheel: Wheel, with_digest: bool) -> str:
    return f"{wheel.version} ({wheel.digest.partition(':')[2][:12]})" if with_digest else wheel.version


def _changed_files(old: Mapping[str, File], new: Mapping[str, File]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before != after:
            yield Change(
                name,
                before.identity if before else "",
                after.identity if after else "",
                before.size if before else None,
                after.size if after else None,
            )


def read(config: Config, name: str, folder: Path) -> System:
    """Read one system. Raises the same exceptions as ``compare``."""
    path = folder / name
    if path.is_dir():
        return _with_contents(System(name), _of_folder(path))
    if path.is_file() and path.suffix == ".json":
        return _of_sbom(name, path)
    if path.is_file():
        try:
            with tarfile.open(path) as archive:
                system = _with_contents(System(name), _of_tar(archive))
                require_end(archive)
                # The checksum of a gzip stream and the index of an xz stream are checked only at the end.
                while cast(BinaryIO, archive.fileobj).read(1 << 20):
                    continue
                return system
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as fault:
            raise UserError(
                f"{name} is not a readable root filesystem",
                expected=_FORMS,
                found=one_line(str(fault)),
                fix="pass an intact tar archive of a root filesystem",
            ) from fault
    if name.startswith(("/", "./", "../")):
        raise UserError(f"{name} does not exist", expected=_FORMS, found="no such file", fix="correct the path")
    with contextlib.closing(connect()) as client:
        source = find_image(client, name, config.image.target)
        with (
            container(client, source.id, ["true"], architecture=config.image.target) as box,
            reported_errors(),
            progress.bar(f"read {name}", total=source.size, in_bytes=True) as bar,
        ):
            try:
                chunks = cast(Iterator[bytes], box.export())
                stream = cast(BinaryIO, io.BufferedReader(ChunkReader(chunks, bar, source.size), 1 << 20))
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    return _with_contents(System(name), _of_tar(archive))
            except tarfile.TarError as fault:
                raise CommandFailed(
                    f"the engine's export of {name} is incomplete or damaged",
                    expected="a tar archive of the image's tree",
                    found=one_line(str(fault)),
                    fix="find the cause in the engine's log, correct it, then try again",
                ) from fault


_Entry = tuple[str, File, bytes]
"""A path, its description, and its content (empty for files that are not read)."""


def _with_contents(system: System, entries: Iterator[_Entry]) -> System:
    """Add the tree's packages, wheels and files to the system, and return the system.

    Raises UserError if the tree contains no Debian package, or if dpkg's status file is damaged.
    """
    system.files = {}
    for path, file, content in entries:
        if path in _OF_EXPORT:
            continue
        system.files[f"/{path}"] = file
        if path == _STATUS:
            try:
                system.packages = dict(_packages(content.decode(errors="replace")))
            except KeyError as fault:
                raise UserError(
                    f"{system.name} is not a readable root filesystem",
                    expected=f"{_STATUS} with the name, architecture and version of each package",
                    found=f"a package without the field {fault.args[0]}",
                    fix="pass an intact root filesystem",
                ) from fault
        elif _is_record(path):
            name, _, version = Path(path).parent.name.removesuffix(".dist-info").partition("-")
            system.wheels[canonicalize_name(name)] = Wheel(version, f"record:{hashlib.sha256(content).hexdigest()}")
        elif _is_library(path) and content:
            name, _, version = Path(path).name.partition(".so.")
            system.wheels[name] = Wheel(version, f"file:{hashlib.sha256(content).hexdigest()}")
    if not system.packages:
        raise UserError(
            f"{system.name} is not a root filesystem",
            expected=f"{_FORMS}; in a root filesystem, {_STATUS} lists the packages",
            found="no package",
            fix="pass the root filesystem of a Debian system",
        )
    return system


def _is_read(path: str) -> bool:
    return path == _STATUS or _is_record(path) or _is_library(path)


def _is_record(path: str) -> bool:
    """Return whether a path is the file list of a wheel that was not installed by a Debian package."""
    return path.startswith(("usr/local/", "opt/")) and path.endswith(".dist-info/RECORD")


def _is_library(path: str) -> bool:
    return path.startswith("opt/pitorch/lib/") and ".so." in path


def _packages(status: str) -> Iterator[tuple[str, str]]:
    """Yield NAME:ARCHITECTURE and the version of each package that dpkg's status lists as installed."""
    for fields in Deb822.iter_paragraphs(status, use_apt_pkg=False):
        if fields.get("Status", "").endswith(" installed"):
            yield f"{fields['Package']}:{fields['Architecture']}", fields["Version"]


def _of_folder(top: Path) -> Iterator[_Entry]:
    """Yield the entries of a folder; links are not followed."""
    for parent, folders, names in os.walk(top, onerror=_raise):
        for name in sorted((*folders, *names)):
            full = Path(parent, name)
            path = str(full.relative_to(top))
            found = full.lstat()
            content, payload, size = b"", "", 0
            if stat.S_ISLNK(found.st_mode):
                payload = str(full.readlink())
            elif stat.S_ISREG(found.st_mode):
                with full.open("rb") as stream:
                    payload = hashlib.file_digest(stream, "sha256").hexdigest()
                size = found.st_size
                content = full.read_bytes() if _is_read(path) else b""
            yield path, File(size, _identity(found.st_mode, found.st_uid, found.st_gid, payload)), content


def _raise(fault: OSError) -> None:
    raise fault


_TYPES = {
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


def _of_tar(archive: tarfile.TarFile) -> Iterator[_Entry]:
    """Yield the entries of a tar archive. A hard link has its target's size and identity.

    Raises TarError if a hard link precedes its target, or if the target is missing.
    """
    seen: dict[str, tuple[File, bytes]] = {}
    for item in archive:
        path = os.path.normpath(item.name).lstrip("/")
        if path == ".":
            continue
        if item.islnk():
            target = os.path.normpath(item.linkname).lstrip("/")
            if target not in seen:
                raise tarfile.ReadError(
                    f"the hard link {path} to {target}, which is not in the archive before the link"
                )
            file, content = seen[target]
        else:
            content, payload = b"", item.linkname
            if item.isreg() and (stream := archive.extractfile(item)) is not None:
                digest, kept = hashlib.sha256(), _is_read(path)
                while block := stream.read(1 << 20):
                    digest.update(block)
                    content += block if kept else b""
                payload = digest.hexdigest()
            mode = _TYPES.get(item.type, stat.S_IFREG) | item.mode
            file = File(item.size if item.isreg() else 0, _identity(mode, item.uid, item.gid, payload))
            seen[path] = (file, content)
        yield path, file, content


def _identity(mode: int, uid: int, gid: int, payload: str) -> str:
    # A symbolic link's mode has no meaning, and the recorded mode depends on the tar program.
    shown = "l" + "rwxrwxrwx" if stat.S_ISLNK(mode) else stat.filemode(mode)
    return f"{shown} {uid}:{gid} {payload}".rstrip()


def _of_sbom(name: str, path: Path) -> System:
    """Read an SPDX or CycloneDX document. Raises UserError for any other file."""
    try:
        document = json.loads(path.read_text())
        system = System(name)
        for purl, version, sha256 in _spdx(document) if "spdxVersion" in document else _cyclonedx(document):
            found = PackageURL.from_string(purl)
            architecture = dict(found.qualifiers).get("arch")
            if found.type != "deb":
                system.wheels[canonicalize_name(found.name)] = Wheel(version, f"file:{sha256}")
            elif architecture != "source":
                system.packages[f"{found.name}:{architecture}"] = version
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as fault:
        raise UserError(
            f"{name} is not a bill of materials",
            expected="SPDX or CycloneDX as JSON",
            found=f"{type(fault).__name__}: {fault}",
            fix="pass sbom.spdx.json or sbom.cdx.json, which ./inv build-image writes",
        ) from fault
    return system


def _spdx(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for item in document["packages"]:
        for reference in item.get("externalRefs", ()):
            if reference["referenceType"] == "purl":
                sums = [one["checksumValue"] for one in item.get("checksums", ()) if one["algorithm"] == "SHA256"]
                yield reference["referenceLocator"], item.get("versionInfo", ""), next(iter(sums), "")


def _cyclonedx(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for item in document["components"]:
        sums = [one["content"] for one in item.get("hashes", ()) if one["alg"] == "SHA-256"]
        yield item["purl"], item.get("version", ""), next(iter(sums), "")
