"""Put a finished wheel into a wheelhouse."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolchain import files

REPLACED = "replaced"
"""Folder in the wheelhouse for wheels that were replaced by another one of the same name."""


def place(wheel: Path, wheelhouse: Path) -> tuple[Path, list[str]]:
    """Copy a wheel into the wheelhouse; its path there, and warnings.

    A different wheel of the same name is moved to another folder. Raises DiskFull; the wheelhouse is unchanged then.
    """
    target = wheelhouse / wheel.name
    warnings = []
    with files.room_for(wheel.name, wheelhouse), files.replacing(target) as part:
        shutil.copyfile(wheel, part)
        part.chmod(0o644)
        if target.is_file() and (before := files.sha256_of(target)) != files.sha256_of(wheel):
            aside = wheelhouse / REPLACED / before[:16] / wheel.name
            aside.parent.mkdir(parents=True, exist_ok=True)
            # A hard link first: there is a wheel under one of the two names at any time.
            files.remove(aside)
            aside.hardlink_to(target)
            warnings.append(f"{target.name} existed with other contents; that wheel is now {aside}")
    return target, warnings
