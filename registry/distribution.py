"""Read images from a registry through the distribution API (``/v2/``), and write manifests and indices.

The requests in this module verify what the registry holds, independently of the engine's report. Every digest is
computed over the received bytes, never read from a header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import urllib3.exceptions

from registry import faults
from registry.connection import Connection
from registry.reference import Reference
from registry.retries import STALL_S
from toolchain.errors import AccessDenied, PlatformMismatch, ReferenceNotFound, RegistryBroke, RegistryFailed, UserError
from toolchain.text import one_line

_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_INDEX_TYPES = (
    INDEX_TYPE,
    "application/vnd.docker.distribution.manifest.list.v2+json",
)

_BLOCK = 1 << 18
_DIGEST = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[A-Za-z0-9=_-]+")  # OCI image specification, "Digests"
_PLATFORM_FIELDS = ("os", "architecture", "variant")


@dataclass(frozen=True, kw_only=True)
class Blob:
    """An image's layer, configuration or manifest."""

    digest: str
    size: int
    """The size in bytes as stored, that is, compressed."""


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """The image that a registry holds under a tag, for one platform."""

    digest: str
    """The digest of the manifest or index, which ``docker pull NAME@DIGEST`` accepts."""
    manifest: Blob
    """The manifest for this platform, not the index."""
    media_type: str
    """The media type of that manifest."""
    platform: str
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def size(self) -> int:
        """The image's size in the registry, in bytes: the compressed layers and the configuration."""
        return self.config.size + sum(layer.size for layer in self.layers)


def read_image(remote: Connection, platform: str) -> RemoteImage:
    """Read the tag's manifest and configuration, check that every blob is complete, and return the image.

    Raises ReferenceNotFound, PlatformMismatch or RegistryFailed.
    """
    reference = remote.reference
    body, top = read_manifest(remote, reference.tag)
    manifest = top
    if body.get("mediaType") in _INDEX_TYPES or "manifests" in body:
        body, manifest = read_manifest(remote, choose_platform(body, platform, reference))
    try:
        config, *layers = map(_blob, (body["config"], *body["layers"]))
    except (KeyError, TypeError, ValueError, OverflowError) as fault:
        raise RegistryFailed(
            f"{reference} is not a supported image",
            expected="a manifest with a configuration and layers (schema 2 or OCI)",
            found=one_line(str(body.get("mediaType") or f"schema {body.get('schemaVersion')}")),
            fix="push the image again",
        ) from fault
    for blob in (config, *layers):
        check_blob(remote, blob)
    settings = _configuration(remote, config)
    found = one_line(_platform_text(settings))
    if found != platform:
        raise PlatformMismatch(
            f"{reference} is for another platform",
            expected=platform,
            found=found or "no platform",
            fix="pass another --tag, or push an image for the expected platform with this tag",
        )
    return RemoteImage(
        digest=top.digest,
        manifest=manifest,
        media_type=str(body.get("mediaType") or _MANIFEST_TYPES[0]),
        platform=found,
        config=config,
        layers=tuple(layers),
    )


def _blob(item: Mapping[str, Any]) -> Blob:
    """Return the blob that a descriptor describes. The digest must be valid, because it becomes part of a URL."""
    blob = Blob(digest=str(item["digest"]), size=int(item["size"]))
    if not _DIGEST.fullmatch(blob.digest) or blob.size < 0:
        raise ValueError("invalid descriptor")
    return blob


def read_manifest(remote: Connection, name: str, *, fix: str = "") -> tuple[dict[str, Any], Blob]:
    """Return the manifest of a tag or digest, with its digest and size; ``fix`` is the advice for a missing manifest.

    Raises ReferenceNotFound, RegistryBroke or RegistryFailed.
    """
    reference = remote.reference
    path = f"/v2/{reference.repository}/manifests/{name}"
    answer = remote.request("GET", path, headers={"Accept": ", ".join((*_MANIFEST_TYPES, *_INDEX_TYPES))})
    if answer.status_code == 404:
        raise _not_found(remote, fix)
    if answer.status_code != 200:
        raise remote.unexpected(answer, f"GET {path}")
    digest = digest_of(answer.content)
    stated = name if name.startswith("sha256:") else answer.headers.get("Docker-Content-Digest", digest)
    if digest != stated:
        raise RegistryFailed(
            f"the manifest of {reference} is damaged",
            expected=f"a manifest with the digest {stated}",
            found=f"{digest}, computed over the received bytes",
            fix="push the image again; if the error persists, check the registry's storage and any proxies",
        )
    try:
        body = json.loads(answer.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RegistryFailed(
            f"the manifest of {reference} cannot be read",
            expected="a JSON object",
            found=one_line(answer.text[:80]),
            fix="check the registry's log",
        )
    return body, Blob(digest=digest, size=len(answer.content))


def put_manifest(remote: Connection, document: bytes, media_type: str) -> None:
    """Store a manifest or an index under the tag, and verify the stored copy.

    Raises AccessDenied, RegistryBroke or RegistryFailed.
    """
    reference = remote.reference
    path = f"/v2/{reference.repository}/manifests/{reference.tag}"
    answer = remote.request("PUT", path, headers={"Content-Type": media_type}, body=lambda: document)
    if answer.status_code != 201:
        raise remote.unexpected(answer, f"PUT {path}")
    _, found = read_manifest(remote, reference.tag)
    if found.digest != (sent := digest_of(document)):
        raise RegistryFailed(
            f"{reference} in the registry differs from what was sent",
            expected=sent,
            found=f"{found.digest}, computed over the received bytes",
            fix="run the task again; another user may have pushed the same tag",
        )


def index(images: Iterable[RemoteImage]) -> bytes:
    """Return an OCI image index, whose bytes do not depend on the order of ``images``."""
    entries = [
        {
            "mediaType": image.media_type,
            "digest": image.manifest.digest,
            "size": image.manifest.size,
            "platform": dict(zip(_PLATFORM_FIELDS, image.platform.split("/"), strict=False)),
        }
        for image in sorted(images, key=lambda image: image.platform)
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}, indent=2).encode()


def _not_found(remote: Connection, fix: str) -> ReferenceNotFound:
    reference, existing = remote.reference, tags(remote)
    shown = ", ".join(existing[:8]) + (", …" if len(existing) > 8 else "")
    return ReferenceNotFound(
        f"{reference} is not in the registry",
        expected=f"the tag {reference.tag} in {reference.name}",
        found=f"the tags {shown}" if existing else "no such repository, or a repository with unlisted tags",
        fix=fix or ("pass one of these tags with --tag" if existing else "run ./inv push first, or check --registry"),
    )


def check_blob(remote: Connection, blob: Blob) -> None:
    """Check that the registry holds the complete blob. Raises RegistryBroke."""
    answer = remote.request("HEAD", f"/v2/{remote.reference.repository}/blobs/{blob.digest}")
    size = answer.headers.get("Content-Length", "")
    if answer.status_code != 200 or size not in ("", str(blob.size)):
        raise RegistryBroke(
            f"a part of {remote.reference} is missing from the registry",
            expected=f"the blob {blob.digest} with {blob.size} bytes",
            found=f"HTTP {answer.status_code}" if answer.status_code != 200 else f"{one_line(size)} bytes",
            fix="push the image again",
        )


def blocks(remote: Connection, answer: requests.Response, blob: Blob, name: str) -> Iterator[bytes]:
    """Yield a blob's content from a response in blocks; stop after the first block that extends beyond the blob's size.

    Raises RegistryBroke if the connection is lost, or RegistryFailed if the transfer stalls.
    """
    host, activity, size = remote.reference.host, remote.activity, 0
    try:
        while size <= blob.size and (block := answer.raw.read1(_BLOCK)):
            size += len(block)
            activity.note(blob.digest, size)
            if activity.idle_s > STALL_S:
                raise faults.stalled(host, f"{size} of {blob.size} bytes of {name}")
            yield block
    except (requests.RequestException, urllib3.exceptions.HTTPError) as fault:
        raise faults.explain(fault, host) from None
    if size < blob.size:
        raise faults.connection_lost(host, f"{size} bytes", f"{blob.size} bytes of {name}")


def require_space(remote: Connection) -> None:
    """Start and cancel an upload to check that the registry has space.

    Raises RegistryFull if the registry reports that its storage is full. An engine reports a full registry as an
    internal error (500), and only after its own retries (50 s).
    """
    repository = remote.reference.repository
    answer = remote.request("POST", f"/v2/{repository}/blobs/uploads/")
    if answer.status_code == 202:
        with contextlib.suppress(UserError):
            remote.request("DELETE", remote.upload_path(answer))
    elif answer.status_code == 507 or faults.is_full(answer.text, repository):
        raise faults.full(remote.reference, f"response to a new upload: HTTP {answer.status_code}, storage full")


def tags(remote: Connection) -> list[str]:
    """Return the first page of the repository's tags, or an empty list if there are none or the request fails."""
    try:
        answer = remote.request("GET", f"/v2/{remote.reference.repository}/tags/list")
    except AccessDenied:
        return []
    if answer.status_code != 200:
        return []
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return sorted(one_line(str(tag)) for tag in answer.json().get("tags") or [])
    return []


def choose_platform(index: Mapping[str, Any], platform: str, reference: Reference) -> str:
    """Return the digest of a platform's manifest from an index (a manifest list). Raises PlatformMismatch."""
    found: dict[str, str] = {}
    entries = index.get("manifests")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("platform"), dict):
            found.setdefault(_platform_text(entry["platform"]), str(entry.get("digest", "")))
    if platform not in found:
        raise PlatformMismatch(
            f"{reference} has no image for {platform}",
            expected=platform,
            found=one_line(", ".join(sorted(found))) or "an empty index",
            fix="pass another --tag, or push an image for the expected platform with this tag",
        )
    return found[platform]


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of a byte string in the form that registries use, ``sha256:HEX``."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _configuration(remote: Connection, blob: Blob) -> Mapping[str, Any]:
    path = f"/v2/{remote.reference.repository}/blobs/{blob.digest}"
    answer = remote.request("GET", path)
    if answer.status_code != 200:
        raise remote.unexpected(answer, f"GET {path}")
    digest = digest_of(answer.content)
    settings = None
    with contextlib.suppress(ValueError):
        settings = json.loads(answer.content)
    if digest != blob.digest or not isinstance(settings, dict):
        raise RegistryFailed(
            f"the configuration of {remote.reference} is damaged",
            expected=blob.digest,
            found=f"{digest}, {len(answer.content)} bytes",
            fix="push the image again",
        )
    return settings


def _platform_text(settings: Mapping[str, Any]) -> str:
    """Return a platform as OS/ARCHITECTURE[/VARIANT]."""
    parts = [str(settings.get(name, "")) for name in _PLATFORM_FIELDS]
    return "/".join(part for part in parts if part)
