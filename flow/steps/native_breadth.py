"""Test the "qpu" device with PyTorch's own samples, neural networks, several processes and torch.compile."""

from __future__ import annotations

from flow import native_tests
from flow.context import Context
from flow.steps import native_suite
from toolchain import files
from toolchain.config import ROOT
from toolchain.steps import Step

FOLDER = ROOT / "tests" / "native"


def step(context: Context) -> Step:
    """Return the step that runs the tests in tests/native; one of them runs test_torch_qpu.py in tests/device."""
    names = sorted(path.name for path in FOLDER.glob("test_*.py"))
    shared = files.tree_fingerprint(native_suite.FOLDER, native_suite.NAMES[-1])
    return Step(
        name="native-breadth",
        title="the device qpu on this machine",
        code=__name__,
        inputs={"tests": files.tree_fingerprint(FOLDER, "*.py") + shared},
        needs=("native-qpu-ops",),
        action=lambda _: native_tests.run_tests(context.config, FOLDER, names, "breadth"),
    )
