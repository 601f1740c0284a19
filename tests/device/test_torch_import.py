"""Tests that ``import torch`` omits modules that few programs use (patch 0015), but keeps every name available."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from our_torch import only_our_torch

LEFT_OUT = (
    "sympy",
    "torch._dynamo",
    "torch._meta_registrations",
    "torch._refs",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.fx",
    "torch.optim",
    "torch.profiler",
    "torch.utils.data",
    "torchgen",
)
REACHABLE = (
    "torch._prims.rng_prims",
    "torch.ao.nn.intrinsic.quantized.dynamic",
    "torch.cond",
    "torch.distributions.Normal",
    "torch.export.export",
    "torch.func.grad",
    "torch.hub.load",
    "torch.masked.MaskedTensor",
    "torch.nn.quantized.dynamic",
    "torch.ops.higher_order.cond",
    "torch.ops.prims.add",
    "torch.optim.SGD",
    "torch.profiler.profile",
    "torch.testing.assert_close",
    "torch.utils.data.DataLoader",
)
PROGRAM = """
import functools, os, sys, threading, torch

def found(names):
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], torch)

def meta_kernels():
    # The kernel of this operator for meta tensors is written in Python.
    shapes = []
    def work():
        shapes.append(tuple(torch.linalg.qr(torch.empty(3, 4, device="meta"))[1].shape))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shapes == [(3, 4)] * 4, shapes

def second_kernel():
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm", lambda a, b: a, "Meta")
    except RuntimeError as fault:
        assert "already a kernel" in str(fault), fault
    else:
        raise AssertionError("a second kernel is accepted")

print("imported:", *(name for name in sys.argv[1].split() if name in sys.modules))
failed = []
names = sys.argv[2].split()
checks = {
    "names": functools.partial(found, names),
    "names in reverse order": functools.partial(found, names[::-1]),
    "meta kernels": meta_kernels,
    "second kernel": second_kernel,
}
for name, check in checks.items():
    # Run each check in a forked process, so that it starts from the state immediately after the import.
    child = os.fork()
    if child == 0:
        check()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print("failed:", *failed)
"""


@only_our_torch
@pytest.mark.new_interpreter
def test_omitted_modules_are_imported_on_first_use() -> None:
    """The program checks names, kernels for meta tensors in several threads, and that a second kernel is rejected."""
    argv = [sys.executable, "-W", "ignore", "-c", PROGRAM, " ".join(LEFT_OUT), " ".join(REACHABLE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["imported:", "failed:"], done.stdout + done.stderr


def test_dir_lists_the_names_that_are_not_imported_yet() -> None:
    assert {"cond", "export", "fx", "optim", "nn"} <= set(dir(torch))
