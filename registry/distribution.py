"""A registry, asked directly: the part of the distribution API (``/v2/``) that proves what it holds.

The engine says that it pushed; only the registry can say what it has. Every digest is computed here over the bytes
that came, never taken from a header. Authentication follows the distribution project's token specification: a 401
carries a challenge, ``Basic`` (RFC 7617) or ``Bearer`` with the realm, service and scope for which a token is
fetched from the realm: by GET with user and password, or by an OAuth 2 POST with an identity token.

Trust is the engine's, so that both judge alike: the system's certificates plus ``/etc/docker/certs.d/HOST:PORT``;
a host that the engine counts as insecure (its loopback always) may also have any certificate, or speak plain HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import re
import socket
import ssl
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
import requests.adapters
import requests.utils
import urllib3.exceptions

from engine.proxies import SOCKS_FIX, SOCKS_MISSING
from registry.credentials import Credentials
from registry.reference import Reference
from toolchain.errors import (
    PlatformMismatch,
    ReferenceNotFound,
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryFailed,
    RegistryFull,
    RegistryHostUnknown,
    RegistryRefused,
    RegistryStalled,
    RegistryUnreachable,
    RegistryUntrusted,
    UserError,
)
from toolchain.text import one_line

CERTIFICATES = Path("/etc/docker/certs.d")
"""The engine's folder of certificates by registry (Docker: "Verify repository client with certificates")."""

_CONNECT_S = 10.0
_READ_S = 60.0
_FIRST_READ_S = 15.0
"""For the small requests before anything is transferred."""
STALL_S = 90.0
"""A transfer that has not got any further for so long is given up."""
PATIENCE_S = 50.0
"""A registry that breaks off is tried again as long as transfers got further within so many seconds."""
_STEP = 1 << 16

_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class Body(Protocol):
    """What a request carries: its length in bytes is told before it is read."""

    def __len__(self) -> int:
        """Bytes of the whole."""

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most ``size`` of them."""


class Advance:
    """When transfers to or from a registry last got further than ever before."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.at = time.monotonic()

    def saw(self, name: str, amount: float) -> None:
        """``amount`` bytes of a part have been moved in this try. What was moved before in vain does not count."""
        if amount >= self._best.get(name, 0) + _STEP:
            self._best[name] = amount
            self.begin()

    @property
    def standing_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.at


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A layer or an image's configuration. ``size`` is in bytes, as stored (compressed)."""

    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """What a registry holds under a tag, for one platform."""

    digest: str
    """Of the document behind the tag: what ``docker pull NAME@DIGEST`` takes."""
    platform: str
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def size(self) -> int:
        """Bytes in the registry: the layers, compressed, and the configuration."""
        return self.config.size + sum(layer.size for layer in self.layers)


class Distribution:
    """A connection to one registry, for one image."""

    def __init__(self, reference: Reference, *, insecure: bool, actions: str) -> None:
        """``actions`` is the scope asked for, ``pull`` or ``pull,push``; ``insecure`` as the engine sees the host."""
        self.reference = reference
        self.advance = Advance()
        self._scope = f"repository:{reference.repository}:{actions}"
        self._insecure = insecure
        self._credentials: Credentials | None = None
        self._authorization = ""
        self._base = f"https://{reference.api_host}"
        self._session = requests.Session()
        # No ~/.netrc: credentials come from registry.credentials alone.
        self._session.trust_env = False
        self._session.mount("https://", _TrustAdapter(_trust(reference.api_host, insecure=insecure)))
        if not _is_loopback(reference.api_host):
            self._session.proxies.update(requests.utils.get_environ_proxies(self._base))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._session.close()

    def ping(self) -> bool:
        """Find out how the registry is spoken to; returns whether it wants to know who we are.

        Raises RegistryUnreachable, RegistryUntrusted or RegistryFailed.
        """
        answer = self._first_answer()
        if answer.status_code == 403:
            raise self._refused(answer)
        if answer.status_code not in (200, 401):
            raise self._unexpected(answer, "GET /v2/")
        return answer.status_code == 401

    def _first_answer(self) -> requests.Response:
        """The answer to GET /v2/, by HTTPS or, where the engine would do that too, by plain HTTP."""
        try:
            return self._send("GET", f"{self._base}/v2/", read_s=_FIRST_READ_S)
        except (RegistryUntrusted, RegistryUnreachable, RegistryBroke) as fault:
            if not self._insecure or self._base.startswith("http:"):
                raise
            by_tls = fault
        # Out of that block: a fault that is met now is none that comes from the other (see _causes).
        secure, self._base = self._base, f"http://{self.reference.api_host}"
        try:
            return self._send("GET", f"{self._base}/v2/", read_s=_FIRST_READ_S)
        except UserError as fault:
            self._base = secure
            if fault.found != by_tls.found:
                fault.found = f"by HTTP: {fault.found}; by HTTPS: {by_tls.found}"
            raise

    def login(self, credentials: Credentials | None) -> None:
        """Prove who we are, or that nobody needs to be known. Raises RegistryRefused."""
        self._credentials = credentials
        self._authorization = ""
        answer = self._request("GET", "/v2/")
        if answer.status_code != 200:
            raise self._unexpected(answer, "GET /v2/")

    def image(self, platform: str) -> RemoteImage:
        """Read the manifest and the configuration behind the tag, and check that every blob is there in full.

        Raises ReferenceNotFound, PlatformMismatch (the image is for another platform) or RegistryFailed.
        """
        body, digest = self._manifest(self.reference.tag)
        if body.get("mediaType") in _INDEX_TYPES or "manifests" in body:
            body, _ = self._manifest(_choose(body, platform, self.reference))
        try:
            config, *layers = (
                Blob(digest=str(item["digest"]), size=int(item["size"])) for item in (body["config"], *body["layers"])
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise RegistryFailed(
                f"{self.reference} is not an image that can be used here",
                expected="a manifest with a configuration and layers (schema 2 or OCI)",
                found=one_line(str(body.get("mediaType") or f"schema {body.get('schemaVersion')}")),
                fix="push it anew",
            ) from fault
        for blob in (config, *layers):
            self._check_blob(blob)
        settings = self._configuration(config)
        parts = [str(settings.get(name, "")) for name in ("os", "architecture", "variant")]
        found = one_line("/".join(part for part in parts if part))
        if found != platform:
            raise PlatformMismatch(
                f"{self.reference} is for another platform",
                expected=platform,
                found=found or "none stated",
                fix="give another --tag, or push the right image there",
            )
        return RemoteImage(digest=digest, platform=found, config=config, layers=tuple(layers))

    def require_room(self) -> None:
        """Open an upload and cancel it. Raises RegistryFull when the registry says that its storage is full.

        An engine reports a full registry as a plain fault 500, and only after its own retries (50 s).
        """
        answer = self._request("POST", f"/v2/{self.reference.repository}/blobs/uploads/")
        if answer.status_code == 202:
            with contextlib.suppress(UserError):
                target = split(answer.headers.get("Location", ""), self._base)
                if target.netloc == urlsplit(self._base).netloc:
                    self._send("DELETE", target.geturl())
            return
        if answer.status_code == 507 or _tells_of_no_room(answer.text, self.reference.repository):
            raise RegistryFull(
                f"{self.reference.host} has no room left",
                expected="room for the image's layers",
                found=f"its answer to a new upload: HTTP {answer.status_code}, storage full",
                fix="free some space where it stores images (delete old tags, then collect its garbage)",
            )

    def tags(self) -> list[str]:
        """The repository's tags (the first page of them); empty when it has none."""
        answer = self._request("GET", f"/v2/{self.reference.repository}/tags/list")
        if answer.status_code != 200:
            return []
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            return sorted(one_line(str(tag)) for tag in answer.json().get("tags") or [])
        return []

    def _manifest(self, name: str) -> tuple[dict[str, Any], str]:
        accept = ", ".join((*_MANIFEST_TYPES, *_INDEX_TYPES))
        path = f"/v2/{self.reference.repository}/manifests/{name}"
        answer = self._request("GET", path, headers={"Accept": accept})
        if answer.status_code == 404:
            raise self._not_found()
        if answer.status_code != 200:
            raise self._unexpected(answer, f"GET {path}")
        digest = "sha256:" + hashlib.sha256(answer.content).hexdigest()
        stated = name if name.startswith("sha256:") else answer.headers.get("Docker-Content-Digest", digest)
        if digest != stated:
            raise RegistryFailed(
                f"the manifest of {self.reference} is damaged",
                expected=f"{stated}, as the registry states",
                found=f"{digest}, computed over what it sent",
                fix="push the image anew; if it stays so, the registry's storage or a proxy before it is at fault",
            )
        try:
            body = json.loads(answer.content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise RegistryFailed(
                f"the manifest of {self.reference} cannot be read",
                expected="a JSON object",
                found=one_line(answer.text[:80]),
                fix="look at that registry's log",
            )
        return body, digest

    def _not_found(self) -> ReferenceNotFound:
        tags = self.tags()
        shown = ", ".join(tags[:8]) + (", …" if len(tags) > 8 else "")
        return ReferenceNotFound(
            f"{self.reference} is not in the registry",
            expected=f"the tag {self.reference.tag} in {self.reference.name}",
            found=f"the tags {shown}" if tags else "no such repository, or one without tags",
            fix="give one of these with --tag" if tags else "./inv push it first, or check --registry",
        )

    def _check_blob(self, blob: Blob) -> None:
        path = f"/v2/{self.reference.repository}/blobs/{blob.digest}"
        answer = self._request("HEAD", path)
        size = answer.headers.get("Content-Length", "")
        if answer.status_code != 200 or size not in ("", str(blob.size)):
            found = f"HTTP {answer.status_code}" if answer.status_code != 200 else f"{one_line(size)} bytes"
            raise RegistryBroke(
                f"a part of {self.reference} is missing in the registry",
                expected=f"{blob.size} bytes of {blob.digest}",
                found=found,
                fix="push the image anew",
            )

    def _configuration(self, blob: Blob) -> Mapping[str, Any]:
        path = f"/v2/{self.reference.repository}/blobs/{blob.digest}"
        answer = self._request("GET", path)
        if answer.status_code != 200:
            raise self._unexpected(answer, f"GET {path}")
        digest = "sha256:" + hashlib.sha256(answer.content).hexdigest()
        settings = None
        with contextlib.suppress(ValueError):
            settings = json.loads(answer.content)
        if digest != blob.digest or not isinstance(settings, dict):
            raise RegistryFailed(
                f"the configuration of {self.reference} is damaged",
                expected=blob.digest,
                found=f"{digest}, {len(answer.content)} bytes",
                fix="push the image anew",
            )
        return settings

    def _request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Body] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """A request to the registry; ``body`` makes what is sent, anew for every try. Raises RegistryRefused."""
        url = self._base + path
        answer = self._send(method, url, headers=headers, data=body() if body else None, stream=stream)
        if answer.status_code == 401:
            answer.close()
            self._authorization = self._answer_challenge(answer)
            answer = self._send(method, url, headers=headers, data=body() if body else None, stream=stream)
        if answer.status_code in (401, 403):
            raise self._refused(answer)
        return answer

    def _answer_challenge(self, answer: requests.Response) -> str:
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        if kind.lower() == "basic":
            if self._credentials is None or not self._credentials.user:
                raise self._refused(answer)
            return self._credentials.basic
        if kind.lower() == "bearer":
            return f"Bearer {self._token(_challenge(rest))}"
        raise RegistryFailed(
            f"{self.reference.host} asks for a proof that is not known here",
            expected="the challenge Basic or Bearer",
            found=one_line(kind) or "none",
            fix="check --registry",
        )

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm") or ""
        target = split(realm)
        if target.scheme not in ("http", "https") or (target.scheme == "http" and self._base.startswith("https:")):
            raise RegistryUntrusted(
                f"{self.reference.host} sends us to a token server that is not secure",
                expected="an https:// address",
                found=one_line(realm) or "none",
                fix="tell the registry's keeper",
            )
        asked = {"service": challenge.get("service") or "", "scope": challenge.get("scope") or self._scope}
        credentials = self._credentials
        if credentials is not None and credentials.identity_token:
            grant = {"grant_type": "refresh_token", "refresh_token": credentials.identity_token, "client_id": "pitorch"}
            answer = self._send("POST", realm, data={**asked, **grant}, known=False)
        else:
            headers = {"Authorization": credentials.basic} if credentials is not None else {}
            answer = self._send("GET", realm, params=asked, headers=headers, known=False)
        if answer.status_code in (400, 401, 403):
            raise self._refused(answer)
        if answer.status_code != 200:
            raise self._unexpected(answer, f"the token server {target.netloc}")
        token = None
        with contextlib.suppress(ValueError, AttributeError):
            token = answer.json().get("token") or answer.json().get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise RegistryFailed(
                f"the token server of {self.reference.host} sent no token",
                expected="a JSON object with a token",
                found=f"{len(answer.content)} bytes of something else",
                fix="tell the registry's keeper",
            )
        return token

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: Mapping[str, str] | Body | None = None,
        known: bool = True,
        stream: bool = False,
        read_s: float = 0.0,
    ) -> requests.Response:
        """One request; with ``known`` it carries what we are known by. No status is an error here."""
        proof = {"Authorization": self._authorization} if known and self._authorization else {}
        host = urlsplit(url).netloc
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
                return self._session.request(
                    method,
                    url,
                    headers={**proof, **(headers or {})},
                    params=params,
                    data=data,
                    stream=stream,
                    timeout=(_CONNECT_S, min(read_s or _READ_S, _READ_S)),
                    verify=not self._insecure,
                )
        except requests.RequestException as fault:
            raise explain(fault, host) from None

    def _refused(self, answer: requests.Response) -> RegistryRefused:
        found = " ".join(f"HTTP {answer.status_code} {_complaint(answer)}".split())
        return (denied if answer.status_code == 403 else refused)(self.reference, self._credentials, found)

    def _unexpected(self, answer: requests.Response, what: str) -> RegistryFailed:
        kind = RegistryBroke if answer.status_code >= 500 or answer.status_code == 429 else RegistryFailed
        return kind(
            f"{self.reference.host} gave an answer that a registry should not give",
            expected=f"success of {what}",
            found=" ".join(f"HTTP {answer.status_code} {_complaint(answer)}".split()),
            fix="check that --registry names a registry, then look at its log",
        )


def refused(reference: Reference, credentials: Credentials | None, found: str) -> RegistryRefused:
    """The error for a registry that does not let us in."""
    if credentials is None:
        return RegistryRefused(
            f"{reference.host} wants to know who you are",
            expected="a user name and a password",
            found=f"none given ({found})",
            fix=f"docker login {reference.host}, or set PITORCH_REGISTRY_PASSWORD and give --user NAME",
        )
    who = f"{credentials.user or 'an identity token'}, from {credentials.source}"
    return RegistryRefused(
        f"{reference.host} does not let you at {reference.repository}",
        expected="a user that may do that, and the right password",
        found=f"{found} (as {who})",
        fix=f"check the password and the rights of that user; docker login {reference.host} replaces what is stored",
    )


def denied(reference: Reference, credentials: Credentials | None, found: str) -> RegistryRefused:
    """The error for a registry that knows who we are, or does not care, and forbids it."""
    who = f"{credentials.user or 'an identity token'}, from {credentials.source}" if credentials else "nobody"
    return RegistryRefused(
        f"access denied: {reference.host} does not allow that at {reference.repository}",
        expected="the right to read or write there",
        found=f"{found} (as {who})",
        fix="check the namespace (--registry), or ask whoever runs the registry for that right",
    )


def stalled(host: str, found: str = "") -> RegistryStalled:
    """Nothing moves."""
    return RegistryStalled(
        f"the transfer with {host} stalled",
        expected=f"progress within {STALL_S:.0f} s",
        found=found or "none",
        fix="check the network and that registry's log, then run the task again: what arrived is not sent twice",
    )


def explain(fault: BaseException, host: str) -> RegistryUnreachable | RegistryUntrusted | RegistryFailed:
    """The error that fits a failed request, found by the innermost cause rather than by its text alone."""
    chain = list(_causes(fault))
    texts = " | ".join(str(item) for item in chain)
    found = _innermost_words(chain)
    if any(isinstance(item, ssl.SSLCertVerificationError) for item in chain) or "CERTIFICATE_VERIFY" in texts:
        return untrusted(host, found)
    # By its own words: those around it name the address that was asked for, which may have any letters in it.
    of_tls = [str(item) for item in chain if isinstance(item, ssl.SSLError) and not isinstance(item, TimeoutError)]
    if of_tls:
        if re.search(r"WRONG_VERSION_NUMBER|RECORD_LAYER|UNKNOWN_PROTOCOL|HTTP_REQUEST|PACKET_LENGTH", str(of_tls)):
            return untrusted(host, "it speaks plain HTTP", plain=True)
        if "EOF" not in str(of_tls):
            return untrusted(host, found)
    if any(isinstance(item, (socket.gaierror, urllib3.exceptions.NameResolutionError)) for item in chain):
        return unknown_host(host)
    if any(isinstance(item, ConnectionRefusedError) for item in chain):
        return closed(host, found)
    if SOCKS_MISSING in texts:
        return RegistryUnreachable(
            f"{host} cannot be asked through a SOCKS proxy",
            expected="an HTTP proxy, or the package PySocks",
            found=SOCKS_MISSING,
            fix=f"{SOCKS_FIX}, or have {_bare(host)} in no_proxy",
        )
    kinds = (TimeoutError, urllib3.exceptions.ConnectTimeoutError)
    if any(isinstance(item, kinds) or "Errno 113" in str(item) or "Errno 101" in str(item) for item in chain):
        return unreachable(host, found)
    return RegistryBroke(
        f"{host} broke off",
        expected="an answer",
        found=found,
        fix="look at that registry's log, then run the task again",
    )


def unknown_host(host: str) -> RegistryHostUnknown:
    """The host's name does not resolve."""
    return RegistryHostUnknown(
        f"there is no host named {host.rpartition(':')[0] or host}",
        expected="a name that resolves",
        found="the name servers do not know it",
        fix="check --registry (or registry.address in invoke.yaml) for a typing error, then the name servers",
    )


def closed(host: str, found: str) -> RegistryConnectionRefused:
    """The host is there, the registry is not."""
    fix = f"check --registry and its port; is a registry running there (curl -i http://{host}/v2/)?"
    return RegistryConnectionRefused(
        f"no registry listens at {host}",
        expected="a registry",
        found=found,
        fix="./inv registry up starts one on this machine" if _is_loopback(host) else fix,
    )


def unreachable(host: str, found: str) -> RegistryUnreachable:
    """Nobody answers, or there is no way to the host."""
    return RegistryUnreachable(
        f"no registry answers at {host}",
        expected="a registry",
        found=found,
        fix=f"check --registry, the network and no_proxy; does it answer (curl -i http://{host}/v2/)?",
    )


def untrusted(host: str, found: str, *, plain: bool = False) -> RegistryUntrusted:
    """The registry cannot prove that it is the one named."""
    certificate = f"put the certificate of its authority into {CERTIFICATES}/{host}/ca.crt"
    listed = f'add "insecure-registries": ["{host}"] to /etc/docker/daemon.json and reload the engine'
    return RegistryUntrusted(
        f"{host} cannot be trusted",
        expected="TLS with a certificate that this machine trusts",
        found=found,
        fix=f"let it speak TLS, or {listed} (anyone on the way can then read and change)" if plain else certificate,
    )


def is_insecure(host: str, engine_info: Mapping[str, Any]) -> bool:
    """Whether the engine talks to a host without checking its certificate.

    ``engine_info`` is what ``docker info`` says: hosts by name, and networks, of which any address of the host must
    be a member (moby: registry/config.go).
    """
    settings = engine_info.get("RegistryConfig") or {}
    named = (settings.get("IndexConfigs") or {}).get(host)
    if isinstance(named, Mapping):
        return not named.get("Secure", True)
    networks = [ipaddress.ip_network(text, strict=False) for text in settings.get("InsecureRegistryCIDRs") or []]
    addresses = []
    with contextlib.suppress(OSError):
        addresses = [item[4][0] for item in socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM)]
    return any(ipaddress.ip_address(str(address)) in network for address in addresses for network in networks)


def _choose(index: Mapping[str, Any], platform: str, reference: Reference) -> str:
    """The digest that an index (a manifest list) has for a platform."""
    found: dict[str, str] = {}
    entries = index.get("manifests")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("platform"), dict):
            continue
        parts = [str(entry["platform"].get(name, "")) for name in ("os", "architecture", "variant")]
        found.setdefault("/".join(part for part in parts if part), str(entry.get("digest", "")))
    if platform not in found:
        raise PlatformMismatch(
            f"{reference} has no image for {platform}",
            expected=platform,
            found=one_line(", ".join(sorted(found))) or "an empty index",
            fix="give another --tag, or push the right image there",
        )
    return found[platform]


def _tells_of_no_room(said: str, repository: str) -> bool:
    """Whether a registry's answer says that its storage is full, whatever the repository and its folder are called."""
    said = re.sub(r'"Path": ?"[^"]*"', "", said).replace(repository, "")
    # The filesystem driver states the error number (28, ENOSPC), others its text.
    return re.search(r'"Err": ?28\b|no space left|quota|insufficient', said, re.IGNORECASE) is not None


def split(url: str, base: str = "") -> SplitResult:
    """The parts of an address that a registry gave, from ``base``; all are empty where it is none."""
    try:
        return urlsplit(urljoin(base, url))
    except ValueError:
        return urlsplit("")


def _challenge(text: str) -> dict[str, str]:
    """The parameters of a ``WWW-Authenticate`` header (RFC 7235)."""
    return {name.lower(): value for name, value in re.findall(r'([A-Za-z_]+)="([^"]*)"', text)}


def _complaint(answer: requests.Response) -> str:
    """What the registry itself says is wrong (``errors`` of the distribution API), in one line."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        errors = answer.json().get("errors") or []
        return one_line("; ".join(f"{item.get('code', '')}: {item.get('message', '')}" for item in errors))[:300]
    return ""


def _causes(fault: BaseException) -> Iterator[BaseException]:
    """A chain of wrapped exceptions, outermost first; requests and urllib3 hide causes in ``args`` and ``reason``."""
    waiting, seen = [fault], set()
    while waiting:
        item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        inner = (item.__cause__, item.__context__, getattr(item, "reason", None), *item.args)
        waiting += [one for one in inner if isinstance(one, BaseException)]


def _innermost_words(chain: list[BaseException]) -> str:
    for item in reversed(chain):
        if isinstance(item, OSError) and item.strerror:
            return item.strerror.lower() if not isinstance(item, ssl.SSLError) else one_line(str(item.args[-1]))[:200]
    return one_line(str(chain[-1]) or type(chain[-1]).__name__)[:200]


def _bare(host: str) -> str:
    """A host without its port and brackets."""
    return urlsplit(f"//{host}").hostname or host


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(_bare(host)).is_loopback
    return _bare(host) == "localhost"


def _trust(host: str, *, insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in sorted((CERTIFICATES / host).glob("*.crt")):
        try:
            context.load_verify_locations(certificate)
        except (OSError, ssl.SSLError) as fault:
            raise RegistryUntrusted(
                f"{certificate} cannot be used",
                expected="a readable certificate in PEM form",
                found=str(fault),
                fix="replace it",
            ) from fault
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _TrustAdapter(requests.adapters.HTTPAdapter):
    """HTTPS with a given idea of whom to trust."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, ssl_context=self._context, **kwargs)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        return super().proxy_manager_for(*args, ssl_context=self._context, **kwargs)

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """The context's certificates only: requests would add a bundle of its own, which no engine knows."""
