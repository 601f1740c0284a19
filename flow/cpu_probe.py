"""Import packages and run operators on an emulated CPU.

This file runs in a container and requires only Python's standard library.

Usage: ``cpu_probe.py STEPS``, where STEPS is a JSON list of steps in the form [name, Python code]. The first step
imports the package. Every other step runs in a separate process, in which the names from the first step are defined.
For each step that succeeds, raises an exception or is killed, a line of JSON is printed. It contains the step's name,
the number of the signal that killed the step (0 if none did), and the last line of the step's error message (empty if
the step succeeded). No line is printed for a step that ends the process in another way.
"""

import ctypes
import json
import os
import signal
import sys
import traceback


def report(step: str, number: int, error: str) -> None:
    """Print a step's result on a new line, because the step may have printed an incomplete line."""
    print("\n" + json.dumps({"step": step, "signal": number, "error": error}), flush=True)


def run(step: str, code: str, names: dict[str, object]) -> bool:
    """Run a step in a separate process; return whether it succeeded."""
    child = os.fork()
    if child == 0:
        os._exit(0 if execute(step, code, names) else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        report(step, os.WTERMSIG(status), "")
    return status == 0


def execute(step: str, code: str, names: dict[str, object]) -> bool:
    """Run a step in this process; return whether it succeeded."""
    try:
        exec(compile(code, f"<{step}>", "exec"), names)  # noqa: S102 (the code is part of this repository)
    except BaseException:
        report(step, 0, traceback.format_exc().strip().splitlines()[-1])
        return False
    report(step, 0, "")
    return True


def main() -> None:
    """Print the capabilities that the emulator reports, then run the steps."""
    (first, *others) = json.loads(sys.argv[1])
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    print(json.dumps({"hwcap": [getauxval(16), getauxval(26)]}), flush=True)
    names: dict[str, object] = {}
    child = os.fork()
    if child == 0:
        if not execute(first[0], first[1], names):
            os._exit(1)
        for name, code in others:
            run(name, code, names)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        report(first[0], os.WTERMSIG(status), "")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
