"""Tests that the pinned wheels of the package index are fetched from a real index, checked, and selected."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from wheel_parts import EM_AARCH64, EM_ARM, HARD, elf, make_wheel

from flow.serve_wheels import Offer
from flow.verify import verify_torch
from images.flavour import load_suite
from recipes.companions import build as companions
from recipes.recipe import load
from recipes.torch import build, provenance, published, resolve
from recipes.torch.published import Pin
from recipes.torch.source import identity
from toolchain import files, progress
from toolchain.config import Config, load_config
from toolchain.errors import NetworkUnreachable, PlatformMismatch, RecipeInvalid, SourceUnavailable, WheelUnusable
from wheels import find as wheels
from wheels.index import running_index, wheels_in

TAG = "cp313-cp313-manylinux_2_28_aarch64"
OWN = "cp313-cp313-linux_aarch64"


def configured(tmp_path: Path, **torch: object) -> Config:
    settings = {"wheelhouse": [str(tmp_path / "house")], **torch}
    return load_config(
        {"image": {"architecture": "arm64"}, "torch": settings, "build": {"folder": str(tmp_path / "build")}}
    )


def a_wheel(folder: Path, name: str, *, tag: str = TAG, machine: int = EM_AARCH64) -> Path:
    library = elf(machine, bits=64) if machine == EM_AARCH64 else elf(machine, flags=HARD)
    return make_wheel(folder, {f"{name}/_C.so": library}, name=name, version="2.9.1", tag=tag)


def pin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *wheels: Path, sha256: str = "") -> None:
    """Pin these wheels instead of the real ones."""
    lines = "".join(f'"{wheel.name}" = "{sha256 or files.sha256_of(wheel)}"\n' for wheel in wheels)
    data = tmp_path / "published.toml"
    data.write_text(f"[trixie-arm64]\n{lines}")
    monkeypatch.setattr(published, "_DATA", data)


@pytest.fixture
def index(tmp_path: Path, isolated_pip: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the folder of an index that pip uses, with torch and torchvision, both of which are pinned."""
    monkeypatch.setattr(progress, "say", lambda _: None)
    offered = tmp_path / "offered"
    pin(monkeypatch, tmp_path, *(a_wheel(offered, name) for name in ("torch", "torchvision")))
    monkeypatch.setenv("no_proxy", "*")
    with running_index(lambda: wheels_in([offered])) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield offered


def test_the_pins_are_wheels_for_their_target() -> None:
    config = load_config({"image": {"architecture": "arm64"}})
    assert [item.name for item in published.pins(config)] == ["torch", "torchvision", "torchaudio"]
    tags = wheels.tags_for(config.image.target, load_suite("trixie"))
    for item in published.pins(config):
        assert parse_wheel_filename(item.file)[3] & tags
        assert len(bytes.fromhex(item.sha256)) == 32
    assert set(tomllib.loads(published._DATA.read_text())) == {"trixie-arm64"}
    assert published.pins(load_config({})) == ()


def test_the_wheel_is_fetched_once_and_chosen(index: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    found = resolve.resolve(config)
    assert (found.wheel, found.version) == (None, "")
    assert "has not been downloaded: ./inv build-image --architecture=arm64 fetches it" in found.reason
    found = resolve.resolve(config, fetch=True)
    assert (found.wheel, found.version) == (tmp_path / "build" / "published" / f"torch-2.9.1-{TAG}.whl", "2.9.1")
    assert "package index" in found.reason
    for wheel in index.iterdir():
        wheel.unlink()
    assert resolve.resolve(config) == found
    assert resolve.resolve(config, fetch=True) == found


def test_wheelhouse_takes_precedence(index: Path, tmp_path: Path) -> None:
    wheel = a_wheel(tmp_path / "house", "torch", tag=OWN)
    assert resolve.resolve(configured(tmp_path), fetch=True).wheel == wheel
    assert not (tmp_path / "build").exists(), "nothing must be fetched"


def test_another_sha256_is_rejected(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (torch,) = index.glob("torch-*")
    pin(monkeypatch, tmp_path, torch, sha256="0" * 64)
    with pytest.raises(SourceUnavailable, match=r"a different file named torch 2\.9\.1") as caught:
        resolve.resolve(configured(tmp_path), fetch=True)
    assert caught.value.found == files.sha256_of(torch)
    assert list((tmp_path / "build" / "published").iterdir()) == []


def test_a_changed_file_is_not_used(index: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    wheel = resolve.resolve(config, fetch=True).wheel
    assert wheel is not None
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(SourceUnavailable, match="is not the pinned file") as caught:
        resolve.resolve(config)
    assert f"delete {wheel}" in caught.value.fix


def test_a_missing_network_is_an_error(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkUnreachable, match=r"torch 2\.9\.1 cannot be downloaded"):
        resolve.resolve(configured(tmp_path), fetch=True)
    assert list((tmp_path / "build" / "published").iterdir()) == []


def test_an_index_without_the_wheel_is_an_error(index: Path, tmp_path: Path) -> None:
    next(index.glob("torch-*")).unlink()
    with pytest.raises(SourceUnavailable, match=r"the package index does not have torch==2\.9\.1") as caught:
        resolve.resolve(configured(tmp_path), fetch=True)
    assert "wheelhouse" in caught.value.fix


def test_a_wheel_with_code_for_another_machine_is_an_error(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, tmp_path, a_wheel(index, "torch", machine=EM_ARM))
    with pytest.raises(PlatformMismatch, match=r"torch/_C\.so is not for the image's architecture"):
        resolve.resolve(configured(tmp_path), fetch=True)


def test_the_listing_has_the_pins(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path)
    before = resolve.listing(config)
    pin(monkeypatch, tmp_path, *index.glob("torch-*"), sha256="0" * 64)
    assert resolve.listing(config) != before


def test_companions_belong_to_the_pinned_torch(index: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    torch, torchvision = published.pins(config)
    assert companions.published_for(config, torch.sha256, fetch=False) == []
    assert companions.published_for(config, torch.sha256) == [published.place(torchvision, config)]
    assert companions.published_for(config, "0" * 64) == []
    assert companions.published_for(load_config({}), torch.sha256) == []


def test_the_fetched_wheels_are_served(index: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    offer = Offer(config)
    assert offer() == {}
    torch, torchvision = published.pins(config)
    resolve.resolve(config, fetch=True)
    assert list(offer()) == [torch.file]
    companions.published_for(config, torch.sha256)
    assert offer() == {pin.file: published.place(pin, config) for pin in (torch, torchvision)}
    without = dataclasses.replace(config, image=dataclasses.replace(config.image, companions=False))
    assert list(Offer(without)()) == [torch.file]


@pytest.mark.parametrize(
    ("source", "chosen"), [("archive", OWN), ("pypi", TAG), ("wheelhouse", OWN), ("distribution", "")]
)
def test_torch_comes_from_the_requested_place(index: Path, tmp_path: Path, source: str, chosen: str) -> None:
    a_wheel(tmp_path / "house", "torch", tag=OWN)
    config = configured(tmp_path, source=source, required=source != "distribution")
    wheel = resolve.resolve(config, fetch=True).wheel
    assert (wheel.name if wheel else "") == (f"torch-2.9.1-{chosen}.whl" if chosen else "")


@pytest.mark.parametrize(
    ("source", "architecture", "reason"),
    [
        ("wheelhouse", "arm64", "no torch wheel in "),
        ("wheelhouse", "armhf", "no torch wheel in "),
        ("pypi", "armhf", "torch.source is pypi, and no wheel is pinned for trixie-armhf"),
        ("distribution", "arm64", "torch.source is distribution, so the image has python3-torch"),
    ],
)
def test_another_place_is_not_searched(
    index: Path, tmp_path: Path, source: str, architecture: str, reason: str
) -> None:
    torch = {"source": source, "wheelhouse": [str(tmp_path / "house")]}
    config = load_config(
        {"image": {"architecture": architecture}, "torch": torch, "build": {"folder": str(tmp_path / "build")}}
    )
    found = resolve.resolve(config, fetch=True)
    assert found.wheel is None
    assert reason in found.reason


def test_an_armhf_wheel_in_the_wheelhouse_is_not_used(index: Path, tmp_path: Path) -> None:
    wheel = a_wheel(tmp_path / "house", "torch", tag="cp313-cp313-linux_armv7l", machine=EM_ARM)
    found = resolve.resolve(configured(tmp_path, source="wheelhouse"))
    assert found.wheel is None
    assert "no usable wheel is tagged cp313-cp313-linux_aarch64" in found.reason
    assert wheel.name in found.reason
    with pytest.raises(WheelUnusable, match=r"torch\.required is set"):
        resolve.resolve(configured(tmp_path, source="wheelhouse", required=True))


@pytest.mark.parametrize("source", ["pypi", "distribution", "wheelhouse"])
def test_wheel_from_another_place_requires_no_build(source: str) -> None:
    with pytest.raises(SourceUnavailable, match="does not build torch from source") as caught:
        identity(load("torch"), load_suite("trixie"), source)
    assert caught.value.fix == "run ./inv build-torch --source=archive"


def test_the_recipe_builds_for_arm_only(tmp_path: Path) -> None:
    config = load_config({"image": {"architecture": "amd64"}, "build": {"folder": str(tmp_path)}})
    with pytest.raises(RecipeInvalid, match="no variant for amd64") as caught:
        build.Plan.of(load("torch"), config, load_suite("trixie"))
    assert caught.value.expected == "image.architecture: armhf or arm64"
    assert resolve.key(config) == ""
    for full in (False, True):
        with pytest.raises(RecipeInvalid, match="no variant for amd64"):
            verify_torch(config, full=full)


def test_the_recipes_arm64_variant_is_for_the_oldest_cpu(tmp_path: Path) -> None:
    config = configured(tmp_path)
    plan = build.Plan.of(load("torch"), config, load_suite("trixie"))
    assert plan.flags.split() == ["-mcpu=cortex-a53+nocrypto"]
    cmake = {item.partition("=")[0]: item.partition("=")[2] for item in plan.configure if item.startswith("-D")}
    assert cmake["-DPITORCH_FLAGS"] == plan.flags
    assert (cmake["-DPITORCH_GNU"], cmake["-DPITORCH_PROCESSOR"]) == ("aarch64-linux-gnu", "aarch64")
    assert "linux_aarch64" in plan.setup
    assert resolve.key(config) not in ("", resolve.key(load_config({})))
    with pytest.raises(RecipeInvalid, match="no variant 'baseline' for arm64") as caught:
        build.Plan.of(load("torch"), configured(tmp_path, variant="baseline"), load_suite("trixie"))
    assert caught.value.expected == "one of neon"


def test_a_built_wheel_precedes_the_package_indexs(index: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    wheel = a_wheel(resolve.products(config), "torch", tag=OWN)
    statement = {
        "subject": [{"name": wheel.name, "digest": {"sha256": files.sha256_of(wheel)}}],
        "predicate": {"buildDefinition": {"externalParameters": {"recipeKey": resolve.key(config)}}},
    }
    provenance.path_for(wheel).write_text(json.dumps(statement))
    assert resolve.resolve(config, fetch=True).wheel == wheel


def test_a_pin_names_its_distribution_and_version() -> None:
    assert str(Pin(f"torch-2.9.1-{TAG}.whl", "0" * 64)) == "torch 2.9.1"
