"""Tests of Raspbian and the Raspberry Pi kernel: which archive each package comes from. Archives are served here.

The tests do not access the real archives: they run the project's code, apt and dpkg on packages that are created here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from machine import needs_the_machine
from stand_in_archives import SUITE, Package, World, versions

from flow import pipelines, roots
from flow.context import Context
from images import apt, rootfs
from images.flavour import load_suite, packages_for
from images.recorded_sources import record_of
from toolchain.config import Config, ImageConfig, load_config
from toolchain.errors import CommandFailed, MirrorPocketUnusable
from toolchain.files import sha256_of
from toolchain.manifest import Manifest
from toolchain.process import run

DEBIANS, RASPBIANS, RASPBERRYS, TWINS = "3.13.5-2", "3.13.5-2+rpi1", "1:6.18.34-1+rpt1", "643-1"
IMAGE = ImageConfig(flavour="raspbian")


def of_the_target(version: str) -> list[Package]:
    """Make nearly empty packages with this version for a target root."""
    suite = load_suite(SUITE)
    roles = {name for role in ("base", "board", "bootable", "companions", "dev") for name in packages_for(role, IMAGE)}
    names = {*roles, *suite.torch_libraries, *suite.torch_python, "libc6", "linux-base", "debian-archive-keyring"}
    names = {name for name in names if not name.startswith(("linux-image", "raspi-firmware"))} - {"less"}
    return [
        *(Package(name=name, version=version, multi_arch="same") for name in sorted(names)),
        Package(name="base-files", version=version, essential=True, depends="libc6"),
        *of_python(version, "armhf"),
    ]


def of_python(version: str, architecture: str) -> list[Package]:
    """Make the packages of Python's headers and library, with the same version for all architectures."""
    python = load_suite(SUITE).python
    library = f"libpython{python}-stdlib"
    needs = {f"libpython{python}-dev": f"{library} (= {version}), libc6", library: "libc6"}
    return [
        Package(name=name, version=version, architecture=architecture, multi_arch="same", depends=depends)
        for name, depends in needs.items()
    ]


def of_this_pc() -> list[Package]:
    """Make the packages with Debian's tools for the PC that runs the tests."""
    roles = ("standing_in", "depmod", "compiler", "builder")
    names = {name for role in roles for name in packages_for(role, IMAGE) if not name.startswith("libpython")}
    # The names of target packages include the architecture.
    parts = [name.partition(":") for name in sorted(names)]
    return [
        *(Package(name=name, version=DEBIANS, architecture=of or "amd64", depends="libc6") for name, _, of in parts),
        Package(name="libc6", version=DEBIANS, architecture="amd64", multi_arch="same"),
        *of_python(DEBIANS, "amd64"),
    ]


def kernel_of(board: str, architecture: str) -> list[Package]:
    """Make a Raspberry Pi kernel's packages: a metapackage, and packages with the version in their names."""
    release = f"6.18.34+rpt-rpi-{board}"
    needs = {
        f"linux-image-rpi-{board}": f"linux-image-{release}",
        f"linux-image-{release}": f"linux-base-{release}, linux-base (>= 5)",
        f"linux-base-{release}": "",
    }
    return [
        Package(name=name, version=RASPBERRYS, architecture=architecture, depends=depends)
        for name, depends in needs.items()
    ]


def kernel_of_debian() -> list[Package]:
    """Make the packages of Debian's kernel for the test archive: a metapackage, and one named after the version."""
    release = "linux-image-6.12.107+deb13-armmp"
    return [
        Package(name="linux-image-armmp", version=DEBIANS, depends=release),
        Package(name=release, version=DEBIANS, depends="linux-base (>= 3)"),
    ]


def of_the_raspberry_pi() -> list[Package]:
    """Make packages for the Raspberry Pi archive: kernels, firmware, and updates to the distribution's packages."""
    return [
        *kernel_of("v7", "armhf"),
        *kernel_of("v8", "arm64"),
        Package(name="linux-base", version="5.1", architecture="all"),
        Package(name="raspi-firmware", version=RASPBERRYS, architecture="all"),
        Package(name="raspberrypi-archive-keyring", architecture="all"),
        *(Package(name=name, version="99+rpt1", multi_arch="same") for name in ("libc6", "python3", "systemd")),
        Package(name="base-files", version="99+rpt1", essential=True),
        Package(name="rpi-only", version="1.0"),
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with contextlib.closing(World(tmp_path_factory.mktemp("world"))) as made:
        made.debian.add(*of_this_pc(), *of_the_target(DEBIANS))
        made.raspbian.add(*of_the_target(RASPBIANS), Package(name="raspbian-archive-keyring", architecture="all"))
        made.raspberrypi.add(*of_the_raspberry_pi())
        made.debian.add(*kernel_of_debian())
        for archive in (made.debian, made.raspbian):
            archive.add(Package(name="raspi-firmware", version="2:1", architecture="all"))
            # Raspbian rebuilds packages without changing their versions.
            twin = {"usr/share/less/origin": f"{archive.origin:>20}".encode()}
            archive.add(Package(name="less", version=TWINS, files=twin))
        yield made


def config_for(folder: Path, **image: object) -> Config:
    """Return a configuration whose build folder is ``folder``."""
    settings = {"flavour": "raspbian", **image}
    return load_config({"image": settings, "build": {"folder": str(folder)}, "torch": {"wheelhouse": []}})


def ran(config: Config, *names: str) -> Mapping[str, Manifest]:
    """Run steps of the main job with their prerequisites. Return their manifests."""
    with Context(config) as context:
        pipeline = pipelines.main_job(context)
        wanted = set(names)
        for step in reversed(pipeline.steps):
            wanted |= set(step.needs) if step.name in wanted else set()
        decisions = [item for item in pipeline.plan() if item.step.name in wanted]
        return {made.step: made for made in pipeline.execute(decisions)}


def fetched(config: Config, role: str) -> dict[str, str]:
    """Return the versions of the packages that a step has fetched, from the names of their files."""
    folder = config.build_root / "archives" / f"{config.image.label}-{role}"
    return versions(folder.glob("*.deb"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can set the owners of files")
def test_tools_are_debians_and_roots_are_raspbians(world: World, tmp_path: Path) -> None:
    """If two architectures of a package share files, apt requires the same version of both."""
    config = config_for(tmp_path, profile="container")
    with world.serving():
        made = ran(config, "tools", "archives")
    tools = fetched(config, "tools")
    assert tools["libpython3.13-dev:armhf"] == DEBIANS
    assert tools["libpython3.13-stdlib:armhf"] == tools["libpython3.13-stdlib:amd64"] == DEBIANS
    assert set(tools.values()) == {DEBIANS}
    assert "gcc" not in made["tools"].facts["programs"]
    (warning,) = made["torch"].warnings
    assert "is not ARMv6 code" in warning
    root = fetched(config, "rootfs")
    assert root["libc6:armhf"] == RASPBIANS
    assert set(root.values()) == {RASPBIANS, TWINS, "1.0"}, (
        "all packages must be from Raspbian; 1.0 is the keyring's version"
    )


@pytest.mark.parametrize(("flavour", "of_the_rest"), [("debian", DEBIANS), ("raspbian", RASPBIANS)])
def test_only_kernel_and_firmware_come_from_raspberry_pi(
    world: World, tmp_path: Path, flavour: str, of_the_rest: str
) -> None:
    config = config_for(tmp_path, flavour=flavour, kernel="raspberrypi")
    with world.serving():
        mirror = ran(config, "archives")["mirror"]
        with pytest.raises(CommandFailed, match="the mirror lacks a package that the") as caught:
            ran(config_for(tmp_path, flavour=flavour, kernel="raspberrypi", extra_packages=["rpi-only"]), "archives")
    assert "rpi-only" in caught.value.expected
    root = fetched(config, "rootfs")
    theirs = {name: version for name, version in root.items() if version not in (of_the_rest, TWINS, "1.0")}
    assert theirs == {
        **dict.fromkeys((f"linux-{part}-6.18.34+rpt-rpi-v7:armhf" for part in ("image", "base")), RASPBERRYS),
        "linux-image-rpi-v7:armhf": RASPBERRYS,
        "raspi-firmware:all": RASPBERRYS,
        "linux-base:all": "5.1",
    }
    assert root["libc6:armhf"] == root["base-files:armhf"] == of_the_rest
    with Context(config) as context:
        for role, packages in (("dev", packages_for("dev", config.image)), ("small", ("python3",))):
            spec = roots.root_spec(context, role, packages, mirror, (context.target,))
            assert {item.archive for item in spec.sources} == {flavour}, (
                "only the root with the kernel must use the Raspberry Pi archive"
            )
        spec = roots.root_spec(
            context, "small-tools", ("python3", "raspi-firmware"), mirror, (context.native, context.target)
        )
        assert {item.archive for item in spec.sources} == {"debian"}


def test_raspbian_uses_debians_kernel(world: World, tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with world.serving():
        mirror = ran(config, "archives")["mirror"]
    root = fetched(config, "rootfs")
    assert {name for name, version in root.items() if version not in (RASPBIANS, TWINS, "1.0")} == {
        *("linux-image-armmp:armhf", "linux-image-6.12.107+deb13-armmp:armhf", "debian-archive-keyring:armhf")
    }
    (twin,) = (tmp_path / "archives" / "raspbian-trixie-armhf-rootfs").glob("less_*.deb")
    assert "Raspbian" in run(["dpkg-deb", "--fsys-tarfile", twin]).output, (
        "if versions are equal, the first archive's package must be used"
    )
    with Context(config) as context:
        (step,) = (item for item in pipelines.main_job(context).steps if item.name == "rootfs")
        assert "linux-image-armmp" in step.inputs["packages"]
        spec = roots.root_spec(context, "rootfs", ("linux-image-armmp",), mirror, (context.target,))
        assert [item.archive for item in spec.sources] == ["raspbian", "debian", "debian", "debian"]
        assert "Pin: release o=Debian\nPin-Priority: -1\n" in apt.preferences_text(spec.sources)
        spec = roots.root_spec(context, "small-tools", ("linux-image-armmp",), mirror, (context.native, context.target))
        assert apt.preferences_text(spec.sources) == "", "all programs for this PC must be Debian's"


def test_64_bit_board_gets_a_64_bit_kernel(world: World, tmp_path: Path) -> None:
    config = config_for(tmp_path, flavour="debian", architecture="arm64", kernel="raspberrypi")
    names = packages_for("bootable", config.image)
    with world.serving():
        mirror = ran(config, "mirror")["mirror"]
        with Context(config) as context:
            kernel = [name for name in names if name.startswith(("linux-image", "raspi-firmware"))]
            spec = roots.root_spec(context, "small", tuple(kernel), mirror, (context.target,))
            apt.download(spec.sources, spec.lists, ["arm64"], kernel, spec.archives, tmp_path / "log", essential=False)
    assert {
        "linux-image-6.18.34+rpt-rpi-v8:arm64": RASPBERRYS,
        "raspi-firmware:all": RASPBERRYS,
    }.items() <= versions(spec.archives.glob("*.deb")).items()


def test_an_index_without_the_required_origin_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.raspberrypi, "origin", "")
    with world.serving(), pytest.raises(MirrorPocketUnusable, match="cannot be distinguished") as caught:
        ran(config_for(tmp_path, flavour="debian", kernel="raspberrypi"), "mirror")
    assert "with an Origin field" in caught.value.expected


@pytest.mark.parametrize("archive", ["raspbian", "raspberrypi"])
def test_a_rejected_archive_is_reported_with_its_key_path(world: World, tmp_path: Path, archive: str) -> None:
    """The published keys of these archives do not meet the requirements of some versions of apt."""
    stand_in = {"raspbian": world.raspbian, "raspberrypi": world.raspberrypi}[archive]
    config = config_for(tmp_path, kernel="raspberrypi")
    with world.serving():
        world.debian.key.clearsign(
            stand_in.folder / "dists" / SUITE / "Release", stand_in.folder / "dists" / SUITE / "InRelease"
        )
        with pytest.raises(MirrorPocketUnusable, match=f"/{archive} cannot be verified") as caught:
            ran(config, "mirror")
        kept = {"raspbian": "raspbian.gpg", "raspberrypi": "raspberrypi-kernel.gpg"}[archive]
        assert f"put a newer copy of the key at {tmp_path / 'keys' / kept}" in caught.value.fix


def test_permitted_packages_are_an_input_of_the_step(tmp_path: Path) -> None:
    def inputs(kernel: str) -> Mapping[str, str]:
        with Context(config_for(tmp_path, flavour="debian", kernel=kernel)) as context:
            return pipelines.main_job(context).steps[0].inputs

    assert set(inputs("distribution")) == {"sources", "strict"}
    assert "raspi-firmware" in inputs("raspberrypi")["limits"]


def test_only_pockets_of_the_root_are_reported_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "host_mirrors", lambda: {"main": "http://mirror.example.org/debian"})
    for image, verified, missed in (
        ({"flavour": "debian"}, (), ["trixie", "trixie-security", "trixie-updates"]),
        ({"flavour": "debian"}, ("trixie", "trixie-updates"), ["trixie-security"]),
        ({}, (), ["trixie", "trixie-security", "trixie-updates"]),
        ({"kernel": "raspberrypi"}, (), ["trixie"]),
        ({"profile": "container"}, (), ["trixie"]),
        ({"profile": "container"}, ("trixie",), []),
    ):
        with Context(config_for(tmp_path, **image)) as context:
            configured = apt.sources_for(context.config, context.keyrings)
            recorded = [record_of(item) for item in configured if item.pocket.suite in verified]
            mirror = Manifest(step="mirror", key="", inputs={}, facts={"sources": recorded})
            assert roots.unverified_pockets(context, mirror) == missed


# ------------------------------------------------------------------------------------------ roots of real packages


@dataclass(frozen=True)
class Real:
    """Archives in which Raspbian has working packages, and native tools to configure those packages."""

    world: World
    tools: Path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """Collect Debian's packages for a small root, with versions in Raspbian's format."""
    needs_the_machine()
    folder = tmp_path_factory.mktemp("real")
    config = config_for(folder / "debian", flavour="debian")
    mirror = ran(config, "mirror")["mirror"]
    with Context(config) as context:
        small = roots.root_spec(context, "small", ("apt", "linux-base"), mirror, (context.target,))
        rootfs.download(small, folder / "log")
        natives = packages_for("standing_in", config.image)
        spec = roots.root_spec(context, "tools", natives, mirror, (context.native,))
        rootfs.build_tools(spec, folder / "tools", folder / "log", standing_in=natives)
    with contextlib.closing(World(folder / "world")) as world:
        world.raspbian.repack(small.archives.glob("*.deb"), "+rpi1")
        world.raspberrypi.add(*of_the_raspberry_pi())
        yield Real(world, folder / "tools")


def small_root(real: Real, config: Config, folder: Path) -> Path:
    """Build the tar of a root with the board's kernel from the served archives, using the project's code."""
    mirror = ran(config, "mirror")["mirror"]
    packages = ("apt", "linux-image-rpi-v7", "raspi-firmware")
    with Context(config) as context:
        spec = roots.root_spec(context, "small", packages, mirror, (context.target,))
    tar = folder / "root.tar"
    rootfs.build_tar(replace(spec, native_tools=real.tools), tar, folder / "log")
    return tar


@pytest.mark.emulation
def test_keys_in_a_root_do_not_depend_on_the_build_folder(real: Real, tmp_path: Path) -> None:
    """One archive has a package with a keyring that is newer than the fetched key; the other does not."""
    place = "usr/share/keyrings/{}-archive-keyring.gpg"
    newer = real.world.raspbian.key.keyring.read_bytes() + real.world.debian.key.keyring.read_bytes()
    real.world.raspbian.add(
        Package(name="raspbian-archive-keyring", architecture="all", files={place.format("raspbian"): newer})
    )
    tree = tmp_path / "tree"
    tree.mkdir()
    with real.world.serving():
        first, second = (
            small_root(real, config_for(tmp_path / name, kernel="raspberrypi"), tmp_path / name)
            for name in ("one", "another")
        )
        assert sha256_of(first) == sha256_of(second)
        run(["tar", "--extract", "--file", first, "--directory", tree])
        run(["chroot", tree, "apt-get", "-o", "APT::Update::Error-Mode=any", "update"], limit_s=300)
        policy = run(["chroot", tree, "apt-cache", "policy", "libc6", "linux-base", "linux-image-rpi-v7"]).output
        upgrade = run(["chroot", tree, "apt-get", "--simulate", "dist-upgrade"]).output
    lines = (tree / "etc/apt/sources.list").read_text().splitlines()
    assert [re.sub(r"http://127\.0\.0\.1:\d+", "URI", line) for line in lines] == [
        f"deb [arch=armhf signed-by=/{place.format(name)}] URI/{name} trixie main"
        for name in ("raspbian", "raspberrypi")
    ]
    assert (tree / place.format("raspbian")).read_bytes() == newer
    assert (tree / place.format("raspberrypi")).read_bytes() == real.world.raspberrypi.key.keyring.read_bytes()
    assert re.findall(r"Candidate: (.*)", policy)[1:] == ["5.1", RASPBERRYS]
    assert re.search(r"libc6:\n  Installed: (\S+\+rpi1)\n  Candidate: \1\n", policy)
    assert "0 upgraded, 0 newly installed" in upgrade
