"""The system image to a registry and back, proven by asking the registry itself.

Push: the image is looked up and its platform checked; the registry is asked whether it wants to know us; the engine
pushes; then the registry is asked for the manifest, every layer and the image's configuration, and the digest
computed over that manifest is compared with the one that the engine stated. Pull: the registry is asked first, for
what lies behind the tag and for which platform; the engine pulls exactly that digest; what it then has is inspected,
and only an image of the right platform gets the local name.

A registry that dies on the way is waited for and tried again (``RETRY_DELAYS_S``), beyond what the engine itself
retries per layer; layers that arrived are not sent twice, a layer is stored under its digest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions

from engine.connect import connect, engine_lost
from registry import credentials as stored
from registry import transfer
from registry.credentials import Credentials
from registry.distribution import PATIENCE_S, Distribution, RemoteImage, is_insecure, stalled
from registry.reference import Reference, resolve
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import (
    PlatformMismatch,
    ReferenceNotFound,
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryFailed,
    RegistryFull,
    RegistryHostUnknown,
    RegistryRefused,
    RegistryUnreachable,
    UserError,
)

RETRY_DELAYS_S = (2.0, 5.0, 10.0, 20.0)
"""Waits between attempts after a registry broke off."""

_ENGINE_LIMIT_S = 600.0
_ROLE = "system"

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """An image that the registry has, by its own word."""

    reference: Reference
    digest: str
    """Of the manifest, computed here over what the registry sent."""
    size: int
    """Bytes in the registry: layers, compressed, and configuration."""
    layers: int
    sent: int
    """Layers that had to be transferred; the others were there."""
    attempts: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """An image that the engine has, under its local name."""

    reference: Reference
    name: str
    """The local name."""
    image_id: str
    digest: str
    platform: str
    size: int
    """Bytes in the registry: layers, compressed, and configuration."""
    layers: int
    received: int
    """Layers that had to be transferred; the others were here."""
    attempts: int
    seconds: float


def push(config: Config, *, registry: str | None = None, tag: str | None = None, user: str | None = None) -> Pushed:
    """Push the system image and verify that the registry has it.

    ``registry`` is HOST[:PORT]/NAMESPACE; what is not given comes from the configuration. The password comes from
    where ``registry.credentials`` looks. Raises ReferenceInvalid, ReferenceNotFound (no such image here),
    PlatformMismatch, RegistryRefused, RegistryUnreachable, RegistryUntrusted, RegistryFailed or EngineUnavailable.
    """
    began = time.monotonic()
    reference = resolve(config, registry=registry, tag=tag)
    name = config.image_reference(_ROLE)
    platform = config.image.target.oci_platform
    with _engine("pushed the image") as client:
        image = _inspect(client, name)
        if image is None:
            raise ReferenceNotFound(
                "there is no image to push",
                expected=f"the image {name} in the engine",
                found="none of that name",
                fix="./inv build-image",
            )
        _require_platform(image, name, platform)
        with _session(client, reference, actions="pull,push", user=_user(config, user)) as (remote, known):
            shown = transfer.Transfer(
                str(reference), lambda: _before_the_engine_waits(remote, reference), remote.advance
            )

            def attempt() -> RemoteImage:
                with _name_for_now(client, name, reference):
                    try:
                        _transfer(client, shown, reference, known)
                    except RegistryBroke:
                        _give_up_if_full(remote)
                        raise
                if not shown.digest:
                    raise transfer.broke(reference, "the engine ended without stating a digest")
                held = remote.image(platform)
                _compare(reference, shown.digest, held, image)
                return held

            held, attempts = with_retries(attempt, remote)
    return Pushed(
        reference=reference,
        digest=held.digest,
        size=held.size,
        layers=len(held.layers),
        sent=len(shown.moved),
        attempts=attempts,
        seconds=time.monotonic() - began,
    )


def pull(config: Config, *, registry: str | None = None, tag: str | None = None, user: str | None = None) -> Pulled:
    """Pull the system image, verify its digest and platform, and give it its local name.

    Options and errors as for ``push``; ReferenceNotFound when the registry does not have the tag. An image of
    another platform is refused before anything is transferred.
    """
    began = time.monotonic()
    reference = resolve(config, registry=registry, tag=tag)
    name = config.image_reference(_ROLE)
    platform = config.image.target.oci_platform
    with (
        _engine("pulled the image") as client,
        _session(client, reference, actions="pull", user=_user(config, user)) as (remote, known),
        _digests_for_now(client) as pulled,
    ):
        shown = transfer.Transfer(str(reference), advance=remote.advance)

        def attempt() -> tuple[RemoteImage, Mapping[str, Any]]:
            held = remote.image(platform)
            by_digest = f"{reference.name}@{held.digest}"
            pulled.add(by_digest)
            _transfer(client, shown, reference, known, pulled_as=by_digest, platform=platform)
            image = _inspect(client, by_digest)
            if image is None:
                raise transfer.broke(reference, f"the engine ended without having {by_digest}")
            _compare(reference, shown.digest or held.digest, held, image)
            _require_platform(image, by_digest, platform)
            return held, image

        (held, image), attempts = with_retries(attempt, remote)
        repository, _, local_tag = name.rpartition(":")
        client.api.tag(image["Id"], repository, local_tag)
        found = _inspect(client, name)
        if found is None or found["Id"] != image["Id"]:
            raise RegistryFailed(
                f"{reference} did not get its local name",
                expected=f"{name} is {image['Id']}",
                found=str(found and found["Id"]),
                fix="run the task again",
            )
    return Pulled(
        reference=reference,
        name=name,
        image_id=image["Id"],
        digest=held.digest,
        platform=platform,
        size=held.size,
        layers=len(held.layers),
        received=len(shown.moved),
        attempts=attempts,
        seconds=time.monotonic() - began,
    )


def _user(config: Config, user: str | None) -> str:
    return config.registry.user if user is None else user


@contextlib.contextmanager
def _engine(doing: str) -> Iterator[docker.DockerClient]:
    stored.require_readable()
    client = connect(timeout_s=_ENGINE_LIMIT_S)
    try:
        yield client
    except (requests.ConnectionError, urllib3.exceptions.HTTPError) as fault:
        raise engine_lost(doing, fault) from fault
    finally:
        client.close()


@contextlib.contextmanager
def _session(
    client: docker.DockerClient, reference: Reference, *, actions: str, user: str
) -> Iterator[tuple[Distribution, Credentials | None]]:
    """The registry, spoken to once, and what we are known by there (None where nobody needs to be)."""
    insecure = is_insecure(reference.host, client.api.info())
    with Distribution(reference, insecure=insecure, actions=actions) as remote:
        yield remote, log_in(remote, actions=actions, user=user)


def log_in(remote: Distribution, *, actions: str, user: str) -> Credentials | None:
    """Log in where the registry wants that, and return what we are known by; None where it does not.

    A fault of the registry's, a cut or a slow answer is tried again, as in transfers; nobody at the address is not.
    """
    wanted, _ = with_retries(remote.ping, remote, at_first=True)
    known = stored.find(remote.reference, user=user) if wanted else None
    if wanted and known is None:
        anonymous, _ = with_retries(lambda: _anonymous(remote, actions), remote, at_first=True)
        known = None if anonymous else stored.ask(remote.reference, user=user)
    with_retries(lambda: remote.login(known), remote, at_first=True)
    return known


def _anonymous(remote: Distribution, actions: str) -> bool:
    """Whether strangers are let in; pushing, they never are."""
    if actions != "pull":
        return False
    with contextlib.suppress(RegistryRefused):
        remote.login(None)
        return True
    return False


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
            fix="./inv build-image, or set image.architecture in invoke.yaml",
        )


@contextlib.contextmanager
def _name_for_now(client: docker.DockerClient, name: str, reference: Reference) -> Iterator[None]:
    """The engine pushes an image by its name in the registry: given for the time of the push, unless it has it."""
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
def _digests_for_now(client: docker.DockerClient) -> Iterator[set[str]]:
    """The engine names what it pulls by its digest: such names go at the end, however it comes, unless it had them.

    An image without another name goes with its own.
    """
    # In one request: client.images.list() asks for each image, and fails where one goes meanwhile.
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
    known: Credentials | None,
    *,
    pulled_as: str = "",
    platform: str = "",
) -> None:
    """Have the engine push, or pull under a name, and turn what it reports into errors of ours."""
    auth = known.for_engine(reference.host) if known else {}
    if pulled_as:
        path, params = "/images/create", {"fromImage": pulled_as, "platform": platform}
    else:
        path, params = f"/images/{reference.name}/push", {"tag": reference.tag}
    try:
        with transfer.events(client, path, params, auth) as stream:
            shown.follow(stream)
    except transfer.EngineReported as fault:
        raise transfer.explain(str(fault), reference, known) from None
    except transfer.Stalled as fault:
        if str(fault):
            raise transfer.broke(reference, str(fault)) from None
        raise stalled(reference.host) from None
    except requests.RequestException as fault:
        if not isinstance(fault, requests.Timeout) and "timed out" not in str(fault):
            raise
        raise stalled(reference.host, "not a word from the engine") from None


def _give_up_if_full(remote: Distribution) -> None:
    """Raise RegistryFull instead of waiting; any other trouble is what the retries are for."""
    try:
        remote.require_room()
    except RegistryFull:
        raise
    except UserError:
        return


def _before_the_engine_waits(remote: Distribution, reference: Reference) -> None:
    _give_up_if_full(remote)
    progress.warn(f"{reference.host} broke off; the engine tries that layer again")


def _compare(reference: Reference, stated: str, held: RemoteImage, image: Mapping[str, Any]) -> None:
    """The digest that the engine states, and the image's id, against what the registry holds.

    An image's id is the digest of its configuration; in the containerd image store, of its manifest.
    """
    if stated != held.digest:
        raise RegistryFailed(
            f"the registry does not hold the {reference} that was transferred",
            expected=f"{stated}, stated by the engine",
            found=f"{held.digest}, computed over what the registry sent",
            fix="somebody else may have pushed that tag meanwhile: run the task again",
        )
    if image["Id"] not in (held.config.digest, held.digest):
        raise RegistryFailed(
            f"{reference} in the registry is not the image that the engine has",
            expected=f"the image {image['Id']}",
            found=held.config.digest,
            fix="run the task again",
        )


def with_retries(attempt: Callable[[], Result], remote: Distribution, *, at_first: bool = False) -> tuple[Result, int]:
    """Run ``attempt`` until it succeeds or fails for good; returns its result and the number of attempts.

    It is not tried again when nothing has moved for ``PATIENCE_S`` seconds; nor, ``at_first``, where there is no such
    host, or no registry at it.
    """
    delays = iter(RETRY_DELAYS_S)
    number = 0
    remote.advance.begin()
    while True:
        number += 1
        try:
            if number > 1 and not at_first:
                remote.ping()
            return attempt(), number
        except (RegistryBroke, RegistryUnreachable) as failure:
            delay_s = next(delays, None)
            if delay_s is None or remote.advance.standing_s + delay_s > PATIENCE_S:
                raise
            if at_first and isinstance(failure, (RegistryHostUnknown, RegistryConnectionRefused)):
                raise
            progress.warn(f"{failure.summary} ({failure.found}); attempt {number + 1} in {delay_s:.0f} s")
        time.sleep(delay_s)
