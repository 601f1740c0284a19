"""Tests that run libqpu's C++ tests on this PC, and clang-tidy on its sources."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from native_parts import CLANG_TIDY_LEFT_OUT, LIBQPU_OPTIONS, join_sources

from recipes import recipe
from recipes.libqpu import native
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import CommandFailed
from toolchain.jobs import compile_jobs
from toolchain.process import run

SOURCE = ROOT / "libqpu"
FUZZ_RUNS = {"fuzz-isa": 50_000, "fuzz-assemble": 1_000_000, "fuzz-object": 1_000_000, "fuzz-kernel": 2000}
"""The number of inputs for each fuzz target. fuzz-kernel compiles and emulates about ten kernels per second."""
TIDY_UNITS = (
    (
        *(f"src/compiler/{part}" for part in ("fold", "ir_*", "lower*", "optimise*", "select*")),
        "src/emu/machine",
        "src/kernels/matmul",
        "tools/calibrate/*",
    ),
    ("src/isa/*", "src/compiler/*", "src/kernels/matmul_shared", "tools/objdump/*"),
    ("src/kernels/*", "tools/selftest"),
    ("src/**/*", "tools/info"),
)
"""The sources that clang-tidy checks as one file. A source belongs to the first unit that has a pattern for it.

The sources in a unit must not define a name twice, even in anonymous namespaces. The headers of the kernel language
define macros, so they must come after other headers."""


@pytest.fixture(scope="module")
def tree(product_config: Config) -> Path:
    """Build libqpu and its tests; return the build folder. Later runs reuse this folder and compile only changes."""
    for program in ("cmake", "ninja", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing; ./inv installs it")
    return native.build(product_config, "all", options=LIBQPU_OPTIONS)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Replace libqpu with a small library of two sources; return a function that builds it and returns the answer."""
    for program in ("cmake", "ninja", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing; ./inv installs it")
    folder, data = tmp_path / "sources", recipe.load("libqpu")
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(small CXX)\nadd_library(small SHARED one.cpp two.cpp)\n"
    )
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (folder / "two.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(recipe, "load", lambda _: replace(data, sources=folder))
    config = load_config({"build": {"folder": f"{folder}/../build"}})

    def build() -> str:
        time.sleep(0.02)  # longer than the resolution of the files' time stamps
        tree = native.build(config, "small")
        time.sleep(0.02)
        code = f"import ctypes; print(ctypes.CDLL('{tree}/libsmall.so').one())"
        return run([sys.executable, "-c", code]).output.strip()

    return build


def compiled_at(tmp_path: Path) -> int:
    return (tmp_path / "build/libqpu-native/CMakeFiles/small.dir/two.cpp.o").stat().st_mtime_ns


def test_a_restored_older_source_is_compiled(library: Callable[[], str], tmp_path: Path) -> None:
    source, backup = tmp_path / "sources/one.cpp", tmp_path / "one.orig"
    shutil.copy2(source, backup)
    assert library() == "1"
    source.write_text('extern "C" int one() { return 11; }\n')
    assert library() == "11"
    backup.rename(source)
    assert library() == "1"
    shutil.copytree(source.parent, tmp_path / "other")
    (tmp_path / "other/one.cpp").write_text('extern "C" int one() { return 12; }\n')
    assert library() == "1"
    source.parent.rename(tmp_path / "sources.orig")
    (tmp_path / "other").rename(source.parent)
    assert library() == "12"


def test_an_edited_source_is_compiled_alone(library: Callable[[], str], tmp_path: Path) -> None:
    source = tmp_path / "sources/one.cpp"
    assert library() == "1"
    before = compiled_at(tmp_path)
    source.write_text("an error\n")
    with pytest.raises(CommandFailed):
        library()
    with pytest.raises(CommandFailed):
        library()
    source.write_text('extern "C" int one() { return 11; }\n')
    assert library() == "11"
    assert compiled_at(tmp_path) == before


def test_two_checkouts_can_share_a_build_folder(
    library: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library() == "1"
    other = shutil.copytree(tmp_path / "sources", tmp_path / "other")
    (other / "one.cpp").write_text('extern "C" int one() { return 11; }\n')
    first = recipe.load("libqpu")
    second = replace(first, sources=other)
    for load, answer in ((lambda _: second, "11"), (lambda _: first, "1")):
        monkeypatch.setattr(recipe, "load", load)
        assert library() == answer
        before = compiled_at(tmp_path)
        assert library() == answer
        assert compiled_at(tmp_path) == before


@pytest.mark.timeout(1200)
def test_the_cpp_tests_pass(tree: Path) -> None:
    done = run(["ctest", "--test-dir", tree, "--output-on-failure", "--no-tests=error"], limit_s=1000)
    assert "100% tests passed" in done.output
    assert "0 tests failed" in done.output


def configured(architecture: str, folder: Path) -> dict[str, str]:
    """Configure libqpu for a target; return the compiler's command line for each source."""
    target = ARCHITECTURES[architecture]
    compiler = f"{target.gnu}-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"the program {compiler} is missing; ./inv installs it")
    settings = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": target.qemu, "CXX_COMPILER": compiler}
    options = [f"-DCMAKE_{name}={value}" for name, value in settings.items()]
    run(["cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", *options], limit_s=300)
    return {item["file"]: item["command"] for item in json.loads((folder / "compile_commands.json").read_text())}


@pytest.mark.parametrize(("architecture", "is_strict"), [("armhf", False), ("arm64", True)])
def test_gpu_memory_accesses_are_aligned_on_64_bits(architecture: str, is_strict: bool, tmp_path: Path) -> None:
    """On a 64-bit CPU, GPU memory is device memory, which faults on unaligned accesses (docs/libqpu.md)."""
    commands = configured(architecture, tmp_path)
    for part in ("unity_runtime", "unity_kernels"):
        (command,) = [command for file, command in commands.items() if part in file]
        assert ("-mstrict-align" in command) == is_strict
    assert ("-mstrict-align" in (tmp_path / "qpu.pc").read_text()) == is_strict


@pytest.mark.timeout(900)
def test_the_hardware_backends_compile_for_64_bit_boards(tmp_path: Path) -> None:
    (command,) = [command for file, command in configured("arm64", tmp_path).items() if "unity_runtime" in file]
    words = shlex.split(command)
    product = words[words.index("-o") + 1]
    run(["ninja", "-C", tmp_path, product], limit_s=800)
    with (tmp_path / product).open("rb") as stream:
        assert ELFFile(stream)["e_machine"] == "EM_AARCH64"


@pytest.mark.expensive
@pytest.mark.timeout(7200)
def test_ten_thousand_kernels_with_many_live_vectors(tree: Path) -> None:
    at_once = 500

    def check(first: int) -> str:
        variables = {"QPU_FUZZ_FIRST": str(first), "QPU_FUZZ_KERNELS": str(at_once), "QPU_CACHE": "off"}
        done = run([tree / "tests" / "test-pressure"], env=variables, check=False, limit_s=3600)
        return "" if done.returncode == 0 and f"{at_once} kernels" in done.output else done.output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [output for output in pool.map(check, range(0, 10_000, at_once)) if output]
    assert found == []


@pytest.fixture(scope="module")
def fuzz_tree(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("clang++") is None:
        pytest.skip("the program clang++ is missing; ./inv installs it")
    tree = tmp_path_factory.mktemp("fuzz")
    options = ["-DCMAKE_CXX_COMPILER=clang++", "-DQPU_FUZZ=ON", "-DQPU_WARNINGS_AS_ERRORS=ON"]
    run(["cmake", "-S", SOURCE, "-B", tree, "-G", "Ninja", *options], limit_s=300)
    jobs = str(compile_jobs(product_config.build))
    run(["cmake", "--build", tree, "--parallel", jobs, "--target", *FUZZ_RUNS], limit_s=3600)
    return tree


@pytest.mark.expensive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", FUZZ_RUNS)
def test_fuzzing_finds_no_fault(fuzz_tree: Path, target: str, tmp_path: Path) -> None:
    # -len_control=0 allows inputs of the maximum length from the start.
    options = [f"-runs={FUZZ_RUNS[target]}", "-seed=1", "-max_len=400", "-len_control=0"]
    done = run([fuzz_tree / "fuzz" / target, *options, f"-artifact_prefix={tmp_path}/"], check=False, limit_s=3600)
    assert done.returncode == 0, done.output
    assert f"Done {FUZZ_RUNS[target]} runs" in done.output


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("left_out", CLANG_TIDY_LEFT_OUT)
def test_clang_tidy_finds_nothing(tree: Path, product_config: Config, tmp_path: Path, left_out: str) -> None:
    clang_tidy = shutil.which("clang-tidy")
    if clang_tidy is None:
        pytest.skip("the program clang-tidy is missing; ./inv installs it")
    # The tests' sources are left out, because they would take minutes.
    left = {path for part in ("src", "tools") for path in (SOURCE / part).rglob("*.cpp")}
    units = []
    for number, patterns in enumerate(TIDY_UNITS):
        sources = [path for pattern in patterns for path in sorted(SOURCE.glob(f"{pattern}.cpp")) if path in left]
        left.difference_update(sources)
        units.append(join_sources(sources, tmp_path / f"{number}.cpp"))
    assert left == set()
    commands = json.loads((tree / "compile_commands.json").read_text())
    (command,) = [shlex.split(item["command"]) for item in commands if "unity_runtime" in item["file"]]
    # The analyzer skips functions in headers by default.
    options = [*command[1 : command.index("-o")], f"-I{SOURCE}", "-Xclang", "-analyzer-opt-analyze-headers"]
    words = [clang_tidy, "--quiet", f"--config-file={SOURCE / '.clang-tidy'}", f"--checks={left_out}"]

    def check(unit: Path) -> str:
        done = run([*words, unit, "--", *options], check=False, limit_s=900)
        return "" if done.returncode == 0 else f"{unit} ended with {done.returncode}\n{done.output}"

    with ThreadPoolExecutor(compile_jobs(product_config.build)) as pool:
        found = [output for output in pool.map(check, units) if output]
    assert found == []
