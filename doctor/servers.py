"""Check the programs that serve boards or emulate a board."""

from __future__ import annotations

import os
import re
from pathlib import Path

from doctor.finding import RUN_LIMIT_S, Finding, fail, first_version, ok
from toolchain import process


def check_virtual_machine(emulator: str) -> Finding:
    """Check QEMU's system emulator. ``emulator`` is the name of its program.

    KVM is not checked, because it cannot run guests of another architecture.
    """
    name, done = "virtual machine", f"listed the machine types of {emulator}"
    program = process.require_program(emulator, "to boot the exported tree")
    machines = process.output_of([program, "-machine", "help"], limit_s=RUN_LIMIT_S)
    version = first_version(process.output_of([program, "--version"], limit_s=RUN_LIMIT_S))
    if not re.search(r"^virt\s", machines, re.MULTILINE):
        found = f"version {version} does not support the virt machine type"
        return fail(name, done, found, f"install a newer {emulator}")
    kvm = "/dev/kvm is not needed, because KVM cannot run guests of another architecture"
    return ok(name, done, f"version {version} supports the virt machine type; {kvm}")


def check_nfs_server() -> Finding:
    """Check that the user-space NFS server starts and has the module that serves local folders."""
    name, done = "NFS server", "ran ganesha.nfsd -v, and looked for its VFS module"
    program = process.require_program("ganesha.nfsd", "to serve the exported tree")
    version = first_version(process.run([program, "-v"], limit_s=RUN_LIMIT_S, check=False).output)
    modules = [*Path("/usr/lib").glob("*/ganesha/libfsalvfs.so"), *Path("/usr/lib/ganesha").glob("libfsalvfs.so")]
    if not version or not modules:
        found = f"version {version or 'unknown'}" + ("" if modules else ", and no VFS module")
        return fail(name, done, found, "run apt-get install nfs-ganesha-vfs")
    note = "" if os.geteuid() == 0 else "; the server must run as root (open_by_handle_at(2))"
    return ok(name, done, f"version {version} with VFS{note}")


def check_local_registry() -> Finding:
    """Check that the registry server's program can be executed."""
    program = process.require_program("docker-registry", "to run a local registry")
    fix = "run apt-get install --reinstall docker-registry"
    output = process.run([program, "--version"], limit_s=RUN_LIMIT_S, fix=fix).output
    return ok("local registry", "ran docker-registry --version", " ".join(output.split()))
