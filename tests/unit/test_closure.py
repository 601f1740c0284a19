"""Tests that a step's inputs include the modules that its product depends on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from flow import cuda_job, pipelines
from flow.context import Context
from flow.steps import native_python
from images.flavour import load_suite
from recipes.companions import build as companions
from recipes.recipe import load
from recipes.torch import resolve
from toolchain import closure, files, steps
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, load_config
from toolchain.steps import Pipeline, Step
from wheels import artefacts

PACKAGES = ("toolchain", "engine", "images", "registry", "wheels", "recipes", "flow", "nfsroot")
DECLARED = {"torch-wheel"}
"""Steps with a declared key."""


def all_pipelines() -> Iterator[Pipeline]:
    in_image = {"server_in_image": True, "ffi_in_image": True}
    with Context(load_config({"remote": in_image})) as context:
        yield pipelines.main_job(context, with_workbench=True)
    with Context(load_config({})) as context:
        yield pipelines.torch_job(context)
        yield pipelines.tvm_ffi_job(context)
        yield pipelines.firmware_job(context, "wifi-firmware")
        yield Pipeline(context.root, [native_python.step(context)])
    with cuda_job.context_of(load_config({})) as context:
        yield pipelines.cuda_job(context, ARCHITECTURES["amd64"])


STEPS = {step.code: step for pipeline in all_pipelines() for step in pipeline.steps if step.name not in DECLARED}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this project's Python files."""
    copy = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            place = copy / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    return copy


@pytest.fixture(autouse=True)
def in_the_copy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "ROOT", checkout)


def key(step: Step) -> str:
    return steps.key_of(step.name, steps._inputs(step, {}))


def key_after_change(paths: Iterable[Path], step: Step) -> str:
    """Compute the key while the files contain an additional line.

    The line is appended and then removed by truncation, because ext4 flushes a rewritten file to disk.
    """
    sizes = {path: path.stat().st_size for path in paths}
    try:
        for path in sizes:
            with path.open("ab") as stream:
                stream.write(b"# changed\n")
        return key(step)
    finally:
        for path, size in sizes.items():
            os.truncate(path, size)


def test_every_step_has_its_code_as_input() -> None:
    assert "" not in STEPS
    assert len(STEPS) > 20
    for pipeline in all_pipelines():
        for step in pipeline.steps:
            assert (step.code == "") == (step.name in DECLARED), step.name


@pytest.mark.parametrize("code", sorted(STEPS))
def test_each_module_of_the_closure_changes_the_key(checkout: Path, code: str) -> None:
    step = STEPS[code]
    before = key(step)
    modules = closure.digests(code)
    assert f"{code.replace('.', '/')}.py" in modules
    unchanged = [name for name in modules if key_after_change([checkout / name], step) == before]
    assert unchanged == []


@pytest.mark.parametrize("code", sorted(STEPS))
def test_modules_outside_the_closure_do_not_change_the_key(checkout: Path, code: str) -> None:
    """The modules outside a closure include the jobs, and all modules in the list of exceptions."""
    step = STEPS[code]
    before = key(step)
    others = {str(path.relative_to(checkout)) for path in checkout.rglob("*.py")} - set(closure.digests(code))
    assert {"toolchain/errors.py", "engine/containers.py", "flow/main_job.py", "flow/pipelines.py"} <= others
    assert key_after_change([checkout / name for name in others], step) == before


def test_no_closure_contains_a_large_part_of_the_project() -> None:
    for code in STEPS:
        assert len(closure.digests(code)) <= 20, code


def test_the_exceptions_exist() -> None:
    for name in closure.LEAVES:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), name


def test_the_key_of_the_torch_wheel_is_that_of_the_prebuilt_one() -> None:
    from recipes.torch.provenance import path_for, read

    (wheel,) = resolve.PREBUILT.glob("*.whl")
    assert resolve.key(load_config({})) == read(path_for(wheel), wheel)["recipeKey"]


def test_the_prebuilt_companions_match_their_recipe_and_torch() -> None:
    (wheel,) = resolve.PREBUILT.glob("*.whl")
    image = load_config({}).image
    key = companions.recipe_key(load(companions.NAME), image.target, load_suite(image.suite), files.sha256_of(wheel))
    made = artefacts.prebuilt(companions.PREBUILT, companions.NAME, key)
    assert made, "build the wheels with ./inv build-image, and copy their entry in the artefact cache to prebuilt/"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import images.probe", ["images/probe.py"]),
        ("from images import probe as other", ["images/probe.py"]),
        ("from images.probe import elf", ["images/probe.py"]),
        ("def f():\n    from . import second", ["package/second.py"]),
        ("from .second import x", ["package/second.py"]),
        ("from ..images import probe", ["images/probe.py"]),
        ("import json, elftools.elf", []),
        ("from toolchain import errors, process", []),
        ("from package import *", ["package/__init__.py"]),
    ],
)
def test_every_form_of_import_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: list[str]
) -> None:
    texts = {
        "package/__init__.py": "x = 1\n" if "*" in source else '"""Only a docstring."""\n',
        "package/first.py": f"{source}\n",
        "package/second.py": "x = 1\n",
        "images/__init__.py": "",
        "images/probe.py": "elf = 1\n",
        "toolchain/__init__.py": "",
        "toolchain/errors.py": "x = 1\n",
        "toolchain/process.py": "x = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(closure, "ROOT", tmp_path)
    assert list(closure.digests("package.first")) == sorted([*found, "package/first.py"])


@pytest.mark.parametrize("step", ["builder", "torch_site", "libqpu", "qpu_ops", "companions", "tvm_server", "tvm_ffi"])
def test_steps_that_pack_a_tar_depend_on_toolchain_files(step: str) -> None:
    assert "toolchain/files.py" in closure.digests(f"flow.steps.{step}")
