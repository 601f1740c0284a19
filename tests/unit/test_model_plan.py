"""The tables of a model's plan, and the names of models. TVM and PyTorch are not required."""

from __future__ import annotations

import numpy
import pytest

from device.remote import comparing, model_plan, models
from device.remote.model_plan import Plan, Tensor
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
    assert comparing.first_mismatch(right, right, (0, 0)) is None
    found = comparing.first_mismatch(wrong, right, (1e-4, 1e-4))
    assert found is not None
    assert (found["output"], found["index"], found["count"]) == (1, (1,), 1)
