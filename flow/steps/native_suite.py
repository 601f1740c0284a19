"""Run, on this machine and with libqpu's interpreter, the device tests that need no board."""

from __future__ import annotations

from flow import native_tests
from flow.context import Context
from toolchain import files
from toolchain.config import ROOT
from toolchain.steps import Step

FOLDER = ROOT / "tests" / "device"
NAMES = ("test_ops.py", "test_torch.py", "test_torch_qpu.py")


def step(context: Context) -> Step:
    """Return the step that runs the tests of the extension and of torch in tests/device, as on a board."""
    return Step(
        name="native-suite",
        title="device suite on this machine",
        code=__name__,
        inputs={"tests": files.tree_fingerprint(FOLDER, *NAMES, "our_torch.py")},
        needs=("native-qpu-ops",),
        action=lambda _: native_tests.run_tests(context.config, FOLDER, NAMES, "suite"),
    )
