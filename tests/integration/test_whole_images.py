"""Tests of complete images that the tests' shared build does not cover.

Building an image takes minutes, so these tests are expensive.

``.venv/bin/python -m pytest -m expensive tests/integration/test_whole_images.py``
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import docker
import pytest
from stand_in_archives import Package, World

from device import suite
from engine.connect import connect
from flow import main_job
from nfsroot.export import export
from nfsroot.layout import Layout
from toolchain import process
from toolchain.config import Config
from toolchain.files import sha256_of
from toolchain.manifest import Manifest

pytestmark = [
    *(pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation, pytest.mark.machine),
    pytest.mark.timeout(5400),
]


def in_a_folder_of_its_own(config: Config, folder: Path) -> Config:
    """Return the tests' configuration with another build folder."""
    return dataclasses.replace(config, build=dataclasses.replace(config.build, folder=folder))


def test_a_rebuilt_root_has_the_same_bytes(built: main_job.Built, product_config: Config, tmp_path: Path) -> None:
    """The image's complete root is rebuilt from the packages in another folder."""
    first = product_config.target_root / "rootfs.tar"
    again = in_a_folder_of_its_own(product_config, tmp_path / "build")
    done = main_job.build_image(again, only=["rootfs"])
    assert built.manifest("mirror").facts["indices"] == done.manifest("mirror").facts["indices"], (
        "the mirror has changed"
    )
    assert "rootfs" in done.ran
    assert sha256_of(again.target_root / "rootfs.tar") == sha256_of(first)


def test_systemd_boots_the_root_over_nfs(exported_config: Config) -> None:
    """The root boots with systemd, like a board, instead of the minimal init that the device suite uses."""
    result = suite.test_on_pi(
        exported_config, qemu=True, init="systemd", keyword="test_selftest or test_system", timing=False
    )
    assert result.ok, result.summary()
    device = json.loads(result.evidence.read_text())["device"]
    assert device["init"] == "systemd"
    assert "not measured on hardware" in result.report.read_text()


def test_a_raspbian_image_is_built_exported_and_boots(
    workbench: Mapping[str, Manifest], product_config: Config, tmp_path: Path
) -> None:
    """The substitute archive has Debian's packages with Raspbian's version scheme. The kernel is Debian's."""
    assert workbench["dev"].facts["image"]
    config = in_a_folder_of_its_own(product_config, tmp_path / "build")
    config = dataclasses.replace(config, image=dataclasses.replace(config.image, flavour="raspbian"))
    archives = product_config.build_root / "archives"
    debs = {path.name: path for role in ("rootfs", "dev") for path in archives.glob(f"trixie-armhf-{role}/*.deb")}
    with contextlib.closing(World(tmp_path / "world")) as world:
        world.raspbian.repack((path for name, path in debs.items() if not name.startswith("linux-image")), "+rpi1")
        key = {"usr/share/keyrings/raspbian-archive-keyring.gpg": world.raspbian.key.keyring.read_bytes()}
        world.raspbian.add(Package(name="raspbian-archive-keyring", architecture="all", files=key))
        with world.serving(debian=False):
            built = main_job.build_image(config)
    assert any("Raspbian's own compiler" in warning for warning in built.warnings)
    with contextlib.closing(connect()) as client:
        try:
            export(config)
            tree = Layout.of(config).tree
            assert "/usr/share/keyrings/raspbian-archive-keyring.gpg" in (tree / "etc/apt/sources.list").read_text()
            versions = process.output_of(["dpkg-query", f"--root={tree}", "--show"]).splitlines()
            others = {line.partition("\t")[0] for line in versions if not line.endswith("+rpi1")}
            assert {name for name in others if not name.startswith("linux-image")} == {
                *("debian-archive-keyring", "raspbian-archive-keyring")
            }
            result = suite.test_on_pi(config, qemu=True, timing=False)
        finally:
            for role in ("system", "base", "dev", "rootfs", "builder"):
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(config.image_reference(role), force=True)
    assert result.ok, result.summary()
