"""Run ./inv's program in forked processes of an interpreter that has already imported the modules that tasks use.

In a new interpreter, each command would import the modules again, which takes longer than most commands. Each forked
process imports ``tasks.py``, which reads the environment, and runs ``toolchain.cli`` as the main program.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from toolchain.config import ROOT

PROGRAM = """
import ast, json, os, runpy, sys
from pathlib import Path
for path in ("tasks.py", "toolchain/cli.py"):
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    body = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(body, []), path, "exec"), {})
import invoke.main
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(request["environment"])
sys.argv[1:] = request["words"]
for number, name in enumerate((os.devnull, "out", "err")):
    os.dup2(os.open(Path(request["folder"], name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
runpy.run_module("toolchain.cli", run_name="__main__", alter_sys=True)
"""

Run = Callable[[Sequence[str], Mapping[str, str]], subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def forked_cli(folder: Path) -> Iterator[Run]:
    """Yield a function that runs a command line in a forked process with the given environment variables.

    The output is written to files in ``folder``.
    """
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, replies = server.stdin, server.stdout

        def run(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
            request = {"words": list(words), "environment": dict(environment), "folder": str(folder)}
            print(json.dumps(request), file=requests, flush=True)
            status = int(replies.readline())
            out, err = ((folder / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(words, status, out, err)

        yield run
        requests.close()
