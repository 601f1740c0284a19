"""Create a private network namespace for a virtual machine and its NFS server.

QEMU's user-mode network connects from unprivileged ports, so the server cannot distinguish the virtual machine from
other programs (``PrivilegedPort`` would reject both). If the NFS server runs in a private namespace, programs outside
the namespace cannot connect to the server, because entering the namespace requires CAP_SYS_ADMIN. The namespace has a
loopback interface and no route. The kernel removes the namespace when its last process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from toolchain import process
from toolchain.errors import UserError

_CLONE_NEWNET = 0x40000000
_HERE = Path("/proc/thread-self/ns/net")
_ADDRESS = "192.0.2.1"
"""A documentation address (RFC 5737). If only lo has an address, NFS-Ganesha cannot resolve its own address."""

_made: set[int] = set()


def is_entered() -> bool:
    """Return whether the calling thread is in a private namespace."""
    return _HERE.stat().st_ino in _made


@contextlib.contextmanager
def private_network() -> Iterator[None]:
    """Run the block, including the programs and threads that it starts, in a private network namespace.

    A namespace belongs to a thread, so threads that are already running are not affected. Raises RootNeeded, and
    UserError if no namespace can be created.
    """
    process.require_root("to create a network namespace for the virtual machine", "./inv test-on-pi")
    process.require_program("ip", "to set up the virtual machine's network")
    libc = ctypes.CDLL(None, use_errno=True)
    with _HERE.open() as before:
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise UserError(
                "cannot create a network namespace; without one, other users could write to the exported tree",
                expected="the capability CAP_SYS_ADMIN and a kernel with CONFIG_NET_NS",
                found=os.strerror(ctypes.get_errno()),
                fix="if this is a container, start it with --privileged; otherwise use another machine",
            )
        inode = _HERE.stat().st_ino
        _made.add(inode)
        try:
            for words in (
                ("link", "set", "lo", "up"),
                ("link", "add", "pitorch", "type", "bridge"),
                ("address", "add", f"{_ADDRESS}/32", "dev", "pitorch"),
                ("link", "set", "pitorch", "up"),
            ):
                process.run(["ip", *words], limit_s=30)
            yield
        finally:
            _made.discard(inode)
            if libc.setns(before.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot return to the machine's network namespace")
