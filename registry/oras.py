"""Files in an OCI registry, in ORAS's layout: what ``oras pull`` and every registry that follows the standard reads.

An artefact is an image manifest (OCI image specification 1.1, "Guidelines for Artifact Usage") with an
``artifactType``, the empty configuration, and one layer per file, uncompressed and unpacked, whose name stands in the
annotation ``org.opencontainers.image.title``. Nothing in it depends on when or where it was pushed: the same files give
the same manifest, and so the same digest.

No engine takes part. A registry stores a blob under its digest; blobs that are there are not sent again. What is
received is hashed on its way to the disk, so nothing of a wrong digest is ever handed on.
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
from urllib.parse import urlsplit

import requests
import urllib3.exceptions

import engine.connect
from registry import client as registry
from registry import credentials
from registry.distribution import STALL_S, Blob, Distribution, explain, is_insecure, split, stalled
from registry.reference import Reference
from toolchain import progress
from toolchain.errors import (
    EngineUnavailable,
    ReferenceNotFound,
    RegistryBroke,
    RegistryFailed,
    RegistryUntrusted,
)
from toolchain.files import room_for, sha256_of
from toolchain.text import one_line

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = b"{}"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"
_BLOCK = 1 << 18
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEDIA_TYPES = {
    ".whl": "application/zip",
    ".zip": "application/zip",
    ".xz": "application/x-xz",
    ".provenance.json": "application/vnd.in-toto+json",
}
# What an engine that was told nothing else counts as insecure, for machines without one.
_LOOPBACK_ONLY = {"RegistryConfig": {"InsecureRegistryCIDRs": ["127.0.0.0/8", "::1/128"]}}


@dataclass(frozen=True, kw_only=True)
class File(Blob):
    """A file of an artefact. ``size`` is in bytes."""

    name: str
    media_type: str

    @classmethod
    def of(cls, path: Path) -> File:
        """Measure a file on this machine."""
        kinds = (kind for suffix, kind in _MEDIA_TYPES.items() if path.name.endswith(suffix))
        return cls(
            digest=f"sha256:{sha256_of(path)}",
            size=path.stat().st_size,
            name=path.name,
            media_type=next(kinds, "application/octet-stream"),
        )


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """What a registry holds under a tag."""

    digest: str
    """Of the manifest, computed here."""
    kind: str
    """Its ``artifactType``."""
    files: tuple[File, ...]
    annotations: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.files)


def manifest(kind: str, files: Sequence[File], annotations: Mapping[str, str]) -> bytes:
    """The manifest of an artefact: a pure function of what it holds."""
    empty = f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}"
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": {"mediaType": _EMPTY_TYPE, "digest": empty, "size": len(_EMPTY), "data": "e30="},
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
    """The registry, for one artefact. ``actions`` is pull, or pull,push.

    Raises RegistryRefused, RegistryUnreachable, RegistryUntrusted or RegistryFailed.
    """
    credentials.require_readable()
    with Store(reference, insecure=is_insecure(reference.host, _engine_info()), actions=actions) as remote:
        registry.log_in(remote, actions=actions, user=user)
        yield remote


def _engine_info() -> Mapping[str, Any]:
    """Which registries the engine trusts without a certificate; one that is not there trusts the loopback."""
    try:
        with contextlib.closing(engine.connect.connect(timeout_s=10)) as client:
            info: Mapping[str, Any] = client.api.info()
            return info
    except (EngineUnavailable, requests.RequestException):
        return _LOOPBACK_ONLY


class Store(Distribution):
    """A connection to one registry, for one artefact."""

    def find(self) -> Artefact | None:
        """What lies behind the tag, or None. Raises RegistryFailed for what is no artefact of files."""
        path = f"/v2/{self.reference.repository}/manifests/{self.reference.tag}"
        if self._request("HEAD", path, headers={"Accept": MANIFEST_TYPE}).status_code == 404:
            return None
        return self.artefact()

    def artefact(self) -> Artefact:
        """What lies behind the tag. Raises ReferenceNotFound, or RegistryFailed for what is no artefact of files."""
        body, digest = self._manifest(self.reference.tag)
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
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise self._not_ours(str(body.get("artifactType") or body.get("mediaType") or "no media type")) from fault
        names = [item.name for item in layers]
        if wrong or not layers or len(set(names)) != len(names):
            raise self._not_ours(f"files named {names}")
        return Artefact(digest=digest, kind=str(body.get("artifactType", "")), files=layers, annotations=annotations)

    def is_whole(self, held: Artefact) -> bool:
        """Whether the registry has every file of the artefact, in its full size."""
        return all(self._holds(item) for item in held.files)

    def push(self, kind: str, paths: Sequence[Path], annotations: Mapping[str, str]) -> tuple[Artefact, int]:
        """Send what the registry lacks, tag it, and ask for it; what it then holds, and how many files were sent.

        Raises RegistryRefused, RegistryFull, RegistryBroke or RegistryFailed.
        """
        found = [File.of(path) for path in paths]
        sent = 0
        for path, item in zip(paths, found, strict=True):
            with progress.bar(f"  {item.name}", total=item.size, in_bytes=True) as bar, path.open("rb") as stream:

                def tell(size: float, bar: progress.Bar = bar, digest: str = item.digest) -> None:
                    bar.update(size)
                    self.advance.saw(digest, size)

                sent += self._upload(item, lambda stream=stream, tell=tell: _Reader(stream, tell))  # type: ignore[misc]
        empty = Blob(digest=f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}", size=len(_EMPTY))
        self._upload(empty, lambda: _Reader(io.BytesIO(_EMPTY)))
        document = manifest(kind, found, annotations)
        path_ = f"/v2/{self.reference.repository}/manifests/{self.reference.tag}"
        answer = self._request(
            "PUT", path_, headers={"Content-Type": MANIFEST_TYPE}, body=lambda: _Reader(io.BytesIO(document))
        )
        if answer.status_code != 201:
            raise self._unexpected(answer, f"PUT {path_}")
        held = self.artefact()
        stated = f"sha256:{hashlib.sha256(document).hexdigest()}"
        if held.digest != stated:
            raise RegistryFailed(
                f"the registry does not hold the {self.reference} that was sent",
                expected=stated,
                found=f"{held.digest}, computed over what the registry sent",
                fix="somebody else may have pushed that tag meanwhile: run the task again",
            )
        for item in held.files:
            self._check_blob(item)
        return held, sent

    def tag_also(self, tag: str) -> None:
        """Let another tag of the repository mean the same artefact from now on, and ask whether it does.

        Raises RegistryRefused, RegistryBroke or RegistryFailed.
        """
        base = f"/v2/{self.reference.repository}/manifests"
        answer = self._request("GET", f"{base}/{self.reference.tag}", headers={"Accept": MANIFEST_TYPE})
        if answer.status_code != 200:
            raise self._unexpected(answer, f"GET {base}/{self.reference.tag}")
        document = answer.content
        stated = f"sha256:{hashlib.sha256(document).hexdigest()}"
        answer = self._request(
            "PUT", f"{base}/{tag}", headers={"Content-Type": MANIFEST_TYPE}, body=lambda: _Reader(io.BytesIO(document))
        )
        if answer.status_code != 201:
            raise self._unexpected(answer, f"PUT {base}/{tag}")
        _, found = self._manifest(tag)
        if found != stated:
            raise RegistryFailed(
                f"the registry does not hold {self.reference} under the tag {tag}",
                expected=stated,
                found=found,
                fix="somebody else may have pushed that tag meanwhile: run the task again",
            )

    def download(self, item: File, to: Path) -> None:
        """Receive a file, which is at ``to`` only when its size and digest are right.

        Raises RegistryBroke (worth another try), RegistryFailed or DiskFull.
        """
        path = f"/v2/{self.reference.repository}/blobs/{item.digest}"
        digest, size = hashlib.sha256(), 0
        aside = to.with_name(to.name + ".part")
        with (
            contextlib.closing(self._request("GET", path, stream=True)) as answer,
            progress.bar(f"  {item.name}", total=item.size, in_bytes=True) as bar,
        ):
            if answer.status_code == 404:
                raise self._damaged(item, "nothing under that digest")
            if answer.status_code != 200:
                raise self._unexpected(answer, f"GET {path}")
            try:
                with room_for(item.name, to.parent), aside.open("wb") as stream:
                    while block := answer.raw.read1(_BLOCK):
                        size += len(block)
                        self.advance.saw(item.digest, size)
                        if self.advance.standing_s > STALL_S:
                            raise stalled(self.reference.host, f"{size} of {item.size} bytes of {item.name}")
                        if size > item.size:
                            raise self._damaged(item, "more than that")
                        digest.update(block)
                        stream.write(block)
                        bar.update(size)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as fault:
                raise explain(fault, self.reference.host) from None
        if size < item.size:
            raise RegistryBroke(
                f"{self.reference.host} broke off",
                expected=f"{item.size} bytes of {item.name}",
                found=f"{size} bytes",
                fix="look at that registry's log, then run the task again",
            )
        found = f"sha256:{digest.hexdigest()}"
        if found != item.digest:
            raise self._damaged(item, f"{found}, computed over what it sent")
        aside.rename(to)

    def _holds(self, blob: Blob) -> bool:
        answer = self._request("HEAD", f"/v2/{self.reference.repository}/blobs/{blob.digest}")
        return answer.status_code == 200 and answer.headers.get("Content-Length") == str(blob.size)

    def _upload(self, blob: Blob, body: Callable[[], _Reader]) -> bool:
        """Send a blob in one piece unless it is there; whether it was sent (distribution API, "monolithic")."""
        if self._holds(blob):
            return False
        opened = self._request("POST", f"/v2/{self.reference.repository}/blobs/uploads/")
        if opened.status_code != 202:
            self._require_room_again(opened)
            raise self._unexpected(opened, "the beginning of an upload")
        target = self._target(opened)
        path = f"{target}{'&' if '?' in target else '?'}digest={blob.digest}"
        answer = self._request("PUT", path, headers={"Content-Type": "application/octet-stream"}, body=body)
        if answer.status_code != 201:
            self._require_room_again(answer)
            raise self._unexpected(answer, f"the upload of {blob.digest}")
        return True

    def _target(self, answer: requests.Response) -> str:
        """Where an upload goes, below this registry's address: what we are known by is sent nowhere else."""
        parts = split(answer.headers.get("Location", ""), self._base)
        if parts.netloc != urlsplit(self._base).netloc:
            raise RegistryUntrusted(
                f"{self.reference.host} sends uploads elsewhere",
                expected=f"an address at {self.reference.host}",
                found=one_line(parts.netloc) or "none",
                fix="tell the registry's keeper",
            )
        return f"{parts.path}{'?' + parts.query if parts.query else ''}"

    def _require_room_again(self, answer: requests.Response) -> None:
        """Tell a full registry from a broken one: both answer with a fault of theirs."""
        if answer.status_code >= 500:
            self.require_room()

    def _not_found(self) -> ReferenceNotFound:
        fault = super()._not_found()
        fault.fix = "./inv push-artefacts on the machine that built it, or build it here"
        return fault

    def _not_ours(self, found: str) -> RegistryFailed:
        return RegistryFailed(
            f"{self.reference} is no artefact that can be used here",
            expected="an OCI manifest whose layers are files with plain names",
            found=one_line(found),
            fix="check --registry and registry.artefacts",
        )

    def _damaged(self, item: File, found: str) -> RegistryFailed:
        return RegistryFailed(
            f"{item.name} is damaged in the registry",
            expected=f"{item.size} bytes with the digest {item.digest}",
            found=found,
            fix=f"delete {self.reference} there and push it anew from where it was built",
        )


class _Reader:
    """A file on its way out: says its length beforehand, and how far it is."""

    def __init__(self, stream: io.BufferedIOBase, tell: Callable[[float], None] = lambda _: None) -> None:
        self._stream = stream
        self._size = stream.seek(0, io.SEEK_END)
        self._tell = tell
        stream.seek(0)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._tell(self._stream.tell())
        return block


def _is_plain(name: str) -> bool:
    """Whether a file's name, which the registry chose, stays in the folder it is written to."""
    plain = bool(name) and PurePosixPath(name).name == name and "\\" not in name
    return plain and name.isprintable() and not name.startswith(".")
