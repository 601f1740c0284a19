"""Tests of the complete image for 64-bit boards: torch, the QPU extension, TVM's server, and emulated boots.

The build takes minutes, so these tests are marked as expensive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator

import docker
import pytest

from device import suite
from device.remote import environment, profiling, servers
from device.remote.environment import TvmEnvironment
from device.remote.loader_session import Timing
from engine.connect import connect
from engine.containers import run_in
from engine.start import ensure_running
from flow import main_job
from nfsroot.export import export
from recipes.torch import published
from toolchain import ports
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config
from toolchain.errors import PlatformMismatch

pytestmark = [pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation, pytest.mark.timeout(3600)]
TIMING = Timing(number=5, repeat=3, min_repeat_ms=20, warm_up=1)
_START_LIMIT_S = 180.0


@pytest.fixture(scope="module")
def for_64_bit(product_config: Config) -> Config:
    """Build the image for arm64 with the server in it; return the tests' configuration."""
    image = dataclasses.replace(product_config.image, architecture="arm64")
    remote = dataclasses.replace(product_config.remote, server_in_image=True, session_limit_s=300)
    config = dataclasses.replace(product_config, image=image, remote=remote)
    ensure_running(config)
    built = main_job.build_image(config)
    assert built.manifest("tvm-server").facts
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
def exported(for_64_bit: Config) -> Config:
    """Export the root filesystem, and return the configuration."""
    export(for_64_bit)
    return for_64_bit


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
        with pytest.raises(PlatformMismatch, match="another machine"):
            profiling.profile(for_64_bit, kernel="add_one", target="armv7", device=device, timing=TIMING)


def test_the_server_is_requested_from_a_tracker(for_64_bit: Config, tvm: TvmEnvironment) -> None:
    port = ports.free_port()
    with servers.tracker(tvm) as tracker:
        words = ["--host", "127.0.0.1", "--port", str(port), "--custom-addr", "127.0.0.1"]
        with board(for_64_bit, [*words, "--tracker", f"127.0.0.1:{tracker.port}", "--key", "pi3"]):
            device = f"tracker://127.0.0.1:{tracker.port}/pi3"
            done = profiling.profile(for_64_bit, kernel="add_one", target="aarch64", device=device, timing=TIMING)
    assert done.checked == 1024


def test_the_server_connects_to_a_proxy(for_64_bit: Config, tvm: TvmEnvironment) -> None:
    with servers.proxy(tvm) as proxy, board(for_64_bit, ["--proxy", f"127.0.0.1:{proxy.port}", "--key", "far"]):
        device = f"proxy://127.0.0.1:{proxy.port}/far"
        done = profiling.profile(for_64_bit, kernel="add_one", target="aarch64", device=device, timing=TIMING)
    assert done.checked == 1024
