"""Whole images that the tests' shared build is not of. Each takes minutes, so they are run by name.

``.venv/bin/python -m pytest -m expensive tests/host/test_whole_images.py``
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import docker
import pytest

from device import suite
from images import engine
from images.containers import run_in
from nfsroot.export import export
from recipes import main_job
from toolchain.config import Config
from toolchain.files import sha256_of

pytestmark = [
    *(pytest.mark.expensive, pytest.mark.engine, pytest.mark.emulation, pytest.mark.machine),
    pytest.mark.timeout(5400),
]


def in_a_folder_of_its_own(config: Config, folder: Path, suite: str = "trixie") -> Config:
    """The tests' configuration with its build elsewhere, and of a release."""
    return dataclasses.replace(
        config,
        build=dataclasses.replace(config.build, folder=folder),
        image=dataclasses.replace(config.image, suite=suite),
    )


def test_the_real_root_is_the_same_when_it_is_built_again(
    built: main_job.Built, product_config: Config, tmp_path: Path
) -> None:
    """Not a small one: the packages, kernel and initramfs of the image, from the packages on, in another folder."""
    first = product_config.target_root / "rootfs.tar"
    again = in_a_folder_of_its_own(product_config, tmp_path / "build")
    done = main_job.build_image(again, only=["rootfs"])
    assert built.manifest("mirror").facts["indices"] == done.manifest("mirror").facts["indices"], (
        "the mirror has moved on"
    )
    assert "rootfs" in done.ran
    assert sha256_of(again.target_root / "rootfs.tar") == sha256_of(first)


def test_systemd_boots_the_root_over_nfs(exported_config: Config) -> None:
    """The init that a board runs, where the suite's own is the lean one."""
    result = suite.test_on_pi(
        exported_config, qemu=True, init="systemd", keyword="test_selftest or test_system", timing=False
    )
    assert result.ok, result.summary()
    device = json.loads(result.evidence.read_text())["device"]
    assert device["init"] == "systemd"
    assert "not measured on hardware" in result.report.read_text()


def test_bookworm_is_built_exported_and_boots(product_config: Config, tmp_path: Path) -> None:
    """The release before: its Python, its kernel, a root that is not merged by packages; no torch wheel is for it."""
    config = in_a_folder_of_its_own(product_config, tmp_path / "build", suite="bookworm")
    engine.ensure_running(config)
    built = main_job.build_image(config)
    assert any("torch" in warning for warning in built.warnings), "without torch, and loudly"
    with contextlib.closing(engine.connect()) as client:
        try:
            seen = run_in(
                client,
                config.image_reference("system"),
                [
                    "sh",
                    "-euc",
                    ". /etc/os-release; echo $VERSION_CODENAME; uname -m; python3 -c 'import numpy' && echo np",
                ],
                architecture=config.image.target,
            )
            assert seen.output.split() == ["bookworm", "armv7l", "np"]
            export(config)
            result = suite.test_on_pi(config, qemu=True, timing=False)
        finally:
            for role in ("system", "base"):
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(config.image_reference(role), force=True)
    assert result.ok, result.summary()
    assert "torch" in result.without
