"""Tests of the device ``qpu``, which run on the PC, in an emulated machine and on a Raspberry Pi.

Shapes are small, because emulated machines are slow; tests/native contains broad tests for the PC.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch_qpu
from torch import nn
from torch.autograd import forward_ad

ULP = 2.0**-23


@pytest.fixture(autouse=True)
def _known_state() -> Iterator[None]:
    torch.manual_seed(20261121)
    torch_qpu.reset_counters()
    yield
    torch_qpu.check_finite(False)
    torch_qpu.set_qpus(0)
    torch.qpu.set_memory_limit(0)


def whole(*shape: int) -> torch.Tensor:
    """Draw integers that are small enough for float32 to compute without rounding."""
    return torch.randint(-9, 10, shape).to(torch.float32)


# --- the device ------------------------------------------------------------------------------------------------------


def test_there_is_one_qpu() -> None:
    assert torch.qpu.is_available()
    assert torch.qpu.device_count() == 1
    assert torch.qpu.current_device() == 0
    assert torch.device("qpu").type == "qpu"
    assert torch.ones(2, device="qpu").device == torch.device("qpu", 0)
    with pytest.raises(RuntimeError, match="only device is qpu:0"):
        torch.ones(2, device="qpu:1")
    properties = torch.qpu.get_device_properties()
    assert properties.multi_processor_count == 12
    assert properties.total_memory >= 32 << 20
    assert properties.backend in properties.name
    assert properties.is_hardware == ("model" not in properties.name)


def test_example_of_the_documentation() -> None:
    assert torch.randn(64, 128, device="qpu").std().item() == pytest.approx(1, abs=0.1)
    model = nn.Linear(8, 4)
    x = torch.randn(2, 8)
    torch.testing.assert_close(model.to("qpu")(x.to("qpu")).cpu(), model.cpu()(x))


def test_copies_preserve_values_shapes_and_strides() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        there = torch.arange(24).reshape(2, 3, 4).to(dtype)
        here = there.to("qpu")
        assert here.device.type == "qpu"
        assert here.dtype == dtype
        assert torch.equal(here.cpu(), there)
        assert torch.equal(there.qpu().cpu(), there)
        turned = here.transpose(0, 2)[1:, ::2]
        assert torch.equal(turned.cpu(), there.transpose(0, 2)[1:, ::2])
        assert torch.equal(turned.to(torch.complex128).cpu(), there.transpose(0, 2)[1:, ::2].to(torch.complex128))
    assert torch.tensor(2.5, device="qpu").item() == 2.5
    assert torch.empty(0, 3, device="qpu").cpu().shape == (0, 3)


def test_views_share_memory() -> None:
    base = torch.zeros(4, 6, device="qpu")
    base[1] = 1
    base.view(-1)[23] = 9
    base.t()[0, 2] = 5
    base[:, 3].fill_(7)
    expected = torch.zeros(4, 6)
    expected[1] = 1
    expected.view(-1)[23] = 9
    expected[2, 0] = 5
    expected[:, 3] = 7
    assert torch.equal(base.cpu(), expected)
    part = base.as_strided((2, 2), (6, 1), 7)
    part += 1
    assert base[1, 1].item() == 2
    grown = torch.ones(2, device="qpu").resize_(4)
    assert grown[:2].tolist() == [1, 1]


def test_tensors_are_printed() -> None:
    assert repr(torch.tensor([1.5, -2.0], device="qpu")) == "tensor([ 1.5000, -2.0000], device='qpu:0')"
    assert repr(torch.tensor([], device="qpu")) == "tensor([], device='qpu:0')"
    assert repr(torch.tensor(3, device="qpu")) == "tensor(3, device='qpu:0')"


def test_saving_and_loading_with_map_location() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).to("qpu")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where in ("qpu", "cpu", torch.device("qpu", 0)):
        file.seek(0)
        state = torch.load(file, map_location=where, weights_only=True)
        assert all(value.device.type == torch.device(where).type for value in state.values())
        assert all(torch.equal(value.cpu(), model.state_dict()[name].cpu()) for name, value in state.items())
    file.seek(0)
    assert torch.load(file, weights_only=True)["0.weight"].device.type == "qpu"


def test_seeds_give_the_same_numbers_as_on_the_cpu() -> None:
    torch.manual_seed(5)
    first = torch.randn(40, device="qpu")
    torch.manual_seed(5)
    assert torch.equal(torch.randn(40, device="qpu").cpu(), first.cpu())
    assert torch.equal(torch.randn(40, generator=torch.Generator().manual_seed(5)), first.cpu())
    state = torch.qpu.get_rng_state()
    second = torch.rand(5, device="qpu")
    torch.qpu.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="qpu").cpu(), second.cpu())
    own = torch.Generator(device="qpu").manual_seed(5)
    assert torch.equal(torch.randn(40, device="qpu", generator=own).cpu(), first.cpu())
    assert torch.qpu.initial_seed() == 5


def test_memory_is_counted_cached_and_released() -> None:
    torch.qpu.empty_cache()
    torch.qpu.reset_peak_memory_stats()
    before = torch.qpu.memory_allocated()
    tensor = torch.empty(1000, device="qpu")
    assert torch.qpu.memory_allocated() - before in range(4000, 4096)
    assert torch.qpu.memory_reserved() >= torch.qpu.memory_allocated()
    address = tensor.data_ptr()
    del tensor
    assert torch.qpu.memory_allocated() == before
    assert torch.qpu.max_memory_allocated() >= before + 4000
    assert torch.empty(1000, device="qpu").data_ptr() == address, "a free block must be reused"
    torch.qpu.empty_cache()


def test_out_of_memory_error_names_fix_and_device_recovers() -> None:
    torch.qpu.empty_cache()
    torch.qpu.set_memory_limit(torch.qpu.memory_reserved() + (4 << 20))
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 8\.0 MiB; tensors hold .*gpu_mem"):
        torch.empty(2 << 20, device="qpu")
    assert torch.ones(3, device="qpu").sum().item() == 3
    with pytest.raises(ValueError, match="0 or more"):
        torch.qpu.set_memory_limit(-1)


def test_out_of_memory_in_an_operator_has_the_same_type() -> None:
    a, b = torch.ones(1 << 16, 2, device="qpu"), torch.zeros(1 << 16, 2, device="qpu")
    torch.qpu.empty_cache()
    torch.qpu.set_memory_limit(torch.qpu.memory_reserved() + (3 << 19))
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 2\.0 MiB"):
        torch.cat([a, b], 1)  # memory is left for the result, but not for the kernel's table
    assert torch.cat([a[:1], b[:1]], 1).tolist() == [[1, 1, 0, 0]]


def test_copies_to_empty_tensors_check_the_shape() -> None:
    empty = torch.empty(0, device="qpu")
    for source in (torch.ones(3), torch.ones(3, device="qpu"), torch.ones(2, 0)):
        with pytest.raises(RuntimeError, match="shape"):
            empty.copy_(source)
    assert empty.copy_(torch.ones(1)).tolist() == []
    assert torch.empty(2, 0, device="qpu").copy_(torch.empty(0)).tolist() == [[], []]


def test_events_and_streams_are_always_complete() -> None:
    torch.qpu.synchronize()
    torch_qpu.synchronize()
    stream = torch.qpu.current_stream()
    assert stream.query()
    begin, end = (torch.Event("qpu", enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(100, device="qpu").add_(1)
    end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 0
    assert isinstance(torch.qpu.Stream(), torch.Stream)
    with torch.qpu.stream(torch.qpu.Stream()):
        assert torch.qpu.Event().query()
    assert "reserved" in torch.qpu.memory_summary()


def test_pinned_memory_of_loaders_is_accepted() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]


def test_multiple_devices_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="there is only one qpu"):
        nn.DataParallel(nn.Linear(2, 2).to("qpu"))
    x = torch.ones(1, 2)
    module = nn.Linear(2, 2)
    assert torch.equal(nn.DataParallel(module)(x), module(x))


@pytest.mark.new_interpreter
def test_operators_for_cpu_tensors_need_no_import() -> None:
    words = [
        sys.executable,
        "-c",
        "import torch; print(torch.ops.qpu.mm(torch.ones(2, 3), torch.ones(3, 1)).sum().item())",
    ]
    assert subprocess.run(words, capture_output=True, text=True, timeout=600, check=True).stdout == "6.0\n"


# --- operators -------------------------------------------------------------------------------------------------------


def on_both(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results from the device and the CPU for the same operands; no operator may fall back to the CPU."""
    there = [operand.to("qpu") for operand in operands]
    torch_qpu.reset_counters()
    found = function(*there)
    assert found.device.type == "qpu"
    assert torch_qpu.fallbacks() == {}
    assert sum(count.calls for count in torch_qpu.launches().values()) >= 1
    return found.cpu(), function(*operands)


EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "add with a factor": lambda a, b: torch.add(a, b, alpha=2),
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: torch.rsub(a, b),
    "mul": lambda a, b: a * b,
    "number": lambda a, b: (a * 3 + 1) - b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "maximum": torch.maximum,
    "in place": lambda a, b: a.clone().add_(b).mul_(2),
    "out": lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
    "relu": lambda a, _: torch.relu(a),
    "clamp": lambda a, _: a.clamp(-3, 4),
    "neg, abs": lambda a, b: (-a).abs() + b,
    "one row for all": lambda a, b: a + b[:1],
    "one column for all": lambda a, b: a * b[:, :1],
    "one element": lambda a, b: a + b[0, 0],
    "turned": lambda a, b: a.t() + b.t(),
    "turned and not": lambda a, b: a.t() @ b,
    "parts": lambda a, b: a[::2, -9:] * b[::2, -9:],
    "mm": lambda a, b: a @ b.t(),
    "addmm": lambda a, b: torch.addmm(b[0, : a.shape[0]], a, b.t(), beta=2, alpha=3),
    "bmm": lambda a, b: torch.bmm(a.expand(2, *a.shape), b.t().expand(2, *b.t().shape)),
    "mv": lambda a, b: a @ b[0],
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "sum": lambda a, b: (a + b).sum(),
    "sum of columns": lambda a, _: a.sum(0),
    "sum of other columns": lambda a, _: a[:, ::2].t().sum(1),
    "sum of rows": lambda a, _: a.sum(1, keepdim=True),
    "max": lambda a, _: a.max(),
    "argmax": lambda a, _: a.argmax(),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [(5, 17), (20, 20), (1, 1)], ids=str)
def test_operators_are_exact_for_small_integers(name: str, size: tuple[int, int]) -> None:
    if size == (5, 17) and name == "addmm":
        size = (5, 5)
    found, expected = on_both(EXACT[name], whole(*size), whole(*size))
    assert torch.equal(found, expected)


ROUNDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (torch.exp, 4),
    "sqrt": (lambda a: a.abs().add(0.1).sqrt(), 8),
    "rsqrt": (lambda a: a.abs().add(0.1).rsqrt(), 8),
    "log": (lambda a: a.abs().add(1.5).log(), 8),
    "div": (lambda a: 3 / (a.abs() + 1), 8),
    "reciprocal": (lambda a: (a.abs() + 1).reciprocal(), 8),
    "sigmoid": (torch.sigmoid, 8),
    "tanh": (torch.tanh, 8),
    "silu": (nn.functional.silu, 10),
    "softmax": (lambda a: a.softmax(-1), 32),
    "norm": (lambda a: a.norm(), 8),
    "square": (lambda a: a.pow(2), 1),
    "cube": (lambda a: a.pow(3), 3),
    "mean": (lambda a: a.abs().mean(), 8),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_operator_errors_are_within_bounds(name: str) -> None:
    function, ulps = ROUNDED[name]
    a = torch.randn(7, 33) * 2
    found, _ = on_both(function, a)
    exact = function(a.double())
    assert torch.all((found.double() - exact).abs() <= ulps * ULP * exact.abs() + 2.0**-124), name


def test_images() -> None:
    x, weight, bias = whole(2, 3, 9, 8), whole(4, 3, 3, 3), whole(4)
    found, expected = on_both(lambda *t: nn.functional.conv2d(*t, padding=1, stride=2), x, weight, bias)
    assert torch.equal(found, expected)
    found, expected = on_both(lambda a: nn.functional.max_pool2d(a, 2), x)
    assert torch.equal(found, expected)
    norm = nn.BatchNorm2d(3).eval()
    norm.running_mean.copy_(torch.tensor([0.5, -1, 2]))
    norm.running_var.copy_(torch.tensor([1.0, 2, 0.5]))
    expected = norm(x)
    found = norm.to("qpu")(x.to("qpu")).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_cpu_fallbacks_are_counted() -> None:
    a = torch.randn(6).to("qpu")
    assert torch.equal(torch.cumsum(a, 0).cpu(), torch.cumsum(a.cpu(), 0))
    assert torch_qpu.fallbacks() == {"aten::cumsum.out": 1}
    b = torch.arange(6, device="qpu")
    torch_qpu.reset_counters()
    assert (b * 2).tolist() == [0, 2, 4, 6, 8, 10]
    assert torch_qpu.fallbacks() == {"aten::mul.out": 1}
    assert "aten::mul.out" in torch_qpu.report()
    with pytest.raises(RuntimeError, match="device"):
        a + torch.ones(6)


def test_check_finite_computes_inf_and_nan_on_the_cpu() -> None:
    a = torch.tensor([1.0, float("inf"), float("nan"), -2.0], device="qpu")
    torch_qpu.check_finite(True)
    torch_qpu.reset_counters()
    found = (a * 0).tolist()
    assert found[0] == 0
    assert all(value != value for value in found[1:3])
    assert torch_qpu.fallbacks() == {"aten::mul.out": 1}


def test_operators_that_preserve_nan() -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, -nan, inf, -inf, -2.0, 0.0, 3.0])
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.sigmoid,
        torch.tanh,
        torch.exp,
        torch.log,
        torch.sqrt,
        torch.relu,
        torch.neg,
        lambda x: x.clamp(-1, 1),
        lambda x: x / x,
        lambda x: x.softmax(0),
        lambda x: x.log_softmax(0),
        lambda x: nn.functional.layer_norm(x, (7,)),
        lambda x: nn.functional.batch_norm(x.view(7, 1), None, None, training=True),
        torch.sum,
    ]
    for function in functions:
        there = a.to("qpu")
        torch_qpu.reset_counters()
        found = function(there)
        assert torch_qpu.launches(), "the function must run on the QPUs"
        torch.testing.assert_close(found.cpu(), function(a), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.isinf(a.to("qpu") + 1)[:2].all(), "on the QPUs, sums and products turn NaN into Inf"


def test_anomaly_mode_checks_operands() -> None:
    a = torch.tensor([float("inf"), 1.0], device="qpu")
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert torch.isnan(a * 0)[0]
    assert (a * 0).tolist() == [0, 0]


def test_overlapping_views_are_rejected_as_on_the_cpu() -> None:
    a = torch.arange(12.0, device="qpu")
    calls: tuple[Callable[[], object], ...] = (
        lambda: a[1:].copy_(a[:-1]),
        lambda: torch.cat([a[4:], a[:4]], out=a),
        lambda: torch.cat([a[:4], a[4:]], out=a),
        lambda: torch._foreach_add_([a[1:]], [a[:-1]]),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            call()
    a[1:].copy_(a[1:])
    assert a.tolist() == list(range(12))
    torch._foreach_add_([a[1:]], [a[1:]])
    assert a.tolist() == list(range(0, 24, 2))


def test_operators_reject_mixed_devices() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        nn.Conv2d(1, 1, 2)(torch.ones(1, 1, 3, 3, device="qpu"))
    with pytest.raises(RuntimeError, match="same device"):
        nn.Embedding(3, 2)(torch.tensor([1], device="qpu"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_derivatives() -> None:
    zeros = torch._efficientzerotensor((3,), device="qpu")
    assert (zeros + 1).tolist() == [1, 1, 1]
    x = torch.tensor([1.0, -2.0, 3.0])

    def cubes(t: torch.Tensor) -> torch.Tensor:
        return (t * t * t).sum()

    ones = torch.ones(3)
    found = torch.func.jvp(torch.func.grad(cubes), (x.to("qpu"),), (ones.to("qpu"),))[1]
    assert torch.equal(found.cpu(), 6 * x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_derivatives_of_max_pool2d() -> None:
    image, along = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)

    def derivative(device: str) -> torch.Tensor:
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(image.to(device), along.to(device))
            return forward_ad.unpack_dual(nn.functional.max_pool2d(dual, 2)).tangent.cpu()

    def pool(t: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(t, 2)

    assert torch.equal(derivative("qpu"), derivative("cpu"))
    found = torch.func.jvp(pool, (image.to("qpu"),), (along.to("qpu"),))[1]
    assert torch.equal(found.cpu(), derivative("cpu"))


def test_recurrent_cells_and_their_gradients() -> None:
    for kind, cell in ((nn.LSTM, "lstm"), (nn.GRU, "gru")):
        made = []
        for device in ("cpu", "qpu"):
            torch.manual_seed(3)
            network = kind(3, 5).to(device)
            x = torch.linspace(-1, 1, 12).view(2, 2, 3).to(device).requires_grad_()
            torch_qpu.reset_counters()
            result = network(x)[0]
            result.square().sum().backward()
            made.append([t.detach().cpu() for t in (result, x.grad, *(p.grad for p in network.parameters()))])
        for theirs, ours in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert torch_qpu.launches()[f"{cell}_cell"].calls == 2
        assert torch_qpu.launches()[f"{cell}_cell_backward"].calls == 2


def test_gradients_match_the_cpu() -> None:
    x, weight, bias = whole(3, 5), whole(4, 5), whole(4)
    grads = []
    for device in ("cpu", "qpu"):
        leaves = [t.detach().clone().to(device).requires_grad_() for t in (x, weight, bias)]
        torch.relu(nn.functional.linear(*leaves)).square().sum().backward()
        grads.append([leaf.grad.cpu() for leaf in leaves if leaf.grad is not None])
    assert len(grads[1]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_training_learns_xor_on_the_qpus() -> None:
    x = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).to("qpu")
    y = torch.tensor([[0.0], [1], [1], [0]]).to("qpu")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to("qpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(120):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    assert torch.equal(model(x).round().cpu(), y.cpu())


def test_convolutional_training_step_has_no_fallbacks() -> None:
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))
    model = nn.Sequential(*layers).to("qpu")
    x, y = torch.randn(3, 1, 6, 6), torch.tensor([0, 2, 1])
    there, classes = x.to("qpu"), y.to("qpu")
    torch_qpu.reset_counters()
    nn.functional.cross_entropy(model(there), classes).backward()
    assert torch_qpu.fallbacks() == {}
    found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.cpu().zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_batch_norm_trains_on_the_qpus() -> None:
    x, weights = torch.randn(4, 2, 5, 3) * 2 + 1, torch.randn(4, 2, 5, 3)
    made = []
    for device in ("cpu", "qpu"):
        layer, leaf = nn.BatchNorm2d(2).to(device), x.clone().to(device).requires_grad_()
        result = layer(leaf)
        result.backward(weights.to(device))
        made.append([t.detach().cpu() for t in (result, leaf.grad, layer.weight.grad, layer.running_var)])
    for theirs, ours in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch_qpu.launches()["batch_norm_backward"].calls == 1


def test_threads_compute_concurrently() -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        for _ in range(5):
            a = torch.full((40, 30), float(number), device="qpu")
            if not torch.equal((a @ a.t() + number).cpu(), torch.full((40, 40), 30.0 * number * number + number)):
                faults.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_profile_is_exported_for_perfetto(tmp_path: Path) -> None:
    a = torch.randn(50, device="qpu")
    with torch_qpu.profile() as record:
        (a + 1).sort()
    assert {"launch", "fallback"} <= {event.kind for event in record.events}
    record.export_chrome_trace(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    spans = [row for row in document["traceEvents"] if row["ph"] == "X"]
    assert {row["name"] for row in spans} >= {"add"}
    assert all(row["dur"] >= 0 and row["ts"] > 0 for row in spans)
