"""The SSH host keys of the boards that run an export."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from nfsroot import access
from nfsroot.layout import Layout
from toolchain import files

_LIMIT = 4096
"""Size limit of a file with a public key, in bytes."""

_PUBLIC_KEY = re.compile(r"^(?:ssh-ed25519|ecdsa-sha2-nistp256) [A-Za-z0-9+/=]+", re.MULTILINE)


def of_boards(layout: Layout) -> list[str]:
    """Return the public host keys that boards with ``nfs.overlay`` store on this PC.

    Boards can write to their folders. Files without keys, and symbolic links that lead out of ``layout.boards``, are
    therefore ignored.
    """
    top = layout.boards.resolve()
    keys: list[str] = []
    for path in sorted(layout.boards.glob("*/host-keys/*.pub")):
        with contextlib.suppress(OSError):  # a board may remove the file at any time
            if path.is_file() and path.resolve().is_relative_to(top) and path.stat().st_size < _LIMIT:
                keys += _PUBLIC_KEY.findall(path.read_text(errors="replace"))
    return keys


def publish(layout: Layout) -> None:
    """Add the boards' host keys to the export's ``ssh_known_hosts``, for users who call ssh themselves."""
    known = layout.known_hosts.read_text().splitlines() if layout.known_hosts.is_file() else []
    known += [f"* {key}" for key in of_boards(layout)]
    files.write_text_atomically(layout.known_hosts, "".join(f"{line}\n" for line in dict.fromkeys(known)))


def pin(layout: Layout, destination: Path) -> Path:
    """Write a known_hosts file with the host keys of the export and of its boards, and return the file's path.

    Raises ArtefactMissing if the export has no host key.
    """
    return access.pin(layout.known_hosts, destination, of_boards(layout))
