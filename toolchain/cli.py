"""Invoke's command line, with additions.

``mirror URL URL`` takes any number of URLs: Invoke itself gives a task a fixed number of positional arguments, so they
are spelt as repeated options for it. And ``TASK --help`` helps with every task: where a task has a positional argument,
Invoke would take ``--help`` for that.

Faults that Invoke would report by a traceback end the program with their text and an exit code: a form of invoke.yaml
that is wrong, an option that is no number, and whatever the operating system refuses, a full disk under the standard
output included.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from toolchain import caller
from toolchain.errors import UserError, of_system

_MANY = {"mirror": "--url"}


def spelt_out(argv: Sequence[str]) -> list[str]:
    """The arguments as Invoke understands them."""
    if argv and not argv[0].startswith("-") and {"--help", "-h"} & set(argv[1:2]):
        return ["--help", argv[0]]
    words: list[str] = []
    option = ""
    for word in argv:
        if word in _MANY:
            option = _MANY[word]
        elif option and (word.startswith("-") or not {".", ":"} & set(word)):
            option = "" if not word.startswith("-") else option
        elif option and words[-1] != option:
            words.append(option)
        words.append(word)
    return words


def _refuse_what_is_no_number() -> None:
    """Have Invoke's parser report an option's value that is no number; it would let the ValueError through."""
    from invoke.exceptions import ParseError
    from invoke.parser.argument import Argument

    convert = Argument.set_value

    def set_value(argument: Argument, value: Any, cast: bool = True) -> None:
        try:
            convert(argument, value, cast)
        except ValueError as fault:
            dashes = "--" if len(argument.name or "") > 1 else "-"
            raise ParseError(f"{dashes}{argument.name}: expected a number, found {value!r}") from fault

    Argument.set_value = set_value  # type: ignore[method-assign,assignment]


class _Output(io.TextIOWrapper):
    """Standard output, which gives its name to what the operating system refuses: a full disk, say."""

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


def _leave(code: int, said: str = "") -> NoReturn:
    """End the program with a text. What could not be written to standard output is dropped: it is not tried again."""
    with contextlib.suppress(OSError):
        print(said, end="\n" if said else "", file=sys.stderr, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def main() -> None:
    """Run Invoke."""
    from invoke.main import program

    from toolchain.settings import SettingsFiles

    caller.remember(sys.argv[1:], os.environ)
    _refuse_what_is_no_number()
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
    except BrokenPipeError:
        _leave(128 + signal.SIGPIPE)  # as the shell reports other programs whose reader has gone
    except OSError as fault:
        if fault.errno is None:
            raise
        refused = of_system(fault)
        _leave(refused.exit_code, str(refused))


if __name__ == "__main__":
    main()
