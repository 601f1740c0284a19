"""Tests of the torch wheel: the recipe, the audit, and the wheel's results compared with those of this PC's torch."""

from __future__ import annotations

import dataclasses
import email
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path

import docker
import pytest
from apt_parts import Proxy
from elftools.elf.elffile import ELFFile
from git_parts import git
from http_parts import served
from wheel_parts import torch_wheel

from engine.containers import run_in
from flow import main_job, roots, verify
from flow import native_environment as native
from flow import upstream_tests as upstream
from flow.compilers import native_compiler
from flow.context import Context
from flow.engine_images import load_root
from flow.steps import native_python
from images import probe, rootfs
from images.apt import fetch_source
from images.flavour import load_suite
from recipes import recipe
from recipes.torch import audit, provenance, resolve, source
from recipes.torch.build import Plan
from toolchain import process
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import (
    ArtefactDamaged,
    ArtefactMissing,
    ChecksFailed,
    RecipeInvalid,
    SourceUnavailable,
    WheelUnusable,
)
from toolchain.files import sha256_of
from toolchain.manifest import Manifest
from wheels import artefacts
from wheels.find import arm_attributes

NUMBERS = ROOT / "tests" / "device" / "numbers_of_torch.py"
(KEPT,) = resolve.PREBUILT.glob("*.whl")


def config(**torch: object) -> Config:
    return load_config({"torch": torch})


def plan(**torch: object) -> Plan:
    return Plan.of(recipe.load("torch"), config(**torch), load_suite("trixie"))


def test_the_key_covers_what_determines_the_wheel() -> None:
    key = plan().key("source 1")
    assert key == plan().key("source 1")
    others = {
        plan().key("source 2"),
        plan(variant="baseline").key("source 1"),
        plan(options=["USE_OPENMP=OFF"]).key("source 1"),
    }
    assert len(others | {key}) == 4
    assert resolve.key(config()) == plan().key(source.identity(recipe.load("torch"), load_suite("trixie"), "archive"))


def a_copy_of_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the recipe, so that tests can change the copy, which is loaded instead of the original."""
    shutil.copytree(recipe.HERE / "torch", folder / "torch", ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
    monkeypatch.setattr(recipe, "HERE", folder)
    return folder / "torch"


def test_every_patch_and_every_script_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key includes files in subfolders for one kind of source, but excludes files for other versions of torch."""
    before = plan().key("source 1")
    folder = a_copy_of_the_recipe(tmp_path, monkeypatch)
    assert plan().key("source 1") == before
    makers = sorted(path for name in ("patches", "inside") for path in (folder / name).rglob("*") if path.is_file())
    assert folder / "patches" / "2.6.0" / "archive" / "0001-upstream-version.patch" in makers
    keys = {before}
    for path in makers:
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        keys.add(plan().key("source 1"))
        path.write_bytes(text)
    (folder / "patches" / "2.6.0" / "git" / "9999-new.patch").write_text("--- a\n+++ b\n")
    keys.add(plan().key("source 1"))
    assert len(keys) == len(makers) + 2
    before = plan().key("source 1")
    (folder / "patches" / "2.7.0").mkdir()
    (folder / "patches" / "2.7.0" / "0001-other.patch").write_text("--- a\n+++ b\n")
    with (folder / "recipe.toml").open("a") as data:
        data.write('\n[versions."2.7.0"]\nepoch = "1"\n')
    assert plan().key("source 1") == before


@pytest.mark.parametrize("what", ["environment", "configure", "setup", "setup_environment"])
def test_command_lines_and_environments_are_in_the_key(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = plan()
    value = getattr(before, what)
    changed = {**value, "MINE": "1"} if isinstance(value, dict) else [*value, "-DMINE=1"]
    key = before.key("source 1")
    monkeypatch.setattr(Plan, what, property(lambda _: changed))
    assert plan().key("source 1") != key


@pytest.mark.parametrize(
    ("given", "compilers"),
    [
        ((), "arm-linux-gnueabihf-gcc arm-linux-gnueabihf-g++"),
        (("-DCMAKE_C_COMPILER=mine", "-DCMAKE_CXX_COMPILER=clang++"), "mine clang++"),
    ],
)
def test_command_line_compiler_overrides_the_toolchain_file(
    tmp_path: Path, given: tuple[str, ...], compilers: str
) -> None:
    script = tmp_path / "result.cmake"
    place = ROOT / "recipes" / "torch" / "inside" / "toolchain.cmake"
    script.write_text(f'include("{place}")\nmessage("${{CMAKE_C_COMPILER}} ${{CMAKE_CXX_COMPILER}}")\n')
    argv = ["cmake", "-DPITORCH_GNU=arm-linux-gnueabihf", *given, "-P", str(script)]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stderr.strip() == compilers


def test_irrelevant_settings_are_not_in_the_key() -> None:
    key = plan().key("source 1")
    other = load_config({"build": {"jobs": 7, "folder": "elsewhere"}})
    assert Plan.of(recipe.load("torch"), other, load_suite("trixie")).key("source 1") == key
    one, two = plan(options=["A=1", "B=2"]), plan(options=["B=2", "A=1"])
    assert one.key("source 1") == two.key("source 1"), "the order of options must not matter"
    assert one.configure == two.configure


def test_an_option_of_the_user_overrides_the_recipe() -> None:
    assert plan().options["USE_OPENMP"] == "ON"
    assert plan(options=["USE_OPENMP=OFF", "MINE=1"]).options.items() >= {"USE_OPENMP": "OFF", "MINE": "1"}.items()


def test_the_cpu_of_the_pi_1_is_rejected_with_a_reason() -> None:
    with pytest.raises(RecipeInvalid, match="ARMv6") as caught:
        plan(variant="armv6")
    assert "--variant=baseline" in caught.value.fix
    assert "libraries that the wheel brings are ARMv7" in caught.value.found
    with pytest.raises(RecipeInvalid, match="no variant 'vfp9'"):
        plan(variant="vfp9")


def test_a_release_without_a_source_package_has_no_key() -> None:
    older = load_config({"image": {"suite": "bookworm"}})
    assert resolve.key(older) == ""
    with pytest.raises(SourceUnavailable, match="does not pin a source package for bookworm") as caught:
        source.identity(recipe.load("torch"), load_suite("bookworm"), "archive")
    assert "wheelhouse" in caught.value.fix


@pytest.mark.usefixtures("apt_without_delays")
def test_a_source_package_missing_on_the_mirror_is_reported(tmp_path: Path) -> None:
    from images import apt

    mirror = apt.sources_for(config(), tmp_path / "keys")
    main = tuple(item for item in mirror if item.pocket.name == "main")
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceUnavailable, match=r"no-such-package 1\.0 cannot be fetched") as caught:
        fetch_source(main, "no-such-package", "1.0", tmp_path / "out", tmp_path / "log")
    # Some mirrors have no source packages.
    assert re.search(r"no-such-package|/source/", caught.value.found)
    dead = tuple(dataclasses.replace(item, uri="http://127.0.0.1:9/debian") for item in main)
    with pytest.raises(SourceUnavailable, match="cannot be fetched"):
        fetch_source(dead, "pytorch", "1.0", tmp_path / "out", tmp_path / "log")
    assert list((tmp_path / "out").iterdir()) == []


def test_upstreams_tag_cannot_be_fetched_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = recipe.load("torch")
    tables = {**data.tables, "git": {**data.tables["git"], "url": str(tmp_path / "nowhere.git")}}
    with pytest.raises(SourceUnavailable, match="cannot be fetched from upstream") as caught:
        source.obtain(
            dataclasses.replace(data, tables=tables), load_suite("trixie"), "git", (), tmp_path, tmp_path / "log"
        )
    assert "--source=archive" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def a_repository(folder: Path) -> str:
    """Create a repository with nested submodules and a tag as a substitute for upstream's; return its commit."""
    inner = None
    for name in ("inner", "outer", folder.name):
        place = folder.with_name(name)
        place.mkdir(parents=True)
        git(place, "init", "--quiet")
        (place / "version.txt").write_text("2.6.0\n")
        (place / ".gitignore").write_text("*.pyc\nbuild/\n")
        if inner is not None:
            git(place, "submodule", "add", "--quiet", str(inner), "third_party/of_another")
        git(place, "add", ".")
        git(place, "commit", "--quiet", "--message", "release")
        inner = place
    git(folder, "tag", "v2.6.0")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def files_as_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow git to fetch submodules from a folder, which git refuses by default."""
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file:http:https")


@pytest.mark.usefixtures("files_as_submodules")
def test_upstreams_tag_must_be_the_unchanged_pinned_commit(tmp_path: Path) -> None:
    commit = a_repository(tmp_path / "repositories" / "upstream")
    data = recipe.load("torch")

    def obtain(pinned: str) -> source.Source:
        pins = {**data.tables["git"], "url": str(tmp_path / "repositories" / "upstream"), "commit": pinned}
        made = dataclasses.replace(data, tables={**data.tables, "git": pins})
        return source.obtain(made, load_suite("trixie"), "git", (), tmp_path / "sources", tmp_path / "log")

    with pytest.raises(SourceUnavailable, match="not the commit that the recipe pins"):
        obtain("0" * 40)
    found = obtain(commit)
    inmost = found.folder / "third_party/of_another/third_party/of_another"
    assert (found.folder / "version.txt").read_text() == (inmost / "version.txt").read_text() == "2.6.0\n"
    assert found.identity == f"git {commit}"
    assert obtain(commit) == found, "expected the existing checkout"

    for folder, name in itertools.product(
        (found.folder, inmost.parent.parent, inmost), ("version.txt", "mine.txt", "mine.pyc", "build/mine.txt")
    ):
        change = folder / name
        before = change.read_text() if change.exists() else None
        change.parent.mkdir(exist_ok=True)
        change.write_text("2.6.1\n")
        with pytest.raises(SourceUnavailable, match=r"differs from upstream's v2\.6\.0") as caught:
            obtain(commit)
        assert change.relative_to(found.folder).parts[0] in caught.value.found
        assert "patches/2.6.0/git" in caught.value.fix
        if before is None:
            change.unlink()
        else:
            change.write_text(before)
        assert obtain(commit) == found
    git(found.folder, "submodule", "deinit", "--quiet", "--force", "third_party/of_another")
    with pytest.raises(SourceUnavailable, match="differs from upstream's"):
        obtain(commit)


def test_upstream_is_fetched_through_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test checks only the request to the proxy, because the repository does not exist."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    data = recipe.load("torch")
    pins = {**data.tables["git"], "url": "http://upstream.invalid/pytorch.git"}
    made = dataclasses.replace(data, tables={**data.tables, "git": pins})
    with served(tmp_path) as uri:
        proxy = Proxy(uri)
        with proxy.running() as address:
            monkeypatch.setenv("all_proxy", f"http://{address}")
            with pytest.raises(SourceUnavailable, match="cannot be fetched from upstream"):
                source.obtain(made, load_suite("trixie"), "git", (), tmp_path / "sources", tmp_path / "log")
    assert proxy.asked
    assert all(address.startswith("http://upstream.invalid/pytorch.git/info/refs") for address in proxy.asked)


def cross_compiled(folder: Path, name: str, text: str, *flags: str) -> bytes:
    """Compile a small shared library without dependencies for the target."""
    compiler = shutil.which("arm-linux-gnueabihf-gcc")
    assert compiler, "./inv installs the ARM cross compiler"
    (folder / f"{name}.c").write_text(text)
    argv = [compiler, "-shared", "-fPIC", "-nostdlib", "-O2", *flags, "-o", f"{name}.so", f"{name}.c"]
    subprocess.run(argv, cwd=folder, check=True)
    return (folder / f"{name}.so").read_bytes()


def examined(wheel: Path) -> audit.Examined:
    """Audit a wheel with the configured variant's flags."""
    return audit.examine(wheel, config().image.target, load_suite("trixie"), flags=plan().flags)


@pytest.mark.parametrize("whole", [True, False])
def test_an_undefined_symbol_is_detected(tmp_path: Path, whole: bool) -> None:
    """A build of torch was once linked without one of its backends, and could not be imported."""
    sources = {
        "one": "int missing(void); int Py_Of(void); int one(void) { return missing() + Py_Of(); }",
        "two": "int missing(void) { return 2; }" if whole else "int two(void) { return 2; }",
    }
    wheel = torch_wheel(
        tmp_path, {f"torch/lib/{name}.so": cross_compiled(tmp_path, name, text) for name, text in sources.items()}
    )
    if whole:
        assert examined(wheel).elf_files == 2
        return
    with pytest.raises(WheelUnusable, match="cannot be used") as caught:
        examined(wheel)
    assert caught.value.found == "torch/lib/one.so requires the symbol missing, which no library in the wheel defines"


@pytest.mark.parametrize(
    ("flags", "text", "fault"),
    [
        ((), "int one;", ""),
        (("-march=armv6+fp", "-marm"), "int one;", ""),
        (("-march=armv8-a+simd",), "int one;", ": it was compiled for ARMv8; {place}: it uses FPv8, {lacks}"),
        (("-mfpu=fp-armv8",), "float one(float a) { return a * a; }", ": it uses FPv8, {lacks}"),
        (("-mfpu=vfpv3",), "float one(float a) { return a * a; }", ""),
        (("-mfpu=neon-vfpv4",), "float one(float a) { return a * a; }", ""),
        (("-march=armv5te+fp", "-marm"), "int one;", ": it was compiled for CPU architecture 4"),
        (("-Wl,-rpath,$ORIGIN:$ORIGIN/../../torch.libs",), "int one;", ""),
        (("-Wl,-rpath,$ORIGIN/../../../lib",), "int one;", " searches for libraries in $ORIGIN/../../../lib"),
        (("-Wl,-rpath,$ORIGIN:/opt/lib",), "int one;", " searches for libraries in /opt/lib"),
        (("-Wl,--disable-new-dtags,-rpath,/opt/lib",), "int one;", " searches for libraries in /opt/lib"),
        ((), 'const char one[] = "/usr/src/torch/pytorch/c10";', " contains a path from its build"),
        ((), 'const char one[] = "/usr/src/tvm";', ""),
        (
            ("-Wl,--no-as-needed", "stray.so"),
            "int one;",
            " requires libstray.so.1, which a minimal system does not have",
        ),
        (("-Wl,--no-as-needed", "usual.so"), "int one;", ""),
    ],
)
def test_the_audit_rejects_faults_in_one_file(tmp_path: Path, flags: tuple[str, ...], text: str, fault: str) -> None:
    for name, soname in (("stray", "libstray.so.1"), ("usual", "libm.so.6")):
        cross_compiled(tmp_path, name, f"int {name};", f"-Wl,-soname,{soname}")
    wheel = torch_wheel(tmp_path, {"torch/lib/one.so": cross_compiled(tmp_path, "one", text, *flags)})
    if not fault:
        assert examined(wheel).elf_files == 1
        return
    with pytest.raises(WheelUnusable, match="cannot be used") as caught:
        examined(wheel)
    place, lacks = "torch/lib/one.so", "which some CPUs of the variant do not have"
    assert caught.value.found == place + fault.format(place=place, lacks=lacks)


@pytest.mark.parametrize("path", ["/usr/src/torch/pytorch", "/usr/src/recipe/inside/torch_cpu.h"])
@pytest.mark.parametrize(
    "name", ["torch/share/cmake/Torch/TorchConfig.cmake", "torch/version.py", "torch-2.6.0.dist-info/NOTES"]
)
def test_the_path_of_the_build_is_found_in_every_member(tmp_path: Path, name: str, path: str) -> None:
    """The path is also found in text files, and across the boundary between two reads of one MiB."""
    members = {name: " " * ((1 << 20) - 5) + path, "torch/other.py": "'/usr/src/tvm'\n"}
    with pytest.raises(WheelUnusable, match="cannot be used") as caught:
        examined(torch_wheel(tmp_path, members))
    assert caught.value.found == f"{name} contains a path from its build"


@pytest.mark.parametrize(
    ("fpu", "fault"),
    [
        ("vfpv3-d16", ""),
        ("vfpv3", "it uses VFPv3, which some CPUs of the variant do not have"),
        ("vfpv4-d16", "it uses VFPv4-D16, which some CPUs of the variant do not have"),
        ("neon", "it uses NEON, which the variant does not permit"),
    ],
)
def test_the_baseline_variant_allows_sixteen_registers(tmp_path: Path, fpu: str, fault: str) -> None:
    content = cross_compiled(tmp_path, "one", "float one(float a) { return a * a; }", f"-mfpu={fpu}")
    wheel = torch_wheel(tmp_path, {"torch/lib/one.so": content})
    flags = plan(variant="baseline").flags
    if not fault:
        assert audit.examine(wheel, config().image.target, load_suite("trixie"), flags=flags).elf_files == 1
        return
    with pytest.raises(WheelUnusable) as caught:
        audit.examine(wheel, config().image.target, load_suite("trixie"), flags=flags)
    assert f"torch/lib/one.so: {fault}" in caught.value.found


@pytest.mark.parametrize("fpu", ["neon-vfpv4", "vfpv3-d16"])
def test_kernels_without_neon_are_rejected_for_variant_neon(tmp_path: Path, fpu: str) -> None:
    wheel = torch_wheel(
        tmp_path, {"torch/lib/libtorch_cpu.so": cross_compiled(tmp_path, "one", "int one;", f"-mfpu={fpu}")}
    )
    if fpu == "neon-vfpv4":
        assert examined(wheel).elf_files == 1
        return
    with pytest.raises(WheelUnusable, match="cannot be used") as caught:
        examined(wheel)
    assert caught.value.found == "torch/lib/libtorch_cpu.so: it was compiled without NEON, which the variant requires"


@pytest.mark.parametrize(("name", "accepted"), [("libXNNPACK-0a1b2c3d.so.0", True), ("libother.so.0", False)])
def test_only_libraries_that_detect_the_cpu_may_use_newer_code(tmp_path: Path, name: str, accepted: bool) -> None:
    newer = cross_compiled(tmp_path, "newer", "float one(float a) { return a * a; }", "-mfpu=fp-armv8")
    wheel = torch_wheel(tmp_path, {f"torch.libs/{name}": newer})
    if accepted:
        assert examined(wheel).elf_files == 1
        return
    with pytest.raises(WheelUnusable, match="cannot be used"):
        examined(wheel)


def test_a_bundled_library_is_accepted(tmp_path: Path) -> None:
    stray = cross_compiled(tmp_path, "stray", "int stray;", "-Wl,-soname,libstray.so.1")
    one = cross_compiled(tmp_path, "one", "int one;", "-Wl,--no-as-needed", "stray.so")
    assert examined(torch_wheel(tmp_path, {"torch/lib/one.so": one, "torch.libs/libstray.so.1": stray})).elf_files == 2


def test_an_elf_file_without_attributes_is_rejected(tmp_path: Path) -> None:
    cross_compiled(tmp_path, "one", "int one;")
    argv = ["arm-linux-gnueabihf-objcopy", "--remove-section=.ARM.attributes", "one.so"]
    subprocess.run(argv, cwd=tmp_path, check=True)
    wheel = torch_wheel(tmp_path, {"torch/lib/one.so": (tmp_path / "one.so").read_bytes()})
    with pytest.raises(WheelUnusable) as caught:
        examined(wheel)
    assert caught.value.found == "torch/lib/one.so: it does not have .ARM.attributes"


def test_code_without_floating_point_fits_every_cpu(tmp_path: Path) -> None:
    """The attributes of code without floating point name no FPU. Attribute 28 states only the calling convention."""
    (tmp_path / "one.s").write_text(".eabi_attribute 28, 1\n.globl one\n.type one, %function\none: bx lr\n")
    for words in (
        ["arm-linux-gnueabihf-as", "-march=armv7-a", "-mfpu=softvfp", "-o", "one.o", "one.s"],
        ["arm-linux-gnueabihf-ld", "-shared", "-o", "one.so", "one.o"],
    ):
        subprocess.run(words, cwd=tmp_path, check=True)
    with (tmp_path / "one.so").open("rb") as stream:
        assert "TAG_FP_ARCH" not in arm_attributes(ELFFile(stream))
    assert examined(torch_wheel(tmp_path, {"torch/lib/one.so": (tmp_path / "one.so").read_bytes()})).elf_files == 1


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = 'int missing(void); const char one[] = "/usr/src/torch"; int two(void) { return missing(); }'
    one = cross_compiled(tmp_path, "one", text, "-march=armv8-a+simd", "-Wl,-rpath,/opt/lib")
    with pytest.raises(WheelUnusable) as caught:
        examined(torch_wheel(tmp_path, {"torch/lib/one.so": one}))
    assert caught.value.found.count("; ") == 4


@pytest.mark.parametrize("more", [0, 128 << 10])
def test_a_wheel_above_the_goal_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """The data is incompressible, and the goal for the wheel is 2 MB. The wheel format adds a few hundred bytes."""
    assert audit.GOAL_MB == 60
    monkeypatch.setattr(audit, "GOAL_MB", 2)
    warnings = examined(torch_wheel(tmp_path, {"torch/large": os.urandom(2_000_000 - (32 << 10) + more)})).warnings
    if more:
        assert warnings == ("the size of torch-2.6.0-cp313-cp313-linux_armv7l.whl is 2.1 MB; the goal is 2",)
    else:
        assert warnings == ()


def a_wheel(folder: Path, key: str) -> list[Path]:
    """Make a wheel with one ARM program, and its provenance with a key."""
    wheel = torch_wheel(folder, {"torch/lib/probe.so": probe.elf()})
    statement = {
        "subject": [{"name": wheel.name, "digest": {"sha256": sha256_of(wheel)}}],
        "predicate": {"buildDefinition": {"externalParameters": {"recipeKey": key}}},
    }
    provenance.path_for(wheel).write_text(json.dumps(statement))
    return [wheel, provenance.path_for(wheel)]


def test_a_wheel_with_the_key_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "PREBUILT", tmp_path / "nothing")
    mine = load_config({"torch": {"wheelhouse": []}, "build": {"folder": str(tmp_path / "build")}})
    before = resolve.listing(mine)
    whole = provenance.artefact_key(resolve.key(mine), {"g++:amd64": "4:14.2.0-1", "compiler": "g++ 14.2.0"})
    artefacts.put(mine, "torch", whole, a_wheel(tmp_path, resolve.key(mine)), recipe=resolve.key(mine))
    assert resolve.listing(mine) != before
    found = resolve.resolve(mine)
    assert found.wheel is not None
    assert found.wheel.parent.name == whole
    assert (found.version, found.reason, found.self_contained) == ("2.6.0", "from the artefact cache", False)
    found.wheel.write_bytes(found.wheel.read_bytes()[:-9] + b"X" * 9)
    with pytest.raises(ArtefactDamaged):
        resolve.resolve(mine)


def test_another_compiler_or_package_changes_the_key() -> None:
    versions = {"libopenblas-dev:armhf": "0.3.29+ds-3", "compiler": "arm-linux-gnueabihf-g++ 14.2.0"}
    key = provenance.artefact_key("a" * 64, versions)
    assert key == provenance.artefact_key("a" * 64, dict(reversed(versions.items())))
    others = [
        provenance.artefact_key("b" * 64, versions),
        provenance.artefact_key("a" * 64, {**versions, "compiler": "arm-linux-gnueabihf-g++ 14.3.0"}),
        provenance.artefact_key("a" * 64, {**versions, "libopenblas-dev:armhf": "0.3.30+ds-1"}),
        provenance.artefact_key("a" * 64, {**versions, "libomp-dev:armhf": "1"}),
    ]
    assert len({key, *others}) == 5


def test_users_wheel_with_another_key_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "PREBUILT", tmp_path / "nothing")
    mine = load_config({"torch": {"wheelhouse": []}, "build": {"folder": str(tmp_path / "build")}})
    resolve.products(mine).mkdir(parents=True)
    wheel, statement = a_wheel(resolve.products(mine), "0" * 64)
    assert "has a different recipe key: ./inv build-torch builds it again" in resolve.resolve(mine).reason
    statement.unlink()
    assert "has no provenance" in resolve.resolve(mine).reason
    a_wheel(resolve.products(mine), resolve.key(mine))
    assert resolve.resolve(mine).wheel == wheel
    wheel.write_bytes(wheel.read_bytes() + b"X")
    with pytest.raises(ArtefactDamaged, match="does not match its provenance"):
        resolve.resolve(mine)


def test_verify_compares_with_a_wheel_of_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``verify --full``, a wheel from another recipe always differs."""
    mine = load_config({"torch": {"wheelhouse": []}, "build": {"folder": str(tmp_path / "build")}})
    assert verify.wheels_to_compare(mine) == [(KEPT, "the wheel in this repository")]
    resolve.products(mine).mkdir(parents=True)
    wheel, _ = a_wheel(resolve.products(mine), "0" * 64)
    assert [path for path, _ in verify.wheels_to_compare(mine)] == [KEPT]
    monkeypatch.setattr(resolve, "PREBUILT", tmp_path / "nothing")
    with pytest.raises(ArtefactMissing, match="no wheel to compare with") as caught:
        verify.wheels_to_compare(mine)
    assert "has a different recipe key" in caught.value.found
    a_wheel(resolve.products(mine), resolve.key(mine))
    assert verify.wheels_to_compare(mine) == [(wheel, "built here")]


# The wheel in the repository.


@pytest.fixture
def kept() -> Path:
    return KEPT


def test_the_prebuilt_wheel_has_the_key_of_the_recipe(kept: Path) -> None:
    stated = provenance.read(provenance.path_for(kept), kept)
    assert stated["recipeKey"] == resolve.key(config())
    found = resolve.resolve(config(wheelhouse=[]))
    assert found.self_contained
    assert found.wheel is not None
    assert found.wheel.name == kept.name
    document = json.loads(provenance.path_for(kept).read_text())
    text = json.dumps(document)
    assert "/home" not in text
    assert "://" not in text.replace("https://in-toto.io", "").replace("https://slsa.dev", "")
    names = {
        item.get("name") or item["uri"] for item in document["predicate"]["buildDefinition"]["resolvedDependencies"]
    }
    assert any(name.endswith(".dsc") for name in names)
    assert any(name.startswith("pkg:deb/debian/libopenblas0-pthread@") for name in names)


def test_the_prebuilt_wheel_passes_its_audit(kept: Path) -> None:
    seen = audit.examine(kept, config().image.target, load_suite("trixie"), flags=plan().flags)
    assert seen.elf_files > 8
    assert set(seen.newest) == {"GLIBC", "GLIBCXX"}
    assert seen.warnings == ()
    assert kept.stat().st_size <= audit.GOAL_MB * 1_000_000


def test_prebuilt_wheel_with_another_key_is_not_used() -> None:
    found = resolve.resolve(config(wheelhouse=[], options=["USE_OPENMP=OFF"]))
    assert found.wheel is None
    assert "has a different recipe key: ./inv build-torch builds it again" in found.reason


def changed(wheel: Path, path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """Copy a wheel with changed members and without RECORD, for tests that fail before RECORD is read."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            if (made := change(name, old.read(name))) is not None:
                new.writestr(*made)
    return path


def test_a_flipped_bit_is_detected(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "PREBUILT", tmp_path / "nothing")
    copy = tmp_path / kept.name
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    shutil.copy(provenance.path_for(kept), provenance.path_for(copy))
    with pytest.raises(ArtefactDamaged, match="does not match its provenance"):
        provenance.read(provenance.path_for(copy), copy)
    without_cache = load_config(
        {"build": {"folder": str(tmp_path / "build")}, "torch": {"wheelhouse": [str(tmp_path)]}}
    )
    with pytest.raises(WheelUnusable, match="damaged"):
        resolve.resolve(without_cache)


@pytest.fixture
def part_of_kept(kept: Path, tmp_path: Path) -> Path:
    """Make a wheel with one library of the prebuilt wheel, because the audit of all libraries takes many seconds."""
    with zipfile.ZipFile(kept) as archive:
        return torch_wheel(tmp_path / "part", {"torch/lib/libc10.so": archive.read("torch/lib/libc10.so")})


def test_a_wheel_for_another_release_is_rejected(kept: Path, part_of_kept: Path) -> None:
    older = load_config({"image": {"suite": "bookworm"}, "torch": {"wheelhouse": [str(kept.parent)]}})
    found = resolve.resolve(older)
    assert found.wheel is None
    assert "cp311-cp311-linux_armv7l" in found.reason
    with pytest.raises(WheelUnusable, match="its tag is cp313-cp313-linux_armv7l") as caught:
        audit.examine(part_of_kept, older.image.target, load_suite("bookworm"), flags=plan().flags)
    assert "GLIBC_2.3" in caught.value.found


def test_the_baseline_variants_audit_refuses_neon(part_of_kept: Path) -> None:
    flags = plan(variant="baseline").flags
    with pytest.raises(WheelUnusable, match="it uses NEON, which the variant does not permit"):
        audit.examine(part_of_kept, config().image.target, load_suite("trixie"), flags=flags)


# The wheel in the image.

NEEDS_A_BOARD = ("test_selftest.py", "test_system.py", "test_tvm.py")

OFF_BY_ONE = """
import sys, torch
document = torch.load(sys.argv[1], weights_only=True)
for found in document["results"]["drawn_by_torch"].values():
    if not found.is_floating_point():
        found[0] += 1
torch.save(document, sys.argv[1])
"""


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def numbers(config: Config, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run numbers_of_torch.py, or other Python code, with this PC's torch."""
    argv = [native_python.ready(config), "-W", "ignore", *words]
    environment = {**os.environ, **native.environment_of(config)}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def written_here(product_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the file with this PC's results."""
    file = tmp_path_factory.mktemp("numbers") / "here.pt"
    done = numbers(product_config, NUMBERS, "write", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return file


def test_whole_numbers_are_compared_bit_for_bit(product_config: Config, written_here: Path, tmp_path: Path) -> None:
    """A relative deviation of 2^-40 is far below the tolerance for floating-point numbers."""
    file = shutil.copy(written_here, tmp_path)
    changed = numbers(product_config, "-c", OFF_BY_ONE, file)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    done = numbers(product_config, NUMBERS, "compare", file)
    lines = done.stdout.splitlines()
    whole = ("integers", "wide integers", "permutation", "bernoulli", "chosen")
    once = [f"drawn_by_torch, {name}: not equal" for name in whole]
    assert lines[: len(whole)] == once
    assert done.returncode == len(lines) >= len(whole)


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_results_agree_with_those_of_this_pc(
    built: main_job.Built, product_config: Config, client: docker.DockerClient, written_here: Path, tmp_path: Path
) -> None:
    """Files are exchanged between x86-64 and armv7; the results agree within the tolerance of each case."""
    assert built.manifest("torch").facts["self-contained"]
    refused = numbers(product_config, NUMBERS)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: ")
    for file in (NUMBERS, written_here):
        shutil.copy(file, tmp_path)
    done = run_in(
        client,
        product_config.image_reference("system"),
        ["sh", "-euc", "cd /root/work; python3 numbers_of_torch.py compare here.pt write there.pt"],
        architecture=product_config.image.target,
        binds=[f"{tmp_path}:/root/work:rw"],
    )
    all_agree = f"results of {NUMBERS.read_text().count(chr(10) + '@case(')} cases agree"
    assert all_agree in done.output
    here = numbers(product_config, NUMBERS, "compare", tmp_path / "there.pt")
    assert here.returncode == 0, here.stdout + here.stderr
    assert all_agree in here.stdout


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_the_device_suite_passes_in_the_image(
    built: main_job.Built, product_config: Config, client: docker.DockerClient
) -> None:
    """QEMU runs the suite about three times as fast if it emulates single programs instead of a board.

    test_main_job.py runs the files that need a board, and a selection of the others, on an emulated board.
    """
    assert built.manifest("torch").facts["self-contained"]
    tests = sorted(path.name for path in NUMBERS.parent.glob("test_*.py") if path.name not in NEEDS_A_BOARD)
    assert len(tests) > 5
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = run_in(
        client,
        product_config.image_reference("system"),
        ["python3", "-m", "pytest", *words, *(f"/suite/{name}" for name in tests)],
        architecture=product_config.image.target,
        binds=[f"{NUMBERS.parent}:/suite:ro"],
        limit_s=1500,
    )
    assert re.search(r"^\d+ passed in ", done.output, re.M), done.output


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


SELF_CONTAINED = """
python3 - <<'END'
import torch
x = torch.randn(64, 64, dtype=torch.float64)
u, s, v = torch.linalg.svd(x)
assert torch.allclose(u @ torch.diag(s) @ v, x)
assert torch.from_numpy(x.numpy()).sum() == x.sum()
print("imported", torch.__version__, torch.get_num_threads() > 0)
try:
    torch.cat([torch.zeros(1, dtype=torch.uint8).expand(2**30)] * 5)
except RuntimeError as fault:
    print("refused", fault)
END
dpkg-query --show --showformat='${Package}\\n' |
  grep -E 'openblas|sleef|protobuf|onnx|cpuinfo|libgomp|libfmt' || echo no library of torch
"""


EXTENSION = {
    "setup.py": """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(name="shares", ext_modules=[CppExtension("shares", ["shares.cpp"], extra_compile_args=["-O1", "-fopenmp"])],
      cmdclass={"build_ext": BuildExtension})
""",
    "shares.cpp": """
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>
at::Tensor members(int64_t length, int64_t grain)
{
    auto seen = at::full({length}, -1, at::kLong);
    auto *member = seen.data_ptr<int64_t>();
    at::parallel_for(0, length, grain, [&](int64_t begin, int64_t end) {
        for (auto i = begin; i < end; ++i) member[i] = at::get_thread_num();
    });
    return seen;
}
void fail(int64_t length)
{
    at::parallel_for(0, length, 1, [](int64_t begin, int64_t) { TORCH_CHECK_VALUE(false, "part of ", begin); });
}
at::Tensor slope(at::Tensor x, std::optional<double> margin)
{
    return at::logit_backward(at::ones_like(x), x, margin);  // takes it by value
}
at::Tensor largest(at::Tensor x, std::optional<int64_t> dim)
{
    auto place = at::empty({0}, at::kLong);
    at::argmax_out(place, x, dim);
    return place;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("largest", &largest);
    module.def("slope", &slope);
    module.def("members", &members);
    module.def("fail", &fail);
}
""",
    "try.py": """
import torch, shares
torch.set_num_threads(3)
assert shares.members(8, 1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]  # as many parts as threads, of equal length
assert shares.members(9, 5).tolist() == [0] * 5 + [1] * 4         # fewer, because parts have at least 5 elements
assert shares.members(9, 9).tolist() == [0] * 9                   # one part runs without other threads
assert shares.members(0, 1).tolist() == []
for _ in range(50):
    try:
        shares.fail(8)
    except ValueError as fault:
        assert str(fault).startswith("part of "), fault
    else:
        raise SystemExit("the exception was not rethrown")
    assert shares.members(8, 1).tolist()[-1] == 2
torch.set_num_threads(1)
assert shares.members(8, 1).tolist() == [0] * 8
x = torch.tensor([0.125, 0.5])
assert shares.slope(x, 0.25).tolist() == [0, 4]
assert torch.allclose(shares.slope(x, None), 1 / (x * (1 - x)))
assert shares.largest(torch.tensor([[3, 9], [7, 1]]), 1).tolist() == [1, 0]
assert shares.largest(torch.tensor([[3, 9], [7, 1]]), None).tolist() == 1
print("an extension of", torch.__version__, "computes")
""",
}


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_a_cpp_extension_shares_the_threads_of_torch(
    workbench: Mapping[str, Manifest], product_config: Config, client: docker.DockerClient, tmp_path: Path
) -> None:
    """torch.utils.cpp_extension builds the extension, which has the same ABI and OpenMP library as the wheel."""
    assert workbench["torch"].facts["self-contained"]
    for name, text in EXTENSION.items():
        (tmp_path / name).write_text(text)
    with Context(product_config) as context:
        compiler = native_compiler(context)
    done = run_in(
        client,
        product_config.image_reference("workbench"),
        ["sh", "-euc", "cd /root/work; python3 setup.py build_ext --inplace; python3 try.py"],
        architecture=product_config.image.target,
        binds=[f"{tmp_path}:/root/work:rw", *compiler.binds()],
        environment=compiler.environment,
        limit_s=1500,
    )
    assert "an extension of 2.6.0" in done.output, done.output


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_torch_imports_with_only_python_and_numpy(
    built: main_job.Built, product_config: Config, client: docker.DockerClient, kept: Path, tmp_path: Path
) -> None:
    """This PC's pip installs the requirements, which can also run as pure Python on the target.

    Once a week, test_device_on_board.py installs the wheel and its requirements with the board's pip.
    """
    stated = metadata(kept).get_all("Requires-Dist", [])
    needs = [item.partition(";")[0] for item in stated if "extra ==" not in item and "numpy" not in item]
    assert needs
    python = re.search(r"-cp3(\d+)-", kept.name)
    assert python
    words = [
        "--quiet",
        "--no-compile",
        f"--target={tmp_path}",
        "--only-binary=:all:",
        f"--python-version=3.{python[1]}",
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, *needs], check=True)
    site = f"usr/local/lib/python3.{python[1]}/dist-packages"
    with Context(product_config) as context:
        assert built.manifest("torch").facts["wheel"] == str(kept)
        mirror = built.manifest("mirror")
        spec = roots.root_spec(context, "bare", ("python3", "python3-numpy"), mirror, (context.target,))
        tar = context.root / "bare.tar"
        rootfs.build_tar(dataclasses.replace(spec, native_tools=context.tools), tar, context.log("bare"))
        loaded = load_root(context, "bare", tar, context.target)
        done = run_in(
            client,
            loaded.facts["reference"],
            ["sh", "-euc", SELF_CONTAINED],
            architecture=product_config.image.target,
            binds=[f"{context.torch_site / site}:/{site}:ro", f"{tmp_path}:/needs:ro"],
            environment={"PYTHONPATH": "/needs"},
        )
    assert "imported 2.6.0 True" in done.output
    assert "refused Storage size calculation overflowed with sizes=[5368709120]" in done.output
    assert "no library of torch" in done.output


UPSTREAM = """
import os
import unittest
class TestSome(unittest.TestCase):
    def test_sum(self):
        import torch
        self.assertEqual(torch.ones(3).sum().item(), 3)
        self.assertFalse(hasattr(torch, "qpu"), "the wheel alone is tested")
    def test_known(self):
        self.assertEqual(1 << 31, 0)
    @unittest.skip("not here")
    def test_elsewhere(self):
        pass
    @unittest.expectedFailure
    def test_expected(self):
        self.fail()
    def test_broken(self):
        assert 1 + 1 == 3
def test_endless():
    while True:
        pass
def test_lost():
    os._exit(0)
"""


T = upstream.Part("t.py")


def reports(*found: tuple[str, str, str], status: int | None = 0) -> list[str]:
    """Make the lines of a pytest-reportlog file for tests (name, when, outcome) and for the end of the session."""
    lines = [
        json.dumps({"nodeid": name, "when": when, "outcome": outcome, "longrepr": None, "$report_type": "TestReport"})
        for name, when, outcome in found
    ]
    return lines + ([json.dumps({"exitstatus": status, "$report_type": "SessionFinish"})] if status is not None else [])


def test_upstreams_tests_are_counted_by_result() -> None:
    lines = reports(
        *(("a", when, "passed") for when in ("setup", "call", "teardown")),
        *(("b", "setup", "passed"), ("b", "call", "failed"), ("b", "teardown", "passed")),
        *(("c", "setup", "skipped"), ("c", "teardown", "passed")),
        *(("d", "setup", "passed"), ("d", "call", "passed"), ("d", "teardown", "failed")),
        status=1,
    )
    tests = upstream.Collected([*"abcd"], [*"abcd"])
    result = upstream.tally(T, lines, upstream.Reasons({"b*": "32 bits"}), tests, seconds=9, limit_s=60)
    assert result.counts == {"passed": 1, "explained": 1, "skipped": 1, "failed": 1, "left out": 0, "not run": 0}
    assert (result.explained, list(result.failures), result.ended) == ({"b": "32 bits"}, ["d"], "")


def test_results_before_the_time_limit_are_counted() -> None:
    none, tests = upstream.Reasons({}), upstream.Collected([*"abc"], [*"abc"])
    begun = reports(*(("a", when, "passed") for when in ("setup", "call", "teardown")), status=None)
    result = upstream.tally(T, [*begun, '{"nodeid": "b", "wh'], none, tests, seconds=61, limit_s=60)
    assert (result.counts, result.failures) == ({"passed": 1, "left out": 0, "not run": 2}, {})
    assert result.ended == "cut off after 60 s: 1 of 3 tests ran"
    crashed = upstream.tally(T, begun, none, tests, seconds=3, limit_s=60)
    assert crashed.counts["failed"] == 1
    assert crashed.failures == {"t.py": "pytest exited early"}
    hung = upstream.tally(T, begun, none, tests, seconds=181, limit_s=60, hung=True)
    assert (hung.counts["failed"], hung.ended) == (1, "hung, and could not be stopped by a signal: 1 of 3 tests ran")


@pytest.mark.parametrize("status", [0, 1, 5])
def test_an_exit_status_does_not_prove_completion(status: int) -> None:
    """A process that a test forked writes an exit status even if pytest itself was killed."""
    none, tests = upstream.Reasons({}, {"d": "too long"}), upstream.Collected([*"abcde"], [*"abcd"])
    lines = reports(
        *(("a", when, "passed") for when in ("setup", "call", "teardown")), ("b", "setup", "passed"), status=status
    )
    result = upstream.tally(T, lines, none, tests, seconds=61, limit_s=60)
    assert (result.ended, result.counts["not run"]) == ("cut off after 60 s: 1 of 3 tests ran", 2)
    crashed = upstream.tally(T, lines, none, tests, seconds=9, limit_s=60)
    assert (crashed.ended, crashed.counts["failed"]) == ("pytest exited early: 1 of 3 tests ran", 1)
    uncollected = upstream.tally(T, lines[-1:], none, None, seconds=9, limit_s=60)
    assert (uncollected.ended, uncollected.counts["failed"]) == ("pytest exited early", 1)
    outcome = upstream.Outcome([result, crashed], Path("none"))
    assert outcome.summary().endswith("4 not run; 2 not completed")


def test_ctrl_c_ends_the_files_that_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began, ended = threading.Event(), threading.Event()

    def run(client: object, image: str, argv: list[str], **_: object) -> None:
        if argv[-1] == "first.py":
            began.wait(20)
            raise KeyboardInterrupt
        with process.on_interrupt(ended.set):
            began.set()
            ended.wait(20)

    monkeypatch.setattr(upstream, "run_in", run)
    monkeypatch.setattr(upstream, "compile_jobs", lambda _: 2)
    context = Context(config())
    monkeypatch.setattr(Context, "client", None)
    wanted = [upstream.Part("first.py"), upstream.Part("second.py")]
    with pytest.raises(KeyboardInterrupt):
        upstream._run_all(context, tmp_path, tmp_path, tmp_path, wanted, upstream.Reasons({}), 60, print)
    assert ended.is_set()


@pytest.mark.engine
@pytest.mark.emulation
def test_upstreams_tests_run_in_the_image(
    built: main_job.Built,
    product_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not built.manifest("torch").facts["wheel"]:
        pytest.skip("the image was built without torch")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_some.py").write_text(UPSTREAM)
    (tmp_path / "test_two.py").write_text("def test_a(): raise AssertionError\ndef test_b(): pass\n")
    tables = tomllib.loads(upstream.LIST.read_text())
    pins = json.dumps(tables["packages"])
    (tmp_path / "upstream.toml").write_text(
        f"""packages = {pins}
files = ["test_two.py 2/2"]
[explained]
"deep/test_some.py::*::test_unkown" = "a typo"
[left_out]
"deep/test_some.py::test_endless" = "does not end"
"""
    )
    monkeypatch.setattr(upstream, "LIST", tmp_path / "upstream.toml")
    # Use the shared build's image with another folder, because its lock may be held.
    mine = dataclasses.replace(
        product_config, build=dataclasses.replace(product_config.build, folder=tmp_path / "build")
    )
    with pytest.raises(ArtefactMissing, match=r"no test file test_none\.py"):
        upstream.run_tests(mine, ["test_none.py"], tests=tmp_path)
    names = ["deep/test_some.py", "test_two.py 2/2"]
    with pytest.raises(ChecksFailed, match="3 of upstream's tests fail without a known reason") as caught:
        upstream.run_tests(mine, names, tests=tmp_path, limit_s=300)
    assert "test_broken" in caught.value.found
    unmet = "deep/test_some.py::*::test_unkown"
    assert f"upstream.toml contains {unmet}, but upstream has no such test" in capsys.readouterr().err
    result = json.loads((mine.target_root / "torch" / "upstream-tests.json").read_text())
    file, part = result["files"]
    assert result["emulated"]
    assert file["counts"] == {"passed": 2, "failed": 3, "skipped": 1, "left out": 1, "not run": 1}
    assert file["unmet"] == [unmet]
    assert file["left_out"] == {"deep/test_some.py::test_endless": "does not end"}
    assert file["ended"] == "pytest exited early: 5 of 6 tests ran"
    assert (part["file"], part["counts"]["passed"], part["ended"]) == ("test_two.py 2/2", 1, "")
    again = upstream.run_tests(mine, tests=tmp_path)
    assert "1 of 1 files skipped: passed earlier with the same torch" in capsys.readouterr().err
    assert [dataclasses.asdict(item) for item in again.results] == [part]
