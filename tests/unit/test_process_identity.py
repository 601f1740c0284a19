"""Tests that a process is identified by its process ID, its start time and the boot."""

from __future__ import annotations

import platform
import subprocess
import sys

import psutil
import pytest
from waiting import eventually

from toolchain.process_identity import find, find_recorded, record, running


def wait_for_zombie(pid: int) -> None:
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, interval_s=0.01)


def test_a_recorded_process_is_found_again() -> None:
    identity = record(psutil.Process())
    assert find_recorded(identity) == psutil.Process()


def test_a_reused_number_is_not_the_recorded_process() -> None:
    identity = record(psutil.Process())
    assert find_recorded({**identity, "ticks": int(identity["ticks"]) - 1}) is None


def test_a_record_does_not_outlive_the_boot() -> None:
    identity = record(psutil.Process())
    assert find_recorded({**identity, "boot": "another boot"}) is None


def test_a_clock_step_does_not_affect_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = record(psutil.Process())
    stepped = psutil.boot_time() + 3600
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: stepped)
    assert find_recorded(identity) == psutil.Process()


def test_a_name_with_parentheses_does_not_matter() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (x'); print(flush=True); input()"  # PR_SET_NAME
    argv = [sys.executable, "-c", rename]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)
        assert process.name() == ") R 1 (x"
        assert find_recorded(record(process)) == process
        child.communicate(b"\n")


def test_an_ended_process_can_be_recorded() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    assert find_recorded(record(process)) is None


@pytest.mark.parametrize("identity", [{}, {"pid": 1}, {"pid": 1, "created": 1.5}, {"pid": "x", "boot": "", "ticks": 1}])
def test_a_damaged_record_is_an_error(identity: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        find_recorded(identity)


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["true"]) as child:
        wait_for_zombie(child.pid)
        assert find(child.pid) is None
    assert find(child.pid) is None


def test_a_process_runs_until_its_last_thread_has_ended() -> None:
    number = {"x86_64": 60, "aarch64": 93}.get(platform.machine())  # exit(2), which ends only the calling thread
    if number is None:
        pytest.skip(f"the number of exit(2) on {platform.machine()} is not in this test")
    code = (
        "import ctypes, sys, threading;"
        "threading.Thread(target=sys.stdin.read).start();"
        f"ctypes.CDLL(None).syscall({number}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        wait_for_zombie(child.pid)
        process = find(child.pid)
        assert process is not None
        assert running(process)
        assert child.stdin is not None
        child.stdin.close()
        eventually(lambda: not running(process), interval_s=0.01)
