"""Describe an exported model for ``loader/torch_session.py``, which runs it in another version of PyTorch.

Only a similar version of PyTorch can load a file from ``torch.export``, and boards have an older version than this PC.
The description therefore consists of a JSON object (mainly a list of calls to ATen operators), a newline, and the bytes
of the tensors. The description is created before the operators are decomposed, so each call is a whole layer, as in
eager mode. Only functions that use ``torch`` import it.

The JSON object contains ``inputs`` (names), ``tensors`` (the constants by name), ``calls``, ``outputs``, the records of
the ``examples`` and ``expected`` tensors, and the ``tolerances`` (relative and absolute) of the outputs. It also
contains ``runs``, the number of timed runs, and ``warm_up``, the number of runs before the timed ones.
A call consists of a name, the operator, arguments, options, and the rank of the result, which is null if the result is
not a floating-point tensor. A record consists of a tensor's type, its shape, and its offset in the bytes. In arguments,
{"node": NAME} is the tensor with that name.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

from device.remote.model_plan import ALIGNMENT
from device.remote.reporting import Fault


class _Tensors:
    """The tensors' bytes, concatenated with padding for alignment."""

    def __init__(self) -> None:
        self.content = bytearray()

    def add(self, array: Any) -> dict[str, Any]:
        """Append an array's bytes, and return the record that describes the array."""
        self.content.extend(bytes(-len(self.content) % ALIGNMENT))
        record = {"dtype": str(array.dtype), "shape": list(array.shape), "offset": len(self.content)}
        self.content.extend(array.tobytes())
        return record


def describe(
    exported: Any,
    inputs: Sequence[Any],
    expected: Sequence[Any],
    *,
    tolerances: Sequence[tuple[float, float]],
    runs: int,
    warm_up: int,
) -> bytes:
    """Return the description of an exported model, including the number of timed runs. Raises Fault ``model``."""
    import torch

    tensors = _Tensors()
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    values = {**exported.state_dict, **exported.constants}
    given, constants, calls, outputs = [], {}, [], []
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if specs[node.name].kind.name == "USER_INPUT":
                given.append(node.name)
            elif node.users:
                constants[node.name] = tensors.add(_array(values[specs[node.name].target], node.name))
        elif node.op == "output":
            outputs = [_encoded(item) for item in torch.utils._pytree.tree_leaves(node.args)]
        elif node.op == "call_function":
            if not node.users and "._assert" in str(node.target):  # has no effect; the board's PyTorch lacks it
                continue
            name = "getitem" if node.target is operator.getitem else str(node.target)
            if name.count(".") != 2 and name != "getitem":
                raise Fault("model", f"{name} is not an ATen operator")
            options = {key: _encoded(item) for key, item in node.kwargs.items()}
            calls.append([node.name, name, [_encoded(item) for item in node.args], options, _rank(node)])
        else:
            raise Fault("model", f"{node.name} is a {node.op}: expected calls to operators")
    description = {
        "inputs": given,
        "tensors": constants,
        "calls": calls,
        "outputs": outputs,
        "examples": [tensors.add(item) for item in inputs],
        "expected": [tensors.add(item) for item in expected],
        "tolerances": tolerances,
        "runs": runs,
        "warm_up": warm_up,
    }
    return json.dumps(description).encode() + b"\n" + tensors.content


def _rank(node: Any) -> int | None:
    """The rank of a call's first result; None if this result is not a floating-point tensor."""
    import torch

    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    first = leaves[0] if leaves else None
    return len(first.shape) if isinstance(first, torch.Tensor) and first.is_floating_point() else None


def _array(value: Any, name: str) -> Any:
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16 or value.is_quantized:
        raise Fault("model", f"the constant {name} is not a tensor with a type that numpy supports")
    return value.detach().contiguous().numpy()


def _encoded(item: Any) -> Any:
    """An argument of a call, converted for JSON. Raises Fault ``model``."""
    import torch

    if isinstance(item, (list, tuple)):
        return [_encoded(each) for each in item]
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, torch.fx.Node):
        return {"node": item.name}
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(item).removeprefix("torch.")}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    raise Fault("model", f"an operator has an argument of the unsupported type {type(item).__name__}")
