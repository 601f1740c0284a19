"""Tests of OpenCL kernels on this PC with POCL, Debian's OpenCL driver for the CPU."""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import json
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy
import pytest
from preloaded_workers import preloaded_workers

from device.remote import compiling, loader_session, opencl, profiling, targets
from device.remote.address import parse
from device.remote.loader_session import LoaderSession, Timing
from device.remote.profiling import Profile
from toolchain import process
from toolchain.config import Config, load_config
from toolchain.errors import BoardLost, ResultMismatch, UserError

QUICK = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)

PYTHON = """
    import numpy

    SIZE = 96

    def launch(size):
        return (size,), (32,)

    def inputs(size, random):
        return [random.standard_normal(size, dtype=numpy.float32)]

    def reference(a):
        return a * numpy.float32(2)
"""

OPENCL = """\
__kernel void twice(__global const float *in, __global float *out) {
  const int i = get_global_id(0);
  out[i] = in[i] * 2.0f;
}
"""

LAYER = """\
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl_layer.h>
#include <cstdlib>
#include <cstring>
#include <tuple>

static cl_icd_dispatch functions;
static cl_int code;

template <typename... Given>
static void fail(cl_int (*&function)(Given...)) {
  function = [](Given...) -> cl_int { return code; };
}
template <typename Made, typename... Given>
static void fail(Made (*&function)(Given...)) {
  function = [](Given... given) -> Made {
    *std::get<sizeof...(Given) - 1>(std::make_tuple(given...)) = code;
    return nullptr;
  };
}

extern "C" cl_int clGetLayerInfo(cl_layer_info, size_t, void *to, size_t *size) {
  if (to != nullptr) *static_cast<cl_layer_api_version *>(to) = CL_LAYER_API_VERSION_100;
  if (size != nullptr) *size = sizeof(cl_layer_api_version);
  return CL_SUCCESS;
}

extern "C" cl_int clInitLayer(cl_uint, const cl_icd_dispatch *below, cl_uint *count, const cl_icd_dispatch **layer) {
  functions = *below;
  const char *fault = std::getenv("FAULT");
  FAULTS
  *layer = &functions;
  *count = sizeof functions / sizeof(void *);
  return CL_SUCCESS;
}
"""
"""A layer between libOpenCL.so and the driver (CL/cl_layer.h): one function returns an error, POCL runs the others.

The environment variable FAULT contains the function and the error.
"""


POCL = Path("/etc/OpenCL/vendors/pocl.icd")
pocl = pytest.mark.skipif(not POCL.exists(), reason="POCL is missing; ./inv installs it")
"""For tests that control POCL by its environment variables, or that expect its errors."""


def needs_driver() -> None:
    """Skip the test if this PC cannot run OpenCL kernels."""
    if ctypes.util.find_library("OpenCL") is None or not list(POCL.parent.glob("*.icd")):
        pytest.skip("an OpenCL driver is missing; ./inv installs POCL")
    if shutil.which("g++") is None:
        pytest.skip("the program g++ is missing; ./inv installs it")


def needs_pocl() -> None:
    """Skip the test if this PC cannot run OpenCL kernels with POCL."""
    needs_driver()
    if not POCL.exists():
        pytest.skip("POCL is missing; ./inv installs it")


@pytest.fixture(scope="module", autouse=True)
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    needs_driver()
    with preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        yield


@pytest.fixture(scope="module")
def pocls_binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder in which POCL keeps compiled kernels for all tests."""
    return tmp_path_factory.mktemp("pocl")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pocls_binaries: Path) -> Path:
    """Provide an empty folder for the loader's binaries. Select POCL if this PC has several drivers."""
    if POCL.exists():
        monkeypatch.setenv("OCL_ICD_VENDORS", str(POCL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("POCL_CACHE_DIR", str(pocls_binaries))
    return tmp_path / "cache"


@pytest.fixture
def board() -> Iterator[LoaderSession]:
    """Start a session with this PC as the board."""
    with session() as opened:
        yield opened


def config() -> Config:
    return load_config({"build": {"folder": "build/test"}, "remote": {"session_limit_s": 60}})


def session() -> AbstractContextManager[LoaderSession]:
    return loader_session.session(config(), targets.load("local"), parse("local"))


def run(kernel: str | Path, *, size: int = 0, timing: Timing = QUICK) -> Profile:
    return profiling.profile(config(), kernel=str(kernel), target="opencl", size=size, timing=timing)


def write(folder: Path, *replaced: tuple[str, str], python: str = PYTHON) -> Path:
    """Write the files of a kernel. Each pair in ``replaced`` is a string in the OpenCL file and its replacement."""
    path = folder / "twice.py"
    path.write_text(textwrap.dedent(python))
    text = OPENCL
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    path.with_suffix(".cl").write_text(text)
    return path


@pytest.mark.parametrize(("kernel", "size"), [("gemm", 7), ("gemm", 64), ("gemm", 100), ("add_one", 1), ("add_one", 0)])
def test_opencl_kernel_is_checked_and_timed(kernel: str, size: int) -> None:
    done = run(kernel, size=size)
    assert done.checked == (size or 1024) ** (2 if kernel == "gemm" else 1)
    assert min(done.seconds) > 0
    assert done.gflops == pytest.approx(done.operations / done.mean_s / 1e9)
    rows = dict(done.rows())
    assert "compute units" in rows["runs on"]
    assert "note" not in rows
    assert "driver " in json.loads(done.as_json())["devices"][0]


@pocl
def test_all_devices_of_a_board_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCL_DEVICES", "basic pthread")
    rows = dict(run(write(tmp_path)).rows())
    first, second = rows["devices"].splitlines()
    assert rows["runs on"] == first != second
    for device in (first, second):
        assert re.search(r"\(CPU, OpenCL .+, driver .+, \d+ compute units, [\d.]+ GiB\)$", device)


def test_reference_gemm_agrees_to_three_decimals() -> None:
    done = run("gemm", size=1024, timing=Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0))
    assert done.checked == 1024 * 1024
    assert done.operations == 2 * 1024**3
    assert compiling.load(profiling.KERNELS / "gemm.py", 4, target="opencl").tolerance == (0.0, 5e-4)


def test_kernels_time_excludes_the_copies(board: LoaderSession, tmp_path: Path) -> None:
    """The kernel runs one work group, and the arrays occupy 128 MiB: copies take nearly all of a request's time."""
    size = 1 << 24
    build(board, write(tmp_path, python=PYTHON.replace("(size,), (32,)", "(32,), (32,)")), size)
    numbers = [board.array(numpy.zeros(size, numpy.float32)), board.array(numpy.zeros(size, numpy.float32))]
    began = time.monotonic()
    _, seconds = board.time(Timing(number=1, repeat=5, min_repeat_ms=0, warm_up=0), numbers)
    assert 0 < min(seconds) < (time.monotonic() - began) / 5 / 10


def test_binary_is_kept_by_digest_and_replaced_if_damaged(tmp_path: Path, caches: Path) -> None:
    path = write(tmp_path)
    assert run(path).build.startswith("compiled on the board in ")
    assert run(path).build.startswith("binary of an earlier session")
    (kept,) = (caches / "pitorch/opencl").iterdir()
    assert len(kept.name) == 64
    kept.write_bytes(b"damaged")
    assert run(path).build.startswith("compiled on the board in ")
    assert run(path).build.startswith("binary of an earlier session")
    assert run(path, size=128).build.startswith("compiled on the board in ")
    assert len(list(kept.parent.iterdir())) == 2


def test_kernel_runs_if_its_binary_cannot_be_kept(tmp_path: Path, caches: Path) -> None:
    caches.write_text("a file in place of the folder")
    path = write(tmp_path)
    for _ in range(2):
        assert run(path).build.startswith("compiled on the board in ")


# ------------------------------------------------------------------------------------------------ errors


def build(board: LoaderSession, path: Path, size: int = 0) -> opencl.Program:
    """Build a kernel in a session."""
    program = opencl.program(path, compiling.load(path, size, target="opencl"))
    devices = board.devices()
    board.build(opencl.choose(devices), devices[opencl.choose(devices)], program)
    return program


def test_compile_error_names_the_kernels_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not compile on local") as caught:
        run(write(tmp_path, ("in[i] * 2.0f", "in[i] * factor")))
    assert caught.value.found.startswith("clBuildProgram: CL_BUILD_PROGRAM_FAILURE / ")
    assert "line 3, column 20: " in caught.value.found
    assert "factor" in caught.value.found


def test_source_without_the_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(write(tmp_path, ("void twice", "void other")))
    assert caught.value.found == "the source has no kernel twice"


def test_kernel_with_other_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(write(tmp_path, ("__global float *out)", "__global float *out, __global float *more)")))
    assert caught.value.found.startswith("the kernel takes 3 arguments, found 2 arrays")
    unused = ("out[i] = in[i] * 2.0f;", "(void)(in[i] * value);")
    path = write(tmp_path, ("__global float *out)", "float value)"), unused)
    with pytest.raises(UserError) as caught:
        run(path)
    assert "argument 1 is not a __global pointer" in caught.value.found


def test_wrong_result_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ResultMismatch, match=r"first at index \[5\]"):
        run(write(tmp_path, ("out[i] =", "if (i != 5) out[i] =")))


def test_work_group_that_is_too_large_is_refused(tmp_path: Path) -> None:
    large = PYTHON.replace("(size,), (32,)", "(size * 4096, 4), (4096, 4)")
    with pytest.raises(UserError, match="the work group is too large for local") as caught:
        run(write(tmp_path, python=large))
    assert "4096×4×1 = 16384 work items; the device runs at most" in caught.value.found


@pytest.mark.parametrize(("required", "accepted"), [(32, True), (16, False), (64, False)])
def test_launch_must_match_the_group_size_the_kernel_requires(tmp_path: Path, required: int, accepted: bool) -> None:
    attribute = f"__kernel __attribute__((reqd_work_group_size({required}, 1, 1))) void"
    path = write(tmp_path, ("__kernel void", attribute))
    if accepted:
        assert run(path).checked == 96
        return
    with pytest.raises(UserError, match="the kernel or model fails on local") as caught:
        run(path)
    assert f"requires work groups of {required}×1×1 work items, found 32×1×1" in caught.value.found


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        ("(size,), (36,)", "expected multiples of the work group's sizes"),
        ("(size, 1), (32,)", "expected multiples of the work group's sizes"),
        ("(size, 0), None", "expected tuples of one to three integers of 1 or more"),
        ("(1, 1, 1, 1), None", "expected tuples of one to three integers of 1 or more"),
        ("(str(size),), None", "expected tuples of one to three integers of 1 or more"),
        ("(size / 1,), None", "expected tuples of one to three integers of 1 or more"),
        ("(size,), (32.0,)", "expected tuples of one to three integers of 1 or more"),
        ("size, None", "expected tuples of one to three integers of 1 or more"),
        ("(size,)", "expected a pair: the total number of work items, and the number per work group"),
        ("(unknown,), None", "twice.py:7: launch() fails: NameError"),
    ],
)
def test_invalid_launch_is_refused(tmp_path: Path, launch: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        run(write(tmp_path, python=PYTHON.replace("(size,), (32,)", launch)))
    assert found in caught.value.found


def test_source_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_suffix(".cl").write_bytes(OPENCL.encode() + b"// \xe9\n")
    with pytest.raises(UserError) as caught:
        run(path)
    assert f"twice.cl is not UTF-8: invalid continuation byte at byte {len(OPENCL) + 3}" in caught.value.found


def test_missing_source_or_launch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(write(tmp_path, python=PYTHON.replace("def launch", "def launches")))
    assert "does not define launch" in caught.value.found
    path = write(tmp_path)
    path.with_suffix(".cl").unlink()
    with pytest.raises(UserError) as caught:
        run(path)
    assert "there is no twice.cl next to twice.py" in caught.value.found


@pocl
def test_arrays_beyond_the_devices_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCL_MEMORY_LIMIT", "1")  # GiB
    with session() as board:
        build(board, write(tmp_path))
        with pytest.raises(UserError, match="does not have enough memory") as caught:
            board._ask("array f 4 500000000")
        assert "an array of 1908 MiB after 0 MiB; the device has" in caught.value.found
        given = numpy.arange(96, dtype=numpy.float32)
        numbers = [board.array(given), board.array(numpy.zeros_like(given))]
        board.run(numbers)
        assert numpy.array_equal(board.read(numbers[1], given), given * 2)


@pocl
def test_local_memory_beyond_the_devices_is_refused(tmp_path: Path) -> None:
    shared = "__local float block[1 << 24]; const int l = get_local_id(0); block[(l * 7919) & 0xffffff] = in[l]; "
    path = write(
        tmp_path,
        ("const int i", shared + "barrier(CLK_LOCAL_MEM_FENCE); const int i"),
        ("* 2.0f", "* 2.0f + block[(int)in[i]]"),
    )
    with pytest.raises(UserError, match="does not have enough memory") as caught:
        run(path)
    assert "the kernel uses 67108864 bytes of local memory; the device has" in caught.value.found


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("OCL_ICD_VENDORS", "/nonexistent", "libOpenCL.so finds no driver"),
        pytest.param("POCL_DEVICES", "none", "these drivers have no device: Portable Computing Language", marks=pocl),
    ],
)
def test_board_without_a_driver_or_device_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, found: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match="local has no OpenCL device") as caught:
        run(write(tmp_path))
    assert caught.value.found == found
    assert "RUSTICL_ENABLE=v3d" in caught.value.fix


@pytest.mark.emulation
def test_board_without_opencl_is_reported() -> None:
    """The cross compiler's library folder contains no OpenCL library."""
    if not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("aarch64-linux-gnu-g++ is missing; ./inv installs it")
    with loader_session.session(config(), targets.load("opencl"), parse("emulator")) as emulated:
        with pytest.raises(UserError, match="emulator has no usable OpenCL library") as caught:
            emulated.devices()
        assert "libOpenCL.so.1" in caught.value.found


@pocl
def test_driver_crash_ends_only_its_session(tmp_path: Path) -> None:
    """POCL runs kernels in the loader's process, which crashes when a kernel accesses memory outside its arrays."""
    with pytest.raises(UserError, match="the OpenCL driver crashed on local") as caught:
        run(write(tmp_path, ("out[i] =", "out[(long)i << 40] =")))
    assert caught.value.found == "killed by SIGSEGV"
    assert run(write(tmp_path)).checked == 96


def test_endless_kernel_times_out(tmp_path: Path) -> None:
    path = write(tmp_path, ("out[i] =", "while (in[i] != 1e30f * i + 7) out[i] ="))
    limited = dataclasses.replace(config(), remote=dataclasses.replace(config().remote, session_limit_s=3))
    with pytest.raises(BoardLost) as caught:
        profiling.profile(limited, kernel=str(path), target="opencl", timing=QUICK)
    assert caught.value.expected == "completion within 3 s"


FAULTS = [
    ("clGetDeviceIDs", "CL_OUT_OF_RESOURCES", "no OpenCL device", r" \(clGetDeviceIDs: CL_OUT_OF_RESOURCES\)$"),
    ("clCreateContext", "CL_DEVICE_NOT_AVAILABLE", "driver on local reports an error", ""),
    ("clCreateContext", "CL_OUT_OF_HOST_MEMORY", "local does not have enough memory", ""),
    (
        "clBuildProgram",
        "CL_BUILD_PROGRAM_FAILURE",
        "does not compile on local",
        "clBuildProgram: CL_BUILD_PROGRAM_",
    ),
    ("clBuildProgram", "CL_COMPILER_NOT_AVAILABLE", "driver on local reports an error", ""),
    ("clBuildProgram", "CL_OUT_OF_HOST_MEMORY", "local does not have enough memory", ""),
    ("clCreateKernel", "CL_OUT_OF_RESOURCES", "driver on local reports an error", ""),
    (
        *("clCreateBuffer", "CL_MEM_OBJECT_ALLOCATION_FAILURE", "device on local does not have enough memory"),
        r" for an array of 1 MiB after 0 MiB; the device has \d+ MiB, ",
    ),
    ("clCreateBuffer", "CL_OUT_OF_RESOURCES", "driver on local reports an error", r" for an array of 1 MiB"),
    ("clEnqueueWriteBuffer", "CL_MEM_OBJECT_ALLOCATION_FAILURE", "device on local does not have enough", ""),
    ("clSetKernelArg", "CL_OUT_OF_RESOURCES", "driver on local reports an error", ""),
    (
        *("clEnqueueNDRangeKernel", "CL_OUT_OF_RESOURCES", "driver on local reports an error"),
        " for 96×1×1 work items in work groups of 32×1×1$",
    ),
    ("clEnqueueNDRangeKernel", "CL_INVALID_WORK_GROUP_SIZE", "work group is too large for local", " groups of 32×"),
    ("clFinish", "-9999", "driver on local reports an error", "clFinish: error -9999$"),
    ("clGetEventProfilingInfo", "CL_PROFILING_INFO_NOT_AVAILABLE", "driver on local reports an error", ""),
    ("clEnqueueReadBuffer", "CL_OUT_OF_RESOURCES", "driver on local reports an error", ""),
]
"""Functions of the driver and their error codes, and what the error's summary and cause contain."""

UNREPORTED = [("clGetProgramBuildInfo", "CL_INVALID_VALUE"), ("clGetProgramInfo", "CL_OUT_OF_RESOURCES")]
"""Functions whose errors are not reported as such."""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the layer with all faults that the tests select, and return its path."""
    made = tmp_path_factory.mktemp("layer") / "layer.so"
    selection = "".join(
        f'if (std::strcmp(fault, "{function} {code}") == 0) code = {code}, fail(functions.{function});\n'
        for function, code in [*UNREPORTED, *(row[:2] for row in FAULTS)]
    )
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(made)]
    process.run(command, stdin=LAYER.replace("FAULTS", selection).encode(), limit_s=300)
    return made


@contextlib.contextmanager
def failing(layer: Path, function: str, code: str) -> Iterator[None]:
    """Make a function of this PC's OpenCL driver return an error code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENCL_LAYERS", str(layer))
        patch.setenv("FAULT", f"{function} {code}")
        yield


@pytest.mark.parametrize(("function", "code", "summary", "found"), FAULTS)
def test_error_code_of_the_driver_is_reported(
    tmp_path: Path, layer: Path, function: str, code: str, summary: str, found: str
) -> None:
    path = write(tmp_path)
    with failing(layer, function, code), pytest.raises(UserError, match=summary) as caught:
        run(path)
    assert re.search(found or f"^{function}: {code}$", caught.value.found)
    assert function in caught.value.found
    assert caught.value.expected
    assert caught.value.fix
    assert run(path).checked == 96


def test_compile_error_is_reported_without_a_build_log(tmp_path: Path, layer: Path) -> None:
    path = write(tmp_path, ("in[i] * 2.0f", "in[i] * factor"))
    fault = failing(layer, "clGetProgramBuildInfo", "CL_INVALID_VALUE")
    with fault, pytest.raises(UserError, match="does not compile on local") as caught:
        run(path)
    expected = "clBuildProgram: CL_BUILD_PROGRAM_FAILURE / clGetProgramBuildInfo: CL_INVALID_VALUE"
    assert caught.value.found == expected


def test_kernel_runs_if_the_driver_returns_no_binary(tmp_path: Path, layer: Path) -> None:
    path = write(tmp_path)
    with failing(layer, "clGetProgramInfo", "CL_OUT_OF_RESOURCES"):
        for _ in range(2):
            assert run(path).build.startswith("compiled on the board in ")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("opencl 9 ab twice 1 1 1 0 0 0 1\n\n", "there is no device 9"),
        ("opencl 0 ../x twice 1 1 1 0 0 0 1\n\n", "the digest is not hexadecimal"),
        ("opencl 0 ab twice 1 1", "a word of the request is missing"),
    ],
)
def test_invalid_opencl_requests_are_refused(board: LoaderSession, request_: str, error: str) -> None:
    line, _, content = request_.partition("\n")
    with pytest.raises(UserError) as caught:
        board._ask(line, content.encode())
    assert error in caught.value.found


# ------------------------------------------------------------------------------------------------ the source


def test_opencl_source_compiles_without_warnings() -> None:
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
    source = loader_session.SOURCE / "opencl.cpp"
    for compiler in ("g++", *(f"{targets.load(name).architecture.gnu}-g++" for name in ("aarch64", "armv7"))):
        if shutil.which(compiler):
            process.run([compiler, "-std=c++17", "-O1", *warnings, "-fsyntax-only", source], limit_s=300)


# ------------------------------------------------------------------------------------- kernels that TVM generates

GENERATED = """
    import numpy

    SIZE = 64

    def opencl_module(size):
        import tvm
        from tvm import s_tir, te

        # TVM sorts a kernel's arguments by name: these are not in order, and one is not used.
        z = te.placeholder((size, size), "float32", name="z")
        unused = te.placeholder((size,), "float32", name="unused")
        y = te.placeholder((size, size), "float32", name="y")
        k = te.reduce_axis((0, size), name="k")
        a = te.compute((size, size), lambda i, j: te.sum(z[i, k] * y[k, j], axis=k), name="a")
        plain = te.create_prim_func([z, unused, y, a]).with_attr("global_symbol", "product")
        schedule = s_tir.Schedule(tvm.IRModule({"product": plain}))
        i, j, k = schedule.get_loops(schedule.get_sblock("a", "product"))
        for loop, axis in ((i, "y"), (j, "x")):
            outer, inner = schedule.split(loop, [None, 8])
            schedule.bind(outer, f"blockIdx.{axis}")
            schedule.bind(inner, f"threadIdx.{axis}")
        return schedule.mod

    def inputs(size, random):
        shapes = ((size, size), (size,), (size, size))
        return [random.standard_normal(shape, dtype=numpy.float32) for shape in shapes]

    def reference(z, unused, y):
        return z @ y

    TOLERANCE = (1e-4, 1e-4)
"""


@pytest.mark.parametrize("size", [64, 100])
def test_kernel_that_tvm_generates_is_checked_and_timed(product_config: Config, tmp_path: Path, size: int) -> None:
    path = tmp_path / "product.py"
    path.write_text(textwrap.dedent(GENERATED))
    first, second = run(path, size=size), run(path, size=size)
    assert first.checked == size * size
    assert first.build.startswith("compiled on the board")
    assert second.build.startswith("binary of an earlier session")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('((i, "y"), (j, "x"))', "()", "expected loops that form one OpenCL kernel, found 0 kernels"),
        ('schedule.bind(outer, f"blockIdx.{axis}")', "pass", "TVM's kernel needs "),
        ("return schedule.mod", "return size", "expected opencl_module() to return a tvm.IRModule, found int"),
        ("import tvm\n", "import no_such_module\n", "opencl_module() fails: ModuleNotFoundError"),
    ],
)
def test_kernel_that_tvm_cannot_generate_is_refused(tmp_path: Path, old: str, new: str, found: str) -> None:
    path = tmp_path / "product.py"
    assert old in GENERATED
    path.write_text(textwrap.dedent(GENERATED.replace(old, new, 1)))
    with pytest.raises(UserError) as caught:
        run(path)
    assert found in caught.value.found
