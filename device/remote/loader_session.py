"""A session with the loader (``loader/loader.cpp``), which runs kernels and models on a board without a TVM runtime.

The loader is compiled on the host, sent to the board for each session, and removed at the end of the session. The
loader handles one request at a time, and exits when the session's time limit is reached. For each request, the host
waits slightly longer than this limit; if there is still no response, the board is considered lost.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy

from device.remote import faults, opencl, phone
from device.remote.address import Address
from device.remote.environment import TvmEnvironment
from device.remote.targets import Target
from nfsroot import access, host_keys
from nfsroot.layout import Layout
from toolchain import files, process, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, BoardSilent, UserError

SOURCE = Path(__file__).with_name("loader")
TIMED_OUT = 124
"""The loader's exit status when the session times out."""
GRACE_S = 10.0
_CONNECT_LIMIT_S = 30.0
_UNSTARTABLE = (126, 127)
_FOREIGN = re.compile(
    r"Exec format error|Could not open '/(lib\S*/ld-|system/bin/linker)|cannot execute|CANNOT LINK EXECUTABLE"
)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)

_UNPACK = (
    "set -e; d=; trap 'rm -rf \"$d\"' EXIT; trap 'exit 129' HUP INT PIPE TERM"
    "; d=$(mktemp -d {folder}/pitorch-loader.XXXXXX)"
    '; head -c {size} >"$d/loader"; [ "$(wc -c <"$d/loader")" -eq {size} ]; chmod 700 "$d/loader"'
    '; set +e; TMPDIR=$d "$d/loader" {arguments}'
)
_SHARED = "/tmp"  # noqa: S108 - the board's lock is shared by all users
_SHARED_ON_PHONES = "/data/local/tmp"


@dataclass(frozen=True)
class Timing:
    """How a kernel is timed.

    ``number`` is the number of runs per measurement, ``repeat`` the number of measurements, ``min_repeat_ms`` the
    minimum duration of a measurement, and ``warm_up`` the number of runs before the first measurement.
    """

    number: int
    repeat: int
    min_repeat_ms: int
    warm_up: int


# -rdynamic is needed because kernels call TVMFFIErrorSetRaisedFromCStrParts in the loader. --exclude-libs is needed
# because the board's libraries, such as OpenCL drivers, must use their own libstdc++. _FILE_OFFSET_BITS is needed
# because a 32-bit fstat() fails with EOVERFLOW on NFS, which has 64-bit inode numbers.
_COMPILE = ("-std=c++17", "-O2", "-D_FILE_OFFSET_BITS=64", "-Wno-psabi")
_LINK = ("-static-libstdc++", "-static-libgcc", "-rdynamic", "-Wl,--exclude-libs,ALL")
_LIBRARIES = ("-ldl", "-pthread")
_RELOCATABLE = ("-r", "-nostdlib")
_SOURCES = (SOURCE / "loader.cpp", SOURCE / "opencl.cpp")

# These options are for Android's C library (android.cpp). Android's linker supports neither text relocations nor
# segments whose alignment is less than the phone's page size.
_FOR_ANDROID = (
    *("-std=c++17", "-O2", "-fPIE", "-ffunction-sections", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    *("-mno-outline-atomics", "-pie", "-nostdlib", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL"),
    *("-Wl,--hash-style=gnu", "-Wl,-z,text", "-Wl,-z,max-page-size=16384", "-Wl,-z,common-page-size=16384"),
    "-Wl,--dynamic-linker=/system/bin/linker64",
)
_ANDROID_LIBRARIES = ("-l:libstdc++.a", "-l:libgcc_eh.a", "-l:libgcc.a")
BIONIC = SOURCE / "bionic.txt"


def build_loader(config: Config, target: Target) -> Path:
    """Link the loader for a target, unless a loader from the same source, options and compiler exists.

    Raises ProgramMissing, CommandFailed.
    """
    program = _path(config, target, "loader", (*_COMPILE, *_LINK))
    if not program.is_file():
        parts = _parts(config, target)
        with files.replacing(program) as staged:
            process.run([_compiler(config, target), *_LINK, parts, "-o", staged, *_LIBRARIES], limit_s=600)
    return program


def build_static_loader(config: Config, target: Target, kernel: Path, entry: str, program: Path) -> None:
    """Link ``program``, a static loader, from the loader's code and an object file with the function ``entry``.

    Raises ProgramMissing, CommandFailed.
    """
    parts = _parts(config, target)
    options = (*_COMPILE, "-static", f"-DPITORCH_ENTRY=__tvm_ffi_{entry}", SOURCE / "linked.cpp")
    process.run([_compiler(config, target), *options, parts, kernel, "-o", program, *_LIBRARIES], limit_s=600)


def build_android_loader(config: Config, target: Target) -> Path:
    """Compile a loader for an Android phone. The loader uses Android's C library, so it can open the phone's libraries.

    The loader is linked against stubs of the phone's libraries, which define only the symbols in bionic.txt.

    Raises ProgramMissing, CommandFailed.
    """
    program = _path(config, target, "android-loader", _FOR_ANDROID)
    if not program.is_file():
        compiler = _compiler(config, target)
        with files.scratch_folder(program.parent, "bionic") as folder, files.replacing(program) as staged:
            stubs = []
            for library, names in bionic().items():
                stubs.append(folder / library)
                shared = ("-shared", "-nostdlib", f"-Wl,-soname,{library}", "-x", "assembler", "-")
                assembly = "".join(f".globl {name}\n.size {name}, 8\n{name}:\n" for name in names)
                process.run([compiler, *shared, "-o", stubs[-1]], stdin=assembly.encode(), limit_s=600)
            sources = (*_SOURCES, SOURCE / "android.cpp")
            process.run([compiler, *_FOR_ANDROID, *sources, "-o", staged, *_ANDROID_LIBRARIES, *stubs], limit_s=600)
    return program


def bionic() -> dict[str, dict[str, int]]:
    """Return, for each Android library, the symbols that the loader may use, with the API level of each symbol."""
    found: dict[str, dict[str, int]] = {}
    for line in BIONIC.read_text().splitlines():
        if not line.startswith("#"):
            library, name, level = line.split()
            found.setdefault(library, {})[name] = int(level)
    return found


def _parts(config: Config, target: Target) -> Path:
    """Compile the loader's code, unless an object file from the same source, options and compiler exists."""
    options = (*_COMPILE, *_RELOCATABLE)
    object_file = _path(config, target, "loader-parts", options)
    if not object_file.is_file():
        compiler = _compiler(config, target)
        with files.replacing(object_file) as staged:
            process.run([compiler, *options, *_SOURCES, "-o", staged], limit_s=600)
    return object_file


def _path(config: Config, target: Target, name: str, options: Sequence[str]) -> Path:
    compiler = _compiler(config, target)
    sources = files.tree_fingerprint(SOURCE, "*.cpp", "*.h", "*.hpp", BIONIC.name)
    inputs = " ".join((sources, *options, str(compiler), _version(compiler)))
    key = hashlib.sha256(inputs.encode()).hexdigest()[:12]
    return config.build_root / "remote" / f"{name}-{target.architecture.debian}-{key}"


def _compiler(config: Config, target: Target) -> Path:
    return process.require_program(target.linker(config.remote.linker), f"to compile for {target.title}")


@functools.cache
def _version(compiler: Path) -> str:
    return process.output_of([compiler, "--version"]).partition("\n")[0]


class LoaderSession:
    """A session with the loader. ``close`` ends the session even if a kernel or model is running."""

    def __init__(
        self, process_: subprocess.Popen[bytes], stderr: IO[bytes], where: str, session_limit_s: float
    ) -> None:
        self._process = process_
        self._stderr = stderr
        self._where = where
        self._limit_s = session_limit_s
        self._queue_limit_s = 0.0
        self._received = b""
        self._message = ""
        self._crash = "crashed"
        self.model = ""
        """The model name in the board's device tree; empty if there is none."""

    def wait_until_ready(self, queue_limit_s: float) -> None:
        """Wait until the board is free. Raises InUse, BoardSilent, PlatformMismatch and errors from SSH."""
        self._queue_limit_s = queue_limit_s
        self.model = self._answer(queue_limit_s + _CONNECT_LIMIT_S, greeting=True).partition("; ")[2]

    def load(self, library: Path | None, entry: str) -> str:
        """Send a kernel and return its backend. Raises PlatformMismatch.

        ``entry`` is "-" for a kernel with the plain C interface (``kernel.h``). Without a library, the kernel that is
        linked into the loader is used.
        """
        content = library.read_bytes() if library is not None else b""
        return self._ask(f"load {entry} {len(content)}", content)

    def devices(self) -> tuple[opencl.Device, ...]:
        """The board's OpenCL devices. Raises UserError if the board has no OpenCL library or no OpenCL device."""
        self._crash = "driver-crashed"
        size = int(self._ask("devices"))
        return opencl.parse_devices(self._bytes(size, self._deadline()).decode(errors="replace"))

    def build(self, number: int, device: opencl.Device, program: opencl.Program) -> tuple[float, bool]:
        """Build an OpenCL kernel. Returns the build time in seconds, and whether the board already had the binary."""
        content = f"{program.options}\n{program.source}".encode()
        words = (number, program.digest(device), program.kernel, program.sizes, len(content))
        kept, seconds, _ = self._ask(f"opencl {' '.join(map(str, words))}", content).split(maxsplit=2)
        return float(seconds), kept == "1"

    def array(self, values: Any) -> int:
        """Create an array on the board with a copy of ``values``. Returns the array's number."""
        shape = " ".join(map(str, values.shape))
        number = int(self._ask(f"array {values.dtype.kind} {values.dtype.itemsize} {shape}"))
        content = values.tobytes()
        self._ask(f"write {number} {len(content)}", content)
        return number

    def parameters(self, content: bytes) -> tuple[int, str]:
        """Memory-map a model's parameter file on the board. Parameters that the board lacks are sent first.

        Returns the number that identifies the array of parameters on the board, and a text that states whether the
        parameters were sent and whether the board keeps them. If the board cannot keep the parameters, for example
        because its disk is full, they are held in memory for this session.
        """
        words = f"{hashlib.sha256(content).hexdigest()} {len(content)}"
        if (found := self._ask(f"map {words}")) != "-":
            return int(found), "kept on the board"
        with progress.step(f"send the parameters, {progress.human_size(len(content))}"):
            self._ask(f"keep {words}", content)
            if (found := self._ask(f"map {words}")) != "-":
                return int(found), "sent, and kept on the board"
            return self.array(numpy.frombuffer(content, numpy.uint8)), "sent; the board could not keep them"

    def torch(self, description: bytes) -> dict[str, Any]:
        """Run a model in the board's PyTorch (``torch_session.py``). Returns the results."""
        size = int(self._ask(f"torch {len(description)}", description))
        return dict(json.loads(self._bytes(size, self._deadline())))

    def peak_memory(self) -> int:
        """The loader's peak memory in bytes; 0 if unknown."""
        return int(self._ask("memory"))

    def read(self, number: int, like: Any) -> Any:
        """Return a copy of an array from the board."""
        size = int(self._ask(f"read {number}"))
        return numpy.frombuffer(self._bytes(size, self._deadline()), dtype=like.dtype).reshape(like.shape)

    def run(self, numbers: Sequence[int]) -> float | None:
        """Run the kernel once.

        Returns the time in seconds that the cycle model of libqpu's emulator estimates, or None if this model is not
        used.
        """
        seconds = float(self._ask(f"run {' '.join(map(str, numbers))}"))
        return seconds if seconds > 0 else None

    def time(self, timing: Timing, numbers: Sequence[int]) -> tuple[int, list[float]]:
        """Measure the kernel's execution time.

        Returns the number of runs per measurement, and the mean time per run in seconds for each measurement.
        """
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

    # Protocol

    def _deadline(self) -> float:
        return time.monotonic() + self._limit_s + GRACE_S

    def _ask(self, line: str, content: bytes = b"") -> str:
        self.send(f"{line}\n".encode() + content)
        return self._answer(self._limit_s + GRACE_S)

    def send(self, data: bytes) -> None:
        """Write data to the loader's input. Raises an error if the board has not read the data by the deadline."""
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 - opened as a pipe
        deadline, rest = self._deadline(), memoryview(data)
        while rest:
            _, writable, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise self._error("lost", f"the board read no data for {self._limit_s + GRACE_S:.0f} s")
            try:
                rest = rest[os.write(pipe.fileno(), rest[: 1 << 16]) :]
            except BrokenPipeError:
                break  # reading the answer then reports the reason

    def _answer(self, limit_s: float, *, greeting: bool = False) -> str:
        deadline = time.monotonic() + limit_s
        line = self._line(deadline, greeting=greeting)
        while greeting and not line.startswith(("ok ", "error ")):  # a message of the board's login shell
            self._message = line
            line = self._line(deadline, greeting=greeting)
        state, _, rest = line.partition(" ")
        if state == "ok":
            return rest
        if state != "error":
            raise self._error("lost", f"unexpected answer {line[:100]!r}")
        kind, _, text = rest.partition(" ")
        limit_s = self._queue_limit_s if greeting else self._limit_s
        if kind == "build":
            text = opencl.compiler_errors(text)
        raise faults.loader_error(kind, text, where=self._where, limit_s=limit_s)

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
                raise self._error("silent", "no answer")
            raise self._error("lost", f"no response for {self._limit_s + GRACE_S:.0f} s")
        block = os.read(pipe.fileno(), 1 << 16)
        if not block:
            raise self._ended(greeting=greeting)
        self._received += block

    # Errors

    def _output(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()

    def _ended(self, *, greeting: bool) -> UserError:
        status = self._process.wait(_CONNECT_LIMIT_S)
        output = self._output()
        if status == TIMED_OUT:
            return self._error("timed-out", "the kernel or model was still running")
        last = output.splitlines()[-1] if output else process.explain_exit(status)
        if greeting and files.NO_ROOM.search(output):
            return self._error("full", last)
        if greeting:
            unstartable = status in _UNSTARTABLE or _FOREIGN.search(output)
            return self._error("unstartable" if unstartable else "silent", last if output else self._message or last)
        # A shell reports a termination by a signal as 128 plus the signal's number.
        ended_by = -status if status < 0 else status - 128
        if ended_by in _CRASHES:
            return self._error(self._crash, process.explain_exit(-ended_by))
        return self._error("lost", last)

    def _error(self, kind: str, found: str) -> UserError:
        return faults.error_of(kind, found, where=self._where, limit_s=self._limit_s)


@contextlib.contextmanager
def session(
    config: Config,
    target: Target,
    address: Address,
    *,
    libraries: Sequence[Path] = (),
    loader: Path | None = None,
    python: TvmEnvironment | None = None,
) -> Iterator[LoaderSession]:
    """A session with the board at ``address``. ``libraries`` are folders with libraries that the kernel needs.

    Phones need a static ``loader``, except for OpenCL kernels. If ``python`` is given, ``loader`` is a Python script.
    If, in addition, the board is this PC, ``python`` runs the script.

    Raises InUse, BoardSilent, and the other errors that ``LoaderSession`` and ``phone.connected`` raise.
    """
    build = build_android_loader if address.kind == "adb" else build_loader
    program = loader or build(config, target)
    limits = [f"{config.remote.queue_limit_s:g}", f"{config.remote.session_limit_s:g}"]
    sent = b""
    lock = config.build_root / "remote" / "board.lock"
    ssh: access.SshAccess | None = None
    if address.kind in ("tree", "ssh"):
        ssh = _access(config, target, address)
        sent = program.read_bytes()
        argv = ssh.command(["sh", "-c", _unpack(_SHARED, sent, limits)])
    elif address.kind == "adb":
        sent = program.read_bytes()
        argv = ["shell", "-T", f"export XDG_CACHE_HOME={_SHARED_ON_PHONES}; {_unpack(_SHARED_ON_PHONES, sent, limits)}"]
    elif address.kind == "emulator":
        argv = [*emulator(target.architecture), str(program), str(lock), *limits]
    else:
        argv = [str(program), str(lock), *limits]
        if python is not None:
            argv = python.command(*argv)
    with tempfile.TemporaryFile() as stderr, contextlib.ExitStack() as stack:
        scratch = stack.enter_context(files.scratch_folder(config.build_root / "remote", "session"))
        variables = {**os.environ, **(python.variables if python is not None else {}), "TMPDIR": str(scratch)}
        if address.kind == "local":
            # A PC has no QPUs. libqpu's emulator is selected because, unlike libqpu's interpreter, it counts clock
            # cycles.
            variables.setdefault("QPU_BACKEND", "emulator")
        if address.kind == "emulator":
            variables = {**target.architecture.emulation, **variables}
        if libraries:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
        if address.kind == "adb":
            argv = [*stack.enter_context(phone.connected(address)), *argv]
        try:
            started = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=variables,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as fault:
            raise UserError(
                f"the loader for {target.title} cannot be started",
                expected=f"the program {argv[0]} to start",
                found=os.strerror(fault.errno or 0),
                fix="run ./inv doctor, which checks whether this PC can run programs for other architectures",
            ) from fault
        opened = LoaderSession(started, stderr, str(address), config.remote.session_limit_s)
        stack.callback(opened.close)
        stack.enter_context(process.on_interrupt(opened.close))
        try:
            if sent:
                opened.send(sent)
            opened.wait_until_ready(config.remote.queue_limit_s)
        except BoardSilent as fault:
            ssh_error = access.diagnose(ssh, fault.found) if ssh is not None else None
            raise ssh_error or fault from fault
        yield opened


def _unpack(folder: str, program: bytes, limits: Sequence[str]) -> str:
    """Return a shell script for the board.

    The script reads the loader from stdin, runs the loader in ``folder``, and then removes the loader.
    """
    arguments = shlex.join([f"{folder}/pitorch-loader.lock", *limits])
    return _UNPACK.format(folder=folder, size=len(program), arguments=arguments)


def emulator(architecture: Architecture) -> list[str]:
    """Return the qemu-user command that runs an architecture's programs with the cross compiler's C library.

    For the PC's own architecture, the command is empty. Raises ProgramMissing, ArtefactMissing.
    """
    if architecture == host_architecture():
        return []
    name = f"qemu-{architecture.qemu}"
    program = shutil.which(f"{name}-static") or process.require_program(name, "to emulate the board")
    sysroot = Path("/usr") / architecture.gnu
    if not (sysroot / "lib").is_dir():
        raise ArtefactMissing(
            f"the emulator's C library for {architecture.debian} is missing",
            expected=f"{sysroot}/lib, which the cross compiler's package installs",
            found="no such folder",
            fix=f"run apt-get install g++-{architecture.gnu}",
        )
    return [str(program), "-L", str(sysroot)]


def _access(config: Config, target: Target, address: Address) -> access.SshAccess:
    user, host, port = access.parse_host(address.host)
    if address.kind == "ssh":
        return access.SshAccess(host=host, port=port, user=user)
    if target.name != "local":  # the board booted the export for the target's architecture
        config = replace(config, image=replace(config.image, architecture=target.architecture.debian))
    layout = Layout.of(config)
    if not layout.client_key.is_file():
        raise ArtefactMissing(
            f"there is no SSH key for {address}",
            expected=f"the exported tree's key, {layout.client_key}",
            found="no such file",
            fix=f"run ./inv export-nfsroot --architecture={config.image.architecture}, or use ssh://HOST for a board "
            "with its own system",
        )
    access.require_readable(layout.client_key, f"./inv profile-remote --device={address}")
    known_hosts = host_keys.pin(layout, config.build_root / "remote" / "known_hosts")
    return access.SshAccess(host=host, port=port, user=user, key=layout.client_key, known_hosts=known_hosts)
