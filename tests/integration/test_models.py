"""Tests of PyTorch models on this PC: over TVM's RPC, with the loader under emulation, and in a C program."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import tvm_servers
from preloaded_workers import preloaded_workers

from benchmarks.models import compare
from device.remote import comparing, eager, environment, loader_session, models, targets
from device.remote.address import parse
from device.remote.loader_session import Timing
from device.remote.models import ModelProfile
from toolchain import process
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ResultMismatch, UserError

QUICK = Timing(number=2, repeat=2, min_repeat_ms=1, warm_up=1)
# No image has this name. test_models_in_images.py tests PyTorch in the system image, which takes a minute under
# emulation.
SETTINGS = {"build": {"folder": "build/test"}, "image": {"name": "no-such-image"}}
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module", autouse=True)
def tvm(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[environment.TvmEnvironment]:
    made = environment.ready_for_models(product_config)
    with pytest.MonkeyPatch.context() as patch, preloaded_workers(tmp_path_factory.mktemp("preloaded")):
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # where the models' parameters are kept
        yield made


def run(model: str, target: str = "local", device: str = "", export: Path | None = None) -> ModelProfile:
    return models.profile(
        load_config(SETTINGS), model=model, target=target, device=device, timing=QUICK, folder=SUPPORT, export=export
    )


def needs_armv7() -> list[str]:
    """Skip the test if the compiler or the emulator is missing. Return the emulator's command."""
    wanted = targets.load("armv7")
    if shutil.which(wanted.linker("")) is None or shutil.which("qemu-arm-static") is None:
        pytest.skip("the cross compiler or qemu-arm-static is missing; ./inv installs them")
    return loader_session.emulator(wanted.architecture)


@pytest.mark.parametrize(
    ("model", "elements"), [("lstm", 37), ("transformer", 320), ("same", 12), ("cumsum", 33), ("int8", 10)]
)
def test_model_agrees_with_pytorch(model: str, elements: int) -> None:
    done = run(f"remote_models:{model}")
    assert done.checked == elements
    assert len(done.seconds) == 4
    assert done.median_s <= done.p90_s
    assert all(seconds > 0 for _, seconds in done.operators)
    assert json.loads(done.as_json())["median_s"] == done.median_s
    in_float32, in_int8 = done.eager
    assert len(in_float32.seconds) == 4
    assert in_float32.difference <= max(absolute for _, absolute in done.tolerances)
    if model in ("lstm", "transformer"):
        assert len(in_int8.seconds) == 4
        assert 0 < in_int8.difference < in_int8.largest
    else:
        assert in_int8.reason == "the model has no layer that torch can quantise"


def test_tolerance_is_relative_to_small_outputs() -> None:
    ((relative, absolute),) = run("remote_models:small").tolerances
    assert relative == 1e-4
    assert 0 < absolute <= 1e-10


def test_each_output_has_its_own_tolerance() -> None:
    done = run("remote_models:large_and_small")
    (_, of_large), (_, of_small) = done.tolerances
    assert of_large == 1e-4
    assert 0 < of_small <= 1.5e-8
    assert "(output 0: 0.0001 relative or 0.0001 absolute; output 1: " in dict(done.rows())["result"]


def test_wrong_small_output_next_to_a_large_one_is_found() -> None:
    with pytest.raises(ResultMismatch, match="output 1 of large_and_wrong on local differs"):
        run("remote_models:large_and_wrong")


def test_relu6_in_int8_is_close_to_float32() -> None:
    """Upstream's relu6 with QNNPACK returns the elements of channels_last images in the wrong order."""
    in_int8 = run("remote_models:limited").eager[1]
    assert in_int8.difference < 0.1 * in_int8.largest


@pytest.mark.parametrize("network", ["mobilenet_v2", "resnet18"])
def test_torchvision_network_agrees_with_pytorch(network: str) -> None:
    done = run(f"torchvision_models:{network}")
    assert done.checked == 1000
    in_float32, in_int8 = done.eager
    assert in_float32.largest > 0.1
    assert in_int8.difference < 0.5 * in_int8.largest
    # The parameters must be in memory only once, because they are mapped, not copied.
    assert 10 << 20 < done.parameter_bytes < done.peak_memory_bytes < 1.5 * done.parameter_bytes


@pytest.mark.expensive
@pytest.mark.parametrize("network", ["large_mobilenet_v2", "large_resnet18"])
def test_torchvision_network_of_full_size_agrees(network: str) -> None:
    assert run(f"torchvision_models:{network}").checked == 1000


def test_networks_of_the_benchmark_match_torchvision(tvm: environment.TvmEnvironment) -> None:
    script = """
import sys
from device.remote import model_compiling

sys.path.append(sys.argv[1])
model_compiling._allow_torchvision()
import torchvision_models
from benchmarks.models import networks

for name in ("mobilenet_v2", "resnet18"):
    ours, theirs = (
        [(item.shape, item.dtype) for item in getattr(module, name)()[0].state_dict().values()]
        for module in (networks, torchvision_models)
    )
    assert ours == theirs, name
    print(len(ours))
"""
    printed = process.run(tvm.command("-c", script, str(SUPPORT)), env=tvm.variables, limit_s=600).output
    assert [int(line) > 100 for line in printed.split()[-2:]] == [True, True]


@pytest.mark.emulation
def test_armv7_runs_mobilenet_of_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_armv7()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run("torchvision_models:mobilenet_v2", "armv7")
    assert done.checked == 1000
    assert done.parameters == "sent, and kept on the board"
    assert done.parameter_bytes > 13 << 20


@pytest.mark.emulation
def test_aarch64_model_runs_without_tvm() -> None:
    if shutil.which(targets.load("aarch64").linker("")) is None or shutil.which("qemu-aarch64-static") is None:
        pytest.skip("the cross compiler or qemu-aarch64-static is missing; ./inv installs them")
    assert run("remote_models:transformer", "aarch64", "emulator").checked == 320


def test_model_runs_on_a_board_with_tvm(
    tvm: environment.TvmEnvironment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with tvm_servers.board(tvm) as board:
        done = run("remote_models:cnn", device=f"127.0.0.1:{board.port}")
    assert done.checked == 10
    assert done.parameters == "sent, and kept on the board"
    assert done.not_run[0].startswith("torch float32 and int8 not run: TVM's server does not run PyTorch")
    assert done.peak_memory_bytes > 10 << 20


@pytest.mark.emulation
def test_armv7_model_runs_without_tvm_and_in_a_c_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulator = needs_armv7()
    folder = tmp_path / "exported"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a new cache, without the parameters of other tests
    first, done = run("remote_models:cnn", "armv7"), run("remote_models:cnn", "armv7", export=folder)
    assert first.checked == done.checked == 10
    assert first.parameters == "sent, and kept on the board"
    assert done.parameters == "kept on the board"
    assert done.parameters_sha256 == first.parameters_sha256
    assert dict(done.rows())["peak memory"].endswith(", with the emulator")
    assert dict(done.rows())["note"] == "timed under emulation; not measured on hardware"
    libraries = process.run(["readelf", "-d", folder / "libmodel.so"]).output
    assert {line.split("[")[1].rstrip("]") for line in libraries.splitlines() if "NEEDED" in line} <= {
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "ld-linux-armhf.so.3",
    }
    compiler = targets.load("armv7").linker("").replace("g++", "gcc")
    options = ["-Wall", "-Werror", "main.c", "-o", "example", "-L.", "-lmodel", "-Wl,-rpath,$ORIGIN"]
    process.run([compiler, *options], cwd=folder)
    process.run([*emulator, "./example", "model.params", "input0.bin", "output0.bin"], cwd=folder)
    found, expected = (numpy.fromfile(folder / name, "f4") for name in ("output0.bin", "expected0.bin"))
    assert numpy.allclose(found, expected, rtol=1e-4, atol=1e-4)
    refused = process.run([*emulator, "./example", "model.params"], cwd=folder, check=False)
    assert refused.returncode == 2


def test_benchmark_runs_a_model_in_three_ways(tmp_path: Path, tvm: environment.TvmEnvironment) -> None:
    models.compile_for(load_config(SETTINGS), "benchmarks.models.networks:cnn", targets.load("local"), tmp_path / "cnn")
    script = ROOT / "benchmarks" / "models" / "on_target.py"
    variables = {**tvm.variables, "PYTHONPATH": f"{tvm.variables['PYTHONPATH']}:{eager.SCRIPT.parent}"}
    for mode in ("count", "time"):
        argv = [sys.executable, str(script), mode, str(tmp_path / "rows.json"), str(tmp_path / "cnn")]
        process.run(argv, env=variables, limit_s=300)
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert [(row["model"], row["how"], row["reason"]) for row in rows] == [("cnn", how, "") for how in compare.HOW]
        assert [row["region"] for row in rows] == ([1, 2, 3] if mode == "count" else [0, 0, 0])
        assert [row["seconds"] > 0 for row in rows] == [mode == "time"] * 3


@pytest.mark.engine
def test_result_names_a_missing_image(tvm: environment.TvmEnvironment) -> None:
    config = load_config(SETTINGS)
    address, target = parse("emulator"), targets.load("armv7")
    for item in eager.measure(config, target, address, description(), tvm):
        assert item.reason.startswith("the engine does not have the image no-such-image/system:")


def description(
    call: str = "aten.relu.default", expected: float = 0, runs: int = 1, given: tuple[float, float] = (0, 0)
) -> bytes:
    """Describe a model with two outputs: its first input, and the result of an operator for its second input."""
    records = [{"dtype": "float32", "shape": [1], "offset": 64 * place} for place in range(3)]
    described = {
        "inputs": ["w", "x"],
        "tensors": {},
        "calls": [["y", call, [{"node": "x"}], {}, 1]],
        "outputs": [{"node": "w"}, {"node": "y"}],
        "examples": records[:2],
        "expected": [records[0], records[2]],
        "tolerances": [
            comparing.tolerance_of(numpy.asarray([item], "f4"), 1e-4, 1e-4) for item in (given[0], expected)
        ],
        "runs": runs,
        "warm_up": 0,
    }
    content = numpy.zeros(33, "f4")
    content[[0, 16, 32]] = (*given, expected)
    return json.dumps(described).encode() + b"\n" + content.tobytes()


@pytest.mark.parametrize(
    ("found", "described"),
    [
        ("has no operator aten.no_such.default", description("aten.no_such.default")),
        ("wrong result: output 1 differs by up to 1 ", description(expected=1)),
        ("wrong result: output 1 differs by up to 5e-06 ", description(expected=1e-5, given=(1000, 5e-6))),
        (
            "an element of an output is NaN either only on the board or only in PyTorch on the PC",
            description(expected=numpy.nan),
        ),
        ("still running after 5 s", description(runs=10**9)),
    ],
)
def test_model_that_torch_cannot_run_has_a_reason(
    tvm: environment.TvmEnvironment, found: str, described: bytes
) -> None:
    limit_s = 5 if found.startswith("still running") else 60
    config = load_config({**SETTINGS, "remote": {"session_limit_s": limit_s}})
    in_float32, _ = eager.measure(config, targets.load("local"), parse("local"), described, tvm)
    assert found in in_float32.reason
    assert in_float32.seconds == ()


def test_difference_in_torch_is_that_of_the_worst_output(tvm: environment.TvmEnvironment) -> None:
    described = description(expected=1e-5, given=(1000, 1.00005e-5))
    for item in eager.measure(load_config(SETTINGS), targets.load("local"), parse("local"), described, tvm):
        if item.precision == "float32":
            assert item.reason == ""
            assert 4e-10 < item.difference < 6e-10
            assert item.largest == pytest.approx(1e-5)


def test_exported_file_is_a_model(tmp_path: Path, tvm: environment.TvmEnvironment) -> None:
    script = """
import sys, torch
sys.path.append(sys.argv[2])
import remote_models
module, inputs = remote_models.cnn()
torch.export.save(torch.export.export(module.eval(), inputs), sys.argv[1])
"""
    process.run(tvm.command("-c", script, str(tmp_path / "saved.pt2"), str(SUPPORT)), env=tvm.variables, limit_s=600)
    done = run(str(tmp_path / "saved.pt2"))
    assert (done.model, done.checked) == ("saved", 10)
    assert done.not_run == []


def test_missing_operator_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run("remote_models:unsupported", export=tmp_path / "nothing")
    assert "aten.special_bessel_j0.default (in the module 1, remote_models.py:" in caught.value.found
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(UserError) as caught:
        run("remote_models:quantized")
    assert "quantized_decomposed.quantize_per_tensor.tensor (in " in caught.value.found


@pytest.mark.parametrize("device", ["tree://root@127.0.0.1:1", "127.0.0.1:1"])
def test_missing_operator_is_reported_before_connecting(device: str) -> None:
    with pytest.raises(UserError, match="operators that TVM's importer lacks"):
        run("remote_models:unsupported", device=device)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("remote_models:no_inputs", "expected remote_models:no_inputs to return (torch.nn.Module, tuple of inputs)"),
        ("remote_models:absent", "has no attribute 'absent'"),
        ("no_such_module:cnn", "No module named 'no_such_module'"),
        ("remote_models:exits", "fails: SystemExit: the data set is missing"),
        ("remote_models:topk", "TVM lowers the operator topk (in the model, remote_models.py:"),
        ("remote_models:ordered", "operator argsort (in the module 1, remote_models.py:"),
        ("remote_models:ordered_twice", " or in the module 2, remote_models.py:"),
        ("remote_models:branching", "torch.cond (in the model, remote_models.py:"),
        ("remote_models:refused", "cannot be imported at aten.as_strided.default (in the model, remote_models.py:"),
        ("remote_models:cumsum_of_int32", "output 0 is int32 of shape (2, 4) in TVM, int64 of shape (2, 4) in PyTorch"),
        ("remote_models:changes_its_buffer", "modifies in place: calls. Return the new values instead"),
        ("remote_models:changes_its_input", "modifies in place: x. Return the new values instead"),
        ("remote_models:bfloat16", "input 0 has the type bfloat16: expected float16, float32"),
        ("remote_models:bfloat16_inside", "the model uses the type bfloat16: expected float16, float32"),
        ("remote_models:nonzero", "has sizes that are known only at run time (u0): use static shapes"),
    ],
)
def test_unusable_model_is_an_error(model: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        run(model)
    assert found in caught.value.found


def test_broken_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"PK\3\4")
    with pytest.raises(UserError) as caught:
        run(str(tmp_path / "broken.pt2"))
    assert "cannot be loaded" in caught.value.found


def test_dynamic_shape_is_an_error(tmp_path: Path, tvm: environment.TvmEnvironment) -> None:
    script = """
import sys, torch
given = torch.export.Dim("rows")
x = torch.randn(4, 8)
torch.export.save(torch.export.export(torch.nn.Linear(8, 2), (x,), dynamic_shapes=({0: given},)), sys.argv[1])
"""
    process.run(tvm.command("-c", script, str(tmp_path / "dynamic.pt2")), env=tvm.variables, limit_s=300)
    with pytest.raises(UserError) as caught:
        run(str(tmp_path / "dynamic.pt2"))
    assert "has sizes that are known only at run time (" in caught.value.found


def test_c_program_runs_a_model_with_empty_arrays(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing; ./inv installs it")
    folder = tmp_path / "exported"
    done = run("remote_models:empty", export=folder)
    assert (done.inputs, done.checked) == (("float32 0×4", "float32 3×4"), 12)
    options = ["-Wall", "-Wextra", "-Werror", "main.c", "-o", "example", "-L.", "-lmodel", "-Wl,-rpath,$ORIGIN"]
    process.run(["gcc", *options], cwd=folder)
    names = ("model.params", "input0.bin", "input1.bin", "output0.bin", "output1.bin")
    process.run(["./example", *names], cwd=folder)
    assert (folder / "output0.bin").read_bytes() == b""
    found, given = (numpy.fromfile(folder / name, "f4") for name in ("output1.bin", "input1.bin"))
    assert numpy.array_equal(found, 2 * given)


def test_call_of_tvms_runtime_is_an_error_with_its_place(tvm: environment.TvmEnvironment) -> None:
    script = """
from tvm import relax
from tvm.script import relax as R
from device.remote import model_plan
from device.remote.reporting import Fault

builder = relax.BlockBuilder()
x = relax.Var("x", R.Tensor((2, 4), "float32"))
with builder.function("main", [x]):
    builder.emit_func_output(builder.emit(R.call_packed("vm.builtin.sort", x, ty_args=R.Tensor((2, 3), "float32"))))
try:
    model_plan.of(builder.finalize()["main"], lambda name: f" (where {name} is)")
except Fault as fault:
    print(fault.found)
"""
    done = process.run(tvm.command("-c", script), env=tvm.variables, limit_s=600, merge_stderr=False)
    found = done.output.strip()
    assert found.startswith("TVM lowers an operator (where vm.builtin.sort is), whose result is R.Tensor((2, 3), ")
    assert found.endswith(" to vm.builtin.sort, which needs TVM's runtime")


MODEL = """
#include <string.h>
#include "model.h"
size_t pitorch_model_parameter_bytes(void) { return 8192; }
size_t pitorch_model_input_bytes(int index) { return index == 0 ? 4 : 0; }
size_t pitorch_model_output_bytes(int index) { return index == 0 ? 4 : 0; }
const char *pitorch_model_error(void) { return "the operator failed"; }
int pitorch_model_run(const void *parameters, const void *const *inputs, void *const *outputs, double *seconds) {
  memcpy(outputs[0], (const char *)parameters + 8188, 4);
  return *(const int *)inputs[0] == 0 ? 0 : -1;
}
"""


def test_c_program_names_the_cause_of_a_failure(tmp_path: Path) -> None:
    """If the program read a mapped page beyond the end of a file, SIGBUS would kill it without a message."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing; ./inv installs it")
    (tmp_path / "model.c").write_text(MODEL)
    (tmp_path / "model.h").write_text(models._header(1, 1))
    shutil.copy(loader_session.SOURCE / "main.c", tmp_path)
    process.run(
        ["gcc", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "main.c", "model.c", "-o", "example"],
        cwd=tmp_path,
    )

    def example(*words: str) -> tuple[int, str]:
        done = process.run(["./example", *words], cwd=tmp_path, check=False)
        return done.returncode, done.output.strip()

    whole = ("parameters", "input", "output")
    assert example() == (2, "example: expected the files of parameters, inputs (1) and outputs (1)")
    assert example(*whole) == (1, "example: parameters: No such file or directory")
    (tmp_path / "parameters").write_bytes(bytes(4096))
    assert example(*whole) == (1, "example: parameters: expected 8192 bytes")
    (tmp_path / "parameters").write_bytes(bytes(8188) + b"last")
    (tmp_path / "input").write_bytes(bytes(3))
    assert example(*whole) == (1, "example: input: expected 4 bytes")
    (tmp_path / "input").write_bytes(b"fail")
    assert example(*whole) == (1, "example: the operator failed")
    assert not (tmp_path / "output").exists()
    (tmp_path / "input").write_bytes(bytes(4))
    assert example("parameters", "input", ".") == (1, "example: .: Is a directory")
    assert example(*whole) == (0, "")
    assert (tmp_path / "output").read_bytes() == b"last"


@pytest.mark.parametrize(
    ("target", "device", "found"),
    [
        ("qpu", "", "models cannot run on QPUs"),
        ("opencl", "", "models cannot run on OpenCL"),
        ("opencl", "adb://", "models cannot run on OpenCL"),
    ],
)
def test_model_for_a_gpu_or_qpus_is_refused(target: str, device: str, found: str) -> None:
    with pytest.raises(UserError, match=found) as caught:
        run("remote_models:cnn", target, device)
    assert caught.value.expected.endswith("models run on CPUs only")


def test_task_writes_json_a_report_and_a_c_program(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from benchmarks.models.networks import cnn  # noqa: F401\n")
    config = load_config(SETTINGS)
    env = {
        "INVOKE_BUILD_FOLDER": str(config.build_root),
        "INVOKE_IMAGE_NAME": config.image.name,
        "PITORCH_CALLER_CWD": str(tmp_path),
    }
    words = ["--model=nets:cnn", "--target=local", "--number=2", "--repeat=2"]
    argv = [sys.executable, "-m", "toolchain.cli", "profile-remote", *words]
    argv += ["--json", "--html=report.html", "--export=exported"]
    done = process.run(argv, cwd=ROOT, env=env, limit_s=600, merge_stderr=False)
    found = json.loads(done.output)
    assert (found["model"], found["checked"], len(found["seconds"])) == ("cnn", 10, 4)
    page = (tmp_path / "report.html").read_text()
    for name in (*(name for name, _ in found["operators"]), "torch int8"):
        assert name in page
    assert [item["reason"] for item in found["eager"]] == ["", ""]
    exported = {item.name for item in (tmp_path / "exported").iterdir()}
    assert {"libmodel.so", "model.params", "model.h", "main.c", "input0.bin", "expected0.bin"} <= exported


def test_model_for_an_existing_folder_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        run("remote_models:cnn", export=tmp_path)
    with pytest.raises(UserError, match="there is no model"):
        run(str(tmp_path / "absent.pt2"))
