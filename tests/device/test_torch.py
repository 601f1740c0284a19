"""Tests of torch: whether it loads, and whether a small network's forward and backward passes are correct."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import re
import sysconfig
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from our_torch import has_our_torch
from torch import nn


def test_torch_is_imported_with_a_version() -> None:
    assert re.match(r"\d+\.\d+\.\d+", torch.__version__)


def test_numpy_and_torch_share_memory() -> None:
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    tensor = torch.from_numpy(array)
    tensor[1, 2] = 50
    assert array[1, 2] == 50
    assert numpy.array_equal(tensor.t().numpy(), array.T)


def small_network() -> nn.Sequential:
    """Make a network with 2 inputs, 2 hidden units with ReLU (the second is inactive for (1, 2)) and 1 output."""
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[0.5, 1.0], [-1.0, 0.25]]))
        network[0].bias.copy_(torch.tensor([0.5, -0.5]))
        network[2].weight.copy_(torch.tensor([[2.0, -3.0]]))
        network[2].bias.copy_(torch.tensor([1.0]))
    return network


def test_numpy_indices_work_after_conversion_to_64_bits() -> None:
    """On 32-bit systems, numpy's default integer is int32, which torch rejects as an index or class (docs/torch.md)."""
    scores = numpy.array([[0.0, 2.0], [3.0, 1.0]], dtype=numpy.float32)
    narrow = torch.from_numpy(numpy.argmax(scores, 1).astype(numpy.int32))
    with pytest.raises((RuntimeError, IndexError), match=r"[Ll]ong|int64|Int"):
        torch.nn.functional.cross_entropy(torch.from_numpy(scores), narrow)
    classes = torch.from_numpy(numpy.argmax(scores, 1)).long()
    assert torch.nn.functional.cross_entropy(torch.from_numpy(scores), classes).item() < 0.2
    assert torch.from_numpy(scores).gather(1, classes.view(2, 1)).tolist() == [[2], [3]]


def test_forward_and_backward_match_hand_computation() -> None:
    network = small_network()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    # hidden: 0.5 + 2 + 0.5 = 3; -1 + 0.5 - 0.5 = -1, so inactive. y = 2 * 3 + 1 = 7.
    y = network(x)
    assert y.tolist() == [7.0]
    # loss = (7 - 5)^2 = 4, dloss/dy = 4.
    loss = nn.functional.mse_loss(y, torch.tensor([5.0]))
    assert loss.item() == 4.0
    loss.backward()
    assert network[2].weight.grad.tolist() == [[12.0, 0.0]]
    assert network[2].bias.grad.tolist() == [4.0]
    assert network[0].weight.grad.tolist() == [[8.0, 16.0], [0.0, 0.0]]
    assert network[0].bias.grad.tolist() == [8.0, 0.0]
    assert x.grad.tolist() == [4.0, 8.0]


def test_gradient_descent_step_matches_hand_computation() -> None:
    network = small_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.25)
    nn.functional.mse_loss(network(torch.tensor([1.0, 2.0])), torch.tensor([5.0])).backward()
    optimizer.step()
    assert network[2].weight.tolist() == [[-1.0, -3.0]]
    assert network[2].bias.tolist() == [0.0]
    assert network[0].weight.tolist() == [[-1.5, -3.0], [-1.0, 0.25]]
    assert network[0].bias.tolist() == [-1.5, -0.5]


def test_convolutional_network_agrees_with_finite_differences() -> None:
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LogSoftmax(dim=1)
    ).double()
    image = torch.randn(2, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(network, (image,))


def layers() -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """Return functions of float64 or complex128, each with an input."""
    torch.manual_seed(2)
    recurrent = nn.LSTM(3, 2, num_layers=2, bidirectional=True).double()
    attention = nn.MultiheadAttention(4, 2).double()
    transposed = nn.ConvTranspose2d(2, 1, 3, stride=2).double()
    sequence = torch.randn(3, 1, 4, dtype=torch.float64)
    return {
        "LSTM": (lambda x: recurrent(x)[0], torch.randn(3, 1, 3, dtype=torch.float64)),
        "attention": (lambda x: attention(x, x, x)[0], sequence),
        "transposed convolution": (transposed, torch.randn(1, 2, 2, 2, dtype=torch.float64)),
        "Fourier transform": (lambda x: torch.fft.fft(x).abs(), torch.randn(5, dtype=torch.complex128)),
        "solution of equations": (
            lambda x: torch.linalg.solve(x + 4 * torch.eye(3), x[0]),
            torch.randn(3, 3, dtype=torch.float64),
        ),
    }


@pytest.mark.parametrize(
    "what", ["LSTM", "attention", "transposed convolution", "Fourier transform", "solution of equations"]
)
def test_gradients_agree_with_finite_differences(what: str) -> None:
    function, point = layers()[what]
    assert torch.autograd.gradcheck(function, (point.requires_grad_(),))


def test_training_learns_xor() -> None:
    torch.manual_seed(3)
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    wanted = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), wanted)
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-2
    assert torch.equal(network(x).round(), wanted)


def test_network_is_saved_and_loaded() -> None:
    memory = io.BytesIO()
    torch.save(small_network().state_dict(), memory)
    memory.seek(0)
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    other.load_state_dict(torch.load(memory))
    assert other(torch.tensor([1.0, 2.0])).tolist() == [7.0]


def _counted(x: torch.Tensor, times: int) -> torch.Tensor:
    while times > 0:
        for _ in range(2):
            x = x + 1.0
        times -= 1
    return x


def test_scripted_loop_runs_without_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    """Without patch 0006, each jump back to the start of a loop causes an overflow warning on 32-bit systems."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated in later releases
        assert torch.jit.script(_counted)(torch.zeros(2), 3).tolist() == [6.0, 6.0]
    assert "overflow" not in capfd.readouterr().err


def _chosen(x: torch.Tensor, a: int, b: int, c: int) -> torch.Tensor:
    if (a > 0 and b > 0 and c > 0) or (a < b and b < c and c < 40) or (a == 7 and b == 8 and c == 9 and a + b + c > 5):
        return x + 1.0
    return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript is deprecated in later releases
def test_script_with_long_condition_is_saved_and_loaded() -> None:
    """Without patch 0010, an offset of -1 becomes 2^32 - 1 on 32-bit systems, so saving fails: index out of range."""
    memory = io.BytesIO()
    torch.jit.save(torch.jit.script(_chosen), memory)
    memory.seek(0)
    loaded = torch.jit.load(memory)
    assert loaded(torch.zeros(2), 1, 2, 3).tolist() == [1.0, 1.0]
    assert loaded(torch.zeros(2), -1, -2, 3).tolist() == [0.0, 0.0]


def lies_at(array: numpy.ndarray, offset: int) -> numpy.ndarray:
    """Copy an array so that its data is ``offset`` bytes after a multiple of 64."""
    room = numpy.zeros(array.nbytes + 128, dtype=numpy.uint8)
    begin = -room.ctypes.data % 64 + offset
    made = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


ARM = sysconfig.get_config_var("MULTIARCH") == "arm-linux-gnueabihf"
"""The architecture of Python and torch; the kernel may be 64-bit."""


SAFE = pytest.mark.skipif(ARM and not has_our_torch(), reason="without the recipe's patches, SIGBUS kills the process")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_dot_product_matches_numpy(dtype: str, size: int, strided: bool) -> None:
    """BLAS returns complex results in registers or in memory, depending on the ABI.

    If torch assumes the wrong convention, the results are zero.
    """
    drawn = numpy.random.Generator(numpy.random.PCG64(7)).standard_normal((4, 2 * size))
    a, b = (drawn[0] + 1j * drawn[1]).astype(dtype), (drawn[2] + 1j * drawn[3]).astype(dtype)
    a, b = (a[::2], b[1::2]) if strided else (a[:size], b[:size])
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    bound = 1e-5 if dtype == "complex64" else 1e-13
    for found, wanted in (
        (torch.dot(x, y), numpy.dot(a, b)),
        (torch.vdot(x, y), numpy.vdot(a, b)),
        (x @ y, a @ b),
        (torch.inner(x, y), numpy.inner(a, b)),
        (torch.dot(x.conj(), y), numpy.dot(a.conj(), b)),
        (torch.dot(x, y.conj()), numpy.dot(a, b.conj())),
    ):
        assert abs(found.item() - wanted) <= bound * numpy.linalg.norm(a) * numpy.linalg.norm(b)
    assert torch.dot(x[:0], y[:0]).item() == 0


class FullDisk:
    """A file on a disk that fills up after ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, block: bytes) -> int:
        """Accept the block; raise OSError if the disk is full."""
        self.room -= len(block)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(block)

    def flush(self) -> None:
        """Do nothing, because no data is buffered."""


class Cut(io.BytesIO):
    """A file that can be read only up to ``readable_bytes``."""

    readable_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read like a file; raise OSError beyond the readable part."""
        found = super().read(size)
        self._require(self.tell())
        return found

    def readinto(self, buffer: Any) -> int:
        """Read like a file; raise OSError beyond the readable part."""
        count = super().readinto(buffer)
        self._require(self.tell())
        return count

    def _require(self, end: int) -> None:
        if end > self.readable_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


LETS_THROUGH = pytest.mark.skipif(
    ARM and not has_our_torch(), reason="without this project's recipe, SIGABRT kills the process"
)


@LETS_THROUGH
@pytest.mark.parametrize("room", [0, 100, 5000])
def test_file_errors_propagate_from_save(room: int) -> None:
    """The errors pass from Python through C++ and C.

    On ARM, exceptions pass only through code that was compiled to support this.
    """
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save(torch.ones(10_000), FullDisk(room))
    assert any("No space left on device" in str(fault) for fault in (caught.value, caught.value.__context__))


@LETS_THROUGH
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.98])
def test_file_errors_propagate_from_load(kept: float) -> None:
    """Upstream's torch 2.6 raises SystemError on any machine: it calls ``read`` while ``readinto``'s error is set."""
    whole = io.BytesIO()
    torch.save(torch.ones(10_000), whole)
    file = Cut(whole.getvalue())
    file.readable_bytes = int(kept * len(whole.getvalue()))
    with pytest.raises((OSError, RuntimeError, SystemError)):
        torch.load(file)
    whole.seek(0)
    assert torch.equal(torch.load(whole), torch.ones(10_000))


@SAFE
@pytest.mark.parametrize("times", [1, 3, 5])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_numpy_arrays_are_shared_at_their_own_alignment(dtype: str, times: int) -> None:
    """Arrays begin where malloc may place them: at multiples of 8 (32-bit) or 16 bytes (64-bit); see patch 0008."""
    array = lies_at(numpy.arange(1, 8, dtype=dtype) * (1 + 2j), times * (8 if ARM else 16))
    tensor = torch.from_numpy(array)
    assert tensor[3].item() == 4 + 8j
    assert (tensor * 2).sum().item() == 2 * array.sum()
    assert tensor[torch.tensor([1, 5])].tolist() == [2 + 4j, 6 + 12j]
    assert numpy.allclose((tensor[:6].reshape(2, 3) @ tensor[:3]).numpy(), array[:6].reshape(2, 3) @ array[:3])
    tensor[0] = 5 - 1j
    assert array[0] == 5 - 1j
    tensor.fill_(1j)
    assert (array == 1j).all()


def _shared_by(how: str, array: numpy.ndarray) -> torch.Tensor:
    if how == "frombuffer":
        whole = array
        while whole.base is not None:
            whole = whole.base
        at = array.ctypes.data - whole.ctypes.data
        return torch.frombuffer(whole, dtype=torch.from_numpy(array.copy()).dtype, count=array.size, offset=at)
    return {
        "from_numpy": torch.from_numpy,
        "as_tensor": torch.as_tensor,
        "asarray": lambda it: torch.asarray(it, copy=False),
        "from_dlpack": torch.from_dlpack,
    }[how](array)


# With upstream's torch, a misaligned complex128 array also terminates the process on x86-64.
PLACED = ["float32", "float64", "int16", "int64", "complex64", *(["complex128"] if ARM else [])]


@SAFE
@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("how", ["from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack"])
def test_misaligned_arrays_are_rejected(how: str, dtype: str) -> None:
    """On 32-bit ARM, sharing a misaligned array would cause SIGBUS (patch 0009). Other machines can share the array."""
    array = lies_at(numpy.arange(1, 6, dtype=dtype), 1)
    if ARM:
        with pytest.raises((ValueError, RuntimeError, BufferError), match="align"):
            _shared_by(how, array)
    else:
        assert _shared_by(how, array).tolist() == array.tolist()
    assert torch.tensor(array).tolist() == array.tolist(), "torch.tensor must copy a misaligned array"
    assert torch.asarray(array, copy=True).tolist() == array.tolist()


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_torch_jit_fork_is_traced() -> None:
    """Without patch 0012, another source file of the unity build defines a function with the same name."""
    double = torch.jit.trace(lambda x: x * 2, torch.ones(3))

    def forked(x: torch.Tensor) -> torch.Tensor:
        return torch.jit._wait(torch.jit._fork(double, x)) + 1

    traced = torch.jit.trace(forked, torch.ones(3))
    assert "prim::fork" in str(traced.graph)
    assert traced(torch.arange(3.0)).tolist() == [1.0, 3.0, 5.0]


class _DLTensor(ctypes.Structure):
    """A flattened DLManagedTensor from dlpack.h: the fields of the tensor, followed by the fields for the producer."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *(("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        *(("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 does not reject the offset")
@pytest.mark.parametrize("strides", [None, *([(2,)] if has_our_torch() else [])])
def test_dlpack_byte_offset_is_respected(strides: tuple[int, ...] | None) -> None:
    """Upstream's torch 2.6 ignores the offset (patch 0011); torch 2.13 rejects offsets in tensors without strides."""
    numbers = (ctypes.c_float * 6)(*range(6))
    shape, steps = (ctypes.c_int64 * 1)(2), (ctypes.c_int64 * 1)(*strides) if strides else None
    given = _DLTensor(ctypes.addressof(numbers), 1, 0, 1, 2, 32, 1, shape, steps, 8)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    packed = capsule(ctypes.addressof(given), b"dltensor", None)
    if has_our_torch():
        assert torch.utils.dlpack.from_dlpack(packed).tolist() == [2.0, 4.0 if strides else 3.0]
    else:
        with pytest.raises(ValueError, match="byte_offset"):
            torch.utils.dlpack.from_dlpack(packed)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Make a nested tensor from sequences of different lengths; torch warns that nested tensors are a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor(rows)


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
def test_layer_norm_of_nested_tensor_equals_that_of_rows(shape: tuple[int, ...]) -> None:
    """Upstream's torch 2.6 computes the index -1 in 32 bits: "IndexError ... got 4294967295" (patch 0013)."""
    torch.manual_seed(0)
    layer = nn.LayerNorm(shape)
    nn.init.normal_(layer.weight)
    rows = [torch.randn(7, *shape), torch.randn(2, *shape)]
    with torch.no_grad():
        normalised = layer(nested(rows)).unbind()
        for row, result in zip(rows, normalised, strict=True):
            torch.testing.assert_close(result, layer(row))


def test_layer_norm_refuses_an_irregular_dimension() -> None:
    with pytest.raises(RuntimeError, match="irregular"), torch.no_grad():
        nn.LayerNorm((7, 16))(nested([torch.ones(7, 16), torch.ones(2, 16)]))


def test_transformer_encoder_ignores_padded_positions() -> None:
    """In eval mode without gradients, the encoder packs the batch into a nested tensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    batch = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = encoder(batch, src_key_padding_mask=padding)
        torch.testing.assert_close(result[:1], encoder(batch[:1]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result[1:, :3], encoder(batch[1:, :3]), atol=1e-5, rtol=1e-5)


def test_build_options_match_the_recipe() -> None:
    message = torch.__config__.show()
    asked = ["USE_OPENMP=ON"]  # required of every torch wheel, because the extension and the tests rely on OpenMP
    if has_our_torch():
        asked += ["BLAS_INFO=open,", "LAPACK_INFO=open,", "USE_CUDA=OFF", "USE_MKLDNN=OFF", "USE_NNPACK=OFF"]
        assert not torch.distributed.is_available()
        assert not torch.cuda.is_available()
    assert [words for words in asked if words not in message] == []
    assert torch.backends.openmp.is_available()
    assert torch._C.has_lapack
    assert torch.compiled_with_cxx11_abi(), (
        "with the old ABI, extensions built with the distribution's compiler would be incompatible"
    )
