"""Tests that networks reach the same accuracy on the QPUs as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import separate
from digits import MARGIN, NETWORKS, compared

EPOCHS = 3
"""Enough for an accuracy of 0.87 (docs/device.md has the results of more epochs)."""


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_network_learns_digits_as_well_as_on_the_cpu(name: str) -> None:
    found = compared(name, EPOCHS)
    assert found["launches"] > 0
    assert found["cpu"] > 0.8
    assert found["qpu"] > found["cpu"] - MARGIN, found
    assert found["fallbacks"] == {}, "forward, backward, optimiser and evaluation run on the QPUs"


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_network_learns_digits_on_the_emulator(name: str) -> None:
    """The kernels run as machine code on a bit-exact emulator."""
    program = str(Path(__file__).with_name("digits.py"))
    words = [program, name, f"--epochs={EPOCHS}"]
    code = f"import runpy, sys\nsys.argv[:] = {words}\nrunpy.run_path({program!r}, run_name='__main__')"
    done = separate.run("-c", separate.strict(code), QPU_BACKEND="emulator")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["backend"] == "emulator"
    assert found["cpu"] > 0.8
