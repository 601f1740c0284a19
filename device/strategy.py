"""The labgrid strategy that boots a board and logs in: off → served → booted → shell.

All boards use this strategy. If the environment has no driver for a state, nothing is done to enter this state. For
example, a real board without a power switch is switched on by hand, and a board with its own system needs no server
unless it mounts the tree.
"""

from __future__ import annotations

import contextlib
import enum
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attr
from labgrid.driver import ExecutionError, USBPowerDriver
from labgrid.factory import target_factory
from labgrid.strategy import Strategy, StrategyError, never_retry

from device.target import POWER_OFF
from nfsroot.qemu import console_tail
from toolchain import board_events
from toolchain.errors import BoardSilent, UserError


class Status(enum.Enum):
    """The states of the board, in order."""

    off = 0
    served = 1
    booted = 2
    shell = 3


@target_factory.reg_driver
@attr.s(eq=False)
class BoardStrategy(Strategy):  # type: ignore[misc]
    """A strategy that brings the board to a given state. Each backward step undoes the corresponding forward step."""

    bindings = {  # noqa: RUF012 - labgrid requires a plain dict
        "server": {"TreeServerDriver", None},
        "board": {"VirtualBoardDriver", None},
        "power": {"NetworkPowerDriver", "USBPowerDriver", None},
        "card": {"USBSDMuxDriver", "USBSDWireDriver", None},
        "console": {"ConsoleRecorder", None},
        "ssh": "PinnedSSHDriver",
    }

    status: Status = attr.ib(default=Status.off)
    events: Path | None = attr.ib(default=None, converter=attr.converters.optional(Path))

    @never_retry  # type: ignore[untyped-decorator]
    def transition(self, status: str) -> None:
        """Go to a state through all intermediate states. After a failure, all later transitions raise StrategyError."""
        target = Status[status]
        while self.status.value < target.value:
            following = Status(self.status.value + 1)
            self._enter(following)
            self.status = following
        while self.status.value > target.value:
            self._leave(self.status)
            self.status = Status(self.status.value - 1)

    def force(self, status: str) -> None:
        """Set the state without switching the board (labgrid's ``--lg-initial-state``). Only ``off`` can be set."""
        if status != Status.off.name:
            raise StrategyError(f"the state {status} cannot be forced; only off can be forced")
        self.status = Status.off

    def abandon(self) -> None:
        """Deactivate all drivers after Ctrl-C or a failure, whatever the current state is."""
        for driver in (self.ssh, self.board, self.power, self.card, self.console, self.server):
            if driver is not None:
                self.target.deactivate(driver)
        self.status = Status.off

    def _enter(self, status: Status) -> None:
        if status is Status.served and self.server is not None:
            self.target.activate(self.server)
        elif status is Status.booted and self.board is not None:
            self.target.activate(self.board)
            self.board.on()
        elif status is Status.booted:
            self._boot()
        elif status is Status.shell:
            self._log_in()
            self._record("ssh", f"logged in as {self.ssh.access}")

    def _boot(self) -> None:
        """Record the console, connect the card, and switch the board off and on. Skip actions that have no driver."""
        if self.console is not None:
            self.target.activate(self.console)
        if self.power is not None:
            self.target.activate(self.power)
        if self.card is not None:
            self.target.activate(self.card)
            if self.power is not None:
                self._switch("off", self.power.off)
            self._connect_card()
        if self.power is not None:
            self._switch("off and on", self.power.cycle)

    def _connect_card(self) -> None:
        self._record("power", "the card is connected to the board")
        try:
            self.card.set_mode("dut")
        except Exception as fault:
            found = f"{type(fault).__name__}: {fault}"
            self._record("power", f"the card cannot be connected: {found}")
            raise UserError(
                "the SD card cannot be connected to the board",
                expected=f"a working {self.card.tool} on {self.card.mux.host}",
                found=found,
                fix="correct card=MODEL/SERIAL in lab.boards, or ensure that this user can log in over SSH to the PC "
                "that the device is connected to",
            ) from fault

    def _log_in(self) -> None:
        try:
            self.target.activate(self.ssh)
        except BoardSilent as fault:
            if self.console is None:
                raise
            raise BoardSilent(
                fault.summary,
                expected=fault.expected,
                found=f"{fault.found}\n    {console_tail(Path(self.console.console))}",
                fix=fault.fix,
            ) from fault

    def _leave(self, status: Status) -> None:
        if status is Status.shell:
            if self.board is not None:
                self.board.off(lambda: self._last_command(" ".join(POWER_OFF[self.board.init]), 30))
            if self.power is not None:
                self._last_command("sync", 60)
            self.target.deactivate(self.ssh)
        elif status is Status.booted and self.board is not None:
            self.target.deactivate(self.board)
        elif status is Status.booted:
            if self.power is not None:
                self._switch("off", self.power.off)
            for driver in filter(None, (self.power, self.card, self.console)):
                self.target.deactivate(driver)
        elif status is Status.served and self.server is not None:
            self.target.deactivate(self.server)

    def _switch(self, text: str, action: Callable[[], object]) -> None:
        """Switch the power. labgrid's power models raise different exceptions, which are all converted to UserError."""
        which = _port_of(self.power)
        self._record("power", f"{text}: {which}")
        try:
            action()
        except Exception as fault:
            found = f"{type(fault).__name__}: {fault}"
            self._record("power", f"the switch does not work: {found}")
            raise UserError(
                "the power switch of the board does not work",
                expected=f"a response from {which}",
                found=found,
                fix="correct power=MODEL/INDEX/HOST in lab.boards, or ensure that this PC can reach the switch",
            ) from fault

    def _record(self, source: str, text: str) -> None:
        board_events.append(self.events, source, text)

    def _last_command(self, command: str, limit_s: float) -> None:
        """Run a command before the board is switched off. A board that does not respond is switched off anyway."""
        with contextlib.suppress(ExecutionError, subprocess.TimeoutExpired):
            self.ssh.run(command, timeout=limit_s)


def _port_of(power: Any) -> str:
    """Return a description of the port or outlet that a driver switches, without the password in a switch's URL."""
    if isinstance(power, USBPowerDriver):
        return f"port {power.hub.index} of the USB hub {power.hub.path} on {power.hub.host}"
    return f"outlet {power.port.index} of the {power.port.model} switch at {power.port.host.rpartition('@')[2]}"


def cause_of(error: StrategyError) -> BaseException:
    """Return the first UserError in the error's chain of causes, or the innermost exception if there is none."""
    fault: BaseException = error
    while (inner := fault.__cause__) is not None:
        fault = inner
        if isinstance(fault, UserError):
            break
    return fault
