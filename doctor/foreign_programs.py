"""Run programs built for the target: small ARM programs (one also lists a directory) and a cross-compiled program.

If a 64-bit process, such as qemu-user, reads a directory on ext4, the offset of each entry is a 64-bit hash. An
emulated 32-bit program whose C library stores this offset in a 32-bit field gets the error EOVERFLOW from readdir(3).
Many programs treat this error as the end of the directory. As a result, an initramfs built under qemu-user on ext4
lacks nearly all drivers, although no error is reported. See https://sourceware.org/bugzilla/show_bug.cgi?id=23960 and
https://lore.kernel.org/lkml/87bm56vqg4.fsf@mid.deneb.enyo.de/.
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import psutil

from doctor.emulation import EMULATOR_PACKAGES
from doctor.finding import RUN_LIMIT_S, Finding, fail, first_version, ok, warn
from images import probe
from toolchain import files, process


def check_execution(folder: Path) -> Finding:
    """Run a static 32-bit ARM program of 316 bytes."""
    return _execution("32-bit ARM program", write_probe(folder), output=probe.MESSAGE)


def check_execution_64(folder: Path) -> Finding:
    """Run a static 64-bit ARM program, as a build of a 64-bit image does."""
    return _execution("64-bit ARM program", write_probe(folder, "arm64"), output=b"")


def _execution(name: str, program: Path, *, output: bytes) -> Finding:
    done = f"ran a program of {program.stat().st_size} bytes in {program.parent.parent}"
    try:
        ended = subprocess.run([program], check=False, capture_output=True, timeout=RUN_LIMIT_S)
    except OSError as fault:
        reasons = {
            errno.ENOEXEC: ("the kernel cannot start it", "run ./inv --set-up to register the emulator"),
            errno.EACCES: ("the disk is mounted noexec", "set build.folder in invoke.yaml to a folder on another disk"),
            errno.ENOENT: (
                "the registered emulator no longer exists",
                "run ./inv --set-up to install and register it; if its package is already installed, reinstall the "
                f"package with apt-get install --reinstall ({EMULATOR_PACKAGES})",
            ),
        }
        found, fix = reasons.get(fault.errno or 0, (fault.strerror or str(fault), "apply the fixes listed above"))
        return fail(name, done, found, fix)
    except subprocess.TimeoutExpired:
        return fail(name, done, f"still running after {RUN_LIMIT_S:.0f} s", "update the emulator")
    if ended.returncode == 0 and ended.stdout == output:
        return ok(name, done, output.decode().strip() or "the program runs")
    found = f"{process.explain_exit(ended.returncode)}: {ended.stderr.decode(errors='replace').strip()[:200]}"
    return fail(name, done, found, "update the emulator; see also 'emulator and kernel' and 'vm.mmap_min_addr' above")


def check_listing(folder: Path) -> Finding:
    """Run a 32-bit program that lists a directory of 64 files on the build disk (see the module docstring)."""
    name = "32-bit directory listing"
    program = write_probe(folder)
    listed = folder / "listed"
    listed.mkdir(exist_ok=True)
    for number in range(probe.LISTED_AT_LEAST - 2):
        (listed / f"file-{number:02}").touch()
    done = f"listed a directory of {probe.LISTED_AT_LEAST - 2} files on {file_system(folder)} at {folder.parent}"
    try:
        status = subprocess.run([program, listed], check=False, capture_output=True, timeout=RUN_LIMIT_S).returncode
    except (OSError, subprocess.TimeoutExpired) as fault:
        return fail(name, done, f"the program does not run: {fault}", "first fix '32-bit ARM program' (see above)")
    if status == 0:
        return ok(name, done, "all entries fit into 32-bit fields")
    if status == probe.EOVERFLOW:
        return warn(
            name,
            done,
            "EOVERFLOW: entries have 64-bit numbers, so emulated 32-bit programs may see an empty directory",
            "the build steps work around it; for your own emulated programs, set build.folder to a folder on tmpfs, "
            "xfs or btrfs, or compile them with -D_FILE_OFFSET_BITS=64",
        )
    reasons = {2: "the directory could not be opened", 3: "getdents64 failed", 4: "the listing was incomplete"}
    found = reasons.get(status, process.explain_exit(status))
    return fail(name, done, found, "set build.folder in invoke.yaml to a folder on a tmpfs, xfs, btrfs or ext4 disk")


def check_cross_compiler(folder: Path, gnu: str) -> Finding:
    """Compile a program for the target with the native cross compiler and run it."""
    name = "cross compiler"
    compiler = process.require_program(f"{gnu}-g++", "to compile for the target at native speed")
    source, program = folder / "answer.cpp", folder / "answer"
    source.write_text("#include <vector>\nint main() { return static_cast<int>(std::vector<int>(42).size()); }\n")
    process.run(
        [compiler, "-static", "-o", program, source],
        limit_s=RUN_LIMIT_S,
        fix="run apt-get install --reinstall g++-" + gnu,
    )
    done = f"compiled a C++ program with {compiler.name}, and ran it"
    status = subprocess.run([program], check=False, capture_output=True, timeout=RUN_LIMIT_S).returncode
    if status != 42:
        return fail(name, done, f"expected status 42, got {status}", "apply the fixes for the ARM programs above")
    version = first_version(process.output_of([compiler, "-dumpfullversion"], limit_s=RUN_LIMIT_S))
    return ok(name, done, f"version {version}; the program returned the expected status")


def write_probe(folder: Path, architecture: str = "armhf") -> Path:
    """Return the path of an ARM program in this folder; write the program if it does not exist."""
    program = folder / f"probe-{architecture}"
    if not program.exists():
        with files.replacing(program) as aside:
            aside.write_bytes(probe.PROGRAMS[architecture]())
            aside.chmod(0o755)
    return program


def file_system(folder: Path) -> str:
    """Return the type of the file system that contains a folder."""
    best = ("", "unknown")
    for mount in psutil.disk_partitions(all=True):
        if folder.resolve().is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= len(best[0]):
            best = (mount.mountpoint, mount.fstype)
    return best[1]
