"""Invoke's command line, with two additions.

``mirror URL URL`` takes any number of URLs: Invoke itself gives a task a fixed number of positional arguments, so they
are spelt as repeated options for it. And ``TASK --help`` helps with every task: where a task has a positional argument,
Invoke would take ``--help`` for that. And what is wrong with invoke.yaml's form is told as every other fault of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from toolchain import caller

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


def main() -> None:
    """Run Invoke."""
    from invoke.main import program

    from toolchain.settings import SettingsFiles

    caller.remember(sys.argv[1:], os.environ)
    program.config_class = SettingsFiles
    program.run(["inv", *spelt_out(sys.argv[1:])])


if __name__ == "__main__":
    main()
