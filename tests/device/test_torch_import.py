"""Tests that ``import torch`` omits modules that few programs use (patch 0015), but keeps every name available."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from our_torch import only_our_torch

LEFT_OUT = (
    "hashlib",
    "numpy",
    "pdb",
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
import functools, os, signal, sys, threading, torch

def found(names):
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], torch)

def meta_kernel():
    # The kernel of this operator for meta tensors is written in Python.
    return tuple(torch.linalg.qr(torch.empty(3, 4, device="meta"))[1].shape)

def meta_kernels():
    shapes = []
    def work():
        shapes.append(meta_kernel())
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

def without_numpy():
    values = torch.tensor([[1, 2], [3, 4]]) + torch.arange(2.0)
    assert values[[0, 1], 1].tolist() == [3, 5] and bool((values == values.clone()).all())
    assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(values)).shape == (2, 2)
    assert "numpy" not in sys.modules

def to_numpy():
    assert torch.ones(2).numpy().sum() == 2
    assert torch.tensor(sys.modules["numpy"].array([1.5])).tolist() == [1.5]

def from_numpy():
    import numpy
    assert torch.as_tensor(numpy.arange(3))[numpy.array([2, 0])].tolist() == [2, 0]
    assert torch.full((1,), numpy.float32(1.5)).item() == 1.5 and torch.ones(3)[numpy.int64(1)] == 1
    assert (torch.arange(3) == numpy.arange(3)).all()

def numpy_in_threads():
    import concurrent.futures
    start = threading.Barrier(8)
    def work(number):
        start.wait()
        if number % 2:
            return torch.full((2,), number).numpy().tolist()
        import numpy
        return torch.tensor([numpy.int64(number)] * 2).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [[number] * 2 for number in range(8)]

def numpy_during_its_import():
    # The importer stops in the package until the other thread imports a submodule, which it must not do, or one second.
    started, submodule = threading.Event(), threading.Event()
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if threading.current_thread() is importer and name.startswith("numpy.") and not started.is_set():
                started.set()
                submodule.wait(1)
            elif threading.current_thread() is not importer and name.startswith("numpy."):
                submodule.set()
    found = []
    def work():
        import numpy
        found.append(torch.tensor([numpy.int64(1)]).tolist())
    sys.meta_path.insert(0, Finder)
    importer = threading.Thread(target=work)
    importer.start()
    started.wait()
    assert torch.ones(1).numpy().tolist() == [1]
    importer.join()
    assert not submodule.is_set(), "numpy.* is imported while numpy is"
    assert found == [[1]], found

def no_numpy():
    sys.modules["numpy"] = None
    try:
        torch.ones(1).numpy()
    except RuntimeError as fault:
        assert "Numpy is not available" in str(fault), fault
    else:
        raise AssertionError("there is a numpy")
    assert torch.tensor([1, 2]).tolist() == [1, 2]

def interrupted(module, use):
    # SIGINT arrives during the import of this module, which the module to import needs.
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == module:
                sys.meta_path.remove(Finder)
                signal.raise_signal(signal.SIGINT)
    sys.meta_path.insert(0, Finder)
    try:
        use()
    except KeyboardInterrupt:
        use()
    else:
        raise AssertionError("KeyboardInterrupt is lost")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

print("imported:", *(name for name in sys.argv[1].split() if name in sys.modules))
failed = []
names = sys.argv[2].split()
checks = {
    "names": functools.partial(found, names),
    "names in reverse order": functools.partial(found, names[::-1]),
    "meta kernels": meta_kernels,
    "second kernel": second_kernel,
    "without numpy": without_numpy,
    "to numpy": to_numpy,
    "from numpy": from_numpy,
    "numpy in threads": numpy_in_threads,
    "numpy during its import": numpy_during_its_import,
    "no numpy": no_numpy,
    "meta kernels after SIGINT": functools.partial(interrupted, "torch._decomp.decompositions", meta_kernel),
    "prims after SIGINT": functools.partial(interrupted, "torch._prims", lambda: torch.ops.prims.add),
    "optim after SIGINT": functools.partial(interrupted, "torch.optim.adam", lambda: torch.optim.Adam),
    "numpy after SIGINT": functools.partial(interrupted, "numpy.linalg", to_numpy),
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
    """The program tests names, meta kernels in threads, the rejection of a second kernel, numpy, and Ctrl-C."""
    argv = [sys.executable, "-W", "ignore", "-c", PROGRAM, " ".join(LEFT_OUT), " ".join(REACHABLE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["imported:", "failed:"], done.stdout + done.stderr


def test_dir_lists_the_names_that_are_not_imported_yet() -> None:
    assert {"cond", "export", "fx", "optim", "nn"} <= set(dir(torch))
