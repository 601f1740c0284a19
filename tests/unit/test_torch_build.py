"""Tests of torch's builder without containers: trees, disk space, program messages, and comparisons of builds."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import docker
import pytest
from registry_parts import small_disk
from test_torch_job import FIT, UNFIT, StandIn

from benchmarks import torch_wheel
from engine.containers import Ran
from flow import torch_job, verify
from flow.steps import torch_wheel as torch_wheel_step
from images.flavour import load_suite
from recipes import recipe
from recipes.torch import build as building
from recipes.torch import source
from toolchain import progress
from toolchain.config import load_config
from toolchain.errors import ArtefactMissing, ChecksFailed, CommandFailed, DiskFull, RecipeInvalid
from toolchain.manifest import Artefact, Manifest
from wheels import cpu_gate


def a_builder(folder: Path, kind: type[building.Builder] = building.Builder, **torch: object) -> building.Builder:
    """Make a builder of the recipe's plan with an existing build folder."""
    data, suite = recipe.load("torch"), load_suite("trixie")
    config = load_config({"build": {"folder": str(folder), "jobs": 2}, "torch": torch})
    found = source.Source(kind="archive", folder=folder, identity="archive pytorch 1", files={})
    plan = building.Plan.of(data, config, suite)
    return kind(cast("docker.DockerClient", None), "image", "sha256:1", plan, found, folder / "logs" / "torch.log")


# Commands run on this PC instead of in the container.


@pytest.fixture
def without_container(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Replace containers.run_in with a function that runs commands here; return the list of their environments."""
    seen: list[Mapping[str, str]] = []

    def run_in(
        client: object,
        image: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        check: bool,
        fix: str,
        **_: object,
    ) -> Ran:
        del client, image
        seen.append(environment)
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environment},
        )
        *lines, _rest = done.stdout.split("\n")
        for line in lines:
            on_line(line)
        if done.returncode and check:
            raise CommandFailed("failed", returncode=done.returncode, tail=done.stdout[-4000:], fix=fix)
        return Ran(done.stdout, 0.0)

    monkeypatch.setattr(building, "run_in", run_in)
    monkeypatch.setattr(building, "packages_in", lambda *_: {"clang-19:amd64": "1:19.1.7-3", "sed:amd64": "4.9-2"})
    return seen


def run_here(argv: Sequence[str], places: Mapping[str, str]) -> str:
    """Run a command on this PC after replacing the container's paths; return its output."""
    words = [functools.reduce(lambda text, item: text.replace(*item), places.items(), word) for word in argv]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


FULL = {
    "assembler": ["gcc", "-c", "large.c", "-o", "DISK/large.o"],
    "linker": ["gcc", "-shared", "-nostdlib", "large.o", "-o", "DISK/large.so"],
    "compiler": ["env", "TMPDIR=DISK", "gcc", "-c", "large.c", "-o", "large-again.o"],
    "shell": ["sh", "-c", "yes | head -c 1000000 >DISK/file"],
}


@pytest.mark.usefixtures("without_container")
@pytest.mark.parametrize("who", FULL)
def test_a_full_disk_in_any_program_raises_diskfull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """The test runs the real programs on a full disk."""
    monkeypatch.chdir(tmp_path)
    Path("large.c").write_text(f'const char large[] = "{"x" * 300000}";\n')
    subprocess.run(["gcc", "-c", "large.c", "-o", "large.o"], check=True)
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(DiskFull) as caught:
        a_builder(tmp_path).run([word.replace("DISK", str(disk)) for word in FULL[who]])
    assert "No space left on device" in caught.value.found
    assert caught.value.exit_code == 21
    assert "continue from here" in caught.value.fix


SAID = (
    "/usr/lib/gcc-cross/arm-linux-gnueabihf/12/../../../../arm-linux-gnueabihf/bin/ld: final link failed: "
    "No space left on device",
    f"cp: error writing 'd/large.c': {os.strerror(errno.EDQUOT)}",
)
"""Messages of the cross linker on a full disk, and of cp at the limit of a quota."""


@pytest.mark.usefixtures("without_container")
@pytest.mark.parametrize("words", SAID)
def test_messages_about_a_full_disk_are_recognised(tmp_path: Path, words: str) -> None:
    builder = a_builder(tmp_path)
    said = f"printf '%s\\n' {shlex.quote(words)}; yes 'and much more' | head -c 9000; exit 1"
    for check in (True, False):
        with pytest.raises(DiskFull) as caught:
            builder.run(["sh", "-c", said], check=check)
        assert caught.value.found == words
    with pytest.raises(DiskFull) as caught:
        builder.run(["sh", "-c", f"printf %s {shlex.quote(words)}; exit 1"])
    assert caught.value.found == words, "the error must contain the last line even without a newline"


@pytest.mark.usefixtures("without_container")
def test_other_failures_are_not_a_full_disk(tmp_path: Path) -> None:
    builder = a_builder(tmp_path)
    with pytest.raises(CommandFailed, match="failed"):
        builder.run(["sh", "-c", "echo 'error: no such thing'; exit 1"])
    assert builder.run(["sh", "-c", f"echo {shlex.quote(SAID[0])}"]).startswith("/usr/lib"), (
        "output with such a message is not an error if the program succeeds"
    )


SILENT = {
    "nothing said": "yes | head -c 90000000 >HOME/file 2>/dev/null; echo died; exit 1",
    "words in two lines": "yes | head -c 90000000 >HOME/file 2>/dev/null; printf 'No space left\\n on device'; exit 1",
    "taken away": "yes | head -c 90000000 >HOME/file 2>/dev/null; sleep 1; rm HOME/file; echo died; exit 1",
}
"""Failures whose output lacks the message: a program is killed when it writes to a mapped page, CMake wraps the message
at 77 columns, or a program removes its files before it exits."""


@pytest.mark.usefixtures("without_container")
@pytest.mark.parametrize("how", SILENT)
def test_a_full_disk_without_a_message_raises_diskfull(tmp_path: Path, how: str) -> None:
    with small_disk(tmp_path / "disk", "40m") as disk:
        builder = a_builder(disk)
        builder.home.mkdir(parents=True)
        with pytest.raises(DiskFull) as caught:
            builder.run(["sh", "-c", SILENT[how].replace("HOME", str(builder.home))])
        last = "on device" if "two" in how else "died"
        assert caught.value.found == f"0 MiB free when a program failed ({last})"
        assert isinstance(caught.value.__cause__, CommandFailed)
        for path in builder.home.iterdir():
            path.unlink()
        with pytest.raises(CommandFailed, match="failed"):
            builder.run(
                ["sh", "-c", "head -c 10000000 /dev/zero >HOME; exit 1".replace("HOME", f"{builder.home}/file")]
            )


def test_disk_space_is_checked_before_each_stage(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        builder = a_builder(disk)
        with pytest.raises(DiskFull, match="torch's sources and objects") as caught:
            builder.build(tmp_path / "out")
        assert caught.value.expected.startswith("9000 MiB")
        assert not builder.home.exists()
        tree = builder.home / "pytorch" / "build"
        tree.mkdir(parents=True)
        (builder.home / "runs.json").write_text("[]")
        with pytest.raises(DiskFull, match="torch's sources and objects") as caught:
            builder.build(tmp_path / "out")
        assert caught.value.expected.startswith("9000 MiB"), "a tree without objects must count as no tree"
        (tree / ".ninja_log").touch()
        with pytest.raises(DiskFull, match="torch's sources and objects") as caught:
            builder.build(tmp_path / "out")
        assert caught.value.expected.startswith("1500 MiB")
        with pytest.raises(DiskFull, match="torch's wheel"):
            builder.package(tmp_path / "out")


# Phases.


class Quick(building.Builder):
    """Phases that finish immediately. One of them can fail."""

    fault: BaseException | None = None

    def prepare(self) -> None:
        """Create a tree."""
        (self.home / "pytorch").mkdir(exist_ok=True)

    def configure(self) -> None:
        """Do nothing."""

    def compile(self) -> None:
        """Succeed, or raise ``fault``."""
        if self.fault is not None:
            raise self.fault

    def package(self, folder: Path) -> tuple[Path, Path, list[dict[str, str]]]:
        """Build a wheel."""
        built = StandIn(FIT).build(folder)
        return built.wheel, built.symbols, []


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    monkeypatch.setattr(building, "_NEEDED_MIB", 1)
    monkeypatch.setattr(building, "_NEEDED_TO_GO_ON_MIB", 1)
    return cast("Quick", a_builder(tmp_path, Quick))


def test_a_tree_records_the_seconds_of_every_run(quick: Quick, tmp_path: Path) -> None:
    assert quick.runs() == []
    quick.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick.build(tmp_path / "out")
    quick.fault = None
    built = quick.build(tmp_path / "out")
    first, second = quick.runs()
    assert (list(first.seconds), first.finished) == (["prepare", "configure", "compile"], False)
    assert (list(second.seconds), second.finished) == (["prepare", "configure", "compile", "package"], True)
    assert second.seconds == built.seconds
    assert (built.cache_hits, built.cache_calls) == (0, 0), "no calls must be counted, because ccache was never called"
    (quick.home / "runs.json").write_text("{")
    assert quick.runs() == []
    quick.build(tmp_path / "out")
    assert [dict(run.seconds) for run in quick.runs()[:-1]] == [{}], (
        "earlier runs must be ignored if their record is damaged"
    )


def older_tree(quick: Quick, name: str, made_for: str | None) -> Path:
    """Make a build tree with a file of 64 KiB, and return its folder."""
    made = quick.home.with_name(name)
    (made / "pytorch" / "build").mkdir(parents=True)
    (made / "pytorch" / "build" / "x.o").write_bytes(b"x" * 65536)
    if made_for is not None:
        (made / "made-for").write_text(made_for)
    return made


def test_a_finished_build_removes_the_trees_it_replaces(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    monkeypatch.setattr(Quick, "run", lambda self, argv, **_: run_here(argv, {"/usr/src/torch": str(self.home)}))
    quick.build(tmp_path / "out")
    mine = (quick.home / "made-for").read_text()
    goes = [older_tree(quick, f"torch-{'0' * 12}{more}", mine) for more in ("", "-again")]
    stays = [
        older_tree(quick, f"torch-{'1' * 12}", "baseline archive\n"),
        older_tree(quick, f"torch-{'2' * 12}", None),
        older_tree(quick, f"{quick.home.name}-again", mine),
    ]
    torch_wheel_step.remove_replaced_trees(quick)
    assert sorted(quick.home.parent.iterdir()) == sorted([quick.home, *stays])
    for tree in goes:
        assert any(
            re.search(rf"older build tree: {tree} \(\d+\.\d KiB\); ccache still has its objects", line) for line in said
        )
    (printed_line,) = [line for line in said if "other build trees" in line]
    assert all(f"{tree.name} (" in printed_line for tree in stays)
    assert f"sudo rm -r {quick.home.parent}/" in said[-1]
    for tree in stays:
        shutil.rmtree(tree)
    said.clear()
    torch_wheel_step.remove_replaced_trees(quick)
    assert said == []


def test_a_tree_that_cannot_be_removed_is_only_a_warning(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    quick.build(tmp_path / "out")
    old = older_tree(quick, f"torch-{'0' * 12}", (quick.home / "made-for").read_text())

    def refuse(self: Quick, *_: object, **__: object) -> str:
        raise CommandFailed(f"no container at {self.home}")

    monkeypatch.setattr(Quick, "run", refuse)
    torch_wheel_step.remove_replaced_trees(quick)
    assert old.is_dir()
    assert len(warned) == 1
    assert f"no container at {old}" in warned[0]


@pytest.mark.parametrize(
    "torch",
    [{"variant": "baseline"}, {"source": "git"}, {"options": ["USE_OPENMP=OFF"]}],
    ids=lambda item: next(iter(item)),
)
def test_a_build_replaces_only_trees_of_the_same_purpose(quick: Quick, tmp_path: Path, torch: dict[str, Any]) -> None:
    quick.build(tmp_path / "out")
    kind = str(torch.get("source", "archive"))
    other = a_builder(tmp_path, Quick, **torch)
    other._source = dataclasses.replace(other._source, kind=kind)
    other.home = quick.home.with_name(f"torch-{'9' * 12}")
    replaced, others = other.older()
    assert ([item.home for item in replaced], [item.home for item in others]) == ([], [quick.home])


def test_a_full_disk_in_our_own_code_raises_diskfull(quick: Quick, tmp_path: Path) -> None:
    def fill() -> None:
        Path("/dev/full").write_bytes(b"x" * 10000)

    quick.compile = fill  # type: ignore[method-assign]
    with pytest.raises(DiskFull, match="no room for torch's build"):
        quick.build(tmp_path / "out")
    assert [run.finished for run in quick.runs()] == [False]


class Recorder(building.Builder):
    """Records the commands instead of running them; for CMake, creates the build folder."""

    ran: list[Sequence[str]]
    said: Sequence[str] = ()
    fails = False

    def run(self, argv: Sequence[str], *, on_line: Callable[[str], None] | None = None, **_: Any) -> str:
        """Record the command, and output the lines of ``said``."""
        self.ran.append(argv)
        for line in self.said:
            if on_line is not None:
                on_line(line)
        if argv[0] == "cmake":
            (self.home / "pytorch" / "build").mkdir(parents=True)
            if self.fails:
                raise CommandFailed("cmake failed")
        return "\n".join(self.said)


def recorder(folder: Path, **torch: object) -> Recorder:
    made = cast("Recorder", a_builder(folder, Recorder, **torch))
    made.ran = []
    made.home = folder / "home"
    made.home.mkdir(exist_ok=True)
    return made


def test_a_source_is_unpacked_once(tmp_path: Path) -> None:
    builder = recorder(tmp_path)
    builder.prepare()
    assert builder.ran == [["/usr/src/recipe/inside/prepare", "/usr/src/source", "archive", "2.6.0"]]
    (builder.home / "pytorch").mkdir()
    builder.prepare()
    assert len(builder.ran) == 1


def test_cmake_runs_again_after_a_change_or_failure(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.fails = True
    with pytest.raises(CommandFailed):
        first.configure()
    first.fails = False
    first.configure()
    first.configure()
    assert len(first.ran) == 2
    made = first.home / "pytorch" / "build" / "made"
    made.write_text("by cmake")
    other = recorder(tmp_path, options=["USE_OPENMP=OFF"])
    other.configure()
    assert "-DUSE_OPENMP=OFF" in other.ran[0]
    assert not made.exists(), "a tree that was built with other options must be removed"


@pytest.mark.parametrize(("variant", "state"), [("neon", "ON"), ("baseline", "OFF")])
def test_only_the_neon_variant_has_libraries_that_require_it(variant: str, state: str) -> None:
    config = load_config({"torch": {"variant": variant}})
    plan = building.Plan.of(recipe.load("torch"), config, load_suite("trixie"))
    assert {plan.options[name] for name in ("USE_PYTORCH_QNNPACK", "USE_XNNPACK")} == {state}


@pytest.mark.parametrize("options", [[], ["USE_OPENMP=OFF", "USE_XNNPACK=ON"]])
def test_a_failure_of_cmake_names_the_users_options(tmp_path: Path, options: list[str]) -> None:
    builder = recorder(tmp_path, options=options)
    builder.fails = True
    with pytest.raises(CommandFailed, match="cmake failed") as caught:
        builder.configure()
    assert ("try without USE_OPENMP=OFF, USE_XNNPACK=ON" in caught.value.fix) == bool(options)
    assert ("docs/torch.md lists these" in caught.value.fix) == bool(options)
    assert not (builder.home / "configured").exists()


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(Small NONE)
include(CMakeDependentOption)
option(USE_PLAIN "" OFF)
cmake_dependent_option(USE_DEPENDENT "Of another processor" ON "CMAKE_SYSTEM_PROCESSOR STREQUAL m68k" OFF)
option(USE_FORCED "" ON)
set(USE_FORCED OFF CACHE BOOL "A requirement is missing" FORCE)
option(USE_HIDDEN "" ON)
set(USE_HIDDEN OFF)
option(USE_OPENMP "" ON)
set(USE_OPENMP OFF CACHE BOOL "" FORCE)
set(NAMED "x" CACHE STRING "")
message(STATUS "  USE_HIDDEN            : ${USE_HIDDEN}")
message(STATUS "    USE_PLAIN           : ${USE_PLAIN}")
"""
"""The ways in which torch changes options, and the recipe's USE_OPENMP."""


class Configures(building.Builder):
    """Runs the recipe's complete CMake command line on this PC."""

    def run(self, argv: Sequence[str], **_: Any) -> str:
        """Return the output."""
        return run_here(argv, {"/usr/src/torch": str(self.home), "/usr/src/recipe": str(self._plan.recipe.folder)})


def configures(folder: Path, *options: str) -> building.Builder:
    made = a_builder(folder, Configures, options=list(options))
    made.home = folder / "home"
    (made.home / "pytorch").mkdir(parents=True, exist_ok=True)
    (made.home / "pytorch" / "CMakeLists.txt").write_text(CMAKE)
    return made


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["USE_DEPENDENT=ON"], "USE_DEPENDENT is OFF"),
        (["USE_FORCED=ON", "USE_PLAIN=ON"], "USE_FORCED is OFF"),
        (["USE_HIDDEN=yes"], "USE_HIDDEN is OFF"),
        (["USE_FORCED=TRUE", "USE_DEPENDENT=1"], "USE_FORCED is OFF, USE_DEPENDENT is OFF"),
    ],
)
def test_an_overridden_option_of_the_user_is_rejected(tmp_path: Path, options: list[str], found: str) -> None:
    builder = configures(tmp_path, *options)
    for _ in range(2):
        with pytest.raises(RecipeInvalid, match="torch's CMake overrides USE_") as caught:
            builder.configure()
        assert caught.value.found == found
        assert "USE_PLAIN" not in caught.value.summary
        assert str(builder.log) in caught.value.fix
        assert not (builder.home / "configured").exists(), "compilation must not start"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["USE_PLAIN=ON"],
        ["USE_PLAIN=off"],
        ["USE_DEPENDENT=OFF", "USE_FORCED=0", "USE_HIDDEN=NO", "USE_OPENMP=OFF"],
        ["NAMED=ON", "MINE=1", "SECOND=OFF", "CMAKE_BUILD_TYPE=Debug", "LIST=a;b"],
    ],
)
def test_unchanged_and_unknown_options_are_accepted(tmp_path: Path, options: list[str]) -> None:
    """The recipe's own options are accepted even if CMake overrides them: the recipe is known to build with them."""
    builder = configures(tmp_path, *options)
    builder.configure()
    assert (builder.home / "configured").is_file()
    assert (builder.home / "pytorch" / "build" / "build.ninja").is_file()
    builder.configure()


def test_options_of_a_configured_tree_are_checked_too(tmp_path: Path) -> None:
    builder = configures(tmp_path, "USE_DEPENDENT=ON")
    builder.run(builder._plan.configure)
    (builder.home / "configured").write_text(shlex.join(builder._plan.configure))
    with pytest.raises(RecipeInvalid, match="overrides USE_DEPENDENT=ON"):
        builder.configure()


NINJA = (
    "ninja: Entering directory `/usr/src/torch/pytorch/build'",
    "[1/1219] Building CXX object c10/CMakeFiles/c10.dir/core/Allocator.cpp.o",
    "[90/1219] Linking C static library lib/libfp16.a",
    "In file included from /usr/src/torch/pytorch/aten/src/ATen/core/IListRef.h:631,",
    "  171 |     const auto& ivalue = (*it).get();",
    "[545/1219] Building CXX object caffe2/CMakeFiles/torch_cpu.dir/__/aten/src/ATen/native/cpu/"
    "batch_norm_kernel.cpp.DEFAULT.cpp.o\r",
)
"""Lines of a build log."""


def test_ninja_lines_update_the_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = bars(monkeypatch)
    builder = recorder(tmp_path)
    builder.said = NINJA
    builder.compile()
    assert builder.ran == [["ninja", "-C", "/usr/src/torch/pytorch/build", "-j2"]]
    assert shown == [
        (1, 1219, "Allocator.cpp"),
        (90, 1219, "libfp16.a"),
        (545, 1219, "batch_norm_kernel.cpp.DEFAULT.cpp"),
    ]


def bars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float | None, str]]:
    """Return all updates of progress bars."""
    shown: list[tuple[float, float | None, str]] = []

    class Bar:
        def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
            shown.append((completed, total, note))

    @contextlib.contextmanager
    def bar(*_: object, **__: object) -> Iterator[Bar]:
        yield Bar()

    monkeypatch.setattr(progress, "bar", bar)
    return shown


CCACHE = """Cacheable calls:   4 / 5 (80.00%)
  Hits:            2 / 4 (50.00%)
    Direct:        2 / 2 (100.0%)
    Preprocessed:  0 / 2 ( 0.00%)
  Misses:          2 / 4 (50.00%)
Uncacheable calls: 1 / 5 (20.00%)
Local storage:
  Hits:            2 / 4 (50.00%)
  Misses:          2 / 4 (50.00%)
"""
"""Output of ``ccache --show-log-stats`` 4.11.2 after a link and compiling two files, one of them three times."""


def test_hits_of_ccache_are_counted_per_tree(tmp_path: Path) -> None:
    builder = recorder(tmp_path)
    assert builder.cache_use() == (0, 0)
    assert builder.ran == [], "ccache must not be called if the tree has no log"
    (builder.home / "ccache.log").touch()
    builder.said = CCACHE.splitlines()
    assert builder.cache_use() == (2, 4)
    assert builder.ran == [["ccache", "--show-log-stats"]]
    builder.said = []
    assert builder.cache_use() == (0, 0), "an empty log contains no statistics"


def test_a_second_build_has_its_own_tree_and_no_ccache(
    tmp_path: Path, without_container: list[Mapping[str, str]]
) -> None:
    builder = a_builder(tmp_path)
    again = builder.elsewhere("again")
    assert again.home.parent == builder.home.parent
    assert again.home != builder.home
    assert again.log != builder.log
    for item in (builder, again):
        item.run(["true"])
    assert [found.get("CCACHE_DISABLE") for found in without_container] == [None, "1"]


COMPILERS = (
    *("binutils-arm-linux-gnueabihf:amd64", "clang-19:amd64", "cpp-14-arm-linux-gnueabihf:amd64"),
    *("g++-14-arm-linux-gnueabihf:amd64", "gcc-14-arm-linux-gnueabihf:amd64", "libclang-cpp19:amd64"),
    *("libgcc-14-dev-armhf-cross:all", "libisl23:amd64", "libllvm19:amd64", "libstdc++-14-dev-armhf-cross:all"),
)
BUILDER = dict.fromkeys((*COMPILERS, "cmake:amd64", "libc6:amd64", "libcpuinfo0:armhf"), "1:19.1.7~git-3+b1")
"""Some packages in the builder image."""


def test_ccache_identifies_compilers_by_their_packages() -> None:
    """The executable does not identify the compiler: ``clang`` is a few KiB, and loads the compiler from libraries."""
    check = building.compiler_check(BUILDER)
    kind, _, printed_line = check.partition(":")
    assert kind == "string", "ccache must hash the text itself"
    assert dict(item.split("=") for item in printed_line.split(" ")) == {name: BUILDER[name] for name in COMPILERS}
    assert building.compiler_check(dict(reversed(BUILDER.items()))) == check
    assert building.compiler_check({**BUILDER, "libclang-cpp19:amd64": "1:19.1.7-3+b2"}) != check
    assert building.compiler_check({**BUILDER, "cmake:amd64": "4.0"}) == check, (
        "a new CMake must not invalidate objects"
    )


def test_compilers_are_queried_once_and_only_for_ccache(
    tmp_path: Path, without_container: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def packages_in(_: object, image: str) -> dict[str, str]:
        asked.append(image)
        return BUILDER

    monkeypatch.setattr(building, "packages_in", packages_in)
    builder = a_builder(tmp_path)
    builder.elsewhere("again").run(["true"])
    assert asked == []
    for _ in range(2):
        builder.run(["true"])
    assert asked == ["image"]
    assert [found.get("CCACHE_COMPILERCHECK") for found in without_container] == [
        None,
        *[building.compiler_check(BUILDER)] * 2,
    ]


def test_settings_of_ccache_are_not_in_the_key(tmp_path: Path) -> None:
    plan = a_builder(tmp_path)._plan
    assert not [name for name in (*plan.environment, *plan.setup_environment) if name.startswith("CCACHE")]


# The final table.


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"ccache": {"hits": 1204, "calls": 1219}}, "ccache hits: 1204 of 1219 compiler calls (99 %)"),
        ({"ccache": {"hits": 9999, "calls": 10000}}, "ccache hits: 9999 of 10000 compiler calls (99.9 %)"),
        ({"ccache": {"hits": 816, "calls": 816}}, "ccache hits: 816 of 816 compiler calls (100 %)"),
        ({"ccache": {"hits": 0, "calls": 1219}}, "ccache hits: 0 of 1219 compiler calls (0 %)"),
        ({"ccache": {"hits": 0, "calls": 0}}, ""),
        ({"cache": "a" * 64}, "from the artefact cache"),
        ({}, ""),
    ],
)
def test_the_final_table_shows_the_hits_of_ccache(tmp_path: Path, facts: dict[str, Any], note: str) -> None:
    made = StandIn(FIT).build(tmp_path)
    artefacts = tuple(Artefact.of(path) for path in (made.wheel, made.symbols))
    manifest = Manifest(step="torch-wheel", key="", inputs={}, artefacts=artefacts, facts=facts, seconds=3.0)
    assert [(row.name, row.note) for row in torch_job.Done((manifest,), 3.0).rows] == [
        (made.wheel.name, note),
        (made.symbols.name, ""),
    ]


@pytest.mark.parametrize("architecture", sorted({"armhf", *recipe.load("torch").architectures}))
def test_the_command_that_imports_the_wheel_is_shown(tmp_path: Path, architecture: str) -> None:
    wheel = StandIn(FIT).build(tmp_path).wheel
    manifest = Manifest(step="torch-wheel", key="", inputs={}, artefacts=(Artefact.of(wheel),))
    text = torch_job.Done((manifest,), 3.0).import_check(architecture)
    assert text.startswith("the wheel was not imported")
    *_, path, option = shlex.split(text)
    assert path == str(wheel)
    assert cpu_gate.load_cpu(option.removeprefix("--cpu=")).architecture == architecture


NINJA_LOG = """# ninja log v6
52	4701	1795331943094015057	aten/src/ATen/CPUFunctions.h	b92bf50270735989
51783	67515	1795331994827153310	caffe2/CMakeFiles/torch_cpu.dir/cmake_pch.hxx.gch	ec77b1797e073375
2410937	2417757	1795334353982110259	caffe2/CMakeFiles/torch_cpu.dir/__/torch/csrc/jit/ir/subgraph_matcher.cpp.o	f3747
"""
ONE_RUN = [({"compile": 90.0, "package": 10.0}, True)]


@pytest.mark.parametrize(
    ("runs", "use", "figures", "notes"),
    [
        (ONE_RUN, (0, 9), [100.0, 22.552, 45.104], []),
        (ONE_RUN, (4, 9), [100.0], ["4 of 9 compiler calls were ccache hits"]),
        (ONE_RUN, (0, 0), [100.0], ["the number of ccache hits in that build is unknown"]),
        (
            [({"compile": 50.0}, False), ({"compile": 40.0}, True), ({"compile": 1.0}, True)],
            (0, 9),
            [90.0, 22.552, 45.104],
            [],
        ),
        ([({"compile": 50.0}, False)], (9, 9), [], ["the record of its runs is incomplete", "9 of 9 compiler calls"]),
        ([({}, False), ({"compile": 50.0}, True)], (0, 0), [], ["the record of its runs is incomplete", "is unknown"]),
    ],
)
def test_the_benchmark_ignores_builds_answered_by_ccache(
    tmp_path: Path,
    runs: list[tuple[dict[str, float], bool]],
    use: tuple[int, int],
    figures: list[float],
    notes: list[str],
) -> None:
    (tmp_path / "pytorch" / "build").mkdir(parents=True)
    (tmp_path / "pytorch" / "build" / ".ninja_log").write_text(NINJA_LOG)
    listed = [building.Run(seconds=seconds, finished=finished) for seconds, finished in runs]
    builder = types.SimpleNamespace(home=tmp_path, runs=lambda: listed, cache_use=lambda: use)
    found, printed_line = torch_wheel.figures_of_the_build(cast("building.Builder", builder), 2.0)
    assert [item.value for item in found] == pytest.approx(figures)
    hits, calls = use
    assert [item.goal.text(item.unit) for item in found if item.goal] == ["≤ 2700 s"] * bool(
        runs and calls and not hits
    )
    assert len(printed_line) == len(notes)
    assert all(part in text for part, text in zip(notes, printed_line, strict=True))
    if len(runs) == 3:
        assert found[0].note.startswith("compile 90 s; in 2 runs; 0 of 9 compiler calls were ccache hits")


def test_gcc_accepts_the_command_line_of_the_benchmark(tmp_path: Path) -> None:
    """Options and warning flags that only Clang accepts are removed with their arguments; all others are kept."""
    (tmp_path / "one.cpp").write_text("int one() { return X; }\n")
    stays = ["-DX=1", "-O2", "-fno-trapping-math", "-o", "one.o", "-c", "one.cpp"]
    goes = ["--target=arm-linux-gnueabihf", "-Wnewline-eof", "-Werror=braced-scalar-init", "-Qunused-arguments"]
    goes += ["-fclang-abi-compat=17"]
    goes += ["-fcolor-diagnostics", "-Xclang", "-fno-pch-timestamp", "-Xclang", "-include-pch", "-Xclang", "some.pch"]
    words = torch_wheel.for_gcc(["/usr/bin/clang++", *goes, *stays], "g++")
    assert words == ["g++", *stays]
    assert subprocess.run([*words], cwd=tmp_path, check=False).returncode == 0


# verify: comparison with a second build.


@dataclasses.dataclass
class Compiles:
    """Runs the builder's commands with this PC's compiler."""

    home: Path
    log: Path

    def run(self, argv: Sequence[str], **_: object) -> str:
        """Return the output."""
        return run_here(argv, {"/tmp/again.o": str(self.home / "again.o"), "/usr/src/torch/": f"{self.home}/"})


@pytest.fixture
def tree(tmp_path: Path) -> Compiles:
    """Make a build tree with three objects and their commands."""
    build = tmp_path / "pytorch" / "build"
    build.mkdir(parents=True)
    commands = []
    for name in ("one", "two", "three"):
        (build / f"{name}.c").write_text(f"int {name}(void) {{ return {len(name)}; }}\n")
        words = ["gcc", "-O1", "-o", str(build / f"{name}.c.o"), "-c", str(build / f"{name}.c")]
        subprocess.run(words, check=True)
        commands.append({"file": f"{build}/{name}.c", "directory": str(build), "command": shlex.join(words)})
    (build / "compile_commands.json").write_text(json.dumps(commands))
    return Compiles(home=tmp_path, log=tmp_path / "torch.log")


def sampled(tree: Compiles, sample: int, seed: int = 7) -> verify.Verified:
    return verify.sampled(cast("building.Builder", tree), sample, seed)


def test_equal_objects_are_verified(tree: Compiles) -> None:
    done = sampled(tree, 20)
    assert sorted(done.names) == ["one.c", "three.c", "two.c"]
    assert re.fullmatch(r"3 objects built again with identical bytes in \d+ s, chosen with seed 7", done.summary())
    assert sampled(tree, 2).names == sampled(tree, 2).names
    assert len(sampled(tree, 2).names) == 2


def test_a_different_object_is_named(tree: Compiles) -> None:
    with (tree.home / "pytorch" / "build" / "two.c.o").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(ChecksFailed, match="1 of 3 object files") as caught:
        sampled(tree, 3)
    assert caught.value.found == "two.c"
    assert "--seed=7" in caught.value.fix
    assert str(tree.log) in caught.value.fix


def test_an_interrupted_tree_is_recorded_before_compiling(tree: Compiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tree.home / "pytorch" / "build" / f"{name}.c.o").unlink()
    monkeypatch.setattr(Compiles, "run", None)
    with pytest.raises(ArtefactMissing, match="is not complete") as caught:
        sampled(tree, 3)
    assert re.fullmatch(r"missing: (one|two)\.c\.o and 1 more", caught.value.found)
    assert "./inv build-torch --again" in caught.value.fix


@pytest.mark.usefixtures("without_container")
@pytest.mark.parametrize("program", ["false", "sh -c 'kill -9 $$'"])
def test_a_failed_compilation_is_not_a_difference(
    tmp_path: Path, tree: Compiles, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(building, "memory_kills", lambda: 0)
    monkeypatch.setattr(verify, "_TREE", str(tree.home / "pytorch" / "build"))
    listed = tree.home / "pytorch" / "build" / "compile_commands.json"
    commands = [{**item, "command": f"{program} {item['command']}"} for item in json.loads(listed.read_text())]
    listed.write_text(json.dumps(commands))
    builder = a_builder(tmp_path)
    builder.home = tree.home
    with pytest.raises(CommandFailed):
        verify.sampled(builder, 3, 7)


def test_unity_sources_are_chosen_and_precompiled_headers_not(tree: Compiles) -> None:
    """The test uses the names that CMake generates."""
    build = tree.home / "pytorch" / "build"
    commands = json.loads((build / "compile_commands.json").read_text())
    for name in ("t.dir/Unity/unity_torch_cpu_jit_0_cxx.cxx", "t.dir/cmake_pch.hxx.cxx"):
        source, out = build / name, build / f"{name}.o"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("int united() { return 1; }\n")
        words = ["g++", "-O1", "-o", str(out), "-c", str(source)]
        if "Unity" in name:
            subprocess.run(words, check=True)
        commands.append({"file": str(source), "directory": str(build), "command": shlex.join(words)})
    (build / "compile_commands.json").write_text(json.dumps(commands))
    assert sorted(sampled(tree, 20).names) == ["one.c", "three.c", "two.c", "unity_torch_cpu_jit_0_cxx.cxx"]


def test_without_objects_verify_fails(tree: Compiles) -> None:
    with pytest.raises(ArtefactMissing, match="no object files to compare"):
        sampled(tree, 0)
    shutil.rmtree(tree.home / "pytorch")
    with pytest.raises(ArtefactMissing, match="no build tree") as caught:
        sampled(tree, 3)
    assert "./inv build-torch --again" in caught.value.fix, "without --again, build-torch would use an existing wheel"
    with pytest.raises(ArtefactMissing, match="no build tree") as caught:
        torch_wheel.command_lines(cast("building.Builder", tree))
    assert "./inv build-torch --again" in caught.value.fix


class Again(StandIn):
    """A stand-in that builds in another tree."""

    def __init__(self, members: dict[str, str | bytes], home: Path) -> None:
        super().__init__(members)
        self.home = home

    def elsewhere(self, name: str) -> Again:
        """Return this builder; its folder contains a file from an earlier attempt."""
        assert name == "again"
        self.home.mkdir()
        (self.home / "half").write_text("of an earlier attempt")
        return self

    def discard(self) -> None:
        """Remove the tree."""
        shutil.rmtree(self.home)

    def build(self, folder: Path) -> building.Built:
        """Build in an empty folder."""
        assert not self.home.exists()
        self.home.mkdir()
        return super().build(folder)


def full(folder: Path, members: dict[str, str | bytes], before: Path) -> verify.Verified:
    again = Again(members, folder / "torch-again-tree")
    return verify._full(folder, cast("building.Builder", again), before, "built here")


def test_an_equal_wheel_is_verified(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    built = StandIn(FIT).build(tmp_path / "torch")
    done = full(tmp_path, FIT, built.wheel)
    assert done.summary().startswith(f"{built.wheel.name} (built here) built again with identical bytes in ")
    assert [path.name for path in tmp_path.iterdir()] == ["torch"], "the second tree and wheel must be removed"


def test_a_different_wheel_is_not_reproducible(tmp_path: Path) -> None:
    first = StandIn(FIT).build(tmp_path / "torch")
    with pytest.raises(ChecksFailed, match="produced a different file") as caught:
        full(tmp_path, UNFIT, first.wheel)
    second = tmp_path / "torch-again" / first.wheel.name
    assert caught.value.expected == f"SHA-256 {Artefact.of(first.wheel).sha256}"
    assert caught.value.found == f"SHA-256 {Artefact.of(second).sha256}"
    assert str(second) in caught.value.fix
