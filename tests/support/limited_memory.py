"""A cgroup with a memory limit, as in a container."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolchain.config import ROOT


@contextlib.contextmanager
def limited_group(mib: int) -> Iterator[Path]:
    """Create the cgroup, with a child that has no limit; yield the cgroup's folder."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_1.parent, "memory.max")
    group = root / f"pitorch-test-{os.getpid()}"
    try:
        try:
            (group / "child").mkdir(parents=True)
        except OSError as fault:
            pytest.skip(f"cannot create a cgroup: {fault}")
        try:
            (group / limit).write_text(str(mib << 20))
        except OSError as fault:
            pytest.skip(f"cannot use the memory controller: {fault}")
        yield group
    finally:
        for path in (group / "child", group):
            if path.is_dir():
                path.rmdir()


def output_in(group: Path, program: str) -> str:
    """Run a Python program in the cgroup and return its output."""
    enter = f"import os; from pathlib import Path; Path('{group}/cgroup.procs').write_text(str(os.getpid()))\n"
    done = subprocess.run([sys.executable, "-c", enter + program], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout
