"""Tests that the NEON kernels for products, linear and conv2d (patch 0014) are correct and never use stale weights."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from our_torch import only_our_torch
from torch import Tensor, nn
from torch.nn import functional

CLOSE = 3e-6
"""The bound for a difference, relative to the sum of the products' magnitudes."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def right(found: Tensor, function: Callable[..., Tensor], *inputs: Tensor | None) -> bool:
    """Check that the error against float64 is small relative to the sum of the products' magnitudes."""
    wide = [None if item is None else item.detach().double() for item in inputs]
    wanted = function(*wide)
    scale = function(*(None if item is None else item.abs() for item in wide))
    return (
        bool(((found.detach().double() - wanted).abs() <= CLOSE * scale + 1e-12).all()) and found.shape == wanted.shape
    )


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_products_of_all_layouts_are_correct(transposed: str) -> None:
    for rows, inner in ((1, 700), (3, 90), (7, 300), (64, 64), (130, 257), (300, 40)):
        for columns in (1, 2, 4, 5, 8, 33):
            a = drawn(inner, rows).t() if "a" in transposed else drawn(rows, inner)
            b = drawn(columns, inner, seed=1).t() if "b" in transposed else drawn(inner, columns, seed=1)
            assert right(a @ b, torch.matmul, a, b), (rows, inner, columns)


def test_products_of_submatrices_are_correct() -> None:
    a, b = drawn(100, 100)[10:70, 5:90], drawn(200, 64, seed=1)[20:190:2, 3:60]
    assert right(a @ b, torch.matmul, a, b)
    assert right(a.T @ b[:60], torch.matmul, a.T, b[:60])


def test_product_of_several_blocks_is_correct() -> None:
    """The product needs several blocks of packed weights, each of which holds 2 MiB."""
    a, b = drawn(9, 1000), drawn(1000, 1300, seed=1)
    assert right(a @ b, torch.matmul, a, b)
    assert right(a @ b.T.contiguous().T, torch.matmul, a, b)


@pytest.mark.parametrize("shape", [(40, 50, 60), (1, 300, 400), (300, 400, 2)])
def test_addmm_scales_and_adds(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b, c = drawn(rows, inner), drawn(inner, columns, seed=1), drawn(rows, columns, seed=2)
    assert right(torch.addmm(c, a, b, beta=0.5, alpha=2), lambda c, a, b: 0.5 * c + 2 * (a @ b), c, a, b)
    unknown = torch.full_like(c, float("nan"))
    assert right(torch.addmm(unknown, a, b, beta=0), torch.matmul, a, b)


def test_products_with_alpha_0_ignore_the_matrices() -> None:
    unknown = torch.full((40, 40), float("nan"))
    matrix, vector = drawn(40, 40), drawn(40, seed=1)
    assert torch.equal(torch.addmm(matrix, unknown, unknown, beta=2, alpha=0), 2 * matrix)
    assert torch.equal(torch.addmv(vector, unknown, unknown[0], beta=2, alpha=0), 2 * vector)


def test_matrix_vector_products_of_all_strides_are_correct() -> None:
    for matrix in (drawn(70, 90), drawn(90, 70).t(), drawn(140, 90)[::2], drawn(70, 180)[:, ::2]):
        for vector in (drawn(90, seed=1), drawn(180, seed=1)[::2]):
            assert right(matrix @ vector, torch.mv, matrix, vector)


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_products_are_zero(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    assert torch.equal(torch.ones(rows, inner) @ torch.ones(inner, columns), torch.zeros(rows, columns))


def test_wrong_shapes_and_types_raise_the_usual_errors() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(64, 64) @ torch.ones(63, 64)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ones(64, 64) @ torch.ones(64, 64, dtype=torch.float64)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            functional.linear(torch.ones(64, 64), torch.ones(8, 63))
        with pytest.raises(RuntimeError, match="bias type"):
            functional.conv2d(torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3), torch.ones(4, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="channels"):
            functional.conv2d(torch.ones(1, 3, 9, 9), torch.ones(4, 4, 3, 3))


LAYOUTS = {
    "2-D": drawn(64, 48),
    "3-D": drawn(3, 40, 48),
    "4-D": drawn(2, 3, 8, 48),
    "channels last": drawn(2, 3, 8, 48).to(memory_format=torch.channels_last),
    "transposed": drawn(48, 64).t(),
    "few rows": drawn(2, 48),
    "one vector": drawn(48),
    "empty": drawn(0, 48),
}


@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_without_gradients_is_correct(with_bias: bool) -> None:
    weight, bias = nn.Parameter(drawn(32, 48, seed=1)), nn.Parameter(drawn(32, seed=2)) if with_bias else None
    for name, rows in LAYOUTS.items():
        with torch.no_grad():
            for _ in range(2):
                assert right(functional.linear(rows, weight, bias), functional.linear, rows, weight, bias), name
        assert functional.linear(rows, weight, bias).requires_grad


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3 x 3": {"weight": (8, 6, 3, 3), "padding": 1},
    "1 x 1": {"weight": (16, 6, 1, 1)},
    "stride": {"weight": (8, 6, 3, 3), "stride": 2, "padding": (0, 1)},
    "dilation": {"weight": (8, 6, 3, 3), "dilation": 2},
    "groups": {"weight": (8, 3, 3, 3), "groups": 2},
    "depthwise": {"weight": (6, 1, 3, 3), "groups": 6, "padding": 1},
    "depthwise, 16 channels": {"image": (2, 16, 9, 8), "weight": (16, 1, 3, 3), "groups": 16},
    "depthwise, two of each": {"weight": (12, 1, 5, 5), "groups": 6},
    "depthwise, two of each, 3 x 3": {"weight": (12, 1, 3, 3), "groups": 6},
    "depthwise, 7 x 7": {"weight": (6, 1, 7, 7), "groups": 6, "padding": 3},
    "depthwise, 7 x 7, large": {"image": (2, 3, 24, 25), "weight": (3, 1, 7, 7), "groups": 3, "padding": 3},
    "depthwise, 7 x 7, stride": {"image": (1, 3, 55, 50), "weight": (3, 1, 7, 7), "groups": 3, "stride": 2},
    "depthwise, 7 x 7, dilation": {"image": (1, 3, 55, 50), "weight": (3, 1, 7, 7), "groups": 3, "dilation": 2},
    "one channel": {"image": (1, 1, 30, 31), "weight": (1, 1, 9, 9)},
    "7 x 7": {"weight": (4, 6, 7, 7), "stride": 2, "padding": 3},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d_without_gradients_is_correct(name: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        for with_bias in (True, False):
            check_convolution(name, layout, with_bias=with_bias)


def check_convolution(name: str, layout: torch.memory_format, *, with_bias: bool) -> None:
    options = dict(CONVOLUTIONS[name])
    weight = nn.Parameter(drawn(*options.pop("weight"), seed=1).to(memory_format=layout))
    bias = drawn(weight.shape[0], seed=2) if with_bias else None
    image = drawn(*options.pop("image", (2, 6, 13, 11))).to(memory_format=layout)

    def convolved(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(image, weight, bias, **options)

    with torch.no_grad():
        for _ in range(2):
            found = convolved(image, weight, bias)
            assert right(found, convolved, image, weight, bias)
            assert found.is_contiguous(memory_format=layout)
        assert convolved(image[:0], weight, bias).shape[0] == 0
    recorded = convolved(image, weight, bias)
    recorded.sum().backward()
    assert right(recorded, convolved, image, weight, bias)
    assert weight.grad is not None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "outputs"), [(16, 16), (5, 5), (4, 8), (1, 1)])
def test_depthwise_convolutions_do_not_spread_nan(channels: int, outputs: int, layout: torch.memory_format) -> None:
    image = drawn(1, channels, 20, 21).to(memory_format=layout)
    image[0, :, 9, 10] = float("nan")
    for size in ((1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (2, 3), (1, 7), (3, 3), (2, 5), (5, 5), (5, 6), (7, 7)):
        for stride, padding in ((1, 0), (2, 0), (1, 1)):
            options: dict[str, Any] = {"groups": channels, "stride": stride, "padding": padding}
            weight = drawn(outputs, 1, *size, seed=1)
            with torch.no_grad():
                found = functional.conv2d(image, weight, **options)
            wanted = functional.conv2d(image.double(), weight.double(), **options)
            assert torch.equal(found.isnan(), wanted.isnan()), (size, stride, padding)


def test_conv1d_without_gradients_is_correct() -> None:
    def convolved(image: Tensor, weight: Tensor) -> Tensor:
        return functional.conv1d(image, weight, padding=2)

    image, weight = drawn(2, 6, 40), drawn(8, 6, 5, seed=1)
    with torch.no_grad():
        assert right(convolved(image, weight), convolved, image, weight)


def change_two_words(weight: Tensor) -> None:
    """Change the sign of two weights, and another bit of the second, without a new version of the tensor."""
    words = weight.data.view(torch.int32).view(-1)
    words[0] ^= -(1 << 31)
    words[8] ^= -(1 << 31) + (1 << 16)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "through .data": lambda weight: weight.data.mul_(2),
    "negated through .data": lambda weight: weight.data.neg_(),
    "one element": lambda weight: weight.view(-1)[-1].add_(1),
    "two elements through .data": change_two_words,
    "through numpy": lambda weight: numpy.copyto(weight.detach().numpy(), 3.0),
    "two exchanged": lambda weight: weight.data.copy_(weight.data.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_packed_again(change: str) -> None:
    weight, filters = nn.Parameter(drawn(33, 48)), nn.Parameter(drawn(6, 4, 3, 3))
    rows, image = drawn(20, 48, seed=1), drawn(1, 4, 9, 9, seed=1)
    with torch.no_grad():
        for _ in range(2):
            assert right(functional.linear(rows, weight), functional.linear, rows, weight)
            assert right(functional.conv2d(image, filters), functional.conv2d, image, filters)
            CHANGES[change](weight)
            CHANGES[change](filters)
        assert right(functional.linear(rows, weight), functional.linear, rows, weight)
        assert right(functional.conv2d(image, filters), functional.conv2d, image, filters)


def test_new_weights_at_an_old_address_are_packed_again() -> None:
    rows = drawn(20, 64)
    with torch.no_grad():
        for seed in range(20):
            weight = drawn(64, 64, seed=seed)
            assert right(functional.linear(rows, weight), functional.linear, rows, weight)
            del weight


def test_weights_that_change_during_packing_are_packed_again() -> None:
    first, second, rows = drawn(400, 400), drawn(400, 400, seed=1), drawn(8, 400, seed=2)
    weight, finished = first.clone(), threading.Event()

    def alternate() -> None:
        while not finished.is_set():
            weight.data.copy_(second)
            weight.data.copy_(first)

    other = threading.Thread(target=alternate)
    other.start()
    with torch.no_grad():
        for _ in range(100):
            functional.linear(rows, weight)
        finished.set()
        other.join()
        for values in (first, second):
            weight.data.copy_(values)
            assert right(functional.linear(rows, weight), functional.linear, rows, values)


@pytest.fixture
def before_a_hole() -> Iterator[numpy.ndarray]:
    """Map a page of float32 values, followed by a page that must not be read."""
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, 2 * page)
    array = numpy.frombuffer(mapped, dtype=numpy.float32)
    libc = ctypes.CDLL(None, use_errno=True)
    address = array.ctypes.data
    assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
    yield array[: page // 4]
    assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 3) == 0


def test_nothing_is_read_after_the_end_of_a_tensor(before_a_hole: numpy.ndarray) -> None:
    before_a_hole[:] = numpy.random.default_rng(1).standard_normal(before_a_hole.size)
    last = torch.from_numpy(before_a_hole)
    a, image = last[-33 * 29 :].view(33, 29), last[-6 * 13 * 11 :].view(1, 6, 13, 11)
    filters, other = last[-8 * 6 * 9 :].view(8, 6, 3, 3), drawn(29, 35, seed=1)
    assert right(a @ other, torch.matmul, a, other)
    assert right(a.T @ drawn(33, 35), torch.matmul, a.T, drawn(33, 35))
    assert right(drawn(40, 33) @ a, torch.matmul, drawn(40, 33), a)
    assert right(drawn(40, 29) @ a.T, torch.matmul, drawn(40, 29), a.T)
    assert right(a @ other[:, 0], torch.mv, a, other[:, 0])
    with torch.no_grad():
        assert right(functional.linear(a, other.T.contiguous()), functional.linear, a, other.T)
        assert right(functional.linear(drawn(40, 29), a), functional.linear, drawn(40, 29), a)
        assert right(functional.conv2d(image, filters), functional.conv2d, image, filters)
        by_channels = image.to(memory_format=torch.channels_last)
        assert right(functional.conv2d(by_channels, filters), functional.conv2d, image, filters)


def resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """The largest resident memory of this process in bytes since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


@only_our_torch
def test_cache_limits_the_buffers_of_convolutions() -> None:
    """XNNPACK stores a pointer for each output pixel and kernel element: at least 671 MB for these convolutions."""
    image = drawn(1, 2, 512, 1024).to(memory_format=torch.channels_last)
    before = resident()
    with torch.no_grad():
        for width in range(13, 62, 6):
            found = functional.conv2d(image, torch.ones(1, 2, 1, width))
            assert torch.allclose(found[..., 0], image[..., :width].sum((1, 3)), atol=1e-4)
    assert resident() - before < 400 << 20


@only_our_torch
def test_linear_does_not_copy_weights_that_exceed_the_cache() -> None:
    limit = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 8, 512 << 20) // 2
    weight = torch.ones(limit // (4 * 1024) + 8, 1024)
    with torch.no_grad():
        functional.linear(torch.ones(5, 1024), weight[:8])
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident()
        found = functional.linear(torch.ones(5, 1024), weight)
    assert bool((found == 1024).all())
    assert peak() - before < limit // 4 + found.numel() * found.element_size()


@only_our_torch
def test_cache_limits_the_number_of_small_weights() -> None:
    rows = drawn(8, 8)
    weights = drawn(6000, 8, 8, seed=1)
    with torch.no_grad():
        for weight in weights[:2000]:
            functional.linear(rows, weight)
        before = resident()
        for weight in weights[2000:]:
            functional.linear(rows, weight)
    assert resident() - before < 2 << 20


THREADS = """
import os, torch

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    with torch.no_grad():
        torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
        torch.nn.functional.conv2d(torch.ones(1, 8, 16, 16), torch.ones(8, 8, 3, 3))
        quantized(torch.ones(64, 64))

torch.backends.quantized.engine = "qnnpack"
quantized = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(64, 64)))
before = threads()
compute()
with_one = threads() - before
torch.set_num_threads(3)
compute()
with_three = threads() - before
torch.set_num_threads(1)
child = os.fork()
if child == 0:
    before = threads()
    compute()
    with_one += threads() - before
    torch.set_num_threads(2)
    compute()
    os._exit(with_one)
print(with_one, with_three, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@only_our_torch
@pytest.mark.new_interpreter
def test_xnnpack_and_qnnpack_use_the_threads_of_torch() -> None:
    """OMP_NUM_THREADS and set_num_threads() apply, and a forked process starts its own threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", "-c", THREADS]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with_one, with_three, in_child = map(int, done.stdout.split())
    assert (with_one, in_child) == (0, 0)
    assert with_three >= 2


def test_threads_can_use_the_same_weights_concurrently() -> None:
    weight, filters = drawn(64, 64), drawn(8, 8, 3, 3)
    wrong: list[int] = []

    def work(number: int) -> None:
        rows, image = drawn(40, 64, seed=number), drawn(1, 8, 15, 15, seed=number)
        for _ in range(20):
            with torch.no_grad():
                good = right(functional.linear(rows, weight), functional.linear, rows, weight)
                good = good and right(functional.conv2d(image, filters), functional.conv2d, image, filters)
                if not good:
                    wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_forked_process_can_compute() -> None:
    """The child uses one thread, like DataLoader's workers, because OpenMP's threads do not survive a fork."""
    a, b = drawn(100, 100), drawn(100, 100, seed=1)
    wanted = a @ b
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.allclose(a @ b, wanted, atol=1e-4) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_transformations_of_functions_see_linear() -> None:
    """vmap, forward mode, reverse mode and tracing must not lose the information that they attach to tensors."""
    weight, rows = drawn(16, 48), drawn(5, 20, 48, seed=1)
    with torch.no_grad():
        assert right(torch.func.vmap(lambda x: functional.linear(x, weight))(rows), functional.linear, rows, weight)
        out, tangent = torch.func.jvp(lambda x: functional.linear(x, weight), (rows[0],), (rows[1],))
        assert right(out, functional.linear, rows[0], weight)
        assert right(tangent, functional.linear, rows[1], weight)
        traced = torch.jit.trace(lambda x: functional.linear(x, weight), rows[0])
        assert right(traced(rows[2]), functional.linear, rows[2], weight)
    gradient = torch.func.grad(lambda x: functional.linear(x, weight).sum())(rows[0])
    assert right(gradient, lambda w: w.sum(0).expand(20, 48), weight)


DENORMAL = """
a = torch.arange(10000.).view(100, 100) / 5000
products = [a @ a, torch.full((100, 100), 1e-21) @ torch.full((100, 100), 1e-21)]
"""


@only_our_torch
@pytest.mark.skipif(sys.maxsize > 2**32, reason="on 64-bit systems, BLAS computes products, not XNNPACK")
@pytest.mark.new_interpreter
def test_environment_variable_disables_xnnpack(tmp_path: Path) -> None:
    """Results agree except for denormals, which NEON treats as 0. The results for denormals show which kernel ran."""
    program = f"import sys, torch\n{DENORMAL}\ntorch.save(products, sys.argv[1])"
    file = tmp_path / "products.pt"
    subprocess.run([sys.executable, "-c", program, file], env={**os.environ, "TORCH_XNNPACK": "0"}, check=True)
    here: dict[str, Any] = {"torch": torch}
    exec(DENORMAL, here)  # noqa: S102  (the same statements in both processes)
    (of_blas, denormal), (of_xnnpack, zero) = torch.load(file), here["products"]
    assert torch.allclose(of_blas, of_xnnpack, rtol=1e-5)
    assert bool((denormal > 0).all())
    assert not zero.any()
