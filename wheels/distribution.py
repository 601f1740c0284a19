"""Make wheels from the distribution's numpy, SciPy and pandas for pip's isolated build environments.

An isolated environment hides the distribution's packages. The index has no numpy wheel for 32-bit ARM, so pip would
build numpy from source for every project that requires it. The wheels contain the unchanged files of the development
root (``dev.tar``); the libraries that these files require are in the container. The wheels are used only for builds;
they are not served, and not stored in the wheelhouse.
"""

from __future__ import annotations

import base64
import email.parser
import hashlib
import posixpath
import tarfile
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from images.flavour import Suite
from toolchain import files
from toolchain.architecture import Architecture

NAMES = ("numpy", "scipy", "pandas")
_SITE = "usr/lib/python3/dist-packages"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def make(dev_tar: Path, folder: Path, target: Architecture, suite: Suite) -> None:
    """Write a wheel of each package in ``NAMES`` that ``dev_tar`` contains. ``folder`` is created only on success.

    Raises DiskFull.
    """
    with (
        files.room_for("wheels of the distribution's packages", folder.parent),
        files.scratch_folder(folder.parent, folder.name) as scratch,
        tarfile.open(dev_tar, "r:") as archive,
    ):
        made = scratch / "wheels"
        made.mkdir()
        members = {item.name.removeprefix("./"): item for item in archive}
        for name in NAMES:
            _write(archive, members, name, made, target, suite)
        files.remove(folder)
        made.rename(folder)


def _write(
    archive: tarfile.TarFile,
    members: dict[str, tarfile.TarInfo],
    name: str,
    folder: Path,
    target: Architecture,
    suite: Suite,
) -> None:
    described = next(
        (
            path
            for path in members
            if path.startswith(f"{_SITE}/{name}-") and path.endswith((".dist-info/METADATA", ".egg-info/PKG-INFO"))
        ),
        None,
    )
    if described is None:
        return
    metadata = _content(archive, members, described)
    head = email.parser.BytesHeaderParser().parsebytes(metadata)
    try:
        version = str(Version(str(head["Version"])))
    except InvalidVersion:  # pip would reject the wheel
        return
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    tag = f"{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}"
    found = {
        path.removeprefix(f"{_SITE}/"): _content(archive, members, path)
        for path in _below(members, f"{_SITE}/{name}")
        if not path.endswith(".pyc")
    }
    found[f"{stem}.dist-info/METADATA"] = metadata
    found[f"{stem}.dist-info/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: pitorch\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    points = posixpath.join(posixpath.dirname(described), "entry_points.txt")
    if points in members:
        found[f"{stem}.dist-info/entry_points.txt"] = _content(archive, members, points)
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in sorted(found.items()))
    found[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n".encode()
    # The wheel is not compressed, because pip unpacks it under emulation.
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w", zipfile.ZIP_STORED) as wheel:
        for path, content in sorted(found.items()):
            wheel.writestr(zipfile.ZipInfo(path, _EPOCH), content)


def _below(members: dict[str, tarfile.TarInfo], folder: str) -> dict[str, None]:
    """Return the paths of files below a folder.

    Links to folders, such as Debian's link to numpy's headers, are followed.
    """
    found: dict[str, None] = {}
    for path in [path for path in members if path.startswith(f"{folder}/")]:
        member = members[path]
        if member.issym() and (target := _resolved(members, path)) in members and members[target].isdir():
            found |= {
                f"{path}/{inner.removeprefix(f'{target}/')}": None
                for inner in members
                if inner.startswith(f"{target}/") and not members[inner].isdir()
            }
        elif not member.isdir() and _resolved(members, path) in members:
            found[path] = None
    return found


def _resolved(members: dict[str, tarfile.TarInfo], path: str) -> str:
    """Return a path with the symbolic links in all its parts resolved."""
    for _ in range(40):  # the limit of Linux
        parts = path.split("/")
        links = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        link = next((item for item in links if item in members and members[item].issym()), None)
        if link is None:
            return path
        rest = path.removeprefix(link).lstrip("/")
        led = posixpath.join("/", posixpath.dirname(link), members[link].linkname, rest)
        path = posixpath.normpath(led).lstrip("/")
    return path


def _content(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], path: str) -> bytes:
    stream = archive.extractfile(members[_resolved(members, path)])
    return stream.read() if stream is not None else b""


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
