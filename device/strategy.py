"""From nothing to a shell on the board: off → served → booted → shell.

One strategy for every board. A state whose driver the environment does not name is passed through: a real board has
no power driver (a person switches it on), and one that runs a system of its own needs no server unless it mounts the
tree.
"""

from __future__ import annotations

import enum

import attr
from labgrid.factory import target_factory
from labgrid.strategy import Strategy, StrategyError, never_retry

from device.target import POWER_OFF
from toolchain.errors import UserError


class Status(enum.Enum):
    """What the strategy can bring the board to, in this order."""

    off = 0
    served = 1
    booted = 2
    shell = 3


@target_factory.reg_driver
@attr.s(eq=False)
class BoardStrategy(Strategy):  # type: ignore[misc]
    """Brings the board to a state; every step back undoes what the step forward did."""

    bindings = {  # noqa: RUF012 - labgrid's own form
        "server": {"TreeServerDriver", None},
        "board": {"VirtualBoardDriver", None},
        "ssh": "PinnedSSHDriver",
    }

    status: Status = attr.ib(default=Status.off)

    @never_retry  # type: ignore[untyped-decorator]
    def transition(self, status: Status | str) -> None:
        """Go to a state, through all between. After a failure the strategy stays broken, and says of what."""
        wanted = _status(status)
        while self.status.value < wanted.value:
            following = Status(self.status.value + 1)
            self._enter(following)
            self.status = following
        while self.status.value > wanted.value:
            self._leave(self.status)
            self.status = Status(self.status.value - 1)

    def force(self, status: Status | str) -> None:
        """Take a state as reached: only ``off`` can be taken without doing anything."""
        if _status(status) is not Status.off:
            raise StrategyError(f"cannot assume that the board is in state {status}")
        self.status = Status.off

    def abandon(self) -> None:
        """Let go of everything at once, whatever state it is in: for Ctrl-C and after failures."""
        for driver in (self.ssh, self.board, self.server):
            if driver is not None:
                self.target.deactivate(driver)
        self.status = Status.off

    def _enter(self, status: Status) -> None:
        if status is Status.served and self.server is not None:
            self.target.activate(self.server)
        elif status is Status.booted and self.board is not None:
            self.target.activate(self.board)
            self.board.on()
        elif status is Status.shell:
            self.target.activate(self.ssh)

    def _leave(self, status: Status) -> None:
        if status is Status.shell:
            if self.board is not None:
                self.board.off(lambda: self.ssh.run(" ".join(POWER_OFF[self.board.init]), timeout=30))
            self.target.deactivate(self.ssh)
        elif status is Status.booted and self.board is not None:
            self.target.deactivate(self.board)
        elif status is Status.served and self.server is not None:
            self.target.deactivate(self.server)


def _status(status: Status | str) -> Status:
    return status if isinstance(status, Status) else Status[status]


def cause_of(error: StrategyError) -> BaseException:
    """What broke the strategy: a UserError where there is one in the chain of causes, else the first fault."""
    fault: BaseException = error
    while (inner := fault.__cause__) is not None:
        fault = inner
        if isinstance(fault, UserError):
            break
    return fault
