"""Run Python scripts without waiting for the import of torch.

    python3 -m pitorch.preloaded SCRIPT [ARGUMENT...]       like python3 SCRIPT
    python3 -m pitorch.preloaded -c CODE [ARGUMENT...]      like python3 -c CODE
    python3 -m pitorch.preloaded --stop                     stop the server process

The first call starts a server process that imports torch. The import takes several seconds on a Pi, and half a minute
on an emulated Pi. The server forks a process for every run. This process has the caller's arguments, working directory,
environment, standard streams and umask, receives the caller's signals, and exits with the script's status. Each user
has one server per Python version. A server exits after half an hour without a run (``--idle=SECONDS``).

The server does not import anything that ``./inv deploy`` installs. Each run therefore uses the current version of
the extension, of libqpu and of the script. If torch itself or a variable that affects the import (``OMP_NUM_THREADS``,
``PYTHONPATH`` …) has changed, the server is restarted, and a message reports the restart.

``--import=MODULE`` (may be repeated) sets the modules to import instead of torch. ``pitorch.preloaded`` requires Linux.
The exit code is the script's, or 125 with a message if the server could not be started. If a signal killed the script,
the same signal kills the caller's process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["NotStarted", "main"]

NOT_STARTED = 125
"""The exit code if the server could not be started."""

_IDLE_S = 1800.0
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Unless this variable is 0, ``import torch`` loads external backends. The server loads them only after the fork."""

_IMPORT_VARIABLES = (
    *("ATEN_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_"),
    "TORCH",
)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")


class NotStarted(RuntimeError):
    """The server could not be started, or other users can access its folder."""


def main(words: Sequence[str]) -> int:
    """Execute the command line. Raises NotStarted."""
    modules, idle_s, rest = [], _IDLE_S, list(words)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        if name == "--import" and value:
            modules.append(value)
        elif name == "--idle" and value.replace(".", "", 1).isdigit():
            idle_s = float(value)
        elif name == "--stop" and not value and not rest:
            return stop()
        elif name == "--help":
            print(__doc__)
            return 0
        else:
            return _usage(f"{name} is not an option, or its value is missing or invalid")
    if not rest or rest == ["-c"]:
        return _usage("no script given")
    if rest[0] != "-c" and rest[0].startswith("-"):
        return _usage(f"{rest[0]} is not a script")
    if rest[0] != "-c" and not Path(rest[0]).is_file():
        print(f"pitorch.preloaded: no such file: {rest[0]}", file=sys.stderr)
        return 2
    return run(rest, modules=modules or ["torch"], idle_s=idle_s)


def _usage(error: str) -> int:
    print(f"pitorch.preloaded: {error}\n{(__doc__ or '').split('The first call')[0].rstrip()}", file=sys.stderr)
    return 2


def run(words: Sequence[str], *, modules: Sequence[str], idle_s: float = _IDLE_S) -> int:
    """Run ``SCRIPT ARGUMENT...`` or ``-c CODE ARGUMENT...`` with ``modules`` imported, and return the exit status.

    If a signal killed the script, the status is minus the signal number, as in ``subprocess``. Raises NotStarted.
    """
    request = {
        "words": list(words),
        "modules": list(modules),
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "umask": _umask(),
    }
    reason = ""
    for _ in range(3):
        with contextlib.closing(_connect(modules, idle_s, reason)) as connection:
            response = _request(connection, request)
        if "status" in response:
            return int(response["status"])
        if "started" in response:
            raise NotStarted("the server was terminated while the script ran")
        reason = str(response.get("stale", "the previous server has just exited"))
    raise NotStarted(f"no usable server after three attempts: {reason}")


def stop() -> int:
    """Stop the server, if there is one. Active runs continue."""
    with contextlib.closing(_new_socket()) as connection:
        if not _try_connect(connection, _folder()):
            print("pitorch.preloaded: no server is running")
            return 0
        _request(connection, {"stop": True})
    print("pitorch.preloaded: server stopped")
    return 0


# Client ---------------------------------------------------------------------------------------------------


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _folder() -> Path:
    """Return the socket's folder for this user and Python version. Raises NotStarted if other users can access it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path("/tmp")  # noqa: S108
    folder = parent / f"pitorch-preloaded-{os.getuid()}-{sys.implementation.cache_tag}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotStarted(f"{folder} is not a folder that only you can access: remove it, and run the command again")
    return folder


def _connect(modules: Sequence[str], idle_s: float, reason: str) -> socket.socket:
    """Connect to the server, and start it if necessary. ``reason`` is the reason for the start, if known."""
    folder = _folder()
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(contextlib.closing(_new_socket()))
        if not _try_connect(connection, folder):
            with (folder / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _try_connect(connection, folder):  # Another caller may have just started the server.
                    _start(folder, modules, idle_s, reason)
                    if not _try_connect(connection, folder):
                        raise NotStarted(f"the server does not accept connections at {folder}/socket")
        stack.pop_all()
        return connection


def _try_connect(connection: socket.socket, folder: Path) -> bool:
    try:
        with _short_path(folder) as path:
            connection.connect(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Provide a short path for a socket in any folder. Socket addresses are limited to 107 bytes (unix(7))."""
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/socket"
    finally:
        os.close(number)


def _start(folder: Path, modules: Sequence[str], idle_s: float, reason: str) -> None:
    names = ", ".join(modules)
    print(f"pitorch.preloaded: loading {names}{f' ({reason})' if reason else ''} …", file=sys.stderr, flush=True)
    began = time.monotonic()
    path = folder / "socket"
    path.unlink(missing_ok=True)
    reader, writer = os.pipe()
    with _new_socket() as listener, (folder / "log").open("w+") as log, os.fdopen(reader) as ready_pipe:
        with _short_path(folder) as short:
            listener.bind(short)
        listener.listen()
        words = ["--serve", str(listener.fileno()), str(writer), str(path), str(idle_s), *modules]
        try:
            started = subprocess.Popen(
                [sys.executable, "-m", "pitorch.preloaded", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(), writer),
                start_new_session=True,
                env={**os.environ, _AUTOLOAD: "0"},
                cwd="/",
            )
        finally:
            os.close(writer)
        if ready_pipe.read() != "ready":
            path.unlink(missing_ok=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_EXIT_TIMEOUT_S)
            log.seek(0)
            raise NotStarted(f"{names} could not be imported:\n{log.read().rstrip() or 'no output'}")
    print(f"pitorch.preloaded: loaded in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _request(connection: socket.socket, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request with this process's standard streams, and forward signals until the response is complete."""
    body = json.dumps(request).encode()
    with contextlib.ExitStack() as stack:
        files = [_open_or_null(number, stack) for number in range(3)]
        before = {}
        if "words" in request:
            for number in _FORWARDED:
                before[number] = signal.signal(number, lambda got, _: _send_signal(connection, bytes([got])))
        try:
            socket.send_fds(connection, [_LENGTH.pack(len(body))], files)
            connection.sendall(body)
            text = b""
            while chunk := connection.recv(1 << 16):
                text += chunk
        except ConnectionError:
            text = b""
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    response: dict[str, Any] = {}
    for line in text.splitlines():
        response |= json.loads(line)
    return response


def _send_signal(connection: socket.socket, number: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send(number)


def _open_or_null(number: int, stack: contextlib.ExitStack) -> int:
    try:
        os.fstat(number)
    except OSError:
        return stack.enter_context(open(os.devnull, "r+b")).fileno()  # noqa: PTH123
    return number


def _umask() -> int:
    """Read the umask, which is possible only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Server ---------------------------------------------------------------------------------------------


class _Server:
    """The server process, with its imported modules and active runs."""

    def __init__(self, listener: socket.socket, path: Path, idle_s: float, modules: Sequence[str]) -> None:
        self._listener, self._path, self._idle_s, self._modules = listener, path, idle_s, list(modules)
        self._environment = _import_variables(os.environ)
        self._connections: dict[int, socket.socket] = {}
        self._libc = ctypes.CDLL(None)
        self._open = True
        for name in modules:
            importlib.import_module(name)
        # Garbage collections in the forked processes would visit the objects of these modules, and copy their pages.
        gc.collect()
        gc.freeze()
        self._loaded = _mapped_files()

    def serve(self) -> dict[str, Any]:
        """Fork for each request. Returns the request in the forked process; never returns in the server process."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(wake, selectors.EVENT_READ)
            while self._open or self._connections:
                found = ready.select(self._idle_s if not self._connections else None)
                if not found:
                    self._close(ready)
                for key, _ in found:
                    if key.fileobj is wake:
                        with contextlib.suppress(BlockingIOError):
                            wake.recv(1 << 12)
                        self._reap(ready)
                    elif key.fileobj is self._listener:
                        connection, _address = self._listener.accept()
                        request = self._handle(connection, ready)
                        if request is not None:
                            wake.close()
                            waker.close()
                            return request
                    else:
                        self._forward(key.data, ready)
        raise SystemExit(0)

    def _handle(self, connection: socket.socket, ready: selectors.BaseSelector) -> dict[str, Any] | None:
        """Respond to a request, or fork a process for it. Returns the request in the forked process."""
        try:
            request, files = _receive(connection)
        except (OSError, ValueError, EOFError):
            connection.close()
            return None
        try:
            if request.get("stop"):
                self._close(ready)
                _finish(connection, {"stopped": True})
                return None
            if reason := self._stale(request):
                self._close(ready)
                _finish(connection, {"stale": reason})
                return None
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                for ours in (signal.SIGCHLD, signal.SIGHUP):
                    signal.signal(ours, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._listener.close()
                for other in (connection, *self._connections.values()):
                    other.close()
                os.setsid()
                # If the server is killed, the caller reports a failure, so the script must also stop.
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
                for place, number in enumerate(files):
                    os.dup2(number, place)
                return request
            self._connections[child] = connection
            _send(connection, {"started": child})
            ready.register(connection, selectors.EVENT_READ, child)
            return None
        finally:
            for number in files:
                if number > 2:
                    os.close(number)

    def _stale(self, request: Mapping[str, Any]) -> str:
        """Return the reason why this server cannot run a request, or an empty string if it can."""
        if request["modules"] != self._modules:
            return f"the previous server had imported {', '.join(self._modules)}"
        requested = _import_variables(request["environment"])
        for name in sorted({*requested, *self._environment}):
            if requested.get(name) != self._environment.get(name):
                return f"{name} has changed"
        for path, state in self._loaded.items():
            if _state_of(path) != state:
                return f"{Path(path).name} has changed"
        return ""

    def _forward(self, child: int, ready: selectors.BaseSelector) -> None:
        """Forward a caller's signals. If the caller has exited, send SIGHUP, as a closing terminal does."""
        connection = self._connections[child]
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or bytes([signal.SIGHUP]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, number)
        if not numbers:
            ready.unregister(connection)
            connection.shutdown(socket.SHUT_RDWR)

    def _reap(self, ready: selectors.BaseSelector) -> None:
        while self._connections:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            connection = self._connections.pop(child)
            with contextlib.suppress(KeyError):
                ready.unregister(connection)
            _finish(connection, {"status": os.waitstatus_to_exitcode(status)})

    def _close(self, ready: selectors.BaseSelector) -> None:
        """Stop accepting requests, and remove the socket, so that a new server can start."""
        if self._open:
            self._open = False
            self._path.unlink(missing_ok=True)
            ready.unregister(self._listener)
            self._listener.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a request and the caller's three standard streams. Raises OSError, ValueError, EOFError."""
    user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    head, files, _flags, _address = socket.recv_fds(connection, _LENGTH.size, 3)
    try:
        if user != os.getuid() or len(files) != 3:
            raise ValueError("the request must come from the server's own user, with three standard streams")
        (length,) = _LENGTH.unpack(head)
        body = b""
        while len(body) < length:
            chunk = connection.recv(length - len(body))
            if not chunk:
                raise EOFError("the request is incomplete")
            body += chunk
        return dict(json.loads(body)), files
    except BaseException:
        for number in files:
            os.close(number)
        raise


def _send(connection: socket.socket, response: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(response).encode() + b"\n")


def _finish(connection: socket.socket, response: Mapping[str, Any]) -> None:
    """Send the final response."""
    _send(connection, response)
    connection.close()


def _import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_IMPORT_VARIABLES) and name != _AUTOLOAD
    }


def _mapped_files() -> dict[str, tuple[int, ...]]:
    """Find the files that the server executes: libraries, extension modules, this file and torch's ``__init__``."""
    with Path("/proc/self/maps").open() as lines:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in lines if line.count("/")}
    own = {name for name in (__file__, getattr(sys.modules.get("torch"), "__file__", None)) if name}
    return {path: _state_of(path) for path in sorted({*mapped, *own}) if path.startswith("/")}


def _state_of(path: str) -> tuple[int, ...]:
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# A run ---------------------------------------------------------------------------------------------------------------


def _set_up(request: Mapping[str, Any]) -> dict[str, Any]:
    """Set up this process as if the caller had started it, and return the namespace of its ``__main__`` module."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(int(request["umask"]))
    os.chdir(request["folder"])
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = open(  # noqa: SIM115
            number,
            mode,
            buffering=1 if mode == "w" and (name == "stderr" or os.isatty(number)) else -1,
            errors="backslashreplace" if name == "stderr" else None,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first, *arguments = request["words"]
    main_module = types.ModuleType("__main__")
    main_module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    if first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path[0] = ""
    else:
        sys.argv = [first, *arguments]
        sys.path[0] = str(Path(first).resolve().parent)
        main_module.__file__ = first
    sys.modules["__main__"] = main_module
    if "numpy.random" in sys.modules:  # Without a new seed, all runs would use the same numbers.
        sys.modules["numpy.random"].seed()
    torch = sys.modules.get("torch")
    if torch is not None and request["environment"].get(_AUTOLOAD, "1") == "1":
        load = getattr(torch, "_import_device_backends", None)
        if load is not None:
            load()
    return main_module.__dict__


def _excepthook(kind: type[BaseException], fault: BaseException, trace: types.TracebackType | None) -> None:
    """Print an exception as Python does, with a traceback that starts in the script."""
    step = trace
    while step is not None and step.tb_frame.f_code is not _execute.__code__:
        step = step.tb_next
    shown = step.tb_next if step is not None else trace
    sys.__excepthook__(kind, fault.with_traceback(shown), shown)


def _execute(request: Mapping[str, Any]) -> None:
    """Run the script as the last action of this process. An uncaught exception terminates the process, as in Python."""
    names = _set_up(request)
    sys.excepthook = _excepthook
    first, *arguments = request["words"]
    source: str | bytes = arguments[0] if first == "-c" else Path(first).read_bytes()
    exec(compile(source, "<string>" if first == "-c" else first, "exec", dont_inherit=True), names)  # noqa: S102


def _exit_early(statuses: Sequence[int], imported: Set[str]) -> None:
    """Exit with the status in ``statuses``, if there is one, without destroying the modules in ``imported``.

    The script's modules and objects are destroyed, and its files are flushed.
    """
    if not statuses:
        return
    for name in sys.modules.keys() - imported:
        del sys.modules[name]
    gc.collect()
    try:
        for item in gc.get_objects():  # without the server's objects, because of gc.freeze()
            # isinstance would use the attribute __class__, which can be any code.
            if issubclass(type(item), (io.TextIOBase, io.BufferedIOBase)) and not item.closed and item.writable():
                item.flush()
    except Exception:
        return  # Python destroys all modules, flushes the standard streams and reports the error.
    # With PyDLL, this thread keeps the interpreter's lock, so daemon threads do not run during exit(3).
    ctypes.PyDLL(None).exit(statuses[0])


def _exit_as(status: int) -> int:
    """Return an exit status unchanged. If a signal killed the script, end this process by the same signal.

    A shell ends a loop on Ctrl-C only if SIGINT killed the program in the loop.
    """
    if status >= 0:
        return status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script's process has already dumped core
    with contextlib.suppress(OSError):  # the action of SIGKILL cannot be set
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 128 - status  # process 1 of a container is not killed by its own signals


@contextlib.contextmanager
def _report_ready(number: int) -> Iterator[None]:
    """Write "ready" to the pipe at the end of the ``with`` block.

    If the process exits earlier, the reader gets end-of-file.
    """
    with os.fdopen(number, "w") as pipe:
        yield
        pipe.write("ready")


def _serve(words: Sequence[str]) -> NoReturn:
    listener, ready_pipe, path, idle_s, *modules = words
    sys.argv = ["pitorch.preloaded"]
    statuses: list[int] = []
    imported: set[str] = set()
    # Python and the C library call exit functions in reverse order: first those of the modules and libraries that the
    # script loads, then these, which skip those of the server's. Destroying the server's modules and libraries would
    # copy most of the pages that a run shares with the server.
    atexit.register(_exit_early, statuses, imported)
    with _report_ready(int(ready_pipe)):
        server = _Server(socket.socket(fileno=int(listener)), Path(path), float(idle_s), modules)
    request = server.serve()
    imported.update(sys.modules.keys() - {"__main__"})
    libc = ctypes.CDLL(None)
    for last in (libc._exit, libc.fcloseall):  # fcloseall(3) flushes C's streams
        libc.on_exit(last, None)
    status = 0
    try:
        _execute(request)
    except SystemExit as end:
        if end.code is not None and not (isinstance(end.code, int) and 0 <= end.code <= 255):
            raise
        status = end.code or 0
    statuses.append(status)
    raise SystemExit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2:])
    try:
        sys.exit(_exit_as(main(sys.argv[1:])))
    except NotStarted as error:
        print(f"pitorch.preloaded: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)
