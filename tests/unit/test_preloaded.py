"""Tests of pitorch.preloaded, whose server imports torch and forks. Small modules replace torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from toolchain.config import ROOT

Run = subprocess.CompletedProcess[str]
PACKAGE = ROOT / "libqpu/python"


class Board:
    """A user with a separate runtime folder, and a module ``heavy`` that records its imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / ("a runtime folder of more than the hundred bytes that an address has " + "x" * 60)
        self.modules = folder / "modules"
        self.imports = folder / "imports"
        for made in (self.runtime, self.modules):
            made.mkdir()
        self.module("heavy", f"import os\nwith open({str(self.imports)!r}, 'a') as log: print(os.getpid(), file=log)\n")

    def module(self, name: str, text: str) -> None:
        """Write a module that scripts can import."""
        (self.modules / f"{name}.py").write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the user's environment with additional variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{PACKAGE}:{self.modules}"
        return {
            **kept,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def command(self, *words: str) -> list[str]:
        """Return the tested command line."""
        return [sys.executable, "-m", "pitorch.preloaded", *words]

    def run(self, *words: str, stdin: str = "", folder: Path | None = None, **environment: str) -> Run:
        """Run the command and wait until it exits."""
        return subprocess.run(
            self.command(*words),
            input=stdin,
            cwd=folder or self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def script(self, text: str) -> str:
        """Write a script and return its path."""
        path = self.folder / "script.py"
        path.write_text(text)
        return str(path)

    @property
    def loaded(self) -> list[int]:
        """Return the IDs of the processes that imported the module."""
        return [int(line) for line in self.imports.read_text().split()] if self.imports.exists() else []


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    made = Board(tmp_path)
    yield made
    made.run("--stop")


def test_one_import_is_shared_by_all_callers(board: Board) -> None:
    script = board.script(
        "import heavy, os, sys\n"
        "print(sys.argv, __name__, os.path.basename(__file__), os.getcwd(), os.environ['MINE'], sys.stdin.read())\n"
        "print('neighbour', file=sys.stderr)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    elsewhere = board.folder / "else where"
    elsewhere.mkdir()
    first = board.run("--import=heavy", script, "3", "b c", stdin="in", MINE="one")
    assert first.returncode == 3, first.stderr
    assert first.stdout == f"['{script}', '3', 'b c'] __main__ script.py {board.folder} one in\n"
    assert "loaded in" in first.stderr
    second = board.run("--import=heavy", script, "0", stdin="", folder=elsewhere, MINE="two")
    assert (second.returncode, second.stderr) == (0, "neighbour\n")
    assert second.stdout == f"['{script}', '0'] __main__ script.py {elsewhere} two \n"
    third = board.run("--import=heavy", "-c", "import sys; print(sys.argv, sys.path[0] == '')", "x")
    assert third.stdout == "['-c', 'x'] True\n"
    assert len(board.loaded) == 1


def test_changes_of_a_run_do_not_affect_other_runs(board: Board) -> None:
    assert board.run("--import=heavy", "-c", "import heavy, os; heavy.mark = 1; os.chdir('/')").returncode == 0
    seen = board.run("--import=heavy", "-c", "import heavy, os; print(hasattr(heavy, 'mark'), os.getcwd())")
    assert seen.stdout == f"False {board.folder}\n"


def test_exceptions_are_printed_as_by_python(board: Board) -> None:
    script = board.script("def fail():\n    raise ValueError('bad')\nfail()\n")
    done = board.run("--import=heavy", script)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.partition("Traceback")[2] == plain.stderr.partition("Traceback")[2]
    assert "preloaded.py" not in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit(256)",
        "import sys; sys.exit('message')",
        "import atexit; atexit.register(print, 'exit function')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
        "class Owner:\n    def __del__(self): print('destroyed', sep='')\nowner = Owner(); owner.itself = owner",
        "import kept; kept.OWNER = open('file', 'w'); kept.OWNER.write('flushed')",
        "import heavy; heavy.owner = open('file', 'w'); heavy.owner.write('flushed'); print('unflushed', end='')",
        "import ctypes; ctypes.CDLL(None).puts(b'buffered by C')",
        "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')",
        "import sys; sys.stdout.close()",
    ],
)
def test_a_run_ends_as_in_python(board: Board, code: str) -> None:
    """A run does not destroy the server's modules and libraries, but everything else."""
    board.module("kept", "OWNER = None\n")
    command = [sys.executable, "-c", code]
    plain = subprocess.run(
        command, cwd=board.folder, env=board.environment(), capture_output=True, text=True, check=False
    )
    written = board.folder / "file"
    expected = written.read_text() if written.exists() else ""
    written.unlink(missing_ok=True)
    assert board.run("--import=heavy", "-c", "1").returncode == 0
    done = board.run("--import=heavy", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert (written.read_text() if written.exists() else "") == expected


def test_a_run_does_not_call_exit_functions_of_the_server(board: Board) -> None:
    """They belong to the libraries that the server imported, and would copy their pages."""
    function = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.strdup.restype = ctypes.c_void_p\n"
        "libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b'from {}')), None)\n"
    )
    board.module("library", function.format("the server"))
    done = board.run("--import=library", "-c", function.format("the script"))
    assert done.stdout == "from the script\n"


def test_modules_loaded_after_the_fork_are_current(board: Board) -> None:
    """./inv deploy may install changed modules while the server runs."""
    board.module("kernel", "print('old')\n")
    assert board.run("--import=heavy", "-c", "import kernel").stdout == "old\n"
    board.module("kernel", "print('changed')\n")
    assert board.run("--import=heavy", "-c", "import kernel").stdout == "changed\n"
    assert len(board.loaded) == 1


def test_variables_read_while_loading_restart_the_server(board: Board) -> None:
    code = ("-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))")
    assert board.run("--import=heavy", *code).stdout == "None\n"
    other = board.run("--import=heavy", *code, OMP_NUM_THREADS="1")
    assert other.stdout == "1\n"
    assert "OMP_NUM_THREADS has changed" in other.stderr
    assert len(board.loaded) == 2
    assert board.run("--import=heavy", *code, OMP_NUM_THREADS="1", UNHEARD="of").stderr == ""


def test_other_modules_restart_the_server(board: Board) -> None:
    board.module("other", "WHO = 'other'\n")
    assert board.run("--import=heavy", "-c", "1").returncode == 0
    done = board.run("--import=other", "--import=heavy", "-c", "import other; print(other.WHO)")
    assert done.stdout == "other\n"
    assert "the previous server had imported heavy" in done.stderr


def test_a_changed_torch_restarts_the_server(board: Board) -> None:
    """A small module, with the functions that the test uses, replaces ``torch``."""
    text = (
        "import os\nBACKENDS = []\n"
        "def _import_device_backends(): BACKENDS.append(os.getpid())\n"
        "if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '1') == '1': _import_device_backends()\n"
    )
    board.module("torch", text)
    code = ("-c", "import torch, os; print(torch.BACKENDS == [os.getpid()])")
    assert board.run(*code).stdout == "True\n"
    assert board.run("-c", "import torch; print(torch.BACKENDS)", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "[]\n"
    board.module("torch", text + "VERSION = 2\n")
    changed = board.run("-c", "import torch; print(torch.VERSION)")
    assert changed.stdout == "2\n"
    assert "torch.py has changed" in changed.stderr


def test_each_run_seeds_numpys_global_generator(board: Board) -> None:
    code = ("--import=numpy.random", "-c", "import numpy; print(numpy.random.random())")
    assert board.run(*code).stdout != board.run(*code).stdout


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 0)]
)
def test_the_callers_signals_reach_the_script(board: Board, number: int, status: int) -> None:
    script = board.script(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        board.command("--import=heavy", script), stdout=subprocess.PIPE, env=board.environment(), text=True
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "ready\n"
        caller.send_signal(number)
        assert caller.wait(20) == status


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_signal_that_kills_the_script_kills_its_caller(board: Board, number: int) -> None:
    assert board.run("--import=heavy", "-c", f"import os; os.kill(os.getpid(), {number:d})").returncode == -number


def test_script_ends_when_its_caller_has_exited(board: Board) -> None:
    noted = board.folder / "pid"
    script = board.script(
        f"import os, time\nopen({str(noted)!r}, 'w').write(str(os.getpid()))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        board.command("--import=heavy", script), stdout=subprocess.PIPE, env=board.environment(), text=True
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "ready\n"
        caller.kill()
    child = int(noted.read_text())
    eventually(lambda: not Path(f"/proc/{child}").exists())
    assert board.run("--import=heavy", "-c", "print('goes on')").stdout == "goes on\n"
    assert len(board.loaded) == 1


def test_killed_server_does_not_run_a_script_twice(board: Board) -> None:
    noted = board.folder / "runs"
    script = board.script(
        f"import time\nprint('x', file=open({str(noted)!r}, 'a'))\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        board.command("--import=heavy", script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=board.environment(),
        text=True,
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "ready\n"
        os.kill(board.loaded[-1], signal.SIGKILL)
        assert caller.wait(20) == 125
        assert caller.stderr is not None
        assert "was terminated while the script ran" in caller.stderr.read()
    assert noted.read_text() == "x\n", "the pipe is closed, so the script has exited too"
    assert board.run("--import=heavy", "-c", "print('restarted')").stdout == "restarted\n"


def test_concurrent_callers_start_one_server(board: Board) -> None:
    board.module("slow", "import time, heavy\ntime.sleep(0.5)\n")
    callers = [
        subprocess.Popen(
            board.command("--import=slow", "-c", f"print({number})"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=board.environment(),
            text=True,
        )
        for number in range(3)
    ]
    assert sorted(caller.communicate(timeout=60)[0] for caller in callers) == ["0\n", "1\n", "2\n"]
    assert len(board.loaded) == 1


def test_server_ends_when_idle_and_on_request(board: Board) -> None:
    def none_is_left() -> bool:
        """Return whether all processes that imported the module have exited."""
        return not any(Path(f"/proc/{process}").exists() for process in board.loaded)

    assert board.run("--import=heavy", "--idle=0.3", "-c", "1").returncode == 0
    eventually(none_is_left)
    assert board.run("--stop").stdout == "pitorch.preloaded: no server is running\n"
    assert board.run("--import=heavy", "-c", "1").returncode == 0
    assert board.run("--stop").stdout == "pitorch.preloaded: server stopped\n"
    eventually(none_is_left)


def test_import_errors_are_reported(board: Board) -> None:
    board.module("broken", "raise RuntimeError('no such board')\n")
    done = board.run("--import=broken", "-c", "1")
    assert done.returncode == 125
    assert "broken could not be imported" in done.stderr
    assert "RuntimeError: no such board" in done.stderr
    assert board.run("--import=nosuchmodule", "-c", "1").returncode == 125


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script given"),
        (["-c"], "no script given"),
        (["--nosuch", "x.py"], "--nosuch is not an option"),
        (["--idle=soon", "x.py"], "--idle is not an option, or its value is missing or invalid"),
        (["nosuch.py"], "no such file: nosuch.py"),
        (["-m", "x"], "-m is not a script"),
    ],
)
def test_an_invalid_command_line_starts_nothing(board: Board, words: list[str], said: str) -> None:
    done = board.run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(board.runtime.iterdir())


def test_a_folder_that_others_may_enter_is_not_trusted(board: Board) -> None:
    assert board.run("--import=heavy", "-c", "1").returncode == 0
    (folder,) = board.runtime.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    try:
        done = board.run("--import=heavy", "-c", "1")
    finally:
        folder.chmod(0o700)
    assert done.returncode == 125
    assert "only you can access" in done.stderr


def test_server_closes_all_files_of_the_caller(board: Board) -> None:
    """An SSH session stays open while any process holds its files, even after the command has exited."""
    for _ in range(3):
        assert board.run("--import=heavy", "-c", "1").returncode == 0  # run() reads both pipes until they are closed
    found = list(Path(f"/proc/{board.loaded[0]}/fd").iterdir())
    links = [str(item.readlink()) for item in found]
    assert not [link for link in links if link.startswith("pipe:")]
