"""Run a build's operations on a small scale, to check whether this machine can build images.

For example, the checks run a 32-bit ARM program that lists a directory, build a container image for the target's
platform, cross-compile and run a program, and verify the mirror's package lists. Running an operation proves more than
looking for a file or a version number. Problems are returned as findings, not raised as exceptions, so ``examine``
always returns the complete list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from doctor import emulation, emulator_versions, foreign_programs, host, network, resources, servers
from doctor.containers import engine_findings
from doctor.finding import Finding, Verdict, guarded
from nfsroot import qemu
from toolchain import files
from toolchain.config import Config
from toolchain.errors import ChecksFailed


def examine(config: Config) -> list[Finding]:
    """Run the checks of this machine, the engine, the network and the servers, in the order of the data flow.

    Starts an engine if none is running.
    """
    folder, target = config.build_root, config.image.target
    with files.scratch_folder(resources.writable(folder), "doctor") as scratch:
        before: dict[str, Callable[[], Finding]] = {
            "init": host.check_init,
            "rights": host.check_rights,
            "free disk": lambda: resources.check_disk(folder),
            "free memory": lambda: resources.check_memory(config.build),
            "binfmt flags": lambda: emulation.check_registration(target),
            "vm.mmap_min_addr": lambda: emulation.check_mmap_min_addr(emulation.MMAP_MIN_ADDR),
            "emulator and kernel": lambda: emulator_versions.check_emulator(config),
            "32-bit ARM program": lambda: foreign_programs.check_execution(scratch),
            "64-bit ARM program": lambda: foreign_programs.check_execution_64(scratch),
            "32-bit directory listing": lambda: foreign_programs.check_listing(scratch),
            "cross compiler": lambda: foreign_programs.check_cross_compiler(scratch, target.gnu),
        }
        if config.image.architecture != "arm64":
            del before["64-bit ARM program"]
        after: dict[str, Callable[[], Finding]] = {
            "apt mirror": lambda: network.check_mirror(config, scratch),
            "package index": lambda: network.check_package_index(scratch),
            "virtual machine": lambda: servers.check_virtual_machine(qemu.program_of(target.debian)),
            "NFS server": servers.check_nfs_server,
            "local registry": servers.check_local_registry,
        }
        if not qemu.program_of(target.debian):
            del after["virtual machine"]
        return [
            *(guarded(name, check) for name, check in before.items()),
            *engine_findings(config),
            *(guarded(name, check) for name, check in after.items()),
        ]


def require_healthy(findings: Sequence[Finding]) -> None:
    """If any check failed, raise ChecksFailed with the names of the failed checks."""
    failed = [item.check for item in findings if item.verdict is Verdict.FAIL]
    if failed:
        raise ChecksFailed(
            f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
            fix="apply the fix for each failed check above",
        )
