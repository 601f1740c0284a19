"""Tests of the virtual machine: kernel, command line, boot, and reports of failed boots."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from device_parts import BOOT_LIMIT_S, bootable
from waiting import eventually

from nfsroot import qemu, serve
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from toolchain import process
from toolchain.config import ROOT, Config
from toolchain.errors import ArtefactMissing, BoardSilent, PlatformMismatch, UserError


def tree_with(folder: Path, *kernels: str, without_initrd: str = "") -> Path:
    (folder / "boot").mkdir(parents=True)
    for name in kernels:
        (folder / "boot" / f"vmlinuz-{name}").write_bytes(b"\0" * 4096)
        if name != without_initrd:
            (folder / "boot" / f"initrd.img-{name}").write_bytes(b"\0" * 4096)
    return folder


def spec_of(folder: Path, **changes: object) -> qemu.MachineSpec:
    tree = tree_with(folder / "tree", "6.12.1+deb13-armmp")
    values: dict[str, object] = {"boot": qemu.boot_files(tree, "armhf"), "nfs_path": str(tree), "nfs_port": 2049}
    return qemu.MachineSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_the_newest_kernel_with_an_initramfs_boots(tmp_path: Path) -> None:
    names = ("6.12.9+deb13-armmp", "6.12.107+deb13-armmp", "6.13.0+deb13-armmp", "6.12.107+rpt-rpi-v7")
    tree = tree_with(tmp_path, *names, without_initrd="6.13.0+deb13-armmp")
    assert qemu.boot_files(tree, "armhf").release == "6.12.107+deb13-armmp"


def test_links_to_kernels_stay_in_the_tree(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("this PC")
    tree = tree_with(tmp_path, "6.12.9+deb13-armmp", "6.12.107+deb13-armmp")
    for name in ("6.12.9+deb13-armmp", "6.13.0+deb13-armmp"):
        (tree / f"boot/initrd.img-{name}").unlink(missing_ok=True)
        (tree / f"boot/initrd.img-{name}").symlink_to("/boot/initrd.img-6.12.107+deb13-armmp")
    (tree / "boot/vmlinuz-6.13.0+deb13-armmp").symlink_to(tmp_path / "outside")
    found = qemu.boot_files(tree, "armhf")
    assert found.release == "6.12.107+deb13-armmp"
    (tree / "boot/vmlinuz-6.12.107+deb13-armmp").unlink()
    found = qemu.boot_files(tree, "armhf")
    assert (found.release, found.initrd.name) == ("6.12.9+deb13-armmp", "initrd.img-6.12.107+deb13-armmp")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [((), "no kernel in boot/"), (("6.12.1+rpt-rpi-v7",), "kernels for boards only (6.12.1+rpt-rpi-v7)")],
)
def test_a_tree_that_qemu_cannot_boot_is_refused(tmp_path: Path, kernels: tuple[str, ...], said: str) -> None:
    with pytest.raises(ArtefactMissing) as caught:
        qemu.boot_files(tree_with(tmp_path, *kernels), "armhf")
    assert said in caught.value.found
    assert "image.profile: bootable" in caught.value.fix


def test_a_tree_of_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlatformMismatch, match="cannot be booted as an armhf system") as caught:
        qemu.boot_files(tree_with(tmp_path, "6.12.107+deb13-arm64"), "armhf")
    assert caught.value.found == "a kernel for arm64 (6.12.107+deb13-arm64)"
    assert "--architecture=arm64" in caught.value.fix


def test_kernel_command_line_names_server_path_and_init(tmp_path: Path) -> None:
    lean = spec_of(tmp_path / "a", nfs_path="/srv/pi", nfs_port=12049).kernel_command_line()
    assert "boot=nfs4 root=/dev/nfs rw ip=dhcp nfsroot=10.0.2.2:/srv/pi,vers=4.1,port=12049 " in lean
    assert lean.endswith("init=/usr/local/sbin/pi-init")
    assert "init=" not in spec_of(tmp_path / "b", init="systemd").kernel_command_line()


@pytest.mark.parametrize(
    ("now", "epoch", "after"), [(5, 1764000000, "@1764000000"), (1764000001, 1764000000, ""), (5, None, "")]
)
def test_the_lean_init_sets_an_early_clock(tmp_path: Path, now: int, epoch: int | None, after: str) -> None:
    """Run the init script's function with a fake ``date``, because the real one would set this machine's clock."""
    init = (ROOT / "images/overlay/bootable/usr/local/sbin/pi-init").read_text()
    (function,) = re.findall(r"^set_clock\(\) \{\n.*?^\}\n", init, re.MULTILINE | re.DOTALL)
    assert init.index("set_clock /usr/lib/clock-epoch\n") < init.index("/usr/sbin/sshd")
    file = tmp_path / "clock-epoch"
    if epoch is not None:
        file.touch()
        os.utime(file, (epoch, epoch))
    date = f'date() {{ [ "$1" = +%s ] && echo {now} || echo "$@" >"$0.set"; }}\n'
    subprocess.run(["sh", "-euc", f'{date}{function}set_clock "$0"', file], check=True)
    calls = tmp_path / "clock-epoch.set"
    assert (calls.read_text().split() if calls.exists() else ["-s", ""]) == ["-s", after]


@pytest.mark.parametrize("path", ["/srv/my pi", "/srv/a,b", "/srv/a:b", "/srv/'x'"])
def test_paths_invalid_on_a_command_line_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(tmp_path, nfs_path=path).kernel_command_line()
    assert "--folder" in caught.value.fix


def test_only_the_loopback_is_forwarded(tmp_path: Path) -> None:
    command = spec_of(tmp_path).command(2222, tmp_path / "a,b.log")
    assert "user,id=n0,hostfwd=tcp:127.0.0.1:2222-:22" in command
    assert f"file:{tmp_path}/a,,b.log" in command, "in QEMU's options, a comma in a file name must be doubled"


@pytest.mark.parametrize(
    ("architecture", "wanted", "cpu"),
    [("armhf", "", "cortex-a7"), ("arm64", "", "cortex-a53"), ("arm64", "cortex-a76", "cortex-a76")],
)
def test_configured_cpu_of_the_architecture_is_used(tmp_path: Path, architecture: str, wanted: str, cpu: str) -> None:
    command = spec_of(tmp_path, architecture=architecture, cpu=wanted).command(2222, tmp_path / "log")
    assert command[command.index("-cpu") + 1] == cpu


def test_a_cpu_of_another_architecture_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        qemu.cpu_of("armhf", "cortex-a72")
    assert caught.value.expected == "one of cortex-a7"
    assert "--architecture" in caught.value.fix


@pytest.mark.machine
def test_machine_that_does_not_respond_is_reported(tmp_path: Path) -> None:
    """The test boots a kernel that prints nothing."""
    process.require_program("qemu-system-arm", "for this test")
    machine = qemu.Machine(spec_of(tmp_path), tmp_path / "console.log")
    machine.start()
    pid = machine.pid
    assert pid is not None
    try:
        began = time.monotonic()
        with pytest.raises(BoardSilent) as caught:
            machine.wait_until_answers(3)
        assert 3 <= time.monotonic() - began < 20
        assert "within 3 s" in caught.value.expected
        assert "(no output)" in caught.value.found
        assert "device.boot_timeout_s" in caught.value.fix
    finally:
        machine.end()
    assert not Path(f"/proc/{pid}").exists()
    machine.end()


@pytest.mark.machine
def test_qemus_error_is_reported(tmp_path: Path) -> None:
    machine = qemu.Machine(spec_of(tmp_path, memory_mib=10_000_000), tmp_path / "console.log")

    def start() -> None:
        machine.start()
        machine.wait_until_answers(60)  # On a busy machine, QEMU fails only after start() has returned.

    with pytest.raises(BoardSilent) as caught:
        start()
    assert "QEMU: exit status" in caught.value.found
    assert "RAM" in caught.value.found or "memory" in caught.value.found
    assert machine.pid is None


@pytest.mark.machine
def test_qemu_ends_with_its_parent(tmp_path: Path) -> None:
    """QEMU ends even if its parent is killed with SIGKILL."""
    tree = tree_with(tmp_path / "tree", "6.12.1+deb13-armmp")
    program = (
        "import sys, time; from pathlib import Path; from nfsroot import qemu\n"
        "tree = Path(sys.argv[1])\n"
        "spec = qemu.MachineSpec(boot=qemu.boot_files(tree, 'armhf'), nfs_path=str(tree))\n"
        "machine = qemu.Machine(spec, Path(sys.argv[2]))\n"
        "machine.start(); print(machine.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tree), str(tmp_path / "console.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.machine
@pytest.mark.parametrize(
    ("extra", "path", "found", "fix"),
    [
        ("init=/bin/false", "", "Kernel panic", "its init does not run"),
        ("", "/no/such/tree", "No such file or directory", "does not export that path"),
    ],
    ids=["init ends", "path not exported"],
)
def test_a_failed_boot_is_reported_at_once(
    exported_config: Config, tmp_path: Path, extra: str, path: str, found: str, fix: str
) -> None:
    """The error is raised before the deadline, and contains the end of the console output."""
    config = bootable(exported_config)
    with private_network(), serve.running_server(Layout.of(config).tree) as server:
        spec = qemu.MachineSpec(
            boot=qemu.boot_files(Layout.of(config).tree, "armhf"),
            nfs_path=path or str(Layout.of(config).tree),
            nfs_port=server.port,
            init="systemd",
            extra_arguments=extra,
            cpus=config.device.cpus,
        )
        machine = qemu.Machine(spec, tmp_path / "console.log")
        machine.start()
        try:
            with pytest.raises(BoardSilent) as caught:
                machine.wait_until_answers(BOOT_LIMIT_S)
        finally:
            machine.end()
    text = str(caught.value)
    assert found in text
    assert fix in text
    assert re.search(r"\| \S", text), "the error must include the last lines of the console"
