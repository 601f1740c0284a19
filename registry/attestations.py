"""Push and verify an image's signature and signed statements about the image, in cosign's layout.

The image's repository contains two additional manifests. Their tags consist of the image's digest and a suffix.
``sha256-HEX.sig`` contains cosign's signature. ``sha256-HEX.att`` contains DSSE envelopes with in-toto statements: the
provenance, and the bill of materials in SPDX and CycloneDX format. Both manifests name the image as their ``subject``
(OCI image specification 1.1), so a registry that supports the referrers API lists them as the image's referrers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from securesystemslib.signer import CryptoSigner

from registry import distribution, signing
from registry.connection import Connection
from registry.distribution import Blob, RemoteImage, digest_of
from registry.oras import MANIFEST_TYPE, Store
from registry.retries import with_retries
from registry.signing import PublicKey
from toolchain import progress
from toolchain.errors import SignatureRefused

PROVENANCE = "https://slsa.dev/provenance/v1"
SPDX = "https://spdx.dev/Document"
CYCLONEDX = "https://cyclonedx.org/bom"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_SIMPLE_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
_ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_AGAIN = "push the image again with ./inv push --sign"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """An image whose signature and statements were verified."""

    digest: str
    statements: Mapping[str, Mapping[str, Any]]
    """The predicates by type."""

    @property
    def finished(self) -> str:
        """The time when the image was built, as stated by the signer (ISO 8601, UTC)."""
        return _path(self.statements[PROVENANCE], "runDetails", "metadata", "finishedOn")


def statement(name: str, digest: str, kind: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return an in-toto statement about an image."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": kind,
        "predicate": predicate,
    }


def attach(store: Store, digest: str, predicates: Mapping[str, Mapping[str, Any]], signer: CryptoSigner) -> None:
    """Sign an image in the registry, and push the signature and the signed statements.

    Raises AccessDenied, RegistryFull, RegistryBroke or RegistryFailed.
    """
    name = store.connection.reference.name
    envelopes = [
        (signing.envelope(statement(name, digest, kind, predicate), signer), kind)
        for kind, predicate in predicates.items()
    ]
    statements = [(content, {_SIGNATURE: "", "predicateType": kind}) for content, kind in envelopes]
    _push(store, _tag(digest, "att"), statements, _ENVELOPE_TYPE, _subject(store, digest))
    sign(store, digest, signer)


def sign(store: Store, digest: str, signer: CryptoSigner) -> None:
    """Sign an image or an index in the registry, and push the signature. Raises the same errors as ``attach``."""
    payload = json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": store.connection.reference.name},
                "image": {"docker-manifest-digest": digest},
                "type": "cosign container image signature",
            },
            "optional": None,
        },
        separators=(",", ":"),
    ).encode()
    signature = [(payload, {_SIGNATURE: signing.sign(payload, signer)})]
    _push(store, _tag(digest, "sig"), signature, _SIMPLE_TYPE, _subject(store, digest))


def _subject(store: Store, digest: str) -> dict[str, Any]:
    """Return the descriptor of an image or an index."""
    body, manifest = distribution.read_manifest(store.connection, digest)
    return {"mediaType": body.get("mediaType", MANIFEST_TYPE), "digest": digest, "size": manifest.size}


def _tag(digest: str, suffix: str) -> str:
    return f"{digest.replace(':', '-')}.{suffix}"


def _push(
    store: Store, tag: str, layers: Sequence[tuple[bytes, Mapping[str, str]]], kind: str, subject: Mapping[str, Any]
) -> None:
    """Push a manifest with the given layers.

    The manifest refers to an image configuration, because cosign expects an image.
    """
    diffs = [digest_of(content) for content, _ in layers]
    config = json.dumps(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "history": [{"created": "0001-01-01T00:00:00Z"} for _ in layers],
            "rootfs": {"type": "layers", "diff_ids": diffs},
        }
    ).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": _CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": kind, "digest": digest, "size": len(content), "annotations": dict(annotations)}
            for digest, (content, annotations) in zip(diffs, layers, strict=True)
        ],
        "subject": dict(subject),
    }
    store.put(tag, json.dumps(document, indent=2).encode(), [config, *(content for content, _ in layers)])


def verify(connection: Connection, image: RemoteImage, key: PublicKey) -> Verified:
    """Verify the signatures of an image, of its statements, and of the index that lists the image.

    Raises SignatureRefused, RegistryBroke or RegistryFailed.
    """
    reference, digest = connection.reference, image.manifest.digest
    signature = f"the signature of {reference}"
    for signed in dict.fromkeys((image.digest, digest)):
        for payload, notes in _layers(connection, signed, "sig", signature):
            signing.require_signed(payload, str(notes.get(_SIGNATURE, "")), key, str(reference))
            _require_subject(_path(payload, "critical", "image", "docker-manifest-digest"), signed, signature)
    found: dict[str, Mapping[str, Any]] = {}
    for content, _ in _layers(connection, digest, "att", f"the statement about {reference}"):
        stated = signing.open_envelope(content, key, f"a statement about {reference}", fix=_AGAIN)
        subjects = stated.get("subject")
        subject = subjects[0] if isinstance(subjects, list) and len(subjects) == 1 else {}
        stated_digest = f"sha256:{_path(subject, 'digest', 'sha256')}"
        kind = str(stated.get("predicateType"))
        _require_subject(stated_digest, digest, f"a statement about {reference} ({kind})")
        found[kind] = stated["predicate"] if isinstance(stated.get("predicate"), dict) else {}
    if missing := [kind for kind in (PROVENANCE, SPDX, CYCLONEDX) if kind not in found]:
        raise SignatureRefused(
            f"signed statements about {reference} are missing from the registry",
            expected=f"statements of these types: {', '.join(missing)}",
            found=", ".join(found) or "none",
            fix=_AGAIN,
        )
    _require_same_documents(found, str(reference))
    return Verified(digest=digest, statements=found)


def document_text(document: Mapping[str, Any]) -> str:
    """Return a bill of materials as the text that images.sbom writes. The provenance lists this text's SHA-256."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _require_same_documents(found: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise SignatureRefused if the bill of materials is not the one that the provenance lists."""
    details = found[PROVENANCE].get("runDetails")
    products = details.get("byproducts") if isinstance(details, dict) else None
    listed = {_path(item, "name"): _path(item, "digest", "sha256") for item in products or []}
    for kind, file in ((SPDX, "sbom.spdx.json"), (CYCLONEDX, "sbom.cdx.json")):
        sha256 = hashlib.sha256(document_text(found[kind]).encode()).hexdigest()
        if listed.get(file) != sha256:
            raise SignatureRefused(
                f"the bill of materials of {name} does not match the provenance",
                expected=f"SHA-256 {listed.get(file) or f'of {file} in the provenance'}",
                found=f"{file} with SHA-256 {sha256}",
                fix=_AGAIN,
            )


def _require_subject(stated: str, digest: str, what: str) -> None:
    if stated != digest:
        raise SignatureRefused(
            f"{what} belongs to another image",
            expected=f"the digest {digest}",
            found=stated or "no digest",
            fix="do not use this image, because another user has replaced its signatures; push your own copy "
            "again with ./inv push --sign",
        )


def _path(value: Any, *keys: str) -> str:
    """Return the string at the path ``keys`` in nested objects or JSON text, or an empty string if there is none."""
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except ValueError:
            return ""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _layers(connection: Connection, digest: str, suffix: str, what: str) -> list[tuple[bytes, Mapping[str, Any]]]:
    """Return the contents and annotations of a manifest's layers.

    Raises SignatureRefused if the manifest is absent or has no layers, or if a layer is damaged.
    """
    tag = _tag(digest, suffix)
    path = f"/v2/{connection.reference.repository}/manifests/{tag}"
    if connection.request("HEAD", path, headers={"Accept": MANIFEST_TYPE}).status_code == 404:
        raise SignatureRefused(
            f"{connection.reference} is not signed",
            expected=f"the tag {tag} in {connection.reference.name}",
            found="no such tag",
            fix=_AGAIN,
        )
    body, _ = distribution.read_manifest(connection, tag)
    layers = body.get("layers") or []
    found: list[tuple[bytes, Mapping[str, Any]]] = []
    for layer in layers if isinstance(layers, list) else []:
        stated = _path(layer, "digest")
        answer = connection.request("GET", f"/v2/{connection.reference.repository}/blobs/{stated}")
        if answer.status_code != 200:
            raise connection.unexpected(answer, f"the download of {stated}")
        if digest_of(answer.content) != stated:
            raise _damaged(what, stated, answer.content)
        annotations = layer.get("annotations")
        found.append((answer.content, annotations if isinstance(annotations, dict) else {}))
    if not found:
        raise SignatureRefused(f"{what} is empty", expected="at least one layer", found="none", fix=_AGAIN)
    return found


def _damaged(what: str, stated: str, content: bytes) -> SignatureRefused:
    return SignatureRefused(
        f"{what} is damaged in the registry",
        expected=stated,
        found=f"{digest_of(content)}, computed over the received bytes",
        fix=_AGAIN,
    )


def check_contents(connection: Connection, image: RemoteImage) -> None:
    """Download an image's layers and verify their digests. A failed download is retried.

    Raises SignatureRefused, RegistryBroke, RegistryUnreachable or RegistryFailed.
    """
    reference = connection.reference
    with progress.bar(f"read {reference}", total=image.size, in_bytes=True) as bar:
        done = 0
        for blob in image.layers:

            def on_read(size: int, before: int = done) -> None:
                bar.update(before + size)

            with_retries(partial(_check_layer, connection, blob, on_read), connection)
            done += blob.size


def _check_layer(connection: Connection, blob: Blob, on_read: Callable[[int], None]) -> None:
    """Download a layer and verify its digest; ``on_read`` receives the number of bytes received."""
    reference = connection.reference
    digest, size = hashlib.sha256(), 0
    path = f"/v2/{reference.repository}/blobs/{blob.digest}"
    with contextlib.closing(connection.request("GET", path, stream=True)) as answer:
        if answer.status_code != 200:
            raise connection.unexpected(answer, f"the download of {blob.digest}")
        for block in distribution.blocks(connection, answer, blob, blob.digest):
            size += len(block)
            digest.update(block)
            on_read(size)
    if f"sha256:{digest.hexdigest()}" != blob.digest:
        raise SignatureRefused(
            f"a layer of {reference} is damaged in the registry",
            expected=blob.digest,
            found=f"sha256:{digest.hexdigest()}, computed over the received bytes",
            fix="push the image again",
        )
