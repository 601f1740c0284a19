"""Tests of kernels and models through adb: Debian's adb and adbd, connected over TCP in a private network.

adbd runs in a root with a shell, whose folder /data/local/tmp is like a phone's. Debian's adbd accepts every key, so
the state unauthorized is tested only with a list from adb devices (tests/unit/test_remote_parts.py).

The loader for OpenCL is the program that is sent to phones. Android's C library is not available, so two small
libraries with the same names call glibc for arm64, whose dynamic linker replaces Android's.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from extracted_root import extract_root
from preloaded_workers import preloaded_workers
from remote_kernels import CRASHING, PARALLEL, RIGHT, TEMPORARY, write
from test_opencl import write as write_opencl
from test_opencl_ssh import ARM64_PACKAGES
from waiting import eventually

from device.remote import environment, loader_session, models, phone, profiling, targets
from device.remote.address import parse
from device.remote.loader_session import Timing
from device.remote.models import ModelProfile
from device.remote.profiling import Profile
from flow.context import for_all_targets
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import Config
from toolchain.errors import (
    BoardLost,
    BoardSilent,
    CommandFailed,
    PlatformMismatch,
    ProgramMissing,
    ResultMismatch,
    UserError,
)

QUICK = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)
ENDLESS = Timing(number=10**9, repeat=1, min_repeat_ms=0, warm_up=0)
WIRELESS = "127.0.0.1:5555"
FOUND_BY_PORT = "emulator-5554"  # adb's server looks for Android emulators on this PC's ports
STAND_IN = """
    extern int *__errno_location(void);
    extern int __libc_start_main(int (*)(int, char **, char **), int, char **, void *, void *, void *, void *);

    extern char *strerror_r(int, char *, unsigned long);

    int *__errno(void) { return __errno_location(); }

    char *__gnu_strerror_r(int code, char *text, unsigned long size) { return strerror_r(code, text, size); }

    void __libc_init(long *stack, void *unused, int (*start)(int, char **, char **), void *structors) {
      __libc_start_main(start, (int)*stack, (char **)(stack + 1), 0, 0, 0, stack);
    }
"""
CACHES = {"pitorch", "pocl"}
"""The folders in which the loader and POCL keep compiled kernels."""
LIBRARIES = "/usr/lib/aarch64-linux-gnu"
SUPPORT = Path(__file__).parent.parent / "support"
ADBD = """
root=$1
mount -t tmpfs none "$root/dev"
for name in null zero urandom random; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mount -t proc none "$root/proc"
mount --bind /sys "$root/sys"
chroot "$root" /usr/lib/android-sdk/platform-tools/adbd &
wait || :
exec sleep 600  # as process 1, for the programs that adbd has started
"""

pytestmark = [
    pytest.mark.emulation,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="adbd needs root"),
    pytest.mark.skipif(shutil.which("adb") is None, reason="adb is missing; ./inv installs it"),
]


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork the workers, which compile and do not use the network, from a process that has loaded TVM."""
    with preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        yield


@pytest.fixture(scope="module")
def root(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a phone's root with adbd, a shell and command-line tools."""
    environment.ready(product_config)
    folder = tmp_path_factory.mktemp("phone") / "root"
    packages = ("adbd", "base-files", "coreutils", "dash")
    extract_root(for_all_targets(product_config, "trixie"), "phone", packages, folder, host_architecture())
    (folder / "data/local/tmp").mkdir(parents=True)
    return folder


@pytest.fixture
def network() -> Iterator[None]:
    """Create a private network, because adbd runs commands from everyone who can reach its port."""
    with private_network():
        yield


@pytest.fixture
def adbd(root: Path, network: None) -> Iterator[int]:
    """Run an adbd that accepts connections; yield its process ID."""
    with adbd_in(root) as pid:
        yield pid


@pytest.fixture
def android(root: Path, network: None, tmp_path: Path) -> Iterator[Path]:
    """Run adbd in a copy of the root that has a C library for Android's programs, but no OpenCL."""
    copied = tmp_path / "root"
    process.run(["cp", "--archive", root, copied])
    libraries = Path(f"{copied}{LIBRARIES}")
    libraries.mkdir(exist_ok=True)
    for name in ("ld-linux-aarch64.so.1", "libc.so.6"):
        if not (libraries / name).exists():
            found = process.run([needs_compiler(), f"-print-file-name={name}"]).output.strip()
            shutil.copy(found, libraries)
    add_linker(copied)
    with adbd_in(copied):
        yield copied


@pytest.fixture(scope="module")
def with_driver(product_config: Config, root: Path) -> Iterator[Path]:
    """Make a phone's root whose OpenCL driver is POCL for arm64."""
    shared = for_all_targets(product_config, "trixie")
    shared = dataclasses.replace(shared, image=dataclasses.replace(shared.image, architecture="arm64"))
    with tempfile.TemporaryDirectory() as folder:  # about 500 MB, which pytest would keep
        made = Path(folder) / "root"
        extract_root(shared, "opencl", ARM64_PACKAGES, made, ARCHITECTURES["arm64"])
        process.run(["cp", "--archive", "--remove-destination", f"{root}/.", made])
        add_linker(made)
        yield made


@pytest.fixture
def phone_with_driver(with_driver: Path, network: None) -> Iterator[Path]:
    """Run adbd in the root of a phone with an OpenCL driver."""
    with adbd_in(with_driver):
        yield with_driver


@pytest.fixture
def patient(product_config: Config) -> Config:
    """Return a configuration with a long session limit, because LLVM takes minutes to compile under qemu-user."""
    return dataclasses.replace(product_config, remote=dataclasses.replace(product_config.remote, session_limit_s=1800))


@contextlib.contextmanager
def adbd_in(root: Path) -> Iterator[int]:
    """Run an adbd in a root and wait until it accepts connections; yield its process ID."""
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", ADBD, "sh", str(root)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            eventually(lambda: _accepts(("127.0.0.1", 5555)))
            yield child(child(started.pid))
        finally:
            started.kill()


def add_linker(root: Path) -> None:
    """Add stand-ins for Android's dynamic linker and C library to a root that has glibc for arm64."""
    libraries = Path(f"{root}{LIBRARIES}")
    command = [needs_compiler(), "-x", "c", "-", "-shared", "-fPIC", "-o"]
    process.run([*command, libraries / "libc.so"], stdin=STAND_IN.encode())
    process.run([*command, libraries / "libdl.so"], stdin=b"")
    (root / "system/bin").mkdir(parents=True)
    (root / "system/bin/linker64").symlink_to(f"{LIBRARIES}/ld-linux-aarch64.so.1")


def needs_compiler() -> str:
    """Return the compiler that builds the OpenCL loader. Skip the test if the compiler is missing."""
    compiler = targets.load("opencl").linker("")
    if shutil.which(compiler) is None:
        pytest.skip(f"the program {compiler} is missing; ./inv installs it")
    return compiler


def child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _accepts(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5):
        return True
    return False


def left(root: Path) -> list[str]:
    """List the files left on the phone, except the lock file, which is meant to remain."""
    return [item.name for item in (root / "data/local/tmp").iterdir() if item.name != "pitorch-loader.lock"]


def programs(namespace: str) -> dict[str, float]:
    """Return the programs in adbd's process namespace, except adbd and process 1, with their CPU time in seconds.

    Zombies are left out: process 1 does not wait for programs whose parent has exited.
    """
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (each / "ns/pid").readlink().name != namespace:
                continue
            numbers = dict(line.split(":\t", 1) for line in (each / "status").read_text().splitlines())
            _, name, rest = re.split(r"[()]", (each / "stat").read_text())
            state, user = rest.split()[0], rest.split()[11]
            if name != "adbd" and state != "Z" and numbers["NSpid"].split()[-1] != "1":
                found[f"{name} {each.name}"] = int(user) / os.sysconf("SC_CLK_TCK")
    return found


def computes(namespace: str) -> bool:
    """Return whether a program on the phone has computed for half a second."""
    return any(seconds > 0.5 for seconds in programs(namespace).values())


@pytest.fixture
def namespace(adbd: int) -> str:
    """Return the name of adbd's process namespace."""
    return Path(f"/proc/{adbd}/ns/pid").readlink().name


@pytest.fixture
def kept(root: Path) -> Iterator[Path]:
    """Yield the folder in which the phone keeps the parameters of a model. Remove the folder after the test."""
    folder = root / "data/local/tmp/pitorch"
    yield folder / "parameters"
    shutil.rmtree(folder, ignore_errors=True)


def run_model(config: Config, device: str, target: str = "local", timing: Timing = QUICK) -> ModelProfile:
    return models.profile(
        config, model="remote_models:cnn", target=target, device=device, timing=timing, folder=SUPPORT
    )


def run(config: Config, device: str, kernel: str = "add_one", target: str = "local", timing: Timing = QUICK) -> Profile:
    return profiling.profile(config, kernel=kernel, target=target, device=device, timing=timing)


@contextlib.contextmanager
def own_server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run an adb server on the default port, as if the user had started it."""
    with subprocess.Popen(["adb", "nodaemon", "server"], stderr=subprocess.DEVNULL, cwd=folder) as server:
        try:
            eventually(lambda: _accepts(("127.0.0.1", 5037)))
            yield server
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("local", "adb://"),
        ("local", f"adb://{FOUND_BY_PORT}"),
        ("aarch64", f"adb://{WIRELESS}"),
        ("armv7", f"adb://{WIRELESS}"),
    ],
)
def test_kernel_runs_through_adb_and_leaves_nothing(
    product_config: Config, root: Path, adbd: int, target: str, device: str
) -> None:
    if shutil.which(targets.load(target).linker("")) is None:
        pytest.skip(f"no compiler for {target}")
    done = run(product_config, device, "gemm", target)
    assert (done.checked, done.device, done.backend) == (256 * 256, device, "CPU")
    assert left(root) == []
    assert not _accepts(("127.0.0.1", 5037))


@pytest.mark.parametrize(
    ("target", "device"), [("local", "adb://"), ("aarch64", f"adb://{WIRELESS}"), ("armv7", f"adb://{WIRELESS}")]
)
def test_model_runs_through_adb_and_leaves_parameters(
    product_config: Config, root: Path, namespace: str, kept: Path, target: str, device: str
) -> None:
    if shutil.which(targets.load(target).linker("")) is None:
        pytest.skip(f"no compiler for {target}")
    first, second = (run_model(product_config, device, target) for _ in range(2))
    assert (first.checked, first.device, len(first.seconds)) == (10, device, 4)
    assert all(seconds > 0 for _, seconds in first.operators)
    assert first.peak_memory_bytes > first.work_area_bytes
    assert (first.parameters, second.parameters) == ("sent, and kept on the board", "kept on the board")
    assert first.not_run == ["torch float32 and int8 not run: phones have no Python with PyTorch"]
    assert first.not_run[0] in first.as_html()
    assert [item.name for item in kept.iterdir()] == [first.parameters_sha256]
    assert left(root) == ["pitorch"]
    eventually(lambda: programs(namespace) == {})


def test_kept_library_is_a_shared_library(product_config: Config, adbd: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept.so"
    profiling.profile(product_config, kernel="add_one", target="local", device="adb://", timing=QUICK, keep=kept)
    assert ctypes.CDLL(str(kept)).__tvm_ffi_add_one


def test_faults_of_the_kernel_are_reported(product_config: Config, root: Path, adbd: int, tmp_path: Path) -> None:
    wrong = ("return a * numpy.float32(2)", "b = a * numpy.float32(2); b[70] = 1e6; return b")
    with pytest.raises(ResultMismatch, match=r"first at index \[70\]"):
        run(product_config, "adb://", str(write(tmp_path, RIGHT, wrong)))
    with pytest.raises(UserError) as caught:
        run(product_config, "adb://", str(write(tmp_path, PARALLEL)))
    assert "thread pool" in caught.value.found
    with pytest.raises(UserError) as caught:
        run(product_config, "adb://", str(write(tmp_path, CRASHING)))
    assert "SIGSEGV" in caught.value.found
    assert left(root) == []


def test_kernel_can_allocate_memory(product_config: Config, adbd: int, tmp_path: Path) -> None:
    assert run(product_config, "adb://", str(write(tmp_path, TEMPORARY))).checked == 40000


def test_adb_server_that_does_not_start_is_reported(
    network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adb").write_text("#!/bin/sh\necho out of sockets >&2\nexit 1\n")
    (tmp_path / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(CommandFailed, match="server did not start") as caught, phone.connected(parse("adb://")):
        raise AssertionError
    assert "out of sockets" in caught.value.tail


def test_phone_without_opencl_is_reported(product_config: Config, android: Path) -> None:
    with pytest.raises(UserError, match="adb:// has no usable OpenCL library") as caught:
        run(product_config, "adb://", target="opencl")
    assert caught.value.found.startswith("libOpenCL.so.1: ")
    assert left(android) == []


def test_opencl_library_that_cannot_be_opened_is_named(product_config: Config, android: Path) -> None:
    vendors = android / "vendor/lib64"
    vendors.mkdir(parents=True)
    (vendors / "libOpenCL.so").write_text("text")
    with pytest.raises(UserError, match="adb:// has no usable OpenCL library") as caught:
        run(product_config, "adb://", target="opencl")
    assert caught.value.found.startswith("/vendor/lib64/libOpenCL.so: ")


def test_requests_are_refused_by_the_loader_for_opencl(product_config: Config, android: Path) -> None:
    """After an error, for which the loader uses C++ exceptions, the session continues."""
    with loader_session.session(product_config, targets.load("opencl"), parse("adb://")) as board:
        for request, error in (("dance", "unknown request dance"), ("array f 4 1", "no kernel is loaded")):
            with pytest.raises(UserError) as caught:
                board._ask(request)
            assert caught.value.found == error
        assert board.peak_memory() > 1 << 20
    eventually(lambda: left(android) == [])


def test_phone_without_androids_linker_is_refused(product_config: Config, root: Path, adbd: int) -> None:
    needs_compiler()
    with pytest.raises(PlatformMismatch, match="the loader does not run on adb://") as caught:
        run(product_config, "adb://", target="opencl")
    assert "Android 10" in caught.value.expected
    eventually(lambda: left(root) == [])


@pytest.mark.expensive
@pytest.mark.timeout(3600)
def test_opencl_kernel_runs_on_a_phones_driver(patient: Config, phone_with_driver: Path, tmp_path: Path) -> None:
    first, second = (
        profiling.profile(patient, kernel="gemm", target="opencl", device="adb://", size=64) for _ in range(2)
    )
    first.print()
    second.print()
    assert (first.checked, first.device) == (64 * 64, "adb://")
    assert first.build.startswith("compiled on the board")
    assert second.build.startswith("binary of an earlier session")
    (device,) = first.devices
    for part in ("(CPU, OpenCL ", "aarch64", "driver ", " compute units", "GiB"):
        assert part in device
    path = write_opencl(tmp_path, ("in[i] * 2.0f", "in[i] * factor"))
    with pytest.raises(UserError, match="does not compile on adb://") as caught:
        run(patient, "adb://", str(path), "opencl")
    assert "line 3, column 20: " in caught.value.found
    eventually(lambda: set(left(phone_with_driver)) == CACHES)


@pytest.mark.expensive
@pytest.mark.timeout(3600)
def test_opencl_session_that_fails_leaves_nothing_on_a_phone(
    patient: Config, phone_with_driver: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the OpenCL driver crashed on adb://") as caught:
        run(patient, "adb://", str(write_opencl(tmp_path, ("out[i] =", "out[(long)i << 40] ="))), "opencl")
    assert "SIGSEGV" in caught.value.found
    eventually(lambda: set(left(phone_with_driver)) <= CACHES)

    path = write_opencl(tmp_path, ("out[i] =", "while (in[i] != 1e30f * i + 7) out[i] ="))
    with own_server(tmp_path) as server:

        def lose() -> None:
            eventually(lambda: mapped("/twice.so"), limit_s=1800)
            server.kill()

        losing = threading.Thread(target=lose)
        losing.start()
        with pytest.raises((BoardLost, BoardSilent)):
            run(patient, "adb://", str(path), "opencl")
        losing.join()
    eventually(lambda: not mapped("/twice.so") and set(left(phone_with_driver)) <= CACHES)


def mapped(name: str) -> bool:
    """Return whether a process has mapped a file whose path ends with ``name``, as POCL does to run a kernel."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"{name}\n" in maps.read_text():
                return True
    return False


@pytest.mark.parametrize(("end", "profile"), [("limit", run), ("server", run), ("adbd", run), ("server", run_model)])
def test_lost_phone_is_reported_and_cleaned(
    product_config: Config,
    root: Path,
    adbd: int,
    namespace: str,
    kept: Path,
    tmp_path: Path,
    end: str,
    profile: Callable[..., object],
) -> None:
    limits = dataclasses.replace(product_config.remote, session_limit_s=5 if end == "limit" else 600)
    config = dataclasses.replace(product_config, remote=limits)
    with contextlib.ExitStack() as stack:
        if end != "limit":
            server = stack.enter_context(own_server(tmp_path))
            pid = server.pid if end == "server" else adbd

            def stop() -> None:
                eventually(lambda: computes(namespace), limit_s=600)  # The kernel or model is compiled first.
                os.kill(pid, signal.SIGKILL)

            ending = threading.Thread(target=stop)
            ending.start()
            stack.callback(ending.join)
        with pytest.raises((BoardLost, BoardSilent)):
            profile(config, "adb://", timing=ENDLESS)
    eventually(lambda: set(left(root)) <= {"pitorch"} and programs(namespace) == {})
    assert [item.name.isalnum() for item in kept.glob("*")] == [True] * (profile is run_model)


def test_one_of_several_phones_needs_a_serial_number(
    product_config: Config, root: Path, adbd: int, tmp_path: Path
) -> None:
    with own_server(tmp_path) as server:
        subprocess.run(["adb", "connect", WIRELESS], check=True, stdout=subprocess.DEVNULL)
        with pytest.raises(UserError, match="matches several phones") as caught, phone.connected(parse("adb://")):
            pass
        assert f"{WIRELESS} (" in caught.value.found
        assert FOUND_BY_PORT in caught.value.found
        with phone.connected(parse(f"adb://{FOUND_BY_PORT}")) as words:
            assert words[1:] == ["-s", FOUND_BY_PORT]
        assert server.poll() is None


def test_stopped_phone_is_offline(adbd: int) -> None:
    os.kill(adbd, signal.SIGSTOP)
    with pytest.raises(BoardSilent, match="does not respond") as caught, phone.connected(parse("adb://")):
        pass
    assert caught.value.found == "the state offline"


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("adb://", "no phones"),
        ("adb://0123456789", "no phones"),
        (f"adb://{WIRELESS}", "Connection refused"),
        ("adb://nowhere.invalid:5555", "nowhere.invalid"),
    ],
)
def test_missing_phone_is_reported(network: None, device: str, found: str) -> None:
    with pytest.raises(BoardSilent, match="adb does not find") as caught, phone.connected(parse(device)):
        pass
    assert found in caught.value.found


def test_missing_adb_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing) as caught, phone.connected(parse("adb://")):
        pass
    assert "apt-get install adb" in caught.value.fix
