"""Tests of the optional upstream QPULib: how its source is obtained, verified and built.

A small source tree with upstream's layout, in a real git repository with a file:// URL, replaces upstream's repository.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from git_parts import git
from http_parts import answering

from engine import containers
from flow import main_job, pipelines
from flow.context import Context
from recipes import library as libraries
from recipes.qpulib import build as qpulib
from recipes.qpulib.build import Checkout, Variant
from recipes.recipe import Recipe, load
from recipes.register import register
from toolchain import files, process
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ProgramMissing, SourceUnavailable
from toolchain.steps import Step

STAND_IN = {
    "Lib/QPULib.h": '#pragma once\n#include "Target/Mode.h"\nint answer();\n',
    "Lib/Answer.cpp": '#include "QPULib.h"\n#include "Common/Half.h"\nint answer() { return HALF + HALF; }\n',
    "Lib/Common/Half.h": "#pragma once\n#define HALF 21\n",
    "Lib/Target/Mode.h": """#pragma once
#if defined(QPU_MODE) == defined(EMULATION_MODE)
#error one mode, and only one, must be chosen
#endif
#ifdef QPU_MODE
#define MODE_HERE "qpu"
#else
#define MODE_HERE "emulation"
#endif
const char* modeOfLibrary();
bool debugOfLibrary();
long standardOfLibrary();
""",
    "Lib/Target/Mode.cpp": """#include "Target/Mode.h"
const char* modeOfLibrary() { return MODE_HERE; }
bool debugOfLibrary() {
#ifdef DEBUG
  return true;
#else
  return false;
#endif
}
long standardOfLibrary() { return __cplusplus; }
""",
    "Lib/VideoCore/Deep/Lax.cpp": """// Compiles only with -fpermissive, and causes a warning with -Wconversion.
int* lax(void* given) { return given; }
short shortened(int given) { return given; }
""",
    "Lib/notes.txt": "not a source\n",
    "Tests/Test.cpp": "#error not part of the library\n",
}

PROGRAM = """
#include <QPULib.h>
#include <cstdio>
int main() {
  std::printf("%d %s %s %d %ld", answer(), MODE_HERE, modeOfLibrary(), debugOfLibrary(), standardOfLibrary());
}
"""


def git_free() -> dict[str, str]:
    """Return the environment without the variables that git sets in hooks, because tests may run in a hook."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


@pytest.fixture(autouse=True)
def _no_git_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")


def plant(folder: Path, tree: dict[str, str] | None = None) -> Path:
    for name, text in (STAND_IN if tree is None else tree).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def commit_all(folder: Path, message: str) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)
    return git(folder, "rev-parse", "HEAD")


@dataclass
class Upstream:
    """A repository whose main branch has newer commits than ``commit``."""

    folder: Path
    commit: str
    later: str


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    folder = plant(tmp_path / "upstream")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit = commit_all(folder, "first")
    (folder / "Lib/Common/Half.h").write_text("#pragma once\n#define HALF 50\n")
    return Upstream(folder, commit, commit_all(folder, "second"))


def pinned(upstream: Upstream, commit: str = "", *, url: str = "") -> Recipe:
    recipe = load("qpulib")
    settings = {
        **recipe.settings,
        "url": url or f"file://{upstream.folder}",
        "commit": commit or upstream.commit,
    }
    return dataclasses.replace(recipe, settings=settings)


def configured(tmp_path: Path, **qpu: Any) -> Config:
    return load_config({"build": {"folder": str(tmp_path / "build")}, "qpu": {"library": "upstream", **qpu}})


# The data file.


def test_qpulib_is_pinned_to_a_full_commit() -> None:
    recipe = load("qpulib")
    assert recipe.settings["url"] == "https://github.com/mn416/QPULib.git"
    assert re.fullmatch("[0-9a-f]{40}", qpulib.pin(recipe))
    assert recipe.source == "git"


def test_qpulib_has_the_same_prefix_as_our_library() -> None:
    own, theirs = load("libqpu"), load("qpulib")
    assert own.settings["prefix"] == theirs.settings["prefix"]
    assert {"lib/libqpu.so.1", "include/QPULib.h"} <= set(own.outputs) & set(theirs.outputs)


@pytest.mark.parametrize("commit", ["main", "a2e730c", "A" * 40, "g" * 40, "", "a" * 41])
def test_a_branch_or_a_short_commit_is_rejected(upstream: Upstream, commit: str) -> None:
    recipe = dataclasses.replace(load("qpulib"), settings={**load("qpulib").settings, "commit": commit})
    with pytest.raises(SourceUnavailable, match="40 hexadecimal digits"):
        qpulib.pin(recipe)


# Fetching the source.


def test_the_pinned_commit_is_fetched_after_the_branch_moved(upstream: Upstream, tmp_path: Path) -> None:
    config = configured(tmp_path)
    got = qpulib.obtain(pinned(upstream), config)
    assert got == Checkout(tmp_path / "build/sources/qpulib", upstream.commit)
    assert "HALF 21" in (got.folder / "Lib/Common/Half.h").read_text()
    assert [item.name for item in got.folder.parent.iterdir()] == ["qpulib"]


def test_a_fetched_source_is_not_fetched_again(upstream: Upstream, tmp_path: Path) -> None:
    config = configured(tmp_path)
    first = qpulib.obtain(pinned(upstream), config)
    shutil.rmtree(upstream.folder)
    assert qpulib.obtain(pinned(upstream), config) == first


def test_a_new_pin_replaces_the_old_checkout(upstream: Upstream, tmp_path: Path) -> None:
    config = configured(tmp_path)
    qpulib.obtain(pinned(upstream), config)
    got = qpulib.obtain(pinned(upstream, upstream.later), config)
    assert got.commit == upstream.later
    assert "HALF 50" in (got.folder / "Lib/Common/Half.h").read_text()


def test_an_unavailable_commit_is_reported_with_the_fix(upstream: Upstream, tmp_path: Path) -> None:
    missing = "0123456789" * 4
    with pytest.raises(SourceUnavailable) as caught:
        qpulib.obtain(pinned(upstream, missing), configured(tmp_path))
    assert caught.value.exit_code == 25
    assert missing in caught.value.expected
    assert caught.value.found.startswith("fatal:")
    assert list((tmp_path / "build/sources").iterdir()) == []


def test_without_a_network_the_error_names_the_fix(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    recipe = pinned(upstream, url="https://no-such-host.invalid/mn416/QPULib.git")
    with pytest.raises(SourceUnavailable) as caught:
        qpulib.obtain(recipe, configured(tmp_path))
    text = str(caught.value)
    assert "Could not resolve host: no-such-host.invalid" in text
    assert f"git clone {recipe.settings['url']} QPULib && git -C QPULib checkout {upstream.commit}" in text
    assert str(tmp_path / "build/sources/qpulib") in text
    assert "INVOKE_QPU_UPSTREAM_SOURCE" in text
    assert "all_proxy" in text
    assert list((tmp_path / "build/sources").iterdir()) == []


def test_without_git_the_error_names_it(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ProgramMissing, match="git is needed to fetch upstream QPULib"):
        qpulib.obtain(pinned(upstream), configured(tmp_path))


@contextlib.contextmanager
def proxy_that_refuses() -> Iterator[tuple[str, list[str]]]:
    """Run a proxy that records the first line of each request and refuses it."""
    asked: list[str] = []

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.requestline)
            self.send_error(403)

        def do_CONNECT(self) -> None:
            self.do_GET()

    with answering(Refuse) as port:
        yield f"http://127.0.0.1:{port}", asked


@pytest.mark.parametrize(("variable", "scheme"), [("HTTP_PROXY", "http"), ("all_proxy", "https")])
def test_proxies_are_used(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str
) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with proxy_that_refuses() as (address, asked):
        monkeypatch.setenv(variable, address)
        with pytest.raises(SourceUnavailable, match="403"):
            qpulib.obtain(pinned(upstream, url=f"{scheme}://upstream.invalid/QPULib.git"), configured(tmp_path))
    assert asked
    assert asked[0].startswith(("CONNECT upstream.invalid:443 ", "GET http://upstream.invalid/QPULib.git/"))


# The user's checkout.


def test_a_users_checkout_is_used(upstream: Upstream, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(upstream.folder), "mine")
    git(tmp_path / "mine", "checkout", "--quiet", upstream.commit)
    config = configured(tmp_path, upstream_source=str(tmp_path / "mine"))
    assert qpulib.obtain(pinned(upstream), config) == Checkout(tmp_path / "mine", upstream.commit)
    assert not (tmp_path / "build").exists()


def test_a_missing_configured_folder_is_not_fetched(upstream: Upstream, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"folder in qpu\.upstream_source does not exist"):
        qpulib.obtain(pinned(upstream), configured(tmp_path, upstream_source=str(tmp_path / "none")))


def test_a_users_checkout_of_another_commit_is_rejected(upstream: Upstream, tmp_path: Path) -> None:
    place = tmp_path / "build/sources"
    place.mkdir(parents=True)
    git(place, "clone", "--quiet", str(upstream.folder), "qpulib")
    with pytest.raises(SourceUnavailable, match=f"is at commit {upstream.later}"):
        qpulib.obtain(pinned(upstream), configured(tmp_path))
    assert git(place / "qpulib", "rev-parse", "HEAD") == upstream.later


@pytest.mark.parametrize("change", ["changed", "added", "deleted"])
def test_a_checkout_with_changes_is_rejected(upstream: Upstream, tmp_path: Path, change: str) -> None:
    config = configured(tmp_path)
    folder = qpulib.obtain(pinned(upstream), config).folder
    if change == "changed":
        (folder / "Lib/Answer.cpp").write_text("int answer() { return 0; }\n")
    elif change == "added":
        (folder / "Lib/Answer2.cpp").write_text("int more;\n")
    else:
        (folder / "Lib/Answer.cpp").unlink()
    with pytest.raises(SourceUnavailable, match=r"changed files in .*: Lib/Answer2?\.cpp"):
        qpulib.obtain(pinned(upstream), config)


@pytest.mark.parametrize("tree", [{}, {"Lib/notes.txt": ""}, {"Lib/QPULib.h": ""}, {"Lib/Answer.cpp": ""}])
def test_a_folder_without_the_library_is_rejected(upstream: Upstream, tmp_path: Path, tree: dict[str, str]) -> None:
    plant(tmp_path / "mine", tree).mkdir(exist_ok=True)
    config = configured(tmp_path, upstream_source=str(tmp_path / "mine"))
    with pytest.raises(SourceUnavailable, match=r"no Lib/QPULib\.h, or no Lib/\*\*/\*\.cpp"):
        qpulib.obtain(pinned(upstream), config)


def test_a_fetched_commit_without_the_library_is_rejected(upstream: Upstream, tmp_path: Path) -> None:
    git(upstream.folder, "rm", "-r", "--quiet", "Lib")
    empty = commit_all(plant(upstream.folder, {"README": ""}), "empty")
    with pytest.raises(SourceUnavailable, match=r"no Lib/QPULib\.h"):
        qpulib.obtain(pinned(upstream, empty), configured(tmp_path))
    assert list((tmp_path / "build/sources").iterdir()) == []


def test_an_unpacked_archive_is_used_with_a_warning(upstream: Upstream, tmp_path: Path) -> None:
    """The archive may be unpacked inside another git checkout, whose commit must not be used."""
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    plant(outer / "mine")
    got = qpulib.obtain(pinned(upstream), configured(tmp_path, upstream_source=str(outer / "mine")))
    assert got.commit == ""
    assert "cannot be verified" in got.warning


def test_the_identity_is_the_pin_or_the_content(upstream: Upstream, tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert qpulib.identity(pinned(upstream), config) == f"commit {upstream.commit}"
    qpulib.obtain(pinned(upstream), config)
    assert qpulib.identity(pinned(upstream), config) == f"commit {upstream.commit}"
    assert qpulib.identity(pinned(upstream, upstream.later), config) == f"commit {upstream.later}"
    archive = configured(tmp_path, upstream_source=str(plant(tmp_path / "mine")))
    before = qpulib.identity(pinned(upstream), archive)
    assert before.startswith("tree ")
    (tmp_path / "mine/Lib/Answer.cpp").write_text("int answer() { return 1; }\n")
    assert qpulib.identity(pinned(upstream), archive) != before


# Building with the compiler of this PC.


@pytest.fixture
def checkout(upstream: Upstream, tmp_path: Path) -> Checkout:
    for program in ("cmake", "ninja", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing; ./inv installs it")
    return qpulib.obtain(pinned(upstream), configured(tmp_path))


def made(checkout: Checkout, work: Path, mode: str = "emulation", *, debug: bool = False) -> tuple[Path, str]:
    """Build for this PC with its own compiler. Return the staged root and the output of CMake and the compilers."""
    log = work / "log"
    files.remove(log)
    variant, recipe = Variant(mode=mode, debug=debug), load("qpulib")
    tree, stage = work / f"tree-{variant.label}", work / f"stage-{variant.label}"
    files.remove(stage)
    places = {"recipe": recipe.folder, "source": checkout.folder, "tree": tree, "stage": stage}
    paths = {name: str(path) for name, path in places.items()}
    prefix = recipe.settings["prefix"]
    options = (f"-DCMAKE_INSTALL_PREFIX={prefix}", "-DCMAKE_INSTALL_LIBDIR=lib")
    for argv in qpulib.commands(variant, **paths, jobs=2, options=options):
        process.run(argv, log=log)
    installed = stage / prefix.removeprefix("/")
    recipe.require_outputs(installed)
    register(stage, installed, prefix)
    return stage, log.read_text()


def compiled(said: str) -> set[str]:
    """Return the sources that were compiled, by name."""
    return {Path(name).name for name in re.findall(r" -c (\S+\.cpp)$", said, re.MULTILINE)}


ALL = {"Answer.cpp", "Mode.cpp", "Lax.cpp"}


def test_every_source_is_compiled_with_the_published_flags(checkout: Checkout, tmp_path: Path) -> None:
    _, said = made(checkout, tmp_path / "work")
    lines = [line for line in said.splitlines() if re.search(r" -c \S+\.cpp$", line)]
    assert compiled(said) == ALL
    for line in lines:
        assert {"-fpermissive", "-Wconversion", "-std=c++0x", "-fPIC", "-DEMULATION_MODE"} <= set(line.split())
        assert not {"-DQPU_MODE", "-DDEBUG", "-DNDEBUG", "-O2", "-O3"} & set(line.split())
    assert "-Wconversion]" in said
    assert "-fpermissive]" in said
    assert re.search(r" -shared .*-Wl,-soname,libqpu\.so\.1 ", said)


def test_layout_and_soname_match_our_library(checkout: Checkout, tmp_path: Path) -> None:
    stage, _ = made(checkout, tmp_path / "work")
    prefix = stage / "opt/pitorch"
    found = {str(path.relative_to(stage)) for path in stage.rglob("*") if not path.is_dir()}
    assert found == {
        "etc/ld.so.conf.d/pitorch.conf",
        "usr/local/lib/pkgconfig/qpu.pc",
        "opt/pitorch/lib/libqpu.so",
        "opt/pitorch/lib/libqpu.so.1",
        "opt/pitorch/lib/libqpu.so.1.0.0",
        "opt/pitorch/lib/pkgconfig/qpu.pc",
        "opt/pitorch/include/QPULib.h",
        "opt/pitorch/include/Common/Half.h",
        "opt/pitorch/include/Target/Mode.h",
    }
    assert (stage / "etc/ld.so.conf.d/pitorch.conf").read_text() == "/opt/pitorch/lib\n"
    assert (stage / "usr/local/lib/pkgconfig/qpu.pc").read_text().startswith("prefix=/opt/pitorch\n")
    assert soname_of(prefix / "lib/libqpu.so") == "libqpu.so.1"
    assert b"\0" + str(tmp_path).encode() not in (prefix / "lib/libqpu.so.1").read_bytes()


def soname_of(library: Path) -> str:
    with library.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        (name,) = [str(getattr(tag, "soname", "")) for tag in section.iter_tags() if tag.entry.d_tag == "DT_SONAME"]
    return name


@pytest.mark.parametrize(
    ("mode", "debug", "says"),
    [
        ("emulation", False, "42 emulation emulation 0 201103"),
        ("emulation", True, "42 emulation emulation 1 201103"),
        ("qpu", False, "42 qpu qpu 0 201103"),
        ("qpu", True, "42 qpu qpu 1 201103"),
    ],
)
def test_pkg_config_selects_the_mode_of_the_library(
    checkout: Checkout, tmp_path: Path, mode: str, debug: bool, says: str
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    stage, _ = made(checkout, tmp_path / "work", mode, debug=debug)
    library = stage / "opt/pitorch/lib"
    with (library / "libqpu.so.1").open("rb") as stream:
        assert (ELFFile(stream).get_section_by_name(".debug_info") is not None) is debug
    (tmp_path / "program.cpp").write_text(PROGRAM)
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "qpu"],
        env={**os.environ, "PKG_CONFIG_PATH": str(library / "pkgconfig")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    subprocess.run(["g++", "program.cpp", "-o", "program", *flags], cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "program"],
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == says


def test_each_mode_has_its_own_objects(checkout: Checkout, tmp_path: Path) -> None:
    _, first = made(checkout, tmp_path / "work", "emulation")
    _, other = made(checkout, tmp_path / "work", "qpu")
    _, again = made(checkout, tmp_path / "work", "emulation")
    assert compiled(first) == compiled(other) == ALL
    assert compiled(again) == set()
    trees = sorted(path.name for path in (tmp_path / "work").glob("tree-*"))
    assert trees == ["tree-emulation", "tree-qpu"]


def test_a_changed_file_recompiles_only_its_dependents(checkout: Checkout, tmp_path: Path) -> None:
    made(checkout, tmp_path / "work")
    (checkout.folder / "Lib/Answer.cpp").write_text(STAND_IN["Lib/Answer.cpp"] + "// changed\n")
    assert compiled(made(checkout, tmp_path / "work")[1]) == {"Answer.cpp"}
    (checkout.folder / "Lib/Target/Mode.h").write_text(STAND_IN["Lib/Target/Mode.h"] + "// changed\n")
    assert compiled(made(checkout, tmp_path / "work")[1]) == {"Answer.cpp", "Mode.cpp"}


def test_new_and_deleted_files_are_detected(checkout: Checkout, tmp_path: Path) -> None:
    made(checkout, tmp_path / "work")
    plant(checkout.folder, {"Lib/Source/New.cpp": "int fresh() { return 7; }\n"})
    stage, said = made(checkout, tmp_path / "work")
    assert compiled(said) == {"New.cpp"}
    assert b"fresh" in (stage / "opt/pitorch/lib/libqpu.so.1").read_bytes()
    (checkout.folder / "Lib/Source/New.cpp").unlink()
    stage, said = made(checkout, tmp_path / "work")
    assert compiled(said) == set()
    assert b"fresh" not in (stage / "opt/pitorch/lib/libqpu.so.1").read_bytes()


def test_the_same_source_gives_the_same_library_from_any_folder(checkout: Checkout, tmp_path: Path) -> None:
    one, _ = made(checkout, tmp_path / "work")
    elsewhere = shutil.copytree(checkout.folder, tmp_path / "a much longer name" / "qpulib")
    two, _ = made(Checkout(elsewhere, checkout.commit), tmp_path / "other work")
    library = "opt/pitorch/lib/libqpu.so.1"
    assert (one / library).read_bytes() == (two / library).read_bytes()


# The step of the main job.


def libqpu_step(**qpu: Any) -> Step:
    (step,) = [item for item in pipelines.main_job(Context(load_config({"qpu": qpu}))).steps if item.name == "libqpu"]
    return step


def test_the_choice_is_an_input_of_the_step() -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"library": "upstream"},
        {"library": "upstream", "upstream_mode": "qpu"},
        {"library": "upstream", "upstream_debug": True},
    ]
    inputs = [dict(libqpu_step(**choice).inputs) for choice in choices]
    assert len({tuple(sorted(item.items())) for item in inputs}) == len(choices)
    assert [item["library"] for item in inputs] == ["local", "upstream", "upstream", "upstream"]
    assert inputs[1]["source"] == f"commit {load('qpulib').settings['commit']}"
    assert libqpu_step(upstream_mode="qpu").inputs == libqpu_step().inputs, (
        "upstream_mode must be an input only with library: upstream"
    )


def planned(tmp_path: Path, choice: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", "build-image", "--plan", f"--qpulib={choice}"],
        cwd=ROOT,
        env={**git_free(), "INVOKE_BUILD_FOLDER": str(tmp_path / "build")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_line_selects_upstream_qpulib(tmp_path: Path) -> None:
    assert "QPULib (upstream) for the target" in planned(tmp_path, "upstream").stdout
    own = planned(tmp_path, "local")
    assert own.returncode == 0
    assert "libqpu for the target" in own.stdout
    assert not (tmp_path / "build").exists(), "planning must not change anything"


@pytest.mark.engine
@pytest.mark.emulation
def test_cross_compiled_qpulib_loads_in_the_image(
    built: main_job.Built,
    product_config: Config,
    client: docker.DockerClient,
    upstream: Upstream,
    tmp_path: Path,
) -> None:
    config = dataclasses.replace(
        product_config,
        build=dataclasses.replace(product_config.build, folder=tmp_path / "build"),
        qpu=dataclasses.replace(product_config.qpu, library="upstream", upstream_mode="qpu"),
    )
    recipe = pinned(upstream)
    builder = built.manifest("builder").facts
    tar = tmp_path / "libqpu.tar"
    source = qpulib.obtain(recipe, config)
    for _ in range(2):
        plan = qpulib.plan(recipe, source, config, cross=True)
        log = tmp_path / "logs" / "libqpu.log"
        libraries.build(client, builder["reference"], builder["image"], recipe, plan, config, tar, log)
    assert compiled((tmp_path / "logs/libqpu.log").read_text()) == set(), "the second build must not compile anything"
    stage = tmp_path / "stage"
    stage.mkdir()
    subprocess.run(["tar", "-xf", tar, "-C", stage, "--no-same-owner"], check=True)
    library = stage / "opt/pitorch/lib/libqpu.so.1"
    assert soname_of(library) == "libqpu.so.1"
    with library.open("rb") as stream:
        assert ELFFile(stream)["e_machine"] == "EM_ARM"
    said = containers.run_in(
        client,
        built.manifest("system").facts["reference"],
        ["python3", "-c", "import ctypes; print(ctypes.CDLL('libqpu.so.1')._Z6answerv())"],
        architecture=ARCHITECTURES["armhf"],
        binds=[f"{stage}/opt/pitorch:/opt/pitorch:ro"],
        limit_s=300,
    )
    assert said.output == "42\n"
