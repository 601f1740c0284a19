"""A virtual machine that boots an exported tree over NFS, the stand-in for a board.

QEMU's ``virt`` machine with the kernel and the initramfs from the tree's own /boot. The network is QEMU's user mode:
the guest reaches the loopback interface that QEMU sees as 10.0.2.2 (where the NFS server listens), and a free port
there is forwarded to the guest's SSH. Run machine and server in a ``private_network``: the server for it takes
unprivileged ports, and nobody else is there. The kernel command line is

    console=ttyAMA0 boot=nfs4 root=/dev/nfs rw ip=dhcp nfsroot=10.0.2.2:PATH,vers=4.1,port=N net.ifnames=0 panic=5

with ``init=/usr/local/sbin/pi-init`` for the lean start. ``boot=nfs4`` names the tree's own initramfs script: the
NFS client of Debian's initramfs speaks version 2 and 3 only. ``panic=5`` with ``-no-reboot`` makes a kernel that gave
up end QEMU, so that a failed boot is noticed at once instead of at the deadline.

The serial console is kept in a log, and the log is what every error quotes. A life: ``start`` → ``wait_until_answers``
→ … → ``end``, which asks the guest to power off and then ends QEMU by its process id. Should this process die without
a chance to do that, the kernel ends QEMU (PR_SET_PDEATHSIG, set by ``setpriv``).
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolchain import ports, process
from toolchain.errors import ArtefactMissing, BoardSilent, ProgramMissing, UserError

HOST_SEEN_FROM_GUEST = "10.0.2.2"
"""The host's loopback, as QEMU's user-mode network shows it to the guest."""

LEAN_INIT = "/usr/local/sbin/pi-init"
"""Starts sshd and nothing else; touching /run/poweroff ends it."""

_POLL_S = 0.5
_BANNER_WAIT_S = 10.0
_PORT_TRIES = 5
_TAIL_LINES = 12

_SYMPTOMS: tuple[tuple[str, str], ...] = (
    (
        r"no devices to configure|Gave up waiting for.*network|ipconfig: .*: SIOCGIFINDEX",
        "the initramfs has no network driver: regenerate it with an explicit module list (./inv build-image)",
    ),
    (
        r"mount: mounting \S+ on \S+ failed",
        "the NFS server answers, but does not export that path to this machine: ./inv export-nfsroot, then try again",
    ),
    (
        r"Kernel panic - not syncing: .*init",
        "the tree mounts, but its init does not run: check the server's Minor_Versions and the tree's /sbin/init",
    ),
    (r"Kernel panic", "read the console log from its end upwards: the first complaint above the panic is the cause"),
    (r"\(initramfs\)", "the initramfs gave up and waits for a person: the lines above its prompt say why"),
)

_DEAD = re.compile(r"Kernel panic - not syncing.*|^\(initramfs\)\s*$", re.MULTILINE)

_MOUNT_REFUSED = re.compile(
    r"mount: mounting \S+ on \S+ failed: (?:No such file or directory|Permission denied|Operation not permitted)"
)
_MOUNT_REFUSALS = 3
"""The initramfs goes on trying for minutes, but a server that answers so thrice will not change its mind."""


@dataclass(frozen=True)
class _Emulation:
    """How QEMU plays an architecture."""

    program: str
    cpu: str
    kernel_flavour: str
    console: str


_EMULATIONS = {
    "armhf": _Emulation("qemu-system-arm", "cortex-a7", "armmp", "ttyAMA0"),
    "arm64": _Emulation("qemu-system-aarch64", "cortex-a53", "arm64", "ttyAMA0"),
}


@dataclass(frozen=True)
class BootFiles:
    """Kernel and initramfs of a tree, and the kernel's release."""

    kernel: Path
    initrd: Path
    release: str


def boot_files(tree: Path, architecture: str) -> BootFiles:
    """The newest kernel in the tree's /boot that has an initramfs and that QEMU's ``virt`` machine can boot.

    Raises ArtefactMissing.
    """
    flavour = _EMULATIONS[architecture].kernel_flavour
    boot = tree / "boot"
    releases = [path.name.removeprefix("vmlinuz-") for path in boot.glob("vmlinuz-*")]
    whole = [name for name in releases if (boot / f"initrd.img-{name}").is_file()]
    usable = [name for name in whole if flavour in name]
    if not usable:
        raise ArtefactMissing(
            f"{tree} cannot be booted by QEMU",
            expected=f"boot/vmlinuz-…-{flavour} and its initrd.img",
            found=(f"kernels for boards only ({', '.join(whole)})" if whole else f"no whole pair among {releases}")
            if releases
            else "no kernel in boot/",
            fix="build the bootable profile with the distribution's kernel "
            "(image.profile: bootable, image.kernel: distribution), then export again",
        )
    newest = max(usable, key=_version_key)
    return BootFiles(boot / f"vmlinuz-{newest}", boot / f"initrd.img-{newest}", newest)


def _version_key(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def qemu_version(architecture: str = "armhf") -> str:
    """Version of the QEMU that would be used, such as ``7.2.22``."""
    program = process.require_program(_EMULATIONS[architecture].program, "to boot the exported tree")
    text = process.output_of([program, "--version"])
    found = re.search(r"version (\d+(?:\.\d+)+)", text)
    return found[1] if found else text.splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """What is booted, and how.

    ``nfs_path`` and ``nfs_port`` are where the server on this host's loopback offers the tree. ``init`` is ``lean``
    or ``systemd``. ``extra_arguments`` are appended to the kernel's command line.
    """

    boot: BootFiles
    nfs_path: str
    nfs_port: int = 2049
    architecture: str = "armhf"
    init: str = "lean"
    memory_mib: int = 1024
    cpus: int = 2
    extra_arguments: str = ""

    def kernel_command_line(self) -> str:
        """The kernel's command line.

        Raises UserError for a path that cannot be written there.
        """
        if re.search(r"[\s,:\"']", self.nfs_path):
            raise UserError(
                f"the tree at {self.nfs_path} cannot be named on a kernel command line",
                expected="a path without blanks, quotes, commas and colons",
                found=self.nfs_path,
                fix="export to another folder: ./inv export-nfsroot --folder=PATH",
            )
        words = [
            f"console={_EMULATIONS[self.architecture].console}",
            "boot=nfs4 root=/dev/nfs rw ip=dhcp",
            f"nfsroot={HOST_SEEN_FROM_GUEST}:{self.nfs_path},vers=4.1,port={self.nfs_port}",
            "net.ifnames=0 panic=5",
        ]
        if self.init == "lean":
            words.append(f"init={LEAN_INIT}")
        if self.extra_arguments:
            words.append(self.extra_arguments)
        return " ".join(words)

    def command(self, ssh_port: int, console: Path) -> list[str]:
        """QEMU's command line: SSH on ``ssh_port`` of the loopback, the serial console into ``console``.

        Only options that QEMU 7.2 and 10.0 read alike.
        """
        emulation = _EMULATIONS[self.architecture]
        return [
            emulation.program,
            "-M", "virt", "-cpu", emulation.cpu, "-smp", str(self.cpus), "-m", str(self.memory_mib),
            "-kernel", str(self.boot.kernel), "-initrd", str(self.boot.initrd),
            "-append", self.kernel_command_line(),
            "-netdev", f"user,id=n0,hostfwd=tcp:127.0.0.1:{ssh_port}-:22",
            "-device", "virtio-net-device,netdev=n0", "-device", "virtio-rng-device",
            "-display", "none", "-monitor", "none", "-serial", f"file:{str(console).replace(',', ',,')}", "-no-reboot",
        ]  # fmt: skip


class Machine:
    """A virtual machine. ``console`` is the log of its serial console, ``ssh_port`` its SSH on 127.0.0.1."""

    def __init__(self, spec: MachineSpec, console: Path) -> None:
        self.spec = spec
        self.console = console
        self.ssh_port = 0
        self.boot_seconds: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._complaints = console.with_suffix(".qemu.log")

    @property
    def pid(self) -> int | None:
        """Process id of QEMU, None while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start QEMU; returns when it runs, long before the guest answers.

        Raises ProgramMissing, or BoardSilent when QEMU itself refuses.
        """
        if self.pid is not None:
            return
        program = _EMULATIONS[self.spec.architecture].program
        process.require_program(program, "to boot the exported tree")
        process.require_program("setpriv", "to end QEMU together with this program")
        self.console.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_PORT_TRIES):
            self.console.write_bytes(b"")
            self.ssh_port = ports.free_port()
            command = self.spec.command(self.ssh_port, self.console)
            with self._complaints.open("wb") as complaints:
                complaints.write(f"$ {process.pasteable(command)}\n".encode())
                complaints.flush()
                try:
                    self._process = subprocess.Popen(
                        ["setpriv", "--pdeathsig", "TERM", *command],
                        stdin=subprocess.DEVNULL,
                        stdout=complaints,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                except FileNotFoundError as fault:
                    raise ProgramMissing(f"cannot run {program}", fix="apt-get install util-linux") from fault
            self._began = time.monotonic()
            # A port that another program took in between makes QEMU end at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self._process.poll() is None:
                return
            if "host forwarding" not in self._complaints.read_text(errors="replace"):
                break
        raise self._silence("QEMU did not start", "a running virtual machine")

    def wait_until_answers(self, limit_s: float, *, on_line: Callable[[str], None] | None = None) -> float:
        """Wait for the guest's SSH server; return the seconds since the start.

        ``on_line`` sees the console's lines. The forwarded port alone proves nothing (QEMU accepts for the guest),
        so the server's banner is read. Raises BoardSilent when ``limit_s`` passes, and at once when the kernel
        panics, the initramfs gives up or QEMU ends.
        """
        deadline = time.monotonic() + limit_s
        shown = 0
        while True:
            text = self.console_text()
            if on_line is not None:
                *lines, _ = text[shown:].split("\n")
                for line in lines:
                    on_line(line)
                    shown += len(line) + 1
            if self.pid is None:
                raise self._silence("the virtual machine ended before it answered", "an SSH server that answers")
            if _death(text):
                # panic=5: the lines that explain a panic may still be on their way
                time.sleep(1.0)
                raise self._silence("the virtual machine gave up", "an SSH server that answers")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silence(
                    "the virtual machine did not answer in time", f"an SSH server that answers within {limit_s:.0f} s"
                )
            if _has_banner(self.ssh_port, min(_BANNER_WAIT_S, left)):
                self.boot_seconds = time.monotonic() - self._began
                return self.boot_seconds
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def end(self, power_off: Callable[[], object] | None = None, *, polite_s: float = 30.0) -> None:
        """End the machine: call ``power_off``, give the guest ``polite_s`` seconds, then end QEMU by its id.

        It is given them too where ``power_off`` fails: a guest may be gone before it has answered.
        """
        running = self._process
        if running is None:
            return
        try:
            if power_off is not None and running.poll() is None:
                with contextlib.suppress(UserError, OSError):
                    power_off()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(polite_s)
        finally:
            if running.poll() is None:
                process.end_group(running)
            self._process = None

    def console_text(self) -> str:
        """What the serial console has shown, without terminal control codes."""
        try:
            text = self.console.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>].?|\r", "", text)

    def _silence(self, summary: str, expected: str) -> BoardSilent:
        text = self.console_text()
        if death := _death(text):
            found = death
        elif self._process is not None and (code := self._process.poll()) is not None:
            complaints = self._complaints.read_text(errors="replace").splitlines()[1:]
            found = f"QEMU: {process.explain_exit(code)}" + (f": {complaints[-1]}" if complaints else "")
        else:
            found = "silence" if not text.strip() else "a console that goes on, no SSH"
        lines = text.strip().splitlines()[-_TAIL_LINES:]
        shown = "\n".join(f"      | {line}" for line in lines) if lines else "      | (nothing at all)"
        fix = next((advice for pattern, advice in _SYMPTOMS if re.search(pattern, text)), "")
        if not fix:
            fix = "allow more time (device.boot_timeout_s) when the machine is busy; else read the console log"
        return BoardSilent(
            summary, expected=expected, found=f"{found}\n    end of its console ({self.console}):\n{shown}", fix=fix
        )


@contextlib.contextmanager
def running_machine(spec: MachineSpec, console: Path, *, boot_timeout_s: float) -> Iterator[Machine]:
    """A machine that answers over SSH; ended on any exit. Raises as ``Machine`` does."""
    machine = Machine(spec, console)
    try:
        machine.start()
        machine.wait_until_answers(boot_timeout_s)
        yield machine
    finally:
        machine.end()


def _death(console: str) -> str:
    """The line after which no boot will succeed; empty while there is hope."""
    if dead := _DEAD.search(console):
        return dead[0].strip()
    refusals = _MOUNT_REFUSED.findall(console)
    return refusals[-1] if len(refusals) >= _MOUNT_REFUSALS else ""


def _has_banner(port: int, wait_s: float) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as link:
            link.settimeout(wait_s)
            return link.recv(64).startswith(b"SSH-")
    except OSError:
        return False


__all__ = [
    "BootFiles",
    "Machine",
    "MachineSpec",
    "boot_files",
    "qemu_version",
    "running_machine",
]
