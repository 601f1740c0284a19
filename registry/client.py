"""Push the system image to a registry or pull it from one, and verify what the registry holds.

A push checks the image's platform, logs in, and lets the engine push the image. It then reads the manifest, the
configuration and every layer's size from the registry, and compares the manifest's computed digest with the one that
the engine reported. A pull reads the tag's manifest and platform, then lets the engine pull the image by the manifest's
digest. Only an image for the right platform is tagged with the local name.

If the registry fails during a transfer, the transfer is retried (registry.retries). In addition, the engine itself
retries each layer. Layers that have arrived are not sent again, because they are stored by digest.

Images for several architectures share a tag through an OCI image index, which is pushed after the images.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import requests
import urllib3.exceptions

from engine.connect import connect, engine_lost
from registry import credentials as stored
from registry import faults, transfer
from registry.connection import Connection, log_in
from registry.credentials import Credentials
from registry.distribution import (
    INDEX_TYPE,
    RemoteImage,
    digest_of,
    index,
    put_manifest,
    read_image,
    require_space,
)
from registry.reference import Reference, resolve
from registry.retries import with_retries
from registry.trust import is_insecure
from toolchain import progress
from toolchain.config import Config, ImageConfig
from toolchain.errors import PlatformMismatch, ReferenceNotFound, RegistryBroke, RegistryFailed, RegistryFull, UserError
from toolchain.text import one_line

_ENGINE_LIMIT_S = 600.0
_ROLE = "system"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A verified image in the registry."""

    reference: Reference
    digest: str
    """The manifest's digest, computed over the received bytes."""
    size: int
    """The size in the registry in bytes: the compressed layers and the configuration."""
    layers: int
    sent: int
    """The number of layers that were transferred; the registry already had the others."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """An image in the engine, under its local name."""

    reference: Reference
    name: str
    image_id: str
    digest: str
    platform: str
    size: int
    """The size in the registry in bytes: the compressed layers and the configuration."""
    layers: int
    received: int
    """The number of layers that were transferred; the engine already had the others."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PushedIndex:
    """A pushed index, which combines images for several architectures under one tag."""

    reference: Reference
    digest: str
    """The digest of the OCI image index."""
    size: int
    """The index's size in bytes."""
    seconds: float


def push(configs: Sequence[Config]) -> tuple[list[Pushed], PushedIndex | None]:
    """Push the system images and verify that the registry holds them.

    For several architectures, each image has the tag TAG-ARCHITECTURE. An OCI image index with the tag from
    ``shared_reference`` lists the images; engines use the index to select the image for their platform. The index is
    stored last, so an error leaves its tag unchanged. The configurations must differ only in their architecture.

    The password comes from registry.credentials. Raises ReferenceNotFound if the engine lacks one of the images.
    Also raises UserError, PlatformMismatch, AccessDenied, RegistryUnreachable, RegistryUntrusted, RegistryFailed and
    EngineUnavailable.
    """
    began = time.monotonic()
    reference = shared_reference(configs)
    tags = [reference.tag]
    if len(configs) > 1:
        tags = [f"{reference.tag}-{config.image.architecture}" for config in configs]
    for tag in tags:  # raises UserError if a tag is too long
        resolve(configs[0], tag=tag)
    with _engine(f"pushed the image{'s' if len(configs) > 1 else ''}") as client:
        for config in configs:
            _require_pushable(client, config)
        with _session(client, configs[0], reference, actions="pull,push") as (remote, credentials):
            done = [
                _push(client, remote.at(tag), credentials, config) for config, tag in zip(configs, tags, strict=True)
            ]
            pushed = [image for image, _ in done]
            if len(configs) == 1:
                return pushed, None
            document = index(held for _, held in done)
            with_retries(lambda: put_manifest(remote, document, INDEX_TYPE), remote)
    return pushed, PushedIndex(
        reference=reference,
        digest=digest_of(document),
        size=len(document),
        seconds=time.monotonic() - began,
    )


def pull(configs: Sequence[Config], *, digests: Sequence[str] = ()) -> list[Pulled]:
    """Pull system images from one tag, verify their digests and platforms, and tag them with their local names.

    The configurations must differ only in their architecture, which selects the image from an index. ``digests`` lists
    the accepted digests, one for each image; if it is empty, any digest is accepted. Raises the same errors as
    ``push``, but ReferenceNotFound means that the registry does not have the tag. PlatformMismatch is raised before the
    transfer.
    """
    reference = shared_reference(configs)
    with (
        _engine("pulled the image") as client,
        _session(client, configs[0], reference, actions="pull") as (remote, credentials),
        _temporary_digests(client) as pulled,
    ):
        return [
            _pull(client, remote, credentials, config, pulled, required)
            for config, required in zip(configs, digests or [""] * len(configs), strict=True)
        ]


def shared_reference(configs: Sequence[Config]) -> Reference:
    """Return the images' shared reference. For several architectures, the default tag contains no architecture."""
    config = configs[0]
    return resolve(config, tag=config.registry.tag or config.image.release if len(configs) > 1 else None)


def _require_pushable(client: docker.DockerClient, config: Config) -> None:
    """Raise ReferenceNotFound or PlatformMismatch unless the engine has the system image for the right platform."""
    name = config.image_reference(_ROLE)
    image = _inspect(client, name)
    if image is None:
        raise ReferenceNotFound(
            "there is no image to push",
            expected=f"the image {name} in the engine",
            found="no image with that name",
            fix=_build_command(config),
        )
    _require_platform(image, name, config.image.target.oci_platform)


def _build_command(config: Config) -> str:
    architecture = config.image.architecture
    default = ImageConfig().architecture
    return "run ./inv build-image" + (f" --architecture={architecture}" if architecture != default else "")


def _push(
    client: docker.DockerClient, remote: Connection, credentials: Credentials | None, config: Config
) -> tuple[Pushed, RemoteImage]:
    """Push the system image to the connection's tag; return a summary, and the image that the registry holds."""
    began = time.monotonic()
    reference = remote.reference
    name = config.image_reference(_ROLE)
    image = client.images.get(name).attrs
    shown = transfer.Transfer(str(reference), lambda: _on_engine_retry(remote, reference), remote.activity)

    def attempt() -> RemoteImage:
        with _temporary_name(client, name, reference):
            try:
                _transfer(client, shown, reference, credentials)
            except RegistryBroke:
                _stop_if_full(remote)
                raise
        if not shown.digest:
            raise faults.connection_lost(reference.host, "the engine finished without a digest")
        held = read_image(remote, config.image.target.oci_platform)
        _compare(reference, shown.digest, held.digest, held, image)
        return held

    held = with_retries(attempt, remote)
    pushed = Pushed(
        reference=reference,
        digest=held.digest,
        size=held.size,
        layers=len(held.layers),
        sent=len(shown.moved),
        seconds=time.monotonic() - began,
    )
    return pushed, held


def _pull(
    client: docker.DockerClient,
    remote: Connection,
    credentials: Credentials | None,
    config: Config,
    pulled: set[str],
    required: str,
) -> Pulled:
    """Pull the image at the connection's tag, and add its digest to ``pulled``.

    ``required`` is the accepted digest; if it is empty, any digest is accepted.
    """
    began = time.monotonic()
    reference = remote.reference
    name = config.image_reference(_ROLE)
    platform = config.image.target.oci_platform
    shown = transfer.Transfer(str(reference), activity=remote.activity)

    def attempt() -> tuple[RemoteImage, Mapping[str, Any]]:
        held = read_image(remote, platform)
        # Use the manifest's digest, not the index's, so that the images in one index have different names.
        digest = held.manifest.digest
        if required and digest != required:
            raise RegistryFailed(
                f"{reference} changed after it was verified",
                expected=required,
                found=digest,
                fix="run the task again; another user may have pushed the same tag",
            )
        by_digest = f"{reference.name}@{digest}"
        pulled.add(by_digest)
        _transfer(client, shown, reference, credentials, pulled_as=by_digest, platform=platform)
        image = _inspect(client, by_digest)
        if image is None:
            raise faults.connection_lost(reference.host, f"the engine finished without {by_digest}")
        _compare(reference, shown.digest or digest, digest, held, image)
        _require_platform(image, by_digest, platform)
        return held, image

    held, image = with_retries(attempt, remote)
    repository, _, local_tag = name.rpartition(":")
    client.api.tag(image["Id"], repository, local_tag)
    found = _inspect(client, name)
    if found is None or found["Id"] != image["Id"]:
        raise RegistryFailed(
            f"{reference} could not be tagged with its local name",
            expected=f"the image {image['Id']}, tagged as {name}",
            found=str(found and found["Id"]),
            fix="run the task again",
        )
    return Pulled(
        reference=reference,
        name=name,
        image_id=image["Id"],
        digest=held.manifest.digest,
        platform=platform,
        size=held.size,
        layers=len(held.layers),
        received=len(shown.moved),
        seconds=time.monotonic() - began,
    )


@contextlib.contextmanager
def _engine(doing: str) -> Iterator[docker.DockerClient]:
    stored.require_readable()
    client = connect(timeout_s=_ENGINE_LIMIT_S)
    try:
        yield client
    # ENGINE_ERRORS is not used, because it includes BrokenPipeError, which can also mean that standard error is closed.
    except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as fault:
        if "no space left on device" in (text := one_line(str(fault))):
            raise transfer.engine_full(text) from fault
        raise engine_lost(doing, fault) from fault
    finally:
        client.close()


@contextlib.contextmanager
def _session(
    client: docker.DockerClient, config: Config, reference: Reference, *, actions: str
) -> Iterator[tuple[Connection, Credentials | None]]:
    """Yield a logged-in connection to the registry, and the credentials (None for anonymous access)."""
    insecure = is_insecure(reference.host, client.api.info())
    with Connection(reference, insecure=insecure, actions=actions) as remote:
        yield remote, log_in(remote, actions=actions, user=config.registry.user)


def _inspect(client: docker.DockerClient, name: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = client.images.get(name).attrs
    except docker.errors.NotFound:
        return None
    return found


def _require_platform(image: Mapping[str, Any], name: str, platform: str) -> None:
    found = "/".join(part for key in ("Os", "Architecture", "Variant") if (part := image.get(key)))
    if found != platform:
        raise PlatformMismatch(
            f"{name} is for another platform",
            expected=platform,
            found=found,
            fix="run ./inv build-image, or set image.architecture in invoke.yaml to the image's architecture",
        )


@contextlib.contextmanager
def _temporary_name(client: docker.DockerClient, name: str, reference: Reference) -> Iterator[None]:
    """Give an image its registry name while the context is active; the engine requires this name for a push.

    Afterwards, the name refers to the same image as before, or is removed if it did not exist before.
    """
    before = _inspect(client, str(reference))
    image = client.images.get(name).attrs
    client.api.tag(image["Id"], reference.name, reference.tag)
    try:
        yield
    finally:
        if before is None:
            with contextlib.suppress(docker.errors.APIError):
                client.api.remove_image(str(reference), noprune=True)
        elif before["Id"] != image["Id"]:
            client.api.tag(before["Id"], reference.name, reference.tag)


@contextlib.contextmanager
def _temporary_digests(client: docker.DockerClient) -> Iterator[set[str]]:
    """Yield an empty set to which the caller adds pulled digests. Afterwards, remove the new digests from the engine.

    Removing a digest also removes the image if the image has no other name.
    """
    # This is a single request. client.images.list() would send one request per image, and would fail if an image were
    # removed in the meantime.
    before = {digest for one in client.api.images() for digest in one["RepoDigests"] or []}
    pulled: set[str] = set()
    try:
        yield pulled
    finally:
        for name in pulled - before:
            with contextlib.suppress(docker.errors.APIError, requests.ConnectionError):
                client.api.remove_image(name, noprune=True)


def _transfer(
    client: docker.DockerClient,
    shown: transfer.Transfer,
    reference: Reference,
    credentials: Credentials | None,
    *,
    pulled_as: str = "",
    platform: str = "",
) -> None:
    """Make the engine push or pull an image by name, and convert the engine's errors to this project's."""
    auth = credentials.for_engine(reference.host) if credentials else {}
    if pulled_as:
        path, params = "/images/create", {"fromImage": pulled_as, "platform": platform}
    else:
        path, params = f"/images/{reference.name}/push", {"tag": reference.tag}
    try:
        with transfer.events(client, path, params, auth) as stream:
            shown.follow(stream)
    except transfer.EngineReported as fault:
        raise transfer.explain(str(fault), reference, credentials) from None
    except transfer.Stalled as fault:
        if str(fault):
            raise faults.connection_lost(reference.host, str(fault)) from None
        raise faults.stalled(reference.host) from None
    except requests.RequestException as fault:
        if not isinstance(fault, requests.Timeout) and "timed out" not in str(fault):
            raise
        raise faults.stalled(reference.host, "no output from the engine") from None


def _stop_if_full(remote: Connection) -> None:
    """Raise RegistryFull if the registry's storage is full, because a retry cannot succeed. Ignore all other errors."""
    try:
        require_space(remote)
    except RegistryFull:
        raise
    except UserError:
        return


def _on_engine_retry(remote: Connection, reference: Reference) -> None:
    _stop_if_full(remote)
    progress.warn(f"connection to {reference.host} lost; the engine retries the layer that it was transferring")


def _compare(reference: Reference, stated: str, digest: str, held: RemoteImage, image: Mapping[str, Any]) -> None:
    """Compare the digest that the engine reported, and the image's id, with the registry's manifest.

    ``digest`` is the digest of the transferred manifest or index. An image's id is its configuration's digest or, in
    the containerd image store, the digest of the transferred manifest or index.
    """
    if stated != digest:
        raise RegistryFailed(
            f"{reference} in the registry is not the image that was transferred",
            expected=f"the digest {stated}, which the engine reported",
            found=f"{digest}, computed over the received bytes",
            fix="run the task again; another user may have pushed the same tag",
        )
    if image["Id"] not in (held.config.digest, digest):
        raise RegistryFailed(
            f"{reference} in the registry differs from the image in the engine",
            expected=f"the image {image['Id']}",
            found=held.config.digest,
            fix="run the task again",
        )
