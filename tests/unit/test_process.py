"""Tests of subprocesses: results, errors, and the termination of all processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually

from toolchain import process
from toolchain.config import ROOT
from toolchain.errors import CommandFailed, CommandTimedOut, ProgramMissing, UserError
from toolchain.process_identity import find


def wait_for(path: Path) -> str:
    """Wait until a file that another process writes ends with a newline, and return its text."""
    eventually(lambda: path.is_file() and path.read_text().endswith("\n"), f"{path} was not written", interval_s=0.01)
    return path.read_text()


def wait_until_gone(*pids: int) -> None:
    eventually(lambda: not any(map(find, pids)), interval_s=0.01)


@contextlib.contextmanager
def killed_afterwards(*pids: int) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_output_status_and_duration_are_returned() -> None:
    done = process.run(["sh", "-c", "echo one; echo two >&2; sleep 0.05"])
    assert done.output == "one\ntwo\n"
    assert done.returncode == 0
    assert 0.05 <= done.seconds < 300
    assert done.argv == ("sh", "-c", "echo one; echo two >&2; sleep 0.05")


def test_an_argument_that_is_not_utf8_is_logged_unchanged(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    process.run(["touch", name], cwd=tmp_path, log=tmp_path / "log")
    assert (tmp_path / name).is_file()
    assert b"touch 'caf\xe9'" in (tmp_path / "log").read_bytes()
    with pytest.raises(CommandFailed, match=r"caf\\udce9"):
        process.run(["false", name])


def test_separated_stderr_is_part_of_the_error() -> None:
    done = process.run(["sh", "-c", "echo out; echo err >&2"], merge_stderr=False)
    assert done.output == "out\n"
    with pytest.raises(CommandFailed, match="only on stderr"):
        process.run(["sh", "-c", "echo only on stderr >&2; exit 3"], merge_stderr=False)


def test_output_of_strips_the_output() -> None:
    assert process.output_of(["printf", " text \n\n"]) == "text"


def test_arguments_are_passed_unchanged(tmp_path: Path) -> None:
    odd = ["a b", "$HOME", "*", "'", "\n", ""]
    program = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd]
    assert process.run(program).output == f"{odd}\n"
    assert shlex.split(process.pasteable(program, tmp_path)) == ["cd", str(tmp_path), "&&", *program]


def test_programs_print_english_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers search the output of apt, mmdebstrap and the compilers for English messages."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert process.output_of(["sh", "-c", 'echo "$LC_ALL<$LANGUAGE>"']) == "C.UTF-8<>"
    assert process.run(["sh", "-c", "echo $LC_ALL"], env={"LC_ALL": "C"}).output == "C\n"


def test_folder_and_environment_are_passed(tmp_path: Path) -> None:
    done = process.run(["sh", "-c", 'pwd; echo "$MINE $PATH"'], cwd=tmp_path, env={"MINE": "yes"})
    assert done.output == f"{tmp_path}\nyes {os.environ['PATH']}\n"


def test_a_missing_folder_is_not_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        process.run(["true"], cwd=tmp_path / "nowhere")


def test_lines_are_passed_on_immediately(tmp_path: Path) -> None:
    """The program waits until its first line has been read."""
    seen: list[str] = []

    def note(line: str) -> None:
        seen.append(line)
        (tmp_path / "seen").touch()

    program = f"echo first; until [ -e {tmp_path}/seen ]; do sleep 0.02; done; printf last"
    process.run(["sh", "-c", program], on_line=note, limit_s=60)
    assert seen == ["first", "last"]


def test_invalid_utf_8_is_replaced() -> None:
    assert process.run(["printf", r"\377ok\n"]).output == "\ufffdok\n"


def test_commands_and_output_are_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "one.log"
    process.run(["echo", "a b"], log=log, cwd=tmp_path)
    process.run(["sh", "-c", "echo err >&2; exit 1"], log=log, check=False, merge_stderr=False)
    assert log.read_text() == f"$ cd {tmp_path} && echo 'a b'\na b\n$ sh -c 'echo err >&2; exit 1'\nerr\n"


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 3_000_000])
def test_stdin_of_any_size_is_written(size: int) -> None:
    data = b"x" * size
    assert process.run(["cat"], stdin=data).output == data.decode()


def test_unread_stdin_is_not_an_error() -> None:
    assert process.run(["true"], stdin=b"y" * 3_000_000).returncode == 0
    assert process.run(["head", "-c", "2"], stdin=b"y" * 3_000_000).output == "yy"


def test_stdin_is_empty_by_default() -> None:
    assert process.run(["cat"]).output == ""


@pytest.mark.parametrize(
    ("ending", "returncode", "words"),
    [
        ("exit 3", 3, "exit status 3"),
        ("exit 127", 127, "exit status 127: a program that it calls was not found"),
        ("no-such-program-anywhere", 127, "exit status 127: a program that it calls was not found"),
        ("exit 137", 137, "exit status 137: killed, usually by the kernel because memory ran out"),
        ("kill -SEGV $$", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("kill -KILL $$", -signal.SIGKILL, "killed by SIGKILL"),
    ],
)
def test_an_exit_status_is_explained(ending: str, returncode: int, words: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        process.run(["sh", "-c", f"echo before; {ending}"], fix="do this")
    assert caught.value.returncode == returncode
    assert caught.value.found == words
    assert caught.value.exit_code == 14
    text = str(caught.value)
    assert "before" in text
    assert "fix:      do this" in text
    assert process.run(["sh", "-c", ending], check=False).returncode == returncode


@pytest.mark.parametrize("number", [int(signal.SIGRTMIN), int(signal.SIGRTMIN) + 1, int(signal.SIGRTMAX)])
def test_signals_without_a_name_are_numbered(number: int) -> None:
    assert process.explain_exit(-number) == f"killed by signal {number}"


def test_a_file_size_limit_is_explained(tmp_path: Path) -> None:
    argv = ["sh", "-c", f"ulimit -f 0; exec head -c 1 /dev/zero >{tmp_path}/file"]
    with pytest.raises(CommandFailed) as caught:
        process.run(argv)
    assert "file size limit" in caught.value.found


def test_an_error_has_the_last_25_lines() -> None:
    with pytest.raises(CommandFailed) as caught:
        process.run(["sh", "-c", "seq 1000; exit 1"])
    lines = caught.value.tail.split()
    assert lines == [str(number) for number in range(976, 1001)]


def test_a_missing_program_is_reported_with_its_package() -> None:
    with pytest.raises(ProgramMissing) as caught:
        process.run(["ganesha.nfsd-that-is-not-there", "x"])
    assert caught.value.exit_code == 13
    assert "ganesha.nfsd-that-is-not-there" in caught.value.expected
    with pytest.raises(ProgramMissing) as needed:
        process.require_program("no-such-tool", "to test this")
    with pytest.raises(ProgramMissing, match="to test this") as caught:
        process.require_program("/etc/passwd", "to test this")
    assert "apt-get" not in caught.value.fix
    assert "no-such-tool is needed to test this" in str(needed.value)
    assert "apt-get install no-such-tool" in needed.value.fix


def test_no_package_is_suggested_for_a_path() -> None:
    with pytest.raises(ProgramMissing, match="no such file") as caught:
        process.run(["/no/such/venv/bin/python", "-V"])
    assert caught.value.fix == "correct the path"


def test_programs_in_sbin_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert process.require_program("ldconfig", "to test this").name == "ldconfig"


def test_a_missing_interpreter_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(ProgramMissing, match="no such interpreter"):
        process.run([script])


def test_a_file_that_is_not_executable_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(CommandFailed, match="Permission denied") as caught:
        process.run([script])
    assert caught.value.returncode == 126


def test_a_program_of_an_unknown_format_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF" + bytes(60))
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"\./inv doctor"):
        process.run([program])


def test_a_timeout_ends_the_program(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(CommandTimedOut, match=r"completion within 2\.5 s") as caught:
        process.run(["sh", "-c", f"echo $$ > {pid_file}; echo working; exec sleep 600"], limit_s=2.5)
    assert time.monotonic() - began < 300
    assert caught.value.exit_code == 14
    assert "working" in str(caught.value)
    assert not find(int(wait_for(pid_file)))


def test_the_time_limit_does_not_depend_on_output() -> None:
    with pytest.raises(CommandTimedOut):
        process.run(["sh", "-c", "exec >/dev/null 2>&1; sleep 600"], limit_s=0.3)
    with pytest.raises(CommandTimedOut):
        process.run(["yes"], limit_s=0.3)


def test_a_program_that_ignores_sigterm_is_killed() -> None:
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"ready\n"
        began = time.monotonic()
        process.end_group(child, polite_s=0.3)
        assert child.returncode == -signal.SIGKILL
        assert time.monotonic() - began < 300


def test_a_child_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.1; done"
    leader = subprocess.Popen(["sh", "-c", f"sh -c {shlex.quote(stubborn)} & wait"], start_new_session=True)
    pid = int(wait_for(pid_file))
    with killed_afterwards(pid):
        process.end_group(leader, polite_s=1.5)
        assert leader.returncode == -signal.SIGTERM
        wait_until_gone(pid)


def test_ending_an_ended_process_is_not_an_error() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    process.end_group(child)
    assert child.returncode == 0


def test_interrupt_all_ends_programs_of_threads(tmp_path: Path) -> None:
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            process.run(["sh", "-c", f"echo $$ > {tmp_path / str(number)}; exec sleep 600"])
        except CommandFailed as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    pids = [int(wait_for(tmp_path / str(number))) for number in range(2)]
    deadline = time.monotonic() + 20
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        process.interrupt_all()
        time.sleep(0.02)
    assert not any(thread.is_alive() for thread in threads)
    assert [str(fault.found) for fault in faults if isinstance(fault, CommandFailed)] == ["killed by SIGTERM"] * 2
    assert not any(find(pid) for pid in pids)


def test_an_error_in_one_callback_does_not_stop_the_others() -> None:
    called: list[str] = []

    def bad() -> None:
        raise RuntimeError("broken")

    with process.on_interrupt(bad), process.on_interrupt(lambda: called.append("second")):
        process.interrupt_all()
    process.interrupt_all()
    assert called == ["second"]


RUNNER = """
import sys
from pathlib import Path
from toolchain import process
try:
    process.run(["sh", "-c", sys.argv[1]], log=Path(sys.argv[2]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def test_ctrl_c_ends_the_whole_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    line = f"sleep 600 & first=$!; sleep 600 & echo $$ $first $! > {pids}; wait"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, line, str(tmp_path / "log")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = [int(pid) for pid in wait_for(pids).split()]
    with killed_afterwards(*started):
        assert all(find(pid) for pid in started)
        runner.send_signal(signal.SIGINT)
        out, err = runner.communicate(timeout=20)
        assert runner.returncode == 130
        assert out == "interrupted\n"
        assert err == ""
        wait_until_gone(*started)


HASTY = """
import os, signal, subprocess, sys
from pathlib import Path
from toolchain import process

class Hasty(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        if words[0][0] == "sleep":
            print(self.pid, flush=True)
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

subprocess.Popen = Hasty
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    process.run(["sleep", "600"])
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_the_start_ends_the_child(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", HASTY, name], cwd=ROOT, capture_output=True, text=True, check=False)
    pid, message = done.stdout.split()
    with killed_afterwards(int(pid)):
        assert message == "interrupted"
        assert done.returncode == 0, done.stderr
        assert not find(int(pid))


# ------------------------------------------------------------------------------------------ a killed task

KILLED = """
import sys, threading
from pathlib import Path
from toolchain import process

folder = Path(sys.argv[1])
# One grandchild has a separate process group, and one ignores SIGTERM.
script = 'timeout 600 sh -c "echo \\\\$\\\\$ >$0.group; sleep 600" & (trap "" TERM; sh -c "echo \\\\$\\\\$ >$0.deaf; ' \
    'while :; do sleep 1; done") & sleep 600 & echo $! >$0.plain; wait'
# Programs that were started but not yet registered when the task is killed are not stopped (toolchain/process.py).
registered = threading.Semaphore(0)
send = process._reaper.send

def send_and_count(line):
    send(line)
    if line.startswith("+"):
        registered.release()

process._reaper.send = send_and_count
threads = [threading.Thread(target=process.run, args=(["sh", "-c", script, folder / name],)) for name in ("one", "two")]
for thread in threads:
    thread.start()
process.run(["true"])
for _ in range(3):
    registered.acquire()
(folder / "registered").write_text("1\\n")
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_programs_of_a_killed_task_are_ended(tmp_path: Path, kill: Callable[[int, int], None]) -> None:
    task = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    names = [f"{name}.{kind}" for name in ("one", "two") for kind in ("group", "deaf", "plain")]
    try:
        started = [int(wait_for(tmp_path / name)) for name in names]
        wait_for(tmp_path / "registered")
    finally:
        kill(task.pid, signal.SIGKILL)
        task.wait()
    with killed_afterwards(*started):
        wait_until_gone(*started)


def test_descendants_of_ended_programs_are_left_alone(tmp_path: Path) -> None:
    """The reaper ignores sessions whose leader has exited, because a new session may have the same ID."""
    code = (
        "import os, signal, sys; from toolchain import process; "
        'process.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $! >" + sys.argv[1]]); '
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "daemon")]
    assert subprocess.run(argv, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    daemon = int((tmp_path / "daemon").read_text())
    with killed_afterwards(daemon):
        time.sleep(1)  # the reaper has exited by then
        assert find(daemon)


def test_the_reaper_ends_with_the_task(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from toolchain import process; process.run(['true']); "
        "pid = process._reaper._process.pid; print(pid, Path(f'/proc/{pid}/cwd').readlink(), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    pid, place = done.stdout.split()
    assert (place, done.stderr) == ("/", "")
    assert not find(int(pid))
