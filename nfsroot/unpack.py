"""Unpack an image exactly, with numeric owners, modes, hard links, devices, names as bytes, xattrs and times.

``docker export`` and ``docker cp`` return a container's tree with an additional /.dockerenv, an empty resolv.conf and a
regular file at /dev/console. Two exact methods are used instead:

- *overlay*, if the user is root and a local engine stores images with overlay2: the image's layer folders are mounted
  read-only as an overlay in a private mount namespace and copied with ``cp -a``, without packing.
- *layers*, in all other cases: the output of ``image save`` is written to disk layer by layer; then each layer's
  whiteouts are applied (OCI image-spec, layer.md) and its tar is unpacked. Memory use is constant.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import posixpath
import shutil
import stat
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.models.images import Image

from engine.connect import ENGINE_ERRORS, engine_lost
from toolchain import caller, process, progress
from toolchain.architecture import Architecture
from toolchain.errors import ArtefactMissing, CommandFailed, PlatformMismatch
from toolchain.files import remove, scratch_folder
from toolchain.text import one_line

_WHITEOUT = ".wh."
_XATTR = "SCHILY.xattr."
_OPAQUE = ".wh..wh..opq"
_POLL_S = 0.1

# $1: overlay mount point, $2: options, $3: destination. The working directory contains short links to the layers,
# because mount(2) accepts only one page of options and a layer's path has more than a hundred characters.
_OVERLAY_SCRIPT = """
set -e
mount -t overlay overlay -o "$2" "$1"
printf 'pid %s\\n' "$$"
exec cp -a --reflink=auto -T "$1" "$3"
"""


@dataclass(frozen=True, kw_only=True)
class SourceImage:
    """The image to export."""

    reference: str
    id: str
    digests: tuple[str, ...]
    size: int
    """The number of content bytes in all layers."""
    layers: tuple[Path, ...]
    """The layers' local folders, top layer first; empty unless the user is root and the driver is overlay2."""
    labels: Mapping[str, str] = field(default_factory=dict)


def find_image(client: docker.DockerClient, reference: str, target: Architecture) -> SourceImage:
    """Look up the image and verify its platform.

    Raises ArtefactMissing, PlatformMismatch or EngineUnavailable.
    """
    try:
        image = client.images.get(reference)
    except (*ENGINE_ERRORS, UnicodeEncodeError) as fault:
        # If the name is not UTF-8, or if the engine rejects it with status 400, no such image exists.
        is_rejected = isinstance(fault, docker.errors.APIError) and fault.status_code in (400, 404)
        if not is_rejected and not isinstance(fault, UnicodeEncodeError):
            raise engine_lost(f"was asked for {reference}", fault) from fault
        raise ArtefactMissing(
            f"image {reference} not found",
            expected=f"the image {reference} in the engine",
            found="no such image",
            fix=f"run {caller.command('build-image')}",
        ) from fault
    facts = image.attrs
    found = (facts.get("Architecture", ""), facts.get("Variant") or "")
    # Some engines do not report the variant.
    if found[0] != target.oci_architecture or found[1] not in ("", target.oci_variant):
        raise PlatformMismatch(
            f"the image {reference} is for another platform",
            expected=target.oci_platform,
            found="/".join(["linux", *[part for part in found if part]]),
            fix=f"run {caller.command('build-image')}, or set image.architecture to the architecture of this image",
        )
    return SourceImage(
        reference=reference,
        id=str(image.id),
        digests=tuple(facts.get("RepoDigests") or ()),
        size=int(facts.get("Size") or 0),
        layers=_local_layers(facts),
        labels=dict((facts.get("Config") or {}).get("Labels") or {}),
    )


def unpack(client: docker.DockerClient, source: SourceImage, destination: Path) -> str:
    """Copy the image's tree to ``destination``, which must not exist; return the name of the method used.

    Raises OSError, or CommandFailed with a program's output, if the disk is full. Raises CommandFailed if the engine's
    stream is not an image, or EngineUnavailable if the connection to the engine is lost.
    """
    if source.layers:
        copy_overlay(source, destination)
        return "overlay"
    unpack_layers(client, source, destination)
    return "layers"


def _local_layers(facts: dict[str, Any]) -> tuple[Path, ...]:
    driver = facts.get("GraphDriver") or {}
    if driver.get("Name") != "overlay2" or os.geteuid() != 0:
        return ()
    data = driver.get("Data") or {}
    folders = [Path(item) for item in [data.get("UpperDir", ""), *data.get("LowerDir", "").split(":")] if item]
    if not folders or not all(folder.is_dir() for folder in folders):
        return ()
    return tuple(folders)


def copy_overlay(source: SourceImage, destination: Path) -> None:
    """Mount the layer folders as an overlay and copy the result."""
    with scratch_folder(destination.parent, "overlay") as scratch:
        links = scratch / "l"
        links.mkdir()
        for number, folder in enumerate(source.layers):
            (links / str(number)).symlink_to(folder)
        # An overlay needs at least two layers, so add an empty bottom layer, which changes nothing.
        (links / "e").mkdir()
        (scratch / "merged").mkdir()
        options = "ro,lowerdir=" + ":".join([*map(str, range(len(source.layers))), "e"])
        if len(options) > os.sysconf("SC_PAGE_SIZE") - 256:
            raise CommandFailed(
                "the image has too many layers for one overlay mount", fix="rebuild the image with fewer layers"
            )
        with (
            progress.bar(f"copying {source.reference}", total=source.size, in_bytes=True) as bar,
            _written_by_child(bar, source.size) as watch,
        ):
            process.run(
                # If this process is killed, the copy also ends and cannot interfere with the next export.
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"),
                    *("sh", "-c", _OVERLAY_SCRIPT, "copy-image", str(scratch / "merged"), options, str(destination)),
                ],
                cwd=links,
                env={"LC_ALL": "C"},
                on_line=watch,
                fix="read the last lines of the output; if the disk is full, free some space",
            )


@contextlib.contextmanager
def _written_by_child(bar: progress.Bar, total: int) -> Iterator[Any]:
    """Yield a callback for output lines: after a line ``pid N``, ``bar`` shows how many bytes process N has written."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def poll(pid: int) -> None:
        while not ended.wait(_POLL_S):
            with contextlib.suppress(OSError, ValueError):
                counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                bar.update(float(counters["wchar"]), total=total)

    def see(line: str) -> None:
        word, _, pid = line.partition(" ")
        if word == "pid" and pid.isdigit() and not threads:
            threads.append(threading.Thread(target=poll, args=(int(pid),), daemon=True))
            threads[0].start()

    try:
        yield see
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def unpack_layers(client: docker.DockerClient, source: SourceImage, destination: Path) -> None:
    """Write the output of ``image save`` to disk and apply its layers, bottom layer first."""
    with scratch_folder(destination.parent, "layers") as scratch:
        with reported_errors(), progress.bar(f"reading {source.reference}", total=source.size, in_bytes=True) as bar:
            image = client.images.get(source.id)
            layers = _spool(ChunkReader(_chunks(image), bar, source.size), scratch)
        destination.mkdir(mode=0o755)
        with progress.bar(f"unpacking {source.reference}", total=sum(path.stat().st_size for path in layers),
                          in_bytes=True) as bar:  # fmt: skip
            done = 0
            for layer in layers:
                size = layer.stat().st_size
                apply_layer(layer, destination)
                layer.unlink()
                done += size
                bar.update(done)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Convert errors that the engine or its connection causes while the engine exports an image.

    Raises CommandFailed or EngineUnavailable.
    """
    try:
        yield
    except docker.errors.APIError as fault:
        raise CommandFailed(
            "the engine failed to export the image",
            expected="a stream of the image's layers",
            found=" ".join(str(fault.explanation or fault).split())[:200],
            fix="find the cause in the engine's log, correct it, then try again",
        ) from fault
    except (requests.RequestException, urllib3.exceptions.HTTPError) as fault:
        raise engine_lost("exported the image", fault) from fault


def _chunks(image: Image) -> Iterable[bytes]:
    return cast(Iterable[bytes], image.save(chunk_size=1 << 20))


class ChunkReader(io.RawIOBase):
    """A file object for tarfile that reads a stream of chunks."""

    def __init__(self, chunks: Iterable[bytes], bar: progress.Bar, total: int) -> None:
        self._chunks, self._rest, self._bar, self._done, self._total = iter(chunks), b"", bar, 0, total

    def readable(self) -> bool:
        """Return True, because the object supports ``readinto``."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes; return their number."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
            self._done += len(self._rest)
            self._bar.update(self._done, total=self._total)
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        return len(part)


def _spool(stream: io.RawIOBase, scratch: Path) -> list[Path]:
    """Write the members of a docker-archive to files and return the layers, bottom layer first.

    The layers are found through the manifest, because their names differ between engines and a repeated layer may be a
    link.
    """
    stored: dict[str, Path] = {}
    links: dict[str, str] = {}
    manifest: Any = None
    try:
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=1 << 20) as archive:
            for member in archive:
                if member.issym() or member.islnk():
                    base = posixpath.dirname(member.name) if member.issym() else ""
                    links[member.name] = posixpath.normpath(posixpath.join(base, member.linkname))
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                if member.name == "manifest.json":
                    manifest = json.load(content)
                    continue
                stored[member.name] = scratch / f"{len(stored)}.tar"
                with stored[member.name].open("wb") as sink:
                    shutil.copyfileobj(content, sink, 1 << 20)
        names = [links.get(name, name) for name in manifest[0]["Layers"]]
        paths = [stored[name] for name in names]
    except (tarfile.TarError, LookupError, TypeError, ValueError) as fault:
        raise CommandFailed(
            "the engine's image stream is invalid",
            expected="a docker-archive with a manifest.json",
            found=f"{type(fault).__name__}: {fault}",
            fix="find the cause in the engine's log, correct it, then try again",
        ) from fault
    # A layer that occurs twice is applied twice, from separate files.
    unique: list[Path] = []
    for number, path in enumerate(paths):
        twin = scratch / f"layer{number}.tar"
        os.link(path, twin)
        unique.append(twin)
    for path in stored.values():
        path.unlink()
    return unique


def apply_layer(layer: Path, root: Path) -> None:
    """Apply a layer's tar to a tree: first whiteouts and type changes, then the entries and their attributes.

    Raises CommandFailed if the layer is damaged or could change files outside the tree; tar does not unpack such a
    layer.
    """
    try:
        attributes = _prepare(layer, root)
    except tarfile.TarError as fault:
        raise CommandFailed(
            "a layer of the image is damaged",
            expected="an intact tar archive",
            found=one_line(str(fault)),
            fix="rebuild the image, or pull it again",
        ) from fault
    process.run(
        [
            "tar", "--extract", f"--file={layer}", f"--directory={root}", "--numeric-owner", "--same-owner",
            "--preserve-permissions", "--exclude=.wh.*",
            "--warning=no-timestamp", "--delay-directory-restore",
        ],
        env={"LC_ALL": "C"},
        fix="read the last lines of the output; if the disk is full, free some space",
    )  # fmt: skip
    for place, values in attributes.items():
        _set_attributes(place, values)


def _prepare(layer: Path, root: Path) -> dict[Path, dict[str, bytes]]:
    """Apply a layer's whiteouts and type changes. Return the extended attributes to set after its tar is unpacked.

    Raises CommandFailed for an unsafe entry, or TarError for a damaged tar.
    """
    attributes: dict[Path, dict[str, bytes]] = {}
    links: set[Path] = set()
    with tarfile.open(layer, mode="r:*", encoding="utf-8", errors="surrogateescape") as archive:
        while (member := archive.next()) is not None:
            # Free the headers that the archive accumulates.
            archive.members.clear()  # type: ignore[attr-defined]
            place = _place_of(member.name, root, links)
            if member.islnk():
                _place_of(member.linkname, root, links)
            if place.name == _OPAQUE:
                for child in list(place.parent.iterdir()) if place.parent.is_dir() else []:
                    remove(child)
            elif place.name.startswith(_WHITEOUT + _WHITEOUT):
                continue
            elif place.name.startswith(_WHITEOUT):
                hidden = place.parent.relative_to(root) / place.name.removeprefix(_WHITEOUT)
                remove(_place_of(str(hidden), root, links))
            else:
                is_folder = place.is_dir() and not place.is_symlink()
                if place != root and os.path.lexists(place) and member.isdir() != is_folder:
                    remove(place)
                found = {
                    key.removeprefix(_XATTR): value.encode("utf-8", "surrogateescape")
                    for key, value in member.pax_headers.items()
                    if key.startswith(_XATTR)
                }
                if found or (member.isreg() and not member.mode & stat.S_IRUSR):
                    attributes[place] = found
                if member.issym() or member.islnk():  # a hard link to a symbolic link is also a symbolic link
                    links.add(place)
        require_end(archive)  # tar unpacks the entries behind a damaged header
    return attributes


def require_end(archive: tarfile.TarFile) -> None:
    """Raise TarError if data follows the point where tarfile stopped.

    tarfile stops silently at a damaged header.
    """
    stream = cast(IO[bytes], archive.fileobj)
    stream.seek(archive.offset)
    if any(stream.read(tarfile.BLOCKSIZE)):
        raise tarfile.ReadError(f"a damaged header at offset {archive.offset}")


def _place_of(name: str, root: Path, links: Set[Path]) -> Path:
    """Return the path of a layer's entry in the tree.

    Raises CommandFailed if the name contains ``..`` or if a parent folder is a symbolic link, in the tree or in
    ``links``, because tar would follow the link, even out of the tree.
    """
    path = PurePosixPath(name.lstrip("/"))
    folders = [root / parent for parent in path.parents]
    if ".." in path.parts or any(folder in links or folder.is_symlink() for folder in folders):
        raise CommandFailed(
            "an entry in a layer of the image is unsafe",
            expected="a path without '..' whose parent folders are not symbolic links",
            found=name,
            fix="rebuild the image, or use an image from a source that you trust",
        )
    return root / path


def _set_attributes(place: Path, values: Mapping[str, bytes]) -> None:
    """Set extended attributes, except where the file system does not support them.

    The mode is set first, because of two properties of fakeroot (toolchain.fake_root). First, fakeroot does not
    intercept the call with which tar creates a file. If the file's mode forbids reading, the user can read the file
    only after a chmod that fakeroot intercepts. Second, fakeroot loses the type of a file if the first operation that
    it intercepts on the file sets an attribute. Without the chmod, this would happen to files that tar created.
    """
    mode = place.lstat().st_mode
    if not stat.S_ISLNK(mode):
        place.chmod(stat.S_IMODE(mode))
    for name, value in values.items():
        try:
            os.setxattr(place, name, value, follow_symlinks=False)
        except OSError as fault:
            if fault.errno != errno.ENOTSUP:
                raise
