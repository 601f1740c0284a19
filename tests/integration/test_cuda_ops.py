"""Tests of the CUDA operator wheel: the build in a container, the audit, use on this machine, and error cases."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from elftools.elf.elffile import ELFFile
from machine import needs_the_machine
from native_parts import CLANG_TIDY_LEFT_OUT, join_sources
from packaging.version import Version
from wheel_parts import EM_AARCH64, EM_X86_64, elf, make_wheel

from benchmarks.cuda import figures
from flow import cuda_checks as native
from flow import cuda_job
from flow import cuda_timing as timing
from recipes import recipe
from recipes.cuda_ops import audit, toolkit
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import (
    ArtefactMissing,
    ConfigError,
    NetworkUnreachable,
    PlatformMismatch,
    ProgramMissing,
    UserError,
    WheelUnusable,
)
from toolchain.manifest import Artefact, Manifest
from wheels import for_this_pc

RECIPE = ROOT / "recipes" / "cuda_ops"
AMD64 = ARCHITECTURES["amd64"]


# Tests that build the wheel.


@pytest.fixture(scope="session")
def config(product_config: Config) -> Config:
    # Build for only one architecture, because others take additional time without testing anything new.
    return dataclasses.replace(product_config, cuda=dataclasses.replace(product_config.cuda, architectures=("90+PTX",)))


@pytest.fixture(scope="session")
def manifest(config: Config) -> Manifest:
    needs_the_machine()
    if os.uname().machine != "x86_64":
        pytest.skip("nvcc is installed from PyPI only on x86-64")
    return cuda_job.build_wheel(config)


@pytest.fixture(scope="session")
def wheel(manifest: Manifest) -> Artefact:
    return manifest.artefact(".whl")


def test_the_wheel_has_the_configured_gpu_code(manifest: Manifest, wheel: Artefact, config: Config) -> None:
    assert wheel.path.name == "pitorch_cuda_ops-0.1.0-py3-none-linux_x86_64.whl"
    found = audit.audit(wheel.path, AMD64, ("90+PTX",))
    assert (found.machine_code, found.ptx) == (("90",), ("90",))
    assert "libtorch.so" in found.needs
    assert not [name for name in found.needs if name.startswith(("libcuda", "libpython", "libc10"))]
    assert found.text() == manifest.facts["contents"]
    # Debian 12 provides these versions, and newer systems are compatible with them.
    assert Version(found.glibc) <= Version("2.36")
    assert Version(found.libstdcxx) <= Version("3.4.30")
    with zipfile.ZipFile(wheel.path) as archive:
        names = archive.namelist()
    modules = ("__init__", "_gradients", "array_exp", "timing")
    assert {f"cuda_ops/{name}.py" for name in modules} | {"cuda_ops/py.typed", audit.LIBRARY} <= set(names)
    assert not [name for name in names if name.startswith(("csrc", "recipes", "build"))]


def test_the_wheel_is_cross_built_for_arm64(wheel: Artefact, config: Config) -> None:
    assert wheel.path.is_file()
    foreign = dataclasses.replace(config, cuda=dataclasses.replace(config.cuda, architectures=("87",)))
    try:
        made = cuda_job.build_wheel(foreign, "arm64").artefact(".whl")
    except NetworkUnreachable as fault:
        pytest.skip(f"the runtime library for arm64 cannot be fetched: {fault.found}")
    assert made.path.name.endswith("-py3-none-linux_aarch64.whl")
    found = audit.audit(made.path, ARCHITECTURES["arm64"], ("87",))
    assert (found.machine_code, found.ptx) == (("87",), ())
    with zipfile.ZipFile(made.path) as archive:
        assert ELFFile(io.BytesIO(archive.read(audit.LIBRARY)))["e_machine"] == "EM_AARCH64"


def test_a_different_list_of_gpus_fails_the_audit(wheel: Artefact) -> None:
    with pytest.raises(WheelUnusable, match="does not match the requested wheel") as caught:
        audit.audit(wheel.path, AMD64, ("80", "90"))
    assert "['80', '90']" in caught.value.expected
    with pytest.raises(PlatformMismatch):
        audit.audit(wheel.path, ARCHITECTURES["arm64"], ("90+PTX",))


def test_nothing_runs_again_when_nothing_changed(wheel: Artefact, config: Config) -> None:
    assert [decision.reason for decision in cuda_job.plan(config) if decision.runs] == []
    other = dataclasses.replace(config, cuda=dataclasses.replace(config.cuda, architectures=("80",)))
    reasons = [decision.reason for decision in cuda_job.plan(other) if decision.runs]
    assert reasons == ["changed: architectures 90+PTX → 80"]
    assert wheel.path.is_file()


@pytest.fixture(scope="session")
def environment(wheel: Artefact, config: Config) -> Mapping[str, str]:
    checked = native.check(config, wheel.path)
    assert checked.passed > 200
    assert checked.skipped == 0 or "no CUDA GPU on this machine" in checked.reasons
    assert "skipped" in checked.summary()
    return native.install(config, wheel.path)


def run(config: Config, environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [native.interpreter(config), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_array_exp_compares_installed_libraries(config: Config, environment: Mapping[str, str]) -> None:
    done = run(config, environment, "-m", "cuda_ops.array_exp", "-l", "10000", "--runs", "3")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert {"numpy", "CuPy", "torch", "cuda_ops"} <= set(lines)
    assert "excluded from the times" in done.stdout
    for name in ("numpy", "torch", "cuda_ops"):
        digits = float(lines[name].split("µs")[1].split()[0])
        assert digits > 6, "float32 has about 7 decimal digits"


ARRAY_EXP = """
from cuda_ops import array_exp
for words in (["-l", "0"], ["-l", "many"], []):
    try:
        array_exp.main(words)
    except SystemExit as end:
        print(end.code)
"""


def test_array_exp_refuses_an_invalid_length(config: Config, environment: Mapping[str, str]) -> None:
    done = run(config, environment, "-c", ARRAY_EXP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * 3
    assert done.stderr.count("usage: array-exp") == 3
    assert "Traceback" not in done.stderr


def test_cuda_timing_reports_time_or_missing_gpu(config: Config, environment: Mapping[str, str]) -> None:
    assert environment["PYTHONPATH"]
    missing: UserError | None = None
    try:
        done = timing.measure(config, op="add2", runs=3)
    except UserError as fault:
        missing = fault
    if missing is not None:
        assert missing.exit_code == 10
        assert "cuda.python" in missing.fix
        return
    assert "The kernel takes" in done.text
    assert (done.folder / "timing.json").is_file()


@pytest.mark.parametrize(
    ("op", "inputs", "said"),
    [
        ("torch.pi", (), "it cannot be called"),
        ("axpy", ("two", "f32[4]", "f32[4]"), "or a number, found 'two'"),
    ],
)
def test_cuda_timing_refuses_invalid_names(
    config: Config, environment: Mapping[str, str], op: str, inputs: tuple[str, ...], said: str
) -> None:
    assert environment["PYTHONPATH"]
    with pytest.raises(UserError) as caught:
        timing.measure(config, op=op, inputs=inputs)
    assert said in caught.value.found


@pytest.mark.parametrize("left_out", CLANG_TIDY_LEFT_OUT)
def test_clang_tidy_finds_nothing(config: Config, wheel: Artefact, tmp_path: Path, left_out: str) -> None:
    """The test checks only the host sources; nvcc compiles the kernels, and treats all warnings as errors."""
    if shutil.which("clang-tidy") is None:
        pytest.skip("the program clang-tidy is missing; ./inv installs it")
    assert wheel.path.is_file(), "the build must create the environment with torch's headers"
    options = [
        "-std=c++17",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-I{RECIPE / 'csrc'}",
        f"-isystem{for_this_pc.torch(config)}/torch/include",
    ]
    unit = join_sources(sorted((RECIPE / "csrc").glob("*.cpp")), tmp_path / "cuda_ops.cpp")
    style = f"--config-file={RECIPE / '.clang-tidy'}"
    words = ["clang-tidy", "--quiet", style, f"--checks={left_out}", str(unit), "--", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"CUDA_HOME": "/nowhere"}, "nvcc was not found"),
        ({"CUDA_OPS_TORCH_INCLUDE": "/nowhere"}, "torch's headers were not found"),
        ({"CUDA_OPS_ARCHITECTURES": "Hopper"}, "CUDA_OPS_ARCHITECTURES is invalid"),
        ({"CUDA_OPS_ARCHITECTURES": ""}, "CUDA_OPS_ARCHITECTURES is invalid"),
    ],
    ids=["toolkit", "headers", "unknown GPU", "no GPU"],
)
def test_setup_reports_missing_requirements(
    config: Config, environment: Mapping[str, str], tmp_path: Path, variables: dict[str, str], found: str
) -> None:
    home = tmp_path / "cuda"
    for name in ("bin/nvcc", "lib/libcudart_static.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    include = tmp_path / "torch" / "torch/csrc/stable"
    include.mkdir(parents=True)
    (include / "library.h").touch()
    given = {"CUDA_HOME": str(home), "CUDA_OPS_TORCH_INCLUDE": str(tmp_path / "torch"), "CUDA_OPS_ARCHITECTURES": "90"}
    words = ["setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    done = subprocess.run(
        [native.interpreter(config), *words],
        cwd=RECIPE,
        env={**os.environ, **environment, **given, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    for part in ("expected:", "found:", "fix:", found):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


# Tests without a build.


def test_cuda_timing_requires_the_wheel(tmp_path: Path) -> None:
    bare = load_config({"build": {"folder": str(tmp_path)}, "cuda": {"python": sys.executable}})
    with pytest.raises(ArtefactMissing, match="cannot import"):
        timing.measure(bare, op="add2")


def test_cuda_timing_names_the_setting_of_a_missing_interpreter(tmp_path: Path) -> None:
    bare = load_config({"build": {"folder": str(tmp_path)}, "cuda": {"python": "/no/such/venv/bin/python"}})
    with pytest.raises(ProgramMissing, match=r"/no/such/venv/bin/python is needed .*cuda\.python"):
        timing.measure(bare, op="add2")


@pytest.mark.parametrize(
    ("given", "used"),
    [("python9", "python9"), ("./python9", f"{ROOT}/python9"), ("venv/python9", f"{ROOT}/venv/python9")],
)
def test_cuda_python_without_a_folder_is_on_the_path(tmp_path: Path, given: str, used: str) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}, "cuda": {"python": given}})
    with pytest.raises(ProgramMissing, match=rf"the program {used} is needed .*cuda\.python") as caught:
        timing.measure(config, op="add2")
    assert caught.value.expected == ("python9 on the PATH" if given == used else "an executable program")


@pytest.mark.parametrize("version", ["2.9.1", "newest", "2.10", "2.10.0; x"])
def test_an_unsupported_torch_version_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(WheelUnusable, match="does not support torch"):
        native.other_torch(load_config({"build": {"folder": str(tmp_path / "b")}}), version)
    assert not (tmp_path / "b").exists()


def test_a_wheel_for_a_machine_without_cuda_is_refused() -> None:
    with pytest.raises(PlatformMismatch, match="CUDA is not available for armhf"):
        cuda_job.target_of("armhf")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "at least one architecture"),
        (["90", "90+PTX"], "each architecture once"),
        (["9.0"], "without its point"),
        (["sm_90"], "without its point"),
    ],
)
def test_the_list_of_gpus_is_checked(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"cuda": {"architectures": given}})


def fatbin(*entries: tuple[int, int]) -> bytes:
    """Make a fat binary in nvcc's format, whose entries consist of a header and eight zero bytes."""
    body = b"".join(struct.pack("<HHIQQII", kind, 0x101, 32, 8, 0, 0, arch) + bytes(8) for kind, arch in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_gpu_code_is_found_in_all_containers() -> None:
    data = fatbin((2, 75), (2, 90), (1, 90)) + bytes(16) + fatbin((2, 80))
    assert list(audit.gpu_code(data)) == [(2, "75"), (2, "90"), (1, "90"), (2, "80")]
    assert list(audit.gpu_code(b"")) == []


@pytest.mark.parametrize("spoil", [lambda data: b"\1" + data[1:], lambda data: data[:-8]], ids=["magic", "cut"])
def test_gpu_code_of_another_layout_is_refused(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(WheelUnusable, match="cannot be read"):
        list(audit.gpu_code(spoil(fatbin((2, 75)))))


def test_a_wheel_without_the_library_is_refused(tmp_path: Path) -> None:
    made = make_wheel(tmp_path, {"cuda_ops/__init__.py": ""}, name="pitorch_cuda_ops", tag="py3-none-linux_x86_64")
    with pytest.raises(WheelUnusable) as caught:
        audit.audit(made, AMD64, ("90",))
    assert caught.value.found == "none"


def test_a_wheel_for_one_python_is_refused(tmp_path: Path) -> None:
    library = {audit.LIBRARY: elf(EM_X86_64, bits=64)}
    made = make_wheel(tmp_path, library, name="pitorch_cuda_ops", tag="cp313-cp313-linux_x86_64")
    with pytest.raises(WheelUnusable, match="does not match the requested wheel") as caught:
        audit.audit(made, AMD64, ("90",))
    assert "py3-none-linux_x86_64" in caught.value.expected


def test_a_library_for_another_machine_is_refused(tmp_path: Path) -> None:
    library = {audit.LIBRARY: elf(EM_AARCH64, bits=64)}
    made = make_wheel(tmp_path, library, name="pitorch_cuda_ops", tag="py3-none-linux_x86_64")
    with pytest.raises(PlatformMismatch):
        audit.audit(made, AMD64, ("90",))


def test_an_incomplete_toolkit_is_refused(tmp_path: Path) -> None:
    named = load_config({"cuda": {"toolkit": str(tmp_path)}})
    with pytest.raises(UserError) as caught:
        toolkit.obtain(recipe.load("cuda_ops"), named, AMD64)
    assert "bin/nvcc" in caught.value.found
    assert caught.value.exit_code == 10


def test_a_toolkit_of_another_release_is_refused(tmp_path: Path) -> None:
    for name in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/cuda_bf16.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
        (tmp_path / name).chmod(0o755)
    assert toolkit.fault_of(recipe.load("cuda_ops"), tmp_path) == "release 11.8"
    assert toolkit.release_of(tmp_path) == "11.8"


# Recorded measurements of a GPU.


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Load the timing tool without its package, which needs torch."""
    spec = importlib.util.spec_from_file_location("cuda_timing_tool", RECIPE / "src" / "cuda_ops" / "timing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measured() -> dict[str, object]:
    document: dict[str, object] = json.loads(figures.DATA.read_text())["timing"]["cuda_timing"]
    return document


def test_a_timing_survives_a_json_round_trip(tool: ModuleType) -> None:
    timed = tool.Timing.from_json(measured())
    assert json.loads(json.dumps(timed.as_json())) == measured()
    assert [(item.before, item.after) for item in timed.regimes] == list(tool.REGIMES)


def test_the_sentence_matches_the_figures(tool: ModuleType) -> None:
    timed = tool.Timing.from_json(measured())
    short = timed.sentence()
    assert f"The kernel takes {timed.kernel_us:.1f} µs" in short
    assert "shorter than a launch" in short
    slow = tuple(
        dataclasses.replace(item, samples_us=(5000.0, *item.samples_us[1:])) if item.name == "none / sync" else item
        for item in timed.regimes
    )
    long = dataclasses.replace(timed, regimes=slow).sentence()
    assert "5000.0 µs, which include the calls that were queued earlier" in long


def test_the_plot_is_drawn(tool: ModuleType, tmp_path: Path) -> None:
    picture = tmp_path / "timing.png"
    tool.plot(tool.Timing.from_json(measured()), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_task_plots_a_saved_timing(tmp_path: Path) -> None:
    saved, picture = tmp_path / "timing.json", tmp_path / "timing.png"
    saved.write_text(json.dumps(measured()))
    timing.draw(saved, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_plot_is_missing(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = tool.Timing.from_json(measured())
    monkeypatch.setattr(tool, "measure", lambda *_, **__: timed)
    monkeypatch.setitem(
        sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["--op=math.hypot", f"--json={tmp_path / 'timing.json'}", f"--plot={tmp_path / 'timing.png'}"]
    assert tool.main(words) == 0
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out
    assert json.loads((tmp_path / "timing.json").read_text()) == measured()
    assert not (tmp_path / "timing.png").exists()


@pytest.mark.parametrize(
    ("op", "dimensions"),
    [
        ("add2", [1, 1]),
        ("exp", [1]),
        ("axpy", [None, 1, 1]),
        ("softmax", [2]),
        ("matvec", [2, 1]),
        ("torch.add", [1, 1]),
    ],
)
def test_every_operation_has_default_inputs(tool: ModuleType, op: str, dimensions: list[int | None]) -> None:
    inputs = tool.inputs_of(op)
    assert [len(tool.parse_input(text)[1]) if "[" in text else None for text in inputs] == dimensions
    assert tool.inputs_of(f"cuda_ops.{op}") == inputs
    assert tool.inputs_of(op, ["f16[3]"]) == ["f16[3]"]


@pytest.mark.parametrize(
    ("architecture", "check", "torch", "fault"),
    [
        ("armhf", True, [], PlatformMismatch),
        ("armhf", False, ["2.10.0"], PlatformMismatch),
        ("amd64", False, ["2.9.1"], WheelUnusable),
        ("amd64", True, ["nightly"], WheelUnusable),
    ],
)
def test_an_impossible_check_is_refused_before_the_build(
    architecture: str, check: bool, torch: list[str], fault: type[UserError]
) -> None:
    with pytest.raises(fault):
        native.require_checkable(architecture, check=check, torch=torch)


def test_the_recorded_trace_has_all_twenty_kernels(tool: ModuleType) -> None:
    kernels = tool.kernels_of(figures.TRACE)
    (name,) = kernels
    assert "cuda_ops::cuda::(anonymous namespace)::dense_kernel<float, 2" in name
    assert len(kernels[name]) == 20
    events = json.loads(figures.TRACE.read_text())["traceEvents"]
    regions = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert regions == [f"{before} / {after}" for before, after in tool.REGIMES]
    launched = {event["args"]["correlation"] for event in events if event.get("cat") == "cuda_runtime"}
    assert {event["args"]["correlation"] for event in events if event.get("cat") == "kernel"} <= launched


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "nsys is not installed, so there is no report"),
        (
            'for word; do case $word in --output=*) : >"${word#--output=}.nsys-rep";; esac; done',
            "nsys report: {report}",
        ),
        ("echo no such driver >&2; exit 1", "nsys did not write a report: no such driver"),
        ("exec sleep 30", "nsys did not write a report within 0.2 s"),
    ],
    ids=["absent", "works", "fails", "hangs"],
)
def test_the_result_of_nsys_is_reported(
    tool: ModuleType, script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script replaces nsys. An earlier run's report must not be mistaken for a new one."""
    report = tmp_path / "cuda-timing.nsys-rep"
    if script:
        program = tmp_path / "bin" / "nsys"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        report.write_text("of an earlier run")
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        monkeypatch.setattr(tool, "_NSYS_LIMIT_S", 0.2 if "sleep" in script else 30)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.nsys_record(["--op=add2"], tmp_path) == said.format(report=report)


@pytest.mark.parametrize(("text", "meaning"), [("f32[7]", ("float32", (7,))), ("bf16[2,3]", ("bfloat16", (2, 3)))])
def test_inputs_are_parsed_as_types_with_sizes(
    tool: ModuleType, text: str, meaning: tuple[str, tuple[int, ...]]
) -> None:
    assert tool.parse_input(text) == meaning


@pytest.mark.parametrize("text", ["", "f32", "f33[4]", "f32[]", "f32[-1]", "f64[3]", "f32[3] "])
def test_invalid_inputs_are_refused(tool: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="expected TYPE"):
        tool.parse_input(text)


def test_an_unknown_operation_is_refused(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"there is no operation 'nothing\.at_all'"):
        tool.find_operation("nothing.at_all")


def test_the_page_shows_the_recorded_figures() -> None:
    document = json.loads(figures.DATA.read_text())
    page = figures.PAGE.read_text()
    assert figures.page_with(page, document) == page, "run: python -m benchmarks.cuda.figures"
    assert document["tests"]["failures"] == document["tests"]["errors"] == 0
    assert all(item["status"] == 0 for item in document["sanitizer"].values())


def test_the_figures_list_skipped_and_sanitized_tests() -> None:
    document = json.loads(figures.DATA.read_text())
    skips = [f"SKIPPED [{count}] tests/a.py:1{count}: no {what}" for count, what in ((2, "GPU: none"), (3, "toolkit"))]
    watched = {"memcheck": {"summary": "ERROR SUMMARY: 0 errors", "tests": "1 failed, 7 passed, 12 deselected in 2s"}}
    counts = {"tests": 20, "skipped": 5, "skips": skips}
    text = " ".join(figures.render({**document, "tests": counts, "sanitizer": watched}).split())
    assert "Tests: 15 passed, 5 skipped (2: no GPU: none; 3: no toolkit). " in text
    assert (
        "a selection of the tests (`SANITIZED` in `on_gpu.py`): memcheck checked 8 of 20 tests (error summary: 0"
        in text
    )
    text = " ".join(figures.render({**document, "tests": {**counts, "skipped": 0, "skips": []}}).split())
    assert "20 passed, 0 skipped. compute" in text
