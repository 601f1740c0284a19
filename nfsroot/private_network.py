"""A network namespace of this process's own, in which a virtual machine and its NFS server meet.

QEMU's user-mode network connects from unprivileged ports, so a server for it cannot tell the machine from any other
program (``PrivilegedPort`` would refuse both). In a namespace that no other process is in, nobody else can connect:
to enter it takes CAP_SYS_ADMIN. It has a loopback interface and no way out, and it is gone with the last process in it,
however that ends.
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
"""For documentation (RFC 5737). NFS-Ganesha looks its own address up, which fails where lo alone has any."""

_made: set[int] = set()


def is_entered() -> bool:
    """Whether the calling thread is in such a namespace."""
    return _HERE.stat().st_ino in _made


@contextlib.contextmanager
def private_network() -> Iterator[None]:
    """Run the block, and the programs and threads that it starts, in a network namespace of their own.

    Namespaces are a thread's: other threads that run already stay where they are. Raises RootNeeded, and UserError
    where no namespace can be made.
    """
    process.require_root("to make a network namespace for the virtual machine", "./inv test-on-pi")
    process.require_program("ip", "to set up the virtual machine's network")
    libc = ctypes.CDLL(None, use_errno=True)
    with _HERE.open() as before:
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise UserError(
                "no network namespace can be made, and without one other users could write to the exported tree",
                expected="the right to make one (CAP_SYS_ADMIN), and a kernel with CONFIG_NET_NS",
                found=os.strerror(ctypes.get_errno()),
                fix="in a container: start it with --privileged; else run the tests on a machine of your own",
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
                raise OSError(ctypes.get_errno(), "cannot return to the machine's own network namespace")
