"""Tests of the extension on this machine, built as a user would build it and tested with the device suite."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from native_checks import native_checks
from native_parts import CLANG_TIDY_LEFT_OUT, join_sources

from flow import native_environment as native
from flow.context import Context
from flow.steps import native_python
from recipes import recipe
from toolchain import process
from toolchain.config import ROOT, Config, load_config
from toolchain.manifest import Manifest

RECIPE = ROOT / "recipes" / "qpu_ops"
TRANSLATION_UNITS = {"aten.cpp", "aten_layers.cpp"}
"""Sources that only include other sources."""

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "ninja", "g++"))),
    reason="needs compilers: apt-get install cmake ninja-build g++",
)


@dataclass(frozen=True)
class NativeChecks:
    """The extension on this machine, and the results of its tests."""

    config: Config
    manifests: Mapping[str, Manifest]

    @property
    def python(self) -> Path:
        """The path of the environment's Python interpreter."""
        return native.python_of(self.config)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables for the interpreter."""
        return native.environment_of(self.config)

    @property
    def wheel(self) -> Path:
        """The extension wheel."""
        return self.manifests["native-qpu-ops"].artefact(".whl").path


@pytest.fixture(scope="module")
def checks(product_config: Config) -> NativeChecks:
    native_python.ready(product_config)
    pipeline = native_checks(Context(product_config))
    return NativeChecks(product_config, {item.step: item for item in pipeline.execute(pipeline.plan())})


def run(checks: NativeChecks, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checks.python, *words],
        env={**os.environ, **checks.environment, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_device_suite_passes_on_this_machine(checks: NativeChecks) -> None:
    suite, breadth = (checks.manifests[f"native-{name}"].facts for name in ("suite", "breadth"))
    assert suite["passed"] > 500
    assert breadth["passed"] > 120
    assert (suite["skipped"], breadth["skipped"]) == (0, 0)
    assert checks.manifests["native-qpu-ops"].facts["backend"] == "interpreter"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("left_out", CLANG_TIDY_LEFT_OUT)
def test_clang_tidy_finds_nothing(checks: NativeChecks, tmp_path: Path, left_out: str) -> None:
    clang_tidy = shutil.which("clang-tidy")
    if clang_tidy is None:
        pytest.skip("the program clang-tidy is missing; ./inv installs it")
    code = (
        "import pybind11, sysconfig, torch.utils.cpp_extension as e;"
        "print(*e.include_paths(), pybind11.get_include(), sysconfig.get_path('include'), sep='\\n')"
    )
    foreign = run(checks, "-c", code).stdout.split()
    libqpu = native.folder_of(checks.config) / "libqpu" / "include"
    # AT_PER_OPERATOR_HEADERS, as in setup.py: without it, torch's headers are a third larger.
    options = ["-std=c++20", "-O2", "-DAT_PER_OPERATOR_HEADERS", f"-I{libqpu}"]
    options += [f"-isystem{path}" for path in foreign]
    style = ROOT / "libqpu" / ".clang-tidy"
    device = RECIPE / "csrc" / "device"
    options += [f"-I{device.parent}", f"-I{device}"]

    # The sources must not define a name twice, even in anonymous namespaces.
    sources = sorted(path for path in (RECIPE / "csrc").rglob("*.cpp") if path.name not in TRANSLATION_UNITS)
    unit = join_sources(sources, tmp_path / "qpu_ops.cpp")
    words = [clang_tidy, "--quiet", f"--config-file={style}", f"--checks={left_out}", str(unit), "--", *options]
    done = process.run([*words, "-DTORCH_EXTENSION_NAME=_C"], check=False, limit_s=900)
    assert done.returncode == 0, done.output


def test_nothing_runs_again_when_nothing_changed(checks: NativeChecks) -> None:
    assert [item.reason for item in native_checks(Context(checks.config)).plan() if item.runs] == []


def test_the_wheel_contains_modules_and_links_libqpu(checks: NativeChecks, tmp_path: Path) -> None:
    with zipfile.ZipFile(checks.wheel) as wheel:
        names = wheel.namelist()
        assert {"dot_cpp.py", "matrix_cpp.py", "cpu_cpp.py", "qpu_ops/__init__.py", "qpu_ops/py.typed"} <= set(names)
        assert {"torch_qpu/__init__.py", "torch_qpu/fusion.py", "torch_qpu/_C.pyi", "torch_qpu/py.typed"} <= set(names)
        extensions = [name for name in names if name.endswith(".so")]
        assert sorted(name.split("/")[0] for name in extensions) == ["qpu_ops", "torch_qpu"]
        assert not [name for name in names if name.startswith(("csrc", "native", "setup"))]
        wheel.extractall(tmp_path, extensions)
    for extension in extensions:
        with (tmp_path / extension).open("rb") as stream:
            dynamic = ELFFile(stream).get_section_by_name(".dynamic")
            assert isinstance(dynamic, DynamicSection)
            tags = {(tag.entry.d_tag, getattr(tag, "needed", "")) for tag in dynamic.iter_tags()}
        assert ("DT_NEEDED", "libqpu.so.1") in tags
        assert not [tag for tag, _ in tags if tag in ("DT_RPATH", "DT_RUNPATH")]


def test_the_timing_table_states_that_it_is_a_model(checks: NativeChecks, tmp_path: Path) -> None:
    output = tmp_path / "timing.json"
    done = run(checks, str(ROOT / "tests/device/timing.py"), "--quick", "--repeats=2", f"--output={output}")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(output.read_text())
    assert [(row["width"], row["method"]) for row in document["rows"]] == [
        (width, method) for width in (1, 10, 100, 1000) for method in ("cpu", "torch", "qpu")
    ]
    for row in document["rows"]:
        assert 0 <= row["error_over_bound"] <= 1
        assert row["end_to_end_s"] > 0
        assert row["method"] == "torch" or 0 < row["compute_s"] <= row["end_to_end_s"]
    assert document["machine"]["qpu_measured_on_hardware"] is False
    assert "not measured on QPUs" in document["machine"]["qpu_label"]
    assert "not measured on QPUs" in done.stderr


def test_widths_beyond_the_time_budget_are_omitted(checks: NativeChecks) -> None:
    done = run(checks, str(ROOT / "tests/device/timing.py"), "--budget-s=0.05", "--repeats=1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    timed = {row["width"] for row in document["rows"]}
    left_out = {row["width"] for row in document["left_out"]}
    assert timed | left_out == {10**power for power in range(6)}
    assert 100000 in left_out
    assert all("would take" in row["reason"] for row in document["left_out"])


@pytest.mark.parametrize(
    ("prefix", "found"),
    [("/nowhere", "no header"), ("HEADER-ONLY", "no libqpu.so"), ("", "qpu")],
    ids=["no header", "no library", "neither prefix nor pkg-config"],
)
def test_a_missing_libqpu_is_reported_with_the_fix(
    checks: NativeChecks, tmp_path: Path, prefix: str, found: str
) -> None:
    if prefix == "HEADER-ONLY":
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "QPULib.h").touch()
        prefix = str(tmp_path)
    source = tmp_path / "source"
    shutil.copytree(RECIPE, source)
    done = subprocess.run(
        [checks.python, "setup.py", "bdist_wheel"],
        cwd=source,
        env={**os.environ, "LIBQPU_PREFIX": prefix, "PKG_CONFIG_LIBDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    for part in ("expected:", "found:", "fix:", found):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (source / "dist").exists()


@pytest.mark.parametrize("option", ["-mstrict-align", ""])
def test_extension_is_compiled_with_the_alignment_of_libqpu(checks: NativeChecks, tmp_path: Path, option: str) -> None:
    for name in ("include/QPULib.h", "lib/libqpu.so", "lib/pkgconfig/qpu.pc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lib/pkgconfig/qpu.pc").write_text(f"Cflags: -I${{includedir}} {option}\n")
    code = (
        "import runpy, setuptools\n"
        "setuptools.setup = lambda **given: print(*given['ext_modules'][0].extra_compile_args)\n"
        "runpy.run_path('setup.py')"
    )
    done = subprocess.run(
        [checks.python, "-c", code],
        cwd=RECIPE,
        env={**os.environ, **checks.environment, "LIBQPU_PREFIX": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ("-mstrict-align" in done.stdout.split()) == bool(option)


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="needs pkg-config: apt-get install pkgconf")
def test_libqpu_is_found_by_pkg_config_too(checks: NativeChecks, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(RECIPE, source)
    folder = checks.environment["LD_LIBRARY_PATH"]
    done = subprocess.run(
        [checks.python, "setup.py", "--version"],
        cwd=source,
        env={**os.environ, "LIBQPU_PREFIX": "", "PKG_CONFIG_LIBDIR": f"{folder}/pkgconfig"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0.1.0"


def test_torch_finds_the_device_without_an_import(checks: NativeChecks) -> None:
    done = run(checks, "-c", "import torch; print(torch.ones(3, device='qpu').sum().item(), torch.qpu.is_available())")
    assert (done.stdout, done.stderr) == ("3.0 True\n", "")


def test_the_bench_prints_a_model_of_the_qpus_times(checks: NativeChecks, tmp_path: Path) -> None:
    output, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = run(checks, "-m", "torch_qpu.bench", "--quick", f"--output={output}", f"--plot={chart}")
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text())
    assert document["machine"]["model"] is True
    assert "not measured on hardware" in document["machine"]["qpu_label"]
    assert "QPU (model)" in done.stdout
    assert {row["operator"] for row in document["rows"]} == {"mv", "mm", "add", "sigmoid", "sum", "softmax", "conv2d"}
    for row in document["rows"]:
        assert row["qpu_compute_s"] > 0
        assert 0 < row["share_low"] <= row["share_of_limit"] <= row["share_high"] <= 1
        assert row["share_low"] < row["share_high"]
        assert row["qpu_end_to_end_s"] is None
    steps = document["steps"]
    assert {row["optimizer"] for row in steps} == {"SGD", "Adam", "Adam(fused=True)", "AdamW"}
    for row in steps:
        assert row["fallbacks"] == 0
        assert 0 < row["of_optimizer"] < 10 < row["launches"] < 120
    assert "launches per training step" in done.stdout
    pattern = r"^\| (.+) \| `?([^ `]+)`?(?: with momentum)? \| [^|]+ \| (\d+) \| \d+ \| (\d+) \|$"
    documented = set(re.findall(pattern, (ROOT / "docs" / "device.md").read_text(), re.MULTILINE))
    assert {optimizer for _, optimizer, _, _ in documented} == {row["optimizer"] for row in steps}
    assert documented <= {
        (row["network"], row["optimizer"], str(row["launches"]), str(row["of_optimizer"])) for row in steps
    }
    assert ElementTree.fromstring(chart.read_text()).tag.endswith("svg")  # noqa: S314 (written just now)


@pytest.mark.expensive
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_full_size_network_trains_with_few_fallbacks(checks: NativeChecks, name: str) -> None:
    code = f"""
import functools, json, torch
from benchmarks.models.networks import {name} as make
from networks import images, train
torch.manual_seed(1)
data = images(4, 32)
optimizer = functools.partial(torch.optim.Adam, lr=0.001)
found, expected = (train(device, lambda: make(32)[0], data, optimizer, 1) for device in ("qpu", "cpu"))
print(json.dumps([found.losses, expected.losses, found.launches, found.fallbacks]))
"""
    done = run(checks, "-c", code, PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'native'}")
    assert done.returncode == 0, done.stderr
    losses, expected, launches, fallbacks = json.loads(done.stdout)
    assert losses == pytest.approx(expected, rel=5e-3)
    assert launches > 100
    assert sum(fallbacks.values()) <= 3, fallbacks


def test_an_import_without_libqpu_names_the_library(checks: NativeChecks) -> None:
    done = run(checks, "-c", "import dot_cpp", LD_LIBRARY_PATH="")
    assert done.returncode != 0
    assert "libqpu.so.1" in done.stderr


@pytest.mark.parametrize("changed", ["tools/info.cpp", "python/pitorch/qpu/__init__.py", "tutorial/new.cpp"])
def test_every_installed_file_rebuilds_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    def inputs() -> dict[str, dict[str, str]]:
        return {step.name: dict(step.inputs) for step in native_checks(Context(load_config({}))).steps}

    shutil.copytree(ROOT / "libqpu", tmp_path / "libqpu")
    shutil.copytree(ROOT / "recipes" / "libqpu", tmp_path / "recipes" / "libqpu")
    monkeypatch.setattr(recipe, "HERE", tmp_path / "recipes")
    before = inputs()
    with (tmp_path / "libqpu" / changed).open("a") as stream:
        stream.write("\n")
    assert [name for name, now in inputs().items() if now != before[name]] == ["native-libqpu"]
