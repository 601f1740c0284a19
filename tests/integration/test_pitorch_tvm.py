"""Tests of pitorch.tvm: kernels from a library, called on arrays in a process without TVM."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from remote_kernels import PARALLEL, TEMPORARY, export, write

from device.remote import environment, profiling
from device.remote.loader_session import Timing
from toolchain.config import ROOT, Config
from toolchain.errors import UserError
from toolchain.process import run

ONCE = Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0)


@pytest.fixture
def tvm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "libqpu" / "python"))
    return importlib.import_module("pitorch.tvm")


@pytest.fixture(scope="module")
def gemm(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile, for this PC, a kernel that multiplies two matrices of 32 rows."""
    path = tmp_path_factory.mktemp("kept") / "gemm.so"
    profiling.profile(product_config, kernel="gemm", target="local", device="emulator", size=32, keep=path, timing=ONCE)
    return path


def aligned(shape: tuple[int, ...], offset: int = 0) -> numpy.typing.NDArray[numpy.float32]:
    """Return an array of ones that begins ``offset`` bytes after a multiple of 64."""
    size = 4 * int(numpy.prod(shape))
    memory = numpy.zeros(size + 128, numpy.uint8)
    begin = -memory.ctypes.data % 64 + offset
    made = memory[begin : begin + size].view(numpy.float32).reshape(shape)
    made[...] = 1
    assert made.size == 0 or made.ctypes.data % 64 == offset
    return made


@pytest.mark.parametrize("offsets", [(0, 0, 0), (4, 0, 0), (0, 8, 60), (16, 16, 16)])
def test_arrays_may_have_any_alignment(tvm: ModuleType, gemm: Path, offsets: tuple[int, int, int]) -> None:
    a, b, c = (aligned((32, 32), offset) for offset in offsets)
    random = numpy.random.default_rng(1)
    a[...], b[...] = random.standard_normal((2, 32, 32))
    kept = a.copy(), b.copy()
    tvm.Library(gemm)["gemm"](a, b, c)
    numpy.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)
    assert (a == kept[0]).all()
    assert (b == kept[1]).all()


@pytest.mark.parametrize("shape", [(32, 31), (16, 64), (1024,), (0, 32), (32, 32, 1)])
def test_arrays_of_another_shape_are_refused(tvm: ModuleType, gemm: Path, shape: tuple[int, ...]) -> None:
    good = aligned((32, 32))
    with pytest.raises(tvm.KernelError) as caught:
        tvm.Library(gemm)["gemm"](good, aligned(shape), good.copy())
    assert "argument #1 when calling" in str(caught.value)
    assert "b: Tensor([32, 32], float32)" in str(caught.value)


def test_arrays_of_another_type_or_number_are_refused(tvm: ModuleType, gemm: Path) -> None:
    kernel = tvm.Library(gemm)["gemm"]
    good = aligned((32, 32))
    for wrong in ((good, good.astype(numpy.float64), good), (good, good.astype(numpy.int32), good), (good, good), ()):
        with pytest.raises(tvm.KernelError) as caught:
            kernel(*wrong)
        assert "gemm(a: Tensor([32, 32], float32)" in str(caught.value)


def test_arguments_must_be_writable_arrays(tvm: ModuleType, gemm: Path) -> None:
    kernel = tvm.Library(gemm)["gemm"]
    good, fixed = aligned((32, 32)), aligned((32, 32))
    fixed.flags.writeable = False
    for wrong in ([1.0], 3, None, fixed):
        with pytest.raises(tvm.KernelError, match="argument 1"):
            kernel(good, wrong, good)


def test_strided_arrays_are_refused(tvm: ModuleType, gemm: Path) -> None:
    kernel = tvm.Library(gemm)["gemm"]
    good = aligned((32, 32))
    for wrong in (aligned((32, 32)).T, aligned((32, 64))[:, ::2], aligned((32, 64), 4)[:, ::2]):
        with pytest.raises(tvm.KernelError):
            kernel(good, wrong, good)


def test_a_kernel_can_allocate_temporary_memory(tvm: ModuleType, product_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "kept.so"
    file = write(tmp_path, TEMPORARY)
    profiling.profile(product_config, kernel=str(file), target="local", device="emulator", keep=path, timing=ONCE)
    a, b = aligned((40000,)), aligned((40000,))
    a[...] = numpy.arange(40000)
    tvm.Library(path)["temporary"](a, b)
    assert (b == a[::-1] * 2 + a * 2).all()


def test_an_unusable_library_is_refused(tvm: ModuleType, gemm: Path, tmp_path: Path) -> None:
    with pytest.raises(tvm.KernelError, match="has no kernel 'add'"):
        tvm.Library(gemm)["add"]
    with pytest.raises(tvm.KernelError, match="cannot load"):
        tvm.Library(tmp_path / "none.so")
    other = tmp_path / "other.so"
    run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", other])
    with pytest.raises(tvm.KernelError, match="not built for boards without TVM"):
        tvm.Library(other)


def test_a_library_with_a_failed_kernel_is_not_saved(product_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "kept.so"
    with pytest.raises(UserError):
        profiling.profile(
            product_config,
            kernel=str(write(tmp_path, PARALLEL)),
            target="local",
            device="emulator",
            keep=path,
            timing=ONCE,
        )
    assert not path.exists()


# Runs in a separate process, because kernels store their error messages in TVM's FFI if it is loaded.
CALL = """
import os, sys
import numpy
from pitorch import tvm

os.chdir(sys.argv[1])
with_ffi = sys.argv[2] == "with"
a, b = numpy.random.default_rng(1).standard_normal((2, 32, 32)).astype("float32")
c = numpy.zeros((32, 32), "float32")

def refusal(action):
    try:
        action()
    except tvm.KernelError as fault:
        return str(fault)
    raise SystemExit("not refused")

early = tvm.Library("gemm.so")["gemm"]
assert "parallel loops" in refusal(lambda: tvm.Library("many.so")) if with_ffi else True
for name in ("plain.so", "gemm.so") if with_ffi else ("gemm.so",):
    gemm = tvm.Library(name)["gemm"]
    for offset in (0, 4):
        memory = numpy.zeros(4096 + 128, numpy.uint8)
        begin = -memory.ctypes.data % 64 + offset
        moved = memory[begin : begin + 4096].view("float32").reshape(32, 32)
        moved[...] = a
        gemm(moved, b, c)
        numpy.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)
    for kernel in (gemm, early):
        for _ in range(2):
            message = refusal(lambda: kernel(a, b.astype("float64"), c))
            assert message.startswith("TypeError: Mismatched b.dtype"), message
if not with_ffi:
    for name in ("plain.so", "many.so"):
        assert "install apache-tvm-ffi" in refusal(lambda: tvm.Library(name))
assert ("tvm_ffi" in sys.modules) == with_ffi
print("all checks passed")
"""


@pytest.mark.parametrize("ffi", ["with", "without"])
def test_kernels_exported_by_tvm_require_its_ffi(product_config: Config, gemm: Path, tmp_path: Path, ffi: str) -> None:
    shutil.copy(gemm, tmp_path / "gemm.so")
    export(product_config, tmp_path, "local")
    site = environment.ready(product_config).site
    own = str(ROOT / "libqpu" / "python")
    paths = f"{own}:{site}" if ffi == "with" else own
    done = run([sys.executable, "-c", CALL, tmp_path, ffi], env={"PYTHONPATH": paths}, limit_s=300)
    assert "all checks passed" in done.output
