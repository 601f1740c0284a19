"""The device suite, seen from both sides.

On a board (or natively on a PC) this is a plain pytest suite. With labgrid's ``--lg-env`` it is not run here but on
the board that the environment describes, and reported here.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "lg_env", None):
        from device.drive import DeviceSession

        config.pluginmanager.register(DeviceSession(config), "pitorch-device")
