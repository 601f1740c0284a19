"""The torch wheel, cross-compiled from source in its builder image.

Everything happens at fixed paths inside the container, whatever the checkout is called: the sources and the build tree
lie in ``/usr/src/torch``, which is kept on this PC, one per recipe key. An interrupted build goes on where it was;
objects also go to ccache, keyed by content, so that a changed recipe recompiles what it changed.

Phases: prepare (unpack, patch) → configure → compile → package (inside/package).
"""

from __future__ import annotations

import contextlib
import copy
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
from recipes.torch.remaining import Remaining
from recipes.torch.source import Source
from toolchain import files, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.errors import CommandFailed, DiskFull, MemoryExhausted, RecipeInvalid
from toolchain.jobs import compile_jobs

_HOME = "/usr/src/torch"
_TREE = f"{_HOME}/pytorch"
_LIMIT_S = 24 * 3600.0
_PATIENCE_S = 20.0
"""For ninja on Ctrl-C: what compilers and linkers have written in part it removes, or would take for whole later on."""
_NEEDED_MIB = 9000
_NEEDED_TO_GO_ON_MIB = 1500
"""An estimate, for a tree with objects, and for packaging."""
_NEXT_TO_NOTHING_MIB = 16
"""Less than any of the libraries that are written when the wheel is packaged."""
_KILLED = re.compile(r"Killed signal terminated program|unable to execute command: Killed|terminated with signal 9")
"""What GCC's driver, Clang's and the linker's say of a process of theirs that was killed."""
_STATUS_OF_KILLED = 137
"""The C library's words, in whoever's message; the container's locale is C."""
_NINJA = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_NINJA_LOG = ".ninja_log"
"""There is none before the first object is compiled."""
_COMPILERS = re.compile(r"(lib)?(clang|llvm|gcc|stdc\+\+|binutils)|g\+\+|cpp|lib(gmp|isl|mpc|mpfr)\d")
"""Names of the packages that compilers, their libraries and assemblers are of."""
_OPTIONS = {
    "archive": "the distribution's source package has no XNNPACK, oneDNN, kineto, gloo and googletest, which some "
    "options build; docs/torch.md says which, and what else they need beside --source=git",
    "git": "not every option of torch's can be built for this target, and with USE_SYSTEM_LIBS=ON, the recipe's, some "
    "want libraries that the builder has not (docs/torch.md)",
}
_TRUE = frozenset({"1", "ON", "YES", "TRUE", "Y"})
_FALSE = frozenset({"0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND", ""})
"""CMake's constants, in upper case."""
_CACHED = re.compile(r"^([A-Za-z_]\w*):([A-Z]+)=(.*)$", re.MULTILINE)
"""A line of CMakeCache.txt: name, type, value."""
_SUMMARY = re.compile(r"^--[ \t]+([A-Z]\w*)[ \t]*:[ \t]*(\S+)[ \t\r]*$", re.MULTILINE)
"""A line of the summary that torch's CMake prints at its end: what an option came to."""
_MADE_FOR = "made-for"
_RUNS = "runs.json"
_STATISTICS = "ccache.log"
_HITS = re.compile(r"Hits:\s+(\d+) /\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One wheel to build: for whom, from what, how."""

    recipe: Recipe
    config: Config
    suite: Suite
    variant: str
    options: Mapping[str, str]
    """CMake's, the user's own included."""

    @classmethod
    def of(cls, recipe: Recipe, config: Config, suite: Suite) -> Plan:
        """The configured one. Raises RecipeInvalid for a variant that is not known, or refused."""
        variants = recipe.tables["variant"]
        name = config.torch.variant
        if name not in variants:
            raise RecipeInvalid(
                f"the torch recipe has no variant {name!r}",
                expected=f"one of {', '.join(variants)}",
                found=name,
                fix="set torch.variant, or --variant, to one of these",
            )
        if reason := variants[name].get("refused"):
            raise RecipeInvalid(
                f"torch cannot be built for {variants[name]['title']}",
                expected="a compiler and libraries of that architecture",
                found=reason,
                fix="use --variant=neon or --variant=baseline",
            )
        options = {**recipe.tables["options"]}
        for item in config.torch.options:
            key, _, value = item.partition("=")
            options[key] = value
        return cls(recipe=recipe, config=config, suite=suite, variant=name, options=dict(sorted(options.items())))

    @property
    def flags(self) -> str:
        """The compiler's, of the variant."""
        return str(self.recipe.tables["variant"][self.variant]["flags"])

    @property
    def environment(self) -> dict[str, str]:
        """What every command of the build finds in its environment, the compiler's cache's settings aside."""
        return {
            "SOURCE_DATE_EPOCH": self.recipe.settings["epoch"],
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def configure(self) -> list[str]:
        """CMake's command line."""
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
        """The command line of upstream's setup.py, which collects the wheel."""
        platform = self.config.image.target.wheel_platform
        return ["python3", "setup.py", "bdist_wheel", "--plat-name", platform, "--dist-dir", f"{_HOME}/raw"]

    @property
    def setup_environment(self) -> dict[str, str]:
        """What setup.py finds in its environment beside the rest: the target, and what CMake was told."""
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
        """SHA-256 of what makes the wheel, as far as this repository states it; ``source`` identifies the source.

        How many compile at once, and the settings of the compiler's cache, do not change what is made.
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
    """One go at a tree: seconds of each phase that it came to, and whether it came to the end."""

    seconds: Mapping[str, float]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came out, and how the compiler's cache did in the whole tree, earlier runs included."""

    wheel: Path
    symbols: Path
    vendored: Sequence[Mapping[str, str]]
    cache_hits: int
    cache_calls: int
    seconds: Mapping[str, float]


class Builder:
    """Runs the phases of one plan in containers of the builder image."""

    def __init__(
        self, client: docker.DockerClient, image: str, image_id: str, plan: Plan, source: Source, log: Path
    ) -> None:
        self._client, self._image, self._plan, self._source, self.log = client, image, plan, source, log
        self._cached, self._compilers = True, ""
        config = plan.config
        # The compiler and its libraries are in the image: another image starts with another tree.
        self.key = hashlib.sha256(f"{plan.key(source.identity)} {image_id}".encode()).hexdigest()
        self.home = config.target_root / "work" / f"torch-{self.key[:12]}"
        self.cache = config.build_root / "ccache"
        self.jobs = compile_jobs(config.build)

    def build(self, folder: Path) -> Built:
        """All phases; the products are copied to ``folder``. Raises CommandFailed, DiskFull, MemoryExhausted."""
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
            before = [Run(seconds={}, finished=False)]  # what it took was not noted
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
            with contextlib.suppress(OSError):  # a full disk has an error of its own by now
                self._note(before, Run(seconds=seconds, finished=finished))
        hits, calls = self.cache_use()
        return Built(
            wheel=wheel, symbols=symbols, vendored=vendored, cache_hits=hits, cache_calls=calls, seconds=seconds
        )

    def runs(self) -> list[Run]:
        """What every go at this tree took, in order; empty where nothing was noted."""
        try:
            listed = json.loads((self.home / _RUNS).read_text())
            return [Run(seconds=dict(item["seconds"]), finished=bool(item["finished"])) for item in listed]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _note(self, before: Sequence[Run], run: Run) -> None:
        told = [{"seconds": dict(item.seconds), "finished": item.finished} for item in (*before, run)]
        files.write_text_atomically(self.home / _RUNS, json.dumps(told, indent=2) + "\n")

    def elsewhere(self, name: str) -> Builder:
        """A builder of the same wheel in a tree of its own, which the compiler's cache has no part in."""
        other = copy.copy(self)
        other.home = self.home.with_name(f"{self.home.name}-{name}")
        other.log = self.log.with_name(f"{self.log.stem}-{name}.log")
        other._cached = False
        return other

    def older(self) -> tuple[list[Builder], list[Builder]]:
        """Trees that lie beside this one: those that it takes the place of, and others.

        It does so for a tree of another key that was made for the same variant, source and options of the user's. One
        of a second build of this very key is somebody's who compares, and of one that does not say, nothing is known.
        """
        replaced: list[Builder] = []
        others: list[Builder] = []
        for home in sorted(self.home.parent.glob("torch-*")):
            if home == self.home or not home.is_dir():
                continue
            other = copy.copy(self)
            other.home = home
            alike = _text(home / _MADE_FOR) == self._made_for and not home.name.startswith(self.home.name)
            (replaced if alike else others).append(other)
        return replaced, others

    @property
    def _made_for(self) -> str:
        return shlex.join([self._plan.variant, self._source.kind, *self._plan.config.torch.options]) + "\n"

    def discard(self) -> None:
        """Remove the tree. What containers made in it is root's: one of them removes it."""
        if self.home.is_dir():
            self.run(["find", _HOME, "-mindepth", "1", "-delete"])
        files.remove(self.home)

    def prepare(self) -> None:
        """Unpack and patch the source, once."""
        if (self.home / "pytorch").is_dir():
            return
        self.run(["/usr/src/recipe/inside/prepare", "/usr/src/source", self._source.kind])

    def configure(self) -> None:
        """Run CMake; where its options are as they were, what it made is kept.

        Raises as ``run``; where options of the user's are among them, the fix speaks of these. Raises RecipeInvalid
        where one of these is not what CMake made of it.
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
                fault.fix = f"try it without {', '.join(options)}: {_OPTIONS[self._source.kind]}; {fault.fix}"
            raise
        self._require_as_given(said)
        files.write_text_atomically(stamp, shlex.join(argv))

    def _require_as_given(self, said: str) -> None:
        """The key and the provenance state the user's options: the build must go by them."""
        given = dict(item.split("=", 1) for item in self._plan.config.torch.options)
        other = overridden(given, _text(self.home / "pytorch" / "build" / "CMakeCache.txt"), said)
        if other:
            raise RecipeInvalid(
                f"torch's CMake does not take {', '.join(f'{name}={given[name]}' for name in other)}",
                expected="the build to go by every option that is given",
                found=", ".join(f"{name} is {value}" for name, value in other.items()),
                fix="leave it out, or give it what it wants of other options and libraries (docs/torch.md); CMake's "
                f"own words are in {self.log}",
            )

    def compile(self) -> None:
        """Run ninja, with a bar; it goes on where an interrupted run was."""
        with progress.bar("torch: objects") as bar:
            began = time.monotonic()
            remaining = Remaining.of(self.home / "pytorch" / "build")

            def on_line(line: str) -> None:
                if not (found := _NINJA.match(line.strip())):
                    return
                done, total, what = float(found[1]), float(found[2]), found[3]
                remaining.finished(what)
                left = remaining.minutes(time.monotonic() - began)
                if remaining.total:
                    done, total = remaining.done, remaining.total
                bar.update(
                    done, total=total, note=_short(what) if left is None else f"{left:.0f} min left, {_short(what)}"
                )

            self.run(
                ["ninja", "-C", f"{_TREE}/build", f"-j{self.jobs}"],
                environment={"CCACHE_STATSLOG": f"{_HOME}/{_STATISTICS}"},
                on_line=on_line,
                patience_s=_PATIENCE_S,
            )

    def package(self, folder: Path) -> tuple[Path, Path, list[dict[str, str]]]:
        """Let upstream's setup.py collect the wheel, make it self-contained, and copy the products to ``folder``."""
        files.require_space(self.home, _NEEDED_TO_GO_ON_MIB, "torch's wheel")
        target = self._plan.config.image.target
        out = self.home / "out"
        files.remove(out)
        out.mkdir()
        setup = shlex.join(self._plan.setup)
        environment = {**self._plan.setup_environment, "MAX_JOBS": str(self.jobs)}
        # What an interrupted run had collected would be taken for this one's.
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
        """How many of the tree's compiler calls were answered by the cache, and how many there were.

        Of all runs: the cache's own statistics are shared with other builds, so a tree has a log of its own.
        """
        if not (self.home / _STATISTICS).is_file():
            return 0, 0
        environment = {"CCACHE_STATSLOG": f"{_HOME}/{_STATISTICS}"}
        said = self.run(["ccache", "--show-log-stats"], environment=environment, check=False)
        found = _HITS.search(said)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def versions(self) -> dict[str, str]:
        """As ``versions_in``, of the builder image."""
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
        """Run a command where the sources, the tree and the recipe are mounted; what it printed.

        Raises CommandFailed, unless ``check`` is false, and DiskFull or MemoryExhausted where that was the reason. A
        disk of which next to nothing was left meanwhile is one, whatever the program said of it.
        """
        full: list[str] = []
        killed: list[str] = []
        before = memory_kills()

        def watch(line: str) -> None:
            if files.NO_ROOM.search(line):
                full.append(line.strip())
            if _KILLED.search(line):
                killed.append(line.strip())
            if on_line is not None:
                on_line(line)

        try:
            with files.least_room(self.home) as least:
                said = self._run_in(argv, environment or {}, watch, check=check, patience_s=patience_s)
        except CommandFailed as fault:
            # A line that nothing ends is not watched.
            full += [line.strip() for line in fault.tail.splitlines() if files.NO_ROOM.search(line)]
            if full:
                raise self._disk_full(full[0]) from fault
            # ninja ends with a status of its own, whatever a compiler ended with.
            if not killed and (times := memory_kills() - before):
                killed.append(f"the kernel killed {times} process{'es' if times > 1 else ''} meanwhile")
            if killed or fault.returncode == _STATUS_OF_KILLED:
                raise self._memory_exhausted(killed[0] if killed else fault.found) from fault
            if least[0] < _NEXT_TO_NOTHING_MIB << 20:
                *_, last = fault.found, *(line.strip() for line in fault.tail.splitlines() if line.strip())
                raise self._disk_full(f"{least[0] >> 20} MiB were left there when a program failed ({last})") from fault
            raise
        if full and not check:
            raise self._disk_full(full[0])
        return said

    @property
    def _compiler_check(self) -> str:
        """``compiler_check`` of the builder image, which is asked once."""
        self._compilers = self._compilers or compiler_check(packages_in(self._client, self._image))
        return self._compilers

    def _disk_full(self, words: str) -> DiskFull:
        return DiskFull(
            "the disk became full while torch was being built",
            expected=f"room for objects in {self.home} and {self.cache}, and for the compiler's own files where the "
            "engine keeps its containers",
            found=words,
            fix="free some space there, or point build.folder in invoke.yaml at a larger disk; run the task again to "
            "go on from here",
        )

    def _memory_exhausted(self, found: str) -> MemoryExhausted:
        return MemoryExhausted(
            "memory ran out while torch was being built",
            expected=f"room for {self.jobs} compiler processes of 1.5 GiB each",
            found=found,
            fix="INVOKE_BUILD_JOBS=1 ./inv build-torch, or end what else takes memory; the task goes on from here",
        )

    def _run_in(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        check: bool,
        patience_s: float,
    ) -> str:
        return run_in(
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
            environment={
                **self._plan.environment,
                "CCACHE_DIR": "/usr/src/ccache",
                "CCACHE_DEPEND": "1",  # the compiler names the headers that it read: nothing is preprocessed twice
                "CCACHE_MAXSIZE": "10G",
                "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
                **({"CCACHE_COMPILERCHECK": self._compiler_check} if self._cached else {"CCACHE_DISABLE": "1"}),
                **environment,
            },
            workdir=_HOME,
            limit_s=_LIMIT_S,
            log=self.log,
            on_line=on_line,
            check=check,
            patience_s=patience_s,
            fix=f"the compiler's words are above, all of them in {self.log}; run the task again to go on from here",
        ).output


def overridden(given: Mapping[str, str], cache: str, said: str) -> dict[str, str]:
    """Which options that are on or off CMake made something else of, and what: by its cache, and what it printed.

    An option that depends on others (cmake_dependent_option) keeps its value in the cache where these are not so, but
    as INTERNAL, and is off. What no project declares is UNINITIALIZED: of that nothing is known.
    """
    cached = {name: (kind, value) for name, kind, value in _CACHED.findall(cache)}
    came_to = {name: value for name, (kind, value) in cached.items() if kind == "BOOL"}
    came_to |= {name: "OFF" for name, (kind, _) in cached.items() if kind == "INTERNAL"}
    came_to |= {name: value for name, value in _SUMMARY.findall(said) if _truth(value) is not None}
    found: dict[str, str] = {}
    for name, asked in given.items():
        wanted, is_now = _truth(asked), _truth(came_to.get(name, "unknown"))
        if None not in (wanted, is_now) and wanted is not is_now:
            found[name] = came_to[name]
    return found


def _truth(value: str) -> bool | None:
    """What CMake's ``if`` makes of a constant; None for anything else."""
    constant = value.upper()
    if constant in _TRUE:
        return True
    return False if constant in _FALSE or constant.endswith("-NOTFOUND") else None


def versions_in(client: docker.DockerClient, image: str, target: Architecture) -> dict[str, str]:
    """Packages of a builder image, with their versions, and what its compilers say of themselves.

    Nothing of the build is mounted: the engine would make a folder that is not there yet, as root.
    """
    said = [_ask(client, image, program, "--version")[:1] for program in ("clang++", f"{target.gnu}-g++")]
    return {**packages_in(client, image), "compiler": "; ".join(line for lines in said for line in lines)}


def packages_in(client: docker.DockerClient, image: str) -> dict[str, str]:
    """Packages of an image by NAME:ARCHITECTURE, with their versions."""
    listed = _ask(client, image, "dpkg-query", "--show", "--showformat=${Package}:${Architecture} ${Version}\\n")
    return dict(line.split(" ", 1) for line in listed if " " in line)


def compiler_check(packages: Mapping[str, str]) -> str:
    """What ccache takes for the compilers' identity: the packages that they are of, with their versions.

    The bytes of the program that is called say little: ``clang`` loads all that compiles from libclang-cpp and libLLVM,
    GCC's driver starts ``cc1plus`` and ``as``.
    """
    return "string:" + " ".join(
        f"{name}={version}" for name, version in sorted(packages.items()) if _COMPILERS.match(name)
    )


def _ask(client: docker.DockerClient, image: str, *argv: str) -> list[str]:
    return run_in(client, image, argv, architecture=host_architecture()).output.splitlines()


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it does not say."""
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
    """A file's text; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _short(what: str) -> str:
    """The file that a line of ninja's is about."""
    return what.rsplit("/", 1)[-1].removesuffix(".o")[:40]
