"""Tests of enter-nfsroot on this PC, with real mounts and terminals. test_device_on_board.py tests it over NFS."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nasty_image
import pytest
from device_parts import NAME_SERVER, WITH_NAME_SERVER
from waiting import eventually

from nfsroot.audit import HELPER

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
needs_amd64 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="requires amd64: the small root contains such programs"
)

PROGRAMS = ("sh", "true", "sleep", "cat", "id", "mount", "mkdir", "touch", "pwd", "env", "kill", "setsid", "stty",
            "getent")  # fmt: skip


@pytest.fixture(scope="module")
def little_root() -> Iterator[Path]:
    """Make a small root filesystem that has a shell, from this machine's programs."""
    made = Path(tempfile.mkdtemp(prefix="pitorch-little-root-"))
    try:
        for folder in ("bin", "dev", "proc", "sys", "run", "etc", "tmp", "root", "mnt"):
            (made / folder).mkdir()
        for name in PROGRAMS:
            for path, content in nasty_image.with_libraries(name).items():
                place = made / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
                place.chmod(0o755)
        (made / "etc/resolv.conf").write_text("nameserver 192.0.2.99\n")
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def root(little_root: Path) -> Iterator[Path]:
    """Yield the small root filesystem; check at the end that it is unmounted and unchanged."""
    before = sorted(str(path) for path in little_root.rglob("*"))
    text = (little_root / "etc/resolv.conf").read_text()
    yield little_root
    assert traces_of(little_root) == []
    assert sorted(str(path) for path in little_root.rglob("*")) == before
    assert (little_root / "etc/resolv.conf").read_text() == text


def traces_of(root: Path) -> list[str]:
    """Find processes with the root mounted in their mount namespace."""
    found = []
    for listing in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            # Search by name, because other tests enter other roots at the same time.
            if root.name in listing.read_text():
                found.append(str(listing))
    return found


def enter(root: Path, *words: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELPER, "-a", "amd64", "--local", root, "--", *words],
        capture_output=True, text=True, input=stdin, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


PLACES = ("/dev", "/proc", "/sys", "/mnt", "/tmp/enter-nfsroot", "/tmp/pitorch-little-root")
"""Folders where enter-nfsroot could leave mounts; containers and other tests mount elsewhere."""


def mounts() -> list[str]:
    """Return the mounts below ``PLACES``."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(PLACES)]


def test_shellcheck_and_dash_accept_the_script() -> None:
    assert subprocess.run(["dash", "-n", HELPER], check=False).returncode == 0
    assert HELPER.read_text().startswith("#!/bin/sh\n")
    if (program := shutil.which("shellcheck")) is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run([program, HELPER], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("words", [("--help",), ("-h",)])
def test_help_is_printed(words: tuple[str, ...]) -> None:
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
        (("server",), "expected HOST:/PATH"),
        (("server:relative",), "expected HOST:/PATH"),
        ((":/path",), "has no host"),
        (("-a", "sparc", "h:/p"), "unknown architecture 'sparc'"),
        (("-o", "ro"), "HOST:/PATH is missing"),
        (("--local", "/nonexistent/folder"), "folder /nonexistent/folder does not exist"),
    ],
)
def test_bad_usage_is_refused_before_mounting(words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([HELPER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert said in done.stderr
    assert done.stdout == ""


@needs_root
def test_an_ordinary_user_is_refused() -> None:
    words = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-s", "h:/p"]
    done = subprocess.run(words, input=HELPER.read_text(), capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "root privileges are required" in done.stderr
    assert "sudo" in done.stderr


@needs_root
def test_without_mount_nfs_the_package_is_named(tmp_path: Path) -> None:
    # Hide /usr/sbin, so that PATH contains all required programs except mount.nfs.
    script = 'mount -t tmpfs tmpfs /usr/sbin && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "x", HELPER, "192.0.2.1:/p"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert "mount.nfs is not installed" in done.stderr
    assert "nfs-common" in done.stderr


# Entering a root on this PC.


@needs_root
@needs_amd64
def test_status_output_and_input_are_passed_through(root: Path) -> None:
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
@pytest.mark.parametrize("folder", ["/mnt/disk/root", "disk/root", "/tmp/to-mnt/root"])
def test_a_local_folder_may_be_in_mnt(root: Path, folder: str) -> None:
    script = (
        "mount -t tmpfs tmpfs /mnt && mkdir -p /mnt/disk/root && mount --bind $1 /mnt/disk/root && "
        "mount -t tmpfs tmpfs /tmp && ln -s /mnt/disk /tmp/to-mnt && cd /mnt && shift && "
        '"$@" && ls /tmp'
    )
    words: list[str | Path] = [HELPER, "-a", "amd64", "--local", folder, "--", "sh", "-c", "echo inside"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", root, *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout == "inside\nto-mnt\n", done.stderr


@needs_root
@needs_amd64
def test_arguments_are_passed_unchanged(root: Path) -> None:
    done = enter(root, "sh", "-c", 'for word; do echo "<$word>"; done', "-", "a b", "", "*", "-o", "--", "it's")
    assert done.stdout == "<a b>\n<>\n<*>\n<-o>\n<-->\n<it's>\n"


@needs_root
@needs_amd64
def test_dev_proc_sys_are_bound_and_run_is_a_tmpfs(root: Path) -> None:
    done = enter(
        root,
        "sh",
        "-c",
        "mount; touch /run/here /dev/null && cat /proc/self/comm /sys/kernel/uevent_seqnum >/dev/null",
    )
    assert done.returncode == 0, done.stderr
    for place, kind in (("/dev", ""), ("/proc", "proc"), ("/sys", "sysfs"), ("/run", "tmpfs")):
        assert re.search(rf" on {place} type {kind}", done.stdout), place
    assert not (root / "run/here").exists(), "run-time files must not be written to the tree"


@needs_root
@needs_amd64
def test_the_boards_resolv_conf_is_used(root: Path) -> None:
    assert enter(root, "cat", "/etc/resolv.conf").stdout == Path("/etc/resolv.conf").read_text()


@pytest.mark.network_namespaces
@needs_root
@needs_amd64
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (package iproute2)")
def test_names_are_resolved_by_the_boards_server(root: Path) -> None:
    within = ["unshare", "--net", "--mount", "sh", "-c", WITH_NAME_SERVER, "sh", sys.executable, NAME_SERVER]
    words: list[str | Path] = [HELPER, "-a", "amd64", "--local", root, "getent", "hosts", "somewhere.example"]
    done = subprocess.run([*within, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["192.0.2.7", "somewhere.example"], done.stderr


@needs_root
@needs_amd64
@pytest.mark.parametrize("target", ["/run/systemd/resolve/stub-resolv.conf", "../run/resolvconf/resolv.conf"])
def test_resolv_conf_may_be_a_link_into_run(little_root: Path, target: str) -> None:
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
def test_a_temporary_resolv_conf_is_removed(little_root: Path) -> None:
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
def test_mounts_made_in_the_root_are_removed(root: Path) -> None:
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
def test_remaining_processes_are_terminated(root: Path) -> None:
    done = enter(
        root, "sh", "-c", "setsid sleep 4711 >/dev/null 2>&1 & (trap '' TERM HUP; sleep 4712) >/dev/null 2>&1 & exit 5"
    )
    assert done.returncode == 5
    left = subprocess.run(["pgrep", "-f", "sleep 471[12]"], capture_output=True, text=True, check=False).stdout
    assert left == ""


@needs_root
@needs_amd64
def test_two_runs_do_not_disturb_each_other(root: Path) -> None:
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
def test_a_signal_ends_the_command_and_unmounts(root: Path, number: signal.Signals, command: str) -> None:
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
            if number == signal.SIGKILL or child.poll() is None:
                # After SIGKILL, nothing is unmounted until the command ends; then the kernel unmounts the file systems.
                subprocess.run(["pkill", "-KILL", "-g", str(child.pid)], check=False)
    eventually(lambda: not traces_of(root), lambda: traces_of(root))
    assert mounts() == before


class Terminal:
    """enter-nfsroot on a pseudo-terminal."""

    def __init__(self, *words: str | Path) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execv(words[0], [str(word) for word in words])  # noqa: S606
        self.shown = ""

    def expect(self, text: str, limit_s: float = 30) -> None:
        """Wait until the terminal shows a string."""
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
        """Write to the terminal."""
        os.write(self.descriptor, text.encode())

    def drop(self) -> None:
        """Close the terminal."""
        os.close(self.descriptor)

    def wait(self, limit_s: float = 30) -> int:
        """Wait for the program to exit, and return its exit status, which is negative after a signal."""
        deadline = time.monotonic() + limit_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the program is still running"
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
    # Ctrl-C must terminate sleep, but not the shell.
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
    # Wait until sleep runs, because a shell that is starting a program can lose the signal.
    eventually(lambda: subprocess.run(["pgrep", "-fx", "sleep 4715"], check=False, capture_output=True).returncode == 0)
    terminal.type("\x03")
    assert terminal.wait() == 130
    terminal.drop()
    assert mounts() == before


@needs_root
@needs_amd64
@pytest.mark.parametrize("words", [("sh", "-i"), ("sh", "-c", "trap '' HUP; echo ready; sleep 4716")])
def test_a_closed_terminal_ends_everything(root: Path, words: tuple[str, ...]) -> None:
    terminal = Terminal(HELPER, "-a", "amd64", "--local", root, *words)
    terminal.type("echo re''ady\n")
    terminal.expect("ready")
    terminal.drop()
    assert terminal.wait() in (129, 0, -1)
    eventually(lambda: not traces_of(root), lambda: traces_of(root))


@needs_root
@needs_amd64
def test_cleans_up_without_mount_namespaces(root: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    needed = ("sh", "id", "readlink", "mount", "umount", "mktemp", "rmdir", "grep", "mkdir", "cat", "chroot", "env",
              "sleep", "rm", "timeout", "true", "find", "sed")  # fmt: skip
    for name in needed:
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert found is not None, name
        (tools / name).symlink_to(found)
    list_mounts = f"$(grep -E '^([^ ]+ ){{4}}({'|'.join(PLACES)})' /proc/self/mountinfo)"
    script = f'before="{list_mounts}"; "$@"; echo "rc=$?"; [ "$before" = "{list_mounts}" ] && echo same'
    unshare = shutil.which("unshare")
    assert unshare is not None
    before = set(Path("/tmp").glob("enter-nfsroot.*"))
    words = "mount -t tmpfs t /mnt; sleep 4717 & exit 4"
    done = subprocess.run(
        [unshare, "--mount", "sh", "-c", script, "x", HELPER, "-a", "amd64", "--local", root, "sh", "-c", words],
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": str(tools)},
    )  # fmt: skip
    assert done.stdout == "rc=4\nsame\n", done.stderr
    eventually(lambda: set(Path("/tmp").glob("enter-nfsroot.*")) <= before)  # Other tests remove their own folders.


@needs_root
@needs_amd64
def test_another_architecture_is_refused(root: Path) -> None:
    done = subprocess.run([HELPER, "--local", root, "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert f"{root} is a root filesystem for amd64, not for armhf" in done.stderr
    assert "add the option -a amd64" in done.stderr
    assert traces_of(root) == []


@needs_root
def test_a_folder_that_is_no_root_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([HELPER, "--local", tmp_path, "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "is not an armhf root filesystem: it has no ld-linux-armhf.so.3" in done.stderr


@needs_root
@needs_amd64
def test_a_root_that_cannot_execute_is_refused(tmp_path: Path) -> None:
    for folder in ("bin", "lib", "dev", "proc", "sys"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib/ld-linux-aarch64.so.1").touch()
    # An executable ELF file for another machine (EM_M32).
    for name in ("true", "sh"):
        (tmp_path / "bin" / name).write_bytes(b"\x7fELF\x01\x01\x01" + b"\0" * 9 + b"\x02\0\x01\0\x01" + b"\0" * 64)
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run([HELPER, "-a", "arm64", "--local", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "cannot execute arm64 programs" in done.stderr
    assert "run it on a board with a 64-bit kernel" in done.stderr
    assert traces_of(tmp_path) == []
