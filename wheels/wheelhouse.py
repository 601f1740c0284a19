"""Wheelhouses are configured folders with wheels. Finished wheels are put into the first wheelhouse."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolchain import files
from toolchain.config import ROOT, Config

REPLACED = "replaced"
"""The folder in a wheelhouse for wheels that were replaced by a different one of the same name."""


def wheelhouses(config: Config) -> list[Path]:
    """Return the absolute paths of the configured folders."""
    return [ROOT / folder for folder in config.torch.wheelhouse]


def place(wheel: Path, wheelhouse: Path) -> tuple[Path, list[str]]:
    """Copy a wheel into the wheelhouse; return the path of the copy, and any warnings.

    A different wheel of the same name is moved to ``REPLACED``. If DiskFull is raised, the wheelhouse is unchanged.
    """
    target = wheelhouse / wheel.name
    warnings = []
    with files.room_for(wheel.name, wheelhouse), files.replacing(target) as part:
        shutil.copyfile(wheel, part)
        part.chmod(0o644)
        if target.is_file() and (before := files.sha256_of(target)) != files.sha256_of(wheel):
            aside = wheelhouse / REPLACED / before[:16] / wheel.name
            aside.parent.mkdir(parents=True, exist_ok=True)
            # The hard link is created first, so that the old wheel always exists under at least one of the two names.
            files.remove(aside)
            try:
                aside.hardlink_to(target)
            except OSError:  # no hard links on this file system, or none to another user's file
                with files.replacing(aside) as copy:
                    shutil.copyfile(target, copy)
            warnings.append(f"{target.name} existed with different contents; that wheel was moved to {aside}")
    return target, warnings
