"""The ``qpu`` backend for torch.compile: each chain of elementwise operators becomes one QPU kernel.

    fast = torch.compile(model, backend="qpu")

A launch takes about 0.1 ms on a board, and elementwise kernels are memory-bound. If a chain of k operators runs as one
kernel, this saves k - 1 launches, and the reads and writes of the intermediate results. All other operators run as they
do without torch.compile. Gradients are traced too (AOTAutograd), so backward passes are also fused.

The search for chains visits the nodes in graph order. A node joins the groups of its operands on three conditions: the
shapes are the same; no operator outside these groups uses the groups' results before the node does; and the joined
group does not exceed the limits of one kernel (4 input arrays, 6 input numbers and 3 outputs). A group of two or more
nodes becomes one call of ``torch_qpu::chain``.

By default, PyTorch uses symbolic sizes once it has seen a second batch size. Two shapes are equal if their expressions
are equal. Numbers, such as the divisor of a mean, may be computed from sizes.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_qpu import _C

MOST_ARRAYS, MOST_NUMBERS, MOST_OUTPUTS = 4, 6, 3
"""The limits of one kernel, which are the same as in chains.h."""
LARGEST = torch.finfo(torch.float32).max

aten = torch.ops.aten


class Writer:
    """Collects a chain's steps.

    A value is ("a", node) for an array, ("n", number) for a number, or ("s", index) for a step.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, name: str, *operands: Any) -> tuple[str, Any]:
        """Add a step and return the value that stands for its result."""
        self.steps.append((name, operands))
        return "s", len(self.steps) - 1


def _number(value: Any) -> tuple[str, Any]:
    return "n", float(value)


def _scaled(write: Writer, value: Any, factor: Any) -> Any:
    return value if factor == ("n", 1.0) else write("mul", value, factor)


def _clamp(write: Writer, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = write("max", x, low)
    return x if high is None else write("min", x, high)


def _power(write: Writer, x: Any, exponent: Any) -> Any:
    if exponent == ("n", 2.0):
        return write("mul", x, x)
    if exponent == ("n", 3.0):
        return write("mul", write("mul", x, x), x)
    return None


def _silu_backward(write: Writer, gradient: Any, x: Any) -> Any:
    # The formula is explained at kSiluBackward in activations.cpp.
    power = write("exp", write("neg", x))
    sigmoid = write("recip", write("add", ONE, power))
    slope = write("add", ONE, write("mul", x, write("mul", power, sigmoid)))
    return write("keep", x, write("mul", gradient, write("mul", sigmoid, slope)))


ONE, ZERO, MINUS_ONE, SLOPE = (_number(value) for value in (1, 0, -1, 0.01))
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {
    aten.add.Tensor: lambda w, a, b, alpha=ONE: w("add", a, _scaled(w, b, alpha)),
    aten.sub.Tensor: lambda w, a, b, alpha=ONE: w("sub", a, _scaled(w, b, alpha)),
    aten.add.Scalar: lambda w, a, b, alpha=ONE: w("add", a, _scaled(w, b, alpha)),
    aten.sub.Scalar: lambda w, a, b, alpha=ONE: w("sub", a, _scaled(w, b, alpha)),
    aten.rsub.Scalar: lambda w, a, b, alpha=ONE: w("sub", b, _scaled(w, a, alpha)),
    aten.mul.Tensor: lambda w, a, b: w("mul", a, b),
    aten.mul.Scalar: lambda w, a, b: w("mul", a, b),
    aten.div.Tensor: lambda w, a, b: w("div", a, b),
    aten.div.Scalar: lambda w, a, b: w("div", a, b),
    aten.maximum.default: lambda w, a, b: w("max", a, b),
    aten.minimum.default: lambda w, a, b: w("min", a, b),
    aten.neg.default: lambda w, a: w("neg", a),
    aten.abs.default: lambda w, a: w("abs", a),
    aten.exp.default: lambda w, a: w("exp", a),
    aten.log.default: lambda w, a: w("log", a),
    aten.sqrt.default: lambda w, a: w("sqrt", a),
    aten.rsqrt.default: lambda w, a: w("rsqrt", a),
    aten.reciprocal.default: lambda w, a: w("recip", a),
    aten.sigmoid.default: lambda w, a: w("sigmoid", a),
    aten.tanh.default: lambda w, a: w("tanh", a),
    aten.relu.default: lambda w, a: w("relu", a),
    aten.silu.default: lambda w, a: w("keep", a, w("mul", a, w("sigmoid", a))),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda w, a, high: w("min", a, high),
    aten.hardtanh.default: lambda w, a, low=MINUS_ONE, high=ONE: _clamp(w, a, low, high),
    aten.leaky_relu.default: lambda w, a, slope=SLOPE: w("gt", a, ZERO, a, w("mul", a, slope)),
    aten.pow.Tensor_Scalar: _power,
    aten.addcmul.default: lambda w, a, b, c, value=ONE: w("add", a, _scaled(w, w("mul", b, c), value)),
    aten.addcdiv.default: lambda w, a, b, c, value=ONE: w("add", a, _scaled(w, w("div", b, c), value)),
    aten.threshold_backward.default: lambda w, g, x, limit: w("gt", x, limit, g, ZERO),
    aten.sigmoid_backward.default: lambda w, g, y: w("mul", w("mul", g, w("sub", ONE, y)), y),
    aten.silu_backward.default: _silu_backward,
    aten.tanh_backward.default: lambda w, g, y: w("mul", g, w("sub", ONE, w("mul", y, y))),
}


@dataclass
class Group:
    """Nodes that become one kernel, in graph order."""

    nodes: list[Node] = field(default_factory=list)

    def outputs(self) -> list[Node]:
        """Return the nodes whose results are used outside the group."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]

    def written(self) -> tuple[list[Node], list[float | Node], str, str]:
        """Return the arrays, numbers (floats, or Nodes if derived from sizes), input kinds, and the chain as text."""
        write = Writer()
        values: dict[Node, Any] = {}

        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return ("n", argument) if _is_size(argument) else values.get(argument, ("a", argument))
            return None if argument is None else _number(argument)

        for node in self.nodes:
            arguments = map(value, node.args)
            values[node] = RULES[node.target](write, *arguments, **{k: value(v) for k, v in node.kwargs.items()})
        inputs = list(
            dict.fromkeys(
                operand for kind in "an" for _, operands in write.steps for operand in operands if operand[0] == kind
            )
        )
        # An operation that returns its input unchanged, such as clamp without bounds, adds no step.
        number = {item: place for place, item in enumerate(inputs)}
        number.update({("s", i): len(inputs) + i for i in range(len(write.steps))})
        steps = ";".join(" ".join((name, *(str(number[o]) for o in operands))) for name, operands in write.steps)
        stored = ",".join(str(number[values[node]]) for node in self.outputs())
        arrays = [item for kind, item in inputs if kind == "a"]
        numbers = [item for kind, item in inputs if kind == "n"]
        return arrays, numbers, "".join(kind for kind, _ in inputs), f"{steps}>{stored}"

    def fits(self) -> bool:
        """Return whether a single kernel can compute the whole group."""
        try:
            arrays, numbers, _, _ = self.written()
        except KeyError:
            return False
        return 0 < len(arrays) <= MOST_ARRAYS and len(numbers) <= MOST_NUMBERS and len(self.outputs()) <= MOST_OUTPUTS


def _on_qpu(node: Any) -> bool:
    found = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(found, torch.Tensor) and found.device.type == "qpu" and found.dtype == torch.float32


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)


def _key(size: Any) -> Any:
    """Return a key by which sizes can be compared: the number itself, or a symbolic size's expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _keys(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(_key, sizes))


def _is_contiguous(found: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if _key(size) == 1:
            continue  # the stride of a dimension with one element is meaningless
        if _key(stride) != _key(expected):
            return False
        expected = expected * size
    return True


def _is_fusible_number(value: Any) -> bool:
    # The comparison also rejects NaN. Operators with any of the rejected numbers are computed on the CPU.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_fusible(node: Node) -> bool:
    if node.op != "call_function" or node.target not in RULES or not _on_qpu(node):
        return False
    if not _is_contiguous(node.meta["val"]) or 0 in _keys(node.meta["val"].shape):
        return False
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, Node):
            if not _on_qpu(argument) and not _is_size(argument):
                return False
        elif argument is not None and not _is_fusible_number(argument):
            return False
    return RULES[node.target] is not _power or node.args[1] in (2, 3)


def groups_of(graph: torch.fx.Graph) -> list[Group]:
    """Return the chains of a graph, each with at least two nodes."""
    found: dict[Node, Group] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _is_fusible(node):
            continue
        shape = _keys(node.meta["val"].shape)
        near = []
        for operand in node.all_input_nodes:
            group = found.get(operand)
            if group is not None and group not in near and _keys(operand.meta["val"].shape) == shape:
                near.append(group)
        for join in (near, *([group] for group in near), []):
            nodes = sorted({n for group in join for n in group.nodes}, key=place.__getitem__)
            joined = Group([*nodes, node])
            own = set(joined.nodes)
            # The kernel runs at the position of its last node, so earlier nodes must not use its results.
            early = any(user not in own and place[user] < place[node] for n in nodes for user in n.users)
            if not early and joined.fits():
                for n in joined.nodes:
                    found[n] = joined
                break
    unique = {id(group): group for group in found.values()}
    return [group for group in unique.values() if len(group.nodes) > 1]


def fuse(module: GraphModule) -> GraphModule:
    """Replace the chains of an ATen graph with kernels, in place; return the module."""
    graph = module.graph
    for group in groups_of(graph):
        arrays, numbers, kinds, steps = group.written()
        outputs = group.outputs()
        with graph.inserting_before(group.nodes[-1]):
            numbers = [graph.call_function(torch.sym_float, (n,)) if isinstance(n, Node) else n for n in numbers]
        with graph.inserting_after(group.nodes[-1]):
            call = graph.call_function(torch.ops.torch_qpu.chain.default, (arrays, numbers, kinds, steps))
        last = call
        for i, node in enumerate(outputs):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (call, i))
            last.meta = dict(node.meta)
            own = set(group.nodes)
            node.replace_all_uses_with(last, delete_user_cb=lambda user, own=own: user not in own)
        for node in reversed(group.nodes):
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def unless_checked(graph: GraphModule) -> Callable[..., Any]:
    """Return a function that runs the fused graph, or the original graph while operands are checked for Inf and NaN.

    ``check_finite`` cannot check a fused kernel's intermediate values.
    """
    plain = GraphModule(graph, copy.deepcopy(graph.graph))
    fused = fuse(graph)
    return lambda *arguments: (plain if _C.is_finite_only() else fused).forward(*arguments)


def compile_graph(module: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph for torch.compile, which calls this function as its backend."""
    from functorch.compile import make_boxed_func
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd

    def compile_one(graph: GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        return make_boxed_func(unless_checked(graph))  # type: ignore[no-any-return]

    decompositions = get_decompositions([aten.softplus])
    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compile_one, decompositions=decompositions)(module, inputs)
    return compiled
