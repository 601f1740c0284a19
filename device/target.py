"""labgrid resources and drivers for a board: an exported tree, its NFS server, a virtual machine, a console, and SSH.

labgrid's QEMUDriver is not used, because it waits indefinitely for QEMU to open the console and reads the console only
on request. A failed boot would therefore produce no error and no log. VirtualBoardDriver uses ``nfsroot.qemu`` instead.
labgrid's SSHDriver accepts any host key; PinnedSSHDriver accepts only the expected key.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attr
from labgrid.driver import Driver, ExecutionError, SerialDriver, SSHDriver
from labgrid.factory import target_factory
from labgrid.resource import Resource

from nfsroot import access, host_keys, qemu, serve
from nfsroot.layout import Layout
from toolchain import board_events, process
from toolchain.errors import BoardSilent

_text = attr.validators.instance_of(str)
_whole = attr.validators.instance_of(int)

_CONSOLE_POLL_S = 0.2
_CONSOLE_RETRY_S = 1.0
_CONSOLE_BYTES = 4096

POWER_OFF: Mapping[str, tuple[str, ...]] = {
    "lean": ("touch", "/run/poweroff"),
    "systemd": ("systemctl", "poweroff", "--no-wall"),
}
"""The command that shuts down the guest, by init system."""


@target_factory.reg_resource
@attr.s(eq=False)
class ExportedTree(Resource):  # type: ignore[misc]
    """A root filesystem in a folder on this host."""

    folder: str = attr.ib(validator=_text)
    architecture: str = attr.ib(default="armhf", validator=_text)


@target_factory.reg_driver
@attr.s(eq=False)
class TreeServerDriver(Driver):  # type: ignore[misc]
    """A driver that serves the exported tree over NFS while the driver is active.

    If ``second_folder`` is set, the driver also serves this folder. ``second_folder`` contains the bare system from
    which the virtual machine enters the tree.
    """

    bindings = {"tree": "ExportedTree"}  # noqa: RUF012 - labgrid requires a plain dict

    address: str = attr.ib(default="127.0.0.1", validator=_text)
    port: int = attr.ib(default=0, validator=_whole)
    allowed: str = attr.ib(default="127.0.0.1", validator=_text)
    log: str = attr.ib(default="", validator=_text)
    second_folder: str = attr.ib(default="", validator=_text)
    events: Path | None = attr.ib(default=None, converter=attr.converters.optional(Path))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._running = contextlib.ExitStack()
        self.server: serve.NfsServer | None = None

    def on_activate(self) -> None:
        """Start the server and wait until it responds. Port 0 selects a free port."""
        self.server = self._running.enter_context(
            serve.running_server(
                [Path(folder) for folder in (self.tree.folder, self.second_folder) if folder],
                address=self.address,
                port=self.port,
                clients=tuple(self.allowed.split()),
                log=Path(self.log) if self.log else None,
            )
        )
        board_events.append(self.events, "nfs", f"the server for {self.server.source()} has started")

    def on_deactivate(self) -> None:
        """Stop the server."""
        self._running.close()
        if self.server is not None:
            board_events.append(self.events, "nfs", "the server has stopped")
            self.server = None

    def source(self, address: str = "") -> tuple[str, int]:
        """Return ``ADDRESS:/path`` and the port for mounting the tree.

        ``address`` is the address at which the board reaches this host.
        """
        if self.server is None:
            raise RuntimeError("the tree is served only while the driver is active")
        return f"{address or self.server.address}:{self.server.folders[0]}", self.server.port


@target_factory.reg_driver
@attr.s(eq=False)
class VirtualBoardDriver(Driver):  # type: ignore[misc]
    """A driver that switches a virtual machine on and off.

    The machine boots the served tree or the system in the server's ``second_folder``.
    """

    bindings = {  # noqa: RUF012 - labgrid requires a plain dict
        "tree": "ExportedTree",
        "server": "TreeServerDriver",
        "networkservice": "NetworkService",
    }

    console: str = attr.ib(validator=_text)
    events: Path | None = attr.ib(default=None, converter=attr.converters.optional(Path))
    init: str = attr.ib(default="lean", validator=attr.validators.in_(tuple(POWER_OFF)))
    cpu: str = attr.ib(default="", validator=_text)
    memory_mib: int = attr.ib(default=1024, validator=_whole)
    cpus: int = attr.ib(default=2, validator=_whole)
    boot_timeout_s: float = attr.ib(default=900.0, converter=float)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.machine: qemu.Machine | None = None
        self._recording = contextlib.ExitStack()

    def on_deactivate(self) -> None:
        """Stop the machine immediately if it is running."""
        if self.machine is not None:
            self._end(self.machine)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def on(self) -> None:
        """Boot the machine, wait for SSH, and set the port of the NetworkService. Raises BoardSilent."""
        if self.machine is not None:
            return
        tree = Path(self.server.second_folder or self.tree.folder)
        _, port = self.server.source()
        spec = qemu.MachineSpec(
            boot=qemu.boot_files(tree, self.tree.architecture),
            nfs_path=str(tree),
            nfs_port=port,
            architecture=self.tree.architecture,
            init=self.init,
            cpu=self.cpu,
            memory_mib=self.memory_mib,
            cpus=self.cpus,
        )
        machine = qemu.Machine(spec, Path(self.console))
        try:
            board_events.append(self.events, "power", "on: the virtual machine starts")
            machine.start()
            self._recording.enter_context(board_events.following(machine.console, self.events, "console"))
            machine.wait_until_answers(self.boot_timeout_s)
        except BaseException:
            self._end(machine)
            raise
        self.machine = machine
        self.networkservice.port = machine.ssh_port

    @Driver.check_active  # type: ignore[untyped-decorator]
    def off(self, power_off: Callable[[], object] | None = None) -> None:
        """Stop the machine. ``power_off``, if given, shuts down the guest; otherwise, the machine stops immediately."""
        if self.machine is not None:
            self._end(self.machine, power_off)

    def _end(self, machine: qemu.Machine, power_off: Callable[[], object] | None = None) -> None:
        with self._recording:
            machine.end(power_off, polite_s=30.0 if self.init == "lean" else 90.0)
        self.machine = None
        board_events.append(self.events, "power", "off: the virtual machine has stopped")


@target_factory.reg_driver
@attr.s(eq=False)
class ConsoleRecorder(SerialDriver):  # type: ignore[misc]
    """labgrid's SerialDriver with a thread that records the console's output while the driver is active.

    If reading fails, the port is opened again, because a console server may not respond while the board is off. A run
    does not fail if the console cannot be read.
    """

    console: str = attr.ib(default="", validator=_text)
    events: Path | None = attr.ib(default=None, converter=attr.converters.optional(Path))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._recording = contextlib.ExitStack()

    def on_activate(self) -> None:
        """Start recording. labgrid requires IPv6 addresses to be in brackets."""
        if ":" in self.port.host:
            self.port.host = f"[{self.port.host.strip('[]')}]"
        super().on_activate()

    def open(self) -> None:
        """Start recording."""
        # labgrid omits the brackets around an IPv6 address in a URL, so they are added here.
        self.serial.port = re.sub(r"//(.*:.*)(:\d+)", r"//[\1]\2", self.serial.port)
        log, ended = Path(self.console), threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self._recording.enter_context(board_events.following(log, self.events, "console"))
        recorder = threading.Thread(target=self._record, args=(log, ended), name="console", daemon=True)
        recorder.start()
        self._recording.callback(recorder.join)
        self._recording.callback(ended.set)

    def close(self) -> None:
        """Stop recording."""
        self._recording.close()

    def _record(self, log: Path, ended: threading.Event) -> None:
        shown = ""
        while not ended.is_set():
            try:
                super().open()
                shown = ""
                self.serial.timeout = _CONSOLE_POLL_S
                with log.open("ab", buffering=0) as sink:
                    while not ended.is_set():
                        sink.write(self.serial.read(_CONSOLE_BYTES))  # labgrid's own read is not safe in a thread
            except OSError as fault:  # includes pyserial's errors
                if str(fault) != shown:
                    board_events.append(self.events, "console", f"the console cannot be read: {fault}")
                shown = str(fault)
                ended.wait(_CONSOLE_RETRY_S)
            finally:
                with contextlib.suppress(OSError):
                    super().close()


@target_factory.reg_driver
@attr.s(eq=False)
class PinnedSSHDriver(SSHDriver):  # type: ignore[misc]
    """labgrid's SSHDriver with a pinned host key and an error that explains a failed login.

    Without ``known_hosts``, ssh uses the user's own known_hosts file. ssh uses the first value of an option, so this
    class's options precede labgrid's.
    """

    key: str = attr.ib(default="", validator=_text)
    """The login key. labgrid's ``keyfile`` is not used, because ssh expands ``%`` in its argument."""
    known_hosts: str = attr.ib(default="", validator=_text)
    export: str = attr.ib(default="", validator=_text)
    """The folder of the export, whose host keys are written to ``known_hosts`` before each login."""

    @property
    def access(self) -> access.SshAccess:
        """The board's address and keys."""
        return access.SshAccess(
            host=self.networkservice.address,
            port=self.networkservice.port,
            user=self._get_username(),
            key=Path(self.key) if self.key else None,
            known_hosts=Path(self.known_hosts) if self.known_hosts else None,
        )

    def on_activate(self) -> None:
        """Log in.

        Raises AccessDenied if the login is refused, or BoardSilent if no login succeeds within ``connection_timeout``
        seconds.
        """
        self._last_error = ""
        self.ssh_prefix: list[str] = []
        try:
            super().on_activate()
        except Exception as fault:
            if not str(fault).startswith("Timeout while waiting for ssh"):
                raise
            raise BoardSilent(
                f"{self.access} cannot be reached over SSH",
                expected=f"a login within {self.connection_timeout:.0f} s",
                found=self._last_error or "no answer",
                fix="check that the board is on, that it has booted the exported tree, and that the address is correct",
            ) from fault

    def on_deactivate(self) -> None:
        """Log out without waiting for a board that does not respond."""
        if self._keepalive is not None:
            self._keepalive.terminate()
        super().on_deactivate()

    def _start_own_master_once(self, timeout: float) -> Any:
        # A board with nfs.overlay stores its own host keys on this PC at its first boot, that is, during the run.
        if self.export:
            host_keys.pin(Layout(Path(self.export)), Path(self.known_hosts))
        before: list[str] = self.ssh_prefix
        self.ssh_prefix = [*self.access.options(), *before]
        try:
            return super()._start_own_master_once(timeout)
        except ExecutionError as fault:
            shutil.rmtree(self.tmpdir, ignore_errors=True)
            output = fault.stdout if isinstance(fault.stdout, list) else []
            lines = [line.decode(errors="replace") if isinstance(line, bytes) else str(line) for line in output]
            self._last_error = " ".join(line.strip() for line in lines if line.strip())
            if (error := access.diagnose(self.access, "\n".join(lines))) is not None:
                raise error from fault
            raise
        finally:
            self.ssh_prefix = before

    @Driver.check_active  # type: ignore[untyped-decorator]
    def stream(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        on_line: Callable[[str], None] | None = None,
        limit_s: float,
        log: Path | None = None,
        check: bool = True,
    ) -> process.Completed:
        """Run a shell command on the board with ``stdin`` as input. Pass each output line to ``on_line`` as it arrives.

        labgrid's ``run`` returns the output only at the end. Raises the errors of ``process.run``.
        """
        return process.run(
            self._argv(command),
            stdin=stdin,
            on_line=on_line,
            limit_s=limit_s,
            log=log,
            check=check,
            merge_stderr=False,
        )

    def _argv(self, command: str) -> list[str]:
        """Return the command line that runs a command in the board's shell."""
        words = ["ssh", "-x", *self.ssh_prefix, "-p", str(self.networkservice.port), "-l", self._get_username()]
        return [*words, self.networkservice.address, "--", f"sh -c {shlex.quote(command)}"]
