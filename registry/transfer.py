"""Follow the engine's event stream during a push or pull to show progress per layer and to detect errors.

The engine immediately responds with success and reports errors in the stream. An event with ``error`` (or
``errorDetail``) reports an error and ends the stream. In an event, ``total`` counts uncompressed bytes during a push,
and compressed bytes during a pull. During a push, ``current`` may exceed ``total``. Messages differ between engine
versions (20.10 to 28), so errors are recognised by the parts of a message that all versions share. The order of the
checks matters.
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
from registry.faults import (
    connection_lost,
    connection_refused,
    denied,
    full,
    plain_http,
    refused,
    unknown_host,
    unreachable,
    untrusted,
)
from registry.reference import Reference
from registry.retries import PATIENCE_S, STALL_S, Activity
from toolchain import progress
from toolchain.errors import DiskFull, PlatformMismatch, ReferenceNotFound, RegistryFailed, UserError
from toolchain.text import one_line

_LONGEST = 300
_MOVING = ("Pushing", "Downloading")
_EXISTS = ("Layer already exists", "Mounted from", "Already exists")
_DONE = (*_EXISTS, "Pushed", "Download complete", "Pull complete")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_URLS = re.compile(r"""https?://[^\s"']*""", re.IGNORECASE)
_ADDRESSES = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?|\[[0-9a-f:.]+\](?::\d+)?"
    r"|\bsha256:[0-9a-f]+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{12,}\b",
    re.IGNORECASE,
)


class EngineReported(Exception):
    """An error that the engine reported in its stream; ``explain`` converts it to a UserError."""


class Stalled(Exception):
    """The engine reports no progress. The exception's text is the reason, if it is known."""


class _Layer:
    def __init__(self) -> None:
        self.current = 0.0
        self.total = 0.0
        self.status = ""

    def update(self, event: Mapping[str, Any]) -> None:
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
    """Make the engine push or pull; yield its event stream, which is closed at the end of the block.

    Closing the connection stops the engine's transfer. docker-py's own methods are not used, because their generators
    cannot close the connection. ``auth`` is sent even if it is empty, because docker-py would otherwise look for
    credentials itself. Raises EngineReported if the engine immediately rejects the request.
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
    """The transfer of one image, over all attempts."""

    def __init__(
        self, title: str, on_retry: Callable[[], None] = lambda: None, activity: Activity | None = None
    ) -> None:
        """Set ``on_retry``, which is called when the engine retries. It may raise an error to stop the retries."""
        self._title = title
        self._activity = activity or Activity()
        self._on_retry = on_retry
        self._done: set[str] = set()
        self.moved: set[str] = set()
        """The engine's short names of the transferred layers; the other layers already existed."""
        self.digest = ""
        """The manifest's digest; empty until the engine has reported it."""

    def follow(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Show the progress of an attempt until its stream ends.

        A terminal shows a bar for the image and one for each layer; a log shows only lines for the image. Raises
        EngineReported for an error in the stream, or Stalled if no layer makes progress.
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
                layer.update(event)
                self._watch(name, layer, event)
                if layer.waiting and not waited:
                    self._on_retry()
                if layer.done and not status.startswith(_EXISTS):
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
        """Record a layer's progress; raise Stalled if there has been no progress for too long."""
        detail = event.get("progressDetail") or {}
        if layer.done and name not in self._done:
            self._done.add(name)
            self._activity.begin()
        elif layer.moving:
            self._activity.note(name, layer.current)
        elif not layer.waiting:  # for example, extracted
            self._activity.note(f"{name} {layer.status}", float(detail.get("current") or 0))
        if layer.waiting and self._activity.idle_s > PATIENCE_S:
            raise Stalled("the connection was lost repeatedly")
        if layer.moving and self._activity.idle_s > STALL_S:
            raise Stalled


def _digest_in(event: Mapping[str, Any], status: str) -> str:
    """Return an event's digest, or an empty string if it contains none.

    A push reports the digest in ``aux.Digest`` or as "TAG: digest: sha256:… size: N", and a pull as "Digest: sha256:…".
    """
    stated = str((event.get("aux") or {}).get("Digest", ""))
    if not stated and "igest: " in status:
        stated = status
    match = _DIGEST.search(stated)
    return match[0] if match else ""


def explain(message: str, reference: Reference, credentials: Credentials | None) -> UserError:
    """Return the error for an engine's message about a registry."""
    found = _shortened(message)
    text = _without_names(message, reference).lower()

    def has(*parts: str) -> bool:
        return any(part in text for part in parts)

    if has("invalid reference format", "must be lowercase", "invalid repository name"):
        return UserError(
            f"the engine rejects the name {reference}",
            expected="HOST[:PORT]/NAMESPACE in lower case",
            found=found,
            fix="check --registry and --tag",
        )
    if has("does not exist locally", "no such image", "tag does not exist"):
        return ReferenceNotFound(
            "the engine does not have the image",
            expected=str(reference),
            found=found,
            fix="run ./inv build-image",
        )
    if has("no matching manifest", "does not provide the specified platform", "does not match the specified platform"):
        return PlatformMismatch(
            f"{reference} has no image for this platform",
            found=found,
            fix="pass another --tag, or push an image for this platform first",
        )
    if has("no space left on device") and has("write /", "mkdir /", "failed to register layer", "/var/lib/docker"):
        return engine_full(found)
    if has("no space left", "insufficient storage", "disk full", "quota", "upper limit", "exceeds the limit"):
        return full(reference, found)
    if has("unauthorized", "no basic auth credentials", "authentication required"):
        return refused(reference, credentials, found)
    if has("403 forbidden"):
        return denied(reference, credentials, found)
    if has("denied"):  # some registries send this without a login
        return (denied if credentials else refused)(reference, credentials, found)
    if re.search(r"\b401\b", text):
        return refused(reference, credentials, found)
    if has("manifest unknown", "name unknown", "manifest for", "repository name not known", "not found: "):
        return ReferenceNotFound(
            f"{reference} is not in the registry",
            expected=f"the tag {reference.tag}",
            found=found,
            fix="run ./inv push first, or pass another --registry or --tag",
        )
    if has("http response to https client"):
        return plain_http(reference.host)
    if has("x509", "certificate", "tls: ") and not has("handshake timeout"):
        return untrusted(reference.host, found)
    if has("no such host", "name resolution", "server misbehaving"):
        return unknown_host(reference.host)
    if has("connection refused") and not has("lookup "):  # otherwise the name server rejected the query
        return connection_refused(reference.host, found)
    if has("connection refused", "no route to host", "network is unreachable", "i/o timeout", "handshake timeout"):
        return unreachable(reference.host, found)
    if has("deadline exceeded", "client.timeout", "timeout awaiting"):
        return unreachable(reference.host, found)
    if has("eof", "connection reset", "broken pipe", "closed network connection", "http status: 5", "status: 429"):
        return connection_lost(reference.host, found)
    if has("unknown error", "blob upload", "digest did not match", "toomanyrequests", "unavailable", "500 internal"):
        return connection_lost(reference.host, found)
    if has("blob unknown"):
        # This occurs during two simultaneous pushes of the same image, if the manifest arrives before the registry has
        # linked the other push's layer.
        return connection_lost(reference.host, found)
    return RegistryFailed(
        f"{reference} could not be transferred",
        expected="a transfer without errors",
        found=found,
        fix="check the logs of the registry and the engine",
    )


def engine_full(found: str) -> DiskFull:
    """Return the error for an engine whose disk is full."""
    return DiskFull(
        "the engine's disk is full",
        expected="space for the image's layers",
        found=found,
        fix="run docker system prune, or free some space in the engine's data folder (docker info prints its path)",
    )


def _without_names(message: str, reference: Reference) -> str:
    """Return a message on one line, without addresses, digests or the image's name.

    An address, a digest or a name could be mistaken for an error; for example, a digest may contain 401, and a
    repository may be named "denied".
    """
    text = _URLS.sub(" ", " ".join(message.split()))
    for name in (str(reference), reference.name, reference.api_host, reference.host, reference.repository):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", " ", text, flags=re.IGNORECASE)
    return _ADDRESSES.sub(" ", text)


def _shortened(message: str) -> str:
    """Return a message on one line, without the ``_state`` parameters of upload URLs.

    A long message is shortened in the middle, because the cause is at the end.
    """
    line = re.sub(r"[?&]_state=[^\s\":&]+", "", one_line(message))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
