"""Tests of processes that fork, exit or fail while using the device, and of the memory allocator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import separate
import torch
import torch_qpu


def python(script: str, *, imports: str = "torch, torch_qpu", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a separate process."""
    return separate.run("-c", separate.strict(f"import {imports}\n{script}"), **environment)


def fine(script: str, *, imports: str = "torch, torch_qpu", **environment: str) -> str:
    done = python(script, imports=imports, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_process_exits_with_live_tensors() -> None:
    script = """
import atexit, threading
kept = [torch.randn(100, device="qpu") for _ in range(3)]
model = torch.nn.Linear(4, 4).to("qpu")
model(torch.randn(2, 4, device="qpu")).sum().backward()
atexit.register(lambda: print(kept[0].add(1).shape))
threading.Thread(target=lambda: kept.append(torch.ones(5, device="qpu") * 2)).start()
"""
    assert fine(script) == "torch.Size([100])\n"


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_pins_memory_without_using_the_device(workers: int) -> None:
    script = f"""
import warnings
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore", DeprecationWarning)  # about fork, in later Python versions
data = TensorDataset(torch.arange(6.0).view(3, 2))
print([batch.tolist() for (batch,) in DataLoader(data, batch_size=2, num_workers={workers}, pin_memory=True)])
"""
    assert fine(script, imports="torch") == "[[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]]]\n"


def test_forked_child_computes_on_its_own_copy() -> None:
    script = """
import os
a = torch.arange(40.0).to("qpu")
_ = a + 1
child = os.fork()
if child == 0:
    b = a * 2
    a.fill_(7)
    good = b.cpu().equal(torch.arange(40.0) * 2) and torch.randn(30, device="qpu").shape == (30,)
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(a.cpu().equal(torch.arange(40.0)))
"""
    assert fine(script) == "True\n"


def test_forks_while_threads_compute() -> None:
    # Call each operator once first: at an operator's first call, torch stores its choice of kernel in a static C++
    # variable (DispatchStub). A child that is forked while another thread initialises the variable waits forever.
    script = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
(torch.ones(20, device="qpu") + 1).sum().item()
torch.ones(30, 30, device="qpu") @ torch.ones(30, 30, device="qpu")
stop = threading.Event()
def work():
    a = torch.ones(30, 30, device="qpu")
    while not stop.is_set():
        a @ a
threads = [threading.Thread(target=work) for _ in range(2)]
for t in threads: t.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if (torch.ones(20, device="qpu") + 1).sum().item() == 40 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for t in threads: t.join()
print("good")
"""
    assert fine(script) == "good\n"


def test_kernel_fault_raises_and_device_recovers() -> None:
    script = """
a = torch.ones(1000, device="qpu")
a.untyped_storage().resize_(64)
for call in (lambda: a + a, lambda: a.neg()):
    try:
        call()
    except RuntimeError as fault:
        print("SharedArray" in str(fault))
print((torch.ones(1000, device="qpu") + 1).sum().item())
"""
    # Without caching, the interpreter detects an access one word past the end of a tensor.
    assert fine(script, QPU_TORCH_CACHING="0").split() == ["True", "True", "2000.0"]


@pytest.mark.parametrize(
    "environment",
    [{"QPU_TORCH_CACHING": "0"}, {"QPU_TORCH_COPY": "1"}, {"QPU_BACKEND": "emulator"}],
    ids=["no caching", "copies", "emulator"],
)
def test_board_suite_passes_with_other_settings(environment: dict[str, str]) -> None:
    suite = Path(__file__).resolve().parent.parent / "device" / "test_torch_qpu.py"
    words = ["-c", os.devnull, f"--rootdir={suite.parent}", f"--confcutdir={suite.parent}"]
    # Tests of block reuse require caching, and tests with concurrent threads are slow on the emulator.
    without = {"QPU_TORCH_CACHING": "cached", "QPU_BACKEND": "threads"}.get(next(iter(environment)), "none")
    words += ["-p", "no:cacheprovider", "-q", "-W", "error", "-k", f"not {without}", str(suite)]
    done = separate.run("-c", f"import pytest, sys\nsys.exit(pytest.main({words}))", **environment)
    assert done.returncode == 0, done.stdout[-6000:]


def test_cpu_view_does_not_copy() -> None:
    a = torch.zeros(4, 3, device="qpu")
    torch_qpu.reset_counters()
    view = torch_qpu.cpu_view(a)
    array = view.t().numpy()
    array[1, 2] = 5
    assert torch_qpu.copies() == {}
    assert a[2, 1].item() == 5
    assert a.data_ptr() == view.data_ptr()
    del a
    assert array[1, 2] == 5, "a view must keep the memory allocated"
    with pytest.raises(RuntimeError, match="expected a qpu tensor"):
        torch_qpu.cpu_view(torch.ones(2))
    script = """
try:
    torch_qpu.cpu_view(torch.ones(2, device="qpu"))
except RuntimeError as fault:
    print(str(fault).split(":")[0])
"""
    assert fine(script, QPU_TORCH_COPY="1").startswith("cpu_view is not available")


def test_unknown_backend_is_reported() -> None:
    done = python("print(torch.qpu.is_available())", QPU_BACKEND="vulkan")
    assert done.stdout == "False\n"
    done = python("torch.ones(20, device='qpu') + 1", QPU_BACKEND="vulkan")
    assert done.returncode != 0
    assert "vulkan" in done.stderr


def test_segments_are_split_merged_and_released() -> None:
    # Runs in a separate process, because other tests' tensors would influence the addresses.
    script = """
before = torch.qpu.memory_stats()
tensors = [torch.empty(size, dtype=torch.uint8, device="qpu") for size in (100, 200, 70_000, 64, 3_000_000)]
stats = torch.qpu.memory_stats()
print(stats["segments.current"] - before["segments.current"])
addresses = [tensor.data_ptr() for tensor in tensors]
assert all(address % 64 == 0 for address in addresses)
del tensors[1], tensors[0]
joined = torch.empty(300, dtype=torch.uint8, device="qpu")
print("adjacent free blocks are merged", joined.data_ptr() == addresses[0])
tensors.clear()
del joined
print(torch.qpu.memory_allocated() - before["allocated_bytes.current"])
torch.qpu.empty_cache()
print(torch.qpu.memory_reserved() <= before["reserved_bytes.current"])
"""
    segments, joined, allocated, given_back = fine(script).splitlines()
    assert segments in ("1", "2")
    assert joined == "adjacent free blocks are merged True"
    assert (allocated, given_back) == ("0", "True")


def test_cached_memory_is_released_before_out_of_memory() -> None:
    torch.qpu.empty_cache()
    torch.qpu.set_memory_limit(torch.qpu.memory_reserved() + (6 << 20))
    try:
        del_me = torch.empty(1 << 20, device="qpu")
        del del_me
        retries = torch.qpu.memory_stats()["retries"]
        assert torch.empty(5 << 20, dtype=torch.uint8, device="qpu").numel() == 5 << 20
        assert torch.qpu.memory_stats()["retries"] == retries + 1
    finally:
        torch.qpu.set_memory_limit(0)


def test_cached_memory_is_released_for_kernels_and_arrays() -> None:
    script = """
def retries(function):
    tensors = []
    for size in (256, 64, 16, 4, 2):  # until no bus addresses are left
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(torch.empty(size << 20, dtype=torch.uint8, device="qpu"))
    tensors.clear()
    before = torch.qpu.memory_stats()["retries"]
    function()
    return torch.qpu.memory_stats()["retries"] - before

def pool(image):  # needs 4 MiB for the padded image
    return torch.nn.functional.max_pool2d(image, 3, 32, 1)

cpu = torch.randn(1, 1, 1024, 1024)
image = cpu.to("qpu")
small = torch.empty(100, device="qpu")  # keeps a segment for the result
results = []
print(retries(lambda: results.append(pool(image))))
print(results[0].cpu().equal(pool(cpu)))
print(retries(lambda: torch.ops.qpu.mul(cpu.flatten(), cpu.flatten())))
"""
    done = fine(script, imports="contextlib, torch, torch_qpu", QPU_BACKEND="interpreter")
    assert done.splitlines() == ["1", "True", "1"]


def test_threads_that_exhaust_memory_do_not_deadlock() -> None:
    script = """
import contextlib, threading
x = torch.ones(1 << 18)
def allocate():
    for size in (1016, 1018) * 20:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(size << 20, dtype=torch.uint8, device="qpu")
def multiply():
    for _ in range(40):
        with contextlib.suppress(qpu_ops.QpuError):
            torch.ops.qpu.mul(x, x)
        qpu_ops.release_buffers()
threads = [threading.Thread(target=work) for work in (allocate, multiply, allocate)]
for t in threads: t.start()
for t in threads: t.join()
print("good")
"""
    assert fine(script, imports="torch, torch_qpu, qpu_ops", QPU_BACKEND="interpreter") == "good\n"


def test_cpu_copies_only_what_a_view_covers() -> None:
    script = """
def staged(function):
    torch_qpu.reset_counters()
    function()
    copies = torch_qpu.copies()
    return [copies[name].bytes if name in copies else 0 for name in ("staged to cpu", "staged to qpu")]

x = torch.linspace(-1, 1, 1 << 20).to("qpu")
whole = x.cpu()
print(staged(lambda: x[:16].erf()), torch.equal(x[:16].erf().cpu(), whole[:16].erf()))
print(staged(lambda: x[7].item()))
part = x[100:120]
print(staged(lambda: part.erf_()), torch.equal(x[100:120].cpu(), whole[100:120].erf()))
column = x.view(1 << 10, 1 << 10)[:, 3]
print(staged(lambda: column.erf()), staged(lambda: column.erf_()))
whole[100:120].erf_()
whole.view(1 << 10, 1 << 10)[:, 3].erf_()
print(torch.equal(x.cpu(), whole))
y = torch.zeros(1 << 20, dtype=torch.float64, device="qpu")
print(staged(lambda: y[10:14].copy_(x[20:24])), torch.equal(y[10:14].cpu(), whole[20:24].double()), y[14:].any().item())
z = torch.arange(1 << 12).to("qpu")
print(staged(lambda: torch.add(z[:8], z[4:12], out=z[100:108])), z[100:108].tolist())
flags = torch.zeros(1 << 16, dtype=torch.bool, device="qpu")
flags[3:5].logical_not_()
print(flags.nonzero().flatten().tolist())
"""
    assert fine(script, QPU_TORCH_COPY="1").splitlines() == [
        "[128, 64] True",  # new results are staged too
        "[16, 0]",
        "[80, 80] True",
        "[8192, 4096] [4096, 4096]",
        "True",
        "[48, 32] True False",
        "[864, 64] [4, 6, 8, 10, 12, 14, 16, 18]",
        "[3, 4]",
    ]
