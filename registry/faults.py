"""Convert failed registry requests into readable errors."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Iterator

import requests
import urllib3.exceptions

from engine.proxies import SOCKS_FIX, SOCKS_MISSING
from registry.credentials import Credentials
from registry.reference import Reference
from registry.retries import STALL_S
from registry.trust import CERTIFICATES, bare_host, is_loopback
from toolchain.errors import (
    AccessDenied,
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryFailed,
    RegistryFull,
    RegistryHostUnknown,
    RegistryProxyUnusable,
    RegistryUnreachable,
    RegistryUntrusted,
)
from toolchain.text import one_line


def explain(fault: BaseException, host: str) -> RegistryUnreachable | RegistryUntrusted | RegistryFailed:
    """Return the error for a failed request.

    Where possible, the error depends on the types of the exceptions in the chain, not on their text.
    """
    chain = list(_causes(fault))
    texts = " | ".join(str(item) for item in chain)
    found = _innermost_text(chain)
    absent = (socket.gaierror, urllib3.exceptions.NameResolutionError, ConnectionRefusedError)
    if SOCKS_MISSING in texts:
        return proxy_failed(host, found, RegistryProxyUnusable, fix=SOCKS_FIX)
    if any(isinstance(item, urllib3.exceptions.ProxyError) for item in chain):
        permanent = any(isinstance(item, absent) for item in chain)
        return proxy_failed(host, found, RegistryProxyUnusable if permanent else RegistryUnreachable)
    if any(isinstance(item, ssl.SSLCertVerificationError) for item in chain) or "CERTIFICATE_VERIFY" in texts:
        return untrusted(host, found)
    # Use only the text of the TLS error, because outer errors contain the requested address, which may contain any
    # words.
    of_tls = [str(item) for item in chain if isinstance(item, ssl.SSLError) and not isinstance(item, TimeoutError)]
    if of_tls:
        if re.search(r"WRONG_VERSION_NUMBER|RECORD_LAYER|UNKNOWN_PROTOCOL|HTTP_REQUEST|PACKET_LENGTH", str(of_tls)):
            return plain_http(host)
        if "EOF" not in str(of_tls):
            return untrusted(host, found)
    if any(isinstance(item, (socket.gaierror, urllib3.exceptions.NameResolutionError)) for item in chain):
        return unknown_host(host)
    if any(isinstance(item, ConnectionRefusedError) for item in chain):
        return connection_refused(host, found)
    kinds = (TimeoutError, urllib3.exceptions.ConnectTimeoutError)
    if any(isinstance(item, kinds) or "Errno 113" in str(item) or "Errno 101" in str(item) for item in chain):
        return unreachable(host, found)
    return connection_lost(host, found)


def _causes(fault: BaseException) -> Iterator[BaseException]:
    """Yield a chain of exceptions, outermost first; requests and urllib3 store causes in ``args`` and ``reason``."""
    waiting, seen = [fault], set()
    while waiting:
        item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        inner = (item.__cause__, item.__context__, getattr(item, "reason", None), *item.args)
        waiting += [one for one in inner if isinstance(one, BaseException)]


def _innermost_text(chain: list[BaseException]) -> str:
    for item in reversed(chain):
        if isinstance(item, OSError) and item.strerror:
            return item.strerror.lower() if not isinstance(item, ssl.SSLError) else one_line(str(item.args[-1]))[:200]
    return one_line(str(chain[-1]) or type(chain[-1]).__name__)[:200]


def response_text(answer: requests.Response) -> str:
    """Return a response's status and error messages (``errors`` in the distribution API) as one line."""
    messages = ""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        errors = answer.json().get("errors") or []
        messages = one_line("; ".join(f"{item.get('code', '')}: {item.get('message', '')}" for item in errors))[:300]
    return " ".join(f"HTTP {answer.status_code} {messages}".split())


def is_full(text: str, repository: str) -> bool:
    """Return whether a response reports a full registry; words in the names of repositories and folders are ignored."""
    text = re.sub(r'"Path": ?"[^"]*"', "", text).replace(repository, "")
    # The filesystem driver reports the error number (28, ENOSPC); other drivers report text.
    return re.search(r'"Err": ?28\b|no space left|quota|insufficient', text, re.IGNORECASE) is not None


def refused(reference: Reference, credentials: Credentials | None, found: str) -> AccessDenied:
    """Return the error for failed or missing authentication."""
    if credentials is None:
        return AccessDenied(
            f"authentication required at {reference.host}",
            expected="a user name and a password",
            found=f"none given ({found})",
            fix=f"run docker login {reference.host}, or set PITORCH_REGISTRY_PASSWORD and pass --user NAME",
        )
    return AccessDenied(
        f"access to {reference.repository} at {reference.host} denied",
        expected="a user with access, and the correct password",
        found=f"{found} (as {_user_of(credentials)})",
        fix=f"check the user's password and permissions, or store new credentials: docker login {reference.host}",
    )


def denied(reference: Reference, credentials: Credentials | None, found: str) -> AccessDenied:
    """Return the error for a user who is not permitted to access the repository; a login would not help."""
    return AccessDenied(
        f"access to {reference.repository} at {reference.host} denied",
        expected="permission to read or write the repository",
        found=f"{found} (as {_user_of(credentials) if credentials else 'an anonymous user'})",
        fix="check the namespace (--registry), or ask the registry's administrator for permission",
    )


def _user_of(credentials: Credentials) -> str:
    return f"{credentials.user or 'an identity token'}, from {credentials.source}"


def full(reference: Reference, found: str) -> RegistryFull:
    """Return the error for a registry whose storage is full."""
    return RegistryFull(
        f"no space left at {reference.host}",
        expected="space for the image's layers",
        found=found,
        fix="delete old tags in the registry and run its garbage collection, or have the namespace's quota raised",
    )


def stalled(host: str, found: str = "") -> RegistryFailed:
    """Return the error for a transfer that has stopped making progress."""
    return RegistryFailed(
        f"the transfer to or from {host} stalled",
        expected=f"progress within {STALL_S:.0f} s",
        found=found or "none",
        fix="check the network and the registry's log, then run the task again; complete layers are not sent again",
    )


def connection_lost(host: str, found: str, expected: str = "a response") -> RegistryBroke:
    """Return the error for a registry that closed the connection or sent an invalid response."""
    return RegistryBroke(
        f"connection to {host} lost",
        expected=expected,
        found=found,
        fix="check the registry's log, then run the task again; complete layers are not sent again",
    )


def unknown_host(host: str) -> RegistryHostUnknown:
    """Return the error for a host name that does not resolve."""
    return RegistryHostUnknown(
        f"unknown host {host.rpartition(':')[0] or host}",
        expected="a name that resolves",
        found="the name servers cannot resolve this name",
        fix="check the spelling of --registry (or registry.address in invoke.yaml), then this PC's DNS settings",
    )


def connection_refused(host: str, found: str) -> RegistryConnectionRefused:
    """Return the error for a host that refuses the connection, because no program listens on the port."""
    fix = f"check --registry and its port, and whether a registry is running there (curl -i http://{host}/v2/)"
    return RegistryConnectionRefused(
        f"no registry listens at {host}",
        expected="a registry",
        found=found,
        fix="run ./inv registry up to start one on this machine" if is_loopback(host) else fix,
    )


def unreachable(host: str, found: str) -> RegistryUnreachable:
    """Return the error for a host that does not respond, or to which there is no route."""
    return RegistryUnreachable(
        f"no response from a registry at {host}",
        expected="a registry",
        found=found,
        fix=f"check --registry, the network, no_proxy, and whether the registry responds (curl -i http://{host}/v2/)",
    )


def proxy_failed(
    host: str, found: str, kind: type[RegistryUnreachable], *, fix: str = "check https_proxy and http_proxy"
) -> RegistryUnreachable:
    """Return the error for a registry that cannot be reached through the proxy."""
    return kind(
        f"{host} cannot be reached through the proxy",
        expected="an HTTP proxy that responds, with an address of the form http://HOST:PORT",
        found=found,
        fix=f"{fix}, or add {bare_host(host)} to no_proxy",
    )


def untrusted(host: str, found: str) -> RegistryUntrusted:
    """Return the error for a registry whose certificate is not trusted."""
    return RegistryUntrusted(
        f"{host} cannot be trusted",
        expected="TLS with a certificate that this machine trusts",
        found=found,
        fix=f"put the certificate of the registry's CA into {CERTIFICATES}/{host}/ca.crt",
    )


def plain_http(host: str) -> RegistryUntrusted:
    """Return the error for a registry that does not support TLS."""
    fault = untrusted(host, "it uses plain HTTP")
    fault.fix = (
        f'enable TLS on the registry, or add "insecure-registries": ["{host}"] to /etc/docker/daemon.json and reload '
        "the engine (anyone on the network can then read and change transfers)"
    )
    return fault
