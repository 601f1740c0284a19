"""Tests of pitorch.qpu on this PC, where machine code runs on the emulator."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from native_parts import LIBQPU_OPTIONS

from recipes.libqpu import native
from toolchain.config import ROOT, Config
from toolchain.process import run

SOURCE = ROOT / "libqpu"
TOOLS = ("qpu-calibrate", "qpu-info", "qpu-objdump", "qpu-selftest")
ROWS = """
mov r0, uniform
add r0, r0, uniform           # the sum of two uniforms
mov r1, uniform               # the address of the result
ldi r2, 0x1a00
mov r3, uniform               # the number of its VPM row
add vpm_wr_setup, r2, r3
mov vpm, r0
ldi r2, 0x80904000
shl r3, r3, 7
add vpm_wr_setup, r2, r3
mov vpm_st_addr, r1
nop; read vpm_st_wait
nop; thrend
nop
nop
"""


@pytest.fixture(scope="module")
def tree(product_config: Config) -> Path:
    """Compile libqpu and a program that saves a kernel, in the folder of the C++ tests."""
    for program in ("cmake", "ninja", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing; ./inv installs it")
    return native.build(product_config, "qpu", "user-save", options=LIBQPU_OPTIONS)


@pytest.fixture
def qpu(tree: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the module with the library that was just built."""
    monkeypatch.setenv("QPU_LIBRARY", str(tree / "libqpu.so"))
    monkeypatch.setenv("QPU_CACHE", "off")
    monkeypatch.delenv("QPU_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(SOURCE / "python"))
    return importlib.import_module("pitorch.qpu")


@pytest.fixture
def axpy(tree: Path, tmp_path: Path) -> Path:
    """Return a kernel that the C++ program saved: y = factor * x + y."""
    path = tmp_path / "axpy.qpuo"
    run([tree / "tests" / "user-save", path])
    return path


def test_a_saved_kernel_runs_on_arrays(qpu: ModuleType, axpy: Path) -> None:
    kernel = qpu.Program.open(axpy)
    assert kernel.name == "axpy"
    assert kernel.parameters == 4
    assert kernel.uses_sfu is False
    assert kernel.cycles() is None
    x, y = qpu.Buffer.of(numpy.arange(320.0)), qpu.Buffer(320)
    y.array[:] = 1
    for qpus in (1, 12):
        kernel.run(320, 0.5, x, y, qpus=qpus)
    assert (y.read() == numpy.arange(320) + 1).all()
    assert (y.array == y.read()).all()


def test_cycles_and_listing_of_a_run(qpu: ModuleType, axpy: Path) -> None:
    kernel = qpu.Program.open(axpy)
    assert "not measured" not in kernel.listing()
    kernel.profile()
    x, y = qpu.Buffer(64), qpu.Buffer(64)
    kernel.run(64, 2.0, x, y, qpus=2)
    cycles = kernel.cycles()
    assert cycles.memory_write_bytes == 256
    assert cycles.instructions > 20
    assert 0 < cycles.seconds < 1e-3
    assert cycles.board
    assert cycles.launches == 1
    assert 0 < cycles.registers_launch_seconds < cycles.mailbox_launch_seconds < 1e-3
    listing = kernel.listing()
    assert "not measured on hardware" in listing
    assert str(cycles.clocks) in listing


def test_assembly_runs_with_uniforms_of_each_qpu(qpu: ModuleType) -> None:
    program = qpu.Program.assemble(ROWS, "rows")
    out = qpu.Buffer((3, 16), numpy.int32)
    program.run_raw([(-100, 7 * n, out.address + 64 * n, n) for n in range(3)])
    assert out.array.tolist() == [[-100 + 7 * n] * 16 for n in range(3)]


def test_words_survive_a_round_trip(qpu: ModuleType, tmp_path: Path) -> None:
    words = qpu.assemble(ROWS)
    assert words.dtype == numpy.uint64
    assert words.size == 15
    lines = qpu.disassemble(words).splitlines()
    assert len(lines) == 15
    assert (qpu.assemble("\n".join(line.split(maxsplit=2)[2] for line in lines)) == words).all()
    odd = numpy.array([0x10024821019E7293, 0x100009E7000C3000, 2**64 - 1], dtype=numpy.uint64)
    lines = qpu.disassemble(odd).splitlines()
    assert "nop; with raddr_a=3, raddr_b=3" in lines[1]
    assert (qpu.assemble("\n".join(line.split(maxsplit=2)[2] for line in lines)) == odd).all()
    program = qpu.Program.from_words(words)
    program.save(tmp_path / "rows")
    assert (qpu.Program.open(tmp_path / "rows").words == words).all()


def _checksum(data: bytes) -> int:
    """Compute 64-bit FNV-1a, as src/code/serialise.hpp does for saved kernels."""
    value = 0xCBF29CE484222325
    for byte in data[:16] + data[24:]:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_a_damaged_kernel_is_refused(qpu: ModuleType, axpy: Path) -> None:
    saved = axpy.read_bytes()
    at = saved.index(b"axpy")
    for name in (b"axp\x00", b"axp\xff"):  # the second kernel gets a valid checksum
        damaged = bytearray(saved[:at] + name + saved[at + 4 :])
        if name.endswith(b"\xff"):
            damaged[16:24] = _checksum(bytes(damaged)).to_bytes(8, "little")
        axpy.write_bytes(damaged)
        with pytest.raises(qpu.QpuError, match="is damaged or was saved by another version of libqpu") as fault:
            qpu.Program.open(axpy)
        assert fault.value.kind == "ArgumentError"
    axpy.write_bytes(saved)
    assert "axpy" in qpu.Program.open(axpy).listing()


def test_paths_in_another_encoding_are_reported(qpu: ModuleType, axpy: Path) -> None:
    words = os.fsencode(axpy.parent) + b"/M\xfcller.bin"
    Path(os.fsdecode(words)).write_bytes(qpu.assemble("nop\n").tobytes())
    assert "\ufffdller.bin: 1 instruction" in qpu.Program.open(os.fsdecode(words)).listing()
    with pytest.raises(qpu.QpuError, match=r"cannot open .*ller\.none"):
        qpu.Program.open(os.fsdecode(words[:-3] + b"none"))


def test_views_outlive_their_buffer(qpu: ModuleType) -> None:
    view = qpu.Buffer.of(numpy.arange(1000, dtype=numpy.int32)).array
    others = [qpu.Buffer(1000) for _ in range(20)]
    for other in others:
        other.write(7)
    assert (view == numpy.arange(1000)).all()


def test_misuse_is_reported(qpu: ModuleType, axpy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = qpu.Program.open(axpy)
    x = qpu.Buffer(16)
    with pytest.raises(qpu.QpuError, match="takes 4 arguments, found 2") as fault:
        kernel.run(16, x)
    assert fault.value.kind == "ArgumentError"
    with pytest.raises(qpu.QpuError, match=r"must be 1\.\.12"):
        kernel.run(16, 1.0, x, x, qpus=13)
    with pytest.raises(qpu.QpuError, match="outside of every SharedArray") as outside:
        kernel.run(1 << 20, 1.0, x, x)
    assert outside.value.kind == "BoundsError"
    with pytest.raises(TypeError, match="found str"):
        kernel.run(16, "1.0", x, x)
    with pytest.raises(OverflowError, match="32 bits"):
        kernel.run(1 << 32, 1.0, x, x)
    with pytest.raises(TypeError, match="4 bytes"):
        qpu.Buffer(16, numpy.float64)
    with pytest.raises(qpu.QpuError, match="must be at least 1"):
        qpu.Buffer(0)
    with pytest.raises(ValueError, match="broadcast"):
        x.write(numpy.zeros(17))
    with pytest.raises(qpu.QpuError, match="cannot open"):
        qpu.Program.open(tmp_path / "none")
    with pytest.raises(qpu.QpuError, match="line 2"):
        qpu.assemble("nop\nfrobnicate r0\n")
    with pytest.raises(ValueError, match="same number"):
        kernel.run_raw([(1,), (1, 2)])
    monkeypatch.setenv("QPU_BACKEND", "interpreter")
    with pytest.raises(qpu.QpuError, match="not machine code") as wrong:
        kernel.run(16, 1.0, x, x)
    assert wrong.value.kind == "BackendError"


def test_backend_and_machine(qpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert qpu.version().count(".") == 2
    assert qpu.backend().name == "interpreter"
    found = qpu.machine()
    assert [item["name"] for item in found["backends"]] == ["vc4-registers", "vc4-mailbox", "interpreter", "emulator"]
    monkeypatch.setenv("QPU_BACKEND", "abacus")
    with pytest.raises(qpu.QpuError, match="abacus"):
        qpu.backend()


def test_an_invalid_library_is_reported(tree: Path) -> None:
    code = "from pitorch import qpu\ntry:\n    qpu.version()\nexcept qpu.QpuError as fault:\n    print(fault)\n"
    for library, text in (("/no/such/libqpu.so", "QPU_LIBRARY"), ("libm.so.6", "has no qpu_version")):
        environment = {**os.environ, "QPU_LIBRARY": library, "PYTHONPATH": str(SOURCE / "python")}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert text in done.stdout


def test_qpu_info_reports_the_same(qpu: ModuleType, tree: Path) -> None:
    run(["cmake", "--build", tree, "--target", "qpu-info"], limit_s=600)
    said = json.loads(subprocess.run([tree / "tools" / "qpu-info", "--json"], check=True, capture_output=True).stdout)
    assert said["backends"] == qpu.machine()["backends"]


def test_the_documented_parameters_are_those_of_the_model(tree: Path) -> None:
    run(["cmake", "--build", tree, "--target", "qpu-calibrate"], limit_s=900)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QPU_")}
    command = [str(tree / "tools" / "qpu-calibrate"), "--parameters"]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    documented = (ROOT / "docs" / "model.md").read_text().split("```text\n$ qpu-calibrate --parameters\n")[1]
    assert documented.split("```")[0] == printed


def test_the_installed_tree_serves_c_by_pkg_config_and_python(tree: Path, axpy: Path, tmp_path: Path) -> None:
    program = shutil.which("pkg-config")
    if program is None:
        pytest.skip("the program pkg-config is missing (package pkgconf)")
    run(["cmake", "--build", tree, "--target", *TOOLS], limit_s=900)
    prefix = tmp_path / "moved"
    run(["cmake", "--install", tree, "--prefix", tmp_path / "opt"])
    (tmp_path / "opt").rename(prefix)
    library = next(prefix.glob("lib*/**/libqpu.so.1")).parent
    environment = {**os.environ, "PKG_CONFIG_PATH": str(library / "pkgconfig"), "QPU_CACHE": "off"}
    asked = [program, "--cflags", "--libs", "qpu"]
    flags = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout.split()
    source, made = SOURCE / "tests" / "user" / "c_program.c", tmp_path / "c_program"
    run(["gcc", "-std=c99", source, *flags, f"-Wl,-rpath,{library}", "-o", made])
    assert subprocess.run([made, tmp_path], env=environment, check=False).returncode == 0
    tools = [[str(prefix / "bin" / name), "--version"] for name in ("qpu-calibrate", "qpu-info", "qpu-objdump")]
    assert len({subprocess.run(tool, check=True, capture_output=True).stdout for tool in tools}) == 1

    code = f"from pitorch import qpu; print(qpu.Program.open({str(axpy)!r}).name, qpu.__file__)"
    environment |= {"PYTHONPATH": str(library / "python"), "QPU_LIBRARY": str(library / "libqpu.so.1")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    name, file = done.stdout.split()
    assert name == "axpy"
    assert Path(file).is_relative_to(library)


def test_readme_example_builds_with_installed_library(tree: Path, tmp_path: Path) -> None:
    readme = (SOURCE / "README.md").read_text()
    for language, name in (("cpp", "scale.cpp"), ("cmake", "CMakeLists.txt")):
        (tmp_path / name).write_text(readme.split(f"```{language}\n")[1].split("```")[0])
    run(["cmake", "--build", tree, "--target", *TOOLS], limit_s=900)
    prefix, built = tmp_path / "prefix", tmp_path / "build"
    run(["cmake", "--install", tree, "--prefix", prefix])
    run(["cmake", "-S", tmp_path, "-B", built, f"-DCMAKE_PREFIX_PATH={prefix}"])
    run(["cmake", "--build", built])
    environment = {**os.environ, "QPU_BACKEND": "interpreter"}
    done = subprocess.run([built / "scale"], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "50\n"

    program = shutil.which("pkg-config")
    if program is None:
        pytest.skip("the program pkg-config is missing (package pkgconf)")
    library = next(prefix.glob("lib*/**/libqpu.so.1")).parent
    environment["PKG_CONFIG_PATH"] = str(library / "pkgconfig")
    command = [program, "--cflags", "--libs", "qpu"]
    flags = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    made = tmp_path / "scale"
    run(["g++", tmp_path / "scale.cpp", *flags, f"-Wl,-rpath,{library}", "-o", made])
    done = subprocess.run([made], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "50\n"
