"""Tests of dot_cpp, matrix_cpp and cpu_cpp, which run on the PC, in an emulated machine and on a Raspberry Pi.

The tests require torch, numpy, pytest and the extension wheel, but nothing else from this project. The kernels run on
the backend that libqpu selects. libqpu's interpreter raises an error for any access outside a live buffer, and the
first call after release_buffers() allocates no more than it requires. If the tests pass on the interpreter, no access
is out of bounds.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cpu_cpp
import dot_cpp
import matrix_cpp
import pytest
import qpu_ops
import torch

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1000, 4097)
ELEMENTWISE = {"product": (dot_cpp.product, torch.mul), "add": (dot_cpp.add, torch.add)}
MATRIX = {"gpu": matrix_cpp.gpu, "cpu": cpu_cpp.cpu}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

ROUNDING = 2.0**-23
"""The relative rounding error of one QPU operation, which rounds towards zero."""
TINY = 2.0**-126
"""The smallest normal float32; the QPU treats smaller numbers as 0."""


@pytest.fixture(autouse=True)
def _known_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QPU_OPS_QPUS", raising=False)
    monkeypatch.delenv("QPU_OPS_BUFFER_KIB", raising=False)
    torch.manual_seed(20210601)
    qpu_ops.release_buffers()
    yield
    qpu_ops.release_buffers()


def whole(*shape: int) -> torch.Tensor:
    """Draw integers that are small enough for float32 to compute without rounding, so results must be bit-identical."""
    return torch.randint(-60, 61, shape).to(torch.float32)


def assert_elementwise(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Check the bound stated in dot_cpp; ``exact`` is float64."""
    allowed = ROUNDING * exact.abs() + 4 * TINY
    assert torch.all((found.double() - exact).abs() <= allowed)


def assert_scores(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, terms: int, unit: float) -> None:
    """Check |score - exact| <= n u / (1 - n u) * sum |a b| + half a unit in the last place + loss from denormals."""
    exact = torch.mv(a.double(), b.double())
    growth = terms * unit / (1 - terms * unit)
    allowed = growth * torch.mv(a.double().abs(), b.double().abs()) + 2.0**-24 * exact.abs() + 2 * b.numel() * TINY
    assert torch.all((found.double() - exact).abs() <= allowed)


def assert_gpu(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Check the bound stated in matrix_cpp."""
    assert_scores(found, a, b, terms=math.ceil(b.numel() / 16) + 1, unit=ROUNDING)


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_is_exact_for_small_integers(name: str, size: int) -> None:
    ours, theirs = ELEMENTWISE[name]
    a, b = whole(size), whole(size)
    found = ours(a, b)
    assert found.dtype == torch.float32
    assert found.shape == (size,)
    assert torch.equal(found, theirs(a, b))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_error_is_within_bound(name: str, size: int) -> None:
    ours, theirs = ELEMENTWISE[name]
    a, b = torch.randn(size), torch.randn(size) * 1000
    assert_elementwise(ours(a, b), theirs(a.double(), b.double()))


def test_random_numbers_agree_with_torch_to_six_digits() -> None:
    a, b = torch.rand(100), torch.rand(100)
    torch.testing.assert_close(dot_cpp.product(a, b), a * b, rtol=1e-6, atol=0)
    torch.testing.assert_close(dot_cpp.add(a, b), a + b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("height", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("name", MATRIX)
def test_matrix_vector_is_exact_for_small_integers(name: str, height: int, width: int) -> None:
    a, b = whole(height, width), whole(width)
    found = MATRIX[name](a, b)
    assert found.dtype == torch.float32
    assert found.shape == (height,)
    assert torch.equal(found.double(), torch.mv(a.double(), b.double()))


@pytest.mark.parametrize("width", SIZES)
def test_matrix_vector_error_is_within_bound(width: int) -> None:
    a, b = torch.randn(7, width), torch.randn(width)
    assert_gpu(matrix_cpp.gpu(a, b), a, b)
    assert_scores(cpu_cpp.cpu(a, b), a, b, terms=width + 1, unit=2.0**-24)


def test_matrix_vector_bound_with_one_sided_errors() -> None:
    a, b = torch.full((3, 5000), 1 / 3), torch.full((5000,), 1 / 7)
    assert_gpu(matrix_cpp.gpu(a, b), a, b)


@pytest.mark.parametrize("height", [1, 15, 16, 17, 63, 64, 65, 100])
def test_row_counts_at_block_limits(height: int) -> None:
    a, b = whole(height, 33), whole(33)
    assert torch.equal(matrix_cpp.gpu(a, b), torch.mv(a, b))


@pytest.mark.parametrize("qpus", range(1, 13))
def test_any_number_of_qpus_computes_all_blocks_and_rows(qpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_QPUS", str(qpus))
    for blocks in (1, 2, 3, 4, 5, 11, 12, 13, 23, 24, 25):
        for size in (16 * blocks - 1, 16 * blocks):
            qpu_ops.release_buffers()
            a, b = whole(size), whole(size)
            assert torch.equal(dot_cpp.product(a, b), a * b), (qpus, size)
            assert torch.equal(dot_cpp.add(a, b), a + b), (qpus, size)
        qpu_ops.release_buffers()
        rows, vector = whole(blocks, 40), whole(40)
        assert torch.equal(matrix_cpp.gpu(rows, vector), torch.mv(rows, vector)), (qpus, blocks)


def test_results_are_identical_for_any_number_of_qpus(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(9, 777), torch.randn(777)
    monkeypatch.setenv("QPU_OPS_QPUS", "1")
    alone = matrix_cpp.gpu(a, b)
    monkeypatch.setenv("QPU_OPS_QPUS", "12")
    assert torch.equal(matrix_cpp.gpu(a, b), alone)


def assert_mm(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Check the bound that docs/ops.md states for torch.ops.qpu.mm, with denormal operands replaced by 0."""
    x, y = (torch.where(t.abs() < TINY, 0.0, t).double() for t in (a, b))
    depth = a.shape[1]
    growth = (depth + 2) * ROUNDING / (1 - (depth + 2) * ROUNDING)
    allowed = growth * (x.abs() @ y.abs()) + 2 * depth * TINY
    assert found.shape == (a.shape[0], b.shape[1])
    assert torch.all((found.double() - x @ y).abs() <= allowed)


SHAPES = [(1, 1, 1), (3, 17, 5), (8, 64, 64), (9, 100, 65), (2, 1000, 3)]
"""Rows, depth and columns: a tile of the product has 8 rows and 64 columns."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrix_product_is_exact_for_small_integers(shape: tuple[int, int, int]) -> None:
    a, b = whole(*shape[:2]), whole(*shape[1:])
    assert torch.equal(torch.ops.qpu.mm(a, b).double(), a.double() @ b.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrix_product_error_is_within_bound(shape: tuple[int, int, int]) -> None:
    a, b = torch.randn(shape[:2]), torch.randn(shape[1:])
    assert_mm(torch.ops.qpu.mm(a, b), a, b)


def test_matrix_product_bound_with_one_sided_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.full((2, 3000), 1 / 3), torch.full((3000, 2), 1 / 7)
    assert_mm(torch.ops.qpu.mm(a, b), a, b)
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    assert_mm(torch.ops.qpu.mm(a, b), a, b)


def test_matrix_product_bound_with_denormal_results() -> None:
    a = torch.tensor([[2.0**-70] * 20, [2.0**-126, -(2.0**-126) * (1 + 2.0**-20)] * 10, [1e-40] * 20])
    b = torch.cat((torch.full((20, 1), 2.0**-57), torch.ones(20, 1), torch.full((20, 1), 1e-40)), 1)
    found = torch.ops.qpu.mm(a, b)
    assert_mm(found, a, b)
    exact = a.double() @ b.double()
    assert exact[0, 0] == 20 * 2.0**-127
    assert found[0, 0] == 0, "products below the smallest normal number are lost"


# --- dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_result_has_the_dtype_of_the_operands(dtype: torch.dtype) -> None:
    a, b = whole(37).to(dtype) / 4, whole(37).to(dtype) / 4
    for name, (ours, theirs) in ELEMENTWISE.items():
        found = ours(a, b)
        assert found.dtype == dtype, name
        expected = theirs(a.float(), b.float()).to(dtype)
        assert torch.equal(found, expected), name
    rows, vector = (whole(5, 37) / 8).to(dtype), (whole(37) / 8).to(dtype)
    for operation in MATRIX.values():
        found = operation(rows, vector)
        assert found.dtype == dtype
        assert torch.equal(found, torch.mv(rows.double(), vector.double()).to(dtype))


def test_float64_is_rounded_to_float32_first() -> None:
    a, b = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    assert_elementwise(dot_cpp.product(a, b), a.float().double() * b.float().double())
    assert not torch.equal(dot_cpp.product(a, b), a * b)


def test_float64_beyond_float32_range_is_computed_correctly() -> None:
    a = torch.tensor([1e300, 2.0, -1e200], dtype=torch.float64)
    b = torch.tensor([2.0, 1e200, 3.0], dtype=torch.float64)
    assert torch.equal(dot_cpp.product(a, b), a * b)
    rows = torch.stack((a, torch.ones(3, dtype=torch.float64)))
    assert torch.equal(matrix_cpp.gpu(rows, torch.ones(3, dtype=torch.float64)), rows @ torch.ones(3).double())


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("operation", [dot_cpp.product, dot_cpp.add], ids=["product", "add"])
def test_other_dtypes_raise_type_error(operation: Operation, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32, float64, float16 or bfloat16"):
        operation(torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("name", MATRIX)
def test_other_dtypes_raise_type_error_for_matrices(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: a is expected .* found Long"):
        MATRIX[name](torch.ones(2, 4, dtype=torch.int64), torch.ones(4, dtype=torch.int64))


def test_dtype_mismatch_error_names_both_dtypes() -> None:
    with pytest.raises(TypeError, match="the same dtype, found Float and Double"):
        dot_cpp.add(torch.ones(4), torch.ones(4, dtype=torch.float64))
    with pytest.raises(TypeError, match="the same dtype, found Half and Float"):
        matrix_cpp.gpu(torch.ones(2, 4, dtype=torch.float16), torch.ones(4))


def test_non_tensors_raise_type_error() -> None:
    with pytest.raises(TypeError, match=r"product: b is expected to be a torch\.Tensor, found list"):
        dot_cpp.product(torch.ones(2), [1.0, 2.0])
    with pytest.raises(TypeError, match=r"gpu: a is expected to be a torch\.Tensor, found ndarray"):
        matrix_cpp.gpu(torch.ones(2, 2).numpy(), torch.ones(2))
    with pytest.raises(TypeError, match="found float"):
        cpu_cpp.cpu(1.0, torch.ones(2))


def test_sparse_tensors_raise_type_error() -> None:
    with pytest.raises(TypeError, match=r"dense tensor, found layout .*to_dense"):
        dot_cpp.product(torch.ones(3).to_sparse(), torch.ones(3))


# --- special values ---------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


def test_inf_and_nan_match_torch() -> None:
    values = [0.0, 1.0, -2.0, INF, -INF, NAN]
    a = torch.tensor([x for x in values for _ in values])
    b = torch.tensor([y for _ in values for y in values])
    torch.testing.assert_close(dot_cpp.product(a, b), a * b, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dot_cpp.add(a, b), a + b, rtol=0, atol=0, equal_nan=True)


def test_only_rows_with_inf_or_nan_match_torch_exactly() -> None:
    a, b = whole(6, 20), whole(20) + 100
    a[1, 3], a[2, 19], a[4, 0], a[4, 1] = INF, NAN, INF, -INF
    torch.testing.assert_close(matrix_cpp.gpu(a, b), torch.mv(a, b), rtol=0, atol=0, equal_nan=True)
    b[7] = NAN
    assert matrix_cpp.gpu(a, b).isnan().all()


def test_overflow_is_inf() -> None:
    a, b = torch.tensor([3e38, -3e38, 1e30]), torch.tensor([3e38, 3e38, 1e-30])
    assert torch.equal(dot_cpp.product(a, b)[:2], torch.tensor([INF, -INF]))
    assert dot_cpp.add(a, a).tolist()[:2] == [INF, -INF]


def test_denormal_operands_count_as_zero() -> None:
    """Denormals become zero before the computation, so their product with a large number is zero."""
    small, large = torch.full((16,), 1e-40), torch.full((16,), 1e38)
    for found in (
        dot_cpp.product(small, large),
        matrix_cpp.gpu(small.reshape(1, 16), large),
        torch.ops.qpu.mm(small.reshape(16, 1), large.reshape(1, 16)),
    ):
        assert torch.equal(found, torch.zeros_like(found))


def test_denormals_stay_within_the_bound() -> None:
    a = torch.tensor([1e-40, 1e-30, -1e-42, 0.0, -0.0, 1.5e-38])
    b = torch.tensor([1e-40, 1e-15, 1.0, -0.0, -0.0, -1.5e-38])
    assert_elementwise(dot_cpp.product(a, b), a.double() * b.double())
    assert_elementwise(dot_cpp.add(a, b), a.double() + b.double())


# --- shapes and strides -----------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "every second": lambda: whole(90)[::2],
    "every third from the second on": lambda: whole(136)[1::3],
    "with a storage offset": lambda: whole(60)[7:52],
    "expanded from one element": lambda: whole(1).expand(45),
    "a column": lambda: whole(45, 3)[:, 1],
    "flipped": lambda: whole(45).flip(0),
    "negated lazily": lambda: torch.complex(whole(45), whole(45)).conj().imag,
    "transposed": lambda: whole(9, 5).t(),
    "three dimensions, permuted": lambda: whole(3, 5, 3).permute(2, 0, 1),
    "overlapping windows": lambda: whole(47).unfold(0, 3, 1),
    "channels last": lambda: whole(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a scalar": lambda: whole(1).reshape(()),
    "no elements, two dimensions": lambda: whole(3, 0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_and_number_of_dimensions(view: str) -> None:
    a = VIEWS[view]()
    b = whole(*a.shape)
    for ours, theirs in ELEMENTWISE.values():
        for x, y in ((a, b), (b, a), (a, a)):
            found = ours(x, y)
            assert found.shape == a.shape
            assert torch.equal(found, theirs(x, y))


MATRIX_VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: whole(35, 6).t(),
    "every second row": lambda: whole(12, 35)[::2],
    "every second column": lambda: whole(6, 70)[:, ::2],
    "one row, expanded": lambda: whole(1, 35).expand(6, 35),
    "one column, expanded": lambda: whole(6, 1).expand(6, 35),
    "part of a wider matrix": lambda: whole(8, 50)[1:7, 9:44],
    "overlapping rows": lambda: whole(40).unfold(0, 35, 1),
    "a single column": lambda: whole(6, 35)[:, 3:4],
    "negated lazily": lambda: torch.complex(whole(6, 35), whole(6, 35)).conj().imag,
}


@pytest.mark.parametrize("view", MATRIX_VIEWS)
@pytest.mark.parametrize("name", MATRIX)
def test_any_strides_of_matrix_and_vector(name: str, view: str) -> None:
    a = MATRIX_VIEWS[view]()
    for b in (whole(a.shape[1]), whole(2 * a.shape[1])[::2], whole(1).expand(a.shape[1])):
        assert torch.equal(MATRIX[name](a, b), torch.mv(a, b))


@pytest.mark.parametrize("shapes", [((4,), (5,)), ((4,), (1,)), ((2, 3), (3, 2)), ((3,), (1, 3)), ((), (1,))], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shape_mismatch_raises_error_with_both_shapes(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    with pytest.raises(ValueError, match="the same shape") as caught:
        ELEMENTWISE[name][0](torch.ones(shapes[0]), torch.ones(shapes[1]))
    for shape in shapes:
        assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    "shapes", [((3, 4), (3,)), ((3, 4), (4, 1)), ((4,), (4,)), ((2, 3, 4), (4,)), ((3, 4), ()), ((0, 4), (0,))], ids=str
)
@pytest.mark.parametrize("name", MATRIX)
def test_invalid_matrix_shapes_raise_error_with_both_shapes(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    with pytest.raises(ValueError, match=r"a of shape \(H, W\) and b of shape \(W,\)") as caught:
        MATRIX[name](torch.ones(shapes[0]), torch.ones(shapes[1]))
    for shape in shapes:
        assert str(shape) in str(caught.value)


def test_tensor_on_other_device_raises_error() -> None:
    with pytest.raises(ValueError, match="device cpu, found meta"):
        dot_cpp.product(torch.ones(3, device="meta"), torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="gpu: b is expected on the device cpu, found meta"):
        matrix_cpp.gpu(torch.ones(2, 3), torch.ones(3, device="meta"))


# --- the caller's tensors ---------------------------------------------------------------------------------------


def test_no_operand_is_modified() -> None:
    for size in (1, 16, 17, 1000):
        a, b, rows = torch.randn(size), torch.randn(size), torch.randn(5, size)
        before = [(tensor, tensor.clone(), tensor._version) for tensor in (a, b, rows)]
        dot_cpp.product(a, b)
        dot_cpp.add(a, b)
        matrix_cpp.gpu(rows, b)
        matrix_cpp.gpu_timed(rows, b)
        cpu_cpp.cpu(rows, b)
        for tensor, copy, version in before:
            assert torch.equal(tensor, copy)
            assert tensor._version == version


def test_elements_outside_a_view_are_not_modified() -> None:
    memory = torch.randn(100)
    copy = memory.clone()
    dot_cpp.add(memory[20:37], memory[40:57])
    assert torch.equal(memory, copy)


def test_results_share_no_memory() -> None:
    a, b = whole(40), whole(40)
    first = dot_cpp.product(a, b)
    kept = first.clone()
    second = dot_cpp.product(b, b)
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    second.fill_(1)
    assert torch.equal(dot_cpp.product(a, b), kept)


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradients_of_elementwise_operations(name: str) -> None:
    ours, theirs = ELEMENTWISE[name]
    a, b, weight = (whole(3, 7).requires_grad_() for _ in range(3))
    found = torch.autograd.grad((ours(a, b) * weight).sum(), (a, b))
    expected = torch.autograd.grad((theirs(a, b) * weight).sum(), (a, b))
    assert all(map(torch.equal, found, expected))


def test_gradients_of_the_matrix_product() -> None:
    a, b, weight = whole(5, 18).requires_grad_(), whole(18).requires_grad_(), whole(5)
    found = torch.autograd.grad((matrix_cpp.gpu(a, b) * weight).sum(), (a, b))
    expected = torch.autograd.grad((torch.mv(a, b) * weight).sum(), (a, b))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("operation", [dot_cpp.product, dot_cpp.add, matrix_cpp.gpu], ids=["product", "add", "gpu"])
def test_gradients_agree_with_finite_differences_twice(operation: Operation) -> None:
    # The operations are bilinear, so finite differences with a large step are exact except for rounding.
    a = torch.randn((3, 5) if operation is matrix_cpp.gpu else (5,), dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operation, (a, b), eps=0.5, atol=1e-5, rtol=1e-5)
    assert torch.autograd.gradgradcheck(operation, (a, b), eps=0.5, atol=1e-5, rtol=1e-5)


def test_gradients_only_where_required() -> None:
    a, b = whole(20).requires_grad_(), whole(20)
    assert dot_cpp.product(a, b).requires_grad
    assert not dot_cpp.product(b, b).requires_grad
    with torch.no_grad():
        assert not dot_cpp.product(a, b).requires_grad
    assert not matrix_cpp.gpu_timed(whole(2, 20), a).result.requires_grad
    dot_cpp.product(a, b).sum().backward()
    assert torch.equal(a.grad, b)
    assert b.grad is None


# --- buffers and parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [335, 336, 337, 671, 672, 673, 3000])
def test_vectors_longer_than_the_buffer_are_split(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    a, b = whole(size), whole(2 * size)[::2]
    assert torch.equal(dot_cpp.product(a, b), a * b)
    assert torch.equal(dot_cpp.add(a, b), a + b)
    assert qpu_ops.buffered() <= 1024


@pytest.mark.parametrize(
    "shape", [(1, 255), (1, 256), (1, 257), (3, 256), (2, 1000), (15, 16), (16, 16), (17, 16), (40, 1), (9, 513)]
)
def test_matrices_larger_than_the_buffer_are_split(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    a, b = whole(*shape), whole(shape[1])
    assert torch.equal(matrix_cpp.gpu(a, b), torch.mv(a, b))
    transposed = whole(*reversed(shape)).t()
    assert torch.equal(matrix_cpp.gpu(transposed, b), torch.mv(transposed, b))
    assert qpu_ops.buffered() <= 1024


def test_total_buffer_size_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation needs a large buffer of its own, so the buffers of earlier operations must be released first."""
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    vector, wide, high, factor = whole(336), whole(2, 256), whole(40, 3), whole(3, 17)
    for _ in range(2):
        assert torch.equal(dot_cpp.product(vector, vector), vector * vector)
        assert 0 < qpu_ops.buffered() <= 1024
        assert torch.equal(matrix_cpp.gpu(wide, wide[0]), torch.mv(wide, wide[0]))
        assert 0 < qpu_ops.buffered() <= 1024
        assert torch.equal(torch.ops.qpu.mm(high, factor), high @ factor)
        assert 0 < qpu_ops.buffered() <= 1024
        assert torch.equal(matrix_cpp.gpu(high, factor[:, 0]), torch.mv(high, factor[:, 0]))
        assert 0 < qpu_ops.buffered() <= 1024
    monkeypatch.delenv("QPU_OPS_BUFFER_KIB")
    dot_cpp.add(whole(5000), whole(5000))
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    assert torch.equal(dot_cpp.add(vector, vector), 2 * vector)
    assert qpu_ops.buffered() <= 1024, "a lower limit applies immediately"


def test_buffers_are_reused_and_released() -> None:
    dot_cpp.product(whole(1000), whole(1000))
    held = qpu_ops.buffered()
    assert held == 3 * 1008
    for size in (1, 16, 999, 1008):
        dot_cpp.add(whole(size), whole(size))
        assert qpu_ops.buffered() == held
    qpu_ops.release_buffers()
    assert qpu_ops.buffered() == 0
    assert torch.equal(dot_cpp.add(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


def test_stale_buffer_contents_do_not_affect_results() -> None:
    dot_cpp.product(torch.full((1000,), 1e30), torch.full((1000,), 1e30))
    matrix_cpp.gpu(torch.full((4, 250), 1e30), torch.full((250,), 1e30))
    a, b = whole(3, 17), whole(17)
    assert torch.equal(matrix_cpp.gpu(a, b), torch.mv(a, b))
    assert torch.equal(dot_cpp.product(b, b), b * b)


@pytest.mark.parametrize("value", ["0", "13", "-1", "four", "1.5", " 4", "99999999999999999999"])
def test_invalid_number_of_qpus_raises_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_QPUS", value)
    calls: tuple[Callable[[], object], ...] = (
        lambda: dot_cpp.add(whole(3), whole(3)),
        lambda: matrix_cpp.gpu(whole(2, 3), whole(3)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=rf"QPU_OPS_QPUS: expected 1 to 12 QPUs, found '{value}'"):
            call()


@pytest.mark.parametrize("value", ["3", "32769", "8M"])
def test_invalid_buffer_size_raises_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", value)
    with pytest.raises(ValueError, match=rf"QPU_OPS_BUFFER_KIB: expected 4 to 32768 KiB, found '{value}'"):
        dot_cpp.product(whole(3), whole(3))


# --- compile once, threads, processes ---------------------------------------------------------------------------


def test_each_kernel_is_compiled_once_per_process() -> None:
    for size in (1, 16, 17, 300):
        dot_cpp.product(whole(size), whole(size))
        dot_cpp.add(whole(size), whole(size))
        matrix_cpp.gpu(whole(3, size), whole(size))
        qpu_ops.release_buffers()
    assert qpu_ops.compilations() == {"product": 1, "add": 1, "matrix_vector": 1}


# Behaviour that requires a new process. One process tests all of it, because importing torch over NFS is slow.
ALONE = """
import json, os, threading
import torch, dot_cpp, matrix_cpp, cpu_cpp, qpu_ops
found = {"imported": [sum(qpu_ops.compilations().values()), qpu_ops.buffered()]}

os.environ["QPU_BACKEND"] = "abacus"
try:
    dot_cpp.product(torch.ones(3), torch.ones(3))
except qpu_ops.QpuError as fault:
    found["abacus"] = str(fault)
del os.environ["QPU_BACKEND"]

def in_a_child(work):
    child = os.fork()
    if child == 0:
        fine = False
        try:
            fine = work()
        finally:
            os._exit(0 if fine else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

a, b = torch.arange(100.0), torch.ones(100)
held = dot_cpp.product(a, b)
before = qpu_ops.buffered()

def first_use():
    fine = qpu_ops.buffered() == 0 and sum(qpu_ops.compilations().values()) == 0
    fine = fine and torch.equal(dot_cpp.product(a, a), a * a) and qpu_ops.compilations()["product"] == 1
    return fine and torch.equal(matrix_cpp.gpu(a.reshape(4, 25), b[:25]), torch.mv(a.reshape(4, 25), b[:25]))

found["child"] = in_a_child(first_use)
found["parent"] = torch.equal(dot_cpp.add(a, b), a + b) and qpu_ops.buffered() == before and torch.equal(held, a)

many = torch.ones(20000)
stop = threading.Event()
def work():
    while not stop.is_set():
        dot_cpp.product(many, many)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
found["while running"] = [in_a_child(lambda: torch.equal(dot_cpp.add(b, b), 2 * b)) for _ in range(3)]
stop.set()
for thread in threads: thread.join()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    # Python 3.12 and later warn about forking while threads run, as this test does.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.new_interpreter
def test_import_compiles_no_kernels_and_allocates_nothing(alone: dict[str, Any]) -> None:
    assert alone["imported"] == [0, 0]


def test_concurrent_threads_get_correct_results() -> None:
    faults: list[BaseException] = []
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            start.wait()
            for step in range(12):
                size = 1 + 37 * ((seed + step) % 9)
                a = torch.randint(-60, 61, (size,), generator=generator).float()
                rows = torch.randint(-60, 61, (5, size), generator=generator).float()
                assert torch.equal(dot_cpp.product(a, a), a * a)
                assert torch.equal(matrix_cpp.gpu(rows, a), torch.mv(rows, a))
                assert torch.equal(dot_cpp.add(a, a), a + a)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert qpu_ops.compilations() == {"product": 1, "add": 1, "matrix_vector": 1}


def test_other_threads_run_while_a_kernel_runs() -> None:
    def seconds() -> float:
        """Return the shortest time of several runs, in seconds; individual runs may be delayed."""
        found = []
        for _ in range(3):
            began = time.perf_counter()
            matrix_cpp.gpu(a, b)
            found.append(time.perf_counter() - began)
        return min(found)

    height = 64
    while True:
        a, b = torch.ones(height, 512), torch.ones(512)
        if seconds() > 0.2 or height >= 1 << 17:
            break
        height *= 2
    span: list[float] = []

    def work() -> None:
        span.append(time.perf_counter())
        matrix_cpp.gpu(a, b)
        span.append(time.perf_counter())

    # A waiting thread requests the GIL every 5 ms. Time stamps in the middle half of the call show that the call
    # released the GIL.
    thread = threading.Thread(target=work)
    stamps = []
    thread.start()
    while thread.is_alive():
        stamps.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    quarter = (span[1] - span[0]) / 4
    assert any(span[0] + quarter < stamp < span[1] - quarter for stamp in stamps)


@pytest.mark.new_interpreter
def test_forked_child_starts_without_buffers_and_kernels(alone: dict[str, Any]) -> None:
    assert (alone["child"], alone["parent"]) == (0, True)


@pytest.mark.new_interpreter
def test_fork_while_other_threads_run_kernels(alone: dict[str, Any]) -> None:
    assert alone["while running"] == [0, 0, 0]


def test_ctrl_c_interrupts_a_split_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_OPS_BUFFER_KIB", "4")
    a = torch.ones(3_000_000)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    began = time.process_time()
    dot_cpp.product(a, a)
    took = time.process_time() - began

    def product_with_an_alarm() -> None:
        signal.setitimer(signal.ITIMER_PROF, took / 4)
        dot_cpp.product(a, a)

    previous = signal.signal(signal.SIGPROF, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            product_with_an_alarm()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    assert torch.equal(dot_cpp.product(a[:99], a[:99]), a[:99])


# --- times, backend, errors of the library ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (20, 100)])
def test_timed_variants_return_the_same_result(shape: tuple[int, int]) -> None:
    a, b = whole(*shape), whole(shape[1])
    for timed, result in (
        (matrix_cpp.gpu_timed(a, b), matrix_cpp.gpu(a, b)),
        (cpu_cpp.cpu_timed(a, b), cpu_cpp.cpu(a, b)),
    ):
        assert torch.equal(timed.result, result)
        assert 0 <= timed.compute_s <= timed.end_to_end_s < 60
        assert (timed.compute_s > 0) == (a.numel() > 0)


def test_backend_is_reported_with_reason() -> None:
    found = qpu_ops.backend()
    assert found.name
    assert found.reason


@pytest.mark.new_interpreter
def test_unknown_backend_raises_qpu_error(alone: dict[str, Any]) -> None:
    assert "abacus" in alone["abacus"]
