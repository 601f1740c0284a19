"""Tests of kernels that TVM compiled on the PC, called with torch tensors on the board through ``pitorch.tvm``.

The kernel multiplies two matrices of 32 rows. The library ``gemm.so`` next to this file contains the kernel::

    ./inv profile-remote --kernel gemm --target armv7 --size 32 --keep tests/device/gemm.so

``exported.so`` is the same kernel, written by TVM's ``export_library``, for images with apache-tvm-ffi.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest
import torch

if TYPE_CHECKING:
    from pitorch import tvm
else:
    tvm = pytest.importorskip("pitorch.tvm", reason="the image does not have this project's libqpu")

KERNEL = Path(__file__).with_name("gemm.so")
EXPORTED = Path(__file__).with_name("exported.so")
SIZE = 32


@pytest.fixture(scope="module")
def gemm() -> tvm.Kernel:
    if not KERNEL.is_file():
        pytest.skip(
            "no kernel: ./inv profile-remote --kernel gemm --target armv7 --size 32 --keep tests/device/gemm.so"
        )
    return tvm.Library(KERNEL)["gemm"]


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    return a, b, torch.full((SIZE, SIZE), float("nan"))


def view(values: torch.Tensor, elements: int) -> torch.Tensor:
    """Copy the values to memory that begins ``elements`` elements after the start of a tensor's memory."""
    memory = torch.zeros(values.numel() + 64)
    memory[elements : elements + values.numel()] = values.flatten()
    return memory[elements : elements + values.numel()].view(values.shape)


def test_tvm_kernel_computes_on_tensors(gemm: tvm.Kernel) -> None:
    a, b, c = matrices()
    gemm(a, b, c)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("elements", [1, 2, 3, 4, 15, 16, 17])
def test_misaligned_tensors_are_accepted(gemm: tvm.Kernel, elements: int) -> None:
    a, b, c = matrices()
    result = view(c, elements)
    gemm(view(a, elements), b, result)
    torch.testing.assert_close(result, a @ b, rtol=1e-4, atol=1e-4)


def test_tensors_and_arrays_can_be_mixed(gemm: tvm.Kernel) -> None:
    a, b, c = matrices()
    gemm(a.numpy(), b, c.numpy())
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(SIZE, SIZE - 1), "argument #1"),
        (torch.zeros(0, SIZE), "argument #1"),
        (torch.zeros(SIZE * SIZE), "argument #1"),
        (torch.zeros(SIZE, SIZE).double(), "argument #1"),
        (torch.zeros(SIZE, SIZE).bfloat16(), "argument #1"),
        (torch.zeros(SIZE, SIZE).t(), "argument #1"),
        (torch.zeros(SIZE, 2 * SIZE)[:, ::2], "argument #1"),
        (torch.zeros(SIZE, SIZE, requires_grad=True), "detach"),
        (torch.zeros(SIZE, SIZE, device="meta"), "argument 1 cannot be passed"),
        (torch.zeros(SIZE, SIZE).to_sparse(), "argument 1 cannot be passed"),
        (numpy.zeros((SIZE, SIZE), "int32"), "argument #1"),
        (None, "argument 1: expected an array or tensor"),
    ],
)
def test_invalid_arguments_are_rejected_without_computing(gemm: tvm.Kernel, wrong: object, message: str) -> None:
    a, _, c = matrices()
    with pytest.raises(tvm.KernelError, match=message):
        gemm(a, wrong, c)
    assert c.isnan().all()


def test_kernel_runs_in_several_threads(gemm: tvm.Kernel) -> None:
    a, b, _ = matrices()
    results = [torch.zeros(SIZE, SIZE) for _ in range(4)]
    threads = [threading.Thread(target=gemm, args=(a * number, b, c)) for number, c in enumerate(results)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, c in enumerate(results):
        torch.testing.assert_close(c, (a * number) @ b, rtol=1e-4, atol=1e-3)


def test_library_exported_by_tvm_accepts_torch_tensors() -> None:
    """The tensors pass through DLPack, without a copy. pitorch.tvm also accepts misaligned tensors."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="the image has no apache-tvm-ffi (remote.ffi_in_image)")
    if not EXPORTED.is_file():
        pytest.skip(f"no kernel: {EXPORTED.name} next to this file, written by TVM's export_library")
    a, b, c = matrices()
    tvm_ffi.load_module(str(EXPORTED))["gemm"](a, b, c)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
    assert torch.from_dlpack(tvm_ffi.from_dlpack(a)).data_ptr() == a.data_ptr()
    again = torch.full_like(c, float("nan"))
    tvm.Library(EXPORTED)["gemm"](view(a, 1), b, again)
    torch.testing.assert_close(again, a @ b, rtol=1e-4, atol=1e-4)
