"""enter-nfsroot: natively with real mounts, namespaces and terminals; over NFS in the virtual machine."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_parts import Board, bootable, booted

from nfsroot.audit import HELPER
from toolchain.config import Config

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
needs_amd64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the little root is made of amd64 programs")

PROGRAMS = ("sh", "true", "sleep", "cat", "id", "mount", "mkdir", "touch", "pwd", "env", "kill", "setsid", "stty",
            "getent")  # fmt: skip

# A name server that knows one address, which it gives for every name.
NAME_SERVER = """
import socket
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("127.0.0.1", 53))
print("up", flush=True)
while True:
    query, whom = asked.recvfrom(512)
    end = query.index(0, 12) + 5
    known = query[end - 4 : end - 2] == bytes([0, 1])
    answer = bytes([192, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7]) if known else b""
    asked.sendto(query[:2] + bytes([129, 128, 0, 1, 0, known, 0, 0, 0, 0]) + query[12:end] + answer, whom)
"""

# PYTHON NAME_SERVER COMMAND...: run a command on a machine that asks this server for names.
WITH_NAME_SERVER = """
place=$(mktemp -d) && ip link set lo up && echo "nameserver 127.0.0.1" >"$place/resolv.conf" || exit
mount --bind "$place/resolv.conf" "$(readlink -f /etc/resolv.conf)" || exit
"$1" -c "$2" >"$place/up" & server=$!
shift 2
while kill -0 $server && ! [ -s "$place/up" ]; do sleep 0.1; done
"$@"; status=$?
kill $server; umount "$(readlink -f /etc/resolv.conf)"; rm -r "$place"
exit $status
"""


@pytest.fixture(scope="module")
def little_root() -> Iterator[Path]:
    """A root filesystem made of this machine's own programs: enough for a shell."""
    made = Path(tempfile.mkdtemp(prefix="pitorch-little-root-"))
    try:
        for folder in ("bin", "dev", "proc", "sys", "run", "etc", "tmp", "root", "mnt"):
            (made / folder).mkdir()
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found is not None, name
            source = os.path.realpath(found)
            shutil.copy(source, made / "bin" / name)
            listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
            for library in re.findall(r"(/\S+)", listed):
                place = made / library.lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    shutil.copy(os.path.realpath(library), place)
        (made / "etc/resolv.conf").write_text("nameserver 192.0.2.99\n")
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def root(little_root: Path) -> Iterator[Path]:
    """The little root; at the end nothing of it is mounted anywhere, and it is as it was."""
    before = sorted(str(path) for path in little_root.rglob("*"))
    text = (little_root / "etc/resolv.conf").read_text()
    yield little_root
    assert traces_of(little_root) == []
    assert sorted(str(path) for path in little_root.rglob("*")) == before
    assert (little_root / "etc/resolv.conf").read_text() == text


def traces_of(root: Path) -> list[str]:
    """Processes in whose mount namespace the root is still mounted."""
    found = []
    for listing in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if f"{root} " in listing.read_text() or "/enter-nfsroot." in listing.read_text():
                found.append(str(listing))
    return found


def enter(root: Path, *words: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELPER, "-a", "amd64", "--local", root, "--", *words],
        capture_output=True, text=True, input=stdin, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def mounts() -> list[str]:
    """What is mounted where enter-nfsroot might have left something."""
    places = ("/dev", "/proc", "/sys", "/mnt", "/tmp/enter-nfsroot", "/tmp/pitorch-little-root")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(places)]


def test_shellcheck_and_dash_are_content() -> None:
    assert subprocess.run(["dash", "-n", HELPER], check=False).returncode == 0
    assert HELPER.read_text().startswith("#!/bin/sh\n")
    if (program := shutil.which("shellcheck")) is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run([program, HELPER], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("words", [("--help",), ("-h",)])
def test_help(words: tuple[str, ...]) -> None:
    done = subprocess.run([HELPER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: enter-nfsroot [OPTIONS] HOST:/PATH" in done.stdout
    assert "Exit status" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage:"),
        (("-o",), "-o needs a value"),
        (("--wrong", "h:/p"), "unknown option --wrong"),
        (("server",), "not of the form HOST:/PATH"),
        (("server:relative",), "not of the form HOST:/PATH"),
        ((":/path",), "names no host"),
        (("-a", "sparc", "h:/p"), "unknown architecture 'sparc'"),
        (("-o", "ro"), "HOST:/PATH is missing"),
        (("--local", "/nonexistent/folder"), "there is no folder /nonexistent/folder"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_mounted(words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([HELPER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert said in done.stderr
    assert done.stdout == ""


@needs_root
def test_an_ordinary_user_is_refused() -> None:
    words = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-s", "h:/p"]
    done = subprocess.run(words, input=HELPER.read_text(), capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "root is needed" in done.stderr
    assert "sudo" in done.stderr


@needs_root
def test_without_mount_nfs_the_package_is_named(tmp_path: Path) -> None:
    # A PATH with what the script needs, but no mount.nfs; the sbin folders it looks into are covered.
    script = 'mount -t tmpfs tmpfs /usr/sbin && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "x", HELPER, "192.0.2.1:/p"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert "no mount.nfs" in done.stderr
    assert "nfs-common" in done.stderr


# Natively


@needs_root
@needs_amd64
def test_the_commands_exit_status_output_and_input_come_through(root: Path) -> None:
    before = mounts()
    done = enter(root, "sh", "-c", "pwd; cat; id -u; exit 7", stdin="from outside\n")
    assert done.stdout == "/\nfrom outside\n0\n"
    assert done.returncode == 7
    assert mounts() == before
    assert enter(root, "true").returncode == 0
    assert enter(root, "sh", "-c", "kill -9 $$").returncode == 137
    assert enter(root, "no-such-command").returncode == 127


@needs_root
@needs_amd64
def test_words_arrive_as_they_were_written(root: Path) -> None:
    done = enter(root, "sh", "-c", 'for word; do echo "<$word>"; done', "-", "a b", "", "*", "-o", "--", "it's")
    assert done.stdout == "<a b>\n<>\n<*>\n<-o>\n<-->\n<it's>\n"


@needs_root
@needs_amd64
def test_dev_proc_sys_and_memory_at_run(root: Path) -> None:
    done = enter(
        root,
        "sh",
        "-c",
        "mount; touch /run/here /dev/null && cat /proc/self/comm /sys/kernel/uevent_seqnum >/dev/null",
    )
    assert done.returncode == 0, done.stderr
    for place, kind in (("/dev", ""), ("/proc", "proc"), ("/sys", "sysfs"), ("/run", "tmpfs")):
        assert re.search(rf" on {place} type {kind}", done.stdout), place
    assert not (root / "run/here").exists(), "run-time files do not land in the tree"


@needs_root
@needs_amd64
def test_names_resolve_as_on_the_board_and_the_trees_file_stays(root: Path) -> None:
    assert enter(root, "cat", "/etc/resolv.conf").stdout == Path("/etc/resolv.conf").read_text()


@pytest.mark.network_namespaces
@needs_root
@needs_amd64
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (package iproute2)")
def test_a_name_is_asked_of_the_boards_name_server(root: Path) -> None:
    within = ["unshare", "--net", "--mount", "sh", "-c", WITH_NAME_SERVER, "sh", sys.executable, NAME_SERVER]
    words = [HELPER, "-a", "amd64", "--local", root, "getent", "hosts", "somewhere.example"]
    done = subprocess.run([*within, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["192.0.2.7", "somewhere.example"], done.stderr


@needs_root
@needs_amd64
@pytest.mark.parametrize("target", ["/run/systemd/resolve/stub-resolv.conf", "../run/resolvconf/resolv.conf"])
def test_a_resolv_conf_that_is_a_link_into_run(little_root: Path, target: str) -> None:
    place = little_root / "etc/resolv.conf"
    kept = place.read_text()
    place.unlink()
    place.symlink_to(target)
    try:
        assert enter(little_root, "cat", "/etc/resolv.conf").stdout == Path("/etc/resolv.conf").read_text()
        assert place.is_symlink()
        assert list((little_root / "run").iterdir()) == []
    finally:
        place.unlink()
        place.write_text(kept)


@needs_root
@needs_amd64
def test_a_tree_without_resolv_conf_has_none_afterwards(little_root: Path) -> None:
    place = little_root / "etc/resolv.conf"
    kept = place.read_text()
    place.unlink()
    try:
        assert enter(little_root, "cat", "/etc/resolv.conf").stdout == Path("/etc/resolv.conf").read_text()
        assert not place.exists()
    finally:
        place.write_text(kept)


@needs_root
@needs_amd64
def test_mounts_made_inside_are_gone_too(root: Path) -> None:
    before = mounts()
    done = enter(root, "sh", "-c", "mount -t tmpfs a /mnt && mkdir /mnt/b && mount -t tmpfs b /mnt/b && exit 3")
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert mounts() == before


@needs_root
@needs_amd64
def test_the_boards_own_dev_stays_mounted(root: Path) -> None:
    before = mounts()
    enter(root, "true")
    enter(root, "false")
    assert mounts() == before
    assert Path("/dev/pts/ptmx").exists() or Path("/dev/null").exists()
    assert Path("/dev/null").is_char_device()


@needs_root
@needs_amd64
def test_what_is_left_running_is_ended(root: Path) -> None:
    done = enter(
        root, "sh", "-c", "setsid sleep 4711 >/dev/null 2>&1 & (trap '' TERM HUP; sleep 4712) >/dev/null 2>&1 & exit 5"
    )
    assert done.returncode == 5
    left = subprocess.run(["pgrep", "-f", "sleep 471[12]"], capture_output=True, text=True, check=False).stdout
    assert left == ""


@needs_root
@needs_amd64
def test_two_at_once_do_not_end_each_other(root: Path) -> None:
    first = subprocess.Popen(
        [HELPER, "-a", "amd64", "--local", root, "sh", "-c", "echo up; sleep 2; exit 9"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stdout is not None
    assert first.stdout.readline() == "up\n"
    assert enter(root, "true").returncode == 0
    assert first.wait(30) == 9
    first.stdout.close()


@needs_root
@needs_amd64
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("command", ["exec sleep 4713", "trap '' TERM HUP; sleep 4713; sleep 4713"])
def test_a_signal_to_the_script_ends_command_and_mounts(root: Path, number: signal.Signals, command: str) -> None:
    before = mounts()
    with subprocess.Popen(
        [HELPER, "-a", "amd64", "--local", root, "sh", "-c", f"echo up; {command}"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            child.send_signal(number)
            assert child.wait(30) == (128 + number if number != signal.SIGKILL else -number)
        finally:
            if number == signal.SIGKILL:
                # Nobody can clean up after that but the kernel, when the command ends.
                subprocess.run(["pkill", "-KILL", "-g", str(child.pid)], check=False)
    deadline = time.monotonic() + 10
    while traces_of(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert traces_of(root) == []
    assert mounts() == before


class Terminal:
    """enter-nfsroot on a terminal of its own, which can be typed on and dropped."""

    def __init__(self, *words: str | Path) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execv(words[0], [str(word) for word in words])  # noqa: S606
        self.shown = ""

    def expect(self, text: str, limit_s: float = 30) -> None:
        """Wait until the terminal shows a text."""
        deadline = time.monotonic() + limit_s
        os.set_blocking(self.descriptor, False)
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self.descriptor, 4096).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                raise AssertionError(f"ended: {self.shown}") from None

    def type(self, text: str) -> None:
        """Type on the terminal."""
        os.write(self.descriptor, text.encode())

    def drop(self) -> None:
        """Take the terminal away."""
        os.close(self.descriptor)

    def wait(self, limit_s: float = 30) -> int:
        """The exit status; negative after a signal."""
        deadline = time.monotonic() + limit_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "still running"
            time.sleep(0.05)


@needs_root
@needs_amd64
def test_a_shell_on_a_terminal_has_job_control_and_ctrl_c(root: Path) -> None:
    terminal = Terminal(HELPER, "-a", "amd64", "--local", root, "sh", "-i")
    terminal.type("echo re''ady\n")
    terminal.expect("ready")
    assert "can't access tty" not in terminal.shown
    terminal.type("sleep 4714\n")
    time.sleep(1)
    terminal.type("\x03")
    # Ctrl-C ended the sleep, not the shell.
    terminal.type("echo al''ive\n")
    terminal.expect("alive")
    terminal.type("exit 6\n")
    assert terminal.wait() == 6
    terminal.drop()


@needs_root
@needs_amd64
def test_ctrl_c_ends_a_command_and_unmounts(root: Path) -> None:
    before = mounts()
    terminal = Terminal(HELPER, "-a", "amd64", "--local", root, "sh", "-c", "echo up; sleep 4715")
    terminal.expect("up")
    terminal.type("\x03")
    assert terminal.wait() == 130
    terminal.drop()
    assert mounts() == before


@needs_root
@needs_amd64
@pytest.mark.parametrize("words", [("sh", "-i"), ("sh", "-c", "trap '' HUP; echo ready; sleep 4716")])
def test_a_dropped_terminal_ends_all(root: Path, words: tuple[str, ...]) -> None:
    terminal = Terminal(HELPER, "-a", "amd64", "--local", root, *words)
    terminal.type("echo re''ady\n")
    terminal.expect("ready")
    terminal.drop()
    assert terminal.wait() in (129, 0, -1)
    deadline = time.monotonic() + 10
    while traces_of(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert traces_of(root) == []


@needs_root
@needs_amd64
def test_without_mount_namespaces_it_cleans_up_by_itself(root: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    needed = ("sh", "id", "readlink", "mount", "umount", "mktemp", "rmdir", "grep", "mkdir", "cat", "chroot", "env",
              "sleep", "rm", "timeout", "true", "find", "sed")  # fmt: skip
    for name in needed:
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert found is not None, name
        (tools / name).symlink_to(found)
    list_mounts = "$(cat /proc/self/mountinfo)"
    script = f'before="{list_mounts}"; "$@"; echo "rc=$?"; [ "$before" = "{list_mounts}" ] && echo same'
    unshare = shutil.which("unshare")
    assert unshare is not None
    words = "mount -t tmpfs t /mnt; sleep 4717 & exit 4"
    done = subprocess.run(
        [unshare, "--mount", "sh", "-c", script, "x", HELPER, "-a", "amd64", "--local", root, "sh", "-c", words],
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": str(tools)},
    )  # fmt: skip
    assert done.stdout == "rc=4\nsame\n", done.stderr
    assert list(Path("/tmp").glob("enter-nfsroot.*")) == []


@needs_root
@needs_amd64
def test_another_architecture_is_refused(root: Path) -> None:
    done = subprocess.run([HELPER, "--local", root, "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "is not an armhf root filesystem: it has no ld-linux-armhf.so.3" in done.stderr


@needs_root
@needs_amd64
def test_a_root_whose_programs_do_not_run_is_refused(tmp_path: Path) -> None:
    for folder in ("bin", "lib", "dev", "proc", "sys"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib/ld-linux-aarch64.so.1").touch()
    # ELF for a machine that nobody has: EM_M32, executable.
    for name in ("true", "sh"):
        (tmp_path / "bin" / name).write_bytes(b"\x7fELF\x01\x01\x01" + b"\0" * 9 + b"\x02\0\x01\0\x01" + b"\0" * 64)
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run([HELPER, "-a", "arm64", "--local", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "cannot execute the root's programs" in done.stderr
    assert traces_of(tmp_path) == []


# Over NFS, on a board that is a virtual machine


@pytest.fixture(scope="module")
def board(exported_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with booted(bootable(exported_config), tmp_path_factory.mktemp("enter")) as made:
        yield made


def on_board(board: Board, script: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        board.access.command(["sh", "-c", script]), capture_output=True, text=True, check=False, timeout=limit_s
    )


@pytest.mark.machine
def test_the_root_is_entered_over_nfs(board: Board) -> None:
    source = f"10.0.2.2:{board.config.nfsroot}"
    entering = f"enter-nfsroot -o port={board.server.port} {source} --"
    inside = (
        'uname -m; grep -c " / nfs4 .*vers=4.1" /proc/mounts; '
        'python3 -c "import numpy; print(numpy.ones(3).sum())"; '
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
    "port": ("-o port=1 10.0.2.2:/tree true", "no NFS server listens there"),
    "name": ("no-such-host.invalid:/tree true", "the host name no-such-host.invalid is unknown"),
    "address": ("10.0.2.77:/tree true", "10.0.2.77 does not answer"),
    "no root": ("-o port=PORT 10.0.2.2:TREE/etc true", "is not an armhf root filesystem"),
}


@pytest.fixture(scope="module")
def refusals(board: Board) -> dict[str, str]:
    """What each of the commands above says and returns; over one connection, for each costs seconds."""
    script = ""
    for name, (words, _) in REFUSALS.items():
        command = words.replace("PORT", str(board.server.port)).replace("TREE", str(board.config.nfsroot))
        script += f"echo '==={name}'; enter-nfsroot {command} 2>&1; echo rc=$?; "
    done = on_board(board, script + "echo '===mounts'; grep -c /mnt /proc/mounts")
    return dict(part.split("\n", 1) for part in done.stdout.split("===")[1:])


@pytest.mark.machine
@pytest.mark.parametrize("name", REFUSALS)
def test_why_a_root_cannot_be_entered(refusals: dict[str, str], name: str) -> None:
    assert REFUSALS[name][1] in refusals[name]
    assert "mend:" in refusals[name]
    assert refusals[name].endswith("rc=125\n")
    assert refusals["mounts"] == "0\n", "a refusal leaves nothing mounted"


@pytest.mark.machine
@pytest.mark.parametrize("way", ["the connection drops", "Ctrl-C"])
def test_an_end_from_outside_leaves_no_mount(board: Board, way: str) -> None:
    # Without exec a shell is between, which Ctrl-C ends as well: ssh would tell that.
    entering = f"exec enter-nfsroot -o port={board.server.port} 10.0.2.2:{board.config.nfsroot}"
    words = board.access.command(["sh", "-c", f"{entering} sh -c 'echo up; sleep 4718'"])
    words.insert(1, "-tt")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        while b"up" not in child.stdout.readline():
            assert child.poll() is None
        if way == "Ctrl-C":
            child.stdin.write(b"\x03")
            child.stdin.flush()
            assert child.wait(120) == 130
        else:
            child.kill()
    deadline = time.monotonic() + 60
    look = "cat /proc/[0-9]*/mountinfo | grep -c enter-nfsroot; pgrep -fc 'slee[p] 4718'"
    while (found := on_board(board, look).stdout.split()) != ["0", "0"]:
        assert time.monotonic() < deadline, found
        time.sleep(1)
