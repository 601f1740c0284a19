"""Tests of calls under fakeroot: what is recorded, exceptions, and interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from toolchain import fake_root, files, process
from toolchain.config import ROOT
from toolchain.errors import DiskFull, ProgramMissing

PROBE = """
cd "$0"
touch file
chown 5:7 file
mknod console c 5 1
stat -c '%n %u:%g %t:%T' file console
"""


def test_owners_and_devices_are_recorded_only(tmp_path: Path) -> None:
    seen = fake_root.call(process.output_of, ["sh", "-euc", PROBE, tmp_path], why="to test")
    assert seen.splitlines() == ["file 5:7 0:0", "console 0:0 5:1"]
    assert (tmp_path / "console").is_file()


def test_an_exception_is_raised_with_its_fields(tmp_path: Path) -> None:
    with pytest.raises(DiskFull) as caught:
        fake_root.call(files.require_space, tmp_path, 1 << 60, "a test", why="to test")
    assert caught.value.summary == "not enough disk space for a test"
    assert str(tmp_path) in caught.value.expected


def test_a_missing_fakeroot_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing, match="fakeroot is needed to test") as caught:
        fake_root.call(os.getpid, why="to test")
    assert "apt-get install fakeroot" in caught.value.fix


RUNNER = """
import signal, subprocess, sys
from toolchain import fake_root
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    fake_root.call(subprocess.run, ["sh", "-c", "echo $FAKEROOTKEY; exec sleep 600"], why="to test")
except KeyboardInterrupt:
    sys.exit(130)
"""


def queues() -> set[str]:
    """Return the keys of the message queues on this machine. fakeroot's daemon removes its queues when it stops."""
    return {line.split()[0] for line in Path("/proc/sysvipc/msg").read_text().splitlines()[1:]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_daemon_behind(number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as runner:
        try:
            assert runner.stderr is not None
            key = runner.stderr.readline().strip()
            assert key in queues()
            runner.send_signal(number)
            assert runner.wait(60) == 130
        finally:
            runner.kill()
    eventually(lambda: key not in queues())
    assert not list(tmp_path.iterdir()), "the folder for the call must be removed"
