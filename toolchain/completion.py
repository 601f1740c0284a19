"""What makes a shell complete ./inv: the files of completions/, which ask Invoke for the candidates."""

from __future__ import annotations

import difflib

from toolchain.config import ROOT
from toolchain.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The text for a shell to evaluate. Raises UserError for a shell that there is none for."""
    if shell not in SHELLS:
        near = difflib.get_close_matches(shell, SHELLS, n=1, cutoff=0.5)
        raise UserError(
            "there is no completion for that shell",
            expected=f"one of {', '.join(SHELLS)}",
            found=repr(shell),
            fix=f"./inv completion {near[0] if near else SHELLS[0]}",
        )
    return (ROOT / f"completions/inv.{shell}").read_text()
