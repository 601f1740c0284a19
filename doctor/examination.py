"""What this machine can and cannot do for us, found out by doing it; for each finding, the fix.

A check does what a build does, on a small scale: it executes a 32-bit ARM program, lists a folder from it, builds a
container for the target's platform, compiles and runs a program, verifies the mirror's lists. A file that exists or
a version that looks right proves less. What cannot be done is a finding, never an exception: ``examine`` always
returns the whole list.

The listing deserves a word. ext4 numbers directory entries by a 64-bit hash for a 64-bit process, and qemu-user is
one. A 32-bit program whose C library has 32-bit fields for that number gets EOVERFLOW from readdir(3) and often takes
it for the end of the folder: an initramfs made under qemu-user on ext4 lacks nearly all drivers, and nothing says so.
See https://sourceware.org/bugzilla/show_bug.cgi?id=23960 and https://lore.kernel.org/lkml/87bm56vqg4.fsf@mid.deneb.enyo.de/.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import docker.errors
import requests
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import daemon as engine
from images import apt, probe
from toolchain import files, process
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import BuildConfig, Config
from toolchain.errors import ChecksFailed, CommandFailed, MirrorPocketUnusable, UserError
from toolchain.jobs import available_memory_mib, compile_jobs

BINFMT = Path("/proc/sys/fs/binfmt_misc")
MMAP_MIN_ADDR = Path("/proc/sys/vm/mmap_min_addr")
EMULATORS = Path(__file__).with_name("emulators.toml")

_OLDEST_ENGINE = (20, 10)
_SLOW_DRIVERS = ("vfs", "fuse-overlayfs")
# A debian bootable image with a torch wheel, its builder image, the exported tree and one previous generation.
_DISK_WANTED_MIB = 12 * 1024
_DISK_NEEDED_MIB = 4 * 1024
_EMULATOR_PACKAGES = "Debian 12: qemu-user-static; Debian 13: qemu-user qemu-user-binfmt"
_RUN_LIMIT_S = 60.0
_MIRROR_LIMIT_S = 120.0


class Verdict(enum.StrEnum):
    """How a check ended. Only FAIL stands in the way of a build."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check: what was done, what was found, and what to type or change."""

    check: str
    verdict: Verdict
    done: str
    found: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A row of emulators.toml."""

    symptom: str
    fix: str
    guests: tuple[str, ...]
    sources: tuple[str, ...]
    qemu_from: str = ""
    qemu_below: str = ""
    package_from: str = ""
    package_below: str = ""
    kernel_from: str = ""
    kernel_below: str = ""

    def hits(self, *, guest: str, qemu: str, package: str, kernel: str) -> bool:
        """Whether all of its conditions hold. An empty version is unknown, and no condition holds for it."""
        return (
            guest in self.guests
            and _within(qemu, self.qemu_from, self.qemu_below, _numbers_below)
            and _within(package, self.package_from, self.package_below, _package_below)
            and _within(kernel, self.kernel_from, self.kernel_below, _numbers_below)
        )


def examine(config: Config) -> list[Finding]:
    """Do every check, in the order of the data flow. Starts the engine where none runs."""
    folder, wide = config.build_root, config.image.architecture == "arm64"
    with files.scratch_folder(_writable(folder), "doctor") as scratch:
        return [
            _guarded("init", check_init),
            _guarded("rights", check_rights),
            _guarded("free disk", lambda: check_disk(folder)),
            _guarded("free memory", lambda: check_memory(config.build)),
            _guarded("binfmt flags", lambda: check_registration(config.image.target)),
            _guarded("vm.mmap_min_addr", lambda: check_mmap_min_addr(MMAP_MIN_ADDR)),
            _guarded("emulator and kernel", lambda: check_emulator(config)),
            _guarded("32-bit ARM program", lambda: check_execution(scratch)),
            *([_guarded("64-bit ARM program", lambda: check_execution_64(scratch))] if wide else []),
            _guarded("32-bit directory listing", lambda: check_listing(scratch)),
            _guarded("cross compiler", lambda: check_cross_compiler(scratch, config.image.target.gnu)),
            *_engine_findings(config),
            _guarded("apt mirror", lambda: check_mirror(config, scratch)),
            _guarded("package index", lambda: check_package_index(scratch)),
            _guarded("virtual machine", check_virtual_machine),
            _guarded("NFS server", check_nfs_server),
            _guarded("local registry", check_local_registry),
        ]


def require_healthy(findings: Sequence[Finding]) -> None:
    """Raise ChecksFailed that names the checks which failed, if any did."""
    failed = [item.check for item in findings if item.verdict is Verdict.FAIL]
    if failed:
        raise ChecksFailed(
            f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
            fix="each finding above has its fix",
        )


def as_json(findings: Sequence[Finding]) -> str:
    """The findings for another program."""
    healthy = all(item.verdict is not Verdict.FAIL for item in findings)
    document = {"schema": 1, "healthy": healthy, "checks": [asdict(item) for item in findings]}
    return json.dumps(document, indent=2) + "\n"


def print_table(findings: Sequence[Finding], *, console: Console | None = None) -> None:
    """The findings for a reader, on stdout."""
    out = console or Console(highlight=False)
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = Table(title="doctor", title_justify="left", box=None, padding=(0, 1, 1, 0))
    for heading in ("", "check", "what was found"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "")
    for item in findings:
        text = Text(item.found)
        text.append(f"\n{item.done}", style="dim")
        if item.fix:
            text.append(f"\n→ {item.fix}", style="bold")
        table.add_row(Text(item.verdict.value, style=colours[item.verdict]), Text(item.check), text)
    out.print(table)
    counts = {verdict: sum(item.verdict is verdict for item in findings) for verdict in Verdict}
    out.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """A check's finding; a fault that the user can fix is a finding too, and so is a program that does not end."""
    try:
        return check()
    except UserError as fault:
        found = "; ".join(part for part in (fault.summary, fault.found) if part)
        return Finding(check=name, verdict=Verdict.FAIL, done="tried", found=found, fix=fault.fix)
    except subprocess.TimeoutExpired as fault:
        line = process.pasteable([fault.cmd] if isinstance(fault.cmd, str | os.PathLike) else fault.cmd)
        found = f"{line} was still running after {fault.timeout:.0f} s"
        fix = "run it by hand and see what it waits for; a foreign program hangs where its emulator does: update that"
        return Finding(check=name, verdict=Verdict.FAIL, done="tried", found=found, fix=fix)
    except OSError as fault:
        return Finding(check=name, verdict=Verdict.FAIL, done="tried", found=str(fault), fix="fix what it names")


# ------------------------------------------------------------------------------------------------ the machine


def check_init() -> Finding:
    """Who starts the engine: systemd or we. Neither is a fault."""
    booted = Path("/run/systemd/system").is_dir()
    found = "systemd is the init: it runs the engine" if booted else "no systemd: ./inv starts dockerd itself"
    return Finding(check="init", verdict=Verdict.OK, done="looked for /run/systemd/system", found=found)


def check_rights() -> Finding:
    """Root's rights, which building a root, exporting and serving need: held, or at hand by sudo."""
    name = "rights"
    if os.geteuid() == 0:
        done = "made a mount namespace"
        ended = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "--", "true"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_RUN_LIMIT_S,
        )
        if ended.returncode == 0:
            return Finding(check=name, verdict=Verdict.OK, done=done, found="you are root, and may mount")
        found = f"you are root, but may not mount: {' '.join(ended.stderr.split())}"
        return Finding(
            check=name, verdict=Verdict.FAIL, done=done, found=found, fix="run this container with --privileged"
        )
    who = f"you are an ordinary user (id {os.geteuid()})"
    if shutil.which("sudo") is None:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            done="looked for sudo",
            found=f"{who}, and there is no sudo",
            fix="run ./inv as root, or have sudo installed and be allowed to use it",
        )
    done = "executed a program by sudo, without a password"
    ended = subprocess.run(
        ["sudo", "--non-interactive", "true"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=_RUN_LIMIT_S,
    )
    if ended.returncode == 0:
        found = f"{who}, and sudo works: sudo ./inv build-image"
        return Finding(check=name, verdict=Verdict.OK, done=done, found=found)
    return Finding(
        check=name,
        verdict=Verdict.WARN,
        done=done,
        found=f"{who}; {' '.join(ended.stderr.split()) or 'sudo refused'}",
        fix="sudo --validate shows whether you may; then sudo ./inv build-image",
    )


def check_disk(folder: Path, *, wanted_mib: int = _DISK_WANTED_MIB, needed_mib: int = _DISK_NEEDED_MIB) -> Finding:
    """Room for what a build leaves there, in MiB."""
    done = f"asked the file system of {folder}, and wrote 1 MiB"
    folder.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(folder).free >> 20
    trial = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        trial.write_bytes(bytes(1 << 20))
    except OSError as fault:
        return Finding(
            check="free disk",
            verdict=Verdict.FAIL,
            done=done,
            found=f"cannot write there: {fault.strerror}",
            fix="free some space, or point build.folder in invoke.yaml at a larger disk",
        )
    finally:
        trial.unlink(missing_ok=True)
    verdict = Verdict.FAIL if free_mib < needed_mib else Verdict.WARN if free_mib < wanted_mib else Verdict.OK
    return Finding(
        check="free disk",
        verdict=verdict,
        done=done,
        found=f"{free_mib} MiB free; a first build takes about {needed_mib} MiB, comfortable are {wanted_mib} MiB",
        fix="" if verdict is Verdict.OK else "free some space, or point build.folder in invoke.yaml at a larger disk",
    )


def check_memory(build: BuildConfig, *, available_mib: int | None = None) -> Finding:
    """Free memory for each compiler process, by the measure that builds go by (toolchain.jobs)."""
    free_mib = available_memory_mib() if available_mib is None else available_mib
    cores = len(os.sched_getaffinity(0))
    fitting = free_mib // build.memory_per_job_mib
    wanted = compile_jobs(build, available_mib=free_mib)
    each_mib = free_mib // wanted
    verdict, fix = Verdict.OK, ""
    if fitting < 1:
        verdict = Verdict.FAIL
        fix = f"free memory, or raise the cgroup's limit, until {build.memory_per_job_mib} MiB are there for a compiler"
    elif wanted > fitting:
        verdict = Verdict.WARN
        fix = f"set build.jobs to {fitting} (or 0) in invoke.yaml, or the kernel may kill compilers"
    elif wanted < cores and not build.jobs:
        verdict = Verdict.WARN
        fix = f"memory keeps {cores - wanted} of {cores} cores idle while compiling; more would help"
    return Finding(
        check="free memory",
        verdict=verdict,
        done="read MemAvailable, and the limits of the cgroups that this process is in",
        found=f"{free_mib} MiB available, {each_mib} MiB for each of {wanted} compile jobs;"
        f" one takes {build.memory_per_job_mib}",
        fix=fix,
    )


# ------------------------------------------------------------------------------------------------ emulation


def check_registration(target: Architecture) -> Finding:
    """``check_binfmt`` for the target's emulator, where its programs need one."""
    return _own_programs("binfmt flags", target) or check_binfmt(BINFMT / f"qemu-{target.qemu}")


def _own_programs(check: str, target: Architecture) -> Finding | None:
    """The finding of a check of emulators where the target's programs are this machine's own."""
    with contextlib.suppress(UserError):
        if host_architecture() == target:
            found = f"{target.debian} programs are this machine's own: no emulator needed"
            return Finding(
                check=check, verdict=Verdict.OK, done="asked dpkg for this machine's architecture", found=found
            )
    return None


def check_binfmt(entry: Path) -> Finding:
    """The kernel's registration of the emulator. F fixes it, so that containers need no emulator of their own."""
    done = f"read {entry}"
    name = "binfmt flags"
    fix = "./inv --set-up registers it (as root, in a container with --privileged)"
    if platform.machine().startswith(("armv7", "armv8l")):
        return Finding(
            check=name, verdict=Verdict.OK, done="uname", found="this machine is an ARM one: no emulator needed"
        )
    if not (entry.parent / "status").exists():
        found = f"binfmt_misc is not mounted at {entry.parent}"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix=fix)
    if not entry.exists():
        found = f"{entry.name} is not registered"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix=fix)
    text = entry.read_text()
    fields = dict(line.partition(" ")[::2] for line in text.splitlines())
    flags = fields.get("flags:", "").strip()
    found = f"flags {flags or 'none'}, interpreter {fields.get('interpreter', 'unknown')}"
    if not text.startswith("enabled") or (entry.parent / "status").read_text().strip() != "enabled":
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found + ", disabled", fix=f"echo 1 > {entry}")
    if "F" not in flags:
        found += ": without F the emulator is looked for inside each container"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix=fix)
    return Finding(check=name, verdict=Verdict.OK, done=done, found=found)


def check_mmap_min_addr(sysctl: Path) -> Finding:
    """The lowest address a process may map: an ARM program's is 0x10000, and the emulator reserves from here on."""
    name, done = "vm.mmap_min_addr", f"read {sysctl}"
    try:
        value = int(sysctl.read_text())
    except (FileNotFoundError, ValueError):
        # The emulator reads it too, and gives up without it: https://github.com/microsoft/WSL/issues/10049
        found = "the kernel does not tell; qemu-user cannot place the guest's memory then (seen on WSL 1)"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix="use WSL 2 or a Linux kernel")
    if value > 0x10000:
        found = f"{value}: above 65536, where ARM programs are linked to start"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix="sysctl vm.mmap_min_addr=65536")
    return Finding(check=name, verdict=Verdict.OK, done=done, found=f"{value} (at most 65536 is right)")


def known_bad_pairs(table: Path = EMULATORS) -> tuple[Pair, ...]:
    """The rows of emulators.toml."""
    rows: list[dict[str, Any]] = tomllib.loads(table.read_text())["pair"]
    return tuple(Pair(**{key: _frozen(value) for key, value in row.items()}) for row in rows)


def check_emulator(config: Config) -> Finding:
    """The emulator's version beside the kernel's, looked up among the pairs that are known to be bad."""
    name = "emulator and kernel"
    if (own := _own_programs(name, config.image.target)) is not None:
        return own
    program = _emulator(config.image.target.qemu)
    if program is None:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            done="looked for the emulator that binfmt_misc names, and on the PATH",
            found="none",
            fix=f"./inv --set-up installs it ({_EMULATOR_PACKAGES})",
        )
    said = process.output_of([program, "--version"], limit_s=_RUN_LIMIT_S)
    version = _first_version(said)
    return judge_emulator(
        guest=config.image.architecture, qemu=version, package=_package_version(program), kernel=os.uname().release
    )


def judge_emulator(*, guest: str, qemu: str, package: str, kernel: str, pairs: Sequence[Pair] | None = None) -> Finding:
    """``check_emulator`` for given versions."""
    rows = known_bad_pairs() if pairs is None else pairs
    bad = [row for row in rows if row.hits(guest=guest, qemu=qemu, package=package, kernel=kernel)]
    about = f"qemu-user {qemu}" + (f" (package {package})" if package else "") + f", kernel {kernel}"
    return Finding(
        check="emulator and kernel",
        verdict=Verdict.WARN if bad else Verdict.OK,
        done=f"asked both for their versions and looked among {len(rows)} known bad pairs",
        found=about + "".join(f"; {row.symptom} ({', '.join(row.sources)})" for row in bad),
        fix="; ".join(row.fix for row in bad),
    )


def check_execution(folder: Path) -> Finding:
    """Execute a static 32-bit ARM program of 316 bytes."""
    return _execution("32-bit ARM program", _write_probe(folder), said=probe.MESSAGE)


def check_execution_64(folder: Path) -> Finding:
    """Execute a static 64-bit ARM program, for images of that architecture."""
    program = folder / "probe-64"
    with files.replacing(program) as aside:
        aside.write_bytes(probe.elf_64())
        aside.chmod(0o755)
    return _execution("64-bit ARM program", program, said=b"")


def _execution(name: str, program: Path, *, said: bytes) -> Finding:
    done = f"executed one of {program.stat().st_size} bytes from {program.parent.parent}"
    try:
        ended = subprocess.run([program], check=False, capture_output=True, timeout=_RUN_LIMIT_S)
    except OSError as fault:
        reasons = {
            errno.ENOEXEC: ("the kernel does not know how to start it", "./inv --set-up registers the emulator"),
            errno.EACCES: ("the disk is mounted noexec", "point build.folder in invoke.yaml at another disk"),
            errno.ENOENT: (
                "the emulator that is registered is gone",
                "./inv --set-up installs and registers it; apt-get install --reinstall where its package is there "
                f"({_EMULATOR_PACKAGES})",
            ),
        }
        found, fix = reasons.get(fault.errno or 0, (fault.strerror or str(fault), "see the findings above"))
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix=fix)
    except subprocess.TimeoutExpired:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            done=done,
            found=f"still running after {_RUN_LIMIT_S:.0f} s",
            fix="update the emulator",
        )
    if ended.returncode == 0 and ended.stdout == said:
        return Finding(check=name, verdict=Verdict.OK, done=done, found=said.decode().strip() or "it runs")
    return Finding(
        check=name,
        verdict=Verdict.FAIL,
        done=done,
        found=f"{process.explain_exit(ended.returncode)}: {ended.stderr.decode(errors='replace').strip()[:200]}",
        fix="update the emulator; the findings on versions and vm.mmap_min_addr may tell more",
    )


def check_listing(folder: Path) -> Finding:
    """List a folder of 64 files on the build disk from a 32-bit process (see the module's docstring)."""
    name = "32-bit directory listing"
    program = _write_probe(folder)
    listed = folder / "listed"
    listed.mkdir(exist_ok=True)
    for number in range(probe.LISTED_AT_LEAST - 2):
        (listed / f"file-{number:02}").touch()
    system = _file_system(folder)
    done = f"listed a folder of {probe.LISTED_AT_LEAST - 2} files on {system} at {folder.parent}"
    try:
        status = subprocess.run([program, listed], check=False, capture_output=True, timeout=_RUN_LIMIT_S).returncode
    except (OSError, subprocess.TimeoutExpired) as fault:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            done=done,
            found=f"cannot be tried: {fault}",
            fix="first fix the execution of 32-bit ARM programs",
        )
    if status == 0:
        return Finding(check=name, verdict=Verdict.OK, done=done, found="all entries fit 32-bit fields")
    if status == probe.EOVERFLOW:
        return Finding(
            check=name,
            verdict=Verdict.WARN,
            done=done,
            found="EOVERFLOW: entries are numbered with 64 bits; an emulated 32-bit readdir takes folders for empty",
            fix="our own steps avoid it; for emulated programs of yours, point build.folder at a tmpfs, xfs or btrfs,"
            " or compile them with -D_FILE_OFFSET_BITS=64",
        )
    reasons = {2: "the folder could not be opened", 3: "getdents64 failed", 4: "the listing ended early"}
    return Finding(
        check=name,
        verdict=Verdict.FAIL,
        done=done,
        found=reasons.get(status, process.explain_exit(status)),
        fix="point build.folder in invoke.yaml at a tmpfs, xfs, btrfs or ext4 disk",
    )


def check_cross_compiler(folder: Path, gnu: str) -> Finding:
    """Compile a program for the target with the native cross compiler, and run it."""
    name = "cross compiler"
    compiler = process.require_program(f"{gnu}-g++", "to compile for the target at native speed")
    source, program = folder / "answer.cpp", folder / "answer"
    source.write_text("#include <vector>\nint main() { return static_cast<int>(std::vector<int>(42).size()); }\n")
    process.run(
        [compiler, "-static", "-o", program, source],
        limit_s=_RUN_LIMIT_S,
        fix="apt-get install --reinstall g++-" + gnu,
    )
    done = f"compiled a C++ program with {compiler.name}, ran it"
    status = subprocess.run([program], check=False, capture_output=True, timeout=_RUN_LIMIT_S).returncode
    if status != 42:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            done=done,
            found=f"expected status 42, got {status}",
            fix="see the finding on executing 32-bit ARM programs",
        )
    version = _first_version(process.output_of([compiler, "-dumpfullversion"], limit_s=_RUN_LIMIT_S))
    return Finding(
        check=name, verdict=Verdict.OK, done=done, found=f"version {version}; the program gave what it should"
    )


# ------------------------------------------------------------------------------------------------ the engine


def _engine_findings(config: Config) -> list[Finding]:
    done = "asked it for its version and storage"
    try:
        info = engine.ensure_running(config)
    except UserError as fault:
        found = "; ".join(part for part in (fault.summary, fault.found) if part)
        missing = "no engine to try it with"
        return [
            Finding(check="engine", verdict=Verdict.FAIL, done=done, found=found, fix=fault.fix),
            Finding(check="container", verdict=Verdict.FAIL, done="nothing", found=missing, fix="first fix the engine"),
        ]
    findings = [judge_engine(info), _guarded("container", lambda: check_container(config.image.target.oci_platform))]
    if _on_another_disk(info.data_root, config.build_root):
        findings.append(_guarded("engine's disk", lambda: check_disk_of_engine(info.data_root)))
    return findings


def _on_another_disk(data_root: Path, folder: Path) -> bool:
    """Whether the engine's folder is here and not on the build folder's disk; one that cannot be asked is not."""
    with contextlib.suppress(OSError):
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        return data_root.is_dir() and data_root.stat().st_dev != existing.stat().st_dev
    return False


def check_disk_of_engine(data_root: Path) -> Finding:
    """Room in the engine's folder, where that is on a disk of its own."""
    free_mib = shutil.disk_usage(data_root).free >> 20
    short = free_mib < _DISK_NEEDED_MIB
    return Finding(
        check="engine's disk",
        verdict=Verdict.FAIL if short else Verdict.OK,
        done=f"asked the file system of {data_root}",
        found=f"{free_mib} MiB free; images of a first build take up to {_DISK_NEEDED_MIB} MiB",
        fix="docker system prune, or move data-root in daemon.json to a larger disk" if short else "",
    )


def judge_engine(info: engine.EngineInfo) -> Finding:
    """The engine's version and how it stores layers."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", info.version)[:2])
    by = "started here" if info.started_here else "found running"
    layers = f"storage {info.storage_driver}, cgroup version {info.cgroup_version or 'unknown'}"
    found = f"version {info.version} at {info.address}, {by}; {layers}"
    verdict, fix = Verdict.OK, ""
    if numbers < _OLDEST_ENGINE:
        verdict, fix = Verdict.FAIL, "install Docker 20.10 or newer (Debian: apt-get install docker.io)"
    elif info.storage_driver in _SLOW_DRIVERS:
        verdict = Verdict.WARN
        fix = (
            f"{info.storage_driver} copies whole layers: builds are slow and large;"
            " put the engine's data-root on ext4 or xfs, where overlay2 works (in a container: on a volume)"
        )
    return Finding(check="engine", verdict=verdict, done="asked it for its version and storage", found=found, fix=fix)


def check_container(oci_platform: str) -> Finding:
    """Build a container for the target that executes the ARM program; then ask the engine what it has built."""
    name = "container"
    tag = f"pitorch-doctor:{uuid.uuid4().hex}"
    done = f"built one of two lines (COPY, RUN) for {oci_platform}, inspected it"
    wanted = tuple(oci_platform.split("/"))
    client = engine.connect(timeout_s=120)
    try:
        said: list[str] = []
        dockerfile = b'FROM scratch\nCOPY probe /\nRUN ["/probe"]\n'
        events = client.api.build(
            fileobj=_context({"Dockerfile": (dockerfile, 0o644), "probe": (probe.elf(), 0o755)}),
            custom_context=True,
            platform=oci_platform,
            tag=tag,
            decode=True,
            rm=True,
            forcerm=True,
            nocache=True,
            network_mode="none",
        )
        fault = ""
        for event in events:
            said.append(event.get("stream", ""))
            fault = fault or event.get("error", "")
        if fault or probe.MESSAGE.decode().strip() not in "".join(said):
            return Finding(
                check=name,
                verdict=Verdict.FAIL,
                done=done,
                found=fault or "the program in it did not print its line",
                fix="binfmt flags must hold F (see above); in a container the engine needs --privileged",
            )
        seen = client.images.get(tag).attrs
        is_tuple = tuple(part for part in (seen["Os"], seen["Architecture"], seen.get("Variant", "")) if part)
    except (docker.errors.DockerException, requests.RequestException) as refused:
        return Finding(
            check=name, verdict=Verdict.FAIL, done=done, found=str(refused)[:400], fix="read the engine's log"
        )
    finally:
        _remove_image(client, tag)
        client.close()
    found = f"it ran, and is stamped {'/'.join(is_tuple)}"
    if is_tuple != wanted:
        return Finding(
            check=name, verdict=Verdict.FAIL, done=done, found=found, fix="use an engine that honours --platform"
        )
    return Finding(check=name, verdict=Verdict.OK, done=done, found=found)


def _remove_image(client: Any, tag: str) -> None:
    try:
        client.images.remove(tag, force=True)
    except (docker.errors.DockerException, requests.RequestException):
        return


def _context(members: Mapping[str, tuple[bytes, int]]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (content, mode) in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed


# ------------------------------------------------------------------------------------------------ the network


def check_mirror(config: Config, folder: Path) -> Finding:
    """Fetch and verify the lists of the apt mirror as a build does, in a folder that goes away."""
    kept = config.build_root / "keys"
    keyrings = kept if kept.is_dir() else folder / "keys"
    sources = apt.sources_for(config, keyrings)
    apt.fetch_keys(config, keyrings)
    return check_pockets(sources, folder / "mirror", strict=config.image.strict)


def check_pockets(sources: tuple[apt.Source, ...], folder: Path, *, strict: bool) -> Finding:
    """``check_mirror`` for given sources."""
    name = "apt mirror"
    done = f"fetched and verified the lists of {len(sources)} pockets"
    fix = "set image.mirror in invoke.yaml to one that is whole, or http_proxy to a proxy that reaches it"
    try:
        verified = apt.verify(sources, folder, strict=False, limit_s=_MIRROR_LIMIT_S)
    except MirrorPocketUnusable as fault:
        found = f"{fault.summary}: {fault.found}"
        return Finding(check=name, verdict=Verdict.FAIL, done=done, found=found, fix=fix)
    if verified.warnings:
        verdict = Verdict.FAIL if strict else Verdict.WARN
        return Finding(check=name, verdict=verdict, done=done, found="; ".join(verified.warnings), fix=fix)
    hosts = ", ".join(dict.fromkeys(source.uri for source in sources))
    return Finding(check=name, verdict=Verdict.OK, done=done, found=f"all signed as they should be: {hosts}")


def check_package_index(folder: Path) -> Finding:
    """Ask pip for one small package, with its own configuration (index, proxy, certificates)."""
    name = "package index"
    done = "asked pip for a package of one file"
    try:
        words = ["--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder / "wheel"), "six"]
        process.run([sys.executable, "-m", "pip", "download", *words], limit_s=_RUN_LIMIT_S)
    except CommandFailed as fault:
        found = fault.tail.strip().splitlines()[-1:] or [fault.found]
        fix = engine.SOCKS_FIX if engine.SOCKS_MISSING in fault.tail else "https_proxy, or pip.conf's index-url"
        return Finding(check=name, verdict=Verdict.WARN, done=done, found=found[0], fix=fix)
    return Finding(check=name, verdict=Verdict.OK, done=done, found="it answers")


# ------------------------------------------------------------------------------------------------ servers


def check_virtual_machine() -> Finding:
    """The emulator of a whole ARM machine. KVM plays no part: it runs guests of the host's own architecture."""
    program = process.require_program("qemu-system-arm", "to boot the exported tree")
    said = process.output_of([program, "-machine", "help"], limit_s=_RUN_LIMIT_S)
    version = _first_version(process.output_of([program, "--version"], limit_s=_RUN_LIMIT_S))
    done = "asked qemu-system-arm for its machines"
    if not re.search(r"^virt\s", said, re.MULTILINE):
        return Finding(
            check="virtual machine", verdict=Verdict.FAIL, done=done, found=f"{version} without virt", fix="update it"
        )
    kvm = "/dev/kvm is not needed: the guest's architecture is not this machine's"
    return Finding(check="virtual machine", verdict=Verdict.OK, done=done, found=f"version {version} has virt; {kvm}")


def check_nfs_server() -> Finding:
    """The user-space NFS server starts, and has the module that serves local folders."""
    program = process.require_program("ganesha.nfsd", "to serve the exported tree")
    said = process.run([program, "-v"], limit_s=_RUN_LIMIT_S, check=False).output
    version = _first_version(said)
    modules = [*Path("/usr/lib").glob("*/ganesha/libfsalvfs.so"), *Path("/usr/lib/ganesha").glob("libfsalvfs.so")]
    done = "executed ganesha.nfsd -v, looked for its VFS module"
    if not version or not modules:
        found = f"version {version or 'unknown'}" + ("" if modules else ", and no VFS module")
        return Finding(
            check="NFS server", verdict=Verdict.FAIL, done=done, found=found, fix="apt-get install nfs-ganesha-vfs"
        )
    note = "" if os.geteuid() == 0 else "; it must be run as root (open_by_handle_at(2))"
    return Finding(check="NFS server", verdict=Verdict.OK, done=done, found=f"version {version} with VFS{note}")


def check_local_registry() -> Finding:
    """The registry server starts."""
    program = process.require_program("docker-registry", "to run a local registry")
    said = process.run([program, "--version"], limit_s=_RUN_LIMIT_S, check=False).output.strip()
    return Finding(
        check="local registry",
        verdict=Verdict.OK,
        done="executed docker-registry --version",
        found=" ".join(said.split()),
    )


# ------------------------------------------------------------------------------------------------ small things


def _writable(folder: Path) -> Path:
    """The folder; where it is another user's, which ``check_disk`` tells, the one for everybody's temporary files."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK, effective_ids=True) else Path(tempfile.gettempdir())


def _write_probe(folder: Path) -> Path:
    program = folder / "probe"
    if not program.exists():
        with files.replacing(program) as aside:
            aside.write_bytes(probe.elf())
            aside.chmod(0o755)
    return program


def _file_system(folder: Path) -> str:
    """The type of the mount that holds a folder."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, at, kind, *_ = line.split()
        where = at.encode().decode("unicode_escape")
        if folder.resolve().is_relative_to(where) and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def _emulator(suffix: str) -> Path | None:
    """The emulator: the one that binfmt_misc names, else one on the PATH."""
    entry = BINFMT / f"qemu-{suffix}"
    if entry.exists() and (found := re.search(r"^interpreter (\S+)", entry.read_text(), re.MULTILINE)):
        program = Path(found[1]).resolve()
        if program.is_file():
            return program
    for name in (f"qemu-{suffix}-static", f"qemu-{suffix}"):
        if (on_path := shutil.which(name)) is not None:
            return Path(on_path).resolve()
    return None


def _package_version(program: Path) -> str:
    """Version of the Debian package that owns a file; empty where dpkg knows none."""
    owner = subprocess.run(["dpkg-query", "--search", program], check=False, capture_output=True, text=True)
    if owner.returncode != 0:
        return ""
    package = owner.stdout.partition(":")[0]
    asked = ["dpkg-query", "--show", "--showformat=${Version}", package]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()


def _first_version(text: str) -> str:
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found[0] if found else ""


def _within(version: str, low: str, high: str, below: Callable[[str, str], bool]) -> bool:
    if not low and not high:
        return True
    if not version:
        return False
    return not (low and below(version, low)) and not (high and not below(version, high))


def _numbers_below(left: str, right: str) -> bool:
    """Compare the leading dotted numbers of two versions (``6.18.44-fc`` is 6.18.44)."""
    numbers = [[int(part) for part in _first_version(text + ".0").split(".")] for text in (left, right)]
    length = max(len(item) for item in numbers)
    padded = [item + [0] * (length - len(item)) for item in numbers]
    return padded[0] < padded[1]


def _package_below(left: str, right: str) -> bool:
    """Compare two Debian versions, as dpkg does."""
    return subprocess.run(["dpkg", "--compare-versions", left, "lt", right], check=False).returncode == 0


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
