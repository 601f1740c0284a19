"""Configuration of the device suite, on the board and on the PC.

On a board (or natively on a PC), this is a plain pytest suite. With labgrid's ``--lg-env``, pytest on the PC runs the
suite on the board that the environment describes, and reports the results on the PC.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "new_interpreter: starts another Python that imports torch (slow in QEMU)")
    if getattr(config.option, "lg_env", None):
        from device.drive import DeviceSession

        config.pluginmanager.register(DeviceSession(config), "pitorch-device")
