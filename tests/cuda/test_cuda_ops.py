"""Tests of the cuda_ops operators, on the CPU and, if there is one, on a GPU. The tests require torch and the wheel.

Results are compared with torch's results in double precision; the plain loops on the CPU and the kernels on the GPU
pass the same tests. Without a GPU, the tests that require one are skipped with a message.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_ops
import pytest
import torch
from cuda_ops import timing
from torch import Tensor

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA GPU on this machine")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs on this machine")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

devices = pytest.mark.parametrize("device", DEVICES)
types = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: str(kind)[6:])


def close(found: Tensor, exact: Tensor, *, ulps: float = 2.0, scale: Tensor | float = 0.0) -> None:
    """Check that errors are at most ``ulps`` units in the last place of the exact value or, if larger, of ``scale``."""
    assert found.shape == exact.shape
    error = (found.double() - exact.double()).abs()
    allowed = ulps * EPSILON[found.dtype] * torch.maximum(exact.double().abs(), torch.as_tensor(scale).double())
    tiny = torch.finfo(found.dtype).tiny
    same = (found.double() == exact.double()) | (found.isnan() & exact.isnan())
    assert bool((same | (error <= allowed + tiny)).all()), f"off by {error[~same].max().item()}"


LAYOUTS: dict[str, Callable[[Any], Tensor]] = {
    "nothing": lambda make: make(0),
    "no columns": lambda make: make(3, 0),
    "a scalar": lambda make: make(),
    "one": lambda make: make(1),
    "odd": lambda make: make(1237),
    "begins off a pack": lambda make: make(1001)[1:],
    "every third": lambda make: make(3001)[::3],
    "transposed": lambda make: make(37, 53).t(),
    "permuted": lambda make: make(3, 5, 7, 2).permute(2, 0, 3, 1),
    "a part of each row": lambda make: make(33, 70)[:, 3:66],
    "expanded": lambda make: make(1, 29).expand(31, 29),
    "channels last": lambda make: make(2, 6, 5, 4).contiguous(memory_format=torch.channels_last),
    "many dimensions": lambda make: make(*[2] * 14).permute(*reversed(range(14)))[..., ::2],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def softmax_close(found: Tensor, x: Tensor) -> None:
    """Compare the result with that of torch's softmax in double precision.

    The bound allows for the rounding of exp's float32 argument.
    """
    exact = x.double().softmax(-1)
    close(found, exact, ulps=32 if x.dtype == torch.float32 else 2, scale=6e-8 if x.dtype == torch.float16 else 0.0)


def maker(device: str, kind: torch.dtype) -> Callable[..., Tensor]:
    return lambda *shape: torch.randn(shape, device=device).to(kind)


@devices
@types
@layouts
def test_elementwise_agrees_with_torch_in_any_layout(
    device: str, kind: torch.dtype, layout: Callable[[Any], Tensor]
) -> None:
    a, b = layout(maker(device, kind)), layout(maker(device, kind))
    assert torch.equal(cuda_ops.add2(a, b), a + b)
    close(cuda_ops.exp(a), a.double().exp(), ulps=2)
    exact = 0.37 * a.double() + b.double()
    close(cuda_ops.axpy(0.37, a, b), exact, ulps=2, scale=(0.37 * a.double()).abs() + b.double().abs())


@devices
def test_inputs_of_different_layouts_are_added_in_place(device: str) -> None:
    shapes = [LAYOUTS["transposed"](maker(device, torch.float32)), torch.randn(53, 37, device=device)]
    shapes.append(torch.randn(53, 1, device=device).expand(53, 37))
    for a, b in itertools.product(shapes, repeat=2):
        assert torch.equal(cuda_ops.add2(a, b), a + b)


@devices
def test_result_layout_follows_dense_inputs(device: str) -> None:
    a = torch.randn(4, 6, device=device)
    assert cuda_ops.exp(a.t()).stride() == a.t().stride()
    assert cuda_ops.add2(a, a.clone()).is_contiguous()
    assert cuda_ops.add2(a.t(), torch.randn(6, 4, device=device)).is_contiguous()
    assert cuda_ops.exp(a[:, ::2]).is_contiguous()


@devices
def test_exp_at_the_ends_of_the_range(device: str) -> None:
    x = torch.tensor([0.0, -0.0, 88.7, 89.0, -87.3, -104.0, float("inf"), -float("inf"), float("nan")], device=device)
    close(cuda_ops.exp(x), x.double().exp().float(), ulps=2)


WIDTHS = [1, 3, 7, 8, 31, 32, 33, 100, 127, 128, 129, 512, 1000, 1001, 1023, 1024, 1025, 2048, 4095, 4096, 8193]


@devices
@types
@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_agrees_with_torch(device: str, kind: torch.dtype, width: int) -> None:
    x = (torch.randn(5, width, device=device) * 4).to(kind)
    softmax_close(cuda_ops.softmax(x), x)


@devices
@types
@pytest.mark.parametrize(
    "layout",
    [
        lambda make: make(),
        lambda make: make(0, 5),
        lambda make: make(5, 0),
        lambda make: make(64, 96)[:, 1:90],
        lambda make: make(64, 96)[:, 8:72],
        lambda make: make(3, 4, 50),
        lambda make: make(50, 33).t(),
        lambda make: make(6, 5, 40)[::2],
        lambda make: make(1, 77).expand(9, 77),
        lambda make: make(2051)[3:],
        lambda make: make(1001, 3),
        lambda make: make(1024, 7),
        lambda make: make(1000, 15),
        lambda make: make(1001, 7)[1:],
    ],
)
def test_softmax_in_any_layout(device: str, kind: torch.dtype, layout: Callable[[Any], Tensor]) -> None:
    x = layout(maker(device, kind))
    softmax_close(cuda_ops.softmax(x), x)


@devices
@pytest.mark.parametrize("width", [5, 1500, 70000])
def test_softmax_of_extremes_matches_torch(device: str, width: int) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.randn(6, width, device=device)
    x[0, 1] = 1e30
    x[1, :3] = torch.tensor([-inf, 3e38, -3e38])
    x[2] = -inf
    x[3, 2] = inf
    x[4, 0] = nan
    x[5, : width // 2] = -inf
    softmax_close(cuda_ops.softmax(x), x)


@needs_gpu
@types
@pytest.mark.parametrize("width", [16384, 32768, 32776, 70000, 70001])
def test_softmax_of_long_rows(kind: torch.dtype, width: int) -> None:
    x = (torch.randn(40, width, device="cuda") * 4).to(kind)
    softmax_close(cuda_ops.softmax(x), x)


@needs_gpu
@types
@pytest.mark.parametrize("width", [257, 1001, 8191, 70001])
def test_softmax_of_an_odd_part_of_each_row(kind: torch.dtype, width: int) -> None:
    """The rows start at unaligned addresses.

    Input and output rows have the same alignment in one case, and different alignments in the other.
    """
    for distance in (width + 8, width + 3):
        x = (torch.randn(40, distance, device="cuda") * 4).to(kind)[:, :width]
        softmax_close(cuda_ops.softmax(x), x)


@devices
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("width", [37, 1500, 70000])
def test_softmax_propagates_a_single_nan(device: str, kind: torch.dtype, width: int) -> None:
    for at in (0, 3, width - 1):
        x = torch.full((2, width), -float("inf"), device=device, dtype=kind)
        x[0, at] = float("nan")
        x[1, at] = 1.0
        found = cuda_ops.softmax(x)
        assert bool(found[0].isnan().all())
        assert found[1, at] == 1.0


SHAPES = [(1, 1), (7, 1), (1, 9), (33, 65), (100, 1000), (257, 128), (3, 5000), (5000, 3), (64, 64), (2, 20000)]


@devices
@types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matvec_agrees_with_torch(device: str, kind: torch.dtype, shape: tuple[int, int]) -> None:
    make = maker(device, kind)
    m, v, w = make(*shape), make(shape[1]), make(shape[0])
    for matrix, vector in ((m, v), (m.t(), w), (m[:, ::2], v[::2]), (m.t()[::2], w), (m[1:], v), (m[:, 1:], v[1:])):
        exact = matrix.double() @ vector.double()
        close(cuda_ops.matvec(matrix, vector), exact, ulps=4, scale=matrix.double().abs() @ vector.double().abs())


CUT_SHAPES = [
    *((3000, 1024), (600, 4096), (40, 200000), (8192, 8192), (200000, 40), (700, 8192), (6, 100000), (100000, 6)),
    *((1, 100000), (100000, 1), (99, 40001), (4099, 2051), (300000, 17), (200000, 8), (2500, 4104), (3, 300001)),
    *((520, 16384), (520, 32768), (2000, 5000), (5000, 1003), (40000, 101), (100, 16384), (7, 99999), (40, 8191)),
    *((4096, 1024), (30000, 301), (5000, 2003), (700, 14001), (4, 40001), (60, 150001)),
]
"""Together, these shapes use all kernel variants for distributing rows and columns."""


@needs_gpu
@types
@pytest.mark.parametrize("shape", CUT_SHAPES, ids=str)
def test_matvec_cut_for_every_kernel_variant(kind: torch.dtype, shape: tuple[int, int]) -> None:
    make = maker("cuda", kind)
    m, v, w = make(*shape), make(shape[1]), make(shape[0])
    layouts = [(m, v), (m.t(), w), (m[:, 1:], v[1:]), (m[1:].t(), w[1:]), (m[:, 1:].t(), w), (m[:, ::2], v[::2])]
    layouts += [(m[:1].expand(shape), v), (m[:, :1].expand(shape), v), (m[:1].expand(shape).t(), w)]
    for matrix, vector in layouts:
        exact = matrix.double() @ vector.double()
        close(cuda_ops.matvec(matrix, vector), exact, ulps=8, scale=matrix.double().abs() @ vector.double().abs())
        assert torch.equal(cuda_ops.matvec(matrix, vector), cuda_ops.matvec(matrix, vector)), (
            "repeated calls must give identical results"
        )


@devices
def test_matvec_without_columns_is_zero(device: str) -> None:
    assert torch.equal(
        cuda_ops.matvec(torch.empty(4, 0, device=device), torch.empty(0, device=device)), torch.zeros(4, device=device)
    )
    assert cuda_ops.matvec(torch.empty(0, 4, device=device), torch.empty(4, device=device)).shape == (0,)


# Gradients.

OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "add2": (cuda_ops.add2, torch.add, ((5, 7), (5, 7))),
    "axpy": (lambda x, y: cuda_ops.axpy(-1.5, x, y), lambda x, y: -1.5 * x + y, ((5, 7), (5, 7))),
    "exp": (cuda_ops.exp, torch.exp, ((5, 7),)),
    "softmax": (cuda_ops.softmax, lambda x: x.softmax(-1), ((5, 7),)),
    "matvec": (cuda_ops.matvec, torch.mv, ((5, 7), (7,))),
}
operations = pytest.mark.parametrize(("ours", "torchs", "shapes"), OPERATIONS.values(), ids=OPERATIONS.keys())


@devices
@operations
def test_first_and_second_order_gradients_match_torch(
    device: str, ours: Callable[..., Tensor], torchs: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    found: list[Tensor] = []
    exact: list[Tensor] = []
    for operation, kind, results in ((ours, torch.float32, found), (torchs, torch.float64, exact)):
        leaves = [item.detach().to(kind).requires_grad_() for item in inputs]
        y = operation(*leaves)
        assert y.requires_grad
        first = torch.autograd.grad(
            (y * y * torch.arange(y.numel(), device=device).reshape(y.shape)).sum(), leaves, create_graph=True
        )
        second = torch.autograd.grad(sum((item * item).sum() for item in first), leaves)
        results += [y, *first, *second]
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-3)


@devices
def test_gradients_are_recorded_only_if_needed(device: str) -> None:
    a, b = torch.randn(3, device=device), torch.randn(3, device=device, requires_grad=True)
    assert not cuda_ops.add2(a, a).requires_grad
    assert cuda_ops.add2(a, b).requires_grad
    with torch.no_grad():
        assert not cuda_ops.add2(a, b).requires_grad
    with torch.inference_mode():
        assert cuda_ops.exp(a).is_inference()
    grads = torch.autograd.grad(cuda_ops.add2(a, b).sum(), b)
    assert torch.equal(grads[0], torch.ones_like(b))


def test_calls_without_gradients_do_not_enter_python() -> None:
    """The library reads requires_grad from torch's internals, which is safe only if they have the expected layout."""
    assert torch.ops.cuda_ops._requires_grad(torch.zeros(1, requires_grad=True))
    assert not torch.ops.cuda_ops._requires_grad(torch.zeros(1))


@devices
def test_results_are_the_same_without_requires_grad_check(device: str) -> None:
    a, b = torch.randn(9, device=device), torch.randn(9, device=device, requires_grad=True)
    try:
        torch.ops.cuda_ops._trust_requires_grad(False)
        plain, tracked = cuda_ops.add2(a, a), cuda_ops.add2(a, b)
    finally:
        torch.ops.cuda_ops._trust_requires_grad(True)
    assert torch.equal(plain, a + a)
    assert not plain.requires_grad
    assert tracked.requires_grad


@devices
def test_small_network_learns(device: str) -> None:
    """The network trains with matvec, exp, axpy and softmax, forward and backward, until the loss is almost zero."""
    torch.manual_seed(1)
    weights = torch.randn(4, 6, device=device, requires_grad=True)
    bias = torch.zeros(4, device=device, requires_grad=True)
    x = torch.randn(6, device=device)
    losses: list[float] = []
    wanted = int(torch.mv(weights, x).argmin())
    for _ in range(60):
        p = cuda_ops.softmax(cuda_ops.axpy(1.0, cuda_ops.matvec(weights, x), bias))
        loss = -p[wanted].log()
        losses.append(loss.item())
        for leaf, grad in zip((weights, bias), torch.autograd.grad(loss, (weights, bias)), strict=True):
            leaf.data -= 1.0 * grad
    assert losses[-1] < 0.05 * losses[0]


# Registrations with torch.


@devices
@operations
def test_opcheck_passes(
    device: str,
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    shapes: tuple[tuple[int, ...], ...],
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id.split("-")[0]
    for grad, entry in itertools.product((False, True), (name, f"_{name}_differentiable")):
        inputs: list[Any] = [torch.randn(shape, device=device, requires_grad=grad) for shape in shapes]
        if name == "axpy":
            inputs.insert(0, 2.5)
        torch.library.opcheck(getattr(torch.ops.cuda_ops, entry).default, tuple(inputs))


@devices
@types
@layouts
def test_fake_results_have_the_same_shape_and_layout(
    device: str, kind: torch.dtype, layout: Callable[[Any], Tensor]
) -> None:
    a, b = layout(maker(device, kind)), layout(maker(device, kind))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(item) for item in (a, b)]
        guessed = [
            cuda_ops.add2(*fakes),
            cuda_ops.exp(fakes[0]),
            cuda_ops.axpy(2.0, *fakes),
            cuda_ops.softmax(fakes[0]),
        ]
    real = [cuda_ops.add2(a, b), cuda_ops.exp(a), cuda_ops.axpy(2.0, a, b), cuda_ops.softmax(a)]
    for fake, made in zip(guessed, real, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)
        assert fake.device.type == made.device.type


@devices
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_function_has_a_single_graph(device: str, dynamic: bool) -> None:
    def function(m: Tensor, v: Tensor) -> Tensor:
        return cuda_ops.softmax(cuda_ops.axpy(0.5, cuda_ops.exp(v), cuda_ops.add2(cuda_ops.matvec(m, v), v)))

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for size in (8, 12):
        m = torch.randn(size, size, device=device, requires_grad=True)
        v = torch.randn(size, device=device, requires_grad=True)
        plain, made = function(m, v), compiled(m, v)
        torch.testing.assert_close(made, plain)
        weight = torch.randn_like(plain)
        for mine, theirs in zip(
            torch.autograd.grad((made * weight).sum(), (m, v)),
            torch.autograd.grad((plain * weight).sum(), (m, v)),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


# The form of add2 that only launches the kernel, and writes to an existing tensor.


@devices
@types
def test_launch_form_writes_exactly_n_elements(device: str, kind: torch.dtype) -> None:
    a, b = torch.randn(1000, device=device).to(kind), torch.randn(1000, device=device).to(kind)
    for n in (0, 1, 7, 16, 999, 1000):
        c = torch.full_like(a, -5)
        assert cuda_ops.torch_launch_add2(c, a, b, n) is None
        assert torch.equal(c[:n], (a + b)[:n])
        assert bool((c[n:] == -5).all())
    c = a.clone()
    cuda_ops.torch_launch_add2(c, c, b, 1000)
    assert torch.equal(c, a + b)
    cuda_ops.torch_launch_add2(c[::2], a[::2], b[500:], 500)
    assert torch.equal(c[::2], a[::2] + b[500:])


@devices
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, a, b, _: (c, a, b, 11), "n must be 0 to 10, the size of c, found 11"),
        (lambda c, a, b, _: (c, a, b, -1), "n must be 0 to 10, the size of c, found -1"),
        (lambda c, a, b, _: (c, a[:9], b, 10), "n must be 0 to 9, the size of a, found 10"),
        (lambda c, a, b, n: (c, a.half(), b, n), "all tensors must have the same type, found c of Float and a of Half"),
        (lambda c, a, b, n: (c[:1].expand(10), a, b, n), "several elements of c share one memory location"),
        (lambda c, a, b, n: (c, a, b.reshape(2, 5).t(), n), "b must be contiguous or one-dimensional"),
    ],
)
def test_launch_form_rejects_invalid_arguments(device: str, change: Callable[..., tuple[Any, ...]], said: str) -> None:
    c, a, b = (torch.zeros(10, device=device) for _ in range(3))
    with pytest.raises(RuntimeError, match=said.replace("(", r"\(")):
        cuda_ops.torch_launch_add2(*change(c, a, b, 10))


# Misuse.


def refused(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    assert said in str(caught.value)


@devices
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_mismatched_shapes_and_types_are_rejected(device: str, grad: bool) -> None:
    a = torch.randn(3, 4, device=device, requires_grad=grad)
    vector = torch.randn(4, device=device)
    refused("cuda_ops.add2: a and b must have the same shape, found [3, 4] and [4]", lambda: cuda_ops.add2(a, vector))
    refused("axpy: x and y must have the same shape, found [4] and [3, 4]", lambda: cuda_ops.axpy(1, vector, a))
    refused("found a of Float and b of BFloat16", lambda: cuda_ops.add2(a, a.bfloat16()))
    refused("x must be float32, float16 or bfloat16, found Double", lambda: cuda_ops.exp(a.double()))
    refused("a must be float32, float16 or bfloat16, found Long", lambda: cuda_ops.add2(vector.long(), vector.long()))
    refused(
        "expected a matrix [rows, columns] and a vector [columns], found [3, 4] and [3, 4]",
        lambda: cuda_ops.matvec(a, a),
    )
    refused("found [3, 4] and [2]", lambda: cuda_ops.matvec(a, vector[:2]))
    refused(
        "x must be float32, float16 or bfloat16, found ComplexFloat", lambda: cuda_ops.softmax(a.to(torch.complex64))
    )


def test_non_tensors_are_rejected() -> None:
    numbers: Any = [1.0, 2.0]
    with pytest.raises((TypeError, RuntimeError)):
        cuda_ops.exp(numbers)
    word: Any = "two"
    with pytest.raises((TypeError, RuntimeError)):
        cuda_ops.axpy(word, torch.ones(1), torch.ones(1))


@needs_gpu
def test_cpu_and_gpu_tensors_in_one_call_are_rejected() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    refused(
        "all tensors must be on the same device, found a on the CPU and b on cuda:0", lambda: cuda_ops.add2(here, there)
    )
    refused("found x on cuda:0 and y on the CPU", lambda: cuda_ops.axpy(1.0, there, here))
    refused("found matrix on cuda:0 and vector on the CPU", lambda: cuda_ops.matvec(there.reshape(1, 3), here))
    refused("found c on the CPU and a on cuda:0", lambda: cuda_ops.torch_launch_add2(here, there, there, 3))


@needs_two_gpus
def test_tensors_on_two_gpus_are_rejected() -> None:
    first, second = torch.randn(3000, device="cuda:0"), torch.randn(3000, device="cuda:1")
    refused("found a on cuda:0 and b on cuda:1", lambda: cuda_ops.add2(first, second))
    assert torch.cuda.current_device() == 0
    assert torch.equal(cuda_ops.add2(second, second), second + second), (
        "add2 must also work on a device that is not the current one"
    )
    softmax_close(cuda_ops.softmax(second), second)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.equal(cuda_ops.add2(first, first), first + first)


# Behaviour that only a GPU has.


@needs_gpu
def test_operators_use_the_current_stream() -> None:
    """The current stream writes the input after a delay, so only kernels on that stream read the new values."""
    stream = torch.cuda.Stream()
    a = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        a.fill_(1.0)
        results = [cuda_ops.add2(a, a), cuda_ops.axpy(2.0, a, a), cuda_ops.exp(a), cuda_ops.softmax(a.reshape(64, -1))]
        results.append(cuda_ops.matvec(a.reshape(64, -1), a[: 1 << 14]))
    early = cuda_ops.add2(a, a)
    assert bool((early == 0).all()), "the default stream must not wait for the other stream"
    stream.synchronize()
    for found, exact in zip(results, (2.0, 3.0, torch.e, 2.0**-14, 2.0**14), strict=True):
        torch.testing.assert_close(found, torch.full_like(found, exact))


@needs_gpu
def test_cuda_graph_records_and_replays_operators() -> None:
    m, v = torch.randn(64, 50000, device="cuda"), torch.randn(50000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda_ops.softmax(cuda_ops.matvec(m, v))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.softmax(cuda_ops.add2(cuda_ops.matvec(m, v), cuda_ops.matvec(m, v)))
    for _ in range(2):
        v.normal_()
        m.normal_()
        m.mul_(0.01)
        graph.replay()
        torch.testing.assert_close(out, (2 * (m @ v)).softmax(-1), rtol=1e-3, atol=1e-5)


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 4099
    a = torch.empty(n, device="cuda", dtype=torch.float16).uniform_(-1, 1)
    b = torch.empty(n, device="cuda", dtype=torch.float16).uniform_(-1, 1)
    assert torch.equal(cuda_ops.add2(a, b), a + b)
    # The operands are shifted by one element (which rules out the kernels' vector accesses), strided, or transposed.
    # The comparisons with softmax and matvec cover only the last rows of a large matrix.
    assert torch.equal(cuda_ops.add2(a[1:], b[:-1]), a[1:] + b[:-1])
    assert torch.equal(cuda_ops.add2(a[:-1:2], b[1::2]), a[:-1:2] + b[1::2])
    wide, tall = a[:-1].reshape(2, -1), b[:-1].reshape(-1, 2).t()
    assert torch.equal(cuda_ops.add2(wide, tall), wide + tall)
    del wide, tall
    rows = a[: 2**31 + 4096].reshape(-1, 4096)
    y = cuda_ops.softmax(rows)
    torch.testing.assert_close(y[-3:], rows[-3:].softmax(-1))
    vector = torch.randn(4096, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(
        cuda_ops.matvec(rows, vector)[-3:].float(), rows[-3:].float() @ vector.float(), rtol=1e-2, atol=0.1
    )
    del y
    c = torch.zeros_like(a)
    cuda_ops.torch_launch_add2(c, a, b, n)
    assert torch.equal(c[-5000:], (a + b)[-5000:])


@needs_gpu
def test_two_kernel_matvec_is_ordered_in_every_stream() -> None:
    """The second kernel starts before the first has ended, but must use only the first kernel's complete results."""
    m, v = torch.randn(64, 400000, device="cuda"), torch.randn(400000, device="cuda")
    exact = m @ v
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 4]):
            found.append(cuda_ops.matvec(m, v))
    torch.cuda.synchronize()
    torch.testing.assert_close(found[0], exact, rtol=1e-3, atol=1e-2)
    assert all(torch.equal(item, found[0]) for item in found)


@needs_gpu
@pytest.mark.parametrize(
    ("op", "inputs"), [("add2", ["f32[1048576]"] * 2), ("matvec", ["f16[64,40000]", "f16[40000]"])]
)
def test_timeline_contains_every_kernel_run(op: str, inputs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timing.write_timeline(op, inputs, path, runs=5)
    ours = {name: lengths for name, lengths in timing.kernels_of(path).items() if "cuda_ops" in name}
    assert len(ours) == (1 if op == "add2" else 2), (
        "add2 launches one kernel; matvec launches two if it splits the matrix"
    )
    assert all(len(lengths) == 20 and 0 < min(lengths) <= max(lengths) < 1e5 for lengths in ours.values())
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    regions = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    for before, after in timing.REGIMES:
        region = regions[f"{before} / {after}"]
        launches = [event for event in events if event.get("cat") == "cuda_runtime" and "Launch" in event["name"]]
        inside = [event for event in launches if 0 <= event["ts"] - region["ts"] <= region["dur"]]
        assert len(inside) == 5 * len(ours), "all launches of a regime must be in its region of the timeline"


@needs_gpu
@operations
def test_the_gpu_agrees_with_the_cpu(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    there = ours(*[item.cuda() for item in inputs])
    close(there.cpu(), ours(*inputs), ulps=8, scale=1.0)


@needs_gpu
def test_failed_allocation_leaves_the_library_usable() -> None:
    huge = torch.empty(1, device="cuda").expand(1 << 42)
    with pytest.raises(RuntimeError):
        cuda_ops.exp(huge)
    x = torch.randn(5, device="cuda")
    close(cuda_ops.exp(x), x.double().exp())
