#!/usr/bin/env python3
"""Run a model on a board in eager PyTorch, in float32 and in int8, and measure its latency and peak memory.

    torch_session.py LOCK_FILE QUEUE_SECONDS SESSION_SECONDS

The board's Python runs this script, which imports nothing from this project. To the client, the script behaves like
the loader (loader.cpp): it takes the same lock, and prints "ok MACHINE; MODEL". There is only one kind of request:
"torch BYTES", followed by a description of the model (device/remote/model_graph.py). The response is "ok BYTES" and a
JSON object that contains, for each of "float32" and "int8", the results or the "reason" why there are none.

Each precision runs in a separate process, which is forked after ``import torch``. Peak memory is thus measured
separately for each precision, and a crash in one process does not affect the other process. The processes end when the
client disconnects or the session's time limit is reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import operator
import os
import platform
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINE = "qnnpack"
"""The int8 library that torch can use on every ARM CPU."""
PRECISIONS = ("float32", "int8")


class NotRun(Exception):
    """The model cannot be measured in the requested precision. The message states why."""


# ------------------------------------------------------------------------------------------- the model


def tensors_of(torch: Any, content: bytearray) -> Callable[[Mapping[str, Any]], Any]:
    """A function that returns a copy of the tensor that a record (dtype, shape, offset) describes."""

    def tensor(record: Mapping[str, Any]) -> Any:
        dtype, shape = getattr(torch, record["dtype"]), record["shape"]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype, count=count, offset=record["offset"]).reshape(shape).clone()

    return tensor


def module_of(torch: Any, description: Mapping[str, Any], tensor: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The model as a ``torch.fx.GraphModule``. Layers with constant weights become modules of ``torch.nn``.

    Raises NotRun if the board's torch lacks an operator.
    """
    return _Builder(torch, description, tensor).build()


class _Builder:
    def __init__(self, torch: Any, description: Mapping[str, Any], tensor: Callable[[Mapping[str, Any]], Any]) -> None:
        self.torch = torch
        self.description = description
        self.constants = {name: tensor(record) for name, record in description["tensors"].items()}
        self.root = torch.nn.Module()
        self.graph = torch.fx.Graph()
        self.values: dict[str, Any] = {}

    def build(self) -> Any:
        for name in self.description["inputs"]:
            self.values[name] = self.graph.placeholder(name)
        for name, target, arguments, options, rank in self.description["calls"]:
            self.values[name] = self._layer(name, target, arguments, options, rank)
        self.graph.output(tuple(self._value(item) for item in self.description["outputs"]))
        return self.torch.fx.GraphModule(self.root, self.graph).eval()

    def _value(self, item: Any) -> Any:
        """An argument of a call, with each JSON object replaced by the node, torch constant or device that it names."""
        if isinstance(item, list):
            return [self._value(each) for each in item]
        if not isinstance(item, dict):
            return item
        if "torch" in item:
            return getattr(self.torch, item["torch"])
        if "device" in item:
            return self.torch.device(item["device"])
        name = item["node"]
        if name not in self.values:  # a constant that is not the weight of a module
            self.root.register_buffer(name, self.constants[name])
            self.values[name] = self.graph.get_attr(name)
        return self.values[name]

    def _constant(self, item: Any) -> Any:
        """The tensor that an argument refers to; None if the argument is not a constant."""
        return self.constants.get(item["node"]) if isinstance(item, dict) and "node" in item else None

    def _call(self, target: Any, arguments: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
        made = [self._value(item) for item in arguments]
        return self.graph.call_function(
            target, tuple(made), {name: self._value(item) for name, item in (options or {}).items()}
        )

    def _module(self, name: str, module: Any, weights: Mapping[str, Any], *arguments: Any) -> Any:
        for key, value in weights.items():
            if key in dict(module.named_buffers()):
                setattr(module, key, value)
            else:
                setattr(module, key, self.torch.nn.Parameter(value, requires_grad=False))
        self.root.add_module(f"{name}_layer", module.eval())
        return self.graph.call_module(f"{name}_layer", tuple(self._value(item) for item in arguments))

    def _layer(self, name: str, target: str, arguments: list[Any], options: dict[str, Any], rank: int | None) -> Any:
        if target == "getitem":
            found, index = self._value(arguments[0]), arguments[1]
            return found[index] if isinstance(found, list) else self._item(found, index)
        made = None
        if rank is not None and not options:  # torch quantises neither integers nor calls with other options
            if target in _LAYERS:
                made = getattr(self, _LAYERS[target])(name, arguments, rank)
            elif target in _OPERATORS:
                made = self._call(_OPERATORS[target], arguments)
            elif target in _METHODS:
                made = self.graph.call_method(_METHODS[target], tuple(self._value(item) for item in arguments))
            elif target in _FUNCTIONS:
                path, extra = _FUNCTIONS[target]
                made = self._call(operator.attrgetter(path)(self.torch), arguments, extra)
        return made if made is not None else self._call(self._operator(target), arguments, options)

    def _item(self, whole: Any, index: int) -> Any:
        return self.graph.call_function(operator.getitem, (whole, index))

    def _operator(self, target: str) -> Any:
        space, packet, overload = target.split(".")
        if space == "quantized_decomposed":
            from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers these operators
        try:
            return getattr(getattr(getattr(self.torch.ops, space), packet), overload)
        except (AttributeError, RuntimeError) as fault:
            raise NotRun(f"torch {self.torch.__version__} on the board has no operator {target}") from fault

    # Methods that create layers; ``_LAYERS`` maps ATen operators to these methods.

    def _weights(self, weight: Any, bias: Any) -> dict[str, Any] | None:
        """The layer's weight and, if the layer has one, its bias; None if either is not a constant."""
        values = {"weight": self._constant(weight)}
        if bias is not None:
            values["bias"] = self._constant(bias)
        return None if any(value is None for value in values.values()) else values

    def _convolution(self, name: str, arguments: list[Any], _rank: int) -> Any:
        x, weight, bias, stride, padding, dilation, groups = _filled(arguments, (None, 1, 0, 1, 1), 2)
        values = self._weights(weight, bias)
        if values is None:
            return None
        shape = values["weight"].shape
        module = getattr(self.torch.nn, f"Conv{len(shape) - 2}d")(
            shape[1] * groups, shape[0], tuple(shape[2:]), _tuple(stride), _tuple(padding), _tuple(dilation), groups,
            bias is not None,
        )  # fmt: skip
        return self._module(name, module, values, x)

    def _linear(self, name: str, arguments: list[Any], _rank: int) -> Any:
        x, weight, bias = _filled(arguments, (None,), 2)
        values = self._weights(weight, bias)
        if values is None:
            return None
        made, given = values["weight"].shape
        return self._module(name, self.torch.nn.Linear(given, made, bias is not None), values, x)

    def _batch_norm(self, name: str, arguments: list[Any], rank: int) -> Any:
        x, *parts, training, momentum, epsilon, _ = arguments
        values = dict(zip(("weight", "bias", "running_mean", "running_var"), map(self._constant, parts), strict=True))
        kind = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}.get(rank)
        if training or kind is None or any(value is None for value in values.values()):
            return None
        module = getattr(self.torch.nn, kind)(len(values["weight"]), epsilon, momentum)
        return self._module(name, module, values, x)

    def _lstm(self, name: str, arguments: list[Any], _rank: int) -> Any:
        x, state, weights, biased, layers, _, training, both_ways, batch_first = arguments
        values = [self._constant(item) for item in weights]
        if training or not biased or not isinstance(weights, list) or any(value is None for value in values):
            return None
        hidden = values[1].shape[1]
        module = self.torch.nn.LSTM(
            values[0].shape[1], hidden, layers, batch_first=batch_first, bidirectional=both_ways
        )
        if len(values) != len(module._flat_weights_names):
            return None
        made = self._module(name, module, dict(zip(module._flat_weights_names, values)), x, state)  # noqa: B905
        states = self._item(made, 1)
        return [self._item(made, 0), self._item(states, 0), self._item(states, 1)]

    def _dropout(self, _name: str, arguments: list[Any], _rank: int) -> Any:
        return None if arguments[2] else self._value(arguments[0])


def _filled(arguments: list[Any], defaults: Sequence[Any], required: int) -> list[Any]:
    return [*arguments, *defaults[len(arguments) - required :]]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_LAYERS = {
    "aten.conv1d.default": "_convolution",
    "aten.conv2d.default": "_convolution",
    "aten.linear.default": "_linear",
    "aten.batch_norm.default": "_batch_norm",
    "aten.lstm.input": "_lstm",
    "aten.dropout.default": "_dropout",
}
"""Methods that create layers. If a method returns None, the operator is called."""

_OPERATORS = {"aten.add.Tensor": operator.add, "aten.mul.Tensor": operator.mul}

_FUNCTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "aten.relu.default": ("nn.functional.relu", {}),
    "aten.relu_.default": ("nn.functional.relu", {"inplace": True}),
    "aten.relu6.default": ("nn.functional.relu6", {}),
    "aten.hardtanh.default": ("nn.functional.hardtanh", {}),
    "aten.hardtanh_.default": ("nn.functional.hardtanh", {"inplace": True}),
    "aten.hardswish.default": ("nn.functional.hardswish", {}),
    "aten.max_pool2d.default": ("nn.functional.max_pool2d", {}),
    "aten.avg_pool2d.default": ("nn.functional.avg_pool2d", {}),
    "aten.adaptive_avg_pool2d.default": ("nn.functional.adaptive_avg_pool2d", {}),
    "aten.flatten.using_ints": ("flatten", {}),
    "aten.mean.dim": ("mean", {}),
    "aten.cat.default": ("cat", {}),
    "aten.sigmoid.default": ("sigmoid", {}),
    "aten.tanh.default": ("tanh", {}),
}
"""Functions that torch's quantisation recognises and that call the same ATen operators."""

_METHODS = {
    "aten.view.default": "view",
    "aten.reshape.default": "reshape",
    "aten.permute.default": "permute",
    "aten.transpose.int": "transpose",
    "aten.contiguous.default": "contiguous",
}


def quantized(torch: Any, module: Any, inputs: Sequence[Any]) -> Any:
    """The model with int8 layers.

    LSTMs are quantised dynamically. Other layers are quantised statically, with the inputs as calibration data.

    Raises NotRun if torch has no suitable engine, or if the model has no layer to quantise.
    """
    if ENGINE not in torch.backends.quantized.supported_engines:
        raise NotRun(f"torch {torch.__version__} on the board was built without {ENGINE}")
    layers = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Linear, torch.nn.LSTM)
    if not any(isinstance(item, layers) for item in module.modules()):
        raise NotRun("the model has no layer that torch can quantise")
    from torch.ao.quantization import default_dynamic_qconfig, get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = ENGINE
    choices = get_default_qconfig_mapping(ENGINE).set_object_type(torch.nn.LSTM, default_dynamic_qconfig)
    prepared = prepare_fx(module, choices, tuple(inputs))
    prepared(*inputs)
    converted = convert_fx(prepared)
    if not _limits_in_order(torch):
        _make_contiguous_before_limits(torch, converted)
    return converted


def _limits_in_order(torch: Any) -> bool:
    """Whether relu6 keeps the element order of a quantised channels_last image.

    Upstream's QNNPACK changes this order.
    """
    x = torch.quantize_per_tensor(torch.arange(8.0).reshape(1, 2, 2, 2), 0.5, 0, torch.quint8)
    found = torch.nn.functional.relu6(x.contiguous(memory_format=torch.channels_last))
    return bool(torch.equal(found.dequantize(), torch.nn.functional.relu6(x.dequantize())))


def _make_contiguous_before_limits(torch: Any, converted: Any) -> None:
    """Insert a conversion to the contiguous format before each relu6 and hardtanh in a graph module."""
    limits = (torch.nn.functional.relu6, torch.nn.functional.hardtanh)
    for node in list(converted.graph.nodes):
        if node.target in limits:
            with converted.graph.inserting_before(node):
                node.replace_input_with(node.args[0], converted.graph.call_method("contiguous", (node.args[0],)))
    converted.recompile()


# ------------------------------------------------------------------------------------- the measurement


def prepared(torch: Any, precision: str, description: Mapping[str, Any], content: bytearray) -> tuple[Any, list[Any]]:
    """The model in the given precision, and its example inputs. Raises NotRun."""
    tensor = tensors_of(torch, content)
    module = module_of(torch, description, tensor)
    inputs = [tensor(record) for record in description["examples"]]
    return (module if precision == "float32" else quantized(torch, module, inputs)), inputs


def measured(precision: str, description: Mapping[str, Any], content: bytearray) -> dict[str, Any]:
    """Run, check and time the model. Raises NotRun if float32 outputs are wrong."""
    import torch

    with torch.no_grad():
        module, inputs = prepared(torch, precision, description, content)
        tensor = tensors_of(torch, content)
        expected = [tensor(record) for record in description["expected"]]
        found = module(*inputs)
        if precision == "float32":
            require_close(torch, found, expected, description["tolerances"])
        difference, largest = worst_of(torch, found, expected)
        for _ in range(description["warm_up"]):
            module(*inputs)
        seconds = []
        for _ in range(description["runs"]):
            began = time.perf_counter()
            module(*inputs)
            seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "difference": difference,
        "largest": largest,
        "peak_memory_bytes": _peak_memory(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def require_close(
    torch: Any, found: Sequence[Any], expected: Sequence[Any], tolerances: Sequence[Sequence[float]]
) -> None:
    """Raise NotRun if an output differs from the PC's output by more than its relative and absolute tolerance."""
    for index, (one, other, allowed) in enumerate(zip(found, expected, tolerances)):  # noqa: B905 - Python 3.9
        difference = difference_of(torch, one, other)
        if not torch.allclose(one.double(), other.double(), *allowed, equal_nan=True):
            raise NotRun(f"wrong result: output {index} differs by up to {difference:g} from PyTorch's on the PC")


def worst_of(torch: Any, found: Sequence[Any], expected: Sequence[Any]) -> tuple[float, float]:
    """The largest absolute difference in the worst output, and the largest absolute value expected in this output.

    The worst output is the one with the largest ratio of these two values. Raises NotRun like ``difference_of``.
    """
    pairs = [(difference_of(torch, one, other), _largest(other)) for one, other in zip(found, expected)]  # noqa: B905
    return max(pairs, key=lambda pair: pair[0] / (pair[1] or sys.float_info.min), default=(0.0, 0.0))


def difference_of(torch: Any, one: Any, other: Any) -> float:
    """The largest absolute difference between two tensors.

    Raises NotRun if the shapes differ, or if a value is NaN in only one of the tensors.
    """
    if one.shape != other.shape:
        raise NotRun(f"an output has the shape {tuple(one.shape)}, but {tuple(other.shape)} in PyTorch on the PC")
    one, other = one.double(), other.double()
    if not torch.equal(one.isnan(), other.isnan()):
        raise NotRun("an element of an output is NaN either only on the board or only in PyTorch on the PC")
    return _largest(torch.where(one == other, torch.zeros_like(one), one - other))


def _largest(tensor: Any) -> float:
    """The largest absolute value, ignoring NaNs; 0 if there are no other values."""
    sizes = tensor.double().abs().nan_to_num(nan=0.0, posinf=math.inf)
    return float(sizes.max()) if sizes.numel() else 0.0


def _peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------------------------- the session


def forked(action: Callable[[], Mapping[str, Any]], deadline: float, limit_s: float) -> dict[str, Any]:
    """Run ``action`` in a new process, and return the result of the action or the reason why the action failed.

    Exits if the client disconnects.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(max(1, math.ceil(deadline - time.monotonic())))
        try:
            result = dict(action())
        except NotRun as fault:
            result = {"reason": str(fault)}
        except Exception as fault:
            lines = str(fault).strip().splitlines()
            result = {"reason": f"{type(fault).__name__}: {lines[0] if lines else ''}"}
        _write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    waiting = select.poll()
    waiting.register(reading, select.POLLIN)
    if not stat.S_ISREG(os.fstat(0).st_mode):
        waiting.register(0, select.POLLIN)
    text = b""
    while True:
        ready = [number for number, _ in waiting.poll()]
        if 0 in ready:  # no data is expected now: the client has disconnected
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise SystemExit(1)
        block = os.read(reading, 1 << 16)
        if not block:
            break
        text += block
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return {"reason": f"still running after {limit_s:g} s"}
        hint = ", perhaps because memory ran out" if number == signal.SIGKILL else ""
        return {"reason": f"PyTorch was terminated by {signal.Signals(number).name}{hint}"}
    return dict(json.loads(text))


def answer(request: bytes, deadline: float, limit_s: float) -> dict[str, Any]:
    """The results for all precisions."""
    try:
        import torch  # once, before the processes fork, because the import takes most of the time
    except Exception as fault:
        version = platform.python_version()
        where = f"{sys.executable} ({version})"
        reason = (
            f"{where} has no torch" if isinstance(fault, ModuleNotFoundError) else f"{where}: import torch: {fault}"
        )
        return {precision: {"reason": reason} for precision in PRECISIONS}
    del torch
    text, _, rest = request.partition(b"\n")
    description, content = json.loads(text), bytearray(rest)
    return {
        precision: forked(lambda: measured(precision, description, content), deadline, limit_s)  # noqa: B023
        for precision in PRECISIONS
    }


def locked(path: str, queue_s: float) -> bool:
    """Take the board's lock, as loader.cpp does."""
    file = _opened(path)
    if file is None:
        return False
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        print(f"error load {path} is not a regular file with a single link: remove it", flush=True)
        return False
    with contextlib.suppress(PermissionError):  # another user's file
        os.fchmod(file, 0o644)
    deadline = time.monotonic() + queue_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # another user's file is open read-only
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
            return True
        if time.monotonic() >= deadline:
            holder = os.pread(file, 15, 0).decode(errors="replace")
            user = f"process {holder}" if holder.isdecimal() and Path("/proc", holder).exists() else "another session"
            print(f"error busy {user} is using the board", flush=True)
            return False
        time.sleep(0.05)


def _opened(path: str) -> int | None:
    """Open the lock file as loader.cpp does. Prints the reason and returns None if the file cannot be opened."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)
    except OSError as fault:
        print(f"error load {path}: {fault.strerror}", flush=True)
        return None


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        block = os.read(0, min(count - len(data), 1 << 20))
        if not block:
            raise SystemExit(1)  # the client disconnected
        data += block
    return bytes(data)


def main() -> None:
    """Serve one request."""
    path, queue_s, session_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    if not locked(path, queue_s):
        raise SystemExit(1)
    # The alarm ends this process if it hangs while no child process is running, for example during an import.
    signal.alarm(math.ceil(session_s) + 5)
    deadline = time.monotonic() + session_s
    model = Path("/proc/device-tree/model")
    name = model.read_bytes().decode(errors="replace").strip("\0\n") if model.is_file() else ""
    print(f"ok {platform.machine()}; {name}", flush=True)
    line = b""
    while not line.endswith(b"\n"):
        line += _read(1)
    result = json.dumps(answer(_read(int(line.split()[1])), deadline, session_s)).encode()
    _write(1, f"ok {len(result)}\n".encode() + result)


if __name__ == "__main__":
    main()
