"""The plan of a model, read from a lowered Relax function: operators in execution order, and each tensor's location.

TVM's pass StaticPlanBlockMemory has assigned the intermediate tensors to blocks of memory that later tensors reuse.
The plan places these blocks consecutively in the work area. ``header`` renders the plan for ``loader/model.cpp``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from device.remote.reporting import Fault

ALIGNMENT = 64
NUMBERS = (
    *("float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""The types of inputs and outputs. Intermediate tensors can also be bool."""
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack type codes by numpy kind."""


@dataclass(frozen=True)
class Tensor:
    """A tensor. ``place`` is INPUT, OUTPUT, PARAMETERS or WORK_AREA.

    ``where`` is the index of the input or output, or the byte offset in the parameters or the work area.
    """

    place: str
    where: int
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise Fault ``model`` for a type that numpy lacks, such as bfloat16."""
        if self.dtype not in (*NUMBERS, "bool"):
            raise Fault("model", f"the model uses the type {self.dtype}: expected {', '.join(NUMBERS)} or bool")

    @property
    def size(self) -> int:
        """The size in bytes."""
        return int(numpy.dtype(self.dtype).itemsize) * math.prod(self.shape)


@dataclass
class Plan:
    """The plan.

    A step consists of the name of an operator's function and the tensors that the function receives as arguments. A
    copy consists of a tensor and the index of the output that receives the tensor.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    steps: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    copies: list[tuple[Tensor, int]] = field(default_factory=list)
    parameters: bytearray = field(default_factory=bytearray)
    work_area: int = 0


def of(function: Any, places: Callable[[str], str]) -> Plan:
    """The plan of a Relax function. Raises Fault ``model`` if the function cannot be expressed as a plan.

    ``places`` returns, as text in parentheses, the places in the model that call a given operator. This text is empty
    if the places are unknown.
    """
    return _Reader(places).read(function)


class _Reader:
    def __init__(self, places: Callable[[str], str]) -> None:
        self.places = places
        self.plan = Plan()
        self.values: dict[Any, Any] = {}
        self.known: dict[tuple[str, tuple[int, ...], str], Tensor] = {}

    def read(self, function: Any) -> Plan:
        from tvm import relax

        plan = self.plan
        for index, parameter in enumerate(function.params):
            dtype, shape = _type(parameter)
            plan.inputs.append(Tensor("INPUT", index, dtype, shape))
            self.values[parameter] = plan.inputs[-1]
        body = function.body
        bindings = [item for block in body.blocks for item in block.bindings]
        results = self._results(body.body, {item.var: item.value for item in bindings})
        outputs: dict[Any, int] = {}
        for index, result in enumerate(results):
            if isinstance(result, relax.Var):
                outputs.setdefault(result, index)
            dtype, shape = _type(result)
            plan.outputs.append(Tensor("OUTPUT", index, dtype, shape))
        for binding in bindings:
            self.values[binding.var] = self._value(binding.value, outputs.get(binding.var))
        for index, result in enumerate(results):
            found = self._tensor(result)
            if found != plan.outputs[index]:
                plan.copies.append((found, index))
        return plan

    def _results(self, value: Any, bound: Mapping[Any, Any]) -> list[Any]:
        """The variables and constants that the function returns, with aliases and tuples resolved."""
        from tvm import relax

        while isinstance(value, relax.Var) and isinstance(bound.get(value), (relax.Var, relax.Tuple)):
            value = bound[value]
        if isinstance(value, relax.Tuple):
            return [result for item in value.fields for result in self._results(item, bound)]
        return [value]

    def _value(self, value: Any, output: int | None) -> Any:
        from tvm import ir, relax

        if isinstance(value, relax.Tuple):
            return [self._value(item, None) for item in value.fields]
        if isinstance(value, relax.TupleGetItem):
            return self.values[value.tuple_value][value.index]
        if isinstance(value, relax.If):
            raise Fault("model", f"torch.cond{self.places('cond')} is not supported: use torch.where instead")
        if not isinstance(value, relax.Call):
            return self._tensor(value)
        if isinstance(value.op, ir.GlobalVar):
            self.plan.steps.append((value.op.name_hint, [self._tensor(item) for item in value.args]))
            return None
        name = str(getattr(value.op, "name", value.op))
        if name == "relax.memory.alloc_storage":
            return self._block(_numbers(value.args[0])[0])
        if name == "relax.memory.alloc_tensor":
            block, offset, shape = self.values[value.args[0]], int(value.args[1].value), _numbers(value.args[2])
            return Tensor("WORK_AREA", block + offset, _dtype(value.args[3]), shape)
        if name == "relax.builtin.alloc_tensor":
            shape, dtype = _numbers(value.args[0]), _dtype(value.args[1])
            if output is not None:
                return Tensor("OUTPUT", output, dtype, shape)
            made = Tensor("WORK_AREA", self.plan.work_area, dtype, shape)
            self._block(made.size)
            return made
        if name.startswith("relax.memory.kill"):
            return None
        callee = value.op.global_symbol if isinstance(value.op, relax.ExternFunc) else name
        raise Fault(
            "model",
            f"TVM lowers an operator{self.places(callee)}, whose result is {value.ty}, to {callee}, "
            "which needs TVM's runtime",
        )

    def _block(self, size: int) -> int:
        offset = self.plan.work_area
        self.plan.work_area += -(-size // ALIGNMENT) * ALIGNMENT
        return offset

    def _tensor(self, value: Any) -> Tensor:
        from tvm import ir, relax

        if isinstance(value, relax.Var):
            found = self.values[value]
            if isinstance(found, Tensor):
                return found
        elif isinstance(value, ir.GenericConst):
            return self._constant(value.value.numpy())
        raise Fault("model", f"expected tensors as arguments of the operators, found {type(value).__name__}")

    def _constant(self, array: Any) -> Tensor:
        content = numpy.ascontiguousarray(array).tobytes()
        key = (str(array.dtype), array.shape, hashlib.sha256(content).hexdigest())
        if key not in self.known:
            blob = self.plan.parameters
            blob.extend(bytes(-len(blob) % ALIGNMENT))
            self.known[key] = Tensor("PARAMETERS", len(blob), key[0], key[1])
            blob.extend(content)
        return self.known[key]


def _type(value: Any) -> tuple[str, tuple[int, ...]]:
    found = value.ty
    if getattr(found, "shape", None) is None:
        raise Fault("model", f"expected tensors of known shape as inputs and outputs, found {found}")
    return str(found.dtype), _numbers(found.shape)


def _dtype(value: Any) -> str:
    return str(value.value)


def _numbers(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in shape.values)
    except TypeError as fault:
        raise Fault("model", f"the shape {shape} is known only at run time: export it with static shapes") from fault


def header(plan: Plan) -> str:
    """The plan as C++ tables."""
    used = [tensor for _, arguments in plan.steps for tensor in arguments] + [tensor for tensor, _ in plan.copies]
    tensors = list(dict.fromkeys(used))
    index = {tensor: place for place, tensor in enumerate(tensors)}
    shapes = list(dict.fromkeys(tensor.shape for tensor in tensors))
    arguments: list[int] = []
    steps = []
    for name, found in plan.steps:
        steps.append(f"{{__tvm_ffi_{name}, {len(arguments)}, {len(found)}}}")
        arguments += [index[tensor] for tensor in found]
    planned = []
    for tensor in tensors:
        kind = numpy.dtype(tensor.dtype)
        planned.append(
            f"{{{tensor.place}, {_CODES[kind.kind]}, {8 * kind.itemsize}, {len(tensor.shape)}, {tensor.where}u, "
            f"SHAPE_{shapes.index(tensor.shape)}}}"
        )
    copies = [f"{{{index[tensor]}, {output}}}" for tensor, output in plan.copies]
    names = dict.fromkeys(name for name, _ in plan.steps)
    lines = [
        f"constexpr std::size_t PARAMETER_BYTES = {len(plan.parameters)}, WORK_AREA_BYTES = {plan.work_area};",
        f"constexpr int INPUTS = {len(plan.inputs)}, OUTPUTS = {len(plan.outputs)};",
        f"constexpr int STEP_COUNT = {len(plan.steps)}, COPY_COUNT = {len(plan.copies)};",
        f"constexpr int MOST_ARGUMENTS = {max([1, *(len(found) for _, found in plan.steps)])};",
        _table("std::size_t", "INPUT_BYTES", [str(item.size) for item in plan.inputs]),
        _table("std::size_t", "OUTPUT_BYTES", [str(item.size) for item in plan.outputs]),
        *(_table("int64_t", f"SHAPE_{place}", [str(side) for side in shape]) for place, shape in enumerate(shapes)),
        _table("Planned", "TENSORS", planned),
        _table("uint32_t", "ARGUMENTS", [str(item) for item in arguments]),
        *(f'extern "C" int __tvm_ffi_{name}(void *, const Any *, int32_t, Any *);' for name in names),
        _table("Step", "STEPS", steps),
        _table("Copy", "COPIES", copies),
    ]
    return "\n".join(lines) + "\n"


def _table(kind: str, name: str, rows: Sequence[str]) -> str:
    # C++ does not allow empty arrays, so a table without rows gets one zero element.
    return f"const {kind} {name}[] = {{{', '.join(rows) or '{}'}}};"
