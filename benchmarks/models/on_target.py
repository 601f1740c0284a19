"""Run the models of the benchmark ``models`` with TVM and in eager PyTorch. The target's Python runs this script.

    python3 on_target.py count|time ROWS.json FOLDER...

Each folder contains a model's library (``libmodel.so``), its parameters (``model.params``) and its description
(``model.graph``). With ``count``, only the second call of each model is marked for the plugin, because the first call
also allocates memory, packs weights and chooses kernels. With ``time``, the script makes three further calls and
reports their median duration. The script writes ROWS.json, a list of objects with ``model``, ``how``, ``region`` (the
region's number, or 0 if nothing was counted), ``seconds`` (0 if not measured) and ``reason`` (why the model was
not run).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_session  # type: ignore[import-not-found]

MARK = 0x43500000
"""The base of the invalid file descriptors that mark regions; count.c defines the same value."""
CALLS = 3


def mark(region: int) -> None:
    """Mark the start of a region, or the end of the current one if ``region`` is 0.

    The plugin detects the invalid system call that this function makes.
    """
    with contextlib.suppress(OSError):
        os.close(MARK + region)


def compiled(folder: Path, inputs: Sequence[Any], like: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """Return a function that runs the model compiled by TVM and returns the model's outputs."""
    library = ctypes.CDLL(str(folder / "libmodel.so"))
    library.pitorch_model_error.restype = ctypes.c_char_p
    # torch's tensors start at multiples of 64 bytes, as the library requires.
    parameters = torch.frombuffer(bytearray((folder / "model.params").read_bytes() or b"\0"), dtype=torch.uint8).clone()
    outputs = [torch.empty_like(item) for item in like]
    arrays = [(ctypes.c_void_p * len(items))(*(item.data_ptr() for item in items)) for items in (inputs, outputs)]
    address = ctypes.c_void_p(parameters.data_ptr())

    def run() -> Sequence[Any]:
        if library.pitorch_model_run(address, *arrays, None) != 0:
            raise torch_session.NotRun(library.pitorch_model_error().decode())
        return outputs

    run.parameters = parameters  # type: ignore[attr-defined] # keeps the memory alive
    return run


def eager(precision: str, description: Mapping[str, Any], content: bytearray) -> Callable[[], Sequence[Any]]:
    """Return a function that runs the model in eager PyTorch and returns the model's outputs."""
    module, inputs = torch_session.prepared(torch, precision, description, content)
    return lambda: module(*inputs)


def main() -> None:
    """Run all models."""
    mode, rows_file, *folders = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # also for QNNPACK and XNNPACK, which ignore OMP_NUM_THREADS
    for folder in map(Path, folders):
        text, _, rest = (folder / "model.graph").read_bytes().partition(b"\n")
        description, content = json.loads(text), bytearray(rest)
        tensor = torch_session.tensors_of(torch, content)
        inputs, expected = ([tensor(record) for record in description[kind]] for kind in ("examples", "expected"))
        ways: Mapping[str, Callable[[], Callable[[], Sequence[Any]]]] = {
            "TVM": lambda: compiled(folder, inputs, expected),  # noqa: B023
            "torch float32": lambda: eager("float32", description, content),  # noqa: B023
            "torch int8": lambda: eager("int8", description, content),  # noqa: B023
        }
        for how, make in ways.items():
            row = {"model": folder.name, "how": how, "region": 0, "seconds": 0.0, "reason": ""}
            rows.append(row)
            try:
                run = make()
                outputs = run()
            except torch_session.NotRun as fault:
                row["reason"] = str(fault)
                continue
            if how != "torch int8":
                torch_session.require_close(torch, outputs, expected, description["tolerances"])
            if mode == "count":
                row["region"] = len(rows)
                mark(len(rows))
                run()
                mark(0)
            else:
                row["seconds"] = statistics.median(seconds_of(run) for _ in range(CALLS))
    Path(rows_file).write_text(json.dumps(rows))


def seconds_of(run: Callable[[], object]) -> float:
    """Call ``run`` once, and return the duration of the call in seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
