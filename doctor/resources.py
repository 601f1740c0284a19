"""Check the free disk space and memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from doctor.finding import Finding, Verdict, fail, ok
from toolchain import files
from toolchain.config import BuildConfig
from toolchain.jobs import available_memory_mib, compile_jobs

# This is enough for a bootable Debian image with a torch wheel, the builder image, the exported tree and the previous
# exported tree.
_DISK_WANTED_MIB = 12 * 1024
_DISK_NEEDED_MIB = 4 * 1024
_DISK_FIX = "free some space, or set build.folder in invoke.yaml to a folder on a larger disk"


def check_disk(folder: Path, *, wanted_mib: int = _DISK_WANTED_MIB, needed_mib: int = _DISK_NEEDED_MIB) -> Finding:
    """Check the free space in the build folder, and write a file there."""
    done = f"read the free space of {folder}, and wrote 1 MiB"
    folder.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(folder).free >> 20
    trial = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        trial.write_bytes(bytes(1 << 20))
    except OSError as fault:
        return fail("free disk", done, f"cannot write there: {fault.strerror}", _DISK_FIX)
    finally:
        trial.unlink(missing_ok=True)
    verdict = Verdict.FAIL if free_mib < needed_mib else Verdict.WARN if free_mib < wanted_mib else Verdict.OK
    return Finding(
        check="free disk",
        verdict=verdict,
        done=done,
        found=f"{free_mib} MiB free; a first build takes about {needed_mib} MiB; recommended: {wanted_mib} MiB",
        fix="" if verdict is Verdict.OK else _DISK_FIX,
    )


def check_engine_disk(data_root: Path) -> Finding:
    """Check the free space in the folder where the engine stores its data."""
    done = f"read the free space of {data_root}"
    free_mib = shutil.disk_usage(data_root).free >> 20
    found = f"{free_mib} MiB free; the images of a first build take up to {_DISK_NEEDED_MIB} MiB"
    if free_mib < _DISK_NEEDED_MIB:
        fix = "run docker system prune, or set data-root in daemon.json to a folder on a larger disk"
        return fail("engine's disk", done, found, fix)
    return ok("engine's disk", done, found)


def on_another_disk(data_root: Path, folder: Path) -> bool:
    """Return whether ``data_root`` is on a different local disk from ``folder``, or False if this is unknown."""
    with contextlib.suppress(OSError):
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        return data_root.is_dir() and data_root.stat().st_dev != existing.stat().st_dev
    return False


def check_memory(build: BuildConfig, *, available_mib: int | None = None) -> Finding:
    """Check the free memory for each compiler process. As in builds, toolchain.jobs computes their number."""
    free_mib = available_memory_mib() if available_mib is None else available_mib
    cores = len(os.sched_getaffinity(0))
    fitting = free_mib // build.memory_per_job_mib
    wanted = compile_jobs(build, available_mib=free_mib)
    each_mib = free_mib // wanted
    verdict, fix = Verdict.OK, ""
    if fitting < 1:
        verdict = Verdict.FAIL
        fix = (
            "stop other programs, or raise the cgroup's memory limit, so that a compiler has "
            f"{build.memory_per_job_mib} MiB"
        )
    elif wanted > fitting:
        verdict = Verdict.WARN
        fix = f"set build.jobs to {fitting} or 0 (automatic) in invoke.yaml; otherwise, the kernel may kill compilers"
    elif wanted < cores and not build.jobs:
        verdict = Verdict.WARN
        fix = f"add memory: {cores - wanted} of {cores} cores are idle during compilation"
    return Finding(
        check="free memory",
        verdict=verdict,
        done="read MemAvailable, and the limits of this process's cgroups",
        found=f"{free_mib} MiB available, {each_mib} MiB for each of {wanted} compile jobs;"
        f" a job takes {build.memory_per_job_mib} MiB",
        fix=fix,
    )


def writable(folder: Path) -> Path:
    """Return the folder or, if no folder can be created in it, the system's temporary folder.

    ``check_disk`` reports why a folder is not writable.
    """
    with contextlib.suppress(OSError), files.scratch_folder(folder, "doctor"):
        return folder
    return Path(tempfile.gettempdir())
