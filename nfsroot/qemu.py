"""Run a virtual machine that boots an exported tree over NFS, in place of a board.

The machine is QEMU's ``virt`` with the kernel and the initramfs from the tree's /boot. The machine uses QEMU's
user-mode network, in which the guest reaches the loopback interface of QEMU's namespace at the address 10.0.2.2. The
NFS server listens on this loopback interface, and a free port on the interface is forwarded to the guest's SSH server.
The machine and the server must run in a ``private_network``, because the server accepts connections from unprivileged
ports. The kernel command line is

    console=ttyAMA0 boot=nfs4 root=/dev/nfs rw ip=dhcp nfsroot=10.0.2.2:PATH,vers=4.1,port=N net.ifnames=0 panic=5
    cryptomgr.notests

For the lean init, ``init=/usr/local/sbin/pi-init`` is added. ``boot=nfs4`` selects an initramfs script from the tree,
because the NFS client in Debian's initramfs supports only versions 2 and 3. With ``panic=5`` and ``-no-reboot``, QEMU
exits after a kernel panic, so that a failed boot is detected before the time limit. ``cryptomgr.notests`` omits the
self-tests of the kernel's ciphers, which take more than a second in emulation.

The serial console is written to a log, and errors quote its last lines. Call ``start``, then ``wait_until_answers``,
and finally ``end``, which asks the guest to power off and then terminates QEMU. If this process is killed, the kernel
terminates QEMU (PR_SET_PDEATHSIG, set by ``setpriv``).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nfsroot.tree import file_in, follow
from toolchain import ports, process
from toolchain.board_events import TERMINAL_CODES
from toolchain.errors import ArtefactMissing, BoardSilent, PlatformMismatch, UserError

HOST_SEEN_FROM_GUEST = "10.0.2.2"
"""The address of the host's loopback interface as seen from the guest in QEMU's user-mode network."""

LEAN_INIT = "/usr/local/sbin/pi-init"
"""An init that starts only sshd and shuts down when /run/poweroff is created."""

_POLL_S = 0.5
_BANNER_WAIT_S = 10.0
_PORT_TRIES = 5
_TAIL_LINES = 12

_SYMPTOMS: tuple[tuple[str, str], ...] = (
    (
        r"no devices to configure|Gave up waiting for.*network|ipconfig: .*: SIOCGIFINDEX",
        "the initramfs has no network driver: rebuild the image (./inv build-image)",
    ),
    (
        r"mount: mounting \S+ on \S+ failed",
        "the NFS server does not export that path to this machine: run ./inv export-nfsroot and try again",
    ),
    (
        r"Kernel panic - not syncing: .*init",
        "the tree is mounted, but its init does not run: check the server's Minor_Versions and the tree's /sbin/init",
    ),
    (r"Kernel panic", "read the console log upwards from its end: the first error above the panic is the cause"),
    (r"\(initramfs\)", "the initramfs stopped at its prompt: read the console log above the prompt"),
)

_DEAD = re.compile(r"Kernel panic - not syncing.*|^\(initramfs\)\s*$", re.MULTILINE)

_MOUNT_REFUSED = re.compile(
    r"mount: mounting \S+ on \S+ failed: (?:No such file or directory|Permission denied|Operation not permitted)"
)
_MOUNT_REFUSALS = 3
"""The initramfs retries for minutes. After this number of rejected mounts, the boot counts as failed."""


@dataclass(frozen=True)
class _Emulation:
    """QEMU's parameters for an architecture."""

    program: str
    cpus: tuple[str, ...]
    """QEMU's names for the CPUs on which the suite is run; the first is the default."""
    kernel_flavour: str


_EMULATIONS = {
    "armhf": _Emulation("qemu-system-arm", ("cortex-a7",), "armmp"),
    "arm64": _Emulation("qemu-system-aarch64", ("cortex-a53", "cortex-a72", "cortex-a76"), "arm64"),
}


def program_of(architecture: str) -> str:
    """Return the name of the program that emulates boards with this architecture, or an empty string if none does."""
    return _EMULATIONS[architecture].program if architecture in _EMULATIONS else ""


def cpu_of(architecture: str, wanted: str) -> str:
    """Return QEMU's name for the CPU ``wanted``, or for the architecture's default CPU if ``wanted`` is empty.

    Raises UserError for an unsuitable CPU.
    """
    cpus = _EMULATIONS[architecture].cpus
    if wanted and wanted not in cpus:
        raise UserError(
            f"the virtual machine does not support the CPU {wanted} for {architecture}",
            expected=f"one of {', '.join(cpus)}",
            found=wanted,
            fix="set device.cpu (--cpu) to one of these CPUs, or change image.architecture (--architecture)",
        )
    return wanted or cpus[0]


@dataclass(frozen=True)
class BootFiles:
    """A tree's kernel and initramfs, and the kernel release."""

    kernel: Path
    initrd: Path
    release: str


def boot_files(tree: Path, architecture: str) -> BootFiles:
    """Find the newest kernel in the tree's /boot that has an initramfs and boots on QEMU's ``virt`` machine.

    Raises PlatformMismatch if there is only a kernel for another architecture, or ArtefactMissing if there is no
    suitable kernel.
    """
    flavour = _EMULATIONS[architecture].kernel_flavour
    releases = [path.name.removeprefix("vmlinuz-") for path in follow(tree, "boot").glob("vmlinuz-*")]
    whole = {
        name: BootFiles(kernel, initrd, name)
        for name in releases
        if (kernel := file_in(tree, f"boot/vmlinuz-{name}")) and (initrd := file_in(tree, f"boot/initrd.img-{name}"))
    }
    usable = [name for name in whole if flavour in name]
    others = [
        name
        for name, other in _EMULATIONS.items()
        if name != architecture and any(other.kernel_flavour in release for release in whole)
    ]
    if others and not usable:
        raise PlatformMismatch(
            f"{tree} cannot be booted as an {architecture} system",
            expected=f"boot/vmlinuz-…-{flavour} and its initrd.img",
            found=f"a kernel for {others[0]} ({', '.join(whole)})",
            fix=f"use --architecture={others[0]}, or export the image for {architecture} again",
        )
    if not usable:
        raise ArtefactMissing(
            f"{tree} cannot be booted by QEMU",
            expected=f"boot/vmlinuz-…-{flavour} and its initrd.img",
            found=(f"kernels for boards only ({', '.join(whole)})" if whole else f"no complete pair among {releases}")
            if releases
            else "no kernel in boot/",
            fix="build the bootable profile with the distribution's kernel "
            "(image.profile: bootable, image.kernel: distribution), then export again",
        )
    return whole[max(usable, key=_version_key)]


def _version_key(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def qemu_version(architecture: str = "armhf") -> str:
    """Return the installed QEMU's version, such as ``7.2.22``."""
    program = process.require_program(_EMULATIONS[architecture].program, "to boot the exported tree")
    text = process.output_of([program, "--version"])
    found = re.search(r"version (\d+(?:\.\d+)+)", text)
    return found[1] if found else text.splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """The parameters of a virtual machine.

    ``nfs_path`` is the tree's path on the NFS server, and ``nfs_port`` the server's port on the loopback interface.
    ``init`` is ``lean`` or ``systemd``; ``cpu`` is a name from ``cpu_of``. ``extra_arguments`` are added to the kernel
    command line. If ``disk`` (a card's raw image) is given, the machine does not use NFS, and ``extra_arguments`` must
    select the root filesystem on the card.
    """

    boot: BootFiles
    nfs_path: str = ""
    nfs_port: int = 2049
    disk: Path | None = None
    architecture: str = "armhf"
    init: str = "lean"
    cpu: str = ""
    memory_mib: int = 1024
    cpus: int = 2
    extra_arguments: str = ""

    def kernel_command_line(self) -> str:
        """Return the kernel command line.

        Raises UserError for a path that is invalid on a kernel command line.
        """
        if re.search(r"[\s,:\"']", self.nfs_path):
            raise UserError(
                f"the path {self.nfs_path} is invalid on a kernel command line",
                expected="a path without spaces, quotes, commas or colons",
                found=self.nfs_path,
                fix="export to another folder: ./inv export-nfsroot --folder=PATH",
            )
        network = (
            "boot=nfs4 root=/dev/nfs rw ip=dhcp "
            f"nfsroot={HOST_SEEN_FROM_GUEST}:{self.nfs_path},vers=4.1,port={self.nfs_port}"
        )
        words = [
            "console=ttyAMA0",
            *([] if self.disk else [network]),
            "net.ifnames=0 panic=5 cryptomgr.notests",
        ]
        if self.init == "lean":
            words.append(f"init={LEAN_INIT}")
        if self.extra_arguments:
            words.append(self.extra_arguments)
        return " ".join(words)

    def command(self, ssh_port: int, console: Path) -> list[str]:
        """Return QEMU's command line.

        QEMU forwards the loopback port ``ssh_port`` to the guest's SSH server and writes the serial console to
        ``console``. The command line contains only options that QEMU 7.2 and 10.0 interpret in the same way.
        """
        emulation = _EMULATIONS[self.architecture]
        drive = f"file={str(self.disk).replace(',', ',,')},if=none,id=card,format=raw"
        return [
            emulation.program,
            "-M", "virt", "-cpu", cpu_of(self.architecture, self.cpu),
            "-smp", str(self.cpus), "-m", str(self.memory_mib),
            "-kernel", str(self.boot.kernel), "-initrd", str(self.boot.initrd),
            "-append", self.kernel_command_line(),
            "-netdev", f"user,id=n0,hostfwd=tcp:127.0.0.1:{ssh_port}-:22",
            "-device", "virtio-net-device,netdev=n0", "-device", "virtio-rng-device",
            *(["-drive", drive, "-device", "virtio-blk-device,drive=card"] if self.disk else []),
            "-display", "none", "-monitor", "none", "-serial", f"file:{str(console).replace(',', ',,')}", "-no-reboot",
        ]  # fmt: skip


class Machine:
    """A virtual machine.

    ``console`` is the log of the machine's serial console; ``ssh_port`` is the port on 127.0.0.1 that is forwarded to
    the guest's SSH server.
    """

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
        """QEMU's process ID; None if it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start QEMU, and return before the guest responds.

        Raises ProgramMissing, or BoardSilent if QEMU fails.
        """
        if self.pid is not None:
            return
        process.require_program(_EMULATIONS[self.spec.architecture].program, "to boot the exported tree")
        process.require_program("setpriv", "to stop QEMU together with this program")
        self.console.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_PORT_TRIES):
            self.console.write_bytes(b"")
            self.ssh_port = ports.free_port()
            command = self.spec.command(self.ssh_port, self.console)
            with self._complaints.open("wb") as complaints:
                complaints.write(f"$ {process.pasteable(command)}\n".encode())
                complaints.flush()
                self._process = process.tied(command, output=complaints)
            self._began = time.monotonic()
            # QEMU exits immediately if another program has opened the port in the meantime.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self._process.poll() is None:
                return
            if "host forwarding" not in self._complaints.read_text(errors="replace"):
                break
        raise self._silence("QEMU did not start", "a running virtual machine")

    def wait_until_answers(self, limit_s: float) -> None:
        """Wait for the guest's SSH server.

        QEMU itself accepts connections to the port, so the method also waits for the server's banner. Raises
        BoardSilent after ``limit_s`` seconds, or immediately after a kernel panic, an initramfs failure or the exit of
        QEMU.
        """
        deadline = time.monotonic() + limit_s
        while True:
            text = self.console_text()
            if self.pid is None:
                raise self._silence(
                    "the virtual machine stopped before its SSH server responded", "an SSH server that responds"
                )
            if _death(text):
                # More lines that explain the panic may follow in the 5 seconds (panic=5) before QEMU exits.
                time.sleep(1.0)
                raise self._silence("the virtual machine failed to boot", "an SSH server that responds")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silence(
                    "the virtual machine did not respond in time", f"an SSH server that responds within {limit_s:.0f} s"
                )
            if ports.is_ssh(ports.LOOPBACK, self.ssh_port, limit_s=min(_BANNER_WAIT_S, left)):
                self.boot_seconds = time.monotonic() - self._began
                return
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def end(self, power_off: Callable[[], object] | None = None, *, polite_s: float = 30.0) -> None:
        """Shut down the machine: call ``power_off``, give QEMU ``polite_s`` seconds to exit, then terminate it.

        The method waits even if ``power_off`` fails, because the guest may shut down before it responds.
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
        """Return the serial console's output without terminal control codes."""
        return _console_text(self.console)

    def _silence(self, summary: str, expected: str) -> BoardSilent:
        text = self.console_text()
        if death := _death(text):
            found = death
        elif self._process is not None and (code := self._process.poll()) is not None:
            complaints = self._complaints.read_text(errors="replace").splitlines()[1:]
            found = f"QEMU: {process.explain_exit(code)}" + (f": {complaints[-1]}" if complaints else "")
        else:
            found = "no output" if not text.strip() else "console output, but no SSH"
        fix = next((advice for pattern, advice in _SYMPTOMS if re.search(pattern, text)), "")
        if not fix:
            fix = "on a busy machine, increase device.boot_timeout_s; otherwise read the console log"
        return BoardSilent(summary, expected=expected, found=f"{found}\n    {console_tail(self.console)}", fix=fix)


def _console_text(console: Path) -> str:
    try:
        text = console.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return TERMINAL_CODES.sub("", text).replace("\r", "")


def console_tail(console: Path) -> str:
    """Return the last lines of a serial console's log, formatted for an error message."""
    lines = _console_text(console).strip().splitlines()[-_TAIL_LINES:] or ["(no output)"]
    return "\n".join([f"end of its console ({console}):", *(f"      | {line}" for line in lines)])


@contextlib.contextmanager
def running_machine(spec: MachineSpec, console: Path, *, boot_timeout_s: float) -> Iterator[Machine]:
    """Run a machine, wait for its SSH server, and shut it down at the end. Raises the same errors as ``Machine``."""
    machine = Machine(spec, console)
    try:
        machine.start()
        machine.wait_until_answers(boot_timeout_s)
        yield machine
    finally:
        machine.end()


def _death(console: str) -> str:
    """Return the console line that shows that the boot failed, or an empty string if there is none."""
    if dead := _DEAD.search(console):
        return dead[0].strip()
    refusals = _MOUNT_REFUSED.findall(console)
    return refusals[-1] if len(refusals) >= _MOUNT_REFUSALS else ""
