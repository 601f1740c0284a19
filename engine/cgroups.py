"""Mount the cgroup hierarchies that dockerd needs.

On a machine with systemd, systemd mounts these hierarchies. In a container without systemd, this module mounts them in
the same way as the cgroupfs-mount package. If no controller is bound to cgroups version 1, the module mounts the
unified hierarchy. Otherwise, it mounts a version 1 hierarchy for each bound controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from toolchain import process

_CGROUP = Path("/sys/fs/cgroup")


def mount_commands(proc_cgroups: str, mounted: Sequence[str]) -> list[list[str]]:
    """Return the commands that mount the cgroup hierarchies, or an empty list if any hierarchy is mounted already.

    ``proc_cgroups`` is the text of /proc/cgroups (name, hierarchy, number, enabled). ``mounted`` lists the types of the
    file systems mounted at and below /sys/fs/cgroup. A controller whose hierarchy number is 0 is available to cgroups
    version 2.
    """
    if "cgroup" in mounted or "cgroup2" in mounted:
        return []
    rows = [line.split() for line in proc_cgroups.splitlines() if line and not line.startswith("#")]
    bound = [row[0] for row in rows if row[1] != "0" and row[3] == "1"]
    if not bound:
        return [["mount", "-t", "cgroup2", "cgroup2", str(_CGROUP)]]
    commands = [["mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", str(_CGROUP)]]
    for name in bound:
        folder = str(_CGROUP / name)
        commands += [["mkdir", "-p", folder], ["mount", "-t", "cgroup", "-o", name, "cgroup", folder]]
    return commands


def mount_missing(sudo: Sequence[str]) -> None:
    """Mount the missing hierarchies. ``sudo`` is the prefix of the commands (empty for root). Raises CommandFailed."""
    partitions = psutil.disk_partitions(all=True)
    mounted = [mount.fstype for mount in partitions if Path(mount.mountpoint).is_relative_to(_CGROUP)]
    try:
        table = Path("/proc/cgroups").read_text()
    except FileNotFoundError:
        table = ""
    for argv in mount_commands(table, mounted):
        process.run(
            [*sudo, *argv], limit_s=30, fix="run this container with --privileged, because dockerd needs cgroups"
        )
