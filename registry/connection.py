"""Send HTTP requests to a registry, with authentication.

Authentication follows the CNCF Distribution project's token specification. A 401 response contains a challenge.
``Basic`` (RFC 7617) requires a user name and a password. ``Bearer`` names a realm, a service and a scope. A token is
then requested from the realm, either by a GET request with a user name and a password, or by an OAuth 2 POST request
with an identity token.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
import requests.utils
import urllib3.exceptions
import urllib3.util

from registry import credentials as stored
from registry import faults
from registry.credentials import Credentials
from registry.reference import Reference
from registry.retries import STALL_S, Activity, with_retries
from registry.trust import TlsAdapter, is_loopback
from toolchain.errors import (
    AccessDenied,
    RegistryBroke,
    RegistryFailed,
    RegistryProxyUnusable,
    RegistryUnreachable,
    RegistryUntrusted,
    UserError,
)
from toolchain.text import one_line

_CONNECT_S = 10.0
_READ_S = 30.0
"""The time limit for a response. It is shorter than PATIENCE_S, so that a request is retried after a timeout."""
_FIRST_READ_S = 15.0
"""The time limit for GET /v2/."""
_IDLE_S = 30.0
"""Connections are closed after this time without requests, because firewalls drop idle connections silently."""


class Body(Protocol):
    """A request's body, whose length in bytes is known in advance."""

    def __len__(self) -> int:
        """Return the length of the body in bytes."""

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the body, at most ``size``."""


class Connection:
    """A connection to one registry, for one repository and tag."""

    def __init__(self, reference: Reference, *, insecure: bool, actions: str) -> None:
        """Prepare an HTTP session that requests permission for ``actions`` (``pull`` or ``pull,push``).

        If ``insecure`` is true, the registry may use any certificate, or plain HTTP.
        """
        self.reference = reference
        self.activity = Activity()
        self._scope = f"repository:{reference.repository}:{actions}"
        self._insecure = insecure
        self._credentials: Credentials | None = None
        self._authorization = ""
        self._base = f"https://{reference.api_host}"
        self._used_at = 0.0
        self._session = _Session()
        # Ignore ~/.netrc, because credentials must come only from registry.credentials.
        self._session.trust_env = False
        # Blobs are read without decoding, so a proxy must not compress them.
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.mount("https://", TlsAdapter(reference.api_host, insecure=insecure))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._session.close()

    def at(self, tag: str) -> Connection:
        """Return a connection for another tag in the repository.

        The returned connection is closed together with the original one.
        """
        other = copy.copy(self)
        other.reference = dataclasses.replace(self.reference, tag=tag)
        return other

    def ping(self) -> bool:
        """Choose HTTPS or HTTP; return whether the registry requires authentication.

        Raises RegistryUnreachable, RegistryUntrusted or RegistryFailed.
        """
        answer = self._first_answer()
        if answer.status_code == 403:
            raise self._refused(answer)
        if answer.status_code not in (200, 401):
            raise self.unexpected(answer, "GET /v2/")
        return answer.status_code == 401

    def _first_answer(self) -> requests.Response:
        """Return the response to GET /v2/ over HTTPS or, if HTTPS fails and the host is insecure, over HTTP."""
        try:
            return self._send("GET", f"{self._base}/v2/", read_s=_FIRST_READ_S)
        except (RegistryUntrusted, RegistryUnreachable, RegistryBroke) as fault:
            if not self._insecure or self._base.startswith("http:"):
                raise
            over_https = fault
        # The second request is outside the except block, because faults.explain would otherwise treat the first error
        # as the cause of the second one.
        secure, self._base = self._base, f"http://{self.reference.api_host}"
        try:
            return self._send("GET", f"{self._base}/v2/", read_s=_FIRST_READ_S)
        except UserError as fault:
            self._base = secure
            if fault.found != over_https.found:
                fault.found = f"over HTTP: {fault.found}; over HTTPS: {over_https.found}"
            raise

    def login(self, credentials: Credentials | None) -> None:
        """Authenticate, or check that anonymous access is permitted. Raises AccessDenied."""
        self._credentials = credentials
        self._authorization = ""
        answer = self.request("GET", "/v2/")
        if answer.status_code != 200:
            raise self.unexpected(answer, "GET /v2/")

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Body | bytes] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Send a request and return the response; ``body`` is called for each attempt and returns a new body.

        Raises AccessDenied.
        """
        url = self._base + path
        answer = self._send(method, url, headers=headers, data=body() if body else None, stream=stream)
        if answer.status_code == 401:
            answer.close()
            self._authorization = self._authenticate(answer)
            answer = self._send(method, url, headers=headers, data=body() if body else None, stream=stream)
        if answer.status_code in (401, 403):
            raise self._refused(answer)
        return answer

    def upload_path(self, answer: requests.Response) -> str:
        """Return the path in a ``Location`` header. Raises RegistryUntrusted if the header names another host."""
        base, parts = urlsplit(self._base), _split(answer.headers.get("Location", ""), self._base)
        # The scheme is not compared, because a registry behind a proxy that terminates TLS may send http:// addresses.
        default = 443 if base.scheme == "https" else 80
        if (parts.hostname, parts.port or default) != (base.hostname, base.port or default):
            raise RegistryUntrusted(
                f"{self.reference.host} redirects uploads to another host",
                expected=f"an upload address on {self.reference.host}",
                found=one_line(parts.netloc) or "none",
                fix="report the redirect to the registry's administrator",
            )
        return f"{parts.path}{'?' + parts.query if parts.query else ''}"

    def unexpected(self, answer: requests.Response, what: str) -> RegistryFailed:
        """Return the error for a response with an unexpected status."""
        kind = RegistryBroke if answer.status_code >= 500 or answer.status_code == 429 else RegistryFailed
        return kind(
            f"unexpected response from {self.reference.host}",
            expected=f"{what} to succeed",
            found=faults.response_text(answer),
            fix="check that --registry names a registry, then read the log of that registry",
        )

    def _authenticate(self, answer: requests.Response) -> str:
        """Return the ``Authorization`` header that answers a challenge."""
        challenges = _challenges(answer.headers.get("WWW-Authenticate", ""))
        for kind, parameters in challenges.items():
            if kind == "bearer":
                return f"Bearer {self._token(parameters)}"
            if kind == "basic" and self._credentials is not None and self._credentials.user:
                return self._credentials.basic
        if "basic" in challenges:
            raise self._refused(answer)
        raise RegistryFailed(
            f"{self.reference.host} requires an unsupported kind of authentication",
            expected="a Basic or Bearer challenge",
            found=one_line(", ".join(challenges)) or "none",
            fix="check that --registry names a registry",
        )

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm") or ""
        target = _split(realm)
        if target.scheme not in ("http", "https") or (target.scheme == "http" and self._base.startswith("https:")):
            raise RegistryUntrusted(
                f"the token server of {self.reference.host} is not secure",
                expected="an https:// address",
                found=one_line(realm) or "none",
                fix="report the token server's address to the registry's administrator",
            )
        scope = {"service": challenge.get("service") or "", "scope": challenge.get("scope") or self._scope}
        credentials = self._credentials
        if credentials is not None and credentials.identity_token:
            grant = {"grant_type": "refresh_token", "refresh_token": credentials.identity_token, "client_id": "pitorch"}
            answer = self._send("POST", realm, data={**scope, **grant}, authorized=False)
        else:
            headers = {"Authorization": credentials.basic} if credentials is not None else {}
            answer = self._send("GET", realm, params=scope, headers=headers, authorized=False)
        if answer.status_code in (400, 401, 403):
            raise self._refused(answer)
        if answer.status_code != 200:
            raise self.unexpected(answer, f"the request to the token server {target.netloc}")
        try:
            token = answer.json().get("token") or answer.json().get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise RegistryFailed(
                f"the token server of {self.reference.host} sent no token",
                expected="a JSON object with a token",
                found=f"{len(answer.content)} bytes without a token",
                fix="report the token server's response to the registry's administrator",
            )
        return token

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: Mapping[str, str] | Body | bytes | None = None,
        authorized: bool = True,
        stream: bool = False,
        read_s: float = 0.0,
    ) -> requests.Response:
        """Send one request, with the ``Authorization`` header if ``authorized``; return the response for any status."""
        authorization = {"Authorization": self._authorization} if authorized and self._authorization else {}
        host = urlsplit(url).netloc
        limits_s = (_CONNECT_S, min(read_s or _READ_S, _READ_S))
        is_upload = not isinstance(data, Mapping | None)
        if is_upload:
            # The first limit applies not only to the connection but also to the sending of the body.
            limits_s = (STALL_S, STALL_S)
        if time.monotonic() - self._used_at > _IDLE_S:
            self._session.close()  # closes the idle connections; the session can still be used
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
                return self._session.request(
                    method,
                    url,
                    headers={**authorization, **(headers or {})},
                    params=params,
                    data=data,
                    stream=stream,
                    timeout=limits_s,
                    proxies=_proxies(url),
                    verify=not self._insecure,
                )
        except (requests.RequestException, ValueError) as fault:  # ValueError: an invalid address in a redirect
            if is_upload and "timed out" in str(fault):
                raise faults.stalled(host) from None
            raise faults.explain(fault, host) from None
        finally:
            self._used_at = time.monotonic()

    def _refused(self, answer: requests.Response) -> AccessDenied:
        make = faults.denied if answer.status_code == 403 else faults.refused
        return make(self.reference, self._credentials, faults.response_text(answer))


def log_in(remote: Connection, *, actions: str, user: str) -> Credentials | None:
    """Log in if the registry requires it; return the credentials, or None for anonymous access.

    Requests are retried after server errors, lost connections and timeouts, but not if the host is unknown or refuses
    the connection.
    """
    required = with_retries(remote.ping, remote, at_first=True)
    credentials = stored.find(remote.reference, user=user) if required else None
    if required and credentials is None:
        anonymous = with_retries(lambda: _allows_anonymous(remote, actions), remote, at_first=True)
        credentials = None if anonymous else stored.ask(remote.reference, user=user)
    with_retries(lambda: remote.login(credentials), remote, at_first=True)
    return credentials


def _allows_anonymous(remote: Connection, actions: str) -> bool:
    if actions != "pull":
        return False
    try:
        remote.login(None)
    except AccessDenied:
        return False
    return True


class _Session(requests.Session):
    """An HTTP session that chooses the proxy for each host, including the hosts to which a registry redirects."""

    def rebuild_proxies(self, prepared_request: requests.PreparedRequest, proxies: Any) -> Any:  # noqa: ARG002 (as in the base class)
        """Return the proxies for a redirect."""
        return _proxies(str(prepared_request.url))


def _proxies(url: str) -> dict[str, str]:
    """Return the proxies that the environment sets for a URL, or no proxies for a loopback address.

    Raises RegistryProxyUnusable if the proxy for the URL has an invalid address.
    """
    host = urlsplit(url).netloc
    proxies = {} if is_loopback(host) else requests.utils.get_environ_proxies(url)
    if proxy := requests.utils.select_proxy(url, proxies):
        with contextlib.suppress(urllib3.exceptions.LocationParseError):
            parts = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
            if parts.host and (parts.scheme or "").startswith(("http", "socks")):
                return proxies
        # The address is not quoted, because it may contain a password.
        raise faults.proxy_failed(host, "an invalid proxy address", RegistryProxyUnusable)
    return proxies


def _split(url: str, base: str = "") -> SplitResult:
    """Split a URL from a registry, relative to ``base``; all parts are empty if the URL is invalid."""
    try:
        parts = urlsplit(urljoin(base, url))
        parts.port  # noqa: B018 (raises ValueError)
    except ValueError:
        return urlsplit("")
    return parts


def _challenges(text: str) -> dict[str, dict[str, str]]:
    """Return the parameters of each challenge in a ``WWW-Authenticate`` header (RFC 7235), by scheme in lower case."""
    found: dict[str, dict[str, str]] = {}
    parameters: dict[str, str] = {}
    for name, equals, quoted, token in re.findall(r'([^\s,="]+)(\s*=\s*)?(?(2)(?:"([^"]*)"|([^\s,"]*)))', text):
        if equals:
            parameters[name.lower()] = quoted or token
        else:
            parameters = found.setdefault(name.lower(), {})
    return found
