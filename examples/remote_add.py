"""Run a kernel on this PC or on an ARM board: add 1.0 to each of 1024 floats, check the result, and measure the time.

    .venv/bin/pip install -e '.[remote]'
    .venv/bin/python examples/remote_add.py --local-demo          on this PC
    .venv/bin/python examples/remote_add.py                       on the board in board.toml

The script is a common example from introductions to TVM's RPC, ported to TVM's current API. The comments show the old
calls in square brackets. The board runs TVM's server (docs/remote.md). ``./inv profile-remote`` does the same, and also
provides queues, time limits and error messages.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import tvm
from tvm import rpc, te
from tvm.support import cc
from tvm.target import Target

LENGTH = 1024


def main() -> None:
    """Compile, upload and run the kernel, check its result, and measure its time."""
    parser = argparse.ArgumentParser(description="Add 1.0 to each of 1024 floats, on this PC or on a board.")
    parser.add_argument("--local-demo", action="store_true", help="run on this PC instead of the board")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("board.toml"))
    options = parser.parse_args()
    board = tomllib.loads(options.config.read_text())

    # Declare the computation. [te.create_schedule(B.op)]
    a = te.placeholder((LENGTH,), "float32", name="a")
    b = te.compute((LENGTH,), lambda i: a[i] + 1.0, name="b")
    function = te.create_prim_func([a, b]).with_attr("global_symbol", "add_one")

    # Compile it for the chosen machine. [tvm.build(s, [A, B], "llvm -target=aarch64-linux-gnu", name="add_one")]
    target = Target("llvm") if options.local_demo else Target(board["target"])
    built = tvm.compile(tvm.IRModule({"add_one": function}), target=target)

    # Link the kernel here, so that the board needs no compiler. [lib.export_library("lib.tar"): linked on the board]
    linker = os.environ.get("CXX") or ("g++" if options.local_demo else f"{board['target']['mtriple']}-g++")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lib.so")
        built.export_library(str(path), fcompile=cc.cross_compiler(linker))
        remote = rpc.LocalSession() if options.local_demo else rpc.connect(board["host"], board["port"])
        remote.upload(str(path))
    module = remote.load_module("lib.so")

    # Allocate arrays on the board. [tvm.nd.array(x, ctx)]
    device = remote.cpu()
    x = np.random.default_rng(0).uniform(size=LENGTH).astype("float32")
    there, result = tvm.runtime.tensor(x, device), tvm.runtime.tensor(np.zeros_like(x), device)
    module["add_one"](there, result)
    np.testing.assert_equal(result.numpy(), x + 1)

    # The loop runs on the board, so the time does not include the network.
    evaluator = module.time_evaluator("add_one", device, number=10)
    print(f"{evaluator(there, result).mean:g} secs/op")


if __name__ == "__main__":
    main()
