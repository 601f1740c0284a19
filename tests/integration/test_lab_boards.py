"""The device suite on the boards of a lab that run the exported root filesystem."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from device_parts import bootable, elsewhere, write_suite
from lab_parts import eventually, running, with_boards

from device.lab import run, services
from toolchain import ports
from toolchain.config import Config
from toolchain.errors import DeviceTestsFailed


@pytest.mark.expensive
def test_all_boards_run_the_suite_in_parallel(exported_config: Config, tmp_path: Path) -> None:
    tests = write_suite(
        tmp_path / "suite",
        same="def test_same(): pass",
        differs="""
            import os
            def test_first_only(): os.mkdir("/root/first")
        """,
    )
    made = elsewhere(bootable(exported_config), tmp_path / "b")
    folder = run.report_folder(made, run.How())
    try:
        with running(with_boards(made, "qemu1=qemu model=virt", "qemu2=qemu model=virt")) as config:
            with pytest.raises(DeviceTestsFailed) as caught:
                run.on_all(config, run.How(timing=False, suite=tests))
            assert "2 passed, 0 failed" in caught.value.found
            assert "1 passed, 1 failed" in caught.value.found
            assert [board.place.holder for board in services.status(config).boards] == ["", ""]
    finally:
        with contextlib.suppress(FileNotFoundError):
            (made.nfsroot / "tree" / "root" / "first").rmdir()
    suites = list(ElementTree.parse(folder / "junit.xml").getroot().iter("testsuite"))  # noqa: S314 - our own file
    assert sorted(suite.get("name", "") for suite in suites) == ["qemu1", "qemu2"]
    assert len({case.get("classname", "") + case.get("name", "") for suite in suites for case in suite}) >= 4
    page = (folder / "index.html").read_text()
    assert page.index("test_first_only") < page.index("test_same")
    assert "1 of 2 tests differ" in page


SSHD = """
mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && mount -t tmpfs tmpfs "$1/run" && mkdir "$1/run/sshd" &&
exec chroot "$1" /usr/sbin/sshd -D -e -o ListenAddress=127.0.0.1 -p "$2"
"""


@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tree belongs to root")
def test_the_suite_runs_on_a_remote_place(exported_config: Config, tmp_path: Path) -> None:
    """The board is a process that runs the tree's SSH server, emulated, on the loopback address."""
    tests = write_suite(tmp_path / "suite", one="def test_one(): pass")
    made = elsewhere(bootable(exported_config), tmp_path / "b")
    port = ports.free_port()
    words = ["unshare", "-m", "--kill-child", "sh", "-c", SSHD, "sh", str(made.nfsroot / "tree"), str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as board:
        try:
            assert board.stderr is not None
            lines = board.stderr
            eventually(lambda: b"listening" in lines.readline())
            with running(with_boards(made, f"pi3=root@127.0.0.1:{port} model=pi3")) as config:
                done = run.on_place(config, "pi3", run.How(timing=False, suite=tests))
                assert (done.passed, done.failed, done.errors) == (1, 0, 0)
                environment = (run.report_folder(config, run.How()) / "pi3" / "environment.yaml").read_text()
                assert 'RemotePlace:\n        name: "pi3"' in environment
                assert run.on_tagged(config, "model=pi3", run.How(timing=False, suite=tests)).passed == 1
                assert run.check(config).ok
                assert not services.Lab(config).coordinator.places()["pi3"].holder
        finally:
            board.kill()
