"""Run TVM's RPC server on the board, and restart it when it fails. Requires only Python and TVM's runtime.

    python3 board_server.py --port 9090 [--host ADDRESS] [--tracker HOST:PORT --key KEY] [--custom-addr ADDRESS]
    python3 board_server.py --proxy HOST:PORT --key KEY          (the board connects to the proxy)
    python3 board_server.py --check                              (start, print the version, exit)

In TVM's server (0.27), the crash of a kernel ends the thread that accepts connections. The process and its port remain,
so the next client waits forever. The same happens if the tracker is unreachable at the start. This script therefore
stops the server's process after an exception in any of its threads, and restarts it on the same port.

The server also keeps a model's parameters on the board. Clients call the RPC functions ``pitorch.parameters.map`` and
``pitorch.parameters.keep`` (see ``Parameters``).

There is no authentication: anyone who can reach the port can run code on the board. Listen on the loopback address
(the default) and connect through SSH, or use a private network.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAUSE_S = 1.0
"""The delay in seconds before a restart. It limits how often an unreachable tracker is contacted."""
MAX_BYTES = 1 << 31
"""The maximum size of a model's parameters, as in the loader."""
_PR_SET_PDEATHSIG = 1


def _die_of_exceptions() -> None:
    """Let an uncaught exception in any thread end the process.

    The server calls this function before it starts threads.
    """

    def end(fault: threading.ExceptHookArgs) -> None:
        traceback.print_exception(fault.exc_type, fault.exc_value, fault.exc_traceback)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end


class Parameters:
    """The parameters of the last model, in a file that is named after their SHA-256. The file is kept between sessions.

    The loader (``device/remote/loader``) uses the same folder, permissions and size limit, and also keeps only the last
    model, because the folder may be on a filesystem in memory. Clients pass a digest, never a path.
    """

    def __init__(self) -> None:
        self._suffix = f".{os.getpid()}"  # of the incomplete file; each server has a different suffix
        self._file = -1
        self._size = 0
        self._received = hashlib.sha256()

    def serve(self) -> None:
        """Register the RPC functions, and make the server remove the incomplete file after each session.

        The file is also removed if the session was killed. The server's process calls this function before it starts
        threads. Each session runs in a fork of that process.
        """
        import tvm_ffi
        from tvm.rpc import server

        _die_of_exceptions()
        tvm_ffi.register_global_func("pitorch.parameters.map", self.map)
        tvm_ffi.register_global_func("pitorch.parameters.keep", self.keep)
        serve_session = server._serving

        def then_clean(*words: Any) -> None:
            try:
                serve_session(*words)
            finally:
                self.clean()

        server._serving = then_clean

    def map(self, digest: str, size: int) -> Any:
        """Memory-map the parameters and return an array of bytes; None if the board lacks them or they are damaged."""
        import numpy
        import tvm

        _require_digest(digest)
        with contextlib.suppress(OSError), (_folder() / digest).open("rb") as file:
            if os.fstat(file.fileno()).st_size == size:
                # DLPack rejects read-only NumPy arrays. The pages are private, so writing to them would not change the
                # file.
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                if hashlib.sha256(mapped).hexdigest() == digest:
                    return tvm.runtime.from_dlpack(numpy.frombuffer(mapped, numpy.uint8))
        return None

    def keep(self, digest: str, size: int, offset: int, block: bytes) -> str:
        """Write the next block of the parameters. The last block completes the file.

        Returns the reason why the parameters cannot be kept, or an empty string.
        """
        _require_digest(digest)
        if size > MAX_BYTES:
            return f"they are larger than {MAX_BYTES >> 30} GiB"
        if offset not in (0, self._size) or offset + len(block) > size:
            raise ValueError("the block is out of order")
        try:
            path = _folder() / digest
            staged = path.with_name(digest + self._suffix)
            if offset == 0:
                self._begin(staged)
            with memoryview(block) as rest:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            self._received.update(block)
            self._size += len(block)
            if self._size == size:
                os.fsync(self._file)
                if self._received.hexdigest() != digest:
                    raise OSError("the SHA-256 of the received parameters is wrong")
                staged.rename(path)
                self.clean()
        except OSError as fault:
            self.clean()
            return re.sub(r"^\[Errno \d+\] ", "", str(fault))
        return ""

    def _begin(self, staged: Path) -> None:
        self.clean()
        for folder in reversed(staged.parents[:3]):
            folder.mkdir(mode=0o700, exist_ok=True)
        for path in staged.parent.iterdir():
            path.unlink(missing_ok=True)
        self._file = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size, self._received = 0, hashlib.sha256()

    def clean(self) -> None:
        """Remove the incomplete file."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = -1, 0
        with contextlib.suppress(OSError):
            for path in _folder().glob(f"*{self._suffix}"):
                path.unlink()


def _require_digest(digest: str) -> None:
    """Raise ValueError unless ``digest`` is a SHA-256 in hexadecimal, because it becomes part of a file name."""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("the digest is not a SHA-256 in hexadecimal")


def _folder() -> Path:
    """The folder for parameters in this user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "/nonexistent")
    return Path(cache if cache.startswith("/") else f"{home}/.cache", "pitorch", "parameters")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, found {text!r}")
    return host, int(port)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run TVM's RPC server and restart it when it fails.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9090, help="port to listen on")
    parser.add_argument("--tracker", type=_address, help="HOST:PORT of the tracker that assigns this board to clients")
    parser.add_argument("--proxy", type=_address, help="HOST:PORT of a proxy to connect to, instead of listening")
    parser.add_argument(
        "--key", default="", help="name under which clients request the board from the tracker or proxy"
    )
    parser.add_argument("--custom-addr", help="address to report to the tracker, if it differs from --host")
    parser.add_argument("--check", action="store_true", help="start on any free port, print TVM's version, and exit")
    found = parser.parse_args(words)
    if (found.tracker or found.proxy) and not found.key:
        parser.error("--tracker and --proxy require --key")
    return found


def check() -> None:
    """Start a server, connect to it, stop it, and print TVM's version."""
    from importlib.metadata import version

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(arguments(["--port", str(port)]), Parameters()):
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    print(f"pitorch: TVM {version('apache-tvm')} serves", flush=True)


@contextlib.contextmanager
def running(options: argparse.Namespace, parameters: Parameters) -> Iterator[int]:
    """Run TVM's server in a forked process. Yield the process ID when the server listens, or connects to a proxy.

    TVM's class ``Server`` starts another interpreter instead, so that two processes load TVM, which needs about 40 MB
    more. This process does not load TVM.
    """
    started, report = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(started)
        try:
            _serve(options, parameters, report, supervisor)
        except (OSError, ValueError) as fault:  # for example, another program uses the port
            host, port = address(options)
            print(f"pitorch: TVM's server cannot start at {host}:{port}: {fault}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os.close(report)
    try:
        with open(started, "rb", buffering=0) as stream:  # noqa: PTH123 - a file descriptor
            if not stream.read(1):
                ended = wait_for(child)
                if ended.si_code != os.CLD_EXITED:
                    print(f"pitorch: TVM's server was killed by signal {ended.si_status}", file=sys.stderr)
                sys.exit(1)  # otherwise the server has printed the reason
        yield child
    finally:
        _kill(child)


def wait_for(server: int) -> Any:
    """Wait until a server ends. Its process ID remains valid until ``_kill`` is called."""
    return os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def _serve(options: argparse.Namespace, parameters: Parameters, report: int, supervisor: int) -> None:
    """Run TVM's server in this process, and write to the file descriptor ``report`` when it has started."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would not run while a kernel runs
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(supervisor)
    tempfile.tempdir = None  # discard the inherited value, so that TMPDIR is used
    multiprocessing.set_start_method("fork")  # sessions need the functions of ``parameters``
    from tvm.rpc import server

    serve_loop = server._serve_loop

    def session(*words: Any) -> None:
        _end_with(process)
        serve_loop(*words)

    process = os.getpid()
    server._serve_loop = session
    parameters.serve()
    host, port = address(options)
    server._popen_start_rpc_server(
        host,
        port,
        port_end=port + 1,
        is_proxy=options.proxy is not None,
        tracker_addr=options.tracker,
        key=options.key,
        custom_addr=options.custom_addr,
    )
    os.write(report, b"1")
    os.close(report)
    server.PopenRPCServerState.current.thread.join()


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Forked processes do not inherit this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _kill(server: int) -> None:
    """Kill a server and its sessions, unless they have ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(server)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.waitpid(server, 0)


def address(options: argparse.Namespace) -> tuple[str, int]:
    """The address at which the server listens, or that of its proxy."""
    return options.proxy or (options.host, options.port)


def main() -> None:
    """Serve until SIGTERM."""
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    if options.check:
        check()
        return
    host, port = address(options)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with contextlib.ExitStack() as stack:
                # The server creates each session's files in TMPDIR, and does not remove them if the session's kernel
                # crashes.
                os.environ["TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="pitorch-rpc-"))
                parameters = Parameters()
                stack.callback(parameters.clean)
                server = stack.enter_context(running(options, parameters))
                print(f"pitorch: serving at {host}:{port}", flush=True)
                wait_for(server)
            print("pitorch: the server exited and is being restarted", flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
