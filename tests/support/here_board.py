"""A labgrid driver that uses this machine as the board: commands run in a local shell instead of over SSH."""

from __future__ import annotations

import attr
from labgrid.factory import target_factory

from device.target import PinnedSSHDriver


@target_factory.reg_driver
@attr.s(eq=False)
class HereDriver(PinnedSSHDriver):
    """Runs commands locally instead of over SSH."""

    def on_activate(self) -> None:
        """Do nothing, because no login is needed."""

    def on_deactivate(self) -> None:
        """Do nothing, because no logout is needed."""

    def _run(self, cmd: str, **_: object) -> tuple[list[str], list[str], int]:
        done = self.stream(cmd, limit_s=60, check=False)
        return done.output.splitlines(), [], done.returncode

    def _argv(self, command: str) -> list[str]:
        return ["sh", "-c", command]
