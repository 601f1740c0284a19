"""Root filesystems: reproducible, and the same whether natives stand in for emulated programs or not."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from images import probe, rootfs
from recipes.flow import Flow
from recipes.main_job import Built
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config
from toolchain.errors import ForeignBinaryRefused, ImageBuildFailed, NetworkUnreachable
from toolchain.files import sha256_of

SMALL = ("ca-certificates", "python3", "python3-packaging")


@pytest.fixture(scope="module")
def spec(built: Built, product_config: Config) -> rootfs.RootSpec:
    """A small root of the target, from the lists that the shared build verified."""
    with Flow(product_config) as flow:
        return flow.root_spec("small", SMALL, built.manifest("mirror"), (product_config.image.target,))


@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_the_same_inputs_give_the_same_tar_emulated_or_not(
    spec: rootfs.RootSpec, product_config: Config, tmp_path: Path
) -> None:
    with Flow(product_config) as flow:
        natively = dataclasses.replace(spec, native_tools=flow.tools)
    # A package of another list, left in the folder of archives, is not to be installed.
    stray = next(
        path for path in (spec.archives.parent / spec.archives.name.replace("small", "tools")).glob("make_*.deb")
    )
    spec.archives.mkdir(parents=True, exist_ok=True)
    shutil.copy2(stray, spec.archives)
    digests = {}
    for name, wanted in (("first", natively), ("second", natively), ("emulated", spec)):
        tar = tmp_path / f"{name}.tar"
        rootfs.build_tar(wanted, tar, tmp_path / f"{name}.log")
        digests[name] = sha256_of(tar)
        with tarfile.open(tar, "r:") as archive:
            assert "./usr/bin/make" not in archive.getnames()
        tar.unlink()
    assert digests["first"] == digests["second"]
    assert digests["first"] == digests["emulated"]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(("first", "second", "emul"))] == []


def test_nothing_of_it_stays_mounted() -> None:
    assert "pitorch" not in {line.split()[0] for line in Path("/proc/mounts").read_text().splitlines()}


def test_an_unknown_package_is_named(spec: rootfs.RootSpec, tmp_path: Path) -> None:
    wanted = dataclasses.replace(spec, packages=(*SMALL, "no-such-package-here"))
    with pytest.raises(ImageBuildFailed) as caught:
        rootfs.build_tar(wanted, tmp_path / "root.tar", tmp_path / "root.log")
    assert "no-such-package-here" in caught.value.expected
    assert "extra_packages" in caught.value.mend
    assert not (tmp_path / "root.tar").exists()


def test_a_mirror_that_is_gone_is_told(spec: rootfs.RootSpec, tmp_path: Path) -> None:
    """The lists are there, but the mirror no longer answers: packages that are not kept cannot be had."""
    gone = tuple(dataclasses.replace(item, uri="http://127.0.0.1:1/debian") for item in spec.sources)
    lists = tmp_path / "lists"
    lists.mkdir()
    for path in spec.lists.iterdir():
        if path.is_file():
            _, _, rest = path.name.partition("_dists_")
            (lists / f"127.0.0.1:1_debian_dists_{rest}").write_bytes(path.read_bytes())
    wanted = dataclasses.replace(spec, sources=gone, lists=lists, archives=tmp_path / "archives")
    with pytest.raises(NetworkUnreachable) as caught:
        rootfs.build_tar(wanted, tmp_path / "root.tar", tmp_path / "root.log")
    assert "--update" in caught.value.mend


def test_foreign_programs_that_do_not_run_are_explained(tmp_path: Path) -> None:
    program = tmp_path / "probe"
    program.write_bytes(probe.elf())
    program.chmod(0o755)
    rootfs.require_execution(ARCHITECTURES["armhf"], program)
    other = bytearray(probe.elf())
    other[18:20] = (0xFE, 0xED)  # a machine that no kernel knows
    program.write_bytes(other)
    with pytest.raises(ForeignBinaryRefused, match="cannot execute armhf programs") as caught:
        rootfs.require_execution(ARCHITECTURES["armhf"], program)
    assert os.strerror(8) in caught.value.found
    assert "./inv doctor" in caught.value.mend
