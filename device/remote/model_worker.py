"""Compile a model and, if the request has an address, run and time it over TVM's RPC.

    python -m device.remote.model_worker < REQUEST

REQUEST is a JSON object: ``model``, ``folder`` (for MODULE:FUNCTION), ``target``, ``linker``, ``library`` (a file to
write), ``address`` (null: compile only), ``number``, ``repeat``, ``warm_up``, ``queue_limit_s``, ``session_limit_s``.
The model's inputs and expected outputs are written next to the library as ``inputs.npz`` and ``expected.npz``. The file
``model.graph`` in the same folder describes the model for the board's PyTorch (see ``model_graph``). For the output,
see ``reporting``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from device.remote import comparing, model_compiling, model_graph, rpc_worker
from device.remote.model_compiling import Model
from device.remote.model_plan import Plan
from device.remote.reporting import Fault, serve, stage, step, tell

COMPILE_LIMIT_S = 1800.0
BLOCK_BYTES = 1 << 20
"""The parameters are sent in blocks, because the board may not have enough memory for all of them at once."""


def _run(request: Mapping[str, Any]) -> None:
    library = Path(request["library"])
    with stage("compile", COMPILE_LIMIT_S):
        with step(f"export {Path(request['model']).name}"):
            model = model_compiling.load(request["model"], request["folder"])
        plan = model_compiling.compile_model(model, request["target"], request["linker"], library)
    for name, arrays in (("inputs", model.inputs), ("expected", model.expected)):
        numpy.savez(library.with_name(f"{name}.npz"), *arrays)
    _describe(model, library.with_name("model.graph"), request)
    tell(
        name=model.name,
        tolerances=model.tolerances,
        operators=[name for name, _ in plan.steps],
        work_area_bytes=plan.work_area,
    )
    if request["address"] is None:
        return
    with rpc_worker.translated(request["session_limit_s"]):
        session = rpc_worker.open_session(request["address"], request["queue_limit_s"], request["session_limit_s"])
        _measure(session, model, plan, library, request)


def _describe(model: Model, path: Path, request: Mapping[str, Any]) -> None:
    """Write the description for the board's PyTorch. A model that cannot be described can still run with TVM."""
    try:
        made = model_graph.describe(
            model.whole, model.inputs, model.expected,
            tolerances=model.tolerances, runs=request["number"] * request["repeat"], warm_up=request["warm_up"],
        )  # fmt: skip
    except Fault as fault:
        tell(no_graph=fault.found)
    else:
        path.write_bytes(made)


def _measure(session: Any, model: Model, plan: Plan, library: Path, request: Mapping[str, Any]) -> None:
    import tvm

    tell(model=rpc_worker.board_model(session))
    limit_s = request["session_limit_s"] + rpc_worker.GRACE_S
    with stage("load", limit_s):
        session.upload(str(library))
        module = rpc_worker.loaded(session, library)
    device = session.cpu()
    with stage("send", limit_s):
        parameters = _parameters(session, device, bytes(plan.parameters) or b"\0")
    with stage("run", limit_s):
        results = [*map(comparing.blank, model.expected), numpy.zeros(len(plan.steps))]
        inputs, outputs = ([tvm.runtime.tensor(item, device) for item in items] for items in (model.inputs, results))
        sent = [*inputs, parameters, *outputs]
        function = module[model_compiling.ENTRY]
        function(*sent)
        found = [item.numpy() for item in outputs[:-1]]
    rpc_worker.require_agreement(found, model.expected, model.tolerances)
    tell(checked=sum(int(item.size) for item in found))
    with stage("time", limit_s):
        for _ in range(request["warm_up"]):
            function(*sent)
        runs = request["number"] * request["repeat"]
        measured = module.time_evaluator(model_compiling.ENTRY, device, number=1, repeat=runs)(*sent)
        tell(seconds=[float(item) for item in measured.results])
        rows = []
        for _ in range(model_compiling.OPERATOR_RUNS):
            function(*sent)
            rows.append(sent[-1].numpy())
        peak = module[f"{model_compiling.ENTRY}_peak_memory"]()
    tell(operator_s=numpy.median(rows, axis=0).tolist(), peak_memory_bytes=int(peak))


def _parameters(session: Any, device: Any, content: bytes) -> Any:
    """Return the model's parameters as a tensor on the board, and report whether they had to be sent.

    The parameters are either memory-mapped from a file that pitorch's RPC server keeps on the board, or sent to the
    board's memory.
    """
    import tvm

    words = (hashlib.sha256(content).hexdigest(), len(content))
    try:
        on_board, keep = (session.get_function(f"pitorch.parameters.{name}") for name in ("map", "keep"))
    except AttributeError:
        reason = "the server is not pitorch's and does not keep them"
    else:
        if (mapped := on_board(*words)) is not None:
            tell(parameters="kept on the board")
            return mapped
        reason = ""
        with step("send the parameters"):
            for offset in range(0, len(content), BLOCK_BYTES):
                if reason := keep(*words, offset, content[offset : offset + BLOCK_BYTES]):
                    break
        if not reason and (mapped := on_board(*words)) is not None:
            tell(parameters="sent, and kept on the board")
            return mapped
        reason = "the board could not keep them" + (f" ({reason})" if reason else "")
    with step("send the parameters to the board's memory"):
        sent = tvm.runtime.tensor(numpy.frombuffer(content, dtype=numpy.uint8), device)
    tell(parameters=f"sent; {reason}")
    return sent


if __name__ == "__main__":
    serve(_run)
