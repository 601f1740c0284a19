"""A board that is this machine, for labgrid: commands run in a shell here. All but SSH is as it ever is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attr
from labgrid.factory import target_factory

from device.target import PinnedSSHDriver
from toolchain import process


@target_factory.reg_driver
@attr.s(eq=False)
class HereDriver(PinnedSSHDriver):
    """Stands where the login to another machine does."""

    def on_activate(self) -> None:
        """There is nobody to log in to."""

    def on_deactivate(self) -> None:
        """Nor to log out of."""

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
        """Run a shell command."""
        return process.run(
            ["sh", "-c", command],
            stdin=stdin,
            on_line=on_line,
            limit_s=limit_s,
            log=log,
            check=check,
            merge_stderr=False,
        )
