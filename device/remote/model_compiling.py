"""Compile a PyTorch model to a shared library for a target.

The model comes from a file written by ``torch.export.save``, or from a function that returns a module and example
inputs. Only functions that use ``torch`` or ``tvm`` import these packages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

from device.remote import comparing, model_plan, model_quantization
from device.remote.compiling import STANDALONE, last_lines
from device.remote.model_plan import Plan, Tensor
from device.remote.reporting import Fault, step

TOLERANCE = (1e-4, 1e-4)
"""The relative and absolute tolerance for differences from eager PyTorch on this PC.

Results differ because float32 sums are computed in a different order. The absolute tolerance of an output with small
values is smaller (``comparing.tolerance_of``). For quantised models, it is at least one quantisation step, because a
value near the boundary between two steps may be rounded to either step.
"""
ENTRY = "pitorch_model"
OPERATOR_RUNS = 5
"""The number of timed runs per operator. An operator's time is the median of its runs."""
DRIVER = Path(__file__).with_name("loader") / "model.cpp"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Model:
    """An exported model, its example inputs, and the outputs of eager PyTorch on this PC.

    ``whole`` is the model before its operators are decomposed for TVM. ``tolerances`` are the relative and absolute
    tolerances of the outputs.
    """

    name: str
    whole: Any
    exported: Any
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]
    tolerances: tuple[tuple[float, float], ...]


def load(reference: str, folder: str) -> Model:
    """Load FILE.pt2, or call MODULE:FUNCTION. Python looks for MODULE in ``folder`` first. Raises Fault ``model``."""
    import torch

    decompositions = model_quantization.decompositions()
    if reference.endswith(".pt2"):
        name = Path(reference).stem
        exported = _guarded(reference, "cannot be loaded", lambda: torch.export.load(reference))
        examples = exported.example_inputs
        if examples is None:
            raise Fault("model", f"{reference} has no example inputs")
    else:
        name, module, given = _made(reference, folder)
        exported = _guarded(reference, "cannot be exported", lambda: torch.export.export(module, given))
        examples = (given, {})
    decomposed = _guarded(reference, "cannot be decomposed", lambda: exported.run_decompositions(decompositions))
    _require_fixed(reference, decomposed)
    inputs = _arrays(torch.utils._pytree.tree_leaves(examples), "input")
    with torch.no_grad():
        results = _guarded(
            reference, "fails on its example inputs", lambda: exported.module()(*examples[0], **examples[1])
        )
    expected = _arrays(torch.utils._pytree.tree_leaves(results), "output")
    least = model_quantization.largest_step(exported)
    tolerances = tuple(comparing.tolerance_of(item, *TOLERANCE, least) for item in expected)
    return Model(name, exported, decomposed, inputs, expected, tolerances)


def _require_fixed(reference: str, exported: Any) -> None:
    """Raise Fault ``model`` for dynamic shapes, and for a model that changes its inputs, buffers or parameters."""
    import torch

    # range_constraints is not reliable, because run_decompositions adds an unused symbol for integer inputs.
    values = [value for node in exported.graph.nodes for value in torch.utils._pytree.tree_leaves(node.meta.get("val"))]
    if sizes := sorted({str(side) for item in values for side in getattr(item, "shape", ()) if type(side) is not int}):
        found = ", ".join(sizes)
        raise Fault("model", f"{reference} has sizes that are known only at run time ({found}): use static shapes")
    specs = exported.graph_signature.output_specs
    if changed := [str(item.target) for item in specs if item.kind.name.endswith("_MUTATION")]:
        raise Fault("model", f"{reference} modifies in place: {', '.join(changed)}. Return the new values instead")


def _made(reference: str, folder: str) -> tuple[str, Any, tuple[Any, ...]]:
    import torch

    _allow_torchvision()
    module_name, _, function_name = reference.partition(":")
    sys.path.insert(0, folder)
    torch.manual_seed(0)  # so that random weights are the same in every run
    found = _guarded(reference, "fails", lambda: getattr(importlib.import_module(module_name), function_name)())
    shape = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.nn.Module)
    if not shape or not isinstance(found[1], tuple):
        raise Fault("model", f"expected {reference} to return (torch.nn.Module, tuple of inputs)")
    return function_name, found[0].eval(), found[1]


def _allow_torchvision() -> None:
    """Make ``import torchvision`` work without torchvision's operators, which the networks do not use.

    Torchvision's wheel in the public index is compiled for CUDA. With PyTorch for CPUs, importing torchvision fails,
    because two operators are missing.
    """
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _arrays(values: list[Any], what: str) -> tuple[Any, ...]:
    import torch

    made = []
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise Fault("model", f"{what} {index} is a {type(value).__name__}: expected a tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in model_plan.NUMBERS:
            raise Fault("model", f"{what} {index} has the type {dtype}: expected {', '.join(model_plan.NUMBERS)}")
        # Unlike ascontiguousarray, asarray keeps the shape of a scalar.
        made.append(numpy.asarray(value.detach().numpy(), order="C"))
    return tuple(made)


def compile_model(model: Model, target: Mapping[str, Any], linker: str, library: Path) -> Plan:
    """Compile ``model`` to ``library``, and write its parameters to ``model.params`` in the same folder.

    The model's code is also written as one object file next to the library, so that the model can be linked into a
    loader.

    Raises Fault ``operator``, ``model``, or ``linker``.
    """
    return _guarded(model.name, "cannot be compiled", lambda: _compile(model, target, linker, library))


def _compile(model: Model, target: Mapping[str, Any], linker: str, library: Path) -> Plan:
    import tvm
    from tvm.relax.frontend.torch import from_exported_program
    from tvm.support import cc
    from tvm.target import Target

    exported = model.exported
    if missing := _missing_operators(exported):
        raise Fault("operator", "; ".join(missing))
    _without_negative_indices(exported)
    module = _guarded(
        model.name, "cannot be imported", lambda: from_exported_program(exported, run_ep_decomposition=False)
    )
    made = Target(dict(target))
    with made, step("fuse the operators and plan the memory"):
        module = _guarded(model.name, "cannot be lowered", lambda: _lowered(module))
    plan = model_plan.of(module["main"], lambda name: _places(name, exported))
    _require_same("input", plan.inputs, model.inputs)
    _require_same("output", plan.outputs, model.expected)
    names = {name for name, _ in plan.steps}
    functions = {
        item.name_hint: _without_runtime(item.name_hint, module[item], exported).with_attr(
            "global_symbol", item.name_hint
        )
        for item in module.get_global_vars()
        if item.name_hint in names
    }
    with step(f"compile {len(functions)} functions for {len(plan.steps)} operators"):
        built = _guarded(model.name, "does not compile", lambda: tvm.compile(tvm.IRModule(functions), target=made))
    library.with_name("model.params").write_bytes(bytes(plan.parameters))
    folder = library.parent / "plan"
    folder.mkdir()
    (folder / "plan.h").write_text(model_plan.header(plan))
    whole = library.with_suffix(".o")
    compiled = ["-O2", "-std=c++17", "-fPIC", f"-I{folder}", str(DRIVER), str(STANDALONE)]

    def link(output: str, objects: list[str], _options: Any = None) -> None:
        cc.create_executable(str(whole), objects, ["-r", "-nostdlib", *compiled], linker)
        cc.create_shared(output, [str(whole)], ["-Wl,--as-needed"], linker)

    try:
        built.export_library(str(library), fcompile=link)
    except Exception as fault:
        raise Fault("linker", f"{linker}: {last_lines(str(fault))}") from fault
    return plan


def _require_same(what: str, planned: list[Tensor], arrays: tuple[Any, ...]) -> None:
    """Raise Fault ``model`` if the inputs or outputs (``what``) in TVM and PyTorch differ in number, type or shape."""
    if len(planned) != len(arrays):
        raise Fault("model", f"the model has {len(planned)} {what}s in TVM, {len(arrays)} in PyTorch")
    for index, (ours, array) in enumerate(zip(planned, arrays, strict=True)):
        if (ours.dtype, ours.shape) != (str(array.dtype), array.shape):
            here, there = (f"{item.dtype} of shape {item.shape}" for item in (ours, array))
            raise Fault("model", f"{what} {index} is {here} in TVM, {there} in PyTorch")


def _without_runtime(name: str, function: Any, exported: Any) -> Any:
    """Make the parallel loops in an operator's function serial, because they would use TVM's thread pool.

    Raises Fault ``model`` if the function calls TVM's runtime. TVM names functions after the operators in them.
    """
    from tvm import ir, tirx
    from tvm_ffi import structural_map, structural_walk

    callees = []

    def note(call: Any) -> None:
        if getattr(call.op, "name", "").startswith(("tirx.tvm_call_packed", "tirx.tvm_call_cpacked")):
            callees.append(str(call.args[0].value))

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        kind = tirx.ForKind.SERIAL
        fields = (loop.loop_var, loop.min, loop.extent, kind, loop.body, loop.thread_binding, loop.annotations)
        return tirx.For(*fields, loop.step)

    structural_walk(function.body, (ir.Call, note))
    if callees:
        where = _places(name, exported)
        raise Fault("model", f"TVM lowers the operator {name}{where} to {callees[0]}, which needs TVM's runtime")
    return function.with_body(structural_map(function.body, (tirx.For, serial)))


def _without_negative_indices(exported: Any) -> None:
    """Replace negative indices of ``select``, because TVM 0.27 reads the wrong element for x[:, -1]."""
    import torch

    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.select.int and node.args[2] < 0:
            source, dimension, index = node.args
            node.update_arg(2, index + source.meta["val"].shape[dimension])


def _lowered(module: Any) -> Any:
    """Apply the passes in TVM's default CPU pipeline that precede the lowering for TVM's virtual machine."""
    import tvm
    from tvm.relax import transform
    from tvm.relax.backend import cpu_generic

    target = tvm.target.Target.current()
    passes = [
        transform.DecomposeOpsForInference(),
        transform.FoldConstant(),
        *cpu_generic.library_dispatch_passes(target),
        *cpu_generic.legalize_passes(target),
        transform.DeadCodeElimination(),
        # RewriteDataflowReshape is omitted, because the calls that it creates need the virtual machine. Instead, each
        # reshape copies the tensor.
        transform.ToNonDataflow(),
        transform.RemovePurityChecking(),
        transform.CallTIRRewrite(),
        transform.StaticPlanBlockMemory(),
    ]
    with _equal_functions_built_once():
        return tvm.transform.Sequential(passes)(module)


@contextlib.contextmanager
def _equal_functions_built_once() -> Iterator[None]:
    """Make TVM build equal functions only once.

    To fold constants, TVM builds a function for every operator whose arguments are constants. In MobileNetV2, most of
    the time for compiling was spent on such functions, 313 of them, of which only 40 differ.
    """
    import tvm
    from tvm_ffi import StructuralKey

    name = "tirx.build"
    build, built = tvm.get_global_func(name), {}

    def once(function: Any, target: Any) -> Any:
        key = (StructuralKey(function), str(target))
        if key not in built:
            built[key] = build(function, target)
        return built[key]

    tvm.register_global_func(name, once, override=True)
    try:
        yield
    finally:
        tvm.register_global_func(name, build, override=True)


def _missing_operators(exported: Any) -> list[str]:
    """The operators that TVM's importer lacks, each with its locations in the model."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().convert_map
    places: dict[str, list[str]] = {}
    for node in exported.graph.nodes:
        if node.op == "call_function" and node.target.__name__ not in known:
            places.setdefault(str(node.target), []).append(_place(node))
    return [f"{name} ({' and '.join(dict.fromkeys(where))})" for name, where in places.items()]


def _places(name: str, exported: Any) -> str:
    """The places where the model calls a TVM function's operator, as text in parentheses; empty if they are unknown.

    TVM uses one function for all calls with the same shapes, so there can be several places.
    """
    calls: dict[str, list[str]] = {}
    for node in exported.graph.nodes:
        operator = node.target.__name__.split(".")[0] if node.op == "call_function" else ""
        if operator and operator in name:
            calls.setdefault(operator, []).append(_place(node))
    places = calls[max(calls, key=len)] if calls else []
    return f" ({' or '.join(dict.fromkeys(places))})" if places else ""


def _place(node: Any) -> str:
    """The place where the model calls a node's operator: module and source line, if the exported model records them."""
    modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    lines = re.findall(r'File "([^"<]+)", line (\d+)', node.meta.get("stack_trace") or "")
    line = f", {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
    return (f"in the module {modules[-1]}" if modules else "in the model") + line


def _guarded(name: str, problem: str, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except Fault:
        raise
    except (Exception, SystemExit) as fault:
        traceback.print_exc()  # to the worker's log
        found = f"{name} {problem}{_node_of(fault)}: {type(fault).__name__}: {last_lines(str(fault))}"
        raise Fault("model", found) from fault


def _node_of(fault: BaseException) -> str:
    """The operator whose translation raised ``fault``, and its place in the model; empty if the operator is unknown."""
    nodes = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(fault.__traceback__)]
    for node in reversed(nodes):
        if node is not None and getattr(node, "op", "") == "call_function":
            return f" at {node.target} ({_place(node)})"
    return ""
