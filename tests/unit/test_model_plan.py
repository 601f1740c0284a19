"""Tests of the tables in a model's plan, and of model names. TVM and PyTorch are not required."""

from __future__ import annotations

import dataclasses
import json

import numpy
import pytest

from device.remote import comparing, eager, model_plan, models, profiling
from device.remote.eager import Eager
from device.remote.model_plan import Plan, Tensor
from device.remote.models import ModelProfile
from device.remote.reporting import Fault
from toolchain.errors import UserError


def test_header_places_every_tensor() -> None:
    given, weight = Tensor("INPUT", 0, "float32", (2, 3)), Tensor("PARAMETERS", 64, "bool", (3,))
    result = Tensor("OUTPUT", 0, "int64", ())
    plan = Plan(
        inputs=[given],
        outputs=[result, Tensor("OUTPUT", 1, "float32", (2, 3))],
        steps=[("twice", [given, weight, result]), ("twice", [given, weight, result])],
        copies=[(given, 1)],
        parameters=bytearray(67),
        work_area=128,
    )
    text = model_plan.header(plan)
    assert "PARAMETER_BYTES = 67, WORK_AREA_BYTES = 128" in text
    assert "TENSORS[] = {{INPUT, 2, 32, 2, 0u, SHAPE_0}, {PARAMETERS, 6, 8, 1, 64u, SHAPE_1}, " in text
    assert "STEPS[] = {{__tvm_ffi_twice, 0, 3}, {__tvm_ffi_twice, 3, 3}}" in text
    assert "OUTPUT_BYTES[] = {8, 24}" in text
    assert "COPIES[] = {{0, 1}}" in text
    assert text.count('extern "C"') == 1


@pytest.mark.parametrize("name", ["", "cnn", "module:", "module:not a name", "a-b:cnn", "absent.pt2"])
def test_other_names_are_not_models(name: str) -> None:
    with pytest.raises(UserError, match="there is no model"):
        models._reference(name)


def test_mismatch_names_the_output() -> None:
    right = [numpy.zeros(3, "f4"), numpy.zeros(2, "f4")]
    wrong = [right[0], numpy.asarray([0, 1], "f4")]
    allowed = (1e-4, 1e-4)
    assert comparing.first_mismatch(right, right, [(0, 0), (0, 0)]) is None
    found = comparing.first_mismatch(wrong, right, [allowed, allowed])
    assert found is not None
    assert (found["output"], found["index"], found["count"]) == (1, (1,), 1)
    error = profiling.mismatch("model", "cnn", "local", found)
    assert error.summary == "output 1 of cnn on local differs from the expected result, first at index [1]"
    single = comparing.first_mismatch(wrong[1:], right[1:], [allowed])
    assert single is not None
    assert profiling.mismatch("model", "cnn", "local", single).summary.startswith("the result of cnn on local")


@pytest.fixture
def done() -> ModelProfile:
    return ModelProfile(
        model="<net>",
        inputs=("float32 1×3",),
        target="armv7 (32-bit ARM)",
        device="emulator",
        board="",
        seconds=(0.002, 0.004, 0.003),
        operators=(("add", 0.001), ("conv2d", 0.003), *(("relu", 0.0) for _ in range(models.SHOWN_OPERATORS))),
        checked=10,
        tolerances=((1e-4, 1e-4),),
        parameter_bytes=2048,
        parameters_sha256="0123456789abcdef",
        parameters="kept on the board",
        work_area_bytes=64,
        peak_memory_bytes=3 << 20,
        eager=(
            Eager(precision="float32", seconds=(0.002, 0.006), difference=1e-7, largest=0.5, threads=4, torch="2.6.0"),
            Eager(precision="int8", reason="the model has <no> layer that torch can quantise"),
        ),
        emulated=True,
        note="timed under emulation; not measured on hardware",
    )


def test_report_shows_the_operators_as_bars(done: ModelProfile) -> None:
    page = done.as_html()
    assert "<h1>&lt;net&gt; on emulator</h1>" in page
    assert page.count("not measured on hardware</div>") == 1
    assert page.index("width:100.0%") < page.index("width:33.3%")
    assert page.count('class="bar"') == 22
    assert "3 ms" in page
    rows = dict(done.rows())
    assert rows["parameters"] == "kept on the board, SHA-256 0123456789ab…, 2.0 KiB"
    assert rows["peak memory"] == "3.0 MiB, with the emulator"
    facts = json.loads(done.as_json())
    assert facts["peak_memory_bytes"] == 3 << 20
    assert [item["median_s"] for item in facts["eager"]] == [0.004, None]
    table = {row[0]: row[1:] for row in done.comparison()}
    assert table[""] == ("TVM", "torch float32", "torch int8")
    assert table["median"] == ("3 ms", "4 ms", "–")
    assert table["difference"] == ("within tolerance", "1e-07 of 0.5", "–")
    assert done.not_run == ["torch int8 not run: the model has <no> layer that torch can quantise"]
    assert "torch int8 not run: the model has &lt;no&gt; layer" in page
    assert "<th>torch float32</th>" in page
    assert dataclasses.replace(done, peak_memory_bytes=0).peak_memory == "unknown"


def test_wrong_small_output_next_to_a_large_one_differs() -> None:
    right = [numpy.asarray([1000, 2], "f4"), numpy.asarray([1e-5, 0], "f4")]
    near = [right[0] * numpy.float32(1 + 1e-6), right[1] * numpy.float32(1 + 1e-6)]
    wrong = [right[0], right[1] * numpy.float32(1.5)]
    allowed = [comparing.tolerance_of(item, 1e-4, 1e-4) for item in right]
    assert comparing.first_mismatch(near, right, allowed) is None
    found = comparing.first_mismatch(wrong, right, allowed)
    assert found is not None
    assert (found["output"], found["index"]) == (1, (0,))
    assert found["tolerance"] == pytest.approx((1e-4, 1e-9))


@pytest.mark.parametrize(
    ("values", "absolute"), [([2000], 1e-4), ([0.5, -0.25], 5e-5), ([0, 0], 1e-4), ([], 1e-4), ([numpy.nan, 0.1], 1e-5)]
)
def test_absolute_tolerance_depends_on_the_largest_value(values: list[float], absolute: float) -> None:
    expected = numpy.asarray(values, "f4")
    assert comparing.tolerance_of(expected, 1e-3, 1e-4) == pytest.approx((1e-3, absolute))
    assert comparing.tolerance_of(expected, 1e-3, 1e-4, 0.3) == (1e-3, 0.3)


def test_report_without_operators_and_torch_has_no_tables(
    done: ModelProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    """TVM compiles no operator for a model whose outputs are its inputs. TVM's server does not run PyTorch."""
    empty = dataclasses.replace(done, operators=(), eager=eager.not_run("the <board> has no torch"), note="")
    page = empty.as_html()
    assert "torch float32 and int8 not run: the &lt;board&gt; has no torch</div>" in page
    assert models.NO_OPERATORS in page
    assert page.count("<table") == 1
    assert "<th" not in page
    assert 'class="bar"' not in page
    assert 'class="warn"' not in page
    empty.print()
    printed = capsys.readouterr().out
    assert models.NO_OPERATORS in printed
    assert "share" not in printed
    assert json.loads(empty.as_json())["operators"] == []


@pytest.mark.parametrize("dtype", ["i4", "i8", "u1"])
def test_integers_must_be_equal(dtype: str) -> None:
    largest = numpy.iinfo(dtype).max
    right = [numpy.asarray([largest, largest], dtype)]
    wrong = [numpy.asarray([largest, largest - 1], dtype)]
    allowed = comparing.tolerance_of(right[0], 1e-4, 1e-4, 1.0)
    assert comparing.first_mismatch(right, right, [allowed]) is None
    found = comparing.first_mismatch(wrong, right, [allowed])
    assert found is not None
    assert (found["index"], found["count"], found["tolerance"]) == ((1,), 1, (0.0, 0.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_type_without_a_c_counterpart_is_refused(dtype: str) -> None:
    with pytest.raises(Fault, match=f"the model uses the type {dtype}: expected float16, "):
        Tensor("WORK_AREA", 0, dtype, (2,))
