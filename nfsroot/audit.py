"""Find and fix parts of a root filesystem that would cause failures when a board boots from it over NFS.

The audit reads and writes files in the tree but executes none of them, so it needs no chroot and no emulator. Links are
resolved as the board would resolve them, and never lead out of the tree. A second audit of the same tree changes only
the host keys.

The checks run in this order: resolv.conf, hostname, machine-id, fstab, swap, network (the interface that the NFS root
uses must not be configured again), host-keys, root-login, capabilities, engine-files, dev, clock, proxies, helper.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from nfsroot.tree import follow, inside, xattrs_of
from toolchain import process
from toolchain.files import remove, replacing

HELPER = Path(__file__).resolve().parent / "enter-nfsroot"
HELPER_IN_TREE = "/usr/local/sbin/enter-nfsroot"
_NOTE = "# changed by export-nfsroot: "

# If the file system does not support capabilities, the postinst scripts of these programs' Debian packages set the
# setuid bit instead.
_SETUID_WILL_DO = frozenset({
    "ping", "ping4", "ping6", "fping", "mtr-packet", "arping", "clockdiff", "traceroute6.iputils",
    "newuidmap", "newgidmap",
})  # fmt: skip

# The capabilities in numerical order, from linux/capability.h.
_CAPABILITIES = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner",
    "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice",
    "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap",
    "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf",
    "checkpoint_restore",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem and its fix."""

    check: str
    path: str
    """The absolute path in the tree."""
    found: str
    fix: str
    fixed: bool = True

    def as_json(self) -> dict[str, str | bool]:
        """Return the finding as a manifest entry."""
        return {"check": self.check, "path": self.path, "found": self.found, "fix": self.fix, "fixed": self.fixed}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The board's settings."""

    hostname: str
    nameservers: tuple[str, ...]
    client_public_key: str
    """The public key for logins, as a line for authorized_keys."""
    now: int
    """The initial time of a board without a real-time clock, as Unix time."""


@dataclass
class Audit:
    """The audited tree and the findings."""

    root: Path
    settings: Settings
    findings: list[Finding] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    host_keys: list[str] = field(default_factory=list)
    """The public host keys of the audited tree, one string for each key."""

    def note(self, check: str, path: str, found: str, fix: str, *, fixed: bool = True) -> None:
        """Record a finding."""
        self.findings.append(Finding(check=check, path=path, found=found, fix=fix, fixed=fixed))

    def text(self, path: str) -> str | None:
        """Return the text of the regular file at ``path``, or None if there is no such file; links are followed."""
        try:
            place = follow(self.root, path)
            return place.read_text(errors="surrogateescape") if place.is_file() else None
        except OSError:
            return None

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a regular file that belongs to root; replace an existing entry, even a link."""
        place = inside(self.root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._replace(place, text, (0, 0), mode)

    def rewrite(self, path: str, text: str) -> None:
        """Replace a file's text, and preserve the file's mode and owner."""
        place = follow(self.root, path)
        before = place.stat()
        self._replace(place, text, (before.st_uid, before.st_gid), stat.S_IMODE(before.st_mode))

    def _replace(self, place: Path, text: str, owner: tuple[int, int], mode: int) -> None:
        with replacing(place) as aside:
            remove(aside)  # the image may contain a link with this name
            aside.write_text(text, errors="surrogateescape")
            os.chown(aside, *owner)
            aside.chmod(mode)
        self.touched.append(self._relative(place))

    def link(self, path: str, target: str) -> None:
        """Create or replace a symbolic link."""
        place = inside(self.root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as aside:
            aside.symlink_to(target)
        self.touched.append(self._relative(place))

    def remove(self, path: str) -> None:
        """Remove a file or link."""
        place = inside(self.root, path)
        place.unlink()
        self.touched.append(self._relative(place))

    def has(self, path: str) -> bool:
        """Return whether the path exists, even if it is a dangling link."""
        return os.path.lexists(inside(self.root, path))

    def listing(self, folder: str, pattern: str = "*") -> Iterator[str]:
        """Yield the entries of a folder that match ``pattern``, as paths on the board."""
        place = follow(self.root, folder)
        if place.is_dir():
            for item in sorted(place.glob(pattern)):
                yield self.path_of(item)

    def path_of(self, place: Path) -> str:
        """Return an entry's path on the board."""
        return f"/{self._relative(place)}"

    def _relative(self, place: Path) -> str:
        return str(place.relative_to(self.root))


def audit(root: Path, settings: Settings, checks: Sequence[Callable[[Audit], None]] | None = None) -> Audit:
    """Audit the tree at ``root`` with ``checks``, by default ``CHECKS``, and return the findings."""
    made = Audit(root, settings)
    for check in checks or CHECKS:
        check(made)
    return made


def table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table."""
    made = Table(title="audit: problems with an NFS root", title_justify="left", title_style="bold")
    for column in ("check", "path", "found", "fix"):
        made.add_column(column, overflow="fold")
    made.add_column("fixed")
    for item in findings:
        fixed = Text("yes", style="green") if item.fixed else Text("no", style="yellow")
        made.add_row(item.check, *(_plain(text) for text in (item.path, item.found, item.fix)), fixed)
    return made


def nameservers_of_host(candidates: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return this PC's name servers, except those that other machines cannot use.

    Other machines cannot use loopback addresses or addresses that are valid on only one of this PC's interfaces
    (``fe80::1%eth0``).
    """
    for source in candidates or (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        try:
            lines = source.read_text(errors="replace").splitlines()
        except OSError:
            continue
        servers = [words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "nameserver"]
        usable = tuple(item for item in servers if not item.startswith(("127.", "::1")) and "%" not in item)
        if usable:
            return usable[:3]
    return ()


def _plain(text: str) -> Text:
    return Text(text.encode(errors="backslashreplace").decode())


def _resolv_conf(tree: Audit) -> None:
    path = "/etc/resolv.conf"
    if not tree.has("/etc"):
        return
    place = inside(tree.root, path)
    wanted = "".join(f"nameserver {server}\n" for server in tree.settings.nameservers)
    if place.is_symlink():
        found = f"a link to {os.readlink(place)}, which nothing on the board creates"  # noqa: PTH115
    elif not place.exists():
        found = "absent"
    else:
        text = place.read_text(errors="replace")
        known = re.search(r"^\s*nameserver\s", text, re.MULTILINE) is not None
        if text == wanted != "" or (known and not wanted):
            return
        found = "the build's name servers" if known else "no name server"
    if wanted:
        tree.write(path, wanted)
        tree.note("resolv.conf", path, found, f"this PC's: {', '.join(tree.settings.nameservers)}")
    else:
        tree.note(
            "resolv.conf", path, found, "this PC has no usable name server: add 'nameserver ADDRESS'", fixed=False
        )


def _hostname(tree: Audit) -> None:
    if not tree.has("/etc"):
        return
    name = tree.settings.hostname
    before = tree.text("/etc/hostname")
    if before is None or before.strip() != name:
        tree.write("/etc/hostname", f"{name}\n")
        tree.note("hostname", "/etc/hostname", f"{(before or '').strip() or 'absent'}", name)
    wanted = f"127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    hosts = tree.text("/etc/hosts")
    if hosts is None or not re.search(rf"^127\.\S+\s.*\b{re.escape(name)}\b", hosts, re.MULTILINE):
        tree.write("/etc/hosts", wanted)
        tree.note("hostname", "/etc/hosts", "no entry for the board's name", f"localhost and {name}")


def _machine_id(tree: Audit) -> None:
    path = "/etc/machine-id"
    if tree.has("/etc") and tree.text(path) != "":
        found = "identical on every board" if tree.has(path) else "absent"
        tree.write(path, "", mode=0o444)
        tree.note("machine-id", path, found, "emptied; it is set on the first boot")
    path = "/var/lib/dbus/machine-id"
    if tree.has(path) and not inside(tree.root, path).is_symlink():
        tree.link(path, "/etc/machine-id")
        tree.note("machine-id", path, "a second copy", "a link to /etc/machine-id")
    for path in ("/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed"):
        if tree.has(path):
            tree.remove(path)
            tree.note("machine-id", path, "a random seed that is identical on every board", "removed")


def _fstab(tree: Audit) -> None:
    path = "/etc/fstab"
    text = tree.text(path)
    if text is None:
        return
    lines = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 2 and not line.lstrip().startswith("#"):
            on_disk = words[0].startswith(("/dev/", "UUID=", "LABEL=", "PARTUUID=", "PARTLABEL=", "/"))
            if words[2] == "swap" or words[1] == "/" or on_disk:
                tree.note("fstab", path, line.strip(), "commented out: an NFS root has no such device")
                line = _NOTE + line
        lines.append(line)
    wanted = "".join(f"{line}\n" for line in lines)
    if wanted.split("\n") != text.rstrip("\n").split("\n") + [""] * (wanted != ""):
        tree.rewrite(path, wanted)


def _swap(tree: Audit) -> None:
    systemd = "/etc/systemd/system"
    units = ["dphys-swapfile.service", "rpi-swap.service", "zramswap.service"]
    present = [
        name for name in units if any(tree.has(f"{folder}/{name}") for folder in ("/usr/lib/systemd/system", systemd))
    ]
    present += [
        Path(item).name for folder in (systemd, "/usr/lib/systemd/system") for item in tree.listing(folder, "*.swap")
    ]
    for name in dict.fromkeys(present):
        place = f"{systemd}/{name}"
        if inside(tree.root, place).is_symlink() and os.readlink(inside(tree.root, place)) == "/dev/null":  # noqa: PTH115
            continue
        tree.link(place, "/dev/null")
        tree.note("swap", place, "swaps to a file, which NFS does not support", "masked")
    for path in ("/var/swap", "/swapfile"):
        if tree.has(path) and not stat.S_ISDIR((status := inside(tree.root, path).lstat()).st_mode):
            tree.remove(path)
            tree.note("swap", path, f"a swap file of {status.st_size} bytes", "removed")


def _network(tree: Audit) -> None:
    for path in ("/etc/network/interfaces", *tree.listing("/etc/network/interfaces.d")):
        text = tree.text(path)
        if text is None:
            continue
        wanted = re.sub(r"^(\s*iface\s+(?!lo\b)\S+\s+inet\s+)(dhcp|static)\b", r"\1manual", text, flags=re.MULTILINE)
        if wanted != text:
            tree.rewrite(path, wanted)
            tree.note("network", path, "configures the network interface that the NFS root uses", "set to manual")
    path = "/etc/NetworkManager/conf.d/nfsroot.conf"
    if tree.has("/usr/sbin/NetworkManager") and not tree.has(path):
        tree.write(path, "[keyfile]\nunmanaged-devices=type:ethernet\n")
        found = "NetworkManager reconfigures the network interface that the NFS root uses"
        tree.note("network", path, found, "set to unmanaged")
    for path, fix in (
        ("/etc/systemd/network", "add KeepConfiguration=yes to its .network files"),
        ("/etc/dhcpcd.conf", "add `denyinterfaces eth0` there"),
    ):
        units = [item for item in tree.listing(path, "*.network") if "DHCP=" in (tree.text(item) or "")]
        text = tree.text(path) or ""
        if units or (text and "denyinterfaces" not in text):
            tree.note("network", path, "may configure the network interface that the NFS root uses", fix, fixed=False)


def _host_keys(tree: Audit) -> None:
    if not follow(tree.root, "/etc/ssh").is_dir():
        tree.note("host-keys", "/etc/ssh", "no SSH server in the tree", "add openssh-server to the image", fixed=False)
        return
    old = [Path(item).name for item in tree.listing("/etc/ssh", "ssh_host_*")]
    for name in old:
        tree.remove(f"/etc/ssh/{name}")
    folder = inside(tree.root, "/etc/ssh/x").parent
    for kind in ("ecdsa", "ed25519"):
        name = f"ssh_host_{kind}_key"
        comment = f"root@{tree.settings.hostname}"
        process.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", folder / name], limit_s=60)
        (folder / name).chmod(0o600)
        tree.touched += [str((folder / item).relative_to(tree.root)) for item in (name, f"{name}.pub")]
        tree.host_keys.append((folder / f"{name}.pub").read_text().strip())
    found = f"{len(old)} key files, identical on every board" if old else "none"
    tree.note("host-keys", "/etc/ssh", found, "generated; pinned in ssh_known_hosts next to the tree")


def _root_login(tree: Audit) -> None:
    if not follow(tree.root, "/etc/ssh").is_dir():
        return
    path = "/root/.ssh/authorized_keys"
    key = tree.settings.client_public_key.strip()
    place = follow(tree.root, "/root/.ssh")
    if not place.exists():
        place.mkdir(parents=True)
        os.chown(place, 0, 0)
    place.chmod(0o700)
    tree.touched.append(str(place.relative_to(tree.root)))
    mark = key.split()[-1]
    before = tree.text(path) or ""
    others = [line for line in before.splitlines() if not line.rstrip().endswith(mark)]
    wanted = "".join(f"{line}\n" for line in [*others, key])
    if wanted != before:
        tree.write(path, wanted, mode=0o600)
        tree.note(
            "root-login",
            path,
            "this PC cannot log in",
            "public key added (private key: id_ed25519, next to the tree)",
        )


def _capabilities(tree: Audit) -> None:
    top = os.fsencode(tree.root)
    for parent, _, names in os.walk(top):
        for name in names:
            place = parent + b"/" + name
            value = dict(xattrs_of(place)).get("security.capability")
            if value is None:
                continue
            path = os.fsdecode(place[len(top) :])
            found = f"file capabilities {capability_text(value)}, which NFS does not support"
            mode = os.lstat(place).st_mode
            if mode & stat.S_ISUID:
                continue
            if os.fsdecode(name) in _SETUID_WILL_DO and mode & stat.S_IXOTH:
                os.chmod(place, stat.S_IMODE(mode) | stat.S_ISUID)  # noqa: PTH101
                tree.touched.append(path.lstrip("/"))
                tree.note("capabilities", path, found, "made setuid root, as its Debian package can do")
            else:
                tree.note("capabilities", path, found, "run it as root, or as a service with AmbientCapabilities",
                          fixed=False)  # fmt: skip


def capability_text(value: bytes) -> str:
    """Return a security.capability attribute as text (struct vfs_cap_data, linux/capability.h, revisions 1 to 3)."""
    try:
        (magic,) = struct.unpack_from("<I", value)
        words = (len(value) - 4) // 8
        pairs = [struct.unpack_from("<II", value, 4 + 8 * index) for index in range(min(words, 2))]
    except struct.error:
        return f"0x{value.hex()}"
    permitted = sum(pair[0] << (32 * index) for index, pair in enumerate(pairs))
    inheritable = sum(pair[1] << (32 * index) for index, pair in enumerate(pairs))
    flags = ("e" if magic & 1 else "") + ("i" if inheritable else "") + ("p" if permitted else "")
    known = [name for bit, name in enumerate(_CAPABILITIES) if (permitted | inheritable) >> bit & 1]
    return ",".join(f"cap_{name}" for name in known) + f"={flags}"


def _engine_files(tree: Audit) -> None:
    for path in ("/.dockerenv", "/.dockerinit", "/run/.containerenv", "/etc/apt/apt.conf.d/docker-clean",
                 "/etc/apt/apt.conf.d/docker-no-languages", "/etc/apt/apt.conf.d/docker-gzip-indexes",
                 "/etc/apt/apt.conf.d/docker-autoremove-suggests"):  # fmt: skip
        if tree.has(path):
            tree.remove(path)
            tree.note("engine-files", path, "left by a container engine", "removed")
    path = "/usr/sbin/policy-rc.d"
    if "exit 101" in (tree.text(path) or ""):
        tree.remove(path)
        tree.note("engine-files", path, "prevents all services from starting", "removed")
    path = "/etc/mtab"
    if tree.has(path) and not inside(tree.root, path).is_symlink():
        tree.link(path, "../proc/self/mounts")
        tree.note("engine-files", path, "a regular file", "a link to /proc/self/mounts")


def _dev(tree: Audit) -> None:
    if not tree.has("/dev"):
        inside(tree.root, "/dev").mkdir(mode=0o755)
        tree.touched.append("dev")
    for path in tree.listing("/dev"):
        place = inside(tree.root, path)
        mode = place.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISSOCK(mode):
            kind = "a regular file" if stat.S_ISREG(mode) else "a socket"
            tree.remove(path)
            tree.note("dev", path, f"{kind} in place of a device", "removed")
    for name, major, minor, bits in (("console", 5, 1, 0o600), ("null", 1, 3, 0o666)):
        path = f"/dev/{name}"
        if not tree.has(path):
            place = inside(tree.root, path)
            os.mknod(place, stat.S_IFCHR | bits, os.makedev(major, minor))
            place.chmod(bits)
            tree.touched.append(str(place.relative_to(tree.root)))
            tree.note(
                "dev", path, "absent, but required before devtmpfs is mounted", f"character device {major}:{minor}"
            )


def _clock(tree: Audit) -> None:
    now = tree.settings.now
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    path = "/etc/fake-hwclock.data"
    if (before := tree.text(path)) is not None and before.strip() < stamp:
        tree.rewrite(path, f"{stamp}\n")
        tree.note("clock", path, f"earlier time: {before.strip()}", stamp)
    # If the clock is earlier than this file's timestamp, systemd (since 250, see systemd(1)) and pi-init set the clock
    # to the timestamp.
    path = "/usr/lib/clock-epoch"
    place = inside(tree.root, path)
    is_file = tree.has(path) and not place.is_symlink()
    if tree.has("/usr/lib") and (not is_file or place.lstat().st_mtime < now):
        if not is_file:
            tree.write(path, "")
        os.utime(place, (now, now), follow_symlinks=False)
        tree.note("clock", path, "earlier time" if is_file else "no minimum time for a board without a clock", stamp)


def _proxies(tree: Audit) -> None:
    setting = re.compile(r"^(?!\s*(//|#))(?=.*\bAcquire(::|\s*\{).*Proxy\b)", re.IGNORECASE)
    for path in ("/etc/apt/apt.conf", *tree.listing("/etc/apt/apt.conf.d")):
        text = tree.text(path)
        if text is None:
            continue
        lines = text.splitlines()
        if any(setting.search(line) for line in lines):
            marked = [f"// {_NOTE.lstrip('# ')}{line}" if setting.search(line) else line for line in lines]
            tree.rewrite(path, "".join(f"{line}\n" for line in marked))
            tree.note("proxies", path, "the build's apt proxy", "commented out")
    path = "/etc/environment"
    text = tree.text(path)
    variable = re.compile(r"^\s*(export\s+)?(https?|ftp|all|no)_proxy=", re.IGNORECASE)
    if text is not None and any(variable.search(line) for line in text.splitlines()):
        marked = [_NOTE + line if variable.search(line) else line for line in text.splitlines()]
        tree.rewrite(path, "".join(f"{line}\n" for line in marked))
        tree.note("proxies", path, "the build's proxy", "commented out")


def _helper(tree: Audit) -> None:
    wanted = HELPER.read_text()
    if tree.has("/usr") and tree.text(HELPER_IN_TREE) != wanted:
        found = "another version" if tree.has(HELPER_IN_TREE) else "absent"
        tree.write(HELPER_IN_TREE, wanted, mode=0o755)
        tree.note("helper", HELPER_IN_TREE, found, "installed, to enter other root filesystems from this one")


CHECKS: tuple[Callable[[Audit], None], ...] = (
    _resolv_conf, _hostname, _machine_id, _fstab, _swap, _network, _host_keys, _root_login, _capabilities,
    _engine_files, _dev, _clock, _proxies, _helper,
)  # fmt: skip

ON_EVERY_MEDIUM = (_hostname, _machine_id, _engine_files, _dev, _clock, _proxies)
"""The checks that also apply to a root filesystem on a card."""
