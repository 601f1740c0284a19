"""Subprocesses: argument lists only, echoed so that they can be pasted, with a deadline and a clean end.

The child gets a session and a process group of its own. Whatever goes wrong here, Ctrl-C included, ends the whole
group: politely first, then by SIGKILL. Where this process is killed itself, a reaper does that (toolchain.reaper).
Exit codes are translated: 127 and ENOENT to the missing program, 137 to the kernel's out-of-memory killer, negative
ones to the signal's name.
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
from typing import Any

from toolchain import caller, reaper
from toolchain.errors import CommandFailed, CommandTimedOut, ProgramMissing, RootNeeded, UserError

DEFAULT_LIMIT_S = 3600.0
_TAIL_LINES = 25
_POLITE_S = 5.0
_SPOKEN = {"LC_ALL": "C.UTF-8", "LANGUAGE": ""}

_PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "qemu-system-arm": "qemu-system-arm",
    "ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs",
    "docker-registry": "docker-registry",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "cmake": "cmake",
    "ninja": "ninja-build",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "shellcheck": "shellcheck",
}


@dataclass(frozen=True)
class Completed:
    """How a command ended. ``output`` holds stdout, with stderr in it unless that was kept apart."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    seconds: float


def pasteable(argv: Sequence[str | os.PathLike[str]], cwd: Path | None = None) -> str:
    """The command as a line for a shell."""
    line = shlex.join(os.fspath(part) for part in argv)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def require_program(name: str, why: str) -> Path:
    """The program's path; ProgramMissing says what it is needed for and which package has it.

    The sbin folders are searched too: they are not on an ordinary user's PATH.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=search)
    if found is None:
        raise ProgramMissing(
            f"the program {name} is needed {why}",
            expected=f"{name} on the PATH",
            found="no such program",
            fix=f"apt-get install {_PACKAGES.get(name, name)} (./inv does that on its first run)",
        )
    return Path(found)


def require_root(why: str, again: str) -> None:
    """Raise RootNeeded unless this is root; the fix repeats what was typed with sudo, ``again`` where nothing was."""
    if os.geteuid() != 0:
        raise RootNeeded(
            f"root is needed {why}",
            expected="user id 0",
            found=f"user id {os.geteuid()}",
            fix=caller.as_root(again),
        )


def explain_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode < 0:
        known = -returncode in signal.valid_signals() and -returncode < signal.SIGRTMIN
        return f"ended by {signal.Signals(-returncode).name if known else f'signal {-returncode}'}"
    if returncode == 127:
        return "exit status 127: a program it calls was not found"
    if returncode == 137:
        return "exit status 137: killed, nearly always by the kernel because memory ran out"
    return f"exit status {returncode}"


_interruptible: dict[int, Callable[[], object]] = {}
_registry_lock = threading.Lock()


@contextlib.contextmanager
def on_interrupt(end: Callable[[], object]) -> Iterator[None]:
    """While the block runs, ``interrupt_all`` calls ``end``: work in a thread does not see Ctrl-C by itself."""
    token = id(end)
    with _registry_lock:
        _interruptible[token] = end
    try:
        yield
    finally:
        with _registry_lock:
            _interruptible.pop(token, None)


def interrupt_all() -> None:
    """End everything that threads are waiting for."""
    with _registry_lock:
        pending = list(_interruptible.values())
    for end in pending:
        with contextlib.suppress(Exception):
            end()


class _Reaper:
    """The process of toolchain.reaper, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs. A program that starts after this is registered at once."""
        self.tell("")

    def tell(self, line: str) -> None:
        """Write a line to it. One that was killed is replaced, and knows what comes from then on."""
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
        """Let it end."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                self._process.wait()
                self._process = None


_reaper = _Reaper()
atexit.register(_reaper.close)


@contextlib.contextmanager
def reaped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the block runs: the session that ``process`` leads is ended should this process be killed."""
    _reaper.tell(f"+{process.pid}\n")
    try:
        yield
    finally:
        _reaper.tell(f"-{process.pid}\n")


def end_group(process: subprocess.Popen[bytes], *, polite_s: float = _POLITE_S) -> None:
    """End the process group that ``process`` leads: SIGTERM, a wait, then SIGKILL.

    The group may outlive its leader (a child that ignores SIGTERM), so its members are waited for as well.
    """
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process.pid, sign):
            break
        deadline = time.monotonic() + polite_s
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(polite_s)


def _signal_group(group: int, sign: int) -> bool:
    try:
        os.killpg(group, sign)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether the group has a member that runs; one that is dead and only waits for its parent does not count."""
    if process.poll() is None:
        return True
    if not _signal_group(process.pid, 0):
        return False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, group = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) == process.pid and state not in "ZX":
                    return True
    return False


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
    """Run a command to its end and return what it printed.

    ``env`` is laid over this process's environment, in which programs speak English: their words are looked at.
    ``on_line`` sees each line as it comes; ``log`` receives the command and all of its output. With ``merge_stderr``
    false only stdout is returned and stderr is kept for errors.

    Raises ProgramMissing, CommandFailed (unless ``check`` is false, with which only a program that cannot be started
    fails), UserError, or CommandTimedOut after ``limit_s`` seconds.
    """
    words = tuple(os.fspath(part) for part in argv)
    began = time.monotonic()
    lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    kept: list[bytes] = []
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(_log_sink(log))
        sink(f"$ {pasteable(words, cwd)}\n".encode())
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
            with signals_put_off():
                started.append(
                    subprocess.Popen(
                        words,
                        cwd=cwd,
                        env={**os.environ, **_SPOKEN, **(env or {})},
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
            raise _not_started(words, fault) from fault
        (process,) = started
        try:
            for is_stdout, line in _lines(process, stdin, began + limit_s):
                sink(line)
                text = line.decode(errors="replace")
                lines.append(text)
                if is_stdout:
                    kept.append(line)
                if on_line is not None:
                    on_line(text.rstrip("\n"))
            returncode = process.wait(max(0.0, began + limit_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as fault:
            raise CommandTimedOut(
                f"{pasteable(words)} was ended at its deadline",
                returncode=-signal.SIGTERM,
                tail="".join(lines),
                expected=f"an end within {limit_s:g} s",
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
    return Completed(words, returncode, b"".join(kept).decode(errors="replace"), seconds)


@contextlib.contextmanager
def signals_put_off() -> Iterator[None]:
    """Have Ctrl-C and what is handled like it wait for the block's end: a child that is just born must not be lost.

    Blocking the signals would not do: the child would inherit that.
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
        for put_off, handler in handlers.items():
            signal.signal(put_off, handler)
        for came, frame in arrived[:1]:
            handlers[came](came, frame)


def _close_pipes(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _not_started(words: Sequence[str], fault: OSError) -> UserError:
    line = pasteable(words)
    if fault.errno == errno.ENOENT:
        there = Path(words[0]).exists()
        return ProgramMissing(
            f"cannot run {line}",
            expected=f"the program {words[0]}" + (" and the interpreter it names" if there else ""),
            found="no such interpreter" if there else "no such file",
            fix=f"look at its first line: file {shlex.quote(words[0])}"
            if there
            else f"apt-get install {_PACKAGES.get(words[0], words[0])}",
        )
    if fault.errno == errno.ENOEXEC:
        return UserError(
            f"cannot run {line}",
            expected="a program of this machine, or an emulator registered for it",
            found="the kernel does not know the program's format",
            fix="./inv doctor says whether foreign programs run, and what to do",
        )
    return CommandFailed(
        f"cannot run {line}",
        returncode=126,
        expected=f"{words[0]} to be a program that may be executed",
        found=os.strerror(fault.errno or 0),
        fix=f"look at it: ls -l {shlex.quote(words[0])}",
    )


def output_of(argv: Sequence[str | os.PathLike[str]], *, limit_s: float = 60.0, cwd: Path | None = None) -> str:
    """Standard output of a short command, stripped; raises as ``run`` does."""
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
    """Lines of stdout and stderr as they come, while ``stdin`` is fed; TimeoutError at the deadline."""
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
def stopped_by_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Let SIGINT, SIGTERM and SIGHUP set ``stop``; yields the list of received signals.

    In other threads than the main thread no signal can be handled, and none is.
    """
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
