"""Tests of the loader: plain C kernels on this PC and under emulation, and the end of sessions."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import InterpSegment
from native_parts import CLANG_TIDY_LEFT_OUT, join_sources
from preloaded_workers import preloaded_workers
from registry_parts import small_disk
from remote_kernels import CRASHING, PARALLEL, RIGHT, write

from device.remote import eager, environment, loader_session, profiling, targets
from device.remote.address import parse
from device.remote.loader_session import LoaderSession, Timing
from device.remote.profiling import Profile
from toolchain import process
from toolchain.config import Config, load_config
from toolchain.errors import (
    ArtefactMissing,
    BoardLost,
    BoardSilent,
    CommandFailed,
    DiskFull,
    InUse,
    PlatformMismatch,
    ResultMismatch,
    UserError,
)

QUICK = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)

pytestmark = pytest.mark.emulation


@pytest.fixture(scope="module", autouse=True)
def tvm(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    environment.ready(product_config)
    with preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        yield


def config(queue_s: float = 60, session_s: float = 60) -> Config:
    """Return the tests' configuration with time limits."""
    return load_config(
        {"build": {"folder": "build/test"}, "remote": {"queue_limit_s": queue_s, "session_limit_s": session_s}}
    )


def needs(target: str) -> None:
    """Skip the test if the target's compiler or emulator is missing."""
    wanted = targets.load(target)
    if shutil.which(wanted.linker("")) is None:
        pytest.skip(f"{wanted.linker('')} is missing; ./inv installs it")
    if not any(shutil.which(f"qemu-{wanted.architecture.qemu}{tail}") for tail in ("", "-static")):
        pytest.skip(f"qemu-{wanted.architecture.qemu} is missing; ./inv installs it")


def run(target: str, kernel: str, *, size: int = 0, **limits: Any) -> Profile:
    timing = limits.pop("timing", QUICK)
    return profiling.profile(
        config(**limits), kernel=kernel, target=target, device="emulator", size=size, timing=timing
    )


@pytest.mark.parametrize("sent", [0.5, 1.0])
def test_a_session_without_a_reader_leaves_no_file(tmp_path: Path, sent: float) -> None:
    """The connection is lost while the program is sent, or before the shell reports that the program has crashed."""
    program = b"#!/bin/sh\nkill -SEGV $$\n" + 100_000 * b"\n"
    reader, writer = os.pipe()
    os.close(reader)
    argv = ["sh", "-c", loader_session._unpack(str(tmp_path), program, ["1", "1"])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=writer, stderr=writer) as shell:
        os.close(writer)
        shell.communicate(program[: int(len(program) * sent)], timeout=60)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def local_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script in place of ssh that prints a message, as a login shell may, and runs the command on this PC."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\necho Welcome\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_message_of_a_login_shell_is_ignored(local_ssh: None, library: Path) -> None:
    with loader_session.session(config(), targets.load("local"), parse("ssh://pi")) as session:
        assert session.load(library, "-") == "plain C"


def test_message_of_a_refusing_login_shell_is_reported(local_ssh: None, tmp_path: Path) -> None:
    """A login shell such as nologin writes its message to the standard output."""
    with (tmp_path / "ssh").open("w") as script:
        script.write("#!/bin/sh\necho This account is currently not available.\nexit 1\n")
    with (
        pytest.raises(BoardSilent) as caught,
        loader_session.session(config(), targets.load("local"), parse("ssh://pi")),
    ):
        raise AssertionError("a session without a loader")
    assert caught.value.found == "This account is currently not available."


def test_full_disk_of_a_board_is_reported(local_ssh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "full", "64k") as full:
        monkeypatch.setattr(loader_session, "_SHARED", str(full))
        with (
            pytest.raises(DiskFull, match="ssh://pi has no space for the loader") as caught,
            loader_session.session(config(), targets.load("local"), parse("ssh://pi")),
        ):
            raise AssertionError("a session without a loader")
        assert list(full.iterdir()) == []
    assert "No space left on device" in caught.value.found


@pytest.mark.parametrize(
    ("target", "kernel", "size"),
    [("armv7", "add_one", 0), ("armv7", "add_one", 1), ("armv7", "gemm", 32), ("armv7", "gemm", 7),
     ("aarch64", "gemm", 7)],
)  # fmt: skip
def test_tvm_kernel_runs_without_tvm(target: str, kernel: str, size: int) -> None:
    needs(target)
    done = run(target, kernel, size=size)
    assert done.checked == (size or 1024) ** (2 if kernel == "gemm" else 1)
    assert len(done.seconds) == 2
    assert dict(done.rows())["note"] == "timed under emulation; not measured on hardware"


@pytest.mark.parametrize("chosen", ["", "cortex-a72"])
def test_a_64_bit_loader_gets_the_fast_cpu_unless_one_is_set(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    needs("aarch64")
    if chosen:
        monkeypatch.setenv("QEMU_CPU", chosen)
    else:
        monkeypatch.delenv("QEMU_CPU", raising=False)
    target = targets.load("aarch64")
    with loader_session.session(config(), target, parse("emulator")) as session:
        variables = Path(f"/proc/{session._process.pid}/environ").read_text().split("\0")
    assert f"QEMU_CPU={chosen or target.architecture.emulated_cpu}" in variables


def test_wrong_result_is_reported_with_its_first_index(tmp_path: Path) -> None:
    needs("armv7")
    wrong = ("return a * numpy.float32(2)", "b = a * numpy.float32(2); b[70] = 1e6; return b")
    with pytest.raises(ResultMismatch, match=r"first at index \[70\]"):
        run("armv7", str(write(tmp_path, RIGHT, wrong)))


def test_kernel_rejects_other_arrays_with_its_own_error(tmp_path: Path) -> None:
    needs("armv7")
    path = write(tmp_path, RIGHT, ("standard_normal(size,", "standard_normal(size + 1,"))
    with pytest.raises(UserError) as caught:
        run("armv7", str(path))
    assert "expected to be" in caught.value.found or "96" in caught.value.found


def test_kernel_with_parallel_loops_is_refused(tmp_path: Path) -> None:
    """Without TVM's runtime, the kernel's pointer to the thread pool is null, so the call would crash."""
    needs("armv7")
    with pytest.raises(UserError) as caught:
        run("armv7", str(write(tmp_path, PARALLEL)))
    assert "thread pool" in caught.value.found


def test_linker_that_fails_is_reported() -> None:
    needs("armv7")
    failing = dataclasses.replace(config(), remote=dataclasses.replace(config().remote, linker="false"))
    with pytest.raises(CommandFailed, match="the kernel or model cannot be linked for 32-bit ARM") as caught:
        profiling.profile(failing, kernel="add_one", target="armv7", timing=QUICK)
    assert caught.value.found.startswith(f"{shutil.which('false')}: ")
    assert caught.value.expected == "a linker for arm-linux-gnueabihf"


def test_kernel_crash_is_reported(tmp_path: Path) -> None:
    needs("armv7")
    with pytest.raises(UserError) as caught:
        run("armv7", str(write(tmp_path, CRASHING)))
    assert "SIG" in caught.value.found


def test_session_times_out() -> None:
    needs("armv7")
    endless = Timing(number=10**9, repeat=1, min_repeat_ms=0, warm_up=0)
    with pytest.raises(BoardLost) as caught:
        run("armv7", "add_one", timing=endless, session_s=2)
    assert caught.value.expected == "completion within 2 s"


# -------------------------------------------------------------------------------------- sessions, natively


@pytest.fixture
def board() -> Iterator[LoaderSession]:
    """Start a session with this PC as the board."""
    with loader_session.session(config(), targets.load("local"), parse("emulator")) as session:
        yield session


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a plain C kernel that adds two int16 arrays, and fails if the first element is -1."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.c").write_text(
        """
        #include <stdlib.h>
        #include <unistd.h>
        #include "kernel.h"
        void *pitorch_kernel_allocate(size_t bytes) { return malloc(bytes); }
        void pitorch_kernel_release(void *memory) { free(memory); }
        int pitorch_kernel_run(const pitorch_array *a, int32_t count) {
          if (count != 3 || a[0].bytes != 2 || a[0].kind != 'i') return -1;
          int16_t *x = a[0].data, *y = a[1].data, *z = a[2].data;
          if (x[0] == -1) return -1;
          if (x[0] == -2) sleep(1000);
          for (int64_t i = 0; i < a[0].shape[0]; i++) z[i] = x[i] + y[i];
          return 0;
        }
        const char *pitorch_kernel_error(void) { return "failed on\\nrequest"; }
        const char *pitorch_kernel_backend(void) { return "plain C"; }
        double pitorch_kernel_model_seconds(void) { return 0.25; }
        """
    )
    made = folder / "plain.so"
    process.run(["gcc", "-shared", "-fPIC", f"-I{loader_session.SOURCE}", folder / "plain.c", "-o", made])
    return made


def test_plain_kernel_has_its_own_memory_and_model(board: LoaderSession, library: Path) -> None:
    assert board.load(library, "-") == "plain C"
    x, y = numpy.arange(300, dtype=numpy.int16), numpy.full(300, 7, numpy.int16)
    numbers = [board.array(item) for item in (x, y, numpy.zeros_like(x))]
    assert board.run(numbers) == 0.25
    assert (board.read(numbers[2], x) == x + 7).all()
    runs, seconds = board.time(Timing(number=1, repeat=4, min_repeat_ms=5, warm_up=0), numbers)
    assert runs > 100
    assert len(seconds) == 4


def test_session_continues_after_a_failed_kernel(board: LoaderSession, library: Path) -> None:
    board.load(library, "-")
    numbers = [board.array(numpy.array([value], numpy.int16)) for value in (-1, 1, 0)]
    requests: tuple[Callable[[], object], ...] = (lambda: board.run(numbers), lambda: board.run(numbers[:2]))
    for request in requests:
        with pytest.raises(UserError) as caught:
            request()
        assert caught.value.found == "failed on request"
    good = [board.array(numpy.array([value], numpy.int16)) for value in (1, 2, 0)]
    assert board.run(good) == 0.25


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("dance", "unknown request dance"),
        ("run 5", "no kernel is loaded"),
        ("array f 4 10", "no kernel is loaded"),
        ("load entry many", "a word of the request is missing or is not a number"),
        ("read 3", "there is no array 3"),
        ("map ab 4", "no kernel is loaded"),
        ("keep ../ab 4", "the digest is not hexadecimal"),
        ("x" * 5000, "a line is longer than 4096 characters"),
        ("load e 99999999999", "too many bytes for one request"),
    ],
)
def test_invalid_requests_are_refused(board: LoaderSession, request_: str, error: str) -> None:
    with pytest.raises((UserError, BoardLost)) as caught:
        board._ask(request_)
    assert error in caught.value.found


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("array x 4 10", "unknown element type"),
        ("array f 0 10", "unknown element type"),
        ("array f 4 -1", "negative size"),
        ("array f 4 99999999 99999999", "larger than 2 GiB"),
        ("write 9 0", "there is no array 9"),
        ("time 0 1 0 0", "at least one run"),
        ("time 1 1 0 0 7", "there is no array 7"),
    ],
)
def test_invalid_arrays_are_refused(board: LoaderSession, library: Path, request_: str, error: str) -> None:
    board.load(library, "-")
    with pytest.raises(UserError) as caught:
        board._ask(request_)
    assert error in caught.value.found


def test_board_without_enough_memory_is_reported(board: LoaderSession, library: Path) -> None:
    board.load(library, "-")
    resource.prlimit(board._process.pid, resource.RLIMIT_AS, (1 << 30, 1 << 30))
    with pytest.raises(UserError, match="emulator does not have enough memory"):
        board._ask("array f 4 500000000")
    assert board.array(numpy.zeros(10, numpy.int16)) >= 0


def test_board_without_memory_for_a_library_is_reported_early(board: LoaderSession, tmp_path: Path) -> None:
    """The library must not be interpreted as requests, whose answers would fill the pipe until the session ends."""
    large = tmp_path / "large.so"
    large.write_bytes((b"x" * 40 + b"\n") * 8_000_000)
    resource.prlimit(board._process.pid, resource.RLIMIT_AS, (1 << 28, 1 << 28))
    with pytest.raises(UserError, match="emulator does not have enough memory"):
        board.load(large, "-")


SENT, KEPT = "sent, and kept on the board", "kept on the board"


def parameters_of_a_session(library: Path, content: bytes) -> tuple[bytes, str]:
    """Return the content that a new session maps, and its origin: sent now, or kept by the board."""
    with loader_session.session(config(), targets.load("local"), parse("emulator")) as board:
        board.load(library, "-")
        number, origin = board.parameters(content)
        assert board.peak_memory() > 1 << 20
        return board.read(number, numpy.zeros(len(content), numpy.uint8)).tobytes(), origin


def test_parameters_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = bytes(range(256)) * 1000
    assert parameters_of_a_session(library, content) == (content, SENT)
    (file,) = (tmp_path / "pitorch" / "parameters").iterdir()
    assert file.name == hashlib.sha256(content).hexdigest()
    assert parameters_of_a_session(library, content) == (content, KEPT)
    file.write_bytes(content[:-1])
    assert parameters_of_a_session(library, content) == (content, SENT)
    assert parameters_of_a_session(library, content[:-1]) == (content[:-1], SENT)
    assert not file.exists(), "only the last model's parameters must be kept"


def test_lost_connection_leaves_no_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with loader_session.session(config(), targets.load("local"), parse("emulator")) as board:
        board.send(b"keep ab 1000000\n" + bytes(200000))
    assert list((tmp_path / "pitorch" / "parameters").iterdir()) == []


def test_parameters_that_cannot_be_kept_are_in_memory(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert parameters_of_a_session(library, b"1234") == (b"1234", "sent; the board could not keep them")


def test_library_for_another_machine_is_refused(board: LoaderSession, tmp_path: Path) -> None:
    text = tmp_path / "kernel.so"
    text.write_text("text, longer than any header of an ELF file would be, so that it is looked at")
    with pytest.raises(UserError) as caught:
        board.load(text, "-")
    assert "no ELF header" in caught.value.found
    foreign = shutil.which("arm-linux-gnueabihf-gcc")
    if foreign is None:
        pytest.skip("arm-linux-gnueabihf-gcc is missing; ./inv installs it")
    process.run([foreign, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", text])
    with pytest.raises(PlatformMismatch) as mismatch:
        board.load(text, "-")
    assert mismatch.value.found == "the board runs x86-64 (64-bit), the code is for ARM (32-bit)"


def test_library_without_a_kernel_is_refused(board: LoaderSession, library: Path) -> None:
    with pytest.raises(UserError) as caught:
        board.load(library, "gemm")
    assert "has no __tvm_ffi_gemm" in caught.value.found


def test_second_session_waits_for_the_first() -> None:
    target, address = targets.load("local"), parse("emulator")
    order: list[str] = []

    def second() -> None:
        with loader_session.session(config(queue_s=30), target, address):
            order.append("second")

    with loader_session.session(config(), target, address):
        with (
            pytest.raises(InUse) as caught,
            loader_session.session(config(queue_s=1), target, address),
        ):
            raise AssertionError("two sessions at once")
        assert "process" in caught.value.found
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.3)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as two users")
@pytest.mark.parametrize("program", ["loader", "torch_session"])
def test_two_users_share_the_lock(program: str) -> None:
    built = loader_session.build_loader(config(), targets.load("local")) if program == "loader" else eager.SCRIPT
    # The checkout and its Python may be in a folder that only root can enter.
    python = ["/usr/bin/python3"] if program == "torch_session" else []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        copy = shutil.copy(built, folder)

        def start(user: int) -> subprocess.Popen[bytes]:
            argv = [*python, copy, f"{folder}/lock", "0.1", "60"]
            return subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, group=user, extra_groups=(), umask=0o077
            )

        for user in (65533, 65532):
            with start(user) as session:
                assert session.stdout is not None
                assert session.stdout.readline().startswith(b"ok ")
                if user == 65532:  # the file contains the process ID of the first user's session, which has ended
                    busy, _ = start(65533).communicate(timeout=60)
                    assert busy == b"error busy another session is using the board\n"


def test_lost_connection_ends_a_running_kernel(library: Path) -> None:
    with loader_session.session(config(session_s=600), targets.load("local"), parse("emulator")) as board:
        board.load(library, "-")
        numbers = [board.array(numpy.array([value], numpy.int16)) for value in (-2, 1, 0)]
        board.send(f"run {' '.join(map(str, numbers))}\n".encode())
        assert board._process.stdin is not None
        board._process.stdin.close()
        assert board._process.wait(60) == 1


def test_killed_loader_is_a_lost_board(library: Path) -> None:
    with loader_session.session(config(), targets.load("local"), parse("emulator")) as board:
        board.load(library, "-")
        numbers = [board.array(numpy.array([value], numpy.int16)) for value in (-2, 1, 0)]
        threading.Timer(0.5, board._process.kill).start()
        with pytest.raises(BoardLost) as caught:
            board.run(numbers)
        assert caught.value.found == "killed by SIGKILL"


def test_missing_key_and_unreachable_board_are_reported(tmp_path: Path) -> None:
    needs("armv7")
    target = targets.load("armv7")
    loader = loader_session.build_loader(config(), target)
    given = load_config({"build": {"folder": str(tmp_path / "build")}, "remote": {"queue_limit_s": 1}})
    with (
        pytest.raises(ArtefactMissing, match="no SSH key"),
        loader_session.session(given, target, parse("tree://root@127.0.0.1:9"), loader=loader),
    ):
        raise AssertionError("a session without a board")
    if shutil.which("ssh") is None:
        pytest.skip("ssh is missing; ./inv installs it")
    with (
        pytest.raises(BoardSilent) as caught,
        loader_session.session(given, target, parse("ssh://root@127.0.0.1:9"), loader=loader),
    ):
        raise AssertionError("a session without a board")
    assert "refused" in caught.value.found


# ----------------------------------------------------------------------------------------------- for Android


@pytest.fixture(scope="module")
def android() -> Iterator[ELFFile]:
    """Build the loader for OpenCL on phones."""
    needs("opencl")
    with loader_session.build_android_loader(config(), targets.load("opencl")).open("rb") as stream:
        yield ELFFile(stream)


def test_loader_for_phones_uses_only_names_of_android_10(android: ELFFile) -> None:
    symbols = android.get_section_by_name(".dynsym")
    assert isinstance(symbols, SymbolTableSection)
    named = {symbol.name: symbol["st_shndx"] for symbol in symbols.iter_symbols() if symbol.name}
    assert set(named.values()) == {"SHN_UNDEF"}, (
        "drivers could use symbols that the loader defines, such as those of its C++ library"
    )
    allowed = {name: level for names in loader_session.bionic().values() for name, level in names.items()}
    unused = {"pitorch_linked", "__cxa_pure_virtual"}  # weak, and null on phones
    assert set(named) - set(allowed) <= unused
    assert max(allowed.values()) <= 29


def test_loader_for_phones_needs_only_androids_libraries(android: ELFFile) -> None:
    dynamic = android.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    tags = [tag.entry.d_tag for tag in dynamic.iter_tags()]
    needed = [str(getattr(tag, "needed", "")) for tag in dynamic.iter_tags("DT_NEEDED")]
    assert needed == list(loader_session.bionic())
    assert not {"DT_VERNEED", "DT_TEXTREL", "DT_RPATH", "DT_RUNPATH"} & set(tags)
    kinds = {
        relocation["r_info_type"]
        for section in android.iter_sections()
        if isinstance(section, RelocationSection)
        for relocation in section.iter_relocations()
    }
    r_aarch64 = {"ABS64": 257, "GLOB_DAT": 1025, "JUMP_SLOT": 1026, "RELATIVE": 1027}
    assert kinds <= set(r_aarch64.values())
    assert r_aarch64["JUMP_SLOT"] in kinds


def test_segments_of_the_loader_for_phones_suit_androids_linker(android: ELFFile) -> None:
    """Bionic requires thread-local variables aligned to 64 bytes; phones have pages of 4 KiB or 16 KiB."""
    assert android["e_type"] == "ET_DYN"
    segments = {segment["p_type"]: segment for segment in android.iter_segments()}
    interpreter = segments["PT_INTERP"]
    assert isinstance(interpreter, InterpSegment)
    assert interpreter.get_interp_name() == "/system/bin/linker64"
    assert segments["PT_TLS"]["p_align"] >= 64
    assert segments["PT_TLS"]["p_vaddr"] % segments["PT_TLS"]["p_align"] == 0
    assert all(segment["p_align"] % 16384 == 0 for segment in android.iter_segments("PT_LOAD"))
    assert (segments["PT_GNU_RELRO"]["p_vaddr"] + segments["PT_GNU_RELRO"]["p_memsz"]) % 16384 == 0


def test_function_that_phones_lack_does_not_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("opencl")
    listed = loader_session.BIONIC.read_text()
    assert "libc.so poll 21\n" in listed
    monkeypatch.setattr(loader_session, "BIONIC", tmp_path / "bionic.txt")
    loader_session.BIONIC.write_text(listed.replace("libc.so poll 21\n", ""))
    other = load_config({"build": {"folder": str(tmp_path / "build")}})
    with pytest.raises(CommandFailed) as caught:
        loader_session.build_android_loader(other, targets.load("opencl"))
    assert "undefined reference to `poll'" in caught.value.tail
    assert [item.name for item in (tmp_path / "build/remote").iterdir() if "android" in item.name] == []


# ------------------------------------------------------------------------------------------------ the source

SOURCES = tuple(loader_session.SOURCE / name for name in ("loader.cpp", "opencl.cpp", "android.cpp", "standalone.cpp"))


def test_loader_compiles_without_warnings() -> None:
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
    process.run(["g++", "-std=c++17", "-O1", *warnings, "-fsyntax-only", *SOURCES], limit_s=300)


@pytest.mark.parametrize("left_out", CLANG_TIDY_LEFT_OUT)
def test_clang_tidy_finds_nothing(tmp_path: Path, left_out: str) -> None:
    if shutil.which("clang-tidy") is None:
        pytest.skip("the program clang-tidy is missing; ./inv installs it")
    # The other sources are separate because they declare functions of the C library.
    unit = join_sources(SOURCES[:2], tmp_path / "loader.cpp")
    words = ["clang-tidy", "--quiet", f"--config-file={loader_session.SOURCE / '.clang-tidy'}", f"--checks={left_out}"]
    options = ["-std=c++17", f"-I{loader_session.SOURCE}"]
    done = process.run([*words, unit, *SOURCES[2:], "--", *options], check=False, limit_s=600)
    assert done.returncode == 0, done.output
