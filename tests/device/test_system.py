"""Tests of the board's system: whether it is the exported root filesystem, and whether it is suitable for computing."""

from __future__ import annotations

import grp
import importlib.util
import os
import platform
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    "PITORCH_BOARD" not in os.environ, reason="tests the board itself, on which ./inv test-on-pi runs it"
)

FIRST_SUPPORTED_S = 1_735_689_600
"""1 January 2025: an earlier time means that the clock was never set."""


def mounts() -> dict[str, tuple[str, str, str]]:
    """Read each mount's source, type and options, keyed by mount point.

    If several mounts have the same mount point, return the last one.
    """
    rows = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return {row[1]: (row[0], row[2], row[3]) for row in rows}


def test_userland_matches_its_architecture() -> None:
    bits = 8 * struct.calcsize("P")
    names = {"arm-linux-gnueabihf": (32, 40), "aarch64-linux-gnu": (64, 183)}
    expected, machine = names[sysconfig.get_config_var("MULTIARCH")]
    assert bits == expected
    header = Path(sys.executable).resolve().read_bytes()[:64]
    assert header[:5] == (b"\x7fELF\x01" if bits == 32 else b"\x7fELF\x02")
    # e_machine 40 is ARM, 183 AArch64; flag 0x400 in e_flags is the hard-float calling convention of 32-bit ARM
    assert struct.unpack_from("<H", header, 18)[0] == machine
    assert bits == 64 or struct.unpack_from("<I", header, 36)[0] & 0x400


def test_kernel_is_arm() -> None:
    """A 64-bit kernel with a 32-bit userland is supported."""
    of_32_bits = ("armv7l", "armv8l") if struct.calcsize("P") == 4 else ()
    assert platform.machine() in (*of_32_bits, "aarch64")


def test_python_has_all_its_modules() -> None:
    assert sys.version_info >= (3, 11)
    import bz2
    import ctypes
    import hashlib
    import lzma
    import sqlite3
    import ssl
    import zlib

    assert zlib.decompress(zlib.compress(b"pi")) == lzma.decompress(lzma.compress(b"pi")) == b"pi"
    assert bz2.decompress(bz2.compress(b"pi")) == b"pi"
    assert ctypes.sizeof(ctypes.c_void_p) == struct.calcsize("P")
    assert ssl.OPENSSL_VERSION_INFO >= (3, 0)
    assert sqlite3.sqlite_version_info >= (3, 34)
    assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")


def test_numpy_multiplies_with_openblas() -> None:
    numpy = pytest.importorskip("numpy", reason="the image is built without numpy")
    generator = numpy.random.default_rng(1)
    left = generator.standard_normal((64, 64), dtype=numpy.float32)
    right = generator.standard_normal((64, 64), dtype=numpy.float32)
    by_blas = left @ right
    exact = numpy.einsum("ij,jk->ik", left.astype(numpy.float64), right.astype(numpy.float64))
    assert numpy.abs(by_blas - exact).max() < 64 * numpy.finfo(numpy.float32).eps * 16
    mapped = Path("/proc/self/maps").read_text()
    assert re.search(r"libopenblas\S*\.so|openblas-pthread/lib(?:blas|cblas)\S*", mapped), (
        "numpy has not loaded OpenBLAS"
    )


def test_root_is_the_exported_tree() -> None:
    source, kind, options = mounts()["/"]
    if kind in ("nfs", "nfs4"):
        assert ":" in source
        assert options.split(",")[0] == "rw"
    else:
        pytest.skip(f"the root is {source} ({kind}), not NFS: this board runs a copy of the tree")


def test_root_is_writable_and_keeps_owners(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory(dir="/root") as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"\0" * 65536)
        os.chown(path, 1000, 1000)
        path.chmod(0o4755)
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (1000, 1000)
        assert found.st_mode & 0o7777 in (0o4755, 0o755)
        os.link(path, Path(folder) / "hard")
        assert path.stat().st_nlink == 2
        (Path(folder) / "soft").symlink_to("file")
        assert (Path(folder) / "soft").resolve() == path


def test_system_files_are_owned_by_root() -> None:
    for name in ("/", "/etc", "/etc/passwd", "/usr/bin"):
        found = Path(name).stat()
        assert (found.st_uid, found.st_gid) == (0, 0), name
    assert Path("/etc/shadow").stat().st_mode & 0o777 in (0o640, 0o600)
    assert Path("/tmp").stat().st_mode & 0o1777 == 0o1777
    assert pwd.getpwnam("root").pw_uid == 0
    assert grp.getgrnam("root").gr_gid == 0


def test_kernel_file_systems_are_mounted() -> None:
    mounted = mounts()
    assert mounted["/proc"][1] == "proc"
    assert "/sys" in mounted
    for name in ("null", "zero", "urandom", "tty"):
        assert Path(f"/dev/{name}").is_char_device(), name
    assert os.access("/dev/shm", os.W_OK)


def test_hostname_resolves() -> None:
    assert socket.gethostname() not in ("", "(none)")
    assert socket.gethostbyname("localhost") == "127.0.0.1"


def test_resolver_is_configured() -> None:
    path = Path("/etc/resolv.conf")
    servers = re.findall(r"^nameserver\s+(\S+)", path.read_text(), re.MULTILINE) if path.exists() else []
    assert servers, "no nameserver in /etc/resolv.conf"


def test_loopback_carries_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"pi")
            assert accepted.recv(2) == b"pi"


def test_clock_is_set_and_runs() -> None:
    def read() -> tuple[float, float, float]:
        """Read the wall clock between two monotonic readings, because a busy machine may delay a reading."""
        return time.monotonic(), time.time(), time.monotonic()

    before, wall, after = read()
    assert wall > FIRST_SUPPORTED_S, "the time was not set, and the board has no battery-backed clock"
    time.sleep(0.2)
    then_before, then_wall, then_after = read()
    assert then_before - after - 0.1 < then_wall - wall < then_after - before + 0.1


def test_no_swap_over_the_network() -> None:
    rows = Path("/proc/swaps").read_text().splitlines()[1:]
    assert not [row for row in rows if " file " in row]


def test_loader_finds_libqpu() -> None:
    import ctypes

    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin")
    assert ldconfig is not None
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    if "libqpu.so" not in listed:
        pytest.skip("the image is built without libqpu")
    kind = "hard-float" if struct.calcsize("P") == 4 else "AArch64"
    assert re.search(rf"libqpu\.so\.1 \(libc6,{kind}\) => /\S+", listed)
    assert ctypes.CDLL("libqpu.so.1")


def test_scripts_run_in_forks_of_a_preloaded_process(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses a standard-library module instead of torch, because other tests import torch."""
    if importlib.util.find_spec("pitorch") is None:
        pytest.skip("pitorch's Python modules, which are part of this project's libqpu, are not in the image")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    code = "import os, sys; print(os.getppid(), 'sqlite3' in sys.modules)"
    command = [sys.executable, "-m", "pitorch.preloaded", "--import=sqlite3"]
    try:
        runs = [subprocess.run([*command, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    finally:
        ended = subprocess.run([*command[:3], "--stop"], capture_output=True, text=True, check=True).stdout
    assert runs[0].stdout == runs[1].stdout, "both scripts must run in forks of the same process"
    assert runs[0].stdout.endswith(" True\n")
    assert "loading sqlite3" in runs[0].stderr
    assert runs[1].stderr == ""
    assert "server stopped" in ended


def test_every_library_of_the_interpreter_is_found() -> None:
    listed = subprocess.run(["ldd", sys.executable], capture_output=True, text=True, check=True).stdout
    assert "not found" not in listed
    assert "libc.so.6" in listed
