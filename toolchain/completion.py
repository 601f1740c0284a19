"""Provide the shell scripts in completions/, which complete ./inv commands with candidates from Invoke."""

from __future__ import annotations

import difflib

from toolchain.config import ROOT
from toolchain.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the completion script of a shell. Raises UserError for an unsupported shell."""
    if shell not in SHELLS:
        near = difflib.get_close_matches(shell, SHELLS, n=1, cutoff=0.5)
        raise UserError(
            "completion is not available for this shell",
            expected=f"one of {', '.join(SHELLS)}",
            found=repr(shell),
            fix=f"run ./inv completion {near[0] if near else SHELLS[0]}",
        )
    return (ROOT / f"completions/inv.{shell}").read_text()
