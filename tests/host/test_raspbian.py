"""Raspbian, and the Raspberry Pi's own kernel: which archive gives what. Stand-ins of the archives are served here.

The archives themselves are out of these tests' reach: what is run is the project's code, apt and dpkg on packages that
are made here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from stand_in_archives import SUITE, Package, World, versions

from images import apt
from images.flavour import load_suite, packages_for
from recipes.flow import Flow
from toolchain.config import Config, ImageConfig, load_config
from toolchain.manifest import Manifest

DEBIANS, RASPBIANS, RASPBERRYS = "3.13.5-2", "3.13.5-2+rpi1", "1:6.18.34-1+rpt1"
IMAGE = ImageConfig(flavour="raspbian")


def of_the_target(version: str) -> list[Package]:
    """What a target's root is made of, and what comes with a release: packages of nearly no content."""
    suite = load_suite(SUITE)
    roles = {name for role in ("base", "board", "bootable", "dev") for name in packages_for(role, IMAGE)}
    names = {*roles, *suite.torch_libraries, *suite.torch_python, "libc6", "linux-base", "debian-archive-keyring"}
    names = {name for name in names if not name.startswith(("linux-image", "raspi-firmware"))}
    return [
        *(Package(name=name, version=version, multi_arch="same") for name in sorted(names)),
        Package(name="base-files", version=version, essential=True, depends="libc6"),
        *of_python(version, "armhf"),
    ]


def of_python(version: str, architecture: str) -> list[Package]:
    """A Python's headers, and the library that they belong to: of one version, whatever the architecture."""
    python = load_suite(SUITE).python
    library = f"libpython{python}-stdlib"
    needs = {f"libpython{python}-dev": f"{library} (= {version}), libc6", library: "libc6"}
    return [
        Package(name=name, version=version, architecture=architecture, multi_arch="same", depends=depends)
        for name, depends in needs.items()
    ]


def of_this_pc() -> list[Package]:
    """Debian's tools for the PC that the tests run on."""
    roles = ("standing_in", "depmod", "compiler", "builder")
    names = {name for role in roles for name in packages_for(role, IMAGE) if not name.startswith("libpython")}
    return [
        *(Package(name=name, version=DEBIANS, architecture="amd64", depends="libc6") for name in sorted(names)),
        Package(name="libc6", version=DEBIANS, architecture="amd64", multi_arch="same"),
        *of_python(DEBIANS, "amd64"),
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with contextlib.closing(World(tmp_path_factory.mktemp("world"))) as made:
        made.debian.add(*of_this_pc(), *of_the_target(DEBIANS))
        made.raspbian.add(*of_the_target(RASPBIANS), Package(name="raspbian-archive-keyring", architecture="all"))
        yield made


def config_for(folder: Path, **image: object) -> Config:
    """A configuration whose products are in a folder."""
    settings = {"flavour": "raspbian", **image}
    return load_config({"image": settings, "build": {"folder": str(folder)}, "torch": {"wheelhouse": []}})


def ran(config: Config, *names: str) -> Mapping[str, Manifest]:
    """Run steps of the main job and what they need; their manifests."""
    with Flow(config) as flow:
        pipeline = flow.pipeline()
        wanted = set(names)
        for step in reversed(pipeline.steps):
            wanted |= set(step.needs) if step.name in wanted else set()
        decisions = [item for item in pipeline.plan() if item.step.name in wanted]
        return {made.step: made for made in pipeline.execute(decisions)}


def fetched(config: Config, role: str) -> dict[str, str]:
    """What a step fetched: versions of packages."""
    folder = config.build_root / "archives" / f"{config.image.label}-{role}"
    return versions(folder.glob("*.deb"))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files to their owners")
def test_tools_and_the_headers_among_them_are_debian_s_and_roots_are_raspbian_s(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a package whose files architectures share, apt takes one version alone."""
    config = config_for(tmp_path, profile="container")
    with world.serving(monkeypatch):
        made = ran(config, "tools", "archives")
    tools = fetched(config, "tools")
    assert tools["libpython3.13-dev:armhf"] == DEBIANS
    assert tools["libpython3.13-stdlib:armhf"] == tools["libpython3.13-stdlib:amd64"] == DEBIANS
    assert set(tools.values()) == {DEBIANS}
    assert "gcc" not in made["tools"].facts["programs"]
    root = fetched(config, "rootfs")
    assert root["libc6:armhf"] == RASPBIANS
    assert set(root.values()) == {RASPBIANS, "1.0"}, "the last is the keyring's"


def test_only_pockets_that_the_root_is_made_of_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "host_mirrors", lambda: {"main": "http://mirror.example.org/debian"})
    for image, missed in (
        ({"flavour": "debian"}, ["trixie", "trixie-security", "trixie-updates"]),
        ({"profile": "container"}, ["trixie"]),
    ):
        with Flow(config_for(tmp_path, **image)) as flow:
            none_verified = Manifest(step="mirror", key="", inputs={}, facts={"sources": []})
            assert flow.left_out(none_verified) == missed
