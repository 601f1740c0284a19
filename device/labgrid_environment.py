"""Write a run's labgrid environment as YAML: the board, its drivers and the suite's options."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from device.suite_result import Paths
from nfsroot import access, bare_system, host_keys
from nfsroot.layout import Layout, require_export
from nfsroot.qemu import HOST_SEEN_FROM_GUEST, cpu_of
from toolchain import files, ports, process, progress
from toolchain.addresses import server_address, subnet_of
from toolchain.config import Config
from toolchain.errors import ArtefactMissing

SUITE_LIMIT_S = 5400.0
"""The time limit for the tests on the board. Emulation on a busy host can take a hundred times as long as a Pi."""

TIMING_BUDGET_S = 120.0
"""The time budget of timing.py. The script skips matrix widths that would exceed the budget, and lists them."""

LOGIN_LIMIT_S = 300.0
"""The time limit for the login to a system that is already running."""

_HEADER = """\
# labgrid environment that pitorch generated from invoke.yaml. Edit invoke.yaml instead of this file. To run the suite
# with this environment, run: pytest --lg-env THIS_FILE tests/device
"""

DRIVERS: Mapping[str, str] = {
    "NetworkPowerPort": "NetworkPowerDriver",
    "NetworkUSBPowerPort": "USBPowerDriver",
    "NetworkUSBSDMuxDevice": "USBSDMuxDriver",
    "NetworkUSBSDWireDevice": "USBSDWireDriver",
}
"""The labgrid driver for each resource that a board may have, except the serial console (``ConsoleRecorder``)."""


@dataclass(frozen=True, kw_only=True)
class RemoteBoard:
    """A board that is registered with labgrid's coordinator.

    ``name`` is the board's place, which this user must hold.
    """

    name: str
    coordinator: str
    """The coordinator's address, HOST:PORT."""
    resources: Collection[str]
    """The classes of the place's resources."""
    boots: bool = False
    """Whether the board boots during the run, because it is switched off and on."""

    @property
    def drivers(self) -> list[str]:
        """The labgrid drivers for the board's resources, except those for SSH and the serial console."""
        return [driver for resource, driver in DRIVERS.items() if resource in self.resources]

    @property
    def has_console(self) -> bool:
        """Whether the board's serial console is exported."""
        return "NetworkSerialPort" in self.resources


def prepare(
    config: Config,
    paths: Paths,
    *,
    host: str | None,
    chroot: bool,
    timing: bool,
    suite: Path | None = None,
    place: RemoteBoard | None = None,
    test_files: Sequence[str] = (),
) -> None:
    """Write labgrid's environment for this run.

    If the virtual machine enters the tree from a bare system, that system is also exported.

    Raises ArtefactMissing if there is no exported tree. Raises RootNeeded if the user is not root and the tree must be
    served, or if the user may not read the login key. Also raises any exception that the export of the bare system
    raises.
    """
    command = "./inv test-on-pi" + (f" --host={host}" if host else "") + (" --chroot" if chroot else "")
    if host is None and place is None:
        process.require_root("to serve the exported tree to the virtual machine", command)
    layout = Layout.of(config)
    events = str(paths.events)
    options: dict[str, Any] = {
        "architecture": config.image.architecture,
        "record": str(paths.record),
        "log": str(paths.log),
        "suite_limit_s": SUITE_LIMIT_S,
        "timing_limit_s": 5 * TIMING_BUDGET_S if timing else 0.0,
        "timing": [f"--budget-s={TIMING_BUDGET_S:g}"],
    }
    if paths.checksums.is_file():
        options["checksums"] = str(paths.checksums)
    if suite is not None:
        options["suite"] = str(suite.resolve())
    if test_files:
        options["test_files"] = list(test_files)
    require_export(layout)
    resources: dict[str, Any] = {
        "ExportedTree": {"folder": str(layout.tree), "architecture": config.image.architecture}
    }
    drivers: dict[str, Any] = {}
    booted = layout
    if host is None and chroot:
        booted = _bare_system(config)
    boots = place is not None and place.boots
    limit_s = config.device.boot_timeout_s
    login: dict[str, Any] = {"connection_timeout": limit_s if boots else min(limit_s, LOGIN_LIMIT_S)}
    if host is None or not chroot:
        access.require_readable(booted.client_key, command)
        known_hosts = host_keys.pin(booted, paths.folder / "known_hosts")
        login |= {"key": str(booted.client_key), "known_hosts": str(known_hosts), "export": str(booted.place)}
    server = {"log": str(paths.folder / "nfs-server.log"), "events": events}
    if place is not None:
        options["coordinator_address"] = place.coordinator
        resources["RemotePlace"] = {"name": place.name}
        drivers |= {driver: {} for driver in place.drivers}
        if place.has_console:
            drivers["ConsoleRecorder"] = {"console": str(paths.console), "events": events}
    elif host is None:
        resources["NetworkService"] = {"address": "127.0.0.1", "port": 22, "username": "root"}
        drivers["TreeServerDriver"] = {**server, "second_folder": str(booted.tree) if booted != layout else ""}
        drivers["VirtualBoardDriver"] = {
            "console": str(paths.console),
            "events": events,
            "init": config.device.init,
            "cpu": cpu_of(config.image.architecture, config.device.cpu),
            "memory_mib": config.device.memory_mib,
            "cpus": config.device.cpus,
            "boot_timeout_s": config.device.boot_timeout_s,
        }
        options["private_network"] = True
        if chroot:
            options |= {"chroot": "served", "chroot_address": HOST_SEEN_FROM_GUEST}
    else:
        user, address, port = access.parse_host(host)
        resources["NetworkService"] = {"address": address, "port": port, "username": user}
        if chroot:
            this_host = server_address(config)
            if ports.accepts(this_host, config.nfs.port, limit_s=2):
                progress.say(f"    using the NFS server that is running on {this_host}:{config.nfs.port}")
                options["chroot"] = f"{this_host}:{layout.tree}"
                options["chroot_port"] = config.nfs.port
            else:
                process.require_root("to serve the exported tree to the board", command)
                allowed = " ".join([str(subnet_of(config)), *_addresses(address)])
                where = {"address": this_host, "port": config.nfs.port, "allowed": allowed}
                drivers["TreeServerDriver"] = {**server, **where}
                options |= {"chroot": "served", "chroot_address": this_host}
    drivers |= {"PinnedSSHDriver": login, "BoardStrategy": {"events": events}}
    described = {
        "imports": ["device.target", "device.strategy"],
        "targets": {"main": {"resources": resources, "drivers": drivers}},
        "options": options,
    }
    files.write_text_atomically(paths.environment, _HEADER + yaml.safe_dump(described, sort_keys=False))


def _bare_system(config: Config) -> Layout:
    """Return the system that the virtual machine boots before it enters the chroot.

    If the bare system's image is missing, the virtual machine boots the exported tree.
    """
    try:
        return bare_system.ready(config)
    except ArtefactMissing as fault:
        progress.warn(
            f"{fault.summary}; the virtual machine therefore boots the exported tree and uses it as the chroot. To "
            "build the missing image, run ./inv build-image"
        )
        return Layout.of(config)


def _addresses(host: str) -> list[str]:
    """Return the IPv4 addresses of a host, or an empty list if only ssh's configuration defines the name."""
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(host, None, socket.AF_INET)})
    except (OSError, UnicodeError):  # UnicodeError: a name that DNS does not allow
        return []
