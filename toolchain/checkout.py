"""Determine the Git state of the checkout that contains this code: commit and uncommitted changes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolchain import process
from toolchain.config import ROOT
from toolchain.errors import CommandFailed, ProgramMissing

_CHANGES_SHOWN = 50


@functools.cache
def state(folder: Path = ROOT) -> Mapping[str, Any]:
    """Return the state as ``commit`` (40 hex digits), ``dirty`` and the list of ``changes``.

    If ``folder`` is not the top of a Git checkout, ``commit`` is empty, ``dirty`` is None and ``reason`` explains why.

    The state is determined once per process, because git may read all files of the checkout.
    """
    try:
        # No locks are used, so that a git command that the user runs at the same time does not fail.
        git = ("git", "--no-optional-locks")
        top, commit = process.output_of([*git, "rev-parse", "--show-toplevel", "HEAD"], cwd=folder).splitlines()
        if Path(top).resolve() != folder.resolve():
            return _unknown(f"{folder} is a folder of another checkout, {top}")
        changes = process.output_of([*git, "status", "--porcelain"], cwd=folder).splitlines()
    except (CommandFailed, ProgramMissing) as fault:
        return _unknown(fault.summary)
    return {"commit": commit, "dirty": bool(changes), "changes": changes[:_CHANGES_SHOWN]}


def _unknown(reason: str) -> dict[str, Any]:
    return {"commit": "", "dirty": None, "changes": [], "reason": reason}


def origin(folder: Path = ROOT) -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` for a manifest, or an empty dictionary outside a checkout."""
    found = state(folder)
    return {"commit": found["commit"], "dirty": found["dirty"]} if found["commit"] else {}


def described(source: Mapping[str, Any]) -> str:
    """Return the commit as text, or ``unknown`` if there is none."""
    commit = str(source.get("commit", ""))
    return f"{commit} with uncommitted changes" if commit and source.get("dirty") else commit or "unknown"


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    """Return whether both states are the same commit without uncommitted changes, or None if either is unknown."""
    if not one.get("commit") or not other.get("commit"):
        return None
    return one["commit"] == other["commit"] and not one.get("dirty") and not other.get("dirty")
