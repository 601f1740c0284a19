"""Tests of the complete image for 64-bit boards: torch, the QPU extension, TVM's server, and emulated boots.

The build takes minutes, so these tests are marked as expensive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
import pytest
from container_builds import both_compilers_agree, container_and_cross_builds_agree, made_workbench
from device_parts import bootable, booted_here

from device import suite
from device.remote import environment, models, profiling
from device.remote.environment import TvmEnvironment
from device.remote.loader_session import Timing
from engine.connect import connect
from engine.containers import run_in
from engine.start import ensure_running
from flow import main_job
from nfsroot.audit import HELPER
from nfsroot.export import export
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from recipes.torch import published
from toolchain import ports, process
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config
from toolchain.errors import PlatformMismatch
from toolchain.manifest import Manifest

pytestmark = [pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation, pytest.mark.timeout(3600)]
TIMING = Timing(number=5, repeat=3, min_repeat_ms=20, warm_up=1)
_START_LIMIT_S = 180.0


@pytest.fixture(scope="module")
def for_64_bit(product_config: Config) -> Config:
    """Build the image for arm64 with TVM's server in it; return the tests' configuration."""
    image = dataclasses.replace(product_config.image, architecture="arm64")
    remote = dataclasses.replace(product_config.remote, server_in_image=True, session_limit_s=300)
    config = dataclasses.replace(product_config, image=image, remote=remote)
    ensure_running(config)
    built = main_job.build_image(config)
    assert any(name.startswith("apache_tvm-") for name in built.manifest("sbom").facts["parts"])
    return config


@pytest.fixture(scope="module")
def tvm(for_64_bit: Config) -> TvmEnvironment:
    """Install TVM on this PC."""
    return environment.ready(for_64_bit)


@contextlib.contextmanager
def board(config: Config, words: list[str]) -> Iterator[None]:
    """Run the image's server under emulation, in a container on this PC's network."""
    with contextlib.closing(connect()) as client:
        started = client.containers.run(
            config.image_reference("system"),
            ["pitorch-rpc-server", *words],
            platform=ARCHITECTURES["arm64"].oci_platform,
            environment=ARCHITECTURES["arm64"].emulation,
            network_mode="host",
            detach=True,
        )
        try:
            deadline = time.monotonic() + _START_LIMIT_S
            while "pitorch: serving" not in started.logs().decode():
                started.reload()
                if started.status == "exited" or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{started.logs().decode()}")
                time.sleep(0.5)
            yield
        finally:
            with contextlib.suppress(docker.errors.NotFound):
                started.remove(force=True)


def test_the_image_is_for_arm64(for_64_bit: Config) -> None:
    with contextlib.closing(connect()) as client:
        image = client.images.get(for_64_bit.image_reference("system"))
        assert (image.attrs["Os"], image.attrs["Architecture"]) == ("linux", "arm64")
        assert image.id is not None
        said = client.containers.run(
            image.id,
            ["sh", "-c", "uname -m; dpkg --print-architecture"],
            platform=ARCHITECTURES["arm64"].oci_platform,
            remove=True,
        )
    assert said.decode().split() == ["aarch64", "arm64"]


BOOT_FILES = """
dd if=$(echo /boot/vmlinuz-*) bs=1 skip=56 count=4 2>/dev/null; echo
mkdir /tmp/i; unmkinitramfs /boot/initrd.img-* /tmp/i; find /tmp/i -type f
"""


def test_boards_can_boot_the_kernel_over_ethernet(for_64_bit: Config) -> None:
    """The firmware boots an uncompressed Image, not an EFI program that extracts one.

    A Pi 4 also needs the network driver genet.
    """
    with contextlib.closing(connect()) as client:
        done = run_in(
            client,
            for_64_bit.image_reference("system"),
            ["sh", "-euc", BOOT_FILES],
            architecture=for_64_bit.image.target,
            limit_s=600,
        )
    magic, *files = done.output.split()
    assert magic == "ARMd", "magic number of an arm64 Image (Linux, arch/arm64/booting.rst)"
    names = {Path(file).name.partition(".")[0] for file in files}
    assert names >= {"smsc95xx", "lan78xx", "genet", "mdio-bcm-unimac", "broadcom", "virtio_net", "nfsv4"}


COMPUTE = """
import dot_cpp, torch, torchaudio, torchvision
a = torch.arange(12.0).view(3, 4)
assert torch.equal(a @ a.T, torch.from_numpy(a.numpy() @ a.numpy().T))
assert torch.equal(dot_cpp.add(a[0], a[1]), a[0] + a[1])
assert torch.equal((a.to("qpu") + 1).cpu(), a + 1)
print(torch.__version__.partition("+")[0], torch.backends.openmp.is_available())
"""


def test_torch_and_the_extension_compute(for_64_bit: Config) -> None:
    with contextlib.closing(connect()) as client:
        for argv, output in (
            (["python3", "-c", COMPUTE], f"{published.pins(for_64_bit)[0].version} True"),
            (["python3", "-m", "pip", "check"], "No broken requirements found."),
        ):
            done = run_in(
                client, for_64_bit.image_reference("system"), argv, architecture=for_64_bit.image.target, limit_s=600
            )
            assert done.output.strip().endswith(output)


@pytest.fixture(scope="module")
def workbench_64(for_64_bit: Config) -> Mapping[str, Manifest]:
    """Build the development image; return all manifests by step."""
    return made_workbench(for_64_bit)


def test_both_compilers_generate_the_same_bytes(
    for_64_bit: Config, workbench_64: Mapping[str, Manifest], tmp_path: Path
) -> None:
    both_compilers_agree(for_64_bit, workbench_64, tmp_path)


def test_native_and_cross_builds_give_the_same_wheel(
    for_64_bit: Config, workbench_64: Mapping[str, Manifest], tmp_path: Path
) -> None:
    container_and_cross_builds_agree(for_64_bit, workbench_64, tmp_path)


@pytest.fixture(scope="module")
def exported(for_64_bit: Config) -> Config:
    """Export the root filesystem, and return the configuration."""
    export(for_64_bit)
    return for_64_bit


def test_the_exported_root_is_entered_as_arm64_only(exported: Config) -> None:
    """This PC's kernel and the root's programs are for different architectures, as can be the case on a board."""
    helper = (HELPER, "--local", Layout.of(exported).tree)
    assert process.output_of([*helper, "-a", "arm64", "uname", "-m"], limit_s=300) == "aarch64"
    refused = process.run([*helper, "uname", "-m"], limit_s=300, check=False)
    assert refused.returncode == 125
    assert "is a root filesystem for arm64, not for armhf" in refused.output
    assert "add the option -a arm64" in refused.output


@pytest.mark.machine
@pytest.mark.parametrize(
    ("cpu", "keyword"),
    [("cortex-a53", None), ("cortex-a72", "test_torch.py or test_system"), ("cortex-a76", "test_torch.py")],
)
def test_the_device_suite_passes_on_the_cpus_of_boards(exported: Config, cpu: str, keyword: str | None) -> None:
    result = suite.test_on_pi(exported, qemu=True, cpu=cpu, keyword=keyword, timing=False)
    assert result.ok, result.summary()
    assert json.loads(result.evidence.read_text())["device"]["cpu"] == cpu
    assert cpu in result.report.read_text()


@pytest.mark.machine
def test_trees_of_both_architectures_boot_side_by_side(
    exported: Config, exported_config: Config, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_network())
        seen = {}
        for config in (bootable(exported_config), exported):
            (tmp_path / config.image.architecture).mkdir()
            board = stack.enter_context(booted_here(config, tmp_path / config.image.architecture))
            seen[config.image.architecture] = board
        for name, board in seen.items():
            assert board.run("dpkg", "--print-architecture").strip() == name
            assert board.run("python3", "-c", "import torch; print(torch.arange(4).sum())").strip() == "tensor(6)"
        assert [board.run("uname", "-m").strip() for board in seen.values()] == ["armv7l", "aarch64"]


def test_the_server_runs_only_64_bit_kernels(for_64_bit: Config, tvm: TvmEnvironment) -> None:
    port = ports.free_port()
    device = f"127.0.0.1:{port}"
    with board(for_64_bit, ["--host", "127.0.0.1", "--port", str(port)]):
        for kernel, size, elements in (("add_one", 0, 1024), ("gemm", 64, 64 * 64)):
            done = profiling.profile(
                for_64_bit, kernel=kernel, target="aarch64", device=device, size=size, timing=TIMING
            )
            assert done.checked == elements
            assert done.mean_s > 0
        with pytest.raises(PlatformMismatch, match="does not match the architecture"):
            profiling.profile(for_64_bit, kernel="add_one", target="armv7", device=device, timing=TIMING)


def test_the_server_runs_a_model(for_64_bit: Config, tvm: TvmEnvironment) -> None:
    port = ports.free_port()
    with board(for_64_bit, ["--host", "127.0.0.1", "--port", str(port)]):
        first, done = (
            models.profile(
                for_64_bit, model="remote_models:transformer", target="aarch64", device=f"127.0.0.1:{port}",
                timing=TIMING, folder=ROOT / "tests" / "support",
            )
            for _ in range(2)
        )  # fmt: skip
    assert first.checked == done.checked == 320
    assert first.parameters == "sent, and kept on the board"
    assert done.parameters == "kept on the board"
    assert dict(done.rows())["note"].endswith("not measured on hardware")
    assert len(done.seconds) == TIMING.number * TIMING.repeat
