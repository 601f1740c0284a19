"""Store files in an OCI registry in ORAS's layout, so that ``oras pull`` can download them.

An artefact is an image manifest (OCI image specification 1.1, "Guidelines for Artifact Usage") with an
``artifactType``, the empty configuration, and one layer per file. The layers are neither compressed nor packed; the
annotation ``org.opencontainers.image.title`` contains the file's name. The manifest does not depend on the time or
place of the push, so an artefact with the same files always has the same digest.

No engine is required. Registries store blobs by digest, so existing blobs are not sent again. Downloads are hashed
while they are written, and rejected if the digest is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import requests

import engine.connect
from registry import credentials, distribution
from registry.connection import Connection, log_in
from registry.distribution import Blob, digest_of
from registry.reference import Reference
from registry.trust import is_insecure
from toolchain import progress
from toolchain.errors import EngineUnavailable, RegistryFailed
from toolchain.files import room_for, sha256_of
from toolchain.text import one_line

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = b"{}"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEDIA_TYPES = {
    ".whl": "application/zip",
    ".zip": "application/zip",
    ".xz": "application/x-xz",
    ".provenance.json": "application/vnd.in-toto+json",
}
# The engine's default list of insecure registries, for machines without an engine.
_LOOPBACK_ONLY = {"RegistryConfig": {"InsecureRegistryCIDRs": ["127.0.0.0/8", "::1/128"]}}


@dataclass(frozen=True, kw_only=True)
class File(Blob):
    """A file in an artefact."""

    name: str
    media_type: str

    @classmethod
    def of(cls, path: Path) -> File:
        """Return the name, media type, digest and size of a file on this machine."""
        kinds = (kind for suffix, kind in _MEDIA_TYPES.items() if path.name.endswith(suffix))
        return cls(
            digest=f"sha256:{sha256_of(path)}",
            size=path.stat().st_size,
            name=path.name,
            media_type=next(kinds, "application/octet-stream"),
        )


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """The artefact that a registry holds under a tag."""

    digest: str
    """The manifest's digest, computed over the received bytes."""
    kind: str
    """The value of ``artifactType``."""
    files: tuple[File, ...]
    annotations: Mapping[str, str]

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(item.size for item in self.files)


def manifest(kind: str, files: Sequence[File], annotations: Mapping[str, str]) -> bytes:
    """Return the manifest of an artefact, which depends only on the artefact's contents."""
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": {"mediaType": _EMPTY_TYPE, "digest": digest_of(_EMPTY), "size": len(_EMPTY), "data": "e30="},
        "layers": [
            {
                "mediaType": item.media_type,
                "digest": item.digest,
                "size": item.size,
                "annotations": {_TITLE: item.name},
            }
            for item in sorted(files, key=lambda item: item.name)
        ],
        "annotations": dict(sorted(annotations.items())),
    }
    return json.dumps(document, indent=2).encode()


@contextlib.contextmanager
def connect(reference: Reference, *, actions: str, user: str) -> Iterator[Store]:
    """Connect to the registry and log in. ``actions`` is ``pull`` or ``pull,push``.

    Raises AccessDenied, RegistryUnreachable, RegistryUntrusted or RegistryFailed.
    """
    credentials.require_readable()
    with Connection(reference, insecure=is_insecure(reference.host, _engine_info()), actions=actions) as connection:
        log_in(connection, actions=actions, user=user)
        yield Store(connection)


def _engine_info() -> Mapping[str, Any]:
    """Return the output of ``docker info``, which lists insecure registries."""
    try:
        with contextlib.closing(engine.connect.connect(timeout_s=10)) as client:
            info: Mapping[str, Any] = client.api.info()
            return info
    except (EngineUnavailable, requests.RequestException):
        return _LOOPBACK_ONLY


class Store:
    """One artefact in a registry."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._reference = connection.reference
        self._path = f"/v2/{connection.reference.repository}"

    def find_complete(self) -> Artefact | None:
        """Return the artefact at the tag, or None if the tag does not exist or one of the artefact's files is missing.

        Raises RegistryBroke, or RegistryFailed if the tag is not an artefact with files.
        """
        path = f"{self._path}/manifests/{self._reference.tag}"
        if self.connection.request("HEAD", path, headers={"Accept": MANIFEST_TYPE}).status_code == 404:
            return None
        held = self.artefact()
        return held if all(self._holds(item) for item in held.files) else None

    def artefact(self) -> Artefact:
        """Return the artefact at the tag. Raises ReferenceNotFound, or RegistryFailed if the tag is not an artefact."""
        fix = "run ./inv push-artefacts on the machine that built the artefact, or build it here"
        body, document = distribution.read_manifest(self.connection, self._reference.tag, fix=fix)
        try:
            layers = tuple(
                File(
                    digest=str(item["digest"]),
                    size=int(item["size"]),
                    name=str(item["annotations"][_TITLE]),
                    media_type=str(item["mediaType"]),
                )
                for item in body["layers"]
            )
            annotations = {str(name): str(value) for name, value in (body.get("annotations") or {}).items()}
            wrong = [item.name for item in layers if not _is_plain(item.name) or not _DIGEST.fullmatch(item.digest)]
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as fault:
            found = str(body.get("artifactType") or body.get("mediaType") or "no media type")
            raise self._unsupported(found) from fault
        names = [item.name for item in layers]
        if wrong or not layers or len(set(names)) != len(names):
            raise self._unsupported(f"files named {names}")
        return Artefact(
            digest=document.digest, kind=str(body.get("artifactType", "")), files=layers, annotations=annotations
        )

    def push(self, kind: str, paths: Sequence[Path], annotations: Mapping[str, str]) -> tuple[Artefact, int]:
        """Send missing files, tag the artefact and read it back; return the artefact and the number of files sent.

        Raises AccessDenied, RegistryFull, RegistryBroke or RegistryFailed.
        """
        found = [File.of(path) for path in paths]
        sent = 0
        for path, item in zip(paths, found, strict=True):
            with progress.bar(f"  {item.name}", total=item.size, in_bytes=True) as bar, path.open("rb") as stream:

                def on_read(size: float, bar: progress.Bar = bar, digest: str = item.digest) -> None:
                    bar.update(size)
                    self.connection.activity.note(digest, size)

                sent += self._upload(item, lambda stream=stream, on_read=on_read: _Reader(stream, on_read))  # type: ignore[misc]
        self._upload(Blob(digest=digest_of(_EMPTY), size=len(_EMPTY)), lambda: _Reader(io.BytesIO(_EMPTY)))
        distribution.put_manifest(self.connection, manifest(kind, found, annotations), MANIFEST_TYPE)
        held = self.artefact()
        for item in held.files:
            distribution.check_blob(self.connection, item)
        return held, sent

    def add_tag(self, tag: str) -> None:
        """Point another tag in the repository at the same artefact, and verify the tag.

        Raises AccessDenied, RegistryBroke or RegistryFailed.
        """
        path = f"{self._path}/manifests/{self._reference.tag}"
        answer = self.connection.request("GET", path, headers={"Accept": MANIFEST_TYPE})
        if answer.status_code != 200:
            raise self.connection.unexpected(answer, f"GET {path}")
        distribution.put_manifest(self.connection.at(tag), answer.content, MANIFEST_TYPE)

    def put(self, tag: str, document: bytes, blobs: Sequence[bytes]) -> None:
        """Send a manifest and its blobs, tag the manifest in the repository, and verify the stored manifest.

        Raises AccessDenied, RegistryFull, RegistryBroke or RegistryFailed.
        """
        for content in blobs:
            blob = Blob(digest=digest_of(content), size=len(content))
            self._upload(blob, lambda content=content: _Reader(io.BytesIO(content)))  # type: ignore[misc]
        distribution.put_manifest(self.connection.at(tag), document, MANIFEST_TYPE)

    def download(self, item: File, to: Path) -> None:
        """Download a file; ``to`` is created only if the size and the digest are correct.

        Raises RegistryBroke (a retry may succeed), RegistryFailed or DiskFull.
        """
        path = f"{self._path}/blobs/{item.digest}"
        digest, size = hashlib.sha256(), 0
        aside = to.with_name(to.name + ".part")
        with (
            contextlib.closing(self.connection.request("GET", path, stream=True)) as answer,
            progress.bar(f"  {item.name}", total=item.size, in_bytes=True) as bar,
        ):
            if answer.status_code == 404:
                raise self._damaged(item, "nothing with that digest")
            if answer.status_code != 200:
                raise self.connection.unexpected(answer, f"GET {path}")
            with room_for(item.name, to.parent), aside.open("wb") as stream:
                for block in distribution.blocks(self.connection, answer, item, item.name):
                    size += len(block)
                    digest.update(block)
                    stream.write(block)
                    bar.update(size)
        if size > item.size:
            raise self._damaged(item, "more bytes")
        found = f"sha256:{digest.hexdigest()}"
        if found != item.digest:
            raise self._damaged(item, f"{found}, computed over the received bytes")
        aside.rename(to)

    def _holds(self, blob: Blob) -> bool:
        path = f"{self._path}/blobs/{blob.digest}"
        answer = self.connection.request("HEAD", path)
        if answer.status_code not in (200, 404):
            raise self.connection.unexpected(answer, f"HEAD {path}")
        return answer.status_code == 200 and answer.headers.get("Content-Length") == str(blob.size)

    def _upload(self, blob: Blob, body: Callable[[], _Reader]) -> bool:
        """Upload a blob in one request ("monolithic") unless the registry has it; return whether it was sent."""
        if self._holds(blob):
            return False
        opened = self.connection.request("POST", f"{self._path}/blobs/uploads/")
        if opened.status_code != 202:
            self._require_space(opened)
            raise self.connection.unexpected(opened, "the start of an upload")
        target = self.connection.upload_path(opened)
        path = f"{target}{'&' if '?' in target else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        answer = self.connection.request("PUT", path, headers=headers, body=body)
        if answer.status_code != 201:
            self._require_space(answer)
            raise self.connection.unexpected(answer, f"the upload of {blob.digest}")
        return True

    def _require_space(self, answer: requests.Response) -> None:
        """Raise RegistryFull if a server error means that the registry is full."""
        if answer.status_code >= 500:
            distribution.require_space(self.connection)

    def _unsupported(self, found: str) -> RegistryFailed:
        return RegistryFailed(
            f"{self._reference} is not a supported artefact",
            expected="an OCI manifest whose layers are files with plain names (no folders)",
            found=one_line(found),
            fix="check --registry and registry.artefacts",
        )

    def _damaged(self, item: File, found: str) -> RegistryFailed:
        return RegistryFailed(
            f"{item.name} is damaged in the registry",
            expected=f"{item.size} bytes with the digest {item.digest}",
            found=found,
            fix=f"delete {self._reference} from the registry, then run ./inv push-artefacts on the machine that built "
            "the artefact",
        )


class _Reader:
    """A file to upload, as the body of a request. ``on_read`` receives the number of bytes read so far."""

    def __init__(self, stream: io.BufferedIOBase, on_read: Callable[[float], None] = lambda _: None) -> None:
        self._stream = stream
        self._size = stream.seek(0, io.SEEK_END)
        self._on_read = on_read
        stream.seek(0)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._on_read(self._stream.tell())
        return block


def _is_plain(name: str) -> bool:
    """Return whether a file name from a registry is a plain name, which cannot refer to another folder."""
    plain = bool(name) and PurePosixPath(name).name == name and "\\" not in name
    return plain and name.isprintable() and not name.startswith(".")
