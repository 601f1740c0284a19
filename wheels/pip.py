"""pip on this PC, for what recipes and environments fetch: what its failures mean is told in one place."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.proxies import SOCKS_FIX, SOCKS_MISSING
from toolchain.errors import CommandFailed, NetworkUnreachable, UserError
from toolchain.process import run

# Without a network pip tries several times, then says that it found no distribution: so this is asked first.
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError|Max retries exceeded|Read timed out"
)
_UNFOUND = re.compile(r"No matching distribution found for ([^\s;(]+)")
# An index has answered, whatever was tried before with no success.
_OTHERS_FOUND = re.compile(r"\(from versions: (?!none\))")


def run_pip(
    words: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    unfound: Callable[[str], UserError],
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 1800.0,
) -> None:
    """Run ``python -m pip WORDS`` without questions; ``what`` names in errors what is fetched.

    ``unfound`` makes the error for a requirement that the index has nothing for. Raises NetworkUnreachable, that, or
    CommandFailed with pip's last lines.
    """
    try:
        run(
            [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *words],
            env=environment,
            limit_s=limit_s,
            log=log,
        )
    except CommandFailed as fault:
        if SOCKS_MISSING in fault.tail:
            raise NetworkUnreachable(
                f"{what} cannot be fetched: the proxy speaks SOCKS, and pip does not",
                expected="an HTTP proxy, or the package PySocks",
                found=f"{SOCKS_MISSING} (whole log: {log})",
                fix=SOCKS_FIX,
            ) from fault
        if _UNREACHABLE.search(fault.tail) and not _OTHERS_FOUND.search(fault.tail):
            raise NetworkUnreachable(
                f"{what} cannot be fetched: the package index does not answer",
                expected="the package index that this PC's pip uses (pip config list) to answer",
                found=f"no connection (whole log: {log})",
                fix="fix the network, https_proxy or pip.conf, then run the task again",
            ) from fault
        if (asked := _UNFOUND.search(fault.tail)) is not None:
            raise unfound(asked[1]) from fault
        raise
