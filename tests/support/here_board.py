"""A board that is this machine, for labgrid: commands run in a shell here. All but SSH is as it ever is."""

from __future__ import annotations

import attr
from labgrid.factory import target_factory

from device.target import PinnedSSHDriver


@target_factory.reg_driver
@attr.s(eq=False)
class HereDriver(PinnedSSHDriver):
    """Stands where the login to another machine does."""

    def on_activate(self) -> None:
        """There is nobody to log in to."""

    def on_deactivate(self) -> None:
        """Nor to log out of."""

    def _argv(self, command: str) -> list[str]:
        return ["sh", "-c", command]
