"""Tests of the main job with a real mirror, mmdebstrap, engine, emulation, compilers, NFS, machine and registry."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
import pytest
import requests
from container_builds import both_compilers_agree
from registry_parts import push

from device import suite
from device.remote import profiling
from device.remote.loader_session import Timing
from engine import containers
from flow import main_job, shell
from flow.compilers import native_compiler
from flow.context import Context
from images import system
from images.archive import verify
from images.flavour import load_suite
from images.system import LEFT_OUT
from nfsroot import bare_system
from registry import local as local_registry
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed, PlatformMismatch
from toolchain.manifest import Manifest
from toolchain.process import run

pytestmark = [pytest.mark.engine, pytest.mark.emulation]


def test_the_image_is_for_the_target_and_works(
    built: main_job.Built, product_config: Config, client: docker.DockerClient
) -> None:
    system = built.manifest("system").facts
    found = verify(client, product_config.image_reference("system"), product_config.image.target)
    assert found.image_id == system["image"]
    assert system["seen"]["platform"] == "linux-armv7l"
    assert system["seen"]["python"].startswith(load_suite(product_config.image.suite).python)
    assert system["seen"]["qpu"]["backend"]["name"] == "interpreter"
    if built.manifest("torch").facts["wheel"]:
        assert system["seen"]["modules"]["torch"] == built.manifest("torch").facts["version"]
        assert {"dot_cpp", "matrix_cpp", "cpu_cpp"} <= set(system["seen"]["modules"])
    else:
        assert any("WITHOUT torch" in warning for warning in built.warnings)


def test_the_image_label_lists_missing_pockets(
    built: main_job.Built, product_config: Config, client: docker.DockerClient
) -> None:
    """The label lists the same pockets as the mirror's manifest.

    A root that an earlier version built does not record missing pockets.
    """
    labels = client.images.get(product_config.image_reference("system")).labels
    noted = built.manifest("system").facts.get("left_out")
    assert noted == built.manifest("rootfs").facts.get("left_out")
    assert labels.get(LEFT_OUT) == (None if noted is None else json.dumps(noted))
    said = " ".join(built.manifest("mirror").warnings)
    assert [suite for suite in noted or () if f"pocket {suite} of" not in said] == []


def test_an_image_of_another_platform_is_detected(built: main_job.Built, client: docker.DockerClient) -> None:
    with pytest.raises(PlatformMismatch, match=r"linux/arm/v7"):
        verify(client, built.manifest("rootfs").facts["reference"], host_architecture())


def test_every_artefact_matches_its_manifest(built: main_job.Built) -> None:
    listed = [artefact for manifest in built.manifests for artefact in manifest.artefacts]
    assert {item.path.name for item in listed} >= {"builder.tar", "rootfs.tar", "libqpu.tar"}
    for artefact in listed:
        artefact.verify()


@pytest.mark.usefixtures("no_other_build")
def test_nothing_changed_means_nothing_runs(built: main_job.Built, product_config: Config) -> None:
    again = main_job.build_image(product_config)
    assert again.ran == frozenset()
    assert [item.key for item in again.manifests] == [item.key for item in built.manifests]


def test_the_plan_shows_the_change_and_changes_nothing(built: main_job.Built, product_config: Config) -> None:
    assert built.manifests
    image = dataclasses.replace(product_config.image, extra_packages=("htop",))
    plan = {item.step.name: item for item in main_job.plan(dataclasses.replace(product_config, image=image))}
    assert not plan["mirror"].runs
    assert not plan["libqpu"].runs
    assert plan["rootfs"].runs
    assert "packages" in plan["rootfs"].reason
    assert plan["base"].reason == "rootfs will run again"
    assert plan["system"].reason == "rootfs, base will run again"
    forced = {item.step.name: item.reason for item in main_job.plan(product_config, again=["libqpu"]) if item.runs}
    assert forced["libqpu"] == "requested"


def test_the_root_is_armhf_without_traces_of_the_tools(built: main_job.Built) -> None:
    native = host_architecture().gnu
    machines = set()
    with tarfile.open(built.manifest("rootfs").artefact(".tar").path, "r:") as archive:
        for member in archive:
            assert native not in member.name, member.name
            assert not member.name.startswith(("./lib64", "./usr/lib64"))
            if member.isreg() and member.name.startswith(("./usr/bin/", "./usr/lib/")) and member.size > 52:
                stream = archive.extractfile(member)
                assert stream is not None
                head = stream.read(20)
                if head.startswith(b"\x7fELF"):
                    machines.add((head[4], int.from_bytes(head[18:20], "little")))
    assert machines == {(1, 40)}, "expected only 32-bit ARM programs"


def test_the_initramfs_has_drivers_and_only_target_programs(
    built: main_job.Built, product_config: Config, client: docker.DockerClient
) -> None:
    script = "mkdir /tmp/i; unmkinitramfs /boot/initrd.img-* /tmp/i; find /tmp/i -type f"
    done = containers.run_in(
        client,
        built.manifest("system").facts["reference"],
        ["sh", "-euc", script],
        architecture=product_config.image.target,
    )
    for module in ("virtio_net.ko", "smsc95xx.ko", "lan78xx.ko", "dwc2.ko", "nfsv4.ko", "nfsv3.ko"):
        assert f"/{module}" in done.output
    assert "scripts/nfs4" in done.output
    assert host_architecture().gnu not in done.output


@pytest.mark.timeout(1800)
def test_both_compilers_generate_the_same_bytes(
    workbench: Mapping[str, Manifest], product_config: Config, tmp_path: Path
) -> None:
    both_compilers_agree(product_config, workbench, tmp_path)


def test_files_made_in_the_shell_belong_to_the_caller(
    product_config: Config, workbench: Mapping[str, Manifest], tmp_path: Path
) -> None:
    (tmp_path / "CMakeLists.txt").write_text("project(p CXX)\nadd_executable(p p.cpp)\n")
    (tmp_path / "use.py").write_text("import ctypes; ctypes.CDLL('libqpu.so.1')")
    (tmp_path / "p.cpp").write_text('#include <cstdio>\nint main() { std::puts("made"); }\n')
    tmp_path.chmod(0o777)
    argv = shell.command_line(
        workbench["workbench"].facts["reference"],
        product_config.image.target,
        tmp_path,
        compiler=native_compiler(Context(product_config)),
        command=["bash", "-c", "cmake -G Ninja -B out . && cmake --build out && out/p && id -u && python3 use.py"],
        interactive=False,
        user=(4711, 4712),
    )
    done = run(argv)
    assert "made\n4711\n" in done.output
    status = (tmp_path / "out" / "p").stat()
    assert (status.st_uid, status.st_gid) == (4711, 4712)


def test_a_failing_command_in_a_container_is_explained(
    built: main_job.Built, product_config: Config, client: docker.DockerClient
) -> None:
    with pytest.raises(CommandFailed, match="exit status 3") as caught:
        containers.run_in(
            client,
            built.manifest("system").facts["reference"],
            ["sh", "-c", "echo words of the program; exit 3"],
            architecture=product_config.image.target,
        )
    assert "words of the program" in str(caught.value)


def test_a_module_that_crashes_is_reported(
    built: main_job.Built, product_config: Config, client: docker.DockerClient, tmp_path: Path
) -> None:
    (tmp_path / "crash.py").write_text("import os\nos.abort()\n")
    base = built.manifest("system").facts["reference"]
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nCOPY crash.py /usr/lib/python3/dist-packages/\n")
    target, log = product_config.image.target, tmp_path / "log"
    made, _ = client.images.build(path=str(tmp_path), platform=target.oci_platform)
    image = str(made.id)
    try:
        with pytest.raises(CommandFailed, match="was built, but failed the import test") as caught:
            system.inspect(client, image, target, modules=["crash"], own_libqpu=False, log=log)
    finally:
        client.images.remove(image, force=True)
    assert "Aborted" in caught.value.found


@pytest.fixture
def kernel_of_tvm(exported_config: Config, tmp_path: Path) -> Iterator[None]:
    """Provide the kernel of tests/device/test_tvm.py while the suite is copied to the board."""
    place, kept = ROOT / "tests" / "device" / "gemm.so", tmp_path / "gemm.so"
    timing = Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0)
    profiling.profile(
        exported_config, kernel="gemm", target="armv7", device="emulator", size=32, keep=kept, timing=timing
    )
    before = place.read_bytes() if place.exists() else None
    shutil.copyfile(kept, place)
    yield
    if before is None:
        place.unlink()
    else:
        place.write_bytes(before)


ON_BOARD = ("test_selftest.py", "test_system.py", "test_torch_qpu.py", "test_tvm.py")
SELECTED = "test_selftest or test_system or test_example_of_the_documentation or test_tvm"
"""The tests of the board, and a selection of the others: torch with TVM's kernels, and with a network on the QPUs."""


@pytest.mark.machine
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("complete", [False, pytest.param(True, marks=pytest.mark.expensive)])
def test_the_exported_root_boots_and_passes_the_device_suite(
    built: main_job.Built,
    exported_config: Config,
    client: docker.DockerClient,
    kernel_of_tvm: None,
    complete: bool,
) -> None:
    """The complete suite is run weekly. test_torch_wheel.py runs the other tests in a container, which is faster."""
    if complete:
        two_cpus = dataclasses.replace(exported_config.device, cpus=2)
        result = suite.test_on_pi(dataclasses.replace(exported_config, device=two_cpus), qemu=True)
    else:
        result = suite.test_on_pi(exported_config, qemu=True, keyword=SELECTED, timing=False, test_files=ON_BOARD)
    assert result.ok, result.summary()
    if "torch" not in result.without:
        cases = list(ElementTree.parse(result.junit).iter("testcase"))  # noqa: S314 (pytest has just written it)
        ran = Counter(case.get("classname") for case in cases if case.find("skipped") is None)
        assert ran["test_tvm"] == 22, "expected 22 tests of TVM's kernels with torch tensors"
        assert ran["test_torch_qpu"] > 0
        if complete and built.manifest("torch").facts["self-contained"]:
            every = Counter(case.get("classname") for case in cases)
            for name in ("test_torch_limits", "test_torch", "test_torch_kernels", "test_quantization"):
                assert 0 < ran[name] == every[name]
    evidence = json.loads(result.evidence.read_text())
    assert evidence["image"]["id"] == client.images.get(exported_config.image_reference("system")).id
    text = result.report.read_text()
    assert "not measured on hardware" in text
    # The report may contain addresses (a mirror in a warning, XML namespaces), but must not load anything.
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)([^"'\s>]+)|(?:url\(|@import)\s*["']?([^"')]+)""", text)
    assert [place for places in loaded for place in places if "//" in place] == []


@pytest.mark.expensive
@pytest.mark.machine
@pytest.mark.timeout(1800)
def test_enter_works_on_a_system_without_our_files(exported_config: Config) -> None:
    """With --chroot in QEMU, the self-test must find libqpu in the entered tree."""
    result = suite.test_on_pi(exported_config, qemu=True, chroot=True, keyword="test_selftest", timing=False)
    assert result.ok, result.summary()
    booted = bare_system.layout_of(exported_config)
    assert list(exported_config.nfsroot.rglob("libqpu.so*"))
    assert not list(booted.tree.rglob("libqpu.so*"))
    evidence = json.loads(result.evidence.read_text())
    assert evidence["device"]["through"] == "enter-nfsroot"
    (link,) = [item for item in evidence["links"] if item["name"] == "the board's root is the exported tree"]
    assert link["holds"]
    made = booted.manifest.read_bytes()
    assert bare_system.ready(exported_config) == booted
    assert booted.manifest.read_bytes() == made, "the tree must not be exported again"


@pytest.mark.expensive
def test_the_image_is_pushed_and_the_registry_confirms_it(built: main_job.Built, product_config: Config) -> None:
    """The test is expensive, because the engine takes a minute to compress a gigabyte.

    test_registry.py pushes small images.
    """
    settings = local_registry.Settings(folder=product_config.build_root / "registry")
    with local_registry.serve(settings) as running:
        config = dataclasses.replace(
            product_config, registry=dataclasses.replace(product_config.registry, address=running.address)
        )
        done = push(config)
        assert requests.get(f"{running.url}/v2/_catalog", timeout=30).json()["repositories"] == ["pitorch/system"]
        assert done.digest.startswith("sha256:")
        again = push(config)
        assert (again.digest, again.sent) == (done.digest, 0)
    assert built.manifests
