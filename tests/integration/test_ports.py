"""Tests of the selection of free ports for servers."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from toolchain.config import ROOT
from toolchain.ports import free_port


def test_port_is_not_ephemeral() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= 1024:
        pytest.skip("needs a range of ephemeral ports that starts above 1024")
    found = {free_port() for _ in range(50)}
    assert len(found) > 1, "two simultaneous callers must get different ports"
    assert max(found) < lowest
    assert min(found) >= 1024


def test_server_can_listen_on_the_port() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname() == ("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the test checks errno)
        free_port("192.0.2.1")  # documentation network (RFC 5737)
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.network_namespaces
def test_used_ports_are_skipped() -> None:
    """All unprivileged ports but two are ephemeral. First, only one of these two ports is in use, then both."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to set the range of ephemeral ports")
    script = (
        "import socket, subprocess\n"
        "from pathlib import Path\n"
        "from toolchain.ports import free_port\n"
        "subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
        "Path('/proc/sys/net/ipv4/ip_local_port_range').write_text('1026 60999')\n"
        "with socket.create_server(('127.0.0.1', 1024)):\n"
        "    print({free_port() for _ in range(20)})\n"
        "    with socket.create_server(('127.0.0.1', 1025)):\n"
        "        print(free_port() >= 1026)\n"
    )
    words = ["unshare", "--net", sys.executable, "-c", script]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("{1025}\nTrue\n", "")
