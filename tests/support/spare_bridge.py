"""A bridge for a second dockerd, which would delete the machine's docker0 if it were started with ``--bridge=none``."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def spare_bridge() -> Iterator[str]:
    """Create a bridge with a separate address (198.18.0.0/15 is for tests, RFC 2544); yield its name."""
    name = f"ptbr{secrets.token_hex(3)}"
    address = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}.{8 * secrets.randbelow(32) + 1}/29"
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", address, "dev", name], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", name], check=False)
