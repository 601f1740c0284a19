"""Configure TLS for registries by the same rules as the Docker engine.

The system's certificates and those in ``/etc/docker/certs.d/HOST:PORT`` are trusted. Hosts that the engine lists as
insecure (loopback addresses by default) may use any certificate, or plain HTTP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests.adapters

from toolchain.errors import RegistryUntrusted

CERTIFICATES = Path("/etc/docker/certs.d")
"""The engine's folder of certificates for each registry (Docker: "Verify repository client with certificates")."""


def is_insecure(host: str, engine_info: Mapping[str, Any]) -> bool:
    """Return whether the engine treats a host as insecure, and so does not verify the host's certificate.

    ``engine_info`` is the output of ``docker info``, which lists insecure hosts by name, and insecure networks. A host
    is also insecure if any of its addresses is in an insecure network (moby: registry/config.go).
    """
    settings = engine_info.get("RegistryConfig") or {}
    named = (settings.get("IndexConfigs") or {}).get(host)
    if isinstance(named, Mapping):
        return not named.get("Secure", True)
    networks = [ipaddress.ip_network(text, strict=False) for text in settings.get("InsecureRegistryCIDRs") or []]
    addresses = []
    with contextlib.suppress(OSError):
        addresses = [item[4][0] for item in socket.getaddrinfo(bare_host(host), None, type=socket.SOCK_STREAM)]
    return any(ipaddress.ip_address(str(address)) in network for address in addresses for network in networks)


def bare_host(host: str) -> str:
    """Return a host without its port and brackets."""
    return urlsplit(f"//{host}").hostname or host


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is a loopback address or localhost."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bare_host(host)).is_loopback
    return bare_host(host) == "localhost"


class TlsAdapter(requests.adapters.HTTPAdapter):
    """An adapter for HTTPS connections to one registry."""

    def __init__(self, host: str, *, insecure: bool) -> None:
        """Load the certificates. Raises RegistryUntrusted if a certificate for the host cannot be read."""
        self._context = _context(host, insecure=insecure)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Use the TLS context for direct connections."""
        super().init_poolmanager(*args, ssl_context=self._context, **kwargs)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        """Use the TLS context for connections through a proxy."""
        return super().proxy_manager_for(*args, ssl_context=self._context, **kwargs)

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Do not add the certificate bundle of the requests library, which the engine does not use."""


def _context(host: str, *, insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in sorted((CERTIFICATES / host).glob("*.crt")):
        try:
            context.load_verify_locations(certificate)
        except (OSError, ssl.SSLError) as fault:
            raise RegistryUntrusted(
                f"{certificate} cannot be used",
                expected="a readable certificate in PEM format",
                found=str(fault),
                fix="replace the file with a readable certificate in PEM format, or delete it",
            ) from fault
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
