"""Tests of the number of parallel compiler processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from limited_memory import limited_group, output_in

from toolchain.config import ROOT, BuildConfig
from toolchain.jobs import available_memory_mib, compile_jobs


def test_the_configured_number_is_used() -> None:
    assert compile_jobs(BuildConfig(jobs=7)) == 7
    assert compile_jobs(BuildConfig(jobs=1)) == 1


def test_available_memory_is_below_the_total() -> None:
    said = subprocess.run(["free", "--mebi"], check=True, capture_output=True, text=True).stdout.splitlines()
    total = int(said[1].split()[1])
    assert 0 < available_memory_mib() <= total


def test_at_least_one_process_runs() -> None:
    assert compile_jobs(BuildConfig(memory_per_job_mib=65536 * 1024)) == 1


def test_cores_limit_the_number_of_processes() -> None:
    assert compile_jobs(BuildConfig(memory_per_job_mib=1)) == len(os.sched_getaffinity(0))


def test_memory_limits_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    per_job = max(1, available_memory_mib() // 3)
    assert compile_jobs(dataclasses.replace(BuildConfig(), memory_per_job_mib=per_job)) in (2, 3, 4)


def test_cpu_affinity_limits_the_number_of_processes() -> None:
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from toolchain.config import BuildConfig
from toolchain.jobs import compile_jobs
print(compile_jobs(BuildConfig(memory_per_job_mib=1)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("below", ["", "child"])
def test_the_memory_limit_of_a_cgroup_or_parent_counts(below: str) -> None:
    """A container with a memory limit runs in a cgroup with this limit."""
    with limited_group(200) as group:
        program = "from toolchain.jobs import available_memory_mib; print(available_memory_mib())"
        available_mib = int(output_in(group / below, program))
    assert 150 < available_mib <= 200
