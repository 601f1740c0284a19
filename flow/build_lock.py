"""A lock that lets only one build at a time write to a target's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from toolchain import files, leftovers
from toolchain.errors import UserError


@contextlib.contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on a target's folder, and remove the unfinished files of killed builds.

    A folder that is read-only for this user can be used as long as no step has to run. Raises RootNeeded if the lock
    file cannot be opened, or UserError if another build holds the lock.
    """
    refusal = UserError(
        f"another build is running in {folder}",
        expected="one build of a target at a time",
        found="a lock on this folder",
        fix="wait for the other build, or set build.folder to another folder",
    )
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.held(folder / "lock", refusal))
        except PermissionError as fault:
            raise files.belongs_to_another(folder, str(fault)) from fault
        shared = (folder.parent / "archives", folder.parent / "sources")
        places = (folder, folder / "work", folder / "mirror", *shared)
        leftovers.clear((path for place in places for path in files.unfinished_in(place)), folder.parent)
        yield
