"""Tests of the recipes' data files and fingerprints."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import docker
import pytest

from images.flavour import load_suite
from recipes import library
from recipes import recipe as recipes
from recipes.cuda_ops import build as cuda_ops
from recipes.cuda_ops.toolkit import Toolkit
from recipes.qpu_ops import target
from recipes.recipe import HERE, Recipe, load
from toolchain import process
from toolchain.config import Config, load_config
from toolchain.errors import ArtefactMissing, CommandFailed, UserError

CLIENT = docker.DockerClient(version="1.41")  # with a version, the client does not connect

NAMES = sorted(path.parent.name for path in HERE.glob("*/recipe.toml"))

DATA = """
name = "thing"
title = "a thing"
source = "tree"
inputs = ["src/**/*", "Makefile"]
outputs = ["lib/*.so", "include/thing.h"]
prefix = "/opt/thing"
"""


@pytest.fixture
def thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a recipe's folder for the tests."""
    folder = tmp_path / "thing"
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "recipe.toml").write_text(DATA)
    (folder / "Makefile").write_text("all:\n")
    (folder / "src" / "a.c").write_text("int a;\n")
    (folder / "src" / "deep" / "b.c").write_text("int b;\n")
    (folder / "README").write_text("not an input\n")
    monkeypatch.setattr(recipes, "HERE", tmp_path)
    return folder


def test_the_known_recipes_exist() -> None:
    assert set(NAMES) >= {"libqpu", "qpulib", "torch", "qpu_ops"}


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_complete(name: str) -> None:
    recipe = load(name)
    assert recipe.folder == HERE / name
    assert recipe.title
    assert recipe.source in ("tree", "archive", "git", "index")
    assert recipe.outputs
    for pattern in recipe.inputs:
        assert any(path.is_file() for path in recipe.sources.glob(pattern)), f"{name}: {pattern} matches nothing"
    assert all(isinstance(value, str) for value in recipe.settings.values())


def test_specific_values_are_settings(thing: Path) -> None:
    recipe = load("thing")
    assert recipe.settings == {"prefix": "/opt/thing"}
    assert (recipe.name, recipe.title, recipe.source) == ("thing", "a thing", "tree")
    assert recipe.inputs == ("src/**/*", "Makefile")


def test_an_unknown_recipe_lists_the_known_ones(thing: Path) -> None:
    with pytest.raises(UserError, match="thing") as caught:
        load("thin")
    assert "no recipe" in caught.value.summary


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DATA.replace('title = "a thing"\n', ""), "title"),
        (DATA.replace('inputs = ["src/**/*", "Makefile"]', 'inputs = "src"'), "inputs"),
        (DATA.replace("outputs = [", "outputs = [1, "), "outputs"),
        (DATA.replace('"tree"', '"treee"'), "source"),
        (DATA.replace('"/opt/thing"', "3"), "prefix"),
        ("name = \n", "recipe.toml"),
    ],
    ids=["missing", "no list", "list of others", "unknown source", "setting that is not a text", "no TOML"],
)
def test_an_error_in_a_data_file_is_reported(thing: Path, text: str, words: str) -> None:
    (thing / "recipe.toml").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load("thing")
    assert str(thing / "recipe.toml") in str(caught.value)


def test_all_errors_of_a_data_file_are_reported_at_once(thing: Path) -> None:
    (thing / "recipe.toml").write_text('name = 1\nsource = "x"\ninputs = 2\noutputs = []\n')
    with pytest.raises(UserError) as caught:
        load("thing")
    for words in ("name", "title", "source", "inputs", "outputs"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ("recipe.toml", 'more = "1"'),
        ("recipe.toml", '[more]\none = "1"'),
        ("Makefile", "# changed"),
        ("src/a.c", "// changed"),
        ("src/deep/b.c", "// changed"),
        ("src/new.c", "// new"),
    ],
)
def test_recipe_fingerprint_covers_data_and_inputs(thing: Path, changed: str, line: str) -> None:
    before = load("thing").fingerprint()
    with (thing / changed).open("a") as stream:
        stream.write(f"{line}\n")
    assert load("thing").fingerprint() != before


def test_comments_of_the_data_file_are_not_fingerprinted(thing: Path) -> None:
    before = load("thing").fingerprint()
    (thing / "recipe.toml").write_text(f"# A comment.\n{DATA}")
    assert load("thing").fingerprint() == before


VERSIONS = """
version = "1.0"
[versions."1.0"]
epoch = "1"
[versions."1.0".archive]
package = "thing"
[versions."2.0"]
epoch = "2"
"""


def test_only_the_chosen_version_is_part_of_the_recipe(thing: Path) -> None:
    text = DATA.replace("src/**/*", "src/{version}/*") + VERSIONS
    (thing / "recipe.toml").write_text(text)
    first = load("thing")
    assert first.inputs == ("src/1.0/*", "Makefile")
    assert first.settings["epoch"] == "1"
    assert first.tables == {"archive": {"package": "thing"}}
    (thing / "recipe.toml").write_text(text.replace('epoch = "2"', 'epoch = "3"'))
    assert load("thing").fingerprint() == first.fingerprint()
    (thing / "recipe.toml").write_text(text.replace('version = "1.0"', 'version = "2.0"'))
    assert load("thing").settings["epoch"] == "2"
    assert load("thing").fingerprint() != first.fingerprint()


ARCHITECTURES = """
[variant.one]
flags = "-a"
[architectures.arm64.variant.one]
flags = "-b"
"""


def test_an_architectures_tables_affect_only_its_own_products(thing: Path) -> None:
    (thing / "recipe.toml").write_text(DATA + ARCHITECTURES)
    first = load("thing")
    assert first.for_architecture("armhf").tables == first.tables == {"variant": {"one": {"flags": "-a"}}}
    assert first.for_architecture("arm64").tables == {"variant": {"one": {"flags": "-b"}}}
    (thing / "recipe.toml").write_text(DATA + ARCHITECTURES.replace("-b", "-c"))
    again = load("thing")
    assert again.for_architecture("armhf").fingerprint() == first.fingerprint()
    assert again.for_architecture("arm64").fingerprint() != first.for_architecture("arm64").fingerprint()


def test_a_version_without_a_table_is_reported(thing: Path) -> None:
    (thing / "recipe.toml").write_text(DATA + VERSIONS.replace('version = "1.0"', 'version = "3.0"'))
    with pytest.raises(UserError, match=r"expected one of 1\.0, 2\.0, found '3\.0'"):
        load("thing")


def test_other_files_and_the_path_are_not_fingerprinted(thing: Path, tmp_path: Path) -> None:
    before = load("thing").fingerprint()
    (thing / "README").write_text("changed\n")
    assert load("thing").fingerprint() == before
    shutil.copytree(thing, tmp_path / "copy")
    assert load("copy").fingerprint() == before


def promised(thing: Path, out: Path, *names: str) -> Recipe:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    out.mkdir(exist_ok=True)
    return load("thing")


def test_complete_outputs_are_accepted(thing: Path, tmp_path: Path) -> None:
    promised(thing, tmp_path / "out", "lib/libthing.so", "include/thing.h").require_outputs(tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "expected", "found"),
    [
        ((), "a file that matches lib/*.so", "an empty folder"),
        (("lib/libthing.so", "share/x"), "a file that matches include/thing.h", "lib, share"),
    ],
)
def test_a_missing_output_is_reported(
    thing: Path, tmp_path: Path, names: tuple[str, ...], expected: str, found: str
) -> None:
    recipe = promised(thing, tmp_path / "out", *names)
    with pytest.raises(ArtefactMissing) as caught:
        recipe.require_outputs(tmp_path / "out")
    assert (caught.value.expected, caught.value.found) == (expected, found)
    assert "recipes/thing/recipe.toml" in caught.value.fix


def test_an_older_file_that_was_restored_is_compiled(
    thing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ninja does, the stand-in for the container compiles a file only if the file is newer than its object."""

    def run_in(*words: object, binds: Sequence[str], **options: object) -> None:
        place = {target: Path(folder) for folder, target, _ in (bind.split(":") for bind in binds)}
        source, made = place["/usr/src/thing"] / "src/a.c", place[library.TREE] / "a.o"
        if not made.exists() or source.stat().st_mtime_ns > made.stat().st_mtime_ns:
            compiled.append(source.read_text())
            time.sleep(0.02)  # longer than the resolution of the files' time stamps
            made.write_text(compiled[-1])
            time.sleep(0.02)
        promised(thing, place[library.STAGE] / "opt/thing", "lib/libthing.so", "include/thing.h")

    compiled: list[str] = []
    monkeypatch.setattr(library, "run_in", run_in)
    monkeypatch.setattr(library, "register", lambda *_: None)
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    plan = library.Build(cross=True, commands=(), sources={"/usr/src/thing": thing}, fix="")

    def build() -> list[str]:
        compiled.clear()
        library.build(CLIENT, "image", "sha256:1", load("thing"), plan, config, tmp_path / "tar", tmp_path / "log")
        return compiled

    source, backup = thing / "src/a.c", thing / "src/a.orig"
    shutil.copy2(source, backup)
    assert build() == ["int a;\n"]
    source.write_text("int b;\n")
    assert build() == ["int b;\n"]
    backup.rename(source)
    assert build() == ["int a;\n"]
    assert build() == []


def build_library(config: Config, folder: Path) -> None:
    plan = library.Build(cross=True, commands=[["true"], ["false"]], sources={}, fix="")
    library.build(CLIENT, "image", "sha256:1", load("thing"), plan, config, folder / "tar", folder / "log")


def build_qpu_ops(config: Config, folder: Path) -> None:
    place = target.Place(image="image", image_id="1", architecture=config.image.target, script="true; false")
    (config.target_root / "work").mkdir(parents=True)
    target.build(
        CLIENT,
        place,
        load("thing"),
        config,
        suite=load_suite("trixie"),
        torch_site=folder,
        libqpu=folder,
        libqpu_prefix="/opt/thing",
        folder=folder,
        log=folder / "log",
    )


def build_cuda_ops(config: Config, folder: Path) -> None:
    toolkit = Toolkit(home=folder, runtime=folder, origin="")
    cuda_ops.build(CLIENT, "image", load("thing"), config, config.image.target, toolkit, folder, folder / "log")


@pytest.mark.parametrize("build", [build_library, build_qpu_ops, build_cuda_ops])
def test_files_of_a_failed_build_are_returned_to_their_owner(
    thing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Config, Path], None]
) -> None:
    """The stand-in for the container runs the script here, with a chown that records its arguments."""
    (tmp_path / "chown").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/arguments\n')
    (tmp_path / "chown").chmod(0o755)

    def run_in(_client: object, _image: str, argv: Sequence[str], **_options: object) -> None:
        process.run(argv, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    for module in (library, target, cuda_ops):
        monkeypatch.setattr(module, "run_in", run_in)
    monkeypatch.setattr(cuda_ops, "SOURCES", ())
    monkeypatch.setattr(cuda_ops, "_PIP_WHEEL", "true; false")
    with pytest.raises(CommandFailed) as caught:
        build(load_config({"build": {"folder": str(tmp_path / "build")}}), tmp_path)
    assert caught.value.returncode == 1
    assert (tmp_path / "arguments").read_text().startswith(f"-R {os.getuid()}:{os.getgid()} /usr/src")


def test_the_copy_of_the_sources_has_the_same_files(thing: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"

    def names(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*")}

    (thing / "Makefile").chmod(0o755)
    (thing / "linked").symlink_to("src")
    library._update_copy(thing, copy)
    assert names(copy) == names(thing)
    assert (copy / "Makefile").stat().st_mode & 0o777 == 0o755
    assert (copy / "linked").readlink() == Path("src")
    before = (copy / "Makefile").stat().st_mtime_ns
    shutil.rmtree(thing / "src/deep")
    (thing / "src/deep").write_text("a file instead of a folder\n")
    (thing / "src/a.c").unlink()
    (thing / "src/a.c").mkdir()
    (thing / "src/a.c/new.c").write_text("int c;\n")
    for unused in (".git", "src/__pycache__"):
        (thing / unused).mkdir()
        (thing / unused / "file").touch()
    library._update_copy(thing, copy)
    assert names(copy) == {name for name in names(thing) if ".git" not in name and "__pycache__" not in name}
    assert (copy / "src/deep").read_text() == "a file instead of a folder\n"
    assert (copy / "Makefile").stat().st_mtime_ns == before
