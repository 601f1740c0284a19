"""Tests of the device suite on a lab's boards, which run the exported root filesystem."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from device_parts import bootable, elsewhere, layer, write_suite
from lab_parts import running, with_boards
from waiting import eventually

from device import deploy
from device.lab import run, services
from nfsroot import access
from nfsroot.layout import Layout
from toolchain import files, ports, process
from toolchain.config import Config
from toolchain.errors import DeviceTestsFailed
from toolchain.manifest import Manifest


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
    suites = list(ElementTree.parse(folder / "junit.xml").getroot().iter("testsuite"))  # noqa: S314 - a file of this program
    assert sorted(suite.get("name", "") for suite in suites) == ["qemu1", "qemu2"]
    assert len({case.get("classname", "") + case.get("name", "") for suite in suites for case in suite}) >= 4
    page = (folder / "index.html").read_text()
    assert page.index("test_first_only") < page.index("test_same")
    assert "1 of 2 tests differ" in page


SSHD = """
mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && mount -t tmpfs tmpfs "$1/run" && mkdir "$1/run/sshd" &&
exec chroot "$1" /usr/sbin/sshd -D -e -o ListenAddress=127.0.0.1 -p "$2"
"""


@contextlib.contextmanager
def emulated_board(config: Config) -> Iterator[str]:
    """Run the tree's SSH server under emulation on the loopback interface; yield its address."""
    port = ports.free_port()
    words = ["unshare", "-m", "--kill-child", "sh", "-c", SSHD, "sh", str(config.nfsroot / "tree"), str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as board:
        try:
            assert board.stderr is not None
            lines = board.stderr
            eventually(lambda: b"listening" in lines.readline())
            yield f"root@127.0.0.1:{port}"
        finally:
            board.kill()


@pytest.fixture
def made(exported_config: Config, no_other_build: None) -> Iterator[Config]:
    """Yield the shared build's configuration for runs that deploy to boards.

    Reports are removed before and after the test.
    """
    folders = [bootable(exported_config).target_root / name for name in ("lab", "lab-check")]
    for folder in folders:
        files.remove(folder)
    yield exported_config
    for folder in folders:
        files.remove(folder)


HEADER = "opt/pitorch/include/qpu.h"


def read(layout: Layout, address: str, folder: Path) -> str:
    """Return the contents of the file HEADER on the board."""
    user, host, port = access.parse_host(address)
    known = access.pin(layout.known_hosts, folder / "known_hosts")
    entry = access.SshAccess(host=host, port=port, user=user, key=layout.client_key, known_hosts=known)
    return process.output_of(entry.command(["cat", f"/{HEADER}"]), limit_s=300)


def flat(text: str) -> str:
    """Join the lines that the console has wrapped."""
    return " ".join(text.split())


@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to which the tree belongs")
def test_a_run_deploys_to_a_running_board(made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The board has already read an older header, which the run replaces. A second run replaces nothing."""
    layout = Layout.of(made)
    built = files.sha256_of(layout.tree / HEADER)
    kept = {path: path.read_bytes() for path in (layout.manifest, *layout.folder.glob("sbom.*"))}
    suite = write_suite(
        tmp_path / "suite",
        header=f"""
            import hashlib, pathlib
            def test_header():
                content = pathlib.Path("/{HEADER}").read_bytes()
                assert hashlib.sha256(content).hexdigest() == "{built}"
        """,
    )
    how = run.How(timing=False, suite=suite)
    try:
        deploy.put(layout, [layer(tmp_path / "old.tar", {HEADER: "// older"})], owned_prefixes=())
        with emulated_board(made) as address, running(with_boards(made, f"pi3={address} model=pi3")) as config:
            assert read(layout, address, tmp_path) == "// older"
            done = run.on_place(config, "pi3", how)
            assert (done.passed, done.failed, done.errors, done.broken) == (1, 0, 0, ())
            assert f"deployed to {layout.tree}: libqpu.tar: 1 files replaced" in flat(capsys.readouterr().err)
            environment = (run.report_folder(config, run.How()) / "pi3" / "environment.yaml").read_text()
            assert "RemotePlace:\n        name: pi3\n" in environment
            evidence = json.loads(done.evidence.read_text())
            listed = done.evidence.with_name("deployed.sha256")
            assert f"{built}  /{HEADER}\n" in listed.read_text()
            (link,) = [link for link in evidence["links"] if link["name"].startswith("the board reads the files")]
            assert (link["holds"], link["found"]) == (True, files.sha256_of(listed))
            manifest = Manifest.read(layout.manifest)
            assert manifest is not None
            assert evidence["rootfs"]["sha256"] == manifest.facts["rootfs_sha256"]
            assert run.on_all(config, how).counts["passed"] == 1
            assert f"deployed to {layout.tree}: libqpu.tar: 0 files replaced" in flat(capsys.readouterr().err)
            assert run.on_tagged(config, "model=pi3", how).passed == 1
            assert run.check(config).ok
            assert not services.Lab(config).coordinator.places()["pi3"].holder
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.expensive
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to which the tree belongs")
def test_a_suite_is_split_between_boards(made: Config, tmp_path: Path) -> None:
    folder = run.report_folder(made, run.How())

    def cases() -> list[str]:
        """Return the cases in the merged JUnit file as ``BOARD.MODULE.TEST``."""
        root = ElementTree.parse(folder / "junit.xml").getroot()  # noqa: S314 - a file of this program
        return sorted(f"{case.get('classname')}.{case.get('name')}" for case in root.iter("testcase"))

    with emulated_board(made) as one, emulated_board(made) as two:
        rows = (f"pi1={one} bits=32", f"pi2={two} bits=32", f"other=127.0.0.1:{ports.free_port()} bits=64")
        with running(with_boards(made, *rows)) as config:
            suite = write_suite(
                tmp_path / "suite",
                long="import time\ndef test_long(): time.sleep(5)",
                short="def test_one(): pass\ndef test_two(): pass",
                skipped="import pytest\n@pytest.mark.skip(reason='no need')\ndef test_skipped(): pass",
            )
            how = run.How(timing=False, suite=suite)
            assert run.on_shards(config, "bits=32", how).counts == {"passed": 3, "failed": 0, "errors": 0, "skipped": 1}
            assert sorted(case.partition(".")[2] for case in cases()) == [
                "test_long.test_long",
                "test_short.test_one",
                "test_short.test_two",
                "test_skipped.test_skipped",
            ]
            again = run.on_shards(config, "bits=32", how)
            assert again.ok
            first_part, second_part = (outcome.files for outcome in again.outcomes)
            assert first_part == ("test_long.py",), "the measured times determine how files are split"
            assert sorted(second_part) == ["test_short.py", "test_skipped.py"]
            assert not any(place.holder for place in services.Lab(config).coordinator.places().values())
