"""Tests on a booted board: NFS, SSH, the device suite with its results and errors, enter-nfsroot, and power-off.

The board is a virtual machine that booted the exported tree. All tests in this file share the machine; SSH,
NFS, labgrid and pytest are the real programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sleeping_kernel
from device_parts import (
    BOOT_LIMIT_S,
    DEVICE_PYTEST,
    NAME_SERVER,
    WITH_NAME_SERVER,
    Board,
    bootable,
    booted,
    elsewhere,
    layer,
    write_suite,
)
from processes import command_lines
from waiting import eventually

from device import deploy, suite
from device.labgrid_environment import prepare
from device.remote import environment
from device.remote.loader_session import Timing
from device.remote.profiling import Profile, profile
from device.suite_result import Paths
from flow import main_job
from flow.serve_wheels import Offer
from nfsroot import access, qemu
from nfsroot.layout import Layout
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.errors import AccessDenied, BoardLost, BoardSilent, CommandFailed, DeviceTestsFailed, InUse
from toolchain.manifest import Artefact, Manifest
from wheels.index import instructions, running_index

pytestmark = [pytest.mark.machine, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def board(exported_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    environment.ready(exported_config)  # installs TVM, which cannot be fetched from inside the private network
    with booted(bootable(exported_config), tmp_path_factory.mktemp("board")) as made:
        yield made


@pytest.fixture
def config(board: Board, tmp_path: Path) -> Config:
    """Return the board's configuration, with a separate report folder for each test."""
    return elsewhere(board.config, tmp_path / "build")


def second_export(config: Config, folder: Path) -> Config:
    """Make another export of the same tree, with separate keys and a separate manifest."""
    first, second = Layout.of(config), Layout(folder / "nfsroot")
    folder.mkdir()
    second.place.mkdir()
    second.tree.symlink_to(first.tree)
    second.folder.mkdir()
    for path in (first.marker, first.known_hosts, first.client_key):
        (second.folder / path.name).write_bytes(path.read_bytes())
    second.client_key.chmod(0o600)
    second.manifest.write_bytes(first.manifest.read_bytes())
    return replace(config, nfs=replace(config.nfs, folder=str(second.place)))


def new_key(path: Path) -> Path:
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path])
    return path


def test_an_exported_tree_boots_and_accepts_ssh(board: Board) -> None:
    assert board.machine.boot_seconds is not None
    assert 1 < board.machine.boot_seconds < BOOT_LIMIT_S
    assert board.run("uname", "-m").startswith("armv")
    root = board.run("sh", "-c", "grep ' / ' /proc/mounts | tail -n 1").split()
    assert root[0] == f"10.0.2.2:{Layout.of(board.config).tree}"
    assert root[2] == "nfs4"


def test_files_written_by_the_guest_are_on_the_host(board: Board) -> None:
    name = f"/root/.from-guest-{socket.gethostname()}-{board.machine.pid}"
    path = Layout.of(board.config).tree / name.lstrip("/")
    try:
        board.run("sh", "-c", f"echo pi > {name}; chown 1000:1001 {name}; sync")
        assert path.read_text() == "pi\n"
        assert (path.stat().st_uid, path.stat().st_gid) == (1000, 1001)
    finally:
        path.unlink(missing_ok=True)


def test_the_kernel_uses_a_reserved_port_for_nfs(board: Board) -> None:
    """serve-nfsroot accepts only source ports below 1024.

    The test examines the ports on the board, because QEMU's user-mode network replaces them.
    """
    connections = [line.split()[1:3] for line in board.run("cat", "/proc/net/tcp").splitlines()[1:]]
    ports = [[int(end.rpartition(":")[2], 16) for end in ends] for ends in connections]
    ours = [local for local, remote in ports if remote == board.server.port]
    assert ours
    assert all(port < 1024 for port in ours)


def test_a_board_names_itself_to_the_nfs_server(board: Board) -> None:
    """If two NFS clients have the same name, the server drops one client's state when the other one connects."""
    name = board.run("cat", "/sys/module/nfs/parameters/nfs4_unique_id").strip()
    assert name == board.run("sh", "-c", "cat /sys/class/net/e*/address").strip().replace(":", "")


def test_another_host_key_is_refused(board: Board, tmp_path: Path) -> None:
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"])
    wrong = access.SshAccess(
        host="127.0.0.1",
        port=board.machine.ssh_port,
        key=board.access.key,
        known_hosts=access.pin(tmp_path / "other.pub", tmp_path / "known_hosts"),
    )
    done = process.run(wrong.command(["true"]), check=False, limit_s=120)
    assert done.returncode == 255
    assert isinstance(access.diagnose(wrong, done.output), AccessDenied)


def test_results_come_back_as_junit_evidence_and_report(board: Board, config: Config, tmp_path: Path) -> None:
    tests = write_suite(
        tmp_path / "suite",
        some="""
            import pytest, struct
            def test_word(): assert struct.calcsize("P") == 4
            @pytest.mark.parametrize("n", [1, 2])
            def test_many(n): assert n
            def test_left_out(): pytest.skip("not today")
        """,
    )
    result = suite.test_on_pi(config, host=board.host, suite=tests, timing=False)
    assert result.ok
    assert (result.failed, result.errors) == (0, 0)
    assert result.passed >= 3
    assert result.execution == "emulation"
    document = json.loads(result.evidence.read_text())
    assert document["device"]["model"] == "linux,dummy-virt"
    assert document["device"]["kernel_machine"].startswith("armv")
    assert document["device"]["access"] == board.host
    assert len(document["source"]["commit"]) in (0, 40)
    assert document["rootfs"]["sha256"] == Manifest.read(Layout.of(config).manifest).facts.get("rootfs_sha256", "")  # type: ignore[union-attr]
    assert [link for link in document["links"] if link["holds"] is False and link["severity"] == "error"] == []
    assert any("root is the exported tree" in link["name"] for link in document["links"])
    cases = {case.get("name") for case in ElementTree.parse(result.junit).iter("testcase")}  # noqa: S314 - a file of this program
    assert {"test_word", "test_many[1]", "test_many[2]", "test_left_out"} <= cases
    assert "nothing here was measured on hardware" in result.report.read_text()
    assert "passed" in result.summary()
    assert board.run("sh", "-c", "ls -d /tmp/pitorch-suite.* 2>/dev/null || echo none") == "none"


def test_failed_and_lost_tests_raise_after_the_report(board: Board, config: Config, tmp_path: Path) -> None:
    """One test fails; another one ends the suite, as a lost connection to the board does."""
    tests = write_suite(
        tmp_path / "suite",
        bad="""
            import os
            def test_wrong(): assert 6 * 9 == 42, "the answer"
            def test_right(): pass
            def test_dies(): os._exit(9)
            def test_after(): pass
        """,
    )
    with pytest.raises(DeviceTestsFailed) as caught:
        suite.test_on_pi(config, host=board.host, suite=tests, timing=False)
    assert caught.value.exit_code == 42
    assert "1 passed, 1 failed, 2 errors" in caught.value.found
    assert "test_bad.py::test_wrong" in caught.value.found
    report = config.target_root / "report"
    assert "the answer" in (report / "index.html").read_text()
    ended = json.loads((report / "evidence.json").read_text())["results"]
    assert ended["failed"] == 1
    texts = {test["nodeid"].partition("::")[2]: test["text"] for test in ended["tests"]}
    assert "closed (status 9) before the suite finished" in texts["test_dies"]
    assert "not run" in texts["test_after"]
    failures = {case.get("name") for case in ElementTree.parse(report / "junit.xml").iter("testcase") if len(case)}  # noqa: S314
    assert failures == {"test_wrong", "test_dies", "test_after"}


def test_a_different_host_key_is_refused_at_once(board: Board, config: Config, tmp_path: Path) -> None:
    wrong = second_export(config, tmp_path / "second")
    key = new_key(tmp_path / "other")
    Layout.of(wrong).known_hosts.write_text(f"* {key.with_suffix('.pub').read_text()}")
    began = time.monotonic()
    with pytest.raises(AccessDenied) as caught:
        suite.test_on_pi(wrong, host=board.host, timing=False)
    assert time.monotonic() - began < 120, "the connection to an untrusted board must not be retried"
    assert caught.value.exit_code == 30
    assert "exported again while the board was up" in caught.value.fix
    assert not (wrong.target_root / "report" / "index.html").exists()


def test_a_refused_login_raises_access_denied(board: Board, config: Config, tmp_path: Path) -> None:
    wrong = second_export(config, tmp_path / "second")
    key = Layout.of(wrong).client_key
    key.unlink()
    new_key(key)
    with pytest.raises(AccessDenied) as caught:
        suite.test_on_pi(wrong, host=board.host, timing=False)
    assert caught.value.exit_code == 30
    assert "authorized_keys" in caught.value.fix


def test_an_unreachable_board_raises_board_silent(board: Board, config: Config) -> None:
    quick = replace(config, device=replace(config.device, boot_timeout_s=10.0))
    with pytest.raises(BoardSilent) as caught:
        suite.test_on_pi(quick, host="root@127.0.0.1:1", timing=False)
    assert caught.value.exit_code == 40
    assert "within 10 s" in caught.value.expected
    assert "refused" in caught.value.found


def test_enter_nfsroot_runs_the_suite_and_cleans_up(board: Board, config: Config, tmp_path: Path) -> None:
    """enter-nfsroot mounts the tree a second time on the running system.

    The test does not use --chroot, which uses the user's SSH key, because this board accepts only the export's key.
    """
    tests = write_suite(
        tmp_path / "suite",
        inside="""
            import os
            def test_root_is_a_mount_of_its_own():
                namespaces = os.readlink("/proc/self/ns/mnt"), os.readlink("/proc/1/ns/mnt")
                assert namespaces[0] != namespaces[1]
            def test_devices_are_here(): assert os.path.exists("/dev/null") and os.path.isdir("/proc/self")
            def test_writable():
                path = "/root/.entered"
                open(path, "w").close(); os.unlink(path)
        """,
    )
    before = board.run("cat", "/proc/mounts")
    paths = Paths(folder=config.target_root / "report")
    prepare(config, paths, host=board.host, chroot=False, timing=False, suite=tests)
    options = f"  chroot: 10.0.2.2:{Layout.of(config).tree}\n  chroot_port: {board.server.port}\n"
    paths.environment.write_text(paths.environment.read_text().replace("options:\n", f"options:\n{options}"))
    words = [*DEVICE_PYTEST, f"--lg-env={paths.environment}"]
    done = process.run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False, limit_s=1800)
    assert "3 passed" in done.output, done.output
    assert board.run("cat", "/proc/mounts") == before
    assert board.run("sh", "-c", "ls /tmp/enter-nfsroot.* 2>/dev/null || echo none") == "none"


def test_ctrl_c_leaves_no_machine_and_no_server(board: Board, config: Config, tmp_path: Path) -> None:
    """Ctrl-C is typed in the task's terminal while a second machine boots."""
    settings = {"nfs": {"folder": str(config.nfsroot)}, "build": {"folder": str(config.build.folder)}}
    program = (
        "import json, signal, sys; from toolchain.config import load_config; from device import suite\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background processes\n"
        "suite.test_on_pi(load_config(json.loads(sys.argv[1])), qemu=True)"
    )
    running = subprocess.Popen([sys.executable, "-c", program, json.dumps(settings)], cwd=ROOT, start_new_session=True)
    console = config.target_root / "report" / "console.log"
    try:
        eventually(lambda: console.is_file() and console.stat().st_size >= 100, limit_s=300)
        mine = owned_by(str(config.target_root))
        assert any("qemu-system-arm" in line for line in mine.values())
        assert any("ganesha" in line for line in mine.values())
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(60) != 0
    finally:
        running.kill()
        running.wait()
    eventually(lambda: not owned_by(str(config.target_root)), lambda: owned_by(str(config.target_root)))
    assert not (config.target_root / "report" / "index.html").exists()


def owned_by(folder: str) -> dict[int, str]:
    """Find other processes whose command line contains the folder; return their command lines by process ID."""
    lines = command_lines().items()
    return {pid: line for pid, line in lines if folder in line and pid != os.getpid() and "load_config" not in line}


def test_a_kernel_of_tvm_is_profiled_on_the_board(board: Board) -> None:
    """The board has no TVM, so the session copies the loader there and removes it at the end."""
    timing = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)
    done = profile(board.config, kernel="gemm", target="armv7", device=f"tree://{board.host}", size=32, timing=timing)
    assert done.checked == 32 * 32
    assert done.board == "linux,dummy-virt"
    assert "not measured on hardware" in dict(done.rows())["note"]
    assert board.run("sh", "-c", "ls -d /tmp/pitorch-loader.*/ 2>/dev/null || echo none") == "none"


@pytest.mark.expensive
def test_a_tvm_kernel_accepts_torch_tensors_on_the_board(board: Board, built: main_job.Built, tmp_path: Path) -> None:
    """Without torch in the image, the test uses numpy arrays, which lack the alignment that TVM's code requires.

    The test is run only weekly, because the import of torch takes a minute over NFS, and test_main_job.py runs
    test_tvm.py with the same kernel on a board.
    """
    library, there = tmp_path / "gemm.so", "/tmp/gemm.so"
    timing = Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0)
    device = f"tree://{board.host}"
    profile(board.config, kernel="gemm", target="armv7", device=device, size=32, keep=library, timing=timing)
    process.run(board.access.command(["sh", "-c", f"cat >{there}"]), stdin=library.read_bytes(), limit_s=60)
    program = f"""
import importlib.util, numpy
from pitorch import tvm
a, b, c = (numpy.random.default_rng(n).standard_normal((32, 32), dtype=numpy.float32) for n in range(3))
with_torch = importlib.util.find_spec("torch") is not None
if with_torch:
    import qpu_ops, torch
    assert qpu_ops.backend().name
    a, b, c = (torch.tensor(item) for item in (a, b, c))
tvm.Library({there!r})["gemm"](a, b, c)
numpy.testing.assert_allclose(numpy.asarray(c), numpy.asarray(a) @ numpy.asarray(b), rtol=1e-4, atol=1e-4)
print("torch" if with_torch else "numpy")
"""
    said = board.run("python3", "-c", program)
    assert said == ("torch" if built.manifest("torch").facts["wheel"] else "numpy")
    board.run("rm", there)


def test_kernels_of_the_qpus_are_profiled_on_the_board(board: Board) -> None:
    """The board has no QPUs, so libqpu's emulator runs the kernels on the board."""
    timing = Timing(number=1, repeat=2, min_repeat_ms=0, warm_up=0)
    device = f"tree://{board.host}"
    done = profile(board.config, kernel="add_one", target="qpu", device=device, size=32, timing=timing)
    assert done.checked == 32
    assert done.backend.startswith("libqpu ")


def test_a_session_with_the_board_ends_in_time(board: Board) -> None:
    config = replace(board.config, remote=replace(board.config.remote, session_limit_s=2))
    endless = Timing(number=10**9, repeat=1, min_repeat_ms=0, warm_up=0)
    with pytest.raises(BoardLost):
        profile(config, kernel=sleeping_kernel.__file__, target="armv7", device=f"tree://{board.host}", timing=endless)


# SLEPT prints how often the loader that holds the board has slept. CUT kills the loader's SSH login.
SLEPT = """
p=$(cat /tmp/pitorch-loader.lock 2>/dev/null)
sed -n 's/^voluntary_ctxt_switches:.//p' "/proc/${p:-none}/status" 2>/dev/null || echo 0
"""
CUT = """
p=$(cat /tmp/pitorch-loader.lock)
until grep -q '^Name:.sshd' "/proc/$p/status"; do
  p=$(sed -n 's/^PPid:.//p' "/proc/$p/status")
  [ "$p" -gt 1 ] || exit 1
done
kill -KILL "$p"
"""


def test_a_board_is_busy_until_a_lost_session_ends(board: Board) -> None:
    """When a session loses its connection, it ends, and the next session can start."""
    device, quick = f"tree://{board.host}", Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0)
    endless = replace(quick, number=10**9)

    def session(timing: Timing, *, queue_s: float, session_s: float) -> Profile:
        remote = replace(board.config.remote, queue_limit_s=queue_s, session_limit_s=session_s)
        limited = replace(board.config, remote=remote)
        # A kernel that computes would slow down all other programs on the board.
        kernel = sleeping_kernel.__file__
        return profile(limited, kernel=kernel, target="armv7", device=device, size=32, timing=timing)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(session, endless, queue_s=60, session_s=600)
        eventually(lambda: held.done() or int(board.run("sh", "-c", SLEPT)) >= 500, limit_s=600, interval_s=1)
        assert not held.done(), held.exception()
        with pytest.raises(InUse) as caught:
            session(quick, queue_s=1, session_s=60)
        assert caught.value.expected == "a session within 1 s"
        assert "process" in caught.value.found
        board.run("sh", "-c", CUT)
        assert isinstance(held.exception(timeout=60), BoardLost)
    assert session(quick, queue_s=300, session_s=60).checked == 32
    assert board.run("sh", "-c", "ls -d /tmp/pitorch-loader.*/ 2>/dev/null || echo none") == "none"


@pytest.mark.expensive
def test_the_boards_pip_installs_torch_from_serve_wheels(board: Board) -> None:
    """The board runs the commands that serve-wheels prints, and then imports the downloaded torch, not the image's."""
    offer = Offer(board.config)
    wheel = offer.torch.wheel
    assert wheel is not None, offer.torch.reason
    with zipfile.ZipFile(wheel) as archive:
        library = hashlib.sha256(archive.read("torch/lib/libtorch_cpu.so")).hexdigest()
    program = (
        "import hashlib, pathlib, torch; from importlib import metadata;"
        "home = pathlib.Path(torch.__file__).parent;"
        "print(home.relative_to(pathlib.Path.home()), metadata.version('torch'), torch.ones(3).sum().item(),"
        "hashlib.sha256((home / 'lib/libtorch_cpu.so').read_bytes()).hexdigest())"
    )
    with running_index(offer) as url:
        lines = instructions(url.replace("127.0.0.1", qemu.HOST_SEEN_FROM_GUEST), sorted(offer()), wheel.name)
        typed = [line.strip() for line in lines if "~/venv" in line][:2]
        assert len(typed) == 2
        try:
            done = on_board(board, " && ".join(typed), limit_s=1800)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Successfully installed torch-2.6.0" in done.stdout
            done = on_board(board, f'~/venv/bin/python -W error -c "{program}"')
        finally:
            on_board(board, "rm -r ~/venv")
    assert done.stdout.split() == ["venv/lib/python3.13/site-packages/torch", "2.6.0", "3.0", library], done.stderr


# These tests run enter-nfsroot directly, over NFS. test_enter_nfsroot.py tests its other features.


def on_board(board: Board, script: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        board.command("sh", "-c", script), capture_output=True, text=True, check=False, timeout=limit_s
    )


def test_the_root_is_entered_over_nfs(board: Board) -> None:
    source = f"10.0.2.2:{Layout.of(board.config).tree}"
    entering = f"enter-nfsroot -o port={board.server.port} {source} --"
    compute = "import sqlite3; print(sqlite3.connect('').execute('select 3.0').fetchone()[0])"
    inside = (
        'uname -m; grep -c " / nfs4 .*vers=4.1" /proc/mounts; '
        f"python3 -c {shlex.quote(compute)}; "
        "getent hosts somewhere.example; ls /dev/null; exit 5"
    )
    within = shlex.join(["sh", "-c", WITH_NAME_SERVER, "sh", "python3", NAME_SERVER])
    done = on_board(
        board,
        f"before=$(cat /proc/mounts); {within} {entering} sh -c {shlex.quote(inside)}; echo rc=$?; "
        '[ "$before" = "$(cat /proc/mounts)" ] && echo same; ls -d /mnt/* 2>/dev/null',
    )
    assert done.stdout.split("\n")[:3] == ["armv7l", "1", "3.0"], done.stdout + done.stderr
    assert done.stdout.split("\n")[3].split() == ["192.0.2.7", "somewhere.example"]
    assert done.stdout.endswith("/dev/null\nrc=5\nsame\n")


REFUSALS = {
    "path": ("-o port=PORT 10.0.2.2:/nowhere true", "10.0.2.2 does not export /nowhere"),
    "port": ("-o port=1 10.0.2.2:/tree true", "no NFS server listens on"),
    "name": ("no-such-host.invalid:/tree true", "unknown host name no-such-host.invalid"),
    "address": ("10.0.2.77:/tree true", "10.0.2.77 does not answer"),
    "no root": ("-o port=PORT 10.0.2.2:TREE/etc true", "is not an armhf root filesystem"),
}


@pytest.fixture(scope="module")
def refusals(board: Board) -> dict[str, str]:
    """Run REFUSALS over one connection, because a login takes seconds; return the outputs and exit codes."""
    script = ""
    for name, (words, _) in REFUSALS.items():
        command = words.replace("PORT", str(board.server.port)).replace("TREE", str(Layout.of(board.config).tree))
        script += f"echo '==={name}'; enter-nfsroot {command} 2>&1; echo rc=$?; "
    done = on_board(board, script + "echo '===mounts'; grep -c /mnt /proc/mounts")
    return dict(part.split("\n", 1) for part in done.stdout.split("===")[1:])


@pytest.mark.parametrize("name", REFUSALS)
def test_a_root_that_cannot_be_entered_is_explained(refusals: dict[str, str], name: str) -> None:
    assert REFUSALS[name][1] in refusals[name]
    assert "fix:" in refusals[name]
    assert refusals[name].endswith("rc=125\n")
    assert refusals["mounts"] == "0\n", "a refused command must not leave mounts"


@pytest.mark.parametrize("way", ["the connection drops", "Ctrl-C"])
def test_an_interrupted_command_leaves_no_mount(board: Board, way: str) -> None:
    # Without exec, Ctrl-C would also end the intermediate shell, and ssh would return that shell's exit code.
    entering = f"exec enter-nfsroot -o port={board.server.port} 10.0.2.2:{Layout.of(board.config).tree}"
    words = board.access.command(["sh", "-c", f"{entering} sh -c 'echo up; sleep 4718'"])
    words.insert(1, "-tt")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while b"up" not in child.stdout.readline():
                assert child.poll() is None
            # Wait until sleep runs, because a shell that is just starting a program can lose the signal.
            while on_board(board, "pgrep -fxc 'sleep 4718'").stdout.split() != ["1"]:
                assert child.poll() is None
            if way == "Ctrl-C":
                child.stdin.write(b"\x03")
                child.stdin.flush()
                assert child.wait(120) == 130
        finally:
            child.kill()
    look = "cat /proc/[0-9]*/mountinfo | grep -c enter-nfsroot; pgrep -fc 'slee[p] 4718'"
    eventually(lambda: on_board(board, look).stdout.split() == ["0", "0"], interval_s=1)


def test_a_running_board_uses_the_deployed_files(board: Board, config: Config, tmp_path: Path) -> None:
    layout = Layout.of(second_export(config, tmp_path / "second"))
    folder = "opt/pitorch/trial"

    def version(number: int) -> Artefact:
        module = {f"{folder}/deployed_here.py": f"NUMBER = {number}\n"}
        program = {f"{folder}/bin/deployed": f"#!/bin/sh\necho {number}\n"}
        return layer(tmp_path / "trial.tar", {**module, **program})

    command = ("sh", "-c", "deployed; python3 -c 'import deployed_here as d; print(d.NUMBER)'")
    environment = ("env", f"PYTHONPATH=/{folder}", f"PATH=/{folder}/bin:/usr/bin:/bin")
    try:
        deploy.put(layout, [version(1)], owned_prefixes=[])
        assert board.run(*environment, *command).split() == ["1", "1"]
        done = deploy.put(layout, [version(2)], owned_prefixes=[])
        assert len(done.changes[0].replaced) == 2
        assert board.run(*environment, *command).split() == ["2", "2"]
    finally:
        files.remove(layout.tree / folder)


def test_the_machine_powers_off_on_request(board: Board) -> None:
    """This must be the last test that uses the board. The board may close the connection before it responds."""

    def power_off() -> None:
        board.run("touch", "/run/poweroff")
        raise CommandFailed("the connection was lost")

    board.machine.end(power_off, polite_s=300)
    assert "Power down" in board.machine.console_text()
    assert board.machine.pid is None
