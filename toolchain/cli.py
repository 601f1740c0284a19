"""Extend Invoke's command line.

``mirror URL URL`` accepts any number of URLs. Invoke supports only a fixed number of positional arguments, so the URLs
are converted into repeated options. ``lab log NAME`` becomes ``lab log --name=NAME``, because Invoke requires all
positional arguments, and the other actions of ``lab`` take no name. ``TASK --help`` works for every task; without this
module, Invoke would interpret ``--help`` as the value of a positional argument.

For some errors, Invoke would print a traceback; this module ends the program with a message and an exit code instead.
These errors are a malformed invoke.yaml, an option value that is not a number, a JSON document that is nested too
deeply, and operating system errors, such as a full disk when standard output is a file.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from toolchain import caller
from toolchain.errors import UserError, of_system

_MANY = {"mirror": "--url"}
_LIST_FORMATS = ("flat", "nested", "json")
_NESTED = UserError(
    "a JSON document is nested too deeply",
    expected="at most a few hundred levels of nesting",
    fix="check the file or the registry that the task reads",
)


def spelt_out(argv: Sequence[str]) -> list[str]:
    """Return the arguments in a form that Invoke accepts."""
    if argv and not argv[0].startswith("-") and {"--help", "-h"} & set(argv[1:2]):
        return ["--help", argv[0]]
    words: list[str] = []
    option = ""
    for word in _with_board_name(argv):
        if word in _MANY:
            option = _MANY[word]
        elif option and (word.startswith("-") or not {".", ":"} & set(word)):
            option = "" if not word.startswith("-") else option
        elif option and words[-1] != option:
            words.append(option)
        words.append(word)
    return words


def _with_board_name(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with ``--name`` before the name in ``lab log NAME``. Options may precede the name."""
    task = action = ""
    is_value = False
    for word in argv:
        is_option = word.startswith("-")
        if word.startswith(("--name", "-n")):
            task = ""
        elif not is_option and not is_value:
            if (task, action) == ("lab", "log"):
                yield "--name"
                task = ""
            elif task == "lab" and not action:
                action = word
            else:
                task, action = word, ""
        is_value = is_option and task == "lab" and "=" not in word  # all options of lab have a value
        yield word


def _report_invalid_values() -> None:
    """Make Invoke's parser reject invalid numbers, unknown list formats and empty values with a message.

    An empty value is often a shell variable that is not set; the option would silently have its default.
    """
    from invoke.exceptions import ParseError
    from invoke.parser.argument import Argument

    convert = Argument.set_value

    def set_value(argument: Argument, value: Any, cast: bool = True) -> None:
        if argument.name == "list-format" and value not in _LIST_FORMATS:
            raise ParseError(f"--list-format: expected one of {', '.join(_LIST_FORMATS)}, found {value!r}")
        dashes = "--" if len(argument.name or "") > 1 else "-"
        if value == "" and not argument.positional:
            raise ParseError(f"{dashes}{argument.name}: expected a value, found an empty string")
        try:
            convert(argument, value, cast)
        except ValueError as fault:
            raise ParseError(f"{dashes}{argument.name}: expected a number, found {value!r}") from fault

    Argument.set_value = set_value  # type: ignore[method-assign,assignment]


class _Output(io.TextIOWrapper):
    """Standard output. If a write fails with an OSError, the error names "standard output" as the file."""

    def write(self, text: str) -> int:
        with _named("standard output"):
            return super().write(text)

    def flush(self) -> None:
        with _named("standard output"):
            super().flush()


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        fault.filename = name
        raise


def _open_closed_streams() -> None:
    """Open /dev/null in place of the standard streams that the caller closed. Child processes inherit the new streams.

    The streams are opened in the order of their descriptors, because open returns the lowest free descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: PTH123, SIM115 (stays open)


def _leave(code: int, message: str = "") -> NoReturn:
    """End the program with a message. Discard unwritten standard output, so that Python does not write it again."""
    with contextlib.suppress(OSError):
        print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def main() -> None:
    """Run Invoke with these extensions."""
    # Do not search for garbage when the program exits, which took a tenth of the time of a short task.
    atexit.register(gc.freeze)
    from invoke.main import program

    from toolchain.settings import SettingsFiles

    _open_closed_streams()
    os.umask(0o022)  # the modes of folders and files in the products must not depend on the caller
    caller.remember(sys.argv[1:], os.environ)
    _report_invalid_values()
    if isinstance(out := sys.stdout, io.TextIOWrapper):
        how = {"encoding": out.encoding, "errors": out.errors}
        sys.stdout = _Output(out.buffer, **how, line_buffering=out.line_buffering, write_through=out.write_through)
    program.config_class = SettingsFiles
    try:
        try:
            program.run(["inv", *spelt_out(sys.argv[1:])])
        finally:
            sys.stdout.flush()
    except UserError as fault:
        _leave(fault.exit_code, str(fault))
    except RecursionError as fault:
        if traceback.extract_tb(fault.__traceback__)[-1].filename != json.decoder.__file__:
            raise
        _leave(UserError.exit_code, str(_NESTED))
    except BrokenPipeError:
        _leave(128 + signal.SIGPIPE)  # the status that a shell reports for a program killed by SIGPIPE
    except OSError as fault:
        if fault.errno is None:
            raise
        refused = of_system(fault)
        _leave(refused.exit_code, str(refused))


if __name__ == "__main__":
    main()
