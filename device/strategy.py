"""The labgrid strategy that brings a board to a shell: off → served → booted → shell.

All boards use this strategy. A state without a driver in the environment requires no action: a real board
without a power switch is switched on by hand, and a board with its own system needs no server unless it mounts the
tree.
"""

from __future__ import annotations

import contextlib
import enum
import subprocess
from collections.abc import Callable
from pathlib import Path

import attr
from labgrid.driver import ExecutionError
from labgrid.factory import target_factory
from labgrid.strategy import Strategy, StrategyError, never_retry

from device.target import POWER_OFF
from toolchain import board_events
from toolchain.errors import UserError


class Status(enum.Enum):
    """The states of the board, in order."""

    off = 0
    served = 1
    booted = 2
    shell = 3


@target_factory.reg_driver
@attr.s(eq=False)
class BoardStrategy(Strategy):  # type: ignore[misc]
    """Brings the board to a state. Each step backwards undoes the corresponding step forwards."""

    bindings = {  # noqa: RUF012 - labgrid requires a plain dict
        "server": {"TreeServerDriver", None},
        "board": {"VirtualBoardDriver", None},
        "power": {"NetworkPowerDriver", None},
        "ssh": "PinnedSSHDriver",
    }

    status: Status = attr.ib(default=Status.off)
    events: Path | None = attr.ib(default=None, converter=attr.converters.optional(Path))

    @never_retry  # type: ignore[untyped-decorator]
    def transition(self, status: Status | str) -> None:
        """Go to a state through all intermediate states. After a failure every transition raises StrategyError."""
        target = _status(status)
        while self.status.value < target.value:
            following = Status(self.status.value + 1)
            self._enter(following)
            self.status = following
        while self.status.value > target.value:
            self._leave(self.status)
            self.status = Status(self.status.value - 1)

    def force(self, status: Status | str) -> None:
        """Assume a state without any action; only ``off`` can be assumed."""
        if _status(status) is not Status.off:
            raise StrategyError(f"cannot assume that the board is in state {status}")
        self.status = Status.off

    def abandon(self) -> None:
        """Deactivate all drivers in any state, after Ctrl-C or a failure."""
        for driver in (self.ssh, self.board, self.power, self.server):
            if driver is not None:
                self.target.deactivate(driver)
        self.status = Status.off

    def _enter(self, status: Status) -> None:
        if status is Status.served and self.server is not None:
            self.target.activate(self.server)
        elif status is Status.booted and self.board is not None:
            self.target.activate(self.board)
            self.board.on()
        elif status is Status.booted and self.power is not None:
            self.target.activate(self.power)
            self._switch("off and on", self.power.cycle)
        elif status is Status.shell:
            self.target.activate(self.ssh)
            self._record("ssh", f"logged in as {self.ssh.access}")

    def _leave(self, status: Status) -> None:
        if status is Status.shell:
            if self.board is not None:
                self.board.off(lambda: self._last_command(" ".join(POWER_OFF[self.board.init]), 30))
            if self.power is not None:
                self._last_command("sync", 60)
            self.target.deactivate(self.ssh)
        elif status is Status.booted and self.board is not None:
            self.target.deactivate(self.board)
        elif status is Status.booted and self.power is not None:
            self._switch("off", self.power.off)
            self.target.deactivate(self.power)
        elif status is Status.served and self.server is not None:
            self.target.deactivate(self.server)

    def _switch(self, text: str, action: Callable[[], object]) -> None:
        """Switch the power. Each of labgrid's power models raises its own errors, which become UserError."""
        port = self.power.port
        which = f"port {port.index} of a switch {port.model} at {port.host.rpartition('@')[2]}"
        self._record("power", f"{text}: {which}")
        try:
            action()
        except Exception as fault:
            found = f"{type(fault).__name__}: {fault}"
            self._record("power", f"the switch does not work: {found}")
            raise UserError(
                "the power switch of the board does not work",
                expected=which,
                found=found,
                fix="check power=MODEL/INDEX/HOST in lab.boards, and that this PC can reach the switch",
            ) from fault

    def _record(self, source: str, text: str) -> None:
        board_events.append(self.events, source, text)

    def _last_command(self, command: str, limit_s: float) -> None:
        """Run a command before the board is switched off. A board that does not respond is switched off without it."""
        with contextlib.suppress(ExecutionError, subprocess.TimeoutExpired):
            self.ssh.run(command, timeout=limit_s)


def _status(status: Status | str) -> Status:
    return status if isinstance(status, Status) else Status[status]


def cause_of(error: StrategyError) -> BaseException:
    """Return the cause of the error: the first UserError in its chain of causes, else the innermost exception."""
    fault: BaseException = error
    while (inner := fault.__cause__) is not None:
        fault = inner
        if isinstance(fault, UserError):
            break
    return fault
