"""Run subprocesses from argument lists with a time limit, and log command lines that can be pasted into a shell.

Each child leads its own session and process group. After an error or Ctrl-C, the entire group is stopped with SIGTERM,
then SIGKILL. If this process is killed, a reaper stops the groups (toolchain.reaper). Error messages explain exit
codes: 127 and ENOENT mean that a program is missing, and 137 usually means that the kernel's out-of-memory killer
stopped the program. A negative code means that a signal stopped the program; the message names the signal.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import errno
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from toolchain import caller, reaper
from toolchain.errors import FIXES, CommandFailed, CommandTimedOut, ProgramMissing, RootNeeded, UserError

DEFAULT_LIMIT_S = 3600.0
_TAIL_LINES = 25
_TERM_WAIT_S = 5.0
_ENGLISH = {"LC_ALL": "C.UTF-8", "LANGUAGE": ""}

_PACKAGES = {
    "qemu-system-aarch64": "qemu-system-arm",
    "ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "ninja": "ninja-build",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
"""The package of each program whose name differs from that of its package."""


@dataclass(frozen=True)
class Completed:
    """The result of a command. ``output`` contains stdout and, if ``merge_stderr`` was true, also stderr."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    seconds: float


def pasteable(argv: Sequence[str | os.PathLike[str]], cwd: Path | None = None) -> str:
    """Return the command as a line that can be pasted into a shell."""
    line = shlex.join(os.fspath(part) for part in argv)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def require_program(name: str, why: str) -> Path:
    """Return the path of the program ``name``.

    Raises ProgramMissing, whose message states the reason ``why`` and the program's package. The sbin folders, which
    are not on an ordinary user's PATH, are also searched.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=search)
    if found is None and "/" in name:
        raise ProgramMissing(
            f"the program {name} is needed {why}",
            expected="an executable program",
            found="another kind of file" if os.path.lexists(name) else "no such file",
            fix="correct the path",
        )
    if found is None:
        raise ProgramMissing(
            f"the program {name} is needed {why}",
            expected=f"{name} on the PATH",
            found="no such program",
            fix=f"apt-get install {_PACKAGES.get(name, name)} (./inv installs it on its first run)",
        )
    return Path(found)


def require_root(why: str, again: str) -> None:
    """Raise RootNeeded unless the user is root.

    The error's fix is the user's command with sudo, or ``again`` if that command is unknown.
    """
    if os.geteuid() != 0:
        raise RootNeeded(
            f"root is needed {why}",
            expected="user id 0",
            found=f"user id {os.geteuid()}",
            fix=caller.as_root(again),
        )


def explain_exit(returncode: int) -> str:
    """Return a description of an exit status."""
    if returncode == -signal.SIGXFSZ:
        return "killed by SIGXFSZ: a file would exceed the file size limit (ulimit -f)"
    if returncode < 0:
        known = -returncode in signal.valid_signals() and -returncode < signal.SIGRTMIN
        return f"killed by {signal.Signals(-returncode).name if known else f'signal {-returncode}'}"
    if returncode == 127:
        return "exit status 127: a program that it calls was not found"
    if returncode == 137:
        return "exit status 137: killed, usually by the kernel because memory ran out"
    return f"exit status {returncode}"


_interruptible: dict[int, Callable[[], object]] = {}
_registry_lock = threading.Lock()


@contextlib.contextmanager
def on_interrupt(end: Callable[[], object]) -> Iterator[None]:
    """Let ``interrupt_all`` call ``end`` while the block runs.

    This is necessary because only the main thread receives Ctrl-C.
    """
    token = id(end)
    with _registry_lock:
        _interruptible[token] = end
    try:
        yield
    finally:
        with _registry_lock:
            _interruptible.pop(token, None)


def interrupt_all() -> None:
    """Stop all programs that threads are waiting for."""
    with _registry_lock:
        pending = list(_interruptible.values())
    for end in pending:
        with contextlib.suppress(Exception):
            end()


class _Reaper:
    """The process that runs toolchain.reaper, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the reaper if it is not running, so that the next program can be registered without delay."""
        self.send("")

    def send(self, line: str) -> None:
        """Write a line to the reaper. If the reaper was killed, start a new one, which receives only later lines."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", reaper.__file__],
                    cwd="/",
                    env={},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(line.encode())
                    self._process.stdin.flush()

    def close(self) -> None:
        """Close the reaper's input, so that it exits, and wait for it."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                self._process.wait()
                self._process = None


_reaper = _Reaper()
atexit.register(_reaper.close)


def tied(
    argv: Sequence[str | os.PathLike[str]], *, output: int | IO[bytes] = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a server in a new session. The kernel terminates the server if this process is killed (prctl(2))."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def reaped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """If the task is killed while the block runs, let the reaper stop the session that ``process`` leads."""
    _reaper.send(f"+{process.pid}\n")
    try:
        yield
    finally:
        _reaper.send(f"-{process.pid}\n")


def end_group(process: subprocess.Popen[bytes], *, polite_s: float = _TERM_WAIT_S) -> None:
    """Stop the process group that ``process`` leads: send SIGTERM and, after ``polite_s`` seconds, SIGKILL.

    The function waits for all members of the group, because a child that ignores SIGTERM outlives the leader.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process.pid, number):
            break
        deadline = time.monotonic() + polite_s
        while time.monotonic() < deadline and _group_runs(process):
            time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(polite_s)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _group_runs(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a member of the group is running; zombies are ignored."""
    if process.poll() is None:
        return True
    return _signal_group(process.pid, 0) and any(group == process.pid for _, group, _ in reaper.running())


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
    stdin: bytes | None = None,
    check: bool = True,
    merge_stderr: bool = True,
    on_line: Callable[[str], None] | None = None,
    log: Path | None = None,
    fix: str = "",
) -> Completed:
    """Run a command to completion and return its output.

    ``env`` extends this process's environment. The locale is set to English, because callers search the output.
    ``on_line`` is called with each line as it is written; the command and its full output are appended to ``log``. If
    ``merge_stderr`` is false, only stdout is returned, and stderr is used only in error messages.

    Raises ProgramMissing if the program is missing, UserError if the kernel does not support the program's format,
    CommandFailed if the command fails, or CommandTimedOut after ``limit_s`` seconds. If ``check`` is false,
    CommandFailed is raised only for a program that cannot be started.
    """
    words = tuple(os.fspath(part) for part in argv)
    began = time.monotonic()
    lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    output: list[bytes] = []
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(_log_sink(log))
        sink(f"$ {pasteable(words, cwd)}\n".encode(errors="surrogateescape"))  # a path may contain any bytes
        watch = stack.enter_context(contextlib.ExitStack())
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_close_pipes, started)

        def end_all() -> None:
            for child in started:
                end_group(child)

        def end_on_fault(
            kind: type[BaseException] | None, _fault: BaseException | None, _trace: TracebackType | None
        ) -> None:
            if kind is not None:
                end_all()

        stack.push(end_on_fault)
        stack.enter_context(on_interrupt(end_all))
        try:
            _reaper.start()
            with deferred_signals():
                started.append(
                    subprocess.Popen(
                        words,
                        cwd=cwd,
                        env={**os.environ, **_ENGLISH, **(env or {})},
                        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT if merge_stderr else subprocess.PIPE,
                        start_new_session=True,
                    )
                )
                watch.enter_context(reaped(started[0]))
        except OSError as fault:
            if cwd is not None and not cwd.is_dir():
                raise
            raise _start_error(words, fault) from fault
        (process,) = started
        try:
            for is_stdout, line in _lines(process, stdin, began + limit_s):
                sink(line)
                text = line.decode(errors="replace")
                lines.append(text)
                if is_stdout:
                    output.append(line)
                if on_line is not None:
                    on_line(text.rstrip("\n"))
            returncode = process.wait(max(0.0, began + limit_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as fault:
            raise CommandTimedOut(
                f"{pasteable(words)} timed out",
                returncode=-signal.SIGTERM,
                tail="".join(lines),
                expected=f"completion within {limit_s:g} s",
                found="still running",
                fix=fix,
            ) from fault
    seconds = time.monotonic() - began
    if check and returncode != 0:
        raise CommandFailed(
            f"{pasteable(words)} failed",
            returncode=returncode,
            tail="".join(lines),
            found=explain_exit(returncode),
            fix=fix,
        )
    return Completed(words, returncode, b"".join(output).decode(errors="replace"), seconds)


def run_attached(argv: Sequence[str], *, cwd: Path) -> int:
    """Run a command that uses this process's standard streams, and return its exit status.

    The command runs in a new session. Ctrl-C is sent to its process group once, and then the command is waited for,
    because it may have servers to stop. A second Ctrl-C terminates it.
    """
    with contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        try:
            _reaper.start()
            with deferred_signals():
                started.append(subprocess.Popen(argv, cwd=cwd, start_new_session=True))
                stack.enter_context(reaped(started[0]))
            return started[0].wait()
        except KeyboardInterrupt:
            for child in started:
                try:
                    if _signal_group(child.pid, signal.SIGINT):
                        child.wait()
                finally:
                    with deferred_signals():
                        end_group(child)
            raise


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP only at the end of the block, so that a newly started child is not lost.

    The signals are not blocked, because the child would inherit the signal mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        for caught, frame in arrived[:1]:
            handlers[caught](caught, frame)


def _close_pipes(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _start_error(words: Sequence[str], fault: OSError) -> UserError:
    line = pasteable(words)
    if fault.errno == errno.ENOENT:
        exists = Path(words[0]).exists()
        if exists:
            fix = f"check the program's first line: file {shlex.quote(words[0])}"
        elif "/" in words[0]:
            fix = "correct the path"
        else:
            fix = f"apt-get install {_PACKAGES.get(words[0], words[0])}"
        return ProgramMissing(
            f"cannot run {line}",
            expected=f"the program {words[0]}" + (" and the interpreter in its first line" if exists else ""),
            found="no such interpreter" if exists else "no such file",
            fix=fix,
        )
    if fault.errno == errno.ENOEXEC:
        return UserError(
            f"cannot run {line}",
            expected="a program for this machine, or a registered emulator for the program",
            found="the kernel does not support the program's format",
            fix="run ./inv doctor, which checks whether programs for other architectures run, and prints the fix",
        )
    if fault.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return CommandFailed(
            f"cannot run {line}",
            returncode=126,
            expected="enough memory, processes and open files to start a program",
            found=os.strerror(fault.errno),
            fix=FIXES[fault.errno],
        )
    return CommandFailed(
        f"cannot run {line}",
        returncode=126,
        expected=f"an executable program at {words[0]}",
        found=os.strerror(fault.errno or 0),
        fix=f"check the file: ls -l {shlex.quote(words[0])}",
    )


def output_of(argv: Sequence[str | os.PathLike[str]], *, limit_s: float = 60.0, cwd: Path | None = None) -> str:
    """Return the stripped standard output of a short command. Raises the same errors as ``run``."""
    return run(argv, limit_s=limit_s, merge_stderr=False, cwd=cwd).output.strip()


@contextlib.contextmanager
def _log_sink(log: Path | None) -> Iterator[Callable[[bytes], object]]:
    if log is None:
        yield lambda _: None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as stream:
        yield stream.write


def _lines(process: subprocess.Popen[bytes], stdin: bytes | None, deadline: float) -> Iterator[tuple[bool, bytes]]:
    """Send ``stdin`` to the process, and yield lines of its stdout and stderr. Raise TimeoutError at ``deadline``."""
    rest: dict[int, bytes] = {}
    stdout_fd = process.stdout.fileno() if process.stdout else -1
    poller = select.poll()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            rest[pipe.fileno()] = b""
            poller.register(pipe, select.POLLIN | select.POLLHUP)
    pending = memoryview(stdin or b"")
    if process.stdin is not None:
        os.set_blocking(process.stdin.fileno(), False)
        poller.register(process.stdin, select.POLLOUT)
    while rest:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        for descriptor, _ in poller.poll(left * 1000):
            if process.stdin is not None and descriptor == process.stdin.fileno():
                try:
                    pending = pending[os.write(descriptor, pending[: 1 << 16]) :]
                except BrokenPipeError:
                    pending = pending[:0]
                if not pending:
                    poller.unregister(descriptor)
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
                    process.stdin = None
                continue
            block = os.read(descriptor, 1 << 16)
            if not block:
                poller.unregister(descriptor)
                if last := rest.pop(descriptor):
                    yield descriptor == stdout_fd, last
                continue
            *whole, rest[descriptor] = (rest[descriptor] + block).split(b"\n")
            for line in whole:
                yield descriptor == stdout_fd, line + b"\n"


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP set ``stop`` while the block runs.

    Only the main thread can handle signals; in other threads, the function has no effect.
    """

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
