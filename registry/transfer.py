"""What an engine tells while it pushes or pulls: a bar per layer, and its faults by their true names.

The engine answers success at once and reports everything else inside the stream: a fault is an event with ``error``
(or ``errorDetail``), after which the stream simply ends. Pushing, ``total`` counts uncompressed bytes, and
``current`` may pass it; pulling, compressed ones. The words differ between engine generations (20.10 to 28), so
faults are told apart by the parts of a message that all of them share; the order of the table matters.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import docker
import docker.auth
import requests

from registry.credentials import Credentials
from registry.distribution import (
    PATIENCE_S,
    STALL_S,
    Advance,
    closed,
    denied,
    refused,
    unknown_host,
    unreachable,
    untrusted,
)
from registry.reference import Reference
from toolchain import progress
from toolchain.errors import (
    DiskFull,
    PlatformMismatch,
    ReferenceInvalid,
    ReferenceNotFound,
    RegistryBroke,
    RegistryFailed,
    RegistryFull,
    UserError,
)
from toolchain.text import one_line

_LONGEST = 300
_MOVING = ("Pushing", "Downloading")
_HERE_ALREADY = ("Layer already exists", "Mounted from", "Already exists")
_DONE = (*_HERE_ALREADY, "Pushed", "Download complete", "Pull complete")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_URLS = re.compile(r"""https?://[^\s"']*""", re.IGNORECASE)
_ADDRESSES = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?|\[[0-9a-f:.]+\](?::\d+)?"
    r"|\bsha256:[0-9a-f]+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{12,}\b",
    re.IGNORECASE,
)


class EngineReported(Exception):
    """A fault that the engine reported in its stream; ``explain`` finds the error that fits."""


class Stalled(Exception):
    """The engine reports no progress; the text says what it reports instead, if anything."""


class _Layer:
    def __init__(self) -> None:
        self.current = 0.0
        self.total = 0.0
        self.status = ""

    def take(self, event: Mapping[str, Any]) -> None:
        self.status = str(event.get("status", ""))
        detail = event.get("progressDetail") or {}
        if self.status in _MOVING:
            self.current = float(detail.get("current") or 0)
            self.total = max(float(detail.get("total") or 0), self.total)
        elif self.waiting:
            self.current = 0.0
        elif self.done:
            self.total = max(self.total, self.current)
            self.current = self.total

    @property
    def moving(self) -> bool:
        return self.status in _MOVING

    @property
    def waiting(self) -> bool:
        return self.status.startswith("Retrying")

    @property
    def done(self) -> bool:
        return self.status.startswith(_DONE)


@contextlib.contextmanager
def events(
    client: docker.DockerClient, path: str, params: Mapping[str, str], auth: Mapping[str, str]
) -> Iterator[Iterator[Mapping[str, Any]]]:
    """Have the engine push or pull; the stream of its events, hung up on at the end of the block.

    Hanging up is what makes the engine stop, and docker-py's own generators cannot. ``auth`` is sent as it is, even
    empty: docker-py would look for credentials by itself. Raises EngineReported when the engine refuses at once.
    """
    api = client.api
    answer = api.post(
        f"{api.base_url}/v{api.api_version}{path}",
        params=params,
        headers={"X-Registry-Auth": docker.auth.encode_header(dict(auth)).decode()},
        stream=True,
        timeout=STALL_S,
    )
    with contextlib.closing(answer):
        if answer.status_code >= 400:
            raise EngineReported(_message_of(answer))
        yield (json.loads(line) for line in answer.iter_lines() if line.strip())


def _message_of(answer: requests.Response) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return str(answer.json().get("message", ""))
    return answer.text


class Transfer:
    """One image on its way, over as many attempts as it takes.

    ``moved`` are the layers that were transferred, by the engine's short names; the others were there already.
    ``digest`` is the manifest's, as the engine states it; empty until it does.
    """

    def __init__(self, title: str, on_retry: Callable[[], None] = lambda: None, advance: Advance | None = None) -> None:
        """``on_retry`` is called when the engine begins to wait before it tries a layer again; it may raise."""
        self._title = title
        self._advance = advance or Advance()
        self._on_retry = on_retry
        self.moved: set[str] = set()
        self._done: set[str] = set()
        self.digest = ""

    def follow(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Show an attempt's progress until its stream ends.

        On a terminal each layer has a bar of its own below the bar of the whole; in a log there is the whole's line
        alone. Raises EngineReported at an in-band error, Stalled where no layer gets any further.
        """
        layers: dict[str, _Layer] = {}
        bars: dict[str, progress.Bar] = {}
        self.digest = ""
        with contextlib.ExitStack() as stack:
            whole = stack.enter_context(progress.bar(self._title, in_bytes=True))
            for event in events:
                if fault := event.get("error") or (event.get("errorDetail") or {}).get("message"):
                    raise EngineReported(str(fault))
                status, name = str(event.get("status", "")), str(event.get("id", ""))
                self.digest = _digest_in(event, status) or self.digest
                if not name or status.startswith("Pulling from"):
                    continue
                if name not in layers:
                    layers[name] = _Layer()
                    if progress.console.is_terminal:
                        bars[name] = stack.enter_context(progress.bar(f"  {name}", in_bytes=True))
                layer = layers[name]
                waited = layer.waiting
                layer.take(event)
                self._watch(name, layer, event)
                if layer.waiting and not waited:
                    self._on_retry()
                if layer.done and not status.startswith(_HERE_ALREADY):
                    self.moved.add(name)
                if name in bars:
                    bars[name].update(min(layer.current, layer.total), total=layer.total or None, note=status)
                finished = sum(1 for item in layers.values() if item.done)
                whole.update(
                    sum(min(item.current, item.total) for item in layers.values()),
                    total=sum(item.total for item in layers.values()) or None,
                    note=status if layer.waiting else f"{finished} of {len(layers)} layers",
                )

    def _watch(self, name: str, layer: _Layer, event: Mapping[str, Any]) -> None:
        """Note how far a layer is; raise Stalled where one goes on without getting any further than ever before."""
        detail = event.get("progressDetail") or {}
        if layer.done and name not in self._done:
            self._done.add(name)
            self._advance.begin()
        elif layer.moving:
            self._advance.saw(name, layer.current)
        elif not layer.waiting:  # extracted, say
            self._advance.saw(f"{name} {layer.status}", float(detail.get("current") or 0))
        if layer.waiting and self._advance.standing_s > PATIENCE_S:
            raise Stalled("the registry breaks off again and again")
        if layer.moving and self._advance.standing_s > STALL_S:
            raise Stalled


def _digest_in(event: Mapping[str, Any], status: str) -> str:
    """Push: ``aux.Digest``, or "TAG: digest: sha256:… size: N"; pull: "Digest: sha256:…"."""
    stated = str((event.get("aux") or {}).get("Digest", ""))
    if not stated and "igest: " in status:
        stated = status
    match = _DIGEST.search(stated)
    return match[0] if match else ""


def explain(message: str, reference: Reference, credentials: Credentials | None) -> UserError:
    """The error that fits what an engine reported about a registry."""
    found = _shortened(message)
    text = _without_names(message, reference).lower()

    def says(*parts: str) -> bool:
        return any(part in text for part in parts)

    if says("invalid reference format", "must be lowercase", "invalid repository name"):
        return ReferenceInvalid(
            f"the engine does not take {reference} for a name",
            expected="HOST[:PORT]/NAMESPACE in lower case",
            found=found,
            fix="check --registry and --tag",
        )
    if says("does not exist locally", "no such image", "tag does not exist"):
        return ReferenceNotFound(
            "the engine does not have the image",
            expected=str(reference),
            found=found,
            fix="./inv build-image",
        )
    if says("no matching manifest", "does not provide the specified platform", "does not match the specified platform"):
        return PlatformMismatch(
            f"{reference} has no image for this platform", found=found, fix="give another --tag, or push it first"
        )
    if says("no space left on device") and says("write /", "mkdir /", "failed to register layer", "/var/lib/docker"):
        return DiskFull(
            "the engine's disk is full",
            expected="room for the image's layers",
            found=found,
            fix="docker system prune, or free some space in the engine's data folder (docker info names it)",
        )
    if says("no space left", "insufficient storage", "disk full", "quota", "upper limit", "exceeds the limit"):
        return full(reference, found)
    if says("unauthorized", "no basic auth credentials", "authentication required"):
        return refused(reference, credentials, found)
    if says("403 forbidden"):
        return denied(reference, credentials, found)
    if says("denied"):  # some registries say so to whoever is not logged in
        return (denied if credentials else refused)(reference, credentials, found)
    if re.search(r"\b401\b", text):
        return refused(reference, credentials, found)
    if says("manifest unknown", "name unknown", "manifest for", "repository name not known", "not found: "):
        return ReferenceNotFound(
            f"{reference} is not in the registry",
            expected=f"the tag {reference.tag}",
            found=found,
            fix="./inv push it first, or give another --registry or --tag",
        )
    if says("http response to https client"):
        return untrusted(reference.host, "it speaks plain HTTP", plain=True)
    if says("x509", "certificate", "tls: ") and not says("handshake timeout"):
        return untrusted(reference.host, found)
    if says("no such host", "name resolution", "server misbehaving"):
        return unknown_host(reference.host)
    if says("connection refused") and not says("lookup "):  # else the name server's
        return closed(reference.host, found)
    if says("connection refused", "no route to host", "network is unreachable", "i/o timeout", "handshake timeout"):
        return unreachable(reference.host, found)
    if says("deadline exceeded", "client.timeout", "timeout awaiting"):
        return unreachable(reference.host, found)
    if says("eof", "connection reset", "broken pipe", "closed network connection", "http status: 5", "status: 429"):
        return broke(reference, found)
    if says("unknown error", "blob upload", "digest did not match", "toomanyrequests", "unavailable", "500 internal"):
        return broke(reference, found)
    if says("blob unknown"):
        # Seen when two push one image at once: the manifest came before the registry had linked the other's layer.
        return broke(reference, found)
    return RegistryFailed(
        f"{reference} could not be transferred",
        expected="an end without a fault",
        found=found,
        fix="look at the registry's log and at the engine's",
    )


def _without_names(message: str, reference: Reference) -> str:
    """A message in one line without addresses, digests and the image's own name.

    Their letters and digits say nothing of the fault: a port may have 401 in it, a digest too, a repository "denied".
    """
    text = _URLS.sub(" ", " ".join(message.split()))
    for name in (str(reference), reference.name, reference.api_host, reference.host, reference.repository):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", " ", text, flags=re.IGNORECASE)
    return _ADDRESSES.sub(" ", text)


def _shortened(message: str) -> str:
    """In one line, without the state in upload addresses; the cause stands at the end, so the middle goes."""
    line = re.sub(r"[?&]_state=[^\s\":&]+", "", one_line(message))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


def full(reference: Reference, found: str) -> RegistryFull:
    """The registry has no room left."""
    return RegistryFull(
        f"{reference.host} has no room left",
        expected="room for the image's layers",
        found=found,
        fix="delete old images there and collect its garbage, or have the quota of the namespace raised",
    )


def broke(reference: Reference, found: str) -> RegistryBroke:
    """The registry went away or answered nonsense in mid-transfer."""
    return RegistryBroke(
        f"{reference.host} broke off",
        expected="a registry that stays to the end",
        found=found,
        fix="look at that registry's log, then run the task again: what arrived is not sent twice",
    )
