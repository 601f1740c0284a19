"""Tests of models and their parameters over TVM's RPC, with servers on this PC."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm_servers
from preloaded_workers import preloaded_workers
from processes import in_group
from registry_parts import small_disk
from remote_kernels import out_of_reach
from waiting import eventually

from device.remote import environment, models, reporting
from device.remote.environment import TvmEnvironment
from device.remote.loader_session import Timing
from device.remote.models import ModelProfile
from recipes.tvm_server.board_server import MAX_BYTES, Parameters
from toolchain import ports, process
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import UserError

SUPPORT = ROOT / "tests" / "support"
QUICK = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)
SENT, KEPT = "sent, and kept on the board", "kept on the board"
CONTENT = bytes(range(256)) * 10_000

# Obtains the parameters in a session, as a model's worker does. Prints how many bytes of them the server has mapped.
OBTAIN = """
import contextlib, pathlib, subprocess, sys
from tvm import rpc
from device.remote import model_worker

port, group, content = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]).read_bytes()
session = rpc.connect("127.0.0.1", port, session_timeout=60)
found = model_worker._parameters(session, session.cpu(), content)
assert found.numpy().tobytes() == content
mapped = set()
for server in subprocess.run(["pgrep", "-g", group], capture_output=True, text=True, check=True).stdout.split():
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{server}/maps").read_text().splitlines()
        mapped |= {line.split()[0] for line in lines if "/pitorch/parameters/" in line}
print("mapped", sum(int(end, 16) - int(begin, 16) for begin, end in (each.split("-") for each in mapped)))
"""

# Sends half of the parameters, and then nothing.
HALF = """
import hashlib, sys, time
from tvm import rpc

content = bytes(100_000)
session = rpc.connect("127.0.0.1", int(sys.argv[1]), session_timeout=int(sys.argv[2]))
keep = session.get_function("pitorch.parameters.keep")
print("kept", repr(str(keep(hashlib.sha256(content).hexdigest(), len(content), 0, content[: len(content) // 2]))))
sys.stdout.flush()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def tvm(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TvmEnvironment]:
    """Install TVM and PyTorch as the task does; yield the environment while the process is in a private network."""
    installed = environment.ready_for_models(product_config)
    with out_of_reach(), preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        yield installed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new cache, and return its folder for parameters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pitorch" / "parameters"


def run(device: str, *, timing: Timing = QUICK, session_s: float = 60, linker: str = "") -> ModelProfile:
    """Profile a small network on a board."""
    settings = {"build": {"folder": "build/test"}, "remote": {"session_limit_s": session_s, "linker": linker}}
    return models.profile(
        load_config(settings), model="remote_models:cnn", target="local", device=device, timing=timing, folder=SUPPORT
    )


def obtained(tvm: TvmEnvironment, board: tvm_servers.Running, content: bytes, tmp_path: Path) -> tuple[str, bool]:
    """Return how a new session obtains the parameters, and whether the server has mapped them."""
    given = tmp_path / "given"
    given.write_bytes(content)
    words = tvm.command("-c", OBTAIN, str(board.port), str(board.process.pid), str(given))
    printed = process.run(words, env=tvm.variables, limit_s=120).output
    lines = printed.split("\n")  # splitlines() would also split at the control character that marks reports
    facts: dict[str, str] = {}
    for line in lines:
        facts |= reporting.parse(line) or {}
    (mapped,) = (int(line.split()[1]) for line in lines if line.startswith("mapped "))
    return facts["parameters"], mapped >= len(content)


def test_tracker_and_second_run_sends_no_parameters(tvm: TvmEnvironment, cache: Path) -> None:
    with tvm_servers.tracker(tvm) as tracker, tvm_servers.board(tvm, key="pi3", tracker_port=tracker.port):
        first, second = (run(f"tracker://127.0.0.1:{tracker.port}/pi3") for _ in range(2))
    assert first.checked == second.checked == 10
    assert (first.parameters, second.parameters) == (SENT, KEPT)
    (file,) = cache.iterdir()
    assert file.name == first.parameters_sha256 == second.parameters_sha256
    assert file.stat().st_size == first.parameter_bytes


def test_model_runs_on_a_board_behind_a_proxy(tvm: TvmEnvironment, cache: Path) -> None:
    with tvm_servers.proxy(tvm) as proxy, tvm_servers.board(tvm, key="far", proxy_port=proxy.port):
        done = run(f"proxy://127.0.0.1:{proxy.port}/far")
    assert (done.checked, done.parameters) == (10, SENT)
    assert [file.name for file in cache.iterdir()] == [done.parameters_sha256]


def test_parameters_are_mapped_and_damage_is_repaired(tvm: TvmEnvironment, cache: Path, tmp_path: Path) -> None:
    with tvm_servers.board(tvm) as board:
        assert obtained(tvm, board, CONTENT, tmp_path) == (SENT, True)
        (file,) = cache.iterdir()
        assert (file.name, file.stat().st_mode & 0o777) == (hashlib.sha256(CONTENT).hexdigest(), 0o600)
        assert {folder.stat().st_mode & 0o777 for folder in (cache, cache.parent, cache.parent.parent)} == {0o700}
        assert obtained(tvm, board, CONTENT, tmp_path) == (KEPT, True)
        for damaged in (b"damaged" + CONTENT[7:], CONTENT[:-1]):
            file.write_bytes(damaged)
            assert obtained(tvm, board, CONTENT, tmp_path) == (SENT, True)
            assert file.read_bytes() == CONTENT
        assert obtained(tvm, board, b"another model", tmp_path) == (SENT, True)
        assert [each.read_bytes() for each in cache.iterdir()] == [b"another model"]


def test_parameters_are_sent_if_they_cannot_be_kept(
    tvm: TvmEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        for cache, reason in ((disk, "No space left on device"), (Path("/dev/null"), "File exists: '/dev/null'")):
            monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
            with tvm_servers.board(tvm) as board:
                expected = f"sent; the board could not keep them ({reason})"
                assert obtained(tvm, board, CONTENT, tmp_path) == (expected, False)
        assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_another_server_gets_the_parameters_each_time(tvm: TvmEnvironment, cache: Path, tmp_path: Path) -> None:
    port = ports.free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
    with tvm_servers._running(tvm, ["-m", "tvm.exec.rpc_server"], words, port) as board:
        for _ in range(2):
            expected = "sent; the server is not pitorch's and does not keep them"
            assert obtained(tvm, board, CONTENT, tmp_path) == (expected, False)
    assert not cache.exists()


@pytest.mark.parametrize("how", ["client killed", "timed out", "server stopped"])
def test_interrupted_transfer_leaves_no_file(tvm: TvmEnvironment, cache: Path, how: str) -> None:
    limit_s = 5 if how == "timed out" else 300
    with tvm_servers.board(tvm) as board:
        before = in_group(board.process.pid)
        words = tvm.command("-c", HALF, str(board.port), str(limit_s))
        with subprocess.Popen(words, env={**os.environ, **tvm.variables}, stdout=subprocess.PIPE) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == b"kept ''\n"
                assert [file.stat().st_size for file in cache.iterdir()] == [50_000]
                if how == "client killed":
                    client.kill()
                if how == "server stopped":
                    board.process.terminate()
                    board.process.wait(60)
                eventually(lambda: list(cache.iterdir()) == [])
                if how != "server stopped":
                    eventually(lambda: in_group(board.process.pid) == before)
            finally:
                client.kill()


SLEEPING = """
#include <fcntl.h>
#include <time.h>
#include <unistd.h>
static inline int slept(clockid_t clock, struct timespec *time) {
  close(creat("MARK", 0600));
  usleep(1000);
  return clock_gettime(clock, time);
}
#define clock_gettime slept
"""
"""A header for the model's driver that creates a file when the model runs, and makes each operator sleep.

A run that takes years would otherwise use a processor until the session ends.
"""


def test_lost_client_of_a_model_leaves_the_cache_only(
    tvm: TvmEnvironment, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended: list[UserError] = []
    header, mark, linker = (tmp_path / name for name in ("sleeping.h", "runs", "linker"))
    header.write_text(SLEEPING.replace("MARK", str(mark)))
    linker.write_text(f'#!/bin/sh\nexec g++ -include {header} "$@"\n')
    linker.chmod(0o700)

    with tvm_servers.board(tvm) as board:
        before = in_group(board.process.pid)

        def endless() -> None:
            try:
                run(f"127.0.0.1:{board.port}", timing=Timing(10**9, 1, 0, 0), session_s=12, linker=str(linker))
            except UserError as fault:
                ended.append(fault)

        thread = threading.Thread(target=endless)
        thread.start()
        eventually(lambda: cache.is_dir() and [len(file.name) for file in cache.iterdir()] == [64])
        assert list(tmp_path.rglob("*.so"))
        eventually(mark.exists)
        client = process.output_of(["pgrep", "-P", str(os.getpid()), "-f", "model_worker"], limit_s=60)
        os.kill(int(client), signal.SIGKILL)
        thread.join()
        assert ended
        eventually(lambda: in_group(board.process.pid) == before)
        eventually(lambda: list(tmp_path.rglob("*.so")) == [])
        assert [len(file.name) for file in cache.iterdir()] == [64]


@pytest.mark.parametrize(
    ("digest", "size", "offset", "found"),
    [
        ("../" + "a" * 61, 4, 0, "not a SHA-256"),
        ("/" + "a" * 63, 4, 0, "not a SHA-256"),
        ("A" * 64, 4, 0, "not a SHA-256"),
        ("a" * 64, 3, 0, "out of order"),
        ("a" * 64, 8, 4, "out of order"),
        ("a" * 64, -1, 0, "out of order"),
    ],
)
def test_invalid_request_is_refused(cache: Path, digest: str, size: int, offset: int, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Parameters().keep(digest, size, offset, b"1234")
    assert not cache.exists()


def test_large_or_wrong_content_is_not_kept(cache: Path) -> None:
    board, digest = Parameters(), hashlib.sha256(b"12345678").hexdigest()
    assert board.keep(digest, MAX_BYTES + 1, 0, b"1234") == "they are larger than 2 GiB"
    assert not cache.exists()
    assert board.keep(digest, 8, 0, b"1234") == ""
    assert board.keep(digest, 8, 4, b"1234") == "the SHA-256 of the received parameters is wrong"
    assert list(cache.iterdir()) == []
    with pytest.raises(ValueError, match="out of order"):
        board.keep(digest, 8, 4, b"5678")
    assert [board.keep(digest, 8, 0, b"1234"), board.keep(digest, 8, 4, b"5678")] == ["", ""]
    assert (cache / digest).read_bytes() == b"12345678"
