"""Tests of the device with PyTorch code other than operators: loaders, streams, derivatives and compilers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import separate
import torch
import torch_qpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def alone(script: str, folder: Path | None = None, name: str = "script.py") -> str:
    """Run a script in a separate process, where ``import torch`` alone registers the device; return its output."""
    words = ["-c", script]
    if folder is not None:
        (folder / name).write_text(script)
        words = [str(folder / name)]
    done = separate.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- tensors of two devices ------------------------------------------------------------------------------------------

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2), (1, 2, 5, 5)),
    "Bilinear": (lambda: Twice(nn.Bilinear(4, 4, 2)), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(2, 1, 3), (1, 2, 9)),
    "Conv2d": (lambda: nn.Conv2d(2, 1, 3), (1, 2, 5, 5)),
    "Conv2d in groups": (lambda: nn.Conv2d(2, 2, 3, groups=2, bias=False), (1, 2, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(2, 1, 3), (1, 2, 5, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 1, 3), (1, 2, 5, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 2), (1, 2, 5)),
    "GRU": (lambda: nn.GRU(4, 3), (2, 1, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (2, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "Linear": (lambda: nn.Linear(4, 2), (3, 4)),
    "LSTM": (lambda: nn.LSTM(4, 3), (2, 1, 4)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), (2, 4)),
    "PReLU": (lambda: nn.PReLU(4), (3, 4)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), (3, 1, 4)),
}


class Twice(nn.Module):  # type: ignore[misc]
    """Calls a module that has two inputs, with the same tensor for both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's result with x as both inputs."""
        found: torch.Tensor = self.module(x, x)
        return found


@pytest.mark.parametrize("name", MODULES)
def test_modules_reject_inputs_of_another_device(name: str) -> None:
    make, shape = MODULES[name]
    for there, here in (("qpu", "cpu"), ("cpu", "qpu")):
        with pytest.raises(RuntimeError, match=r"same device|should be the same"):
            make().to(here)(torch.ones(shape, device=there))


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add,
    "add in place": lambda a, b: a.clone().add_(b),
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "embedding": lambda a, b: nn.functional.embedding(a.long(), b.view(1, 3)),
    "embedding on the device": lambda a, b: nn.functional.embedding(b.long(), a.view(1, 3)),
    "index_select": lambda a, b: a.index_select(0, b.long()),
    "gather": lambda a, b: a.gather(0, b.long()),
    "put by an index": lambda a, b: a.clone().index_put_((torch.tensor([0, 1, 2]),), b),
    "repeat_interleave": lambda a, b: a.repeat_interleave(b.long()),
    "bincount": lambda a, b: torch.bincount(a.long(), b),
    "cross_entropy": lambda a, b: nn.functional.cross_entropy(a.view(1, 3), b.long()[:1]),
    "weights of cross_entropy": lambda a, b: nn.functional.cross_entropy(a.view(1, 3), a.long()[:1], b),
    "mse_loss": nn.functional.mse_loss,
    "matmul": torch.matmul,
    "clamp": lambda a, b: a.clamp(b),
    "out": lambda a, b: torch.neg(a, out=b),
}


@pytest.mark.parametrize("name", MIXED)
def test_operators_reject_tensors_of_two_devices(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device|device type"):
        MIXED[name](torch.zeros(3, device="qpu"), torch.zeros(3))


def test_cpu_tensors_that_may_be_mixed_with_qpu_tensors() -> None:
    a = torch.arange(6.0, device="qpu").view(2, 3)
    assert (a * torch.tensor(2.0)).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert a[torch.tensor([1])].tolist() == [[3, 4, 5]]
    assert a[torch.tensor([[True, False, True], [False, False, False]])].tolist() == [0, 2]
    a[torch.tensor([0])] = 7
    assert a[0].tolist() == [7, 7, 7]


# --- derivatives -----------------------------------------------------------------------------------------------------


def test_zero_tensors_are_zero() -> None:
    zeros = torch._efficientzerotensor((2, 3), device="qpu")
    assert zeros.device.type == "qpu"
    assert zeros.cpu().tolist() == zeros.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert zeros.clone().add_(1).sum().item() == 6
    assert (zeros + 1).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.cumsum(zeros, 0).sum().item() == 0, "cumsum falls back to the CPU"
    assert torch.exp(zeros).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.equal(zeros.t()[1:].cpu(), torch.zeros(2, 2))
    assert torch.ones(2, 3, device="qpu").copy_(zeros).sum().item() == 0
    assert repr(zeros).startswith("tensor([[0., 0., 0.]")
    changes: tuple[Callable[[], object], ...] = (
        lambda: zeros.add_(1),
        lambda: zeros.copy_(torch.ones(2, 3)),
        lambda: zeros.fill_(1),
        lambda: zeros.resize_(10),
    )
    for change in changes:
        with pytest.raises(RuntimeError, match="immutable"):
            change()
    with pytest.raises(RuntimeError, match="only device is qpu:0"):
        torch._efficientzerotensor((3,), device="qpu:1")


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cubes": lambda x: (x**3).sum(),
    "tanh": lambda x: (torch.tanh(x) * x).sum(),
    "product": lambda x: (x @ torch.ones(3, 2).to(x)).square().sum(),
    "softmax": lambda x: x.softmax(0).square().sum(),
    "max_pool2d": lambda x: torch.max_pool2d(x.view(1, 1, 1, 3), (1, 2), 1).square().sum(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_and_functions_of_derivatives(name: str) -> None:
    function, x, direction = FUNCTIONS[name], torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.0, -1.0])
    found = []
    for device in ("cpu", "qpu"):
        at, along = x.to(device), direction.to(device)
        made = [
            torch.func.hessian(function)(at),
            torch.func.jacfwd(torch.func.grad(function))(at),
            *torch.func.jvp(function, (at,), (along,)),
            *torch.func.jvp(torch.func.grad(function), (at,), (along,)),
            torch.func.vmap(torch.func.grad(function))(torch.stack([at, along])),
        ]
        found.append([t.cpu() for t in made])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- loaders and other processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_can_pin_memory(workers: int) -> None:
    data = TensorDataset(torch.arange(6.0).view(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about fork, in later Python versions
        batches = [batch for (batch,) in DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True)]
    assert [batch.tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert {batch.device.type for batch in batches} == {"cpu"}


def test_pinned_memory_is_ordinary_cpu_memory() -> None:
    a = torch.arange(4.0)
    pinned = a.pin_memory()
    assert torch.equal(pinned, a)
    assert not pinned.is_pinned()
    assert torch.equal(pinned.to("qpu", non_blocking=True).cpu(), a)
    with pytest.raises(RuntimeError, match=r"only dense CPU tensors can be pinned"):
        torch.ones(2, device="qpu").pin_memory()


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Made(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.full((2,), float(i), device="qpu")

class Given(Made):
    def __init__(self, rows):
        self.rows = rows
    def __getitem__(self, i):
        return self.rows[i]

class Graph(Made):
    def __getitem__(self, i):
        return torch.ones(2, device="qpu", requires_grad=True) * 2

def loaded(data, **options):
    options = {"batch_size": 2, **options}
    loader = DataLoader(data, num_workers=1, multiprocessing_context=METHOD, timeout=120, **options)
    return [row for batch in loader for row in batch.tolist()]

if __name__ == "__main__":
    assert (torch.ones(2, device="qpu") + 1).sum().item() == 4
    print(loaded(Made()))
    print(loaded(Given(torch.arange(8.0, device="qpu").view(4, 2))))
    try:
        loaded(Graph(), batch_size=None)
    except RuntimeError as fault:
        print("part of a graph" in str(fault))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_send_qpu_tensors(method: str, tmp_path: Path) -> None:
    found = alone(WORKERS.replace("METHOD", repr(method)), tmp_path).splitlines()
    assert found == [
        "[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]",
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]",
        "True",
    ]


def test_queue_copies_values_and_preserves_tensor_type() -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    base = torch.arange(12, device="qpu", dtype=torch.int16).view(3, 4)
    sent = [
        base.t()[1:],
        nn.Parameter(torch.ones(2, device="qpu")),
        nn.Parameter(torch.ones(2, device="qpu"), requires_grad=False),
        torch.ones(3, device="qpu", requires_grad=True),
        torch.tensor(2.5, device="qpu", dtype=torch.bfloat16),
        torch.empty(0, 3, device="qpu"),
        torch.arange(3),
    ]
    for tensor in sent:
        queue.put(tensor)
        found = queue.get(timeout=120)
        assert type(found) is type(tensor)
        assert (found.device, found.dtype, found.requires_grad) == (tensor.device, tensor.dtype, tensor.requires_grad)
        assert torch.equal(found.cpu(), tensor.cpu())
    queue.put(sent[3] * 2)
    with pytest.raises(RuntimeError, match=r"send tensor\.detach\(\)"):
        queue.get(timeout=120)
    queue.put(base.untyped_storage())
    with pytest.raises(RuntimeError, match=r"qpu storage .*send a tensor"):
        queue.get(timeout=120)
    queue.put(torch.arange(3).untyped_storage())
    assert queue.get(timeout=120).nbytes() == 24


# --- several devices -------------------------------------------------------------------------------------------------


def test_data_parallel_keeps_cpu_modules_on_the_cpu() -> None:
    module = nn.Linear(2, 3)
    parallel = nn.DataParallel(module)
    x = torch.ones(4, 2)
    assert torch.equal(parallel(x), module(x))
    assert parallel.module is module
    assert set(parallel.state_dict()) == {"module.weight", "module.bias"}
    assert torch.equal(nn.parallel.data_parallel(module, x), module(x))


@pytest.mark.parametrize("ids", [None, [0], [0, 1]])
def test_data_parallel_on_the_device_is_rejected(ids: list[int] | None) -> None:
    with pytest.raises(RuntimeError, match=r"there is only one qpu.*found a module on qpu:0; use the module"):
        nn.DataParallel(nn.Linear(2, 3).to("qpu"), ids)
    with pytest.raises(RuntimeError, match=r"there is only one qpu"):
        nn.parallel.data_parallel(nn.Linear(2, 3).to("qpu"), torch.ones(4, 2, device="qpu"), ids)
    if ids is not None:
        with pytest.raises(RuntimeError, match=r"found device_ids="):
            nn.DataParallel(nn.Linear(2, 3), device_ids=ids)


# --- streams, events, memory -----------------------------------------------------------------------------------------


def test_streams_and_events_follow_the_cuda_interface() -> None:
    stream = torch.qpu.Stream()
    assert isinstance(stream, torch.qpu.Stream)
    assert isinstance(stream, torch.Stream)
    assert not isinstance(torch.Stream("cpu"), torch.qpu.Stream)
    assert stream == torch.qpu.current_stream() == torch.qpu.default_stream("qpu")
    assert stream.query()
    begin, end = torch.qpu.Event(enable_timing=True), torch.qpu.Event(enable_timing=True)
    assert isinstance(begin, torch.qpu.Event)
    with torch.qpu.stream(stream):
        begin.record()
        torch.ones(100, device="qpu").add_(1).record_stream(stream)
        end.record(stream)
    stream.wait_event(end)
    stream.wait_stream(torch.qpu.current_stream())
    torch.qpu.set_stream(stream)
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 0
    faults: tuple[Callable[[], object], ...] = (
        lambda: torch.qpu.Stream("qpu:1"),
        lambda: torch.qpu.Stream("cpu"),
        lambda: torch.qpu.stream(torch.Stream("cpu")),
        lambda: torch.qpu.set_stream(torch.Stream("cpu")),
        lambda: torch.qpu.Event(interprocess=True),
    )
    for wrong in faults:
        with pytest.raises(RuntimeError, match=r"only device is qpu:0|of qpu:0|between processes"):
            wrong()


def test_memory_summary_contains_the_statistics() -> None:
    torch.qpu.reset_peak_memory_stats()
    kept = torch.empty(3 << 18, device="qpu")
    summary = torch.qpu.memory_summary()
    stats = torch.qpu.memory_stats()
    lines = summary.splitlines()
    assert torch.qpu.get_device_name() in lines[0]
    assert f"{stats['allocated_bytes.current'] / 2**20:.1f} MiB" in next(line for line in lines if "allocated " in line)
    assert f"{stats['reserved_bytes.peak'] / 2**20:.1f} MiB" in next(line for line in lines if "reserved" in line)
    assert f"{stats['segments.current']} of {stats['segments.allocated']} allocated segments" in summary
    assert "segments" not in torch.qpu.memory_summary("qpu", abbreviated=True)
    assert kept.numel() == 3 << 18


# --- registration by import torch ------------------------------------------------------------------------------------


def test_import_torch_registers_operators_for_cpu_tensors() -> None:
    script = "import torch; print(torch.ops.qpu.mm(torch.ones(2, 3), torch.ones(3, 1)).tolist())"
    assert alone(script) == "[[3.0], [3.0]]\n"
    assert alone("import qpu_ops, torch; print(torch.ops.qpu.add(torch.ones(1), torch.ones(1)).item())") == "2.0\n"
    assert alone("import dot_cpp, torch; print(dot_cpp.add(torch.ones(1), torch.ones(1)).item())") == "2.0\n"


def test_import_torch_does_not_import_inductor() -> None:
    assert alone("import sys, torch; torch.ones(1, device='qpu'); print('torch._inductor' in sys.modules)") == "False\n"


# --- unsupported features --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_error_names_the_backend_to_use() -> None:
    compiled = torch.compile(lambda a: torch.sin(a) * 2 + a)
    with pytest.raises(Exception, match=r"does not support the device qpu; use torch\.compile\(model, backend='qpu'\)"):
        compiled(torch.ones(4, device="qpu"))
    torch._dynamo.reset()


def test_dlpack_works_only_within_the_device() -> None:
    a = torch.arange(3.0, device="qpu")
    again = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(a))
    again += 1
    assert a.tolist() == [1, 2, 3], "both tensors must share memory"
    with pytest.raises((ValueError, RuntimeError), match=r"[Uu]n(known|supported) device"):
        torch.from_dlpack(a)
    with pytest.raises((ValueError, RuntimeError, BufferError), match=r"[Uu]n(known|supported) device"):
        numpy.from_dlpack(a)
    assert numpy.from_dlpack(torch_qpu.cpu_view(a)).tolist() == [1, 2, 3]


def test_sparse_tensors_are_rejected() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Ss]parse"):
        torch.eye(3, device="qpu").to_sparse()
