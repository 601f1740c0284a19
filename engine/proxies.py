"""Convert the proxy variables to the names and forms that containers, apt and dockerd accept."""

from __future__ import annotations

import os
from collections.abc import Mapping

SOCKS_MISSING = "Missing dependencies for SOCKS support"
"""The error message of requests and pip for a SOCKS proxy if PySocks is not installed."""
SOCKS_FIX = "set http_proxy and https_proxy to an HTTP proxy, or install PySocks into .venv from a wheel file"

_NAMES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


def build_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the proxy variables in lower and upper case, for build arguments and the build steps' environment.

    curl reads only the lower-case ``http_proxy``; other programs read only upper-case names. apt ignores ``all_proxy``,
    so ``http_proxy`` and ``https_proxy`` get the value of ``all_proxy`` unless they are set. The names of the variables
    are Docker's predefined build arguments, which are neither recorded in the image's history nor part of the build
    cache's key.
    """
    source = os.environ if environ is None else environ
    given = {name: source.get(name) or source.get(name.upper()) or "" for name in _NAMES}
    if given["all_proxy"]:
        for name in ("http_proxy", "https_proxy"):
            given[name] = given[name] or _with_scheme(given["all_proxy"])
    return {spelling: value for name, value in given.items() if value for spelling in (name, name.upper())}


def daemon_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a ``dockerd`` that pitorch starts, with the proxies from ``build_environment``.

    ``all_proxy`` is omitted, because dockerd ignores an HTTP proxy in this variable, and uses a SOCKS proxy in addition
    to ``http_proxy`` and ``https_proxy`` (observed with 20.10). The only SOCKS scheme that Go's HTTP client supports is
    ``socks5``. With this scheme, the proxy resolves host names, as with ``socks5h`` in other programs.
    """
    source = os.environ if environ is None else environ
    passed = {**source, **build_environment(source)}
    given = {name for proxy in _NAMES for name in (proxy, proxy.upper())}
    for name in given & passed.keys():
        passed[name] = passed[name].replace("socks5h://", "socks5://", 1)
    return {name: value for name, value in passed.items() if name.lower() != "all_proxy"}


def _with_scheme(proxy: str) -> str:
    """Return the proxy's address in a form that all programs accept.

    apt requires a scheme, and supports no SOCKS scheme other than ``socks5h``.
    """
    scheme, separator, rest = proxy.rpartition("://")
    if not separator:
        return f"http://{rest}"
    return f"socks5h://{rest}" if scheme == "socks5" else proxy
