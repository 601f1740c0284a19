"""Tests of limits on 32-bit systems: sizes beyond the machine's memory and indices beyond a tensor are rejected.

Sizes must not wrap around: 2**32 + 16 is 16 in a 32-bit size_t, so writes would go far beyond a tensor of 16 elements.
"""

from __future__ import annotations

import io
import struct
import sys
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.skipif(sys.maxsize > 2**32, reason="this machine has 64-bit addresses")

WRAPS = 2**32 + 16
BYTES = torch.uint8


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of any size that views a single element."""
    return torch.ones(1, dtype=dtype).expand(*sizes)


def from_file(length: int, map_it: Callable[[str], object]) -> object:
    """Map a sparse file of ``length`` bytes."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(length)
        return map_it(file.name)


SIZES: dict[str, Callable[[], object]] = {
    "2**31 bytes": lambda: torch.empty(2**31, dtype=BYTES),
    "2**32 + 16 bytes": lambda: torch.empty(WRAPS, dtype=BYTES),
    "2**62 numbers": lambda: torch.empty(2**62, dtype=torch.float64),
    "a product of sizes": lambda: torch.zeros(2**30, 4),
    "strides": lambda: torch.empty_strided((2,), (WRAPS,), dtype=BYTES),
    "resize": lambda: torch.empty(0).resize_(2**30, 4),
    "a view made whole": lambda: ones(2**30, 4).contiguous(),
    "clone": lambda: ones(WRAPS, dtype=BYTES).clone(),
    "a wider type": lambda: ones(2**30, dtype=BYTES).to(torch.float64),
    "cat": lambda: torch.cat([ones(2**30, dtype=BYTES)] * 5),
    "cat along another dimension": lambda: torch.cat([ones(1, 2**30, dtype=BYTES)] * 5, 1),
    "stack": lambda: torch.stack([ones(2**30, dtype=BYTES)] * 5),
    "repeat": lambda: torch.ones(2**10).repeat(2**20, 4),
    "repeat_interleave": lambda: torch.ones(4).repeat_interleave(torch.tensor([2**31] * 4)),
    "arange": lambda: torch.arange(2**31, dtype=BYTES),
    "randperm": lambda: torch.randperm(2**31),
    "outer product": lambda: torch.outer(torch.ones(2**16), torch.ones(2**16)),
    "matrix product": lambda: ones(2**16, 1) @ ones(1, 2**16),
    "distances": lambda: torch.cdist(ones(2**16, 1), ones(2**16, 1)),
    "pad": lambda: functional.pad(torch.ones(4), (0, 2**32)),
    "interpolate": lambda: functional.interpolate(torch.ones(1, 1, 2, 2), size=(2**16, 2**16)),
    "convolution": lambda: functional.conv2d(ones(1, 1, 2**15, 2**15), torch.ones(8, 1, 3, 3)),
    "one_hot": lambda: functional.one_hot(torch.tensor([2**31]), 2**31 + 1),
    "fft": lambda: torch.fft.fft(torch.ones(4), n=2**32 + 1),
    "bincount": lambda: torch.bincount(torch.arange(4), minlength=2**32 + 1),
    "sparse to dense": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2**32 + 1,)).to_dense(),
    "index with many": lambda: torch.ones(4)[torch.zeros(1, dtype=torch.int64).expand(2**30)],
    "storage": lambda: torch.UntypedStorage(WRAPS),
    "an empty storage resized": lambda: torch.UntypedStorage().resize_(WRAPS),
    "storage resized": lambda: torch.ones(4).untyped_storage().resize_(WRAPS),
    "storage resized to less than nothing": lambda: torch.ones(4).untyped_storage().resize_(-1),
    "window of a storage": lambda: torch.empty(0).set_(torch.ones(4).untyped_storage(), 2**30, (4,), (1,)),
    "frombuffer": lambda: torch.frombuffer(bytearray(16), dtype=BYTES, count=2**32 + 1),
    "frombuffer of floats": lambda: torch.frombuffer(bytearray(64), dtype=torch.float32, count=2**30 + 1),
    "bytes of a storage": lambda: torch.UntypedStorage.from_buffer(
        bytearray(64), count=2**30 + 4, dtype=torch.float32, byte_order="native"
    ),
    "file": lambda: from_file(16, lambda name: torch.from_file(name, size=2**30 + 4)),
    "less than nothing of a file": lambda: from_file(16, lambda name: torch.from_file(name, size=-(2**30) + 4)),
    "file shared": lambda: from_file(16, lambda name: torch.from_file(name, shared=True, size=2**30 + 4)),
    "shared memory by name": lambda: torch.UntypedStorage._new_using_filename_cpu(WRAPS),
    "shared memory by descriptor": lambda: torch.UntypedStorage._new_using_fd_cpu(WRAPS),
}
INDICES: dict[str, Callable[[torch.Tensor, int], object]] = {
    "number": lambda x, at: x[at],
    "tensor": lambda x, at: x[torch.tensor([at])],
    "select": lambda x, at: x.select(0, at),
    "narrow": lambda x, at: x.narrow(0, at, 1),
    "index_select": lambda x, at: x.index_select(0, torch.tensor([at])),
    "gather": lambda x, at: x.gather(0, torch.tensor([at])),
    "scatter": lambda x, at: x.scatter(0, torch.tensor([at]), 1.0),
    "take": lambda x, at: x.take(torch.tensor([at])),
    "embedding": lambda x, at: functional.embedding(torch.tensor([at]), x.view(4, 1)),
    "target of a loss": lambda x, at: functional.nll_loss(x.view(1, 4), torch.tensor([at])),
    "window": lambda x, at: x.as_strided((1,), (1,), at),
    "stride": lambda x, at: x.as_strided((2,), (at,)),
}


@pytest.mark.parametrize("what", SIZES)
def test_sizes_beyond_memory_are_rejected(what: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        SIZES[what]()
    assert str(caught.value)


@pytest.mark.parametrize("what", INDICES)
@pytest.mark.parametrize("at", [2**32, 2**32 + 1, -(2**32) - 1])
def test_indices_are_not_truncated_to_32_bits(what: str, at: int) -> None:
    x = torch.arange(4.0)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        INDICES[what](x, at)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_slices_are_clipped_at_the_end() -> None:
    x = torch.arange(4)
    assert x[: 2**32 + 2].tolist() == x[-(2**32) - 2 :].tolist() == [0, 1, 2, 3]
    assert x[2**32 + 1 :].tolist() == []


def test_views_may_have_more_than_2_to_the_32_elements() -> None:
    assert ones(2**16, 2**14, dtype=BYTES).numel() == 2**30
    with pytest.raises(RuntimeError, match="overflow"):
        ones(2**16, 2**16, dtype=BYTES).numel()


def test_old_file_format_has_64_bit_storage_lengths() -> None:
    """A file in the old format contains a magic number, protocol, sys_info, pickle, keys and storages with lengths."""
    stream = io.BytesIO()
    torch.save(torch.arange(4, dtype=torch.float32), stream, _use_new_zipfile_serialization=False)
    content = stream.getvalue()
    assert content.endswith(struct.pack("<q4f", 4, *range(4)))
    assert torch.load(io.BytesIO(content)).tolist() == [0.0, 1.0, 2.0, 3.0]
    forged = content[:-24] + struct.pack("<q", 2**30 + 4) + content[-16:]
    with pytest.raises(RuntimeError, match="this machine cannot address"):
        torch.load(io.BytesIO(forged))


def test_guards_take_addresses_of_the_upper_half() -> None:
    """torch.export and torch.compile guard types and objects by their ids, which exceed 2**31 on most boards."""
    from torch._C._dynamo import guards

    made = guards.RootGuardManager()
    made.add_type_match_guard(2**32 - 8, ["type"])
    made.add_id_match_guard(2**32 - 8, ["object"])
    assert not made.check(1.0)
