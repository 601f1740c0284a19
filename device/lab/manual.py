"""Ask the user to switch a board off and on if it has no remotely controlled power switch (``power=manual``).

labgrid's ManualPowerDriver reads the answer from standard input, which the suite's process does not have. Therefore,
the task asks the user before it starts the suite.
"""

from __future__ import annotations

import contextlib
import select
import termios
import threading
from pathlib import Path

from toolchain import process, progress
from toolchain.errors import CommandFailed, UserError

_POLL_S = 0.2
_one_question = threading.Lock()


def ask_to_switch(name: str, terminal: Path = Path("/dev/tty")) -> None:
    """Ask the user to switch the board off and on, and wait for the answer.

    If several runs are in progress, their prompts appear one after the other. Keys that are pressed before the prompt
    appears are ignored. Raises UserError if there is no terminal, and CommandFailed if the user presses Ctrl-C.
    """
    interrupted = threading.Event()
    with process.on_interrupt(interrupted.set), contextlib.ExitStack() as stack:
        while not _one_question.acquire(timeout=_POLL_S):
            _require_going_on(name, interrupted)
        stack.callback(_one_question.release)
        try:
            answers = stack.enter_context(terminal.open("rb", buffering=0))
        except OSError as fault:
            raise UserError(
                f"{name} must be switched off and on by hand, but there is no terminal for the prompt",
                expected="a terminal, because the board has power=manual",
                found=f"{terminal}: {fault.strerror}",
                fix="run the task in a terminal, or remove power=manual from lab.boards and start the board first",
            ) from fault
        termios.tcflush(answers, termios.TCIFLUSH)  # a key that was pressed before the prompt is not the answer
        progress.say(f"    {name}: switch the board off and on, then press Enter")
        while not select.select([answers], [], [], _POLL_S)[0]:
            _require_going_on(name, interrupted)
        answers.read(4096)


def _require_going_on(name: str, interrupted: threading.Event) -> None:
    if interrupted.is_set():
        raise CommandFailed(f"interrupted before {name} was switched on")
