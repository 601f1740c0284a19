"""How many compiler processes fit: by cores and by free memory."""

from __future__ import annotations

import os
from pathlib import Path

from toolchain.config import BuildConfig


def available_memory_mib() -> int:
    """Memory that new processes can have without swapping, MiB (MemAvailable of proc(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) >> 10
    return 0


def compile_jobs(build: BuildConfig) -> int:
    """Compiler processes at once: ``build.jobs``, or as many as cores and free memory allow, at least one."""
    if build.jobs:
        return build.jobs
    by_memory = available_memory_mib() // build.memory_per_job_mib
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))
