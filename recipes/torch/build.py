"""Cross-compile the torch wheel from source in its builder image.

All paths inside the container are fixed and do not depend on the checkout. The sources and the build tree are in
``/usr/src/torch``; this PC has a separate folder for each key (``Builder.key``), which is mounted there. An interrupted
build continues where it stopped. ccache stores the objects by the content of their sources, so a change to the recipe
recompiles only the affected objects.

Phases: prepare (unpack, patch) → configure → compile → package (inside/package).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from engine.containers import calling_user, run_in
from images.flavour import Suite
from recipes.recipe import Recipe
from recipes.torch.source import Source
from toolchain import files, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.errors import CommandFailed, DiskFull, RecipeInvalid
from toolchain.jobs import compile_jobs

_HOME = "/usr/src/torch"
_TREE = f"{_HOME}/pytorch"
_LIMIT_S = 24 * 3600.0
_PATIENCE_S = 20.0
"""After Ctrl-C, the time in seconds for ninja to remove partly written files, which a later run would reuse."""
_NEEDED_MIB = 9000
_NEEDED_TO_GO_ON_MIB = 1500
"""The estimated space in MiB for packaging the wheel, or for continuing in a tree that already contains objects."""
_NEXT_TO_NOTHING_MIB = 16
"""If less space was free (in MiB), the disk counts as full. Every library that is written for the wheel is larger."""
_KILLED = re.compile(r"Killed signal terminated program|unable to execute command: Killed|terminated with signal 9")
"""Matches the messages that the drivers of GCC, Clang and the linker print about a killed process."""
_STATUS_OF_KILLED = 137
"""The exit status that a shell reports for a process that SIGKILL terminated."""
_NINJA = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_NINJA_LOG = ".ninja_log"
"""The name of ninja's log, which does not exist before the first object is compiled."""
_COMPILERS = re.compile(r"(lib)?(clang|llvm|gcc|stdc\+\+|binutils)|g\+\+|cpp|lib(gmp|isl|mpc|mpfr)\d")
"""Matches the names of packages that contain compilers, their libraries or assemblers."""
_OPTIONS = {
    "archive": "the distribution's source package lacks XNNPACK, oneDNN, kineto, gloo and googletest, which some "
    "options build; docs/torch.md lists these options and what they require in addition to --source=git",
    "git": "not every option of torch can be built for this target. With USE_SYSTEM_LIBS=ON, which the recipe sets, "
    "some require libraries that the builder does not have (docs/torch.md)",
}
_TRUE = frozenset({"1", "ON", "YES", "TRUE", "Y"})
_FALSE = frozenset({"0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND", ""})
"""CMake's Boolean constants in upper case."""
_CACHED = re.compile(r"^([A-Za-z_]\w*):([A-Z]+)=(.*)$", re.MULTILINE)
"""Matches a line of CMakeCache.txt: name, type and value."""
_SUMMARY = re.compile(r"^--[ \t]+([A-Z]\w*)[ \t]*:[ \t]*(\S+)[ \t\r]*$", re.MULTILINE)
"""Matches a line of the summary that torch's CMake prints at the end: an option and its final value."""
_MADE_FOR = "made-for"
_RUNS = "runs.json"
_STATISTICS = "ccache.log"
_HITS = re.compile(r"Hits:\s+(\d+) /\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One wheel to build: its target, its source and its options."""

    recipe: Recipe
    config: Config
    suite: Suite
    variant: str
    options: Mapping[str, str]
    """CMake's options, including the user's options."""

    @classmethod
    def of(cls, recipe: Recipe, config: Config, suite: Suite) -> Plan:
        """Return the plan for the configured wheel. Raises RecipeInvalid for an unsupported target or variant."""
        architecture = config.image.architecture
        if architecture not in ("armhf", *recipe.architectures):
            raise RecipeInvalid(
                f"the torch recipe has no variant for {architecture}",
                expected=f"image.architecture: armhf or {', '.join(recipe.architectures)}",
                found=architecture,
                fix="put a torch wheel for this architecture into a wheelhouse (torch.wheelhouse)",
            )
        recipe = recipe.for_architecture(architecture)
        variants = recipe.tables["variant"]
        name = config.torch.variant
        if name not in variants:
            raise RecipeInvalid(
                f"the torch recipe has no variant {name!r} for {architecture}",
                expected=f"one of {', '.join(variants)}",
                found=name,
                fix="set torch.variant, or --variant, to one of the variants above",
            )
        if reason := variants[name].get("refused"):
            raise RecipeInvalid(
                f"torch cannot be built for {variants[name]['title']}",
                expected="a compiler and libraries for the variant's architecture",
                found=reason,
                fix="use --variant=neon or --variant=baseline",
            )
        options = {**recipe.tables["options"], **variants[name].get("options", {})}
        for item in config.torch.options:
            key, _, value = item.partition("=")
            options[key] = value
        return cls(recipe=recipe, config=config, suite=suite, variant=name, options=dict(sorted(options.items())))

    @property
    def flags(self) -> str:
        """The compiler's flags for the variant."""
        return str(self.recipe.tables["variant"][self.variant]["flags"])

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for all commands of the build, except for ccache's settings."""
        return {
            "SOURCE_DATE_EPOCH": self.recipe.settings["epoch"],
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def configure(self) -> list[str]:
        """The CMake command line."""
        target, suite = self.config.image.target, self.suite
        python = f"/usr/lib/{target.gnu}"
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_TOOLCHAIN_FILE": "/usr/src/recipe/inside/toolchain.cmake",
            "PITORCH_GNU": target.gnu,
            "PITORCH_PROCESSOR": target.wheel_platform.removeprefix("linux_"),
            "PITORCH_FLAGS": self.flags,
            "CMAKE_INSTALL_PREFIX": f"{_TREE}/torch",
            "CMAKE_INSTALL_LIBDIR": "lib",
            "CMAKE_C_COMPILER_LAUNCHER": "ccache",
            "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
            "CMAKE_PROJECT_Torch_INCLUDE": "/usr/src/recipe/inside/speed.cmake",
            "Python_EXECUTABLE": "/usr/bin/python3",
            "Python_INCLUDE_DIR": f"/usr/include/python{suite.python}",
            "Python_LIBRARY": f"{python}/libpython{suite.python}.so",
            "Python_NumPy_INCLUDE_DIR": f"{python}/python3-numpy/numpy/_core/include",
            "PROTOBUF_PROTOC_EXECUTABLE": "/usr/bin/protoc",
            "CAFFE2_CUSTOM_PROTOC_EXECUTABLE": "/usr/bin/protoc",
            **self.options,
        }
        return [
            *("cmake", "-S", _TREE, "-B", f"{_TREE}/build", "-G", "Ninja"),
            *(f"-D{name}={value}" for name, value in settings.items()),
        ]

    @property
    def setup(self) -> list[str]:
        """The command line of upstream's setup.py, which assembles the wheel."""
        platform = self.config.image.target.wheel_platform
        return ["python3", "setup.py", "bdist_wheel", "--plat-name", platform, "--dist-dir", f"{_HOME}/raw"]

    @property
    def setup_environment(self) -> dict[str, str]:
        """The additional environment variables for setup.py, which contain the target and CMake's options."""
        target = self.config.image.target
        compiler = f"{target.gnu}-gcc {self.flags}"
        found = {
            "_PYTHON_HOST_PLATFORM": target.wheel_platform.replace("_", "-"),
            "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{target.gnu}",
            "CC": compiler,
            "CXX": f"{target.gnu}-g++ {self.flags}",
            "LDSHARED": f"{compiler} -shared",
            "CFLAGS": f"-ffile-prefix-map={_TREE}=.",
            **{name: value for name, value in self.options.items() if name.startswith(("USE_", "BUILD_"))},
        }
        if self.options.get("USE_SYSTEM_LIBS") != "ON":
            found.pop("USE_SYSTEM_LIBS", None)
        return found

    def key(self, source: str) -> str:
        """Return the SHA-256 of everything in this repository that determines the wheel.

        ``source`` identifies the source. The number of compiler processes and ccache's settings are not part of the
        key, because they do not change the wheel.
        """
        stated = {
            "recipe": self.recipe.fingerprint(),
            "source": source,
            "variant": self.variant,
            "suite": self.suite.name,
            "architecture": self.config.image.architecture,
            "environment": self.environment,
            "configure": self.configure,
            "setup": self.setup,
            "setup environment": self.setup_environment,
        }
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a build: the duration of each phase in seconds, and whether the run completed the build."""

    seconds: Mapping[str, float]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished build: its products, and ccache's statistics for all runs in the build tree."""

    wheel: Path
    symbols: Path
    vendored: Sequence[Mapping[str, str]]
    cache_hits: int
    cache_calls: int
    seconds: Mapping[str, float]


class Builder:
    """Runs the phases of one plan in containers created from the builder image."""

    def __init__(
        self, client: docker.DockerClient, image: str, image_id: str, plan: Plan, source: Source, log: Path
    ) -> None:
        self._client, self._image, self._plan, self._source, self.log = client, image, plan, source, log
        self._cached = True
        config = plan.config
        # The image contains the compiler and its libraries, so each image has a separate tree.
        self.key = hashlib.sha256(f"{plan.key(source.identity)} {image_id}".encode()).hexdigest()
        self.home = config.target_root / "work" / f"torch-{self.key[:12]}"
        self.cache = config.build_root / "ccache"
        self.jobs = compile_jobs(config.build)

    def build(self, folder: Path) -> Built:
        """Run all phases, and copy the products to ``folder``. Raises CommandFailed or DiskFull."""
        compiled = (self.home / "pytorch" / "build" / _NINJA_LOG).is_file()
        needed = _NEEDED_TO_GO_ON_MIB if compiled else _NEEDED_MIB
        files.require_space(self.home, needed, "torch's sources and objects")
        with files.room_for("torch's build", self.home):
            return self._phases(folder)

    def _phases(self, folder: Path) -> Built:
        self.home.mkdir(parents=True, exist_ok=True)
        self.cache.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        seconds: dict[str, float] = {}
        before, finished = self.runs(), False
        if not before and (self.home / "pytorch").is_dir():
            before = [Run(seconds={}, finished=False)]  # a run whose time was not recorded
        files.write_text_atomically(self.home / _MADE_FOR, self._made_for)
        self._note(before, Run(seconds=seconds, finished=finished))
        try:
            for name, phase in (("prepare", self.prepare), ("configure", self.configure), ("compile", self.compile)):
                with _timed(name, seconds):
                    phase()
            with _timed("package", seconds):
                wheel, symbols, vendored = self.package(folder)
            finished = True
        finally:
            with contextlib.suppress(OSError):  # a full disk has already been reported
                self._note(before, Run(seconds=seconds, finished=finished))
        hits, calls = self.cache_use()
        return Built(
            wheel=wheel, symbols=symbols, vendored=vendored, cache_hits=hits, cache_calls=calls, seconds=seconds
        )

    def runs(self) -> list[Run]:
        """Return the runs recorded in this build tree, oldest first."""
        try:
            listed = json.loads((self.home / _RUNS).read_text())
            return [Run(seconds=dict(item["seconds"]), finished=bool(item["finished"])) for item in listed]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _note(self, before: Sequence[Run], run: Run) -> None:
        runs = [{"seconds": dict(item.seconds), "finished": item.finished} for item in (*before, run)]
        files.write_text_atomically(self.home / _RUNS, json.dumps(runs, indent=2) + "\n")

    def elsewhere(self, name: str) -> Builder:
        """Return a builder that builds the same wheel in a separate tree and without ccache."""
        other = copy.copy(self)
        other.home = self.home.with_name(f"{self.home.name}-{name}")
        other.log = self.log.with_name(f"{self.log.stem}-{name}.log")
        other._cached = False
        return other

    def older(self) -> tuple[list[Builder], list[Builder]]:
        """Return two lists of the other trees in the same folder: those that this tree replaces, and all others.

        This tree replaces any tree that was made for the same variant, source and user options but has another key. Two
        kinds of trees are not replaced: the tree of a second build with the same key, which is compared with the first
        build, and a tree without a record of what it was made for.
        """
        replaced: list[Builder] = []
        others: list[Builder] = []
        for home in sorted(self.home.parent.glob("torch-*")):
            if home == self.home or not home.is_dir():
                continue
            other = copy.copy(self)
            other.home = home
            is_replaced = _text(home / _MADE_FOR) == self._made_for and not home.name.startswith(self.home.name)
            (replaced if is_replaced else others).append(other)
        return replaced, others

    @property
    def _made_for(self) -> str:
        return shlex.join([self._plan.variant, self._source.kind, *self._plan.config.torch.options]) + "\n"

    def discard(self) -> None:
        """Remove the tree. The files belong to root, so they are removed in a container."""
        if self.home.is_dir():
            self.run(["find", _HOME, "-mindepth", "1", "-delete"])
        files.remove(self.home)

    def prepare(self) -> None:
        """Unpack and patch the source, unless this has already been done."""
        if (self.home / "pytorch").is_dir():
            return
        version = self._plan.recipe.settings["version"]
        self.run(["/usr/src/recipe/inside/prepare", "/usr/src/source", self._source.kind, version])

    def configure(self) -> None:
        """Run CMake, unless it has already run with the same options.

        Raises the same exceptions as ``run``. If the user has set options, the fix in a CommandFailed suggests omitting
        them. Raises RecipeInvalid if CMake has overridden a user's option.
        """
        argv = self._plan.configure
        stamp = self.home / "configured"
        if stamp.is_file() and stamp.read_text() == shlex.join(argv):
            self._require_as_given("")
            return
        files.remove(self.home / "pytorch" / "build")
        try:
            said = self.run(argv)
        except CommandFailed as fault:
            if options := self._plan.config.torch.options:
                fault.fix = f"try without {', '.join(options)}: {_OPTIONS[self._source.kind]}; {fault.fix}"
            raise
        self._require_as_given(said)
        files.write_text_atomically(stamp, shlex.join(argv))

    def _require_as_given(self, said: str) -> None:
        """Raise RecipeInvalid if CMake has overridden a user's option.

        The key and the provenance contain the user's value, and would otherwise be wrong.
        """
        given = dict(item.split("=", 1) for item in self._plan.config.torch.options)
        other = overridden(given, _text(self.home / "pytorch" / "build" / "CMakeCache.txt"), said)
        if other:
            raise RecipeInvalid(
                f"torch's CMake overrides {', '.join(f'{name}={given[name]}' for name in other)}",
                expected="every option to keep the value that you set",
                found=", ".join(f"{name} is {value}" for name, value in other.items()),
                fix="omit these options, or provide the options and libraries that they require (docs/torch.md); "
                f"CMake's output is in {self.log}",
            )

    def compile(self) -> None:
        """Run ninja with a progress bar. Ninja continues where an interrupted run stopped."""
        with progress.bar("torch: objects") as bar:

            def on_line(line: str) -> None:
                if found := _NINJA.match(line.strip()):
                    bar.update(float(found[1]), total=float(found[2]), note=_short(found[3]))

            self.run(
                ["ninja", "-C", f"{_TREE}/build", f"-j{self.jobs}"],
                environment={"CCACHE_STATSLOG": f"{_HOME}/{_STATISTICS}"},
                on_line=on_line,
                patience_s=_PATIENCE_S,
            )

    def package(self, folder: Path) -> tuple[Path, Path, list[dict[str, str]]]:
        """Assemble the wheel with upstream's setup.py, make it self-contained, and copy the products to ``folder``."""
        files.require_space(self.home, _NEEDED_TO_GO_ON_MIB, "torch's wheel")
        target = self._plan.config.image.target
        out = self.home / "out"
        files.remove(out)
        out.mkdir()
        setup = shlex.join(self._plan.setup)
        environment = {**self._plan.setup_environment, "MAX_JOBS": str(self.jobs)}
        # Remove the files that an interrupted run has collected; otherwise, setup.py would use them.
        stale = f"{_HOME}/raw {_TREE}/build/lib.* {_TREE}/build/bdist.* {_TREE}/build/temp.*"
        self.run(["sh", "-euc", f"rm -rf {stale}; cd {_TREE}; {setup}"], environment=environment)
        wanted: dict[str, Any] = {
            "gnu": target.gnu,
            "system": self._plan.recipe.tables["wheel"]["system_libraries"].split(),
            "epoch": int(self._plan.recipe.settings["epoch"]),
        }
        made = shlex.join(["/usr/src/recipe/inside/package"])
        uid, gid = calling_user()
        self.run(
            [
                *("sh", "-euc"),
                f'{made} {_HOME}/raw/*.whl {_HOME}/out "$0"; chown -R {uid}:{gid} {_HOME}/out',
                json.dumps(wanted),
            ]
        )
        self._plan.recipe.require_outputs(out)
        wheel = next(out.glob("*.whl"))
        symbols = next(out.glob("*.symbols.tar.xz"))
        vendored: list[dict[str, str]] = json.loads((out / "vendored.json").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        placed = []
        for item in (wheel, symbols):
            with files.replacing(folder / item.name) as aside:
                shutil.copyfile(item, aside)
            placed.append(folder / item.name)
        return placed[0], placed[1], vendored

    def cache_use(self) -> tuple[int, int]:
        """Return the number of ccache hits and the number of compiler calls in all runs of this tree.

        ccache's own statistics are shared with other builds, so each tree has a separate log.
        """
        if not (self.home / _STATISTICS).is_file():
            return 0, 0
        environment = {"CCACHE_STATSLOG": f"{_HOME}/{_STATISTICS}"}
        said = self.run(["ccache", "--show-log-stats"], environment=environment, check=False)
        found = _HITS.search(said)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def versions(self) -> dict[str, str]:
        """Return the result of ``versions_in`` for the builder image."""
        return versions_in(self._client, self._image, self._plan.config.image.target)

    def run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        check: bool = True,
        patience_s: float = 0.0,
    ) -> str:
        """Run a command in a container, in which the sources, the build tree and the recipe are mounted.

        Returns the command's output.

        Raises CommandFailed if the command fails, unless ``check`` is false. Raises DiskFull if the disk is full, and
        CommandFailed with a specific message if memory runs out. If the command fails and the disk was almost full
        while it ran, raises DiskFull even if the output does not mention the disk.
        """
        full: list[str] = []
        killed: list[str] = []
        before = memory_kills()
        fix = f"read the compiler's messages above or in {self.log}; run the task again to continue from here"

        def watch(line: str) -> None:
            if files.NO_ROOM.search(line):
                full.append(line.strip())
            if _KILLED.search(line):
                killed.append(line.strip())
            if on_line is not None:
                on_line(line)

        try:
            with files.least_room(self.home) as least:
                said = run_in(
                    self._client,
                    self._image,
                    argv,
                    architecture=host_architecture(),
                    binds=[
                        f"{self._plan.recipe.folder}:/usr/src/recipe:ro",
                        f"{self._source.folder}:/usr/src/source:ro",
                        f"{self.home}:{_HOME}:rw",
                        f"{self.cache}:/usr/src/ccache:rw",
                    ],
                    environment={**self._plan.environment, **self._ccache, **(environment or {})},
                    workdir=_HOME,
                    limit_s=_LIMIT_S,
                    log=self.log,
                    on_line=watch,
                    check=check,
                    patience_s=patience_s,
                    fix=fix,
                ).output
        except CommandFailed as fault:
            # The callback does not get an unterminated last line.
            full += [line.strip() for line in fault.tail.splitlines() if files.NO_ROOM.search(line)]
            if full:
                raise self._disk_full(full[0]) from fault
            # The exit status of ninja does not depend on the compiler's exit status.
            if not killed and (times := memory_kills() - before):
                killed.append(f"the kernel killed {times} process{'es' if times > 1 else ''} during the build")
            if killed or fault.returncode == _STATUS_OF_KILLED:
                raise self._memory_exhausted(killed[0] if killed else fault.found) from fault
            if least[0] < _NEXT_TO_NOTHING_MIB << 20:
                *_, last = fault.found, *(line.strip() for line in fault.tail.splitlines() if line.strip())
                raise self._disk_full(f"{least[0] >> 20} MiB free when a program failed ({last})") from fault
            raise
        if full and not check:
            raise self._disk_full(full[0])
        return said

    @property
    def _ccache(self) -> dict[str, str]:
        """The environment variables for ccache."""
        return {
            "CCACHE_DIR": "/usr/src/ccache",
            "CCACHE_DEPEND": "1",  # the compiler lists the headers that it reads, so nothing is preprocessed twice
            "CCACHE_MAXSIZE": "10G",
            "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
            **({"CCACHE_COMPILERCHECK": self._compiler_check} if self._cached else {"CCACHE_DISABLE": "1"}),
        }

    @functools.cached_property
    def _compiler_check(self) -> str:
        """The result of ``compiler_check`` for the builder image."""
        return compiler_check(packages_in(self._client, self._image))

    def _disk_full(self, words: str) -> DiskFull:
        return DiskFull(
            "the disk filled up during the build of torch",
            expected=f"free space for objects in {self.home} and {self.cache}, and for temporary files of the compiler "
            "in the engine's storage",
            found=words,
            fix="free some space in the places listed above, or set build.folder in invoke.yaml to a folder on a "
            "larger disk; run the task again to continue from here",
        )

    def _memory_exhausted(self, found: str) -> CommandFailed:
        return CommandFailed(
            "memory ran out during the build of torch",
            expected=f"memory for {self.jobs} compiler processes of 1.5 GiB each",
            found=found,
            fix="run INVOKE_BUILD_JOBS=1 ./inv build-torch, or stop other programs and run the task again; it "
            "continues from here",
        )


def overridden(given: Mapping[str, str], cache: str, said: str) -> dict[str, str]:
    """Return the Boolean options that CMake has overridden, with the final values from its cache and its output.

    If the conditions of a dependent option (cmake_dependent_option) are not met, the option is off, although the cache
    still contains the given value, with the type INTERNAL. Options that no project declares have the type UNINITIALIZED
    and are ignored.
    """
    cached = {name: (kind, value) for name, kind, value in _CACHED.findall(cache)}
    final = {name: value for name, (kind, value) in cached.items() if kind == "BOOL"}
    final |= {name: "OFF" for name, (kind, _) in cached.items() if kind == "INTERNAL"}
    final |= {name: value for name, value in _SUMMARY.findall(said) if _truth(value) is not None}
    found: dict[str, str] = {}
    for name, asked in given.items():
        wanted, is_now = _truth(asked), _truth(final.get(name, "unknown"))
        if None not in (wanted, is_now) and wanted is not is_now:
            found[name] = final[name]
    return found


def _truth(value: str) -> bool | None:
    """Return the truth value that CMake's ``if`` assigns to a constant; None if ``value`` is not a constant."""
    constant = value.upper()
    if constant in _TRUE:
        return True
    return False if constant in _FALSE or constant.endswith("-NOTFOUND") else None


def versions_in(client: docker.DockerClient, image: str, target: Architecture) -> dict[str, str]:
    """Return the versions of a builder image's packages and compilers.

    The build's folders are not mounted: the engine would create a missing folder, and root would own it.
    """
    said = [_ask(client, image, program, "--version")[:1] for program in ("clang++", f"{target.gnu}-g++")]
    return {**packages_in(client, image), "compiler": "; ".join(line for lines in said for line in lines)}


def packages_in(client: docker.DockerClient, image: str) -> dict[str, str]:
    """Return the version of each package in an image. The keys have the form NAME:ARCHITECTURE."""
    listed = _ask(client, image, "dpkg-query", "--show", "--showformat=${Package}:${Architecture} ${Version}\\n")
    return dict(line.split(" ", 1) for line in listed if " " in line)


def compiler_check(packages: Mapping[str, str]) -> str:
    """Return the text by which ccache identifies the compilers: their packages with versions.

    The called program alone does not identify a compiler: ``clang`` loads the compiler from libclang-cpp and libLLVM,
    and GCC's driver starts ``cc1plus`` and ``as``.
    """
    return "string:" + " ".join(
        f"{name}={version}" for name, version in sorted(packages.items()) if _COMPILERS.match(name)
    )


def _ask(client: docker.DockerClient, image: str, *argv: str) -> list[str]:
    return run_in(client, image, argv, architecture=host_architecture()).output.splitlines()


def memory_kills() -> int:
    """Return the number of OOM kills since boot; 0 if the kernel does not report it."""
    try:
        listed = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in listed.splitlines() if line.startswith("oom_kill ")), 0)


@contextlib.contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    try:
        with progress.step(f"torch: {name}"):
            yield
    finally:
        seconds[name] = time.monotonic() - began


def _text(path: Path) -> str:
    """Return a file's text, or an empty string if the file does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _short(what: str) -> str:
    """Return the file name in a line of ninja's output."""
    return what.rsplit("/", 1)[-1].removesuffix(".o")[:40]
