"""Fetch a pinned commit with git."""

from __future__ import annotations

from pathlib import Path

from engine.proxies import build_environment
from toolchain import process
from toolchain.errors import CommandFailed

_LIMIT_S = 3600.0


def git(folder: Path, *words: str, log: Path | None = None) -> str:
    """Run git in a checkout, and return its output. Raises CommandFailed."""
    done = process.run(
        # The checkout and its submodules may belong to another user.
        ["git", "-c", "safe.directory=*", "-C", folder, *words],
        env={
            **build_environment(),
            # If the folder is not a git tree, git must not use this repository instead.
            "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        },
        merge_stderr=False,
        limit_s=_LIMIT_S,
        log=log,
    )
    return done.output.strip()


def fetch(url: str, ref: str, folder: Path, *, submodules: bool = False, log: Path | None = None) -> None:
    """Create ``folder`` with a checkout of one commit, without the history.

    Raises CommandFailed; its attribute ``found`` contains the last line that git printed.
    """
    folder.mkdir()
    stalled = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
    try:
        git(folder, "init", "--quiet", log=log)
        git(folder, *stalled, "fetch", "--quiet", "--depth=1", "--no-tags", url, ref, log=log)
        git(folder, "-c", "core.autocrlf=false", "checkout", "--quiet", "--detach", "FETCH_HEAD", log=log)
        if submodules:
            git(folder, *stalled, "submodule", "update", "--quiet", "--init", "--recursive", "--depth=1", log=log)
    except CommandFailed as fault:
        if printed := [line for line in fault.tail.splitlines() if line.strip()]:
            fault.found = printed[-1]
        raise
