"""Tests of sessions over SSH: a model in TVM and in the board's PyTorch, and sessions that lose their connection.

The board is this machine's system with an SSH server, in a network namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from exports import exported_in
from ssh_board import ssh_board
from test_models import SUPPORT, description
from test_netboot import bridged, ip
from waiting import eventually

from device.remote import eager, environment, loader_session, models, profiling, targets
from device.remote.address import parse
from device.remote.loader_session import Timing
from device.remote.models import ModelProfile
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.config import ROOT, Config
from toolchain.errors import BoardLost, BoardSilent

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="the SSH server needs root"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is missing; ./inv installs it"),
]
BOARD = "192.168.77.50"
DEVICE = f"tree://root@{BOARD}"
QUICK = Timing(number=1, repeat=2, min_repeat_ms=0, warm_up=0)
ENDLESS = Timing(number=10**9, repeat=1, min_repeat_ms=0, warm_up=0)
BUSY_S = 2.0
"""Processor time that only an endless measurement uses. The loader needs less time to start."""


@dataclass(frozen=True)
class Running:
    """The configuration for sessions on the board, and the board's network namespace."""

    config: Config
    namespace: str

    def programs(self, name: str) -> list[int]:
        """Return the board's processes whose command line contains the name."""
        found = []
        for pid in process.output_of(["ip", "netns", "pids", self.namespace]).split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def loaders(self) -> set[str]:
        """Return the files that running sessions execute.

        Shells that have not started their program yet are ignored.
        """
        words = set()
        for pid in self.programs("/loader"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words |= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        return {word for word in words if word.startswith("/") and word.endswith("/loader")}

    def busy_s(self) -> float:
        """Return the processor time that the sessions' programs have used."""
        total = 0.0
        for pid in self.programs("/loader"):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += psutil.Process(pid).cpu_times().user
        return total

    def lose(self, seen: list[Path]) -> None:
        """Wait until the session's program computes, record its file, and simulate a lost connection."""
        (word,) = eventually(self.loaders)
        seen.append(Path(word))
        eventually(lambda: self.busy_s() > BUSY_S)
        for pid in self.programs("sshd"):
            if b"listener" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def reachable(sshd: Path, config: Config, folder: Path, variables: str = "", enter: str = "") -> Iterator[Running]:
    """Run a board (``ssh_board``) on a private network."""
    with private_network(), bridged("board") as namespace:
        ip("address", "add", "192.168.77.1/24", "dev", "pitorch")
        ip("-n", namespace, "address", "add", f"{BOARD}/24", "dev", "eth0")
        with ssh_board(namespace, sshd, folder / "board", Layout.of(config), variables, enter):
            remote = replace(config.remote, session_limit_s=600, queue_limit_s=600)
            yield Running(replace(config, remote=remote), namespace)


def share_loader(shared: Config, config: Config) -> None:
    """Link the shared build folder's loader for this PC into another build folder, so that it is not compiled again."""
    loader = loader_session.build_loader(shared, targets.load("local"))
    (config.build_root / "remote").mkdir(parents=True)
    (config.build_root / "remote" / loader.name).symlink_to(loader)


@contextlib.contextmanager
def serving(sshd: Path, shared: Config, folder: Path, *, with_torch: bool) -> Iterator[Running]:
    """Run a board. If ``with_torch`` is set, the board's Python imports this PC's PyTorch."""
    tvm = environment.ready_for_models(shared)
    config = exported_in(folder / "100%")  # ssh expands % in its options
    share_loader(shared, config)
    (config.build_root / "packages").mkdir()
    for site in (tvm.site, *tvm.others):
        (config.build_root / "packages" / site.name).symlink_to(site.resolve())
    with reachable(sshd, config, folder, f"PYTHONPATH={tvm.others[0].resolve()}" if with_torch else "") as board:
        yield board


@pytest.fixture
def board(sshd: Path, product_config: Config, tmp_path: Path) -> Iterator[Running]:
    with serving(sshd, product_config, tmp_path, with_torch=True) as made:
        yield made


def run(board: Running, model: str) -> ModelProfile:
    return models.profile(board.config, model=model, target="local", device=DEVICE, timing=QUICK, folder=SUPPORT)


def test_model_runs_in_tvm_and_in_the_boards_torch(board: Running) -> None:
    done = run(board, "remote_models:cnn")
    assert done.checked == 10
    assert [item.precision for item in done.eager] == ["float32", "int8"]
    assert done.not_run == []
    for item in done.eager:
        assert len(item.seconds) == 2
        assert item.torch.startswith("2.13")
    assert done.eager[0].difference < 1e-4 <= done.eager[1].largest
    eventually(lambda: not board.programs("/loader"))


def test_a_kernel_runs_on_a_place_of_the_lab(sshd: Path, product_config: Config, tmp_path: Path) -> None:
    """Other processes access the lab, because gRPC's threads in this process may be in another network namespace."""
    with serving(sshd, product_config, tmp_path, with_torch=False) as board:
        settings = {
            "INVOKE_BUILD_FOLDER": str(board.config.build.folder),
            "INVOKE_NFS_FOLDER": str(board.config.nfs.folder),
            "INVOKE_LAB_BOARDS": f"pi3=root@{BOARD} model=pi3",
        }

        def inv(*words: str) -> str:
            argv = [sys.executable, "-m", "toolchain.cli", *words]
            return process.run(argv, cwd=ROOT, env=settings, limit_s=300).output

        inv("lab", "up")
        try:
            done = inv("profile-remote", "--kernel=gemm", "--target=local", "--device=place://pi3")
            assert f"gemm on {DEVICE}:22" in done
            assert "65536 elements agree with the reference" in done
            assert [line.split()[-1] for line in inv("lab", "status").splitlines() if " pi3 " in line] == ["free"]
        finally:
            inv("lab", "down")
        eventually(lambda: not board.programs("/loader"))


def test_board_without_torch_is_named_in_the_result(sshd: Path, product_config: Config, tmp_path: Path) -> None:
    with serving(sshd, product_config, tmp_path, with_torch=False) as board:
        done = run(board, "remote_models:cnn")
    assert done.checked == 10
    (line,) = done.not_run
    assert line.startswith("torch float32 and int8 not run: ")
    assert line.endswith(" has no torch")


def test_lost_connection_leaves_no_kernel_and_no_file(board: Running) -> None:
    seen: list[Path] = []
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(board.lose, seen)
        with pytest.raises((BoardLost, BoardSilent)):
            profiling.profile(board.config, kernel="add_one", target="local", device=DEVICE, timing=ENDLESS)
        lost.result()
    eventually(lambda: not board.programs("/loader"))
    eventually(lambda: not seen[0].parent.exists())


def test_lost_connection_leaves_no_torch_and_no_file(board: Running) -> None:
    seen: list[Path] = []
    with ThreadPoolExecutor(1) as pool:
        address, target = parse(DEVICE), targets.load("local")
        tvm = environment.ready_for_models(board.config)
        found = pool.submit(eager.measure, board.config, target, address, description(runs=10**9), tvm)
        board.lose(seen)
        assert all("lost" in item.reason or "cannot be reached" in item.reason for item in found.result())
    eventually(lambda: not board.programs("/loader"))
    eventually(lambda: not seen[0].parent.exists())
