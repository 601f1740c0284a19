"""Tests of QPU kernels with profile-remote in libqpu's emulator on this PC."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from remote_kernels import RIGHT, write

from device.remote import profiling
from device.remote.loader_session import Timing
from device.remote.profiling import Profile
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ResultMismatch, UserError

QUICK = Timing(number=1, repeat=2, min_repeat_ms=0, warm_up=0)

TWICE = """
#include "kernel.hpp"
#include <QPULib.h>

static void twice(Int n, Ptr<Float> in, Ptr<Float> out) {
  For (Int i = 0, i < n, i = i + 16)
    out[i] = in[i] * 2.0f;
  End
}

PITORCH_KERNEL(arrays) {
  static auto kernel = compile(twice);
  kernel(arrays.size(0), qpu::BusPointer<float>(arrays.floats(0)), qpu::BusPointer<float>(arrays.floats(1)));
  return kernel.cycles().seconds();
}
"""


@pytest.fixture(scope="module", autouse=True)
def compilers() -> None:
    for program in ("cmake", "ninja", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing; ./inv installs it")


def run(config: Config, kernel: str, size: int = 0) -> Profile:
    return profiling.profile(config, kernel=kernel, target="qpu", size=size, timing=QUICK)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kernel", "sizes"), [("add_one", (1, 17, 0, 16384)), ("gemm", (5, 32, 96))])
def test_qpu_kernel_is_checked_and_timed(product_config: Config, kernel: str, sizes: Sequence[int]) -> None:
    """The model's time grows with the work: the last two sizes are large, and differ greatly."""
    times = []
    for size in sizes:
        done = run(product_config, kernel, size)
        assert done.checked == (size or 1024) ** (2 if kernel == "gemm" else 1)
        assert "emulator" in done.backend
        rows = dict(done.rows())
        assert rows["note"] == "timed under emulation; not measured on hardware"
        assert rows["model"].endswith(" GFLOPS: estimate of the emulator's cycle model")
        assert done.model_s is not None
        times.append(done.model_s)
    assert times[-1] > 2 * times[-2]


def test_model_clock_counts_runs_since_its_creation(product_config: Config, tmp_path: Path) -> None:
    """The model's clock must be correct in every run, because the session runs the kernel again to time it."""
    path = write(tmp_path)
    once = TWICE[TWICE.index("  kernel(") : TWICE.index("  return")]
    counted = f"""  const pitorch::ModelClock clock;
{once}  const double first = kernel.cycles().seconds();
{once}  const double both = first + kernel.cycles().seconds();
  if (std::abs(clock.seconds() - both) > 1e-9) throw std::runtime_error("the clock and the kernel disagree");
  return clock.seconds();"""
    text = TWICE.replace(f"{once}  return kernel.cycles().seconds();", counted)
    path.with_suffix(".cpp").write_text(f"#include <cmath>\n{text}")
    assert "ModelClock" in text
    assert (run(product_config, str(path)).model_s or 0) > 0


def test_interpreter_has_no_model(product_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPU_BACKEND", "interpreter")
    done = run(product_config, "gemm", 16)
    assert "interpreter" in done.backend
    assert done.model_s is None
    assert "model" not in dict(done.rows())


def test_user_kernel_on_the_qpus(product_config: Config, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_suffix(".cpp").write_text(TWICE)
    assert run(product_config, str(path)).checked == 96


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("twice(Int", "twice(Intt", "kernel.cpp:5"),
        ("return kernel.cycles", 'throw std::runtime_error("no\\nluck"); return kernel.cycles', "no luck"),
        ("arrays.floats(1)", "arrays.floats(7)", "the kernel has only 2 arrays"),
        ("kernel(arrays.size(0)", "kernel(1 << 20", "outside"),
    ],
)
def test_error_in_a_qpu_kernel_is_reported(
    product_config: Config, tmp_path: Path, old: str, new: str, found: str
) -> None:
    path = write(tmp_path)
    assert old in TWICE
    path.with_suffix(".cpp").write_text(TWICE.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        run(product_config, str(path))
    assert found in caught.value.found


def test_float64_arrays_are_refused(product_config: Config, tmp_path: Path) -> None:
    path = write(tmp_path, RIGHT, ("dtype=numpy.float32)", "dtype=numpy.float64)"))
    path.with_suffix(".cpp").write_text(TWICE)
    with pytest.raises(UserError) as caught:
        run(product_config, str(path))
    assert "QPUs compute with float32 only" in caught.value.found


def test_wrong_result_of_a_qpu_kernel_is_reported(product_config: Config, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_suffix(".cpp").write_text(TWICE.replace("i < n", "i < n - 16"))
    with pytest.raises(ResultMismatch, match=r"first at index \[80\]"):
        run(product_config, str(path))


def test_qpu_kernel_needs_a_cpp_file(product_config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(product_config, str(write(tmp_path)))
    assert caught.value.expected == "kernel.cpp next to kernel.py"


def test_qpu_kernel_for_a_board_needs_libqpu(product_config: Config, tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(product_config, build=replace(product_config.build, folder=tmp_path))
    with pytest.raises(ArtefactMissing) as caught:
        profiling.profile(config, kernel="add_one", target="qpu", device="ssh://root@127.0.0.1:9")
    assert caught.value.fix == "run ./inv build-image --only libqpu"
