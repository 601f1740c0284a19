"""A session with the loader (``loader/loader.cpp``): the board's side of kernels that no TVM runtime serves.

The loader is compiled here for the board, goes there with the session and leaves nothing behind. It answers one request
at a time; each has a deadline here, a little longer than the board's own, so that what passes it is a lost board.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy

from device.remote import faults
from device.remote.address import Address
from device.remote.targets import Target
from nfsroot import access
from nfsroot.layout import Layout
from toolchain import files, process
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, BoardSilent, UserError

SOURCE = Path(__file__).with_name("loader")
TIMED_OUT = 124
"""The loader's exit status when the session's time is up."""
GRACE_S = 10.0
_CONNECT_LIMIT_S = 30.0
_UNSTARTABLE = (126, 127)
_FOREIGN = re.compile(r"Exec format error|Could not open '/lib\S*/ld-|cannot execute")
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)

_UNPACK = (
    "set -e; d=$(mktemp -d /tmp/pitorch-loader.XXXXXX); trap 'rm -rf \"$d\"' EXIT; trap 'exit 129' HUP INT TERM; "
    'head -c {size} >"$d/loader"; chmod 700 "$d/loader"; set +e; TMPDIR=$d "$d/loader" {arguments}'
)
_LOCK = "/tmp/pitorch-loader.lock"  # noqa: S108 - a board's lock, the same for everybody who logs in


@dataclass(frozen=True)
class Timing:
    """How a kernel is timed: runs of one measurement, measurements, their least length, runs before the first."""

    number: int
    repeat: int
    min_repeat_ms: int
    warm_up: int


# -rdynamic: kernels find TVMFFIErrorSetRaisedFromCStrParts in the loader itself. A 32-bit fstat() fails with EOVERFLOW
# on an inode number of 64 bits, which NFS has.
_OPTIONS = (
    *("-std=c++17", "-O2", "-D_FILE_OFFSET_BITS=64", "-Wno-psabi"),
    *("-static-libstdc++", "-static-libgcc", "-rdynamic"),
)


def build_loader(config: Config, target: Target) -> Path:
    """The loader for a target, compiled; kept per source and options. Raises ProgramMissing, CommandFailed."""
    compiler = process.require_program(target.linker(config.remote.linker), f"to compile for {target.title}")
    inputs = " ".join((files.tree_fingerprint(SOURCE, "*.cpp", "*.h"), *_OPTIONS))
    key = hashlib.sha256(inputs.encode()).hexdigest()[:12]
    program = config.build_root / "remote" / f"loader-{target.architecture.debian}-{key}"
    if not program.is_file():
        with files.replacing(program) as aside:
            process.run([compiler, *_OPTIONS, SOURCE / "loader.cpp", "-o", aside, "-ldl", "-pthread"], limit_s=600)
    return program


class LoaderSession:
    """One session; ``close`` ends it, whatever the kernel is doing."""

    def __init__(self, process_: subprocess.Popen[bytes], words: IO[bytes], where: str, session_limit_s: float) -> None:
        self._process = process_
        self._words = words
        self._where = where
        self._limit_s = session_limit_s
        self._queue_limit_s = 0.0
        self._received = b""
        self.model = ""
        """What the board's device tree calls it; empty where there is none."""

    def greet(self, queue_limit_s: float) -> None:
        """Wait until the board is ours. Raises InUse, BoardSilent, PlatformMismatch and what SSH met."""
        self._queue_limit_s = queue_limit_s
        self.model = self._answer(queue_limit_s + _CONNECT_LIMIT_S, greeting=True).partition("; ")[2]

    def load(self, library: Path, entry: str) -> str:
        """Send a kernel; ``entry`` is "-" for a plain one. Returns what runs it. Raises PlatformMismatch."""
        content = library.read_bytes()
        return self._ask(f"load {entry} {len(content)}", content)

    def array(self, values: Any) -> int:
        """Make an array on the board with a copy of ``values``; returns its number."""
        shape = " ".join(map(str, values.shape))
        number = int(self._ask(f"array {values.dtype.kind} {values.dtype.itemsize} {shape}"))
        content = values.tobytes()
        self._ask(f"write {number} {len(content)}", content)
        return number

    def read(self, number: int, like: Any) -> Any:
        """A copy of an array."""
        size = int(self._ask(f"read {number}"))
        return numpy.frombuffer(self._bytes(size, self._deadline()), dtype=like.dtype).reshape(like.shape)

    def run(self, numbers: Sequence[int]) -> float | None:
        """Run the kernel once; returns the seconds of an emulator's model of a board, where there is one."""
        seconds = float(self._ask(f"run {' '.join(map(str, numbers))}"))
        return seconds if seconds > 0 else None

    def time(self, timing: Timing, numbers: Sequence[int]) -> tuple[int, list[float]]:
        """Runs of each measurement, and seconds of one run for each of them."""
        how = f"{timing.number} {timing.repeat} {timing.min_repeat_ms} {timing.warm_up}"
        runs, *seconds = self._ask(f"time {how} {' '.join(map(str, numbers))}").split()
        return int(runs), [float(item) for item in seconds]

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        process.end_group(self._process, polite_s=2)
        if self._process.stdout is not None:
            self._process.stdout.close()

    # The protocol.

    def _deadline(self) -> float:
        return time.monotonic() + self._limit_s + GRACE_S

    def _ask(self, line: str, content: bytes = b"") -> str:
        self.send(f"{line}\n".encode() + content)
        return self._answer(self._limit_s + GRACE_S)

    def send(self, data: bytes) -> None:
        """Write, with a deadline: a board that is gone takes nothing."""
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 - opened as a pipe
        deadline, rest = self._deadline(), memoryview(data)
        while rest:
            _, writable, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise self._told("lost", f"it took nothing more for {self._limit_s + GRACE_S:.0f} s")
            try:
                rest = rest[os.write(pipe.fileno(), rest[: 1 << 16]) :]
            except BrokenPipeError:
                break  # why it ended is told where its answer is read

    def _answer(self, limit_s: float, *, greeting: bool = False) -> str:
        line = self._line(time.monotonic() + limit_s, greeting=greeting)
        state, _, rest = line.partition(" ")
        if state == "ok":
            return rest
        if state != "error":
            raise self._told("lost", f"it answered {line[:100]!r}")
        kind, _, text = rest.partition(" ")
        limit_s = self._queue_limit_s if greeting else self._limit_s
        raise faults.answered(kind, text, where=self._where, limit_s=limit_s)

    def _line(self, deadline: float, *, greeting: bool) -> str:
        while b"\n" not in self._received:
            self._receive(deadline, greeting=greeting)
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def _bytes(self, count: int, deadline: float) -> bytes:
        while len(self._received) < count:
            self._receive(deadline, greeting=False)
        found, self._received = self._received[:count], self._received[count:]
        return found

    def _receive(self, deadline: float, *, greeting: bool) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101 - opened as a pipe
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            if greeting:
                raise self._told("silent", "no answer")
            raise self._told("lost", f"no answer for {self._limit_s + GRACE_S:.0f} s")
        block = os.read(pipe.fileno(), 1 << 16)
        if not block:
            raise self._ended(greeting=greeting)
        self._received += block

    # What went wrong.

    def _said(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace").strip()

    def _ended(self, *, greeting: bool) -> UserError:
        status = self._process.wait(_CONNECT_LIMIT_S)
        said = self._said()
        if status == TIMED_OUT:
            return self._told("timed-out", "the kernel was still running")
        last = said.splitlines()[-1] if said else process.explain_exit(status)
        if greeting:
            unstartable = status in _UNSTARTABLE or _FOREIGN.search(said)
            return self._told("unstartable" if unstartable else "silent", last)
        # Through a shell a signal is 128 and its number.
        ended_by = -status if status < 0 else status - 128
        if ended_by in _CRASHES:
            return self._told("crashed", process.explain_exit(-ended_by))
        return self._told("lost", last)

    def _told(self, kind: str, found: str) -> UserError:
        return faults.told(kind, found, where=self._where, limit_s=self._limit_s)


@contextlib.contextmanager
def session(
    config: Config, target: Target, address: Address, *, libraries: Sequence[Path] = ()
) -> Iterator[LoaderSession]:
    """A session with the board at ``address``; ``libraries`` are folders where the kernel's own libraries are found.

    Raises InUse, BoardSilent and others, as ``LoaderSession`` does.
    """
    program = build_loader(config, target)
    limits = [f"{config.remote.queue_limit_s:g}", f"{config.remote.session_limit_s:g}"]
    sent = b""
    lock = config.build_root / "remote" / "board.lock"
    ssh: access.SshAccess | None = None
    if address.kind in ("tree", "ssh"):
        ssh = _access(config, address)
        sent = program.read_bytes()
        script = _UNPACK.format(size=len(sent), arguments=shlex.join([_LOCK, *limits]))
        argv = ssh.command(["sh", "-c", script])
    elif address.kind == "emulator":
        argv = [*emulator(target.architecture), str(program), str(lock), *limits]
    else:
        argv = [str(program), str(lock), *limits]
    with tempfile.TemporaryFile() as words, contextlib.ExitStack() as stack:
        scratch = stack.enter_context(files.scratch_folder(config.build_root / "remote", "session"))
        variables = {**os.environ, "TMPDIR": str(scratch)}
        if address.kind == "local":
            # There are no QPUs here: libqpu's emulator counts clocks, its interpreter does not.
            variables.setdefault("QPU_BACKEND", "emulator")
        if libraries:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
        try:
            started = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=variables,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as fault:
            raise UserError(
                f"the loader for {target.title} cannot be started",
                expected=f"{argv[0]} to run",
                found=os.strerror(fault.errno or 0),
                fix="./inv doctor says whether foreign programs run, and what to do",
            ) from fault
        opened = LoaderSession(started, words, str(address), config.remote.session_limit_s)
        stack.callback(opened.close)
        stack.enter_context(process.on_interrupt(opened.close))
        try:
            if sent:
                opened.send(sent)
            opened.greet(config.remote.queue_limit_s)
        except BoardSilent as fault:
            known = access.diagnose(ssh, fault.found) if ssh is not None else None
            raise known or fault from fault
        yield opened


def emulator(architecture: Architecture) -> list[str]:
    """The command line that runs a program of another architecture with the cross compiler's own C library.

    Raises ProgramMissing, ArtefactMissing.
    """
    if architecture == host_architecture():
        return []
    name = f"qemu-{architecture.qemu}"
    program = process.require_program(f"{name}-static" if _has(f"{name}-static") else name, "to emulate the board")
    sysroot = Path("/usr") / architecture.gnu
    if not (sysroot / "lib").is_dir():
        raise ArtefactMissing(
            f"there is no C library of {architecture.debian} for the emulator",
            expected=f"{sysroot}/lib, which comes with the cross compiler",
            found="no such folder",
            fix=f"apt-get install g++-{architecture.gnu}",
        )
    return [str(program), "-L", str(sysroot)]


def _has(program: str) -> bool:
    return any((Path(folder) / program).is_file() for folder in os.environ.get("PATH", os.defpath).split(os.pathsep))


def _access(config: Config, address: Address) -> access.SshAccess:
    user, host, port = access.parse_host(address.host)
    if address.kind == "ssh":
        return access.SshAccess(host=host, port=port, user=user)
    layout = Layout.of(config)
    if not layout.client_key.is_file():
        raise ArtefactMissing(
            f"there is no key for {address}",
            expected=f"the exported tree's key, {layout.client_key}",
            found="no such file",
            fix="./inv export-nfsroot; or name a board with a system of its own: ssh://HOST",
        )
    known_hosts = access.pin(layout.known_hosts, config.build_root / "remote" / "known_hosts")
    return access.SshAccess(host=host, port=port, user=user, key=layout.client_key, known_hosts=known_hosts)
