"""Tests of the audit with one tree per problem: findings, fixes, and a second run without findings."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from nasty_image import CAPABILITY_NET_RAW, tree_listing
from rich.console import Console

from nfsroot.audit import HELPER, HELPER_IN_TREE, Audit, Settings, audit, capability_text, nameservers_of_host, table
from nfsroot.tree import TreeHash
from sdcard.first_boot import fit_for_card

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the files of a root filesystem belong to root")

SETTINGS = Settings(
    hostname="pitorch",
    nameservers=("192.0.2.53", "2001:db8::53"),
    client_public_key="ssh-ed25519 AAAAKEY pitorch-export",
    now=1_800_000_000,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a tree that passes the audit once it has keys, which each audit generates."""
    root = tmp_path / "root"
    for folder in ("etc/ssh", "dev", "root", "usr/lib", "usr/bin", "usr/local/sbin", "var/lib"):
        (root / folder).mkdir(parents=True)
    (root / "etc/resolv.conf").write_text("nameserver 192.0.2.53\nnameserver 2001:db8::53\n")
    (root / "etc/hostname").write_text("pitorch\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 pitorch\n")
    (root / "etc/machine-id").touch()
    os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "dev/console", stat.S_IFCHR | 0o600, os.makedev(5, 1))
    (root / "usr/lib/clock-epoch").touch()
    os.utime(root / "usr/lib/clock-epoch", (SETTINGS.now, SETTINGS.now))
    (root / HELPER_IN_TREE.lstrip("/")).write_bytes(HELPER.read_bytes())
    return root


def found(made: Audit, check: str) -> dict[str, tuple[str, bool]]:
    """Map each path to the problems that one check found there, and to whether they were fixed."""
    return {item.path: (item.found, item.fixed) for item in made.findings if item.check == check}


def quiet_afterwards(root: Path) -> None:
    """Check that a second audit of the same tree does not fix or change anything except the host keys."""

    def listing() -> dict[bytes, tuple[object, ...]]:
        return {path: facts for path, facts in tree_listing(root).items() if not path.startswith(b"etc/ssh")}

    before = listing()
    again = audit(root, SETTINGS)
    assert [item for item in again.findings if item.fixed and item.check != "host-keys"] == []
    assert listing() == before


def test_a_correct_tree_only_gets_its_keys(tree: Path) -> None:
    made = audit(tree, SETTINGS)
    assert [item.check for item in made.findings] == ["host-keys", "root-login"]
    quiet_afterwards(tree)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (None, "absent"),
        ("", "no name server"),
        ("nameserver 10.0.0.1\n", "the build's name servers"),
        ("-> /run/systemd/resolve/stub-resolv.conf", "a link to /run/systemd/resolve/stub-resolv.conf"),
        ("-> ../../../../etc/passwd", "a link to ../../../../etc/passwd"),
    ],
)
def test_resolv_conf(tree: Path, before: str | None, said: str) -> None:
    place = tree / "etc/resolv.conf"
    place.unlink()
    if before is not None and before.startswith("-> "):
        place.symlink_to(before.removeprefix("-> "))
    elif before is not None:
        place.write_text(before)
    made = audit(tree, SETTINGS)
    assert found(made, "resolv.conf")["/etc/resolv.conf"][0].startswith(said)
    assert not place.is_symlink()
    assert place.read_text() == "nameserver 192.0.2.53\nnameserver 2001:db8::53\n"
    quiet_afterwards(tree)


def test_a_missing_name_server_is_not_fixed(tree: Path) -> None:
    (tree / "etc/resolv.conf").write_text("")
    made = audit(tree, Settings(**{**SETTINGS.__dict__, "nameservers": ()}))
    assert found(made, "resolv.conf")["/etc/resolv.conf"] == ("no name server", False)


def test_loopback_name_servers_are_left_out(tmp_path: Path) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("nameserver 127.0.0.53\nnameserver ::1\n")
    real.write_text("search example\nnameserver 192.0.2.1\nnameserver 127.0.0.1\n")
    assert nameservers_of_host([stub, real]) == ("192.0.2.1",)
    assert nameservers_of_host([stub, tmp_path / "none"]) == ()


def test_name_servers_on_an_interface_are_left_out(tmp_path: Path) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("nameserver fe80::1%eth0\n")
    real.write_text("nameserver fe80::1%eth0\nnameserver 2001:db8::53\n")
    assert nameservers_of_host([stub, real]) == ("2001:db8::53",)


def test_hostname_and_hosts(tree: Path) -> None:
    (tree / "etc/hostname").write_text("build-pc\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost build-pc\n")
    made = audit(tree, SETTINGS)
    assert found(made, "hostname").keys() == {"/etc/hostname", "/etc/hosts"}
    assert (tree / "etc/hostname").read_text() == "pitorch\n"
    assert "127.0.1.1\tpitorch\n" in (tree / "etc/hosts").read_text()
    quiet_afterwards(tree)


def test_machine_id_and_random_seed(tree: Path) -> None:
    (tree / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (tree / "var/lib/dbus").mkdir()
    (tree / "var/lib/dbus/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (tree / "var/lib/systemd").mkdir()
    (tree / "var/lib/systemd/random-seed").write_bytes(b"seed")
    audit(tree, SETTINGS)
    assert (tree / "etc/machine-id").read_text() == ""
    assert (tree / "var/lib/dbus/machine-id").readlink() == Path("/etc/machine-id")
    assert not (tree / "var/lib/systemd/random-seed").exists()
    quiet_afterwards(tree)


def test_fstab_keeps_entries_valid_on_nfs(tree: Path) -> None:
    kept = "# a comment\nproc /proc proc defaults 0 0\ntmpfs /tmp tmpfs nosuid 0 0\nnas:/data /data nfs ro 0 0\n"
    (tree / "etc/fstab").write_text(
        kept
        + "PARTUUID=1-02 / ext4 defaults 0 1\n/dev/mmcblk0p1 /boot/firmware vfat defaults 0 2\n/swap none swap sw 0 0\n"
    )
    made = audit(tree, SETTINGS)
    lines = (tree / "etc/fstab").read_text().splitlines()
    assert "\n".join(lines[:4]) + "\n" == kept
    assert len(lines) == 7
    assert all(line.startswith("# changed by export-nfsroot: ") for line in lines[4:])
    assert len([item for item in made.findings if item.check == "fstab"]) == 3
    quiet_afterwards(tree)


@pytest.mark.parametrize("text", ["", "proc /proc proc defaults 0 0", "proc /proc proc defaults 0 0\n\n"])
def test_a_correct_fstab_is_not_rewritten(tree: Path, text: str) -> None:
    (tree / "etc/fstab").write_text(text)
    made = audit(tree, SETTINGS)
    assert found(made, "fstab") == {}
    assert (tree / "etc/fstab").read_text() == text


def test_swap(tree: Path) -> None:
    units = tree / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    (units / "dphys-swapfile.service").write_text("[Unit]\n")
    (tree / "etc/systemd/system").mkdir(parents=True)
    (tree / "etc/systemd/system/dev-sda2.swap").write_text("[Swap]\n")
    (tree / "var/swap").write_bytes(b"\0" * 4096)
    made = audit(tree, SETTINGS)
    for name in ("dphys-swapfile.service", "dev-sda2.swap"):
        assert (tree / "etc/systemd/system" / name).readlink() == Path("/dev/null")
    assert not (tree / "var/swap").exists()
    assert found(made, "swap")["/var/swap"][0] == "a swap file of 4096 bytes"


def test_a_folder_with_the_name_of_a_swap_file_is_kept(tree: Path) -> None:
    (tree / "var/swap/notes").mkdir(parents=True)
    assert found(audit(tree, SETTINGS), "swap") == {}
    assert (tree / "var/swap/notes").is_dir()
    quiet_afterwards(tree)


def test_the_interface_of_the_root_is_not_reconfigured(tree: Path) -> None:
    folder = tree / "etc/network/interfaces.d"
    folder.mkdir(parents=True)
    (tree / "etc/network/interfaces").write_text("auto lo\niface lo inet loopback\nauto eth0\niface eth0 inet dhcp\n")
    (folder / "usb0").write_text("iface usb0 inet static\n  address 10.0.0.2\n")
    (tree / "usr/sbin").mkdir()
    (tree / "usr/sbin/NetworkManager").touch()
    (tree / "etc/dhcpcd.conf").write_text("hostname\n")
    made = audit(tree, SETTINGS)
    text = (tree / "etc/network/interfaces").read_text()
    assert "iface lo inet loopback" in text
    assert "iface eth0 inet manual" in text
    assert (folder / "usb0").read_text().startswith("iface usb0 inet manual")
    assert "unmanaged-devices" in (tree / "etc/NetworkManager/conf.d/nfsroot.conf").read_text()
    assert found(made, "network")["/etc/dhcpcd.conf"][1] is False
    quiet_afterwards(tree)


def test_each_export_generates_new_host_keys(tree: Path) -> None:
    old = tree / "etc/ssh/ssh_host_rsa_key"
    old.write_text("the same for every board")
    (tree / "etc/ssh/ssh_host_rsa_key.pub").write_text("ssh-rsa AAAAOLD x\n")
    first = audit(tree, SETTINGS)
    assert not old.exists()
    for kind in ("ed25519", "ecdsa"):
        private = tree / f"etc/ssh/ssh_host_{kind}_key"
        assert private.stat().st_mode & 0o777 == 0o600
        derived = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, text=True, check=True).stdout
        assert any(line.startswith(" ".join(derived.split()[:2])) for line in first.host_keys)
    second = audit(tree, SETTINGS)
    assert set(second.host_keys).isdisjoint(first.host_keys)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_missing_ssh_server_is_reported(tree: Path, dangling: bool) -> None:
    (tree / "etc/ssh").rmdir()
    if dangling:
        (tree / "etc/ssh").symlink_to("/run/ssh")
    made = audit(tree, SETTINGS)
    assert found(made, "host-keys")["/etc/ssh"] == ("no SSH server in the tree", False)
    assert not (tree / "root/.ssh").exists()


def test_only_our_old_login_key_is_replaced(tree: Path) -> None:
    folder = tree / "root/.ssh"
    folder.mkdir(mode=0o755)
    (folder / "authorized_keys").write_text("ssh-rsa AAAA friend@home\nssh-ed25519 AAAAOLDER pitorch-export\n")
    audit(tree, SETTINGS)
    place = folder / "authorized_keys"
    assert place.read_text() == "ssh-rsa AAAA friend@home\nssh-ed25519 AAAAKEY pitorch-export\n"
    assert place.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    quiet_afterwards(tree)


@pytest.mark.parametrize("there", [True, False])
def test_login_keys_stay_in_the_tree(tree: Path, tmp_path: Path, there: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    if there:
        tree.joinpath(*outside.parts[1:]).mkdir(parents=True)
    (tree / "root/.ssh").symlink_to(outside)
    hashed = TreeHash.of(tree)
    hashed.refresh(audit(tree, SETTINGS).touched)
    assert outside.stat().st_mode & 0o777 == 0o755
    assert list(outside.iterdir()) == []
    folder = tree.joinpath(*outside.parts[1:])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "authorized_keys").read_text().endswith(" pitorch-export\n")
    assert hashed.sha256 == TreeHash.of(tree).sha256
    quiet_afterwards(tree)


@pytest.mark.parametrize("link", ["etc/ssh", "dev"])
def test_changes_in_linked_folders_are_hashed(tree: Path, tmp_path: Path, link: str) -> None:
    """The link's absolute target exists both on the PC and in the tree."""
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tree.joinpath(*outside.parts[1:])
    inside.mkdir(parents=True)
    shutil.rmtree(tree / link)
    (tree / link).symlink_to(outside)
    hashed = TreeHash.of(tree)
    hashed.refresh(audit(tree, SETTINGS).touched)
    assert list(outside.iterdir()) == []
    assert list(inside.iterdir()) != []
    assert hashed.sha256 == TreeHash.of(tree).sha256


def test_a_boot_folder_below_a_link_is_hashed(tree: Path) -> None:
    (tree / "usr/boot").mkdir()
    (tree / "boot").symlink_to("usr/boot")
    hashed = TreeHash.of(tree)
    made = Audit(tree, SETTINGS)
    fit_for_card(made, "12345678")
    hashed.refresh(made.touched)
    assert hashed.sha256 == TreeHash.of(tree).sha256


def test_a_changed_mode_of_the_login_folder_is_hashed(tree: Path) -> None:
    audit(tree, SETTINGS)
    (tree / "root/.ssh").chmod(0o755)
    hashed = TreeHash.of(tree)
    hashed.refresh(audit(tree, SETTINGS).touched)
    assert hashed.sha256 == TreeHash.of(tree).sha256


def test_file_capabilities(tree: Path) -> None:
    for name in ("ping", "dumpcap"):
        (tree / "usr/bin" / name).write_bytes(name.encode())
        (tree / "usr/bin" / name).chmod(0o755)
        os.setxattr(tree / "usr/bin" / name, "security.capability", CAPABILITY_NET_RAW)
    made = audit(tree, SETTINGS)
    noted = found(made, "capabilities")
    assert "cap_net_raw=ep" in noted["/usr/bin/ping"][0]
    assert noted["/usr/bin/ping"][1] is True
    assert (tree / "usr/bin/ping").stat().st_mode & 0o7777 == 0o4755
    assert noted["/usr/bin/dumpcap"][1] is False, "setuid root is limited to known programs"
    assert (tree / "usr/bin/dumpcap").stat().st_mode & 0o7777 == 0o755
    quiet_afterwards(tree)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (CAPABILITY_NET_RAW, "cap_net_raw=ep"),
        (bytes.fromhex("0000000200040000000000000000000000000000"), "cap_net_bind_service=p"),
        (bytes.fromhex("0100000200000000000000000100000000000000"), "cap_mac_override=ep"),
        (bytes.fromhex("01000003002000000000000000000000000000000a000000"), "cap_net_raw=ep"),
        (b"\x01", "0x01"),
    ],
)
def test_capabilities_are_decoded(value: bytes, text: str) -> None:
    assert capability_text(value) == text


def test_files_of_a_container_engine_are_removed(tree: Path) -> None:
    (tree / ".dockerenv").touch()
    (tree / "etc/mtab").write_text("overlay / overlay rw 0 0\n")
    (tree / "usr/sbin").mkdir()
    (tree / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
    made = audit(tree, SETTINGS)
    assert found(made, "engine-files").keys() == {"/.dockerenv", "/etc/mtab", "/usr/sbin/policy-rc.d"}
    assert not (tree / ".dockerenv").exists()
    assert (tree / "etc/mtab").readlink() == Path("../proc/self/mounts")
    assert not (tree / "usr/sbin/policy-rc.d").exists()
    quiet_afterwards(tree)


def test_dev(tree: Path) -> None:
    (tree / "dev/console").unlink()
    (tree / "dev/console").write_text("")
    (tree / "dev/null").unlink()
    (tree / "dev/sda").write_text("someone copied a disk image here")
    audit(tree, SETTINGS)
    for name, numbers in (("console", (5, 1)), ("null", (1, 3))):
        facts = (tree / "dev" / name).stat()
        assert stat.S_ISCHR(facts.st_mode)
        assert (os.major(facts.st_rdev), os.minor(facts.st_rdev)) == numbers
    assert not (tree / "dev/sda").exists()
    quiet_afterwards(tree)


def test_the_clock_does_not_start_before_the_export(tree: Path) -> None:
    os.utime(tree / "usr/lib/clock-epoch", (1, 1))
    (tree / "etc/fake-hwclock.data").write_text("2013-01-01 00:00:00\n")
    audit(tree, SETTINGS)
    assert (tree / "usr/lib/clock-epoch").stat().st_mtime == SETTINGS.now
    assert (tree / "etc/fake-hwclock.data").read_text() == "2027-01-15 08:00:00\n"
    quiet_afterwards(tree)


@pytest.mark.parametrize("age", [1, 2 * SETTINGS.now])
def test_a_link_is_not_the_minimum_time(tree: Path, tmp_path: Path, age: int) -> None:
    outside, place = tmp_path / "outside", tree / "usr/lib/clock-epoch"
    outside.touch()
    os.utime(outside, (1, 1))
    place.unlink()
    place.symlink_to(outside)
    os.utime(place, (age, age), follow_symlinks=False)
    audit(tree, SETTINGS)
    assert outside.stat().st_mtime == 1
    assert not place.is_symlink()
    assert place.stat().st_mtime == SETTINGS.now
    quiet_afterwards(tree)


def test_proxies_of_the_build_are_removed(tree: Path) -> None:
    folder = tree / "etc/apt/apt.conf.d"
    folder.mkdir(parents=True)
    (folder / "01proxy").write_text('Acquire::http::Proxy "http://p:1";\nAcquire::Retries "3";\n')
    (folder / "02block").write_text('Acquire { http { Proxy "http://p:1"; } }\n')
    (folder / "99other").write_text('APT::Install-Recommends "0";\n')
    (tree / "etc/environment").write_text("LANG=C.UTF-8\nHTTPS_PROXY=http://p:1\n")
    made = audit(tree, SETTINGS)
    assert found(made, "proxies").keys() == {
        "/etc/apt/apt.conf.d/01proxy", "/etc/apt/apt.conf.d/02block", "/etc/environment",
    }  # fmt: skip
    lines = (folder / "01proxy").read_text().splitlines()
    assert lines[0].startswith("// ")
    assert lines[1] == 'Acquire::Retries "3";'
    assert (tree / "etc/environment").read_text().startswith("LANG=C.UTF-8\n# ")
    quiet_afterwards(tree)


def test_the_helper_is_installed_and_updated(tree: Path) -> None:
    place = tree / HELPER_IN_TREE.lstrip("/")
    place.write_text("#!/bin/sh\n# an older one\n")
    audit(tree, SETTINGS)
    assert place.read_bytes() == HELPER.read_bytes()
    assert place.stat().st_mode & 0o777 == 0o755
    quiet_afterwards(tree)


def test_absolute_links_stay_in_the_tree(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "hostname").write_text("this PC\n")
    (tree / "etc/hostname").unlink()
    (tree / "etc/hostname").symlink_to(outside / "hostname")
    (tree / "etc/apt").symlink_to(outside)
    (outside / "apt.conf").write_text('Acquire::http::Proxy "http://p:1";\n')
    before = tree_listing(outside)
    audit(tree, SETTINGS)
    assert tree_listing(outside) == before
    assert (tree / "etc/hostname").read_text() == "pitorch\n"


def test_links_in_place_of_temporary_files_are_not_followed(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("this PC\n")
    (tree / f"etc/.hostname.{os.getpid()}.part").symlink_to(outside)
    (tree / "etc/hostname").write_text("build-pc\n")
    audit(tree, SETTINGS)
    assert outside.read_text() == "this PC\n"
    assert (tree / "etc/hostname").read_text() == "pitorch\n"
    quiet_afterwards(tree)


def test_the_table_shows_unusual_names(tree: Path) -> None:
    odd = tree / "usr/bin" / os.fsdecode(b"na\xefve[red]")
    odd.write_text("x")
    os.setxattr(odd, "security.capability", CAPABILITY_NET_RAW)
    made = audit(tree, SETTINGS)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(table(made.findings))
    console.file.close()
    assert "na\\udcefve[red]" in console.export_text()
