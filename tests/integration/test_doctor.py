"""Tests of the results of doctor's checks, with and without the problem that a check detects.

The tests simulate problems of the machine in separate namespaces. In a user namespace, a test can mount a tmpfs of any
size. Since Linux 6.7, a user namespace also has its own binfmt_misc, in which no emulator is registered at first.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from apt_parts import Archive, sources
from elftools.elf.elffile import ELFFile
from http_parts import served, serving
from limited_memory import limited_group, output_in
from machine import OWN_BINFMT, in_user_namespace
from rich.console import Console

from doctor import emulation, foreign_programs, network, servers
from doctor.containers import check_container, engine_findings, judge_engine
from doctor.emulation import check_mmap_min_addr, check_registration
from doctor.emulator_versions import check_emulator, judge_emulator
from doctor.examination import examine, require_healthy
from doctor.finding import Finding, Verdict, guarded
from doctor.foreign_programs import check_cross_compiler, check_execution, check_listing, file_system, write_probe
from doctor.network import check_mirror, check_package_index, check_pockets
from doctor.report import as_json, print_table
from doctor.resources import check_memory, on_another_disk, writable
from engine.connect import connect
from engine.proxies import build_environment
from engine.start import EngineInfo
from images import probe
from nfsroot import qemu
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import ROOT, BuildConfig, Config, ImageConfig
from toolchain.errors import ChecksFailed, UserError

_MODULES = (
    "from doctor import containers, emulation, finding, foreign_programs, host, resources, servers; "
    "from toolchain import config"
)
"""Imports for expressions that another process evaluates."""


@pytest.fixture
def arm(tmp_path: Path) -> None:
    if check_execution(tmp_path).verdict is not Verdict.OK:
        pytest.skip("this machine cannot run 32-bit ARM programs: run ./inv --set-up to register the emulator")


def decoded(text: str) -> Finding:
    fields = json.loads(text)
    return Finding(**{**fields, "verdict": Verdict(fields["verdict"])})


def checked_in_namespace(check: str, *, before: str = ":") -> Finding:
    """Run a shell script in a user namespace, evaluate a check there, and return its finding."""
    if in_user_namespace("true").returncode:
        pytest.skip("user namespaces are not allowed on this machine")
    code = f"import dataclasses, json; from pathlib import Path; {_MODULES}; f = {check}; "
    code += "print(json.dumps(dataclasses.asdict(f)))"
    ended = in_user_namespace(f'{before}\nexec "$0" -c "$1"', sys.executable, code, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stderr
    return decoded(ended.stdout)


CHECK_BINFMT = "emulation.check_binfmt(emulation.BINFMT / 'qemu-arm')"


# ------------------------------------------------------------------------------------------- the ARM program


def test_the_probe_matches_its_source(tmp_path: Path) -> None:
    compiler = shutil.which("arm-linux-gnueabihf-gcc")
    if compiler is None:
        pytest.skip("gcc-arm-linux-gnueabihf is not installed")
    source = ROOT / "images/probe.S"
    subprocess.run([compiler, "-nostdlib", "-c", source, "-o", tmp_path / "probe.o"], check=True)
    copy = ["arm-linux-gnueabihf-objcopy", "-O", "binary", "-j", ".text"]
    subprocess.run([*copy, tmp_path / "probe.o", tmp_path / "probe.bin"], check=True)
    assert (tmp_path / "probe.bin").read_bytes() == probe.CODE


def test_the_probe_is_a_static_hard_float_executable(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(probe.elf())
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        assert (elf.get_machine_arch(), elf.elfclass, elf["e_type"]) == ("ARM", 32, "ET_EXEC")
        assert elf["e_flags"] == 0x05000400
        (segment,) = elf.iter_segments()
        assert segment["p_filesz"] == len(probe.elf())
        assert segment["p_vaddr"] <= elf["e_entry"] < segment["p_vaddr"] + segment["p_memsz"]


@pytest.mark.emulation
def test_the_probe_runs(tmp_path: Path, arm: None) -> None:
    finding = check_execution(tmp_path)
    assert finding.found == "32-bit ARM code runs"


@pytest.mark.emulation
def test_the_probe_needs_an_emulator(own_binfmt: None, tmp_path: Path) -> None:
    finding = checked_in_namespace(f"foreign_programs.check_execution(Path({str(tmp_path)!r}))", before=OWN_BINFMT)
    assert finding.verdict is Verdict.FAIL
    assert "the kernel cannot start it" in finding.found
    assert "./inv --set-up" in finding.fix


def test_a_noexec_disk_is_reported(tmp_path: Path) -> None:
    finding = checked_in_namespace(
        f"foreign_programs.check_execution(Path({str(tmp_path)!r}))",
        before=f"mount -t tmpfs -o noexec tmpfs {tmp_path}",
    )
    assert finding.verdict is Verdict.FAIL
    assert "noexec" in finding.found
    assert "build.folder" in finding.fix


@pytest.mark.emulation
def test_a_missing_emulator_is_reported(qemu_conf: Path, tmp_path: Path) -> None:
    """Without binfmt_misc's flag F, the kernel opens the interpreter only when a program starts."""
    script = (
        f"{OWN_BINFMT}\nsed -e 's|:[^:]*:[A-Z]*$|:/nowhere/qemu-arm:|' {qemu_conf} >/proc/sys/fs/binfmt_misc/register"
    )
    finding = checked_in_namespace(f"foreign_programs.check_execution(Path({str(tmp_path)!r}))", before=script)
    assert finding.verdict is Verdict.FAIL
    assert "no longer exists" in finding.found
    assert finding.fix.startswith("run ./inv --set-up ")
    assert "qemu-user-static" in finding.fix
    assert "qemu-user-binfmt" in finding.fix


# ------------------------------------------------------------------------------------------------ binfmt


def test_an_unmounted_binfmt_misc_is_reported() -> None:
    finding = checked_in_namespace(CHECK_BINFMT, before="mount -t tmpfs tmpfs /proc/sys/fs/binfmt_misc")
    assert finding.verdict is Verdict.FAIL
    assert "not mounted" in finding.found


def test_an_unregistered_emulator_is_reported(own_binfmt: None) -> None:
    finding = checked_in_namespace(CHECK_BINFMT, before=OWN_BINFMT)
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "qemu-arm is not registered")


def test_a_registered_emulator_is_ok(qemu_conf: Path) -> None:
    script = f"{OWN_BINFMT}\ncat {qemu_conf} >/proc/sys/fs/binfmt_misc/register"
    finding = checked_in_namespace(CHECK_BINFMT, before=script)
    assert finding.verdict is Verdict.OK
    assert "F" in finding.found.split(",")[0]


def test_a_registration_without_f_is_reported(qemu_conf: Path) -> None:
    script = f"{OWN_BINFMT}\nsed -e 's|:[A-Z]*$|:P|' {qemu_conf} >/proc/sys/fs/binfmt_misc/register"
    finding = checked_in_namespace(CHECK_BINFMT, before=script)
    assert finding.verdict is Verdict.FAIL
    assert "inside each container" in finding.found


def test_a_disabled_emulator_is_reported(qemu_conf: Path) -> None:
    register = f"{OWN_BINFMT}\ncat {qemu_conf} >/proc/sys/fs/binfmt_misc/register"
    finding = checked_in_namespace(CHECK_BINFMT, before=f"{register}\necho 0 >/proc/sys/fs/binfmt_misc/qemu-arm")
    assert finding.verdict is Verdict.FAIL
    assert "disabled" in finding.found
    assert finding.fix == "run echo 1 > /proc/sys/fs/binfmt_misc/qemu-arm as root"


def test_native_programs_need_no_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an amd64 PC, the emulator qemu-x86_64 is not registered."""
    (tmp_path / "status").write_text("enabled\n")
    monkeypatch.setattr(emulation, "BINFMT", tmp_path)
    own = host_architecture()
    other = "arm64" if own.debian == "amd64" else "amd64"
    for finding in (
        check_registration(own),
        check_emulator(Config(image=ImageConfig(architecture=own.debian))),
    ):
        assert finding.verdict is Verdict.OK
        assert "no emulator needed" in finding.found
    finding = check_registration(ARCHITECTURES[other])
    assert finding.verdict is Verdict.FAIL
    assert finding.found == f"qemu-{ARCHITECTURES[other].qemu} is not registered"


# ------------------------------------------------------------------------------------------------ listing


@pytest.mark.emulation
def test_a_directory_on_tmpfs_is_listed(arm: None, tmp_path: Path) -> None:
    finding = checked_in_namespace(
        f"foreign_programs.check_listing(Path({str(tmp_path)!r}))", before=f"mount -t tmpfs tmpfs {tmp_path}"
    )
    assert finding.verdict is Verdict.OK, finding.found
    assert "on tmpfs" in finding.done


@pytest.mark.emulation
def test_64_bit_entry_numbers_on_ext4_are_reported(arm: None) -> None:
    folder = next((path for path in (Path("/var/tmp"), ROOT) if file_system(path) == "ext4"), None)
    if folder is None:
        pytest.skip("this machine has no ext4 disk")
    scratch = folder / f"pitorch-doctor-{os.getpid()}"
    scratch.mkdir()
    try:
        finding = check_listing(scratch)
    finally:
        shutil.rmtree(scratch)
    assert finding.verdict is Verdict.WARN
    assert finding.found.startswith("EOVERFLOW")
    assert "tmpfs" in finding.fix


@pytest.mark.emulation
def test_the_probe_rejects_a_short_listing(arm: None, tmp_path: Path) -> None:
    """The probe counts the entries of a folder: it expects 64, and this folder has two."""
    program = write_probe(tmp_path)
    status = (
        f"mount -t tmpfs tmpfs {tmp_path}/few && touch {tmp_path}/few/a {tmp_path}/few/b\n"
        f"{program} {tmp_path}/few || echo $? >{tmp_path}/status"
    )
    (tmp_path / "few").mkdir()
    in_user_namespace(status).check_returncode()
    assert (tmp_path / "status").read_text() == "4\n"


# ------------------------------------------------------------------------------------------------ rights


def as_nobody(check: str, path: str) -> Finding:
    """Evaluate a check as an ordinary user with this PATH, and return its finding."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = f"import dataclasses, json, os; {_MODULES}; os.setgroups([]); os.setgid(65534); "
    code += f"os.setuid(65534); print(json.dumps(dataclasses.asdict({check})))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return decoded(ended.stdout)


def test_root_can_mount() -> None:
    finding = checked_in_namespace("host.check_rights()")
    assert (finding.verdict, finding.found) == (Verdict.OK, "you are root and can mount")


def test_root_without_capabilities_cannot_mount() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    finding = checked_in_namespace(
        "host.check_rights()", before='exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$0" -c "$1"'
    )
    assert finding.verdict is Verdict.FAIL
    assert "Operation not permitted" in finding.found
    assert "--privileged" in finding.fix


def test_missing_sudo_is_reported() -> None:
    finding = as_nobody("host.check_rights()", "/nowhere")
    assert finding.verdict is Verdict.FAIL
    assert "id 65534" in finding.found
    assert "sudo is not installed" in finding.found
    assert "as root" in finding.fix


@pytest.mark.parametrize(
    ("script", "verdict", "found"),
    [
        ('[ "$1" = --non-interactive ] && shift && exec "$@"', Verdict.OK, "sudo works"),
        ("echo 'sudo: a password is required' >&2; exit 1", Verdict.WARN, "a password is required"),
    ],
)
def test_sudo_of_an_ordinary_user_is_tried(script: str, verdict: Verdict, found: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pitorch-sudo-") as folder:
        Path(folder).chmod(0o755)
        fake = Path(folder) / "sudo"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        finding = as_nobody("host.check_rights()", f"{folder}:/usr/bin:/bin")
    assert finding.verdict is verdict
    assert found in finding.found
    assert "sudo ./inv build-image" in finding.found + finding.fix


def test_a_sudo_timeout_is_a_finding() -> None:
    """The command sudo may wait for a directory server that does not respond."""
    with tempfile.TemporaryDirectory(prefix="pitorch-sudo-") as folder:
        Path(folder).chmod(0o755)
        fake = Path(folder) / "sudo"
        fake.write_text("#!/bin/sh\nexec sleep 60\n")
        fake.chmod(0o755)
        limited = "(setattr(host, 'RUN_LIMIT_S', 0.6), finding.guarded('rights', host.check_rights))[1]"
        finding = as_nobody(limited, f"{folder}:/usr/bin:/bin")
    assert (finding.check, finding.verdict) == ("rights", Verdict.FAIL)
    assert finding.found == "sudo --non-interactive true was still running after 1 s"
    assert "run the program yourself" in finding.fix


# ------------------------------------------------------------------------------------------------ the machine


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=512k tmpfs {tmp_path}"
    finding = checked_in_namespace(f"resources.check_disk(Path({str(tmp_path)!r}))", before=script)
    assert finding.verdict is Verdict.FAIL
    assert "No space left" in finding.found
    assert not list(tmp_path.iterdir())


def test_a_build_folder_of_another_user_is_reported(tmp_path: Path) -> None:
    """The check fails if the build folder is not writable, although ``writable`` then returns the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="pitorch-theirs-") as name:
        Path(name).chmod(0o755)
        assert writable(Path(name)) == Path(name)
        finding = as_nobody(f"resources.check_disk(__import__('pathlib').Path({name!r}))", os.environ["PATH"])
        assert finding.verdict is Verdict.FAIL
        assert "Permission denied" in finding.found
        os.seteuid(65534)
        try:
            assert writable(Path(name)) == Path(tempfile.gettempdir())
        finally:
            os.seteuid(0)


def test_a_disk_without_room_for_a_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checks use the temporary folder, and the engine cannot be started."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    mount = f"mount -t tmpfs -o nr_inodes=1 tmpfs {tmp_path}; mount -t tmpfs tmpfs /run"
    folder = f"resources.writable(Path({str(tmp_path)!r}))"
    config = f"config.Config(build=config.BuildConfig(folder=Path({str(tmp_path)!r})))"
    found = checked_in_namespace(f"finding.ok('', '', str({folder}))", before=mount).found
    assert found == tempfile.gettempdir()
    finding = checked_in_namespace(f"containers.engine_findings({config})[0]", before=mount)
    assert (finding.check, finding.verdict) == ("engine", Verdict.FAIL)
    assert "No space left on device" in finding.found
    assert finding.fix == "free some disk space"


@pytest.mark.parametrize(("size_mib", "verdict"), [(64, Verdict.FAIL), (200, Verdict.WARN), (301, Verdict.OK)])
def test_free_disk_space_is_compared_with_limits(tmp_path: Path, size_mib: int, verdict: Verdict) -> None:
    finding = checked_in_namespace(
        f"resources.check_disk(Path({str(tmp_path)!r}), wanted_mib=300, needed_mib=100)",
        before=f"mount -t tmpfs -o size={size_mib}m tmpfs {tmp_path}",
    )
    assert finding.verdict is verdict, finding.found
    assert bool(finding.fix) == (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("jobs", "available_mib", "verdict", "word"),
    [
        (1, 1500, Verdict.OK, ""),
        (1, 1499, Verdict.FAIL, "stop other programs"),
        (4, 3000, Verdict.WARN, "build.jobs to 2"),
        (2, 3000, Verdict.OK, ""),
        (0, 1000, Verdict.FAIL, "1500 MiB"),
    ],
)
def test_memory_is_compared_with_the_compile_jobs(jobs: int, available_mib: int, verdict: Verdict, word: str) -> None:
    finding = check_memory(BuildConfig(jobs=jobs, memory_per_job_mib=1500), available_mib=available_mib)
    assert finding.verdict is verdict
    assert word in finding.fix


@pytest.mark.parametrize("below", ["", "child"])
def test_memory_is_computed_as_for_builds(below: str) -> None:
    """Doctor and builds compute the same number of jobs.

    The memory limit is set for this process's cgroup or its parent.
    """
    program = """
from doctor.resources import check_memory
from toolchain.config import BuildConfig
from toolchain.jobs import compile_jobs
build = BuildConfig(memory_per_job_mib=190)
print(f"{compile_jobs(build)}; {check_memory(build).found}")
"""
    with limited_group(200) as group:
        output = output_in(group / below, program)
    jobs, _, found = output.partition("; ")
    free, each = map(int, re.findall(r"(\d+) MiB", found)[:2])
    assert 100 < free <= 200
    assert (jobs, each) == ("1", free)
    assert f"for each of {jobs} compile jobs" in found


@pytest.mark.parametrize(
    ("text", "verdict", "fix"),
    [
        ("4096\n", Verdict.OK, ""),
        ("65536\n", Verdict.OK, ""),
        ("65537\n", Verdict.FAIL, "run sysctl vm.mmap_min_addr=65536 as root"),
        (None, Verdict.FAIL, "use WSL 2 or a Linux kernel"),
    ],
)
def test_mmap_min_addr_is_checked(tmp_path: Path, text: str | None, verdict: Verdict, fix: str) -> None:
    sysctl = tmp_path / "mmap_min_addr"
    if text is not None:
        sysctl.write_text(text)
    finding = check_mmap_min_addr(sysctl)
    assert (finding.verdict, finding.fix) == (verdict, fix)


# ------------------------------------------------------------------------------------------- incompatible versions


@pytest.mark.parametrize(
    ("guest", "qemu", "package", "kernel", "bad"),
    [
        ("armhf", "7.2.22", "1:7.2+dfsg-7+deb12u18+b3", "6.18.44-custom", False),
        ("armhf", "7.2.13", "1:7.2+dfsg-7+deb12u8", "6.1.112-1", True),
        ("armhf", "7.2.13", "1:7.2+dfsg-7+deb12u8", "6.1.99", False),
        ("armhf", "7.2.15", "1:7.2+dfsg-7+deb12u9", "6.1.112", False),
        ("armhf", "7.2.13", "", "6.1.112", False),
        ("armhf", "5.2.0", "", "5.10", True),
        ("arm64", "5.2.0", "", "5.10", False),
        ("armhf", "6.0", "", "5.10", False),
        ("arm64", "4.2.1", "", "5.4.0-81-generic", True),
        ("armhf", "10.0.13", "1:10.0.13+ds-0+deb13u1", "6.12.107", False),
    ],
)
def test_known_bad_pairs_are_recognised(guest: str, qemu: str, package: str, kernel: str, bad: bool) -> None:
    finding = judge_emulator(guest=guest, qemu=qemu, package=package, kernel=kernel)
    assert (finding.verdict is Verdict.WARN) == bad
    assert bool(finding.fix) == bad


# ------------------------------------------------------------------------------------------------ the engine


@pytest.mark.engine
@pytest.mark.emulation
def test_a_container_is_built_for_the_target(arm: None) -> None:
    try:
        connect(timeout_s=10).close()
    except UserError as fault:
        pytest.skip(fault.summary)
    finding = check_container("linux/arm/v7")
    assert (finding.verdict, finding.found) == (Verdict.OK, "the program ran; the image's platform is linux/arm/v7")


@pytest.mark.engine
def test_the_platform_of_the_image_is_compared(arm: None) -> None:
    """The engine accepts the name of a platform that does not exist, so the check inspects the image."""
    try:
        connect(timeout_s=10).close()
    except UserError as fault:
        pytest.skip(fault.summary)
    finding = check_container("linux/arm/v6/none")
    assert finding.verdict is Verdict.FAIL


def test_a_missing_engine_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    found = {item.check: item for item in engine_findings(Config(build=BuildConfig(folder=tmp_path)))}
    assert found["engine"].verdict is Verdict.FAIL
    assert "unset DOCKER_HOST" in found["engine"].fix
    assert found["container"].fix == "first apply the fix for 'engine'"


def test_an_engine_that_exits_during_the_build_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exits(http.server.BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return ""

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"ApiVersion": "1.41"}')

        def do_POST(self) -> None:
            self.wfile.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"stream": "Step 1"')

        def do_DELETE(self) -> None:
            """Close the connection without a response."""

    with tempfile.TemporaryDirectory() as folder:  # the path of a socket has at most 107 bytes
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        with serving(socketserver.ThreadingUnixStreamServer(f"{folder}/docker.sock", Exits)):
            finding = check_container("linux/arm/v7")
    assert (finding.check, finding.verdict) == ("container", Verdict.FAIL)
    # The kernel may report a reset, because the server did not read the request.
    assert "Connection broken" in finding.found or "Connection aborted" in finding.found


@pytest.mark.parametrize(
    ("version", "driver", "verdict"),
    [
        ("20.10.24+dfsg1", "overlay2", Verdict.OK),
        ("19.03.15", "overlay2", Verdict.FAIL),
        ("26.1.5", "vfs", Verdict.WARN),
        ("9.9", "overlay2", Verdict.FAIL),
    ],
)
def test_old_engines_and_slow_storage_are_reported(version: str, driver: str, verdict: Verdict) -> None:
    info = EngineInfo(
        address="unix:///x",
        version=version,
        storage_driver=driver,
        cgroup_version="2",
        data_root=Path("/x"),
        started_here=False,
    )
    assert judge_engine(info).verdict is verdict


# ------------------------------------------------------------------------------------------------ the network


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with contextlib.closing(Archive(tmp_path_factory.mktemp("archive"))) as made:
        yield made


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, apt_without_delays: None) -> None:
    for name in build_environment():
        monkeypatch.delenv(name, raising=False)


def mirror_config(folder: Path, main: str, *, security: str = "") -> Config:
    image = ImageConfig(mirror=main, security_mirror=security or main + "-security")
    return Config(build=BuildConfig(folder=folder), image=image)


def test_a_refused_connection_to_the_mirror_is_reported(tmp_path: Path, direct: None) -> None:
    config = mirror_config(tmp_path / "build", "http://127.0.0.1:9/debian")
    finding = check_mirror(config, tmp_path / "scratch")
    assert finding.verdict is Verdict.FAIL
    assert "refused" in finding.found
    assert "image.mirror" in finding.fix
    assert not (tmp_path / "build").exists()


def test_a_complete_mirror_is_ok(archive: Archive, tmp_path: Path, direct: None) -> None:
    with served(archive.folder) as uri:
        finding = check_pockets(sources(archive, uri), tmp_path / "scratch", strict=True)
    assert finding.verdict is Verdict.OK
    assert uri in finding.found
    assert finding.done == "fetched and verified the lists of 3 pockets"


def test_a_mirror_with_another_signature_is_reported(archive: Archive, tmp_path: Path, direct: None) -> None:
    """The mirror has every file, but its indices are not signed with Debian's key."""
    for suite in ("trixie", "trixie-updates", "trixie-security"):
        archive.publish(suite)
    with served(archive.folder) as uri:
        finding = check_mirror(mirror_config(tmp_path / "build", uri, security=uri), tmp_path / "scratch")
    assert finding.verdict is Verdict.FAIL
    assert "pocket trixie of" in finding.found
    assert "signature" in finding.found


@pytest.mark.parametrize(("strict", "verdict"), [(False, Verdict.WARN), (True, Verdict.FAIL)])
def test_a_stale_security_pocket_is_reported(
    archive: Archive, tmp_path: Path, direct: None, strict: bool, verdict: Verdict
) -> None:
    """The pocket's index exists and is signed. Only fetching the lists shows that the mirror is outdated."""
    with archive.stale("stone-security"), served(archive.folder) as uri:
        finding = check_pockets(sources(archive, uri), tmp_path / "scratch", strict=strict)
    assert finding.verdict is verdict
    assert "stone-security" in finding.found
    assert "left out" in finding.found
    assert finding.fix


@pytest.mark.parametrize(("strict", "verdict"), [(False, Verdict.WARN), (True, Verdict.FAIL)])
def test_a_missing_security_pocket_is_reported(
    archive: Archive, tmp_path: Path, direct: None, strict: bool, verdict: Verdict
) -> None:
    with served(archive.folder) as uri:
        pockets = (archive.source("stone", uri, "main"), archive.source("none-security", uri, "security"))
        finding = check_pockets(pockets, tmp_path / "scratch", strict=strict)
    assert finding.verdict is verdict
    assert "none-security" in finding.found
    assert "does not have a Release file" in finding.found


def test_a_slow_mirror_times_out(
    archive: Archive, tmp_path: Path, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MIRROR_LIMIT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        finding = check_pockets((archive.source("stone", uri, "main"),), tmp_path / "scratch", strict=False)
    assert finding.verdict is Verdict.FAIL
    assert "still running after 1 s" in finding.found


def test_a_missing_package_index_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "NO_INDEX": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    finding = check_package_index(tmp_path)
    assert finding.verdict is Verdict.WARN
    assert "six" in finding.found
    assert "pip.conf" in finding.fix


@pytest.mark.skipif(importlib.util.find_spec("socks") is not None, reason="requires that PySocks is not installed")
def test_a_socks_proxy_without_pysocks_is_reported(
    tmp_path: Path, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"INDEX_URL": "https://index.invalid/simple", "RETRIES": "0", "NO_INDEX": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("all_proxy", "socks5h://127.0.0.1:1")
    finding = check_package_index(tmp_path)
    assert finding.verdict is Verdict.WARN
    assert "PySocks" in finding.fix


# ------------------------------------------------------------------------------------------------ programs


def test_a_program_timeout_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program sleeps, which simulates an emulator that hangs."""
    compiler = tmp_path / "odd-g++"
    compiler.write_text('#!/bin/sh\nprintf "#!/bin/sh\\nexec sleep 60\\n" >"$3"\nchmod 755 "$3"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(foreign_programs, "RUN_LIMIT_S", 2.0)
    finding = guarded("cross compiler", lambda: check_cross_compiler(tmp_path, "odd"))
    assert (finding.check, finding.verdict) == ("cross compiler", Verdict.FAIL)
    assert finding.found == f"{tmp_path}/answer was still running after 2 s"
    assert "emulator" in finding.fix


def test_another_disk_of_the_engine_is_recognised(tmp_path: Path) -> None:
    """The check must succeed even if the build folder does not exist yet or is not readable."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        elsewhere = Path(shm)
        if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the disk of the temporary files")
        assert on_another_disk(elsewhere, tmp_path / "not" / "there")
        assert not on_another_disk(tmp_path, tmp_path / "not" / "there")
        assert not on_another_disk(tmp_path / "nothing", elsewhere)
        if os.geteuid() == 0:
            (tmp_path / "closed").mkdir(mode=0o700)
            os.seteuid(65534)
            try:
                assert not on_another_disk(elsewhere, tmp_path / "closed" / "build")
            finally:
                os.seteuid(0)


def test_a_registry_program_that_does_not_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker-registry"
    program.write_text("#!/bin/sh\necho cannot load a library >&2\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = guarded("local registry", servers.check_local_registry)
    assert finding.verdict is Verdict.FAIL
    assert "--reinstall docker-registry" in finding.fix


@pytest.mark.parametrize(("architecture", "program"), [("armhf", "qemu-system-arm"), ("arm64", "qemu-system-aarch64")])
def test_the_package_of_a_missing_program_is_named(architecture: str, program: str) -> None:
    """The test hides all folders that contain programs."""
    assert qemu.program_of(architecture) == program
    expression = f"finding.guarded('virtual machine', lambda: servers.check_virtual_machine({program!r}))"
    hide = "mount -t tmpfs tmpfs /usr/sbin; export PATH=/nowhere"
    finding = checked_in_namespace(expression, before=hide)
    assert finding.verdict is Verdict.FAIL
    assert f"the program {program} is needed" in finding.found
    assert "apt-get install qemu-system-arm " in finding.fix


@pytest.mark.emulation
def test_the_cross_compiled_program_runs(arm: None, tmp_path: Path) -> None:
    if shutil.which("arm-linux-gnueabihf-g++") is None:
        pytest.skip("g++-arm-linux-gnueabihf is not installed")
    assert check_cross_compiler(tmp_path, "arm-linux-gnueabihf").verdict is Verdict.OK


def test_a_compiled_program_that_cannot_run_is_reported(own_binfmt: None, tmp_path: Path) -> None:
    if shutil.which("arm-linux-gnueabihf-g++") is None:
        pytest.skip("g++-arm-linux-gnueabihf is not installed")
    expression = (
        f"finding.guarded('c', lambda: foreign_programs.check_cross_compiler(Path({str(tmp_path)!r}), "
        "'arm-linux-gnueabihf'))"
    )
    finding = checked_in_namespace(expression, before=OWN_BINFMT)
    assert finding.verdict is Verdict.FAIL
    assert "Exec format error" in finding.found


# ------------------------------------------------------------------------------------------------ the report


GOOD = Finding(check="one", verdict=Verdict.OK, done="did", found="fine [bold]as is[/bold]")
BAD = Finding(check="two", verdict=Verdict.FAIL, done="did", found="ill", fix="do")
DOUBTFUL = Finding(check="three", verdict=Verdict.WARN, done="did", found="so-so", fix="do")


def test_only_failures_raise() -> None:
    require_healthy([GOOD, DOUBTFUL])
    with pytest.raises(ChecksFailed, match="1 of 3 checks failed: two") as caught:
        require_healthy([GOOD, BAD, DOUBTFUL])
    assert caught.value.exit_code == 50


@pytest.mark.parametrize(("findings", "healthy"), [([GOOD, DOUBTFUL], True), ([GOOD, BAD], False)])
def test_the_json_report_has_every_finding(findings: list[Finding], healthy: bool) -> None:
    document = json.loads(as_json(findings))
    assert document["healthy"] is healthy
    assert document["checks"][0] == {
        "check": "one",
        "verdict": "ok",
        "done": "did",
        "found": "fine [bold]as is[/bold]",
        "fix": "",
    }


def test_the_table_shows_every_finding_and_fix() -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    print_table([GOOD, BAD, DOUBTFUL], console=console)
    text = console.export_text()
    console.file.close()
    for word in ("one", "two", "three", "fine [bold]as is[/bold]", "ill", "→ do", "1 ok, 1 warn, 1 fail"):
        assert word in text


def test_standard_output_is_only_json(tmp_path: Path, direct: None) -> None:
    """The command line runs on a machine without an engine, a mirror or a package index."""
    nowhere = "http://127.0.0.1:9"
    settings = {"BUILD_FOLDER": str(tmp_path), "IMAGE_MIRROR": nowhere, "IMAGE_SECURITY_MIRROR": nowhere}
    pip = {"INDEX_URL": f"{nowhere}/simple", "RETRIES": "0", "CONFIG_FILE": os.devnull}
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("INVOKE_", "PIP_"))},
        **{f"INVOKE_{name}": value for name, value in settings.items()},
        **{f"PIP_{name}": value for name, value in pip.items()},
        "DOCKER_HOST": "tcp://127.0.0.1:9",
    }
    argv = [sys.executable, "-m", "toolchain.cli", "doctor", "--json"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    failed = [item["check"] for item in document["checks"] if item["verdict"] == "fail"]
    assert {"engine", "container", "apt mirror"} <= set(failed)
    assert document["healthy"] is False
    assert done.returncode == 50
    assert f"{len(failed)} of {len(document['checks'])} checks failed: {', '.join(failed)}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.parametrize("architecture", ["armhf", "arm64"])
def test_every_check_returns_a_finding(architecture: str, tmp_path: Path) -> None:
    try:
        connect(timeout_s=10).close()
    except UserError as fault:
        pytest.skip(fault.summary)
    findings = examine(Config(build=BuildConfig(folder=tmp_path), image=ImageConfig(architecture=architecture)))
    names = [item.check for item in findings]
    assert len(names) == len(set(names)) >= 15
    assert ("64-bit ARM program" in names) == (architecture == "arm64")
    machine = next(item for item in findings if item.check == "virtual machine")
    assert qemu.program_of(architecture) in machine.done
    assert all(item.found and item.done for item in findings)
    assert all(item.fix for item in findings if item.verdict is Verdict.FAIL)
    assert list(tmp_path.glob(".doctor*")) == []
