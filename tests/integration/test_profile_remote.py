"""Tests of TVM kernels on this PC's RPC servers, with TVM's own tracker and proxy in separate processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import sleeping_kernel
import tvm_servers
from preloaded_workers import preloaded_workers
from processes import in_group
from remote_kernels import CRASHING, RIGHT, out_of_reach, write
from waiting import eventually

from device.remote import environment, profiling
from device.remote.environment import TvmEnvironment
from device.remote.loader_session import Timing
from device.remote.profiling import Profile
from recipes.tvm_server.build import SERVER
from toolchain import ports, process
from toolchain.config import Config, load_config
from toolchain.errors import BoardLost, BoardSilent, InUse, PlatformMismatch, ResultMismatch, UserError

QUICK = Timing(number=3, repeat=2, min_repeat_ms=1, warm_up=1)
ENDLESS: dict[str, Any] = {
    "kernel": sleeping_kernel.__file__,
    "timing": Timing(number=10**9, repeat=1, min_repeat_ms=0, warm_up=0),
}
"""A kernel and timing parameters with which a measurement takes years, but hardly any CPU time."""


@pytest.fixture(scope="module")
def tvm(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TvmEnvironment]:
    """Install TVM as the task does; yield the environment while the process is in a private network."""
    installed = environment.ready(product_config)
    with out_of_reach(), preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        yield installed


@pytest.fixture(scope="module")
def tracker(tvm: TvmEnvironment) -> Iterator[tvm_servers.Running]:
    with tvm_servers.tracker(tvm) as running:
        yield running


@pytest.fixture(scope="module")
def direct(tvm: TvmEnvironment) -> Iterator[tvm_servers.Running]:
    """Run a board's RPC server that clients reach directly, without a tracker or proxy."""
    with tvm_servers.board(tvm) as running:
        yield running


def run(device: str, *, queue_s: float = 60, session_s: float = 60, timing: Timing = QUICK, **given: Any) -> Profile:
    """Run profile-remote with time limits."""
    config = load_config(
        {"build": {"folder": "build/test"}, "remote": {"queue_limit_s": queue_s, "session_limit_s": session_s}}
    )
    return profiling.profile(
        config, **{"kernel": "add_one", "target": "local", "timing": timing, **given}, device=device
    )


def holding(device: str, session_s: float) -> tuple[threading.Thread, list[UserError]]:
    """Start an endless measurement in a session.

    Return the session's thread, and a list to which the session's error is added.
    """
    ended: list[UserError] = []

    def hold() -> None:
        try:
            run(device, session_s=session_s, **ENDLESS)
        except UserError as fault:
            ended.append(fault)

    thread = threading.Thread(target=hold)
    thread.start()
    return thread, ended


def until_in_session(board: tvm_servers.Running, sessions: int, ended: list[UserError]) -> None:
    """Wait until the board has had this number of sessions. ``ended`` is the list that ``holding`` returned."""
    eventually(lambda: ended or board.log().count("load_module") >= sessions, board.log)
    assert ended == []


@pytest.mark.parametrize(("kernel", "size"), [("add_one", 0), ("gemm", 64), ("gemm", 33)])
def test_kernel_is_compiled_checked_and_timed_locally(kernel: str, size: int) -> None:
    done = run("local", kernel=kernel, size=size)
    assert done.size == (size or 1024)
    assert done.checked == (1024 if kernel == "add_one" else size * size)
    assert len(done.seconds) == 2
    assert min(done.seconds) > 0
    assert done.gflops == pytest.approx(done.operations / done.mean_s / 1e9)
    assert done.operations == (1024 if kernel == "add_one" else 2 * size**3)
    facts = json.loads(done.as_json())
    assert facts["device"] == "local"
    assert facts["mean_s"] == pytest.approx(done.mean_s)


def test_measurement_has_the_minimum_length() -> None:
    """To measure for at least 100 ms, many runs of a kernel that takes 100 ns are necessary."""
    began = time.monotonic()
    done = run("local", timing=Timing(number=1, repeat=3, min_repeat_ms=100, warm_up=0))
    assert len(done.seconds) == 3
    assert time.monotonic() - began > 0.3
    assert max(done.seconds) < 0.05


def test_user_file_is_a_kernel(tmp_path: Path) -> None:
    done = run("local", kernel=str(write(tmp_path)))
    assert done.kernel == "kernel"
    assert done.gflops is None
    assert dict(done.rows())["GFLOPS"] == "the kernel does not define its operations"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("return tvm.IRModule", "return str", "expected module() to return a tvm.IRModule, found str"),
        ("lambda i: a[i] * 2.0", "lambda i: a[i, i, i] * undefined", "NameError: name 'undefined'"),
        ("def module", "def modul", "does not define module"),
    ],
)
def test_compile_error_is_reported_with_its_line(
    tmp_path: Path, old: str, new: str, found: str, tvm: TvmEnvironment
) -> None:
    with pytest.raises(UserError) as caught:
        run("local", kernel=str(write(tmp_path, RIGHT, (old, new))))
    assert found in caught.value.found
    assert "kernel.py" in caught.value.found


def test_kernel_for_other_arrays_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, RIGHT, ("standard_normal(size,", "standard_normal(size + 1,"))
    with pytest.raises(UserError) as caught:
        run("local", kernel=str(path))
    assert "96" in caught.value.found


def test_local_crash_does_not_crash_the_task(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run("local", kernel=str(write(tmp_path, CRASHING)))
    assert caught.value.found == "killed by SIGSEGV"


def test_direct_session(direct: tvm_servers.Running) -> None:
    done = run(f"127.0.0.1:{direct.port}", kernel="gemm", size=48)
    assert done.checked == 48 * 48
    assert done.device == f"127.0.0.1:{direct.port}"


def test_unknown_key_is_reported_immediately(tvm: TvmEnvironment, tracker: tvm_servers.Running) -> None:
    with pytest.raises(UserError) as caught:
        run(f"tracker://127.0.0.1:{tracker.port}/nobody")
    assert "the tracker offers" in caught.value.found
    with tvm_servers.board(tvm, key="mine") as board, pytest.raises(UserError) as caught:
        run(f"127.0.0.1:{board.port}")
    assert caught.value.found == "the server has a key: connect through its tracker or proxy"


def test_unknown_key_of_a_proxy_is_a_busy_board(tvm: TvmEnvironment) -> None:
    """TVM's proxy makes clients wait until a board connects, so an unknown key has the same effect as a busy board."""
    with tvm_servers.proxy(tvm) as proxy, pytest.raises(InUse) as caught:
        run(f"proxy://127.0.0.1:{proxy.port}/nobody", queue_s=2)
    assert caught.value.expected == "a session within 2 s"
    assert caught.value.found.endswith("or no board with that key is connected to the proxy")


def test_board_behind_a_proxy_is_busy_then_free_then_lost(tvm: TvmEnvironment) -> None:
    with tvm_servers.proxy(tvm) as proxy, tvm_servers.board(tvm, key="far", proxy_port=proxy.port) as board:
        device = f"proxy://127.0.0.1:{proxy.port}/far"
        with pytest.raises(BoardLost) as timed_out:
            run(device, session_s=3, **ENDLESS)
        assert timed_out.value.expected == "completion within 3 s"
        assert run(device).checked == 1024
        served = board.log().count("load_module")
        thread, ended = holding(device, session_s=600)
        until_in_session(board, served + 1, ended)

        def too_many(_: int) -> str:
            with pytest.raises(InUse) as caught:
                run(device, queue_s=6)
            return caught.value.found

        with ThreadPoolExecutor(2) as pool:  # the proxy makes one client wait and rejects the other
            assert all(found.startswith("the board is in another session, or") for found in pool.map(too_many, "ab"))
        process.end_group(board.process, polite_s=0.2)
        thread.join()
    assert [type(item) for item in ended] == [BoardLost]


def test_board_of_tracker_and_proxy_is_busy_or_gone(tvm: TvmEnvironment, tracker: tvm_servers.Running) -> None:
    with tvm_servers.proxy(tvm, tracker.port) as proxy:
        device = f"tracker://127.0.0.1:{tracker.port}/behind"
        with tvm_servers.board(tvm, key="behind", tracker_port=tracker.port, proxy_port=proxy.port) as board:
            assert run(device).checked == 1024
            served = board.log().count("load_module")
            thread, ended = holding(device, session_s=600)
            until_in_session(board, served + 1, ended)
            with pytest.raises(InUse) as caught:
                run(device, queue_s=1)
            assert caught.value.found.startswith("all 1 boards with that key are in sessions")
            with pytest.raises(UserError) as unknown:
                run(f"proxy://127.0.0.1:{proxy.port}/behind")
            assert unknown.value.found == "the proxy has a tracker, which assigns its boards"
        thread.join()
        assert [type(item) for item in ended] == [BoardLost]
        with pytest.raises(InUse) as caught:
            run(device, queue_s=3)
        assert "or disconnected (a proxy does not inform its tracker)" in caught.value.found


def test_unreachable_board_is_silent(direct: tvm_servers.Running, tvm: TvmEnvironment) -> None:
    nobody = f"127.0.0.1:{ports.free_port()}"
    for device in (nobody, f"proxy://{nobody}/key", f"tracker://127.0.0.1:{direct.port}/key"):
        with pytest.raises(BoardSilent) as caught:
            run(device)
        assert caught.value.exit_code == 40


def test_wrong_result_is_reported_with_its_first_index(tmp_path: Path, direct: tvm_servers.Running) -> None:
    wrong = ("return a * numpy.float32(2)", "b = a * numpy.float32(2); b[[70, 90]] = 1e6; return b")
    with pytest.raises(ResultMismatch) as caught:
        run(f"127.0.0.1:{direct.port}", kernel=str(write(tmp_path, RIGHT, wrong)))
    assert "first at index [70]" in str(caught.value)
    assert caught.value.expected.startswith("1000000.0")
    assert "2 of 96 elements differ" in caught.value.found


def test_elements_that_a_kernel_does_not_write_are_found(tmp_path: Path) -> None:
    """The result array is filled with values that no kernel computes."""
    less = ("te.compute((size,), lambda i: a[i] * 2.0", "te.compute((size - 1,), lambda i: a[i] * 2.0")
    with pytest.raises((ResultMismatch, UserError)):
        run("local", kernel=str(write(tmp_path, RIGHT, less)))


def test_kernel_for_another_machine_is_refused(direct: tvm_servers.Running) -> None:
    with pytest.raises(PlatformMismatch) as caught:
        run(f"127.0.0.1:{direct.port}", target="armv7")
    assert re.search(r"the board runs x86-64 \(64-bit\), the code is for ARM \(32-bit\)", caught.value.found)


def test_board_in_a_session_is_busy_and_a_killed_one_is_lost(tvm: TvmEnvironment, tracker: tvm_servers.Running) -> None:
    with tvm_servers.board(tvm) as plain, tvm_servers.board(tvm, key="held", tracker_port=tracker.port) as queued:
        devices = {f"127.0.0.1:{plain.port}": plain, f"tracker://127.0.0.1:{tracker.port}/held": queued}
        held = [holding(device, session_s=600) for device in devices]
        for (device, board), (_, ended) in zip(devices.items(), held, strict=True):
            until_in_session(board, 1, ended)
            with pytest.raises(InUse) as caught:
                run(device, queue_s=1)
            assert caught.value.expected == "a session within 1 s"
            assert "session" in caught.value.found
        for board, (thread, ended) in zip(devices.values(), held, strict=True):
            process.end_group(board.process, polite_s=0.2)
            thread.join()
            assert [type(item) for item in ended] == [BoardLost]


def test_lost_client_leaves_no_process_and_no_file(
    tvm: TvmEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with tvm_servers.board(tvm) as board:
        before = in_group(board.process.pid)
        thread, ended = holding(f"127.0.0.1:{board.port}", session_s=20)
        until_in_session(board, 1, ended)
        sessions = in_group(board.process.pid) - before
        assert sessions
        assert list(tmp_path.rglob("*.so"))
        client = process.run(["pgrep", "-P", str(os.getpid()), "-f", "rpc_worker"], limit_s=60).output
        os.kill(int(client), signal.SIGKILL)
        thread.join()
        assert ended
        eventually(lambda: not sessions & in_group(board.process.pid))
        # If the client dies while it receives a result, the server fails and is restarted.
        eventually(lambda: len(in_group(board.process.pid)) == len(before))
        eventually(lambda: list(tmp_path.rglob("*.so")) == [])


def test_board_returns_to_its_pool_after_a_timeout(tvm: TvmEnvironment, tracker: tvm_servers.Running) -> None:
    """After the timeout, the next client in the tracker's queue gets the board."""
    with tvm_servers.board(tvm, key="short", tracker_port=tracker.port) as board:
        device = f"tracker://127.0.0.1:{tracker.port}/short"
        thread, ended = holding(device, session_s=10)
        until_in_session(board, 1, ended)
        assert run(device, queue_s=120).checked == 1024
        thread.join()
        assert [type(item) for item in ended] == [BoardLost]
        assert ended[0].expected == "completion within 10 s"
        assert run(device, queue_s=30).checked == 1024


def test_board_that_stops_responding_is_lost(tvm: TvmEnvironment) -> None:
    """As in a power failure, the board does not close its connections."""
    with tvm_servers.board(tvm) as board:
        thread, ended = holding(f"127.0.0.1:{board.port}", session_s=8)
        until_in_session(board, 1, ended)
        os.killpg(board.process.pid, signal.SIGSTOP)
        thread.join()
        os.killpg(board.process.pid, signal.SIGCONT)
    assert [type(item) for item in ended] == [BoardLost]
    assert "no response for 18 s" in ended[0].found


def test_board_survives_a_kernel_crash(tmp_path: Path, tvm: TvmEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, TVM's server without the launcher would accept the next connection but never respond."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with tvm_servers.board(tvm) as board:
        device = f"127.0.0.1:{board.port}"
        with pytest.raises(BoardLost):
            run(device, kernel=str(write(tmp_path, CRASHING)))
        eventually(lambda: board.log().count("pitorch: serving at") >= 2, board.log, limit_s=120)
        assert "is being restarted" in board.log()
        assert list(tmp_path.rglob("*.so")) == []
        assert run(device).checked == 1024


def test_session_ends_with_its_server(tvm: TvmEnvironment) -> None:
    """A session that survived its server would keep the port, so that the server could not be restarted."""
    with tvm_servers.board(tvm) as board:
        device = f"127.0.0.1:{board.port}"
        thread, ended = holding(device, session_s=600)
        until_in_session(board, 1, ended)
        (server,) = psutil.Process(board.process.pid).children()
        server.kill()
        thread.join()
        assert [type(item) for item in ended] == [BoardLost]
        eventually(lambda: board.log().count("pitorch: serving at") >= 2, board.log, limit_s=120)
        assert run(device).checked == 1024


def test_server_that_cannot_listen_reports_the_reason(tvm: TvmEnvironment, direct: tvm_servers.Running) -> None:
    argv = [sys.executable, str(SERVER), "--port", str(direct.port)]
    done = subprocess.run(argv, env={**os.environ, **tvm.variables}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    reason = f"cannot bind to any port in [{direct.port}, {direct.port + 1})"
    assert done.stderr == f"pitorch: TVM's server cannot start at 127.0.0.1:{direct.port}: {reason}\n"


@pytest.mark.timeout(600)
def test_six_clients_share_three_boards(tvm: TvmEnvironment, tracker: tvm_servers.Running) -> None:
    with (
        tvm_servers.board(tvm, key="pool", tracker_port=tracker.port) as first,
        tvm_servers.board(tvm, key="pool", tracker_port=tracker.port) as second,
        tvm_servers.board(tvm, key="pool", tracker_port=tracker.port) as third,
    ):
        device = f"tracker://127.0.0.1:{tracker.port}/pool"

        def client(number: int) -> Profile:
            return run(device, size=16 * (number + 1), queue_s=500, session_s=300)

        with ThreadPoolExecutor(6) as pool:
            done = list(pool.map(client, range(6)))
        assert [item.checked for item in done] == [16 * (number + 1) for number in range(6)]
        served = [board.log().count("load_module") for board in (first, second, third)]
        assert sum(served) == 6
        assert min(served) > 0
