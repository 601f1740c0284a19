"""Call a function under fakeroot, so that an ordinary user can make a tree whose files have different owners.

fakeroot(1) preloads a library that records owners, modes, devices and extended attributes instead of setting them. Only
programs that load the library see the recorded values: the process in which the function runs, and the native
programs that it starts.
"""

from __future__ import annotations

import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from toolchain import process, progress

T = TypeVar("T")

_CHECKOUT = Path(__file__).resolve().parent.parent
_LIMIT_S = 4 * 3600.0
# fakeroot's shell stops fakeroot's daemon only when the shell exits, so the shell must ignore SIGTERM; ``main`` handles
# the signal.
_SCRIPT = """trap '' TERM; exec "$0" -- "$@" """


def call(function: Callable[..., T], *arguments: object, why: str) -> T:
    """Call a module-level function in a process under fakeroot; return the function's result or raise its exception.

    The function, its arguments and its result are pickled. The function's output is printed line by line. ``why`` is
    the purpose that ProgramMissing states if fakeroot is not installed. Raises CommandFailed if the process was killed.
    """
    program = process.require_program("fakeroot", why)
    with tempfile.TemporaryDirectory(prefix="pitorch-fake-root-") as folder:
        made = Path(folder) / "made"
        process.run(
            ["sh", "-c", _SCRIPT, program, sys.executable, "-X", "utf8", "-m", __name__, made],
            cwd=_CHECKOUT,
            stdin=pickle.dumps((function, arguments)),
            limit_s=_LIMIT_S,
            on_line=progress.say,
        )
        result, fault = pickle.loads(made.read_bytes())  # noqa: S301 (only this user can enter the folder)
    if fault is not None:
        raise fault
    return cast(T, result)


def main(made: Path) -> None:
    """Read a pickled function from stdin and call it.

    Write its result and its exception, one of which is None, to ``made``.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 (from ``call``)
    result = fault = None
    try:
        result = function(*arguments)
    except Exception as caught:
        caught.add_note(traceback.format_exc())  # useful only if the exception is a bug
        fault = caught
    made.write_bytes(pickle.dumps((result, fault)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
