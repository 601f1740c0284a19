"""Tests of OpenCL kernels over SSH.

The boards are this machine's system, and Debian for arm64 under qemu-user, both with POCL.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from exports import exported_in
from extracted_root import extract_root
from test_opencl import needs_pocl, write
from test_remote_ssh import DEVICE, Running, reachable, share_loader
from waiting import eventually

from device.remote import profiling, targets
from device.remote.loader_session import Timing
from device.remote.profiling import Profile
from flow.context import for_all_targets
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import Config
from toolchain.errors import BoardLost, BoardSilent, PlatformMismatch, UserError

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="the SSH server needs root"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is missing; ./inv installs it"),
]
QUICK = Timing(number=1, repeat=2, min_repeat_ms=0, warm_up=0)
ARM64_PACKAGES = ("base-files", "coreutils", "dash", "ocl-icd-libopencl1", "pocl-opencl-icd")
ROWS = targets._DATA
ENTER = """
cd {root}
for name in dev proc sys; do mount --rbind "/$name" "$name"; done
exec /usr/sbin/chroot . sh -c "$SSH_ORIGINAL_COMMAND"
"""


def needs_compiler() -> None:
    """Skip the test if the loader cannot be compiled for the target."""
    if shutil.which(compiler := targets.load("opencl").linker("")) is None:
        pytest.skip(f"the program {compiler} is missing; ./inv installs it")


def run(board: Running, kernel: str | Path, *, size: int = 0) -> Profile:
    return profiling.profile(board.config, kernel=str(kernel), target="opencl", device=DEVICE, size=size, timing=QUICK)


@pytest.fixture
def board(
    request: pytest.FixtureRequest, product_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """Run a board with this PC's architecture, for which the loader is then compiled."""
    needs_pocl()
    rows, row = targets._DATA.read_text(), 'title = "OpenCL"\ndebian = "arm64"\n'
    assert row in rows
    monkeypatch.setattr(targets, "_DATA", tmp_path / "targets.toml")
    targets._DATA.write_text(rows.replace(row, 'title = "OpenCL"\n'))
    needs_compiler()
    config = exported_in(tmp_path)
    share_loader(product_config, config)
    with reachable(request.getfixturevalue("sshd"), config, tmp_path) as running:
        yield running


def test_opencl_kernel_runs_over_ssh(board: Running, tmp_path: Path) -> None:
    path = write(tmp_path)
    first, second = run(board, path), run(board, path)
    assert (first.checked, first.device) == (96, DEVICE)
    assert first.build.startswith("compiled on the board")
    assert second.build.startswith("binary of an earlier session")
    eventually(lambda: not board.programs("/loader"))


def test_driver_crash_leaves_the_board_usable(board: Running, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"the OpenCL driver crashed on {DEVICE}") as caught:
        run(board, write(tmp_path, ("out[i] =", "out[(long)i << 40] =")))
    assert caught.value.found == "killed by SIGSEGV"
    eventually(lambda: not board.programs("/loader"))
    assert run(board, write(tmp_path)).checked == 96


def test_loader_for_another_architecture_is_refused(
    board: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_DATA", ROWS)
    if host_architecture() == ARCHITECTURES["arm64"]:
        pytest.skip("requires a PC on which the loader for arm64 does not run")
    needs_compiler()
    with pytest.raises(PlatformMismatch, match=f"the loader does not run on {DEVICE}"):
        run(board, write(tmp_path))
    eventually(lambda: not board.programs("/loader"))


def test_lost_connection_leaves_no_opencl_kernel_and_no_file(board: Running, tmp_path: Path) -> None:
    path = write(tmp_path, ("out[i] =", "while (in[i] != 1e30f * i + 7) out[i] ="))
    seen: list[Path] = []

    def computes() -> bool:
        """Return whether a session has loaded the kernel's machine code, as POCL does before it runs a kernel."""
        found = ""
        for pid in board.programs("/loader"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += Path(f"/proc/{pid}/maps").read_text()
        return "/twice.so" in found

    def lose() -> None:
        eventually(computes)
        board.lose(seen)

    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(lose)
        with pytest.raises((BoardLost, BoardSilent)):
            run(board, path)
        lost.result()
    eventually(lambda: not board.programs("/loader"))
    eventually(lambda: not seen[0].parent.exists())


@pytest.fixture
def arm64(sshd: Path, product_config: Config, tmp_path: Path) -> Iterator[Running]:
    """Run a board with POCL in a root for arm64, whose programs qemu-user runs unless this PC has that architecture."""
    needs_compiler()
    shared = for_all_targets(product_config, "trixie")
    shared = replace(shared, image=replace(shared.image, architecture="arm64"))
    variables = "XDG_CACHE_HOME=/tmp/cache POCL_CACHE_DIR=/tmp/pocl"
    with tempfile.TemporaryDirectory() as folder:  # about 500 MB, which pytest would keep
        root = Path(folder) / "root"
        extract_root(shared, "opencl", ARM64_PACKAGES, root, ARCHITECTURES["arm64"])
        for name in ("dev", "proc", "sys", "tmp"):
            (root / name).mkdir(exist_ok=True)
        with reachable(sshd, exported_in(tmp_path), tmp_path, variables, ENTER.format(root=root)) as running:
            remote = replace(running.config.remote, session_limit_s=1800)
            yield replace(running, config=replace(running.config, remote=remote))


@pytest.mark.expensive
@pytest.mark.emulation
@pytest.mark.timeout(3600)
def test_opencl_kernel_runs_on_emulated_arm64(arm64: Running) -> None:
    """LLVM takes minutes to compile a kernel under qemu-user."""
    first, second = run(arm64, "gemm", size=64), run(arm64, "gemm", size=64)
    assert (first.checked, first.device) == (64 * 64, DEVICE)
    assert first.build.startswith("compiled on the board")
    assert second.build.startswith("binary of an earlier session")
    (device,) = first.devices
    for part in ("(CPU, OpenCL ", "aarch64", "driver ", " compute units", "GiB"):
        assert part in device
    assert first.gflops
    if host_architecture() != ARCHITECTURES["arm64"]:
        assert dict(first.rows())["note"].endswith("not measured on hardware")
    eventually(lambda: not arm64.programs("/loader"))
