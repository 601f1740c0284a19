"""Compute the number of parallel compiler processes from the number of cores and the available memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from toolchain.config import BuildConfig

# Mount points of cgroups version 2 and 1, and their files for the limit, the usage, and the reclaimable page cache that
# the usage includes. See cgroups(7), and the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory.
_CONTROLLERS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory_mib() -> int:
    """Return the memory in MiB that is available without swapping.

    This is MemAvailable (proc(5)) or, if a cgroup limits the memory further, the memory that is left in this cgroup.
    """
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) >> 10
    return min([free, *(left >> 20 for left in _left_in_cgroups())])


def _left_in_cgroups() -> Iterator[int]:
    """For each cgroup that contains this process and has a limit, yield the available memory in bytes."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for controller, root, limit, used, cached in _CONTROLLERS:
        for _, names, path in lines:
            if controller not in names.split(","):
                continue
            folder = Path(root, path.lstrip("/"))
            for group in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # not mounted there, or "max": no limit
                    left = int((group / limit).read_text()) - int((group / used).read_text())
                    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    yield max(0, left + int(statistics.get(cached, 0)))


def compile_jobs(build: BuildConfig, *, available_mib: int | None = None) -> int:
    """Return ``build.jobs`` if it is set, otherwise the number that cores and memory permit, but at least 1."""
    if build.jobs:
        return build.jobs
    free_mib = available_memory_mib() if available_mib is None else available_mib
    return max(1, min(len(os.sched_getaffinity(0)), free_mib // build.memory_per_job_mib))
