"""Tests that a process is identified by its process ID and creation time."""

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
    assert find_recorded({**identity, "created": identity["created"] - 60}) is None


@pytest.mark.parametrize("identity", [{}, {"pid": 1}, {"pid": "x", "created": 1}, {"pid": 1, "created": None}])
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
