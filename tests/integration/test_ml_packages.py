"""Tests of the packages in ``image.ml_packages``: they are in the archive, and each is used in an image."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import docker
import pytest

from engine.connect import connect
from engine.containers import run_in
from engine.start import ensure_running
from flow import main_job
from images import apt
from images.flavour import packages_for
from toolchain.config import ROOT, Config


def verified_packages(config: Config) -> set[str]:
    """Return the names of all packages in the verified lists for the target's architecture."""
    return apt.package_names(config.target_root / "mirror" / "lists", config.image.architecture)


def test_every_package_is_in_the_verified_lists(product_config: Config, built: main_job.Built) -> None:
    assert built.manifest("mirror").facts["indices"]
    names = packages_for("ml_packages", product_config.image)
    assert len(names) == 7
    assert set(names) - verified_packages(product_config) == set()


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("suite", "architecture", "absent"),
    [("trixie", "arm64", set()), ("bookworm", "armhf", {"python3-onnxruntime"})],
)
def test_other_archives_lack_what_the_data_says(
    product_config: Config, tmp_path: Path, suite: str, architecture: str, absent: set[str]
) -> None:
    image = dataclasses.replace(product_config.image, suite=suite, architecture=architecture)
    build = dataclasses.replace(product_config.build, folder=tmp_path / "build")
    config = dataclasses.replace(product_config, image=image, build=build)
    ensure_running(config)
    main_job.build_image(config, only=["mirror"])
    wanted = packages_for("ml_packages", product_config.image)
    assert set(wanted) - verified_packages(config) == absent
    assert set(wanted) - set(packages_for("ml_packages", image)) == absent


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.machine
@pytest.mark.timeout(5400)
def test_each_package_is_used_in_the_image(product_config: Config, tmp_path: Path) -> None:
    """The test uses each package in the same process as torch, in an image that is complete except for the kernel."""
    image = dataclasses.replace(
        product_config.image, ml_packages=True, profile="container", name=f"{product_config.image.name}-ml"
    )
    build = dataclasses.replace(product_config.build, folder=tmp_path / "build")
    config = dataclasses.replace(product_config, image=image, build=build)
    ensure_running(config)
    with contextlib.closing(connect()) as client:
        try:
            main_job.build_image(config)
            seen = run_in(
                client,
                config.image_reference("system"),
                ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "/usr/src/tests/use_ml_packages.py"],
                architecture=image.target,
                binds=[f"{ROOT / 'tests/support'}:/usr/src/tests:ro", f"{ROOT / 'examples'}:/usr/src/examples:ro"],
            )
        finally:
            for role in ("system", "base", "rootfs", "builder"):
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(config.image_reference(role), force=True)
    assert re.search(r"^8 passed", seen.output, re.MULTILINE), seen.output
