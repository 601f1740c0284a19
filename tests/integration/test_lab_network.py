"""Tests of cut connections and a full disk in a lab with three PCs and a board, each in a network namespace."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from device_parts import write_suite
from exports import exported_in
from lab_parts import programs
from ssh_board import ssh_board
from test_netboot import bridged, ip
from waiting import LIMIT_S, eventually

from device.lab import log, run
from device.lab.services import program
from nfsroot import access
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import DiskFull

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get, to download the SSH server"),
]

COORDINATOR = "192.168.77.2:20408"
BOARD = "192.168.77.50"
SPLIT = (f"c=root@{BOARD} team=split", f"d=root@{BOARD} team=split", "dead=root@192.168.77.51 team=split")
"""Rows of boards for a suite that is split: two represent the same machine, and one does not exist."""
CUT_S = 30.0

UP = """
import json, sys
from device.lab import services
from toolchain.config import load_config
services.up(load_config(json.loads(sys.argv[1])))
"""

STATUS = """
import json, sys
from device.lab import services
from toolchain.config import load_config
from toolchain.errors import UserError
config = load_config(json.loads(sys.argv[1]))
for _ in sys.stdin:
    try:
        lines = services.status(config).lines()
    except UserError as fault:
        lines = [f"{fault.summary}: {fault.found}"]
    print(*lines, "", sep="\\n", flush=True)
"""
"""Prints the output of ``lab status`` and an empty line for each line of the input."""

HOLD = """
import sys
from device.lab.acquire import acquired
from device.lab.coordinator import Coordinator
with acquired(Coordinator(sys.argv[1]), {"name": sys.argv[2]}, limit_s=60):
    print("held", flush=True)
    sys.stdin.read()
"""

RUN = """
import json, sys
from pathlib import Path
from device.lab import run
from toolchain.config import load_config
from toolchain.errors import UserError
try:
    how = run.How(timing=False, suite=Path(sys.argv[2]))
    config = load_config(json.loads(sys.argv[1]))
    action, _, argument = sys.argv[3].partition(" ")
    print(getattr(run, action)(config, argument, how).summary())
except UserError as fault:
    sys.exit(f"{type(fault).__name__}: {fault}")
"""

WAITS = """
import pathlib, time
def test_waits():
    pathlib.Path({started!r}).touch()
    deadline = time.monotonic() + {limit_s}
    while not pathlib.Path({go!r}).exists():
        print("waiting", flush=True)
        time.sleep(1)
        assert time.monotonic() < deadline
"""


@dataclass(frozen=True)
class Pc:
    """A PC, represented by a network namespace and a host name."""

    namespace: str
    name: str
    config: Config
    settings: Mapping[str, object]

    def words(self, *words: str | Path) -> list[str]:
        """Return the command line that runs Python with these arguments on this PC."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, sys.executable]
        return ["ip", "netns", "exec", self.namespace, *inside, *map(str, words)]

    def up(self) -> None:
        """Run ``lab up``."""
        process.run(self.words("-c", UP, json.dumps(self.settings)), cwd=ROOT, limit_s=120)

    @contextlib.contextmanager
    def holding(self, board: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process that holds a board until its input ends, and yield it."""
        words = self.words("-c", HOLD, COORDINATOR, board)
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            try:
                assert client.stdout.readline() == b"held\n"
                yield client
            finally:
                end(client)

    @contextlib.contextmanager
    def run(
        self, suite: Path, action: str = "on_place a", environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Run the suite in a process, which is killed at the end.

        ``action`` consists of the name of a function in device.lab.run and the function's argument.
        """
        words = self.words("-c", RUN, json.dumps(self.settings), suite, action)
        pipe, variables = subprocess.PIPE, {**os.environ, **(environment or {})}
        with subprocess.Popen(words, cwd=ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True) as task:
            try:
                yield task
            finally:
                task.kill()


def end(client: subprocess.Popen[bytes]) -> None:
    assert client.stdin is not None
    client.stdin.close()
    client.wait(LIMIT_S)


@contextlib.contextmanager
def pc(name: str, address: str, folder: Path, *boards: str) -> Iterator[Pc]:
    """Yield a PC on which the lab is up. All processes of the PC are killed at the end."""
    made = exported_in(folder)
    settings = {
        "nfs": {"folder": str(made.nfsroot)},
        "build": {"folder": str(made.build.folder)},
        "lab": {"coordinator": COORDINATOR, "boards": list(boards)},
        "device": {"boot_timeout_s": "30"},
    }
    with bridged(name) as namespace:
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "lo", "up")
        started = Pc(namespace, name, load_config(settings), settings)
        try:
            started.up()
            yield started
        finally:
            for pid in process.run(["ip", "netns", "pids", namespace], limit_s=30).output.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True)
class Lab:
    """Three PCs: one runs the coordinator and the suite, one exports most boards, and one exports the board b."""

    hub: Pc
    one: Pc
    other: Pc
    board: Path
    """The folder of the board's SSH server."""
    status: subprocess.Popen[str]
    """STATUS on the first PC."""

    def state(self, board: str) -> str:
        """Return a board's row in ``lab status``."""
        assert self.status.stdin is not None
        assert self.status.stdout is not None
        print(file=self.status.stdin, flush=True)
        printed = list(itertools.takewhile(str.strip, self.status.stdout))
        rows = [line.strip() for line in printed if line.split()[:1] == [board]]
        assert len(rows) == 1, printed
        return rows[0]

    def free(self, board: str) -> bool:
        """Return whether the board is exported and nobody holds it."""
        return self.state(board).split()[-2:] == ["exported", "free"]


@pytest.fixture(scope="module")
def lab(sshd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("network")
    with (
        private_network(),
        pc("hub", "192.168.77.2", folder / "hub") as hub,
        pc("one", "192.168.77.3", folder / "one", f"a=root@{BOARD}", *SPLIT) as one,
        pc("two", "192.168.77.4", folder / "two", "b=192.0.2.4") as two,
        bridged("board") as namespace,
    ):
        ip("-n", namespace, "address", "add", f"{BOARD}/24", "dev", "eth0")
        words, pipe = hub.words("-c", STATUS, json.dumps(hub.settings)), subprocess.PIPE
        with (
            ssh_board(namespace, sshd, folder / "board", Layout.of(hub.config)),
            subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as status,
        ):
            yield Lab(hub, one, two, folder / "board", status)


@contextlib.contextmanager
def cut(name: str) -> Iterator[None]:
    """Disconnect a namespace from the network during the block."""
    ip("link", "set", f"to{name}", "down")
    try:
        yield
    finally:
        ip("link", "set", f"to{name}", "up")


def test_two_pcs_offer_their_boards(lab: Lab) -> None:
    assert lab.free("a")
    assert lab.free("b")
    with lab.hub.holding("b"), lab.other.holding("a"):
        assert "held by hub/" in lab.state("b")
        assert "held by two/" in lab.state("a")
    assert lab.free("a")
    assert lab.free("b")


def test_a_pc_without_network_loses_only_its_own_boards(lab: Lab) -> None:
    with lab.hub.holding("a") as client:
        with cut("one"):
            eventually(lambda: "MISSING" in lab.state("a"))
            with lab.hub.holding("b"):
                assert "held by hub/" in lab.state("b")
            assert lab.free("b")
            end(client)
            eventually(lambda: lab.state("a").endswith("free"))
        eventually(lambda: lab.free("a"))
    with lab.hub.holding("a"):
        pass
    assert lab.free("a")


def waiting(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a suite and two paths: the suite creates the second file, and waits until the first file exists."""
    started, go = tmp_path / "started", tmp_path / "go"
    text = WAITS.format(started=str(started), go=str(go), limit_s=300)
    return write_suite(tmp_path / "suite", a=text, b="def test_after(): pass"), go, started


def wait_for_start(task: subprocess.Popen[str], started: Path) -> None:
    eventually(started.exists, "the suite has not started", limit_s=300, task=task)


def test_a_run_goes_on_after_the_network_was_cut_for_30_s(lab: Lab, tmp_path: Path) -> None:
    suite, go, started = waiting(tmp_path)
    with lab.hub.run(suite) as task:
        wait_for_start(task, started)
        with cut("board"):
            time.sleep(CUT_S)
        go.touch()
        output, _ = task.communicate(timeout=300)
    assert task.returncode == 0, output
    assert "2 passed, 0 failed" in output
    assert lab.free("a")
    assert f"logged in as root@{BOARD}" in log.lines(lab.hub.config, "a")[-1]


def test_a_run_ends_if_the_network_stays_cut(lab: Lab, tmp_path: Path) -> None:
    suite, go, started = waiting(tmp_path)
    with lab.hub.run(suite) as task:
        wait_for_start(task, started)
        with cut("board"):
            output, _ = task.communicate(timeout=300)
    go.touch()
    assert output.count("DeviceTestsFailed") == 1, output
    assert task.returncode == 1
    assert lab.free("a")
    report = (run.report_folder(lab.hub.config, run.How()) / "a" / "junit.xml").read_text()
    assert "the connection was closed (status 255) before the suite finished" in report
    assert "not run: the connection to the board was closed earlier" in report


DEFINE = """
import sys
from device.lab.coordinator import Coordinator
coordinator = Coordinator(sys.argv[1])
if sys.argv[2] == "define":
    coordinator.define("carded", {"project": "pitorch", "kind": "ssh"}, "bench/carded/*")
else:
    coordinator.delete("carded")
"""

SSH = """#!/bin/sh
# The keys of the test in place of the user's.
exec /usr/bin/ssh -F {configuration} "$@"
"""


def test_a_run_connects_the_card_to_its_board(lab: Lab, tmp_path: Path) -> None:
    """A script that labgrid starts over SSH replaces usbsdmux. The test exports the multiplexer's resource itself."""
    layout = Layout.of(lab.hub.config)
    mux = lab.board / "usbsdmux"
    mux.write_text('#!/bin/sh\necho "$@" >>"$0.calls"\n')
    mux.chmod(0o755)
    configuration, ssh, described = tmp_path / "config", tmp_path / "bin" / "ssh", tmp_path / "exporter.yaml"
    key, known_hosts = access._quoted(layout.client_key), access._quoted(layout.known_hosts)
    configuration.write_text(f"IdentityFile {key}\nUserKnownHostsFile {known_hosts}\nUser root\n")
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(configuration=shlex.quote(str(configuration))))
    ssh.chmod(0o755)
    usb = {"busnum": 1, "devnum": 2, "path": "1-1", "vendor_id": 0x0424, "model_id": 0x4041}
    resources = {
        "NetworkService": {"address": BOARD, "port": 22, "username": "root"},
        "NetworkUSBSDMuxDevice": {"host": BOARD, **usb, "control_path": "/dev/sg1"},
    }
    described.write_text(yaml.safe_dump({"carded": resources}))
    words = lab.one.words(program("labgrid-exporter"), "-c", COORDINATOR, "-n", "bench", described)
    words.remove(sys.executable)
    suite = write_suite(tmp_path / "suite", one="def test_one(): pass")
    with subprocess.Popen(words) as exporter:
        try:
            process.run(lab.hub.words("-c", DEFINE, COORDINATOR, "define"), cwd=ROOT)
            eventually(lambda: lab.free("carded"))
            path = f"{ssh.parent}:{os.environ['PATH']}"
            with lab.hub.run(suite, "on_place carded", {"PATH": path}) as task:
                output, _ = task.communicate(timeout=300)
            assert task.returncode == 0, output
            process.run(lab.hub.words("-c", DEFINE, COORDINATOR, "delete"), cwd=ROOT)
        finally:
            exporter.terminate()
    assert (lab.board / "usbsdmux.calls").read_text() == "/dev/sg1 dut\n"
    assert any("the card is connected to the board" in line for line in log.lines(lab.hub.config, "carded"))


@pytest.mark.parametrize("name", ["exporter", "coordinator"])
def test_a_run_goes_on_after_a_program_was_killed(lab: Lab, tmp_path: Path, name: str) -> None:
    pc = lab.one if name == "exporter" else lab.hub
    suite, go, started = waiting(tmp_path)
    with lab.hub.run(suite) as task:
        wait_for_start(task, started)
        before = programs(pc.config, name)
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: set(programs(pc.config, name)) - set(before))
        go.touch()
        output, _ = task.communicate(timeout=300)
    assert task.returncode == 0, output
    assert "2 passed, 0 failed" in output
    lab.one.up()
    lab.other.up()
    assert lab.free("a")


def test_tests_of_lost_boards_run_on_the_others(lab: Lab, tmp_path: Path) -> None:
    suite = write_suite(
        tmp_path / "suite",
        x="def test_x(): pass",
        y="import os\ndef test_dies(): os._exit(1)\ndef test_later(): pass",
        z="def test_z(): pass",
    )
    with lab.hub.run(suite, "on_shards team=split") as task:
        output, _ = task.communicate(timeout=500)
    assert task.returncode == 1, "expected a failure: one board did not boot, and a test ended another board's run"
    assert "the device suite did not pass" in output
    folder = run.report_folder(lab.hub.config, run.How())
    root = ElementTree.parse(folder / "junit.xml").getroot()  # noqa: S314 - a file of this program
    assert sorted(f"{case.get('classname')}.{case.get('name')}" for case in root.iter("testcase")) == [
        "c.test_x.test_x",
        "c.test_y.test_later",
        "c.test_z.test_z",
        "d.test_y.test_dies",
        "dead.boot",
    ]
    boards = json.loads((folder / "evidence.json").read_text())["boards"]
    assert [(board["board"], board["turn"], board["moved"]) for board in boards] == [
        ("c", 1, []),
        ("d", 1, ["test_y.py::test_later"]),
        ("dead", 1, ["test_z.py"]),
        ("c", 2, []),
    ]
    assert not any(board["not_run"] for board in boards)
    assert [sum(board["results"][key] for board in boards if "results" in board) for key in ("passed", "errors")] == [
        3,
        1,
    ]
    assert all(lab.free(name) for name in ("c", "d", "dead"))
    assert "quarantine=yes" in lab.state("dead")


@pytest.mark.parametrize("size", ["16k", "200k"])
def test_a_full_disk_ends_the_run_and_is_named(lab: Lab, tmp_path: Path, size: str) -> None:
    suite = write_suite(tmp_path / "suite", much="def test_much():\n    print('x' * 1_000_000)\n    assert 0")
    folder = run.report_folder(lab.hub.config, run.How()) / "a"
    folder.mkdir(parents=True, exist_ok=True)
    process.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])
    try:
        with lab.hub.run(suite) as task:
            output, _ = task.communicate(timeout=300)
    finally:
        process.run(["umount", folder])
    assert f"{DiskFull.__name__}: no room for the report of the device suite" in output
    assert f"free space at {folder}" in output
    assert lab.free("a")
