"""Tests of the choice of the torch wheel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_torch_wheel import a_wheel
from wheel_parts import EM_ARM, EM_X86_64, HARD, elf, make_wheel

from flow.context import Context
from flow.steps import torch
from recipes.torch import provenance, resolve
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactDamaged, PlatformMismatch, UserError, WheelUnusable
from toolchain.steps import Pipeline
from wheels import artefacts
from wheels.wheelhouse import wheelhouses

FITS = "cp313-cp313-linux_armv7l"


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the wheel in the repository, which test_torch_wheel.py tests."""
    monkeypatch.setattr(resolve, "PREBUILT", tmp_path_factory.mktemp("prebuilt"))


def configured(*folders: Path, image: dict[str, Any] | None = None, **torch: Any) -> Config:
    wheelhouse = [str(folder) for folder in folders]
    # The build folder does not exist, because products of this checkout must not be used.
    build = {"folder": "build/never"}
    return load_config({"torch": {"wheelhouse": wheelhouse, **torch}, "image": image or {}, "build": build})


def torch_wheel(folder: Path, version: str = "2.6.0", tag: str = FITS, content: bytes = b"") -> Path:
    contents: dict[str, str | bytes] = {"torch/__init__.py": "", "torch/_C.so": content or elf(EM_ARM, flags=HARD)}
    return make_wheel(folder, contents, name="torch", version=version, tag=tag)


def test_a_suitable_wheel_is_chosen(tmp_path: Path) -> None:
    wheel = torch_wheel(tmp_path)
    found = resolve.resolve(configured(tmp_path))
    assert (found.wheel, found.version) == (wheel, "2.6.0")
    assert found.reason == f"from {tmp_path}"


def test_local_version_labels_are_kept(tmp_path: Path) -> None:
    torch_wheel(tmp_path, "1.4.0a0+7f73f1d")
    assert resolve.resolve(configured(tmp_path)).version == "1.4.0a0+7f73f1d"


def test_first_wheelhouse_then_newest_wheel_is_chosen(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    torch_wheel(second, "2.9.0")
    torch_wheel(second, "2.10.0")
    assert resolve.resolve(configured(tmp_path / "absent", first, second)).version == "2.10.0"
    torch_wheel(first, "2.1.0")
    assert resolve.resolve(configured(first, second)).version == "2.1.0"


def test_folders_are_relative_to_the_checkout() -> None:
    assert wheelhouses(load_config({})) == [ROOT / "wheelhouse"]
    assert wheelhouses(load_config({"torch": {"wheelhouse": ["/srv/w", "w"]}})) == [Path("/srv/w"), ROOT / "w"]


def test_without_a_wheel_the_reason_names_the_folders(tmp_path: Path) -> None:
    make_wheel(tmp_path, name="torchvision", tag=FITS)
    found = resolve.resolve(configured(tmp_path, tmp_path / "absent"))
    assert found.wheel is None
    assert found.version == ""
    assert found.reason == f"no torch wheel in {tmp_path}, {tmp_path / 'absent'}"


def test_wheels_of_another_python_or_machine_are_listed(tmp_path: Path) -> None:
    names = [torch_wheel(tmp_path, tag=tag).name for tag in ("cp311-cp311-linux_armv7l", "cp313-cp313-linux_x86_64")]
    found = resolve.resolve(configured(tmp_path))
    assert found.wheel is None
    assert "no usable wheel is tagged cp313-cp313-linux_armv7l" in found.reason
    assert all(name in found.reason for name in names)


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ({"suite": "bookworm"}, "cp311-cp311-linux_armv7l"),
        ({"suite": "trixie"}, "cp313-cp313-linux_armv7l"),
        ({"suite": "trixie", "architecture": "amd64"}, "cp313-cp313-linux_x86_64"),
    ],
)
def test_suitable_tags_depend_on_the_image(tmp_path: Path, image: dict[str, Any], tag: str) -> None:
    content = elf(EM_X86_64, bits=64) if tag.endswith("x86_64") else elf(EM_ARM, flags=HARD)
    for each in ("cp311-cp311-linux_armv7l", "cp313-cp313-linux_armv7l", "cp313-cp313-linux_x86_64"):
        torch_wheel(tmp_path, tag=each, content=content)
    found = resolve.resolve(configured(tmp_path, image=image))
    assert found.wheel is not None
    assert found.wheel.name == f"torch-2.6.0-{tag}.whl"


def test_a_missing_required_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WheelUnusable, match=r"torch\.required is set") as caught:
        resolve.resolve(configured(tmp_path, required=True))
    assert caught.value.exit_code == 26
    assert "torch-*-cp313-cp313-linux_armv7l.whl" in caught.value.expected
    assert str(tmp_path) in caught.value.found
    assert "torch.wheelhouse" in caught.value.fix


@pytest.mark.parametrize("required", [False, True])
def test_a_wheel_with_only_a_suitable_name_is_an_error(tmp_path: Path, required: bool) -> None:
    torch_wheel(tmp_path, content=elf(EM_X86_64, bits=64))
    with pytest.raises(PlatformMismatch, match=r"torch/_C\.so"):
        resolve.resolve(configured(tmp_path, required=required))


def test_a_damaged_wheel_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    torch_wheel(tmp_path, "2.5.0")
    newest = torch_wheel(tmp_path, "2.6.0")
    newest.write_bytes(newest.read_bytes()[:-30])
    with pytest.raises(WheelUnusable, match=r"torch-2\.6\.0-.* is damaged"):
        resolve.resolve(configured(tmp_path))


SPOILS: dict[str, tuple[Callable[[Path], object], type[UserError], str]] = {
    "cut short": (lambda wheel: wheel.write_bytes(wheel.read_bytes()[:-30]), WheelUnusable, "is damaged"),
    "of another machine": (
        lambda wheel: torch_wheel(wheel.parent, content=elf(EM_X86_64, bits=64)),
        PlatformMismatch,
        "is not for the image's architecture",
    ),
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("later", ["wheelhouse", "prebuilt"])
def test_an_unusable_wheel_does_not_hide_the_next_place(
    tmp_path: Path, warned: list[str], spoil: str, later: str
) -> None:
    change, fault, words = SPOILS[spoil]
    first = torch_wheel(tmp_path / "first")
    torch_wheel(tmp_path / "first", "2.5.0")
    change(first)
    config = configured(tmp_path / "first", tmp_path / "second")
    with pytest.raises(fault, match=words):
        resolve.resolve(config)
    assert warned == [], "an error must not be printed as a warning too"
    if later == "wheelhouse":
        wheel = torch_wheel(tmp_path / "second", "2.4.0")
    else:
        wheel = a_wheel(resolve.PREBUILT, resolve.key(config))[0]
    found = resolve.resolve(config)
    assert found.wheel == wheel
    assert list(found.warnings) == warned
    assert len(warned) == 1
    assert all(part in warned[0] for part in (first.name, f"from {first.parent}", words)), warned


def test_damaged_own_wheels_are_skipped_in_every_place(tmp_path: Path, warned: list[str]) -> None:
    config = load_config({"torch": {"wheelhouse": []}, "build": {"folder": str(tmp_path / "build")}})
    key = resolve.key(config)
    for name in ("made", "older"):
        (tmp_path / name).mkdir()
    whole = {name: provenance.artefact_key(key, {"compiler": name}) for name in ("made", "older")}
    older = artefacts.put(config, "torch", whole["older"], a_wheel(tmp_path / "older", key), recipe=key)
    newest = artefacts.put(config, "torch", whole["made"], a_wheel(tmp_path / "made", key), recipe=key)
    manifest = older[0].parent / artefacts.MANIFEST
    os.utime(manifest, ns=(1, 1))
    resolve.products(config).mkdir(parents=True)
    built, _ = a_wheel(resolve.products(config), key)
    kept, _ = a_wheel(resolve.PREBUILT, key)

    def spoil(path: Path) -> None:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes() + b"X")

    wheels = [next(path for path in place if path.suffix == ".whl") for place in (newest, older)] + [built, kept]
    for number, wheel in enumerate(wheels):
        found = resolve.resolve(config)
        # The cache moves a damaged wheel aside, so each damage is reported only once.
        assert (found.wheel, len(found.warnings)) == (wheel, min(1, number))
        spoil(wheel)
    assert len(warned) == 3
    with pytest.raises(ArtefactDamaged, match="does not match its provenance"):
        resolve.resolve(config)


# The step of the main job.


def step_of(config: Config) -> Pipeline:
    return Pipeline(config.target_root, (torch.step(Context(config)),))


def test_a_changed_wheel_is_chosen_again(tmp_path: Path, warned: list[str]) -> None:
    for name in ("first", "second"):
        torch_wheel(tmp_path / name)
    torch = {"wheelhouse": [str(tmp_path / "first"), str(tmp_path / "second")]}
    config = load_config({"torch": torch, "build": {"folder": str(tmp_path / "build")}})
    step_of(config).execute(step_of(config).plan())
    (decision,) = step_of(config).plan()
    assert not decision.runs
    wheel = tmp_path / "first" / f"torch-2.6.0-{FITS}.whl"
    before = wheel.stat()
    content = bytearray(wheel.read_bytes())
    content[0] ^= 1
    wheel.write_bytes(content)
    os.utime(wheel, ns=(before.st_atime_ns, before.st_mtime_ns))
    (decision,) = step_of(config).plan()
    assert decision.reason == f"{wheel} has changed"
    (made,) = step_of(config).execute([decision])
    assert made.facts["wheel"] == str(tmp_path / "second" / wheel.name)
    assert made.warnings == tuple(warned)
    assert "is damaged" in warned[0]
    Path(made.facts["wheel"]).unlink()
    (decision,) = step_of(config).plan()
    assert decision.runs


def test_from_source_is_an_input_of_the_step(tmp_path: Path) -> None:
    torch_wheel(tmp_path / "house")
    settings = {"wheelhouse": [str(tmp_path / "house")]}
    build = {"folder": str(tmp_path / "build")}
    config = load_config({"torch": settings, "build": build})
    wheel, _ = a_wheel(resolve.PREBUILT, resolve.key(config))
    step_of(config).execute(step_of(config).plan())
    asked = load_config({"torch": {**settings, "from_source": True}, "build": build})
    (decision,) = step_of(asked).plan()
    assert decision.reason == "changed: from source False → True"
    (made,) = step_of(asked).execute([decision])
    assert made.facts["wheel"] == str(wheel)


def test_from_source_uses_the_wheel_of_build_torch(tmp_path: Path) -> None:
    """A newer wheel of the same recipe, pulled into the cache after the build, is not used."""
    build, torch = {"folder": str(tmp_path / "build")}, {"wheelhouse": [str(tmp_path / "house")]}
    config = load_config({"torch": torch, "build": build})
    key = resolve.key(config)
    resolve.products(config).mkdir(parents=True)
    ours, _ = a_wheel(resolve.products(config), key)
    (tmp_path / "theirs").mkdir()
    theirs = artefacts.put(config, "torch", "f" * 64, a_wheel(tmp_path / "theirs", key), recipe=key)
    torch_wheel(tmp_path / "house")
    assert resolve.resolve(load_config({"torch": {**torch, "from_source": True}, "build": build})).wheel == ours
    (tmp_path / "house" / ours.name).unlink()
    assert resolve.resolve(config).wheel in theirs


def test_the_listing_depends_on_the_wheelhouses(tmp_path: Path) -> None:
    config = configured(tmp_path)
    listings = [resolve.listing(config)]
    assert ".whl" not in listings[0]
    wheel = torch_wheel(tmp_path)
    listings.append(resolve.listing(config))
    os.utime(wheel, ns=(1, 1))
    listings.append(resolve.listing(config))
    wheel.rename(tmp_path / "torch-2.6.1-cp313-cp313-linux_armv7l.whl")
    listings.append(resolve.listing(config))
    assert len(set(listings)) == 4
    make_wheel(tmp_path, name="numpy", tag=FITS)
    assert resolve.listing(config) == listings[-1]


def test_a_broken_link_is_not_a_wheel(tmp_path: Path) -> None:
    (tmp_path / f"torch-2.6.0-{FITS}.whl").symlink_to("gone.whl")
    assert ".whl" not in resolve.listing(configured(tmp_path))
    assert resolve.resolve(configured(tmp_path)).wheel is None
