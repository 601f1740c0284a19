"""``build-tvm-ffi``: apache-tvm-ffi's wheel for boards that the package index has none for, cross-compiled.

::

    mirror ── tvm-ffi-builder ──┐
    (package index: source) ────┴── tvm-ffi-wheel

The package's own build back end makes the wheel; it is told that it works for another machine by what Python tells it
of the target (the variables that CPython's own cross builds use) and by CMake's options. The steps share the main
job's folder and mirror; the wheel goes to the wheelhouse, from where ``serve-wheels`` hands it to boards, and into the
artefact cache under the key of all that made it, which spares the next build of the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from engine.containers import run_in
from engine.start import ensure_running
from flow import build_wheel as any_wheel
from flow import main_steps as flow
from images import rootfs
from images.flavour import Suite, packages_for
from recipes import recipe
from recipes.libqpu.build import cross_options
from recipes.torch import audit, resolve
from recipes.tvm_ffi import kept, source
from toolchain import files, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.errors import WheelUnusable
from toolchain.jobs import compile_jobs
from toolchain.manifest import Artefact, Manifest, all_warnings
from toolchain.steps import Decision, Made, Pipeline, Step
from wheels import artefacts
from wheels import find as wheels

HOME = "/usr/src/tvm-ffi"
"""Where everything lies in the container, whatever the checkout is called."""
_LIMIT_S = 3 * 3600.0


@dataclass(frozen=True)
class Done:
    """A wheel in the wheelhouse, and the seconds of the whole."""

    wheel: Artefact
    manifests: tuple[Manifest, ...]
    seconds: float
    warnings: tuple[str, ...]

    @property
    def row(self) -> progress.Row:
        """Its line of the final table."""
        facts = self.manifests[-1].facts
        return progress.row_of(self.wheel.path.name, self.wheel, self.seconds, f"{facts['elf files']} ELF files")


class FfiFlow(flow.Flow):
    """The steps for one configuration. Raises PlatformMismatch, RecipeInvalid for a target that it is not for."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = recipe.load(kept.NAME)
        kept.require_target(self.recipe, self.target, self.suite)

    def pipeline(self, *, workbench: bool = False) -> Pipeline:
        """The steps; there is no workbench among them."""
        del workbench
        return Pipeline(self.root, (self._mirror(), self._ffi_builder(), self._ffi_wheel()))

    def key(self) -> str:
        """SHA-256 of what makes the wheel, as far as this repository states it."""
        return kept.recipe_key(self.recipe, self.target, self.suite)

    def _ffi_builder(self) -> Step:
        packages = packages_for("tvm_ffi_builder", self.image)

        def action(needs: Mapping[str, Manifest]) -> Made:
            spec = self.root_spec("tvm-ffi-builder", packages, needs["mirror"], (self.native, self.target))
            tar = self.root / "tvm-ffi-builder.tar"
            rootfs.build_native_tar(dataclasses.replace(spec, keyring_package=""), tar, self.log("tvm-ffi-builder"))
            return self._loaded("tvm-ffi-builder", tar, self.native)

        return Step(
            name="tvm-ffi-builder",
            title="builder image of TVM's FFI",
            inputs=self._root_inputs(packages),
            needs=("mirror",),
            action=action,
            missing=self._image_missing("tvm-ffi-builder"),
        )

    def _ffi_wheel(self) -> Step:
        def action(needs: Mapping[str, Manifest]) -> Made:
            whole_key = artefact_key(self.key(), needs["tvm-ffi-builder"].artefact(".tar").sha256)
            if found := artefacts.get(self.config, self.recipe.name, whole_key):
                return self._from_cache(found)
            log = self.log("tvm-ffi-wheel")
            folder = self.config.build_root / "sources"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
            with progress.step(f"fetch {self.recipe.settings['distribution']} {self.recipe.settings['version']}"):
                tools = source.tools(self.recipe, self.suite, folder, log)
                archive = source.obtain(self.recipe, tools, folder, log)
            with files.scratch_folder(self.root / "work", "tvm-ffi") as scratch:
                made = self._compiled(archive, tools, scratch, log)
                seen = examine(made, self.target, self.suite)
                place = self.root / "wheels" / made.name
                place.parent.mkdir(parents=True, exist_ok=True)
                made.replace(place)
            artefacts.put(self.config, self.recipe.name, whole_key, [place], recipe=self.key())
            return Made((place,), facts=self._facts(place, seen))

        return Step(
            name="tvm-ffi-wheel",
            title="wheel of TVM's FFI",
            inputs={"key": self.key(), "driver": flow.driver_fingerprint("tvm_ffi")},
            needs=("tvm-ffi-builder",),
            action=action,
        )

    def _from_cache(self, found: Sequence[Path]) -> Made:
        """A wheel that the same recipe and builder made before, here or where it was pulled from; audited again."""
        (wheel,) = [path for path in found if path.suffix == ".whl"]
        seen = examine(wheel, self.target, self.suite)
        place = self.root / "wheels" / wheel.name
        with files.replacing(place) as aside:
            shutil.copyfile(wheel, aside)
        progress.say(f"    {wheel.name}: from the artefact cache")
        return Made((place,), facts={**self._facts(place, seen), "cache": wheel.parent.name})

    def _facts(self, wheel: Path, seen: audit.Examined) -> dict[str, Any]:
        return {
            "key": self.key(),
            "wheel": wheel.name,
            "source": source.identity(self.recipe),
            "elf files": seen.elf_files,
            "newest symbols": dict(seen.newest),
        }

    def _compiled(self, archive: Path, tools: Path, scratch: Path, log: Path) -> Path:
        """Run inside/build in the builder image; the wheel, not yet looked into."""
        cache = self.config.build_root / "ccache"
        cache.mkdir(parents=True, exist_ok=True)
        owner = scratch.stat()
        script = f'trap \'chown -R "$0" {HOME} /usr/src/ccache\' EXIT; /usr/src/recipe/inside/build "$1"'
        with progress.bar("compile TVM's FFI") as bar:
            lines = 0

            def tell(line: str) -> None:
                nonlocal lines
                lines += 1
                bar.update(lines, note=line.strip()[:60])

            run_in(
                self.client,
                self.config.image_reference("tvm-ffi-builder"),
                ["sh", "-euc", script, f"{owner.st_uid}:{owner.st_gid}", f"/usr/src/{archive.name}"],
                architecture=host_architecture(),
                binds=[
                    f"{scratch}:{HOME}:rw",
                    f"{archive.resolve()}:/usr/src/{archive.name}:ro",
                    f"{tools.resolve()}:/usr/src/tools:ro",
                    f"{self.recipe.folder}:/usr/src/recipe:ro",
                    f"{cache}:/usr/src/ccache:rw",
                ],
                environment=self._environment(),
                workdir=HOME,
                limit_s=_LIMIT_S,
                log=log,
                on_line=tell,
                fix=f"the compiler's words are above, all of them in {log}; the recipe is in recipes/tvm_ffi",
            )
        out = scratch / "out"
        self.recipe.require_outputs(out)
        return next(out.glob(self.recipe.outputs[0]))

    def _environment(self) -> dict[str, str]:
        target, python = self.target, self.suite.python
        options = {**self.recipe.tables["options"]}
        # The package maps its paths in one of its libraries only.
        options["CMAKE_CXX_FLAGS"] = f"{options.get('CMAKE_CXX_FLAGS', '')} -ffile-prefix-map={HOME}/source=.".strip()
        settings = {
            "CMAKE_C_COMPILER": f"{target.gnu}-gcc",
            "CMAKE_C_COMPILER_LAUNCHER": "ccache",
            "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
            "Python_EXECUTABLE": "/usr/bin/python3",
            "Python_INCLUDE_DIR": f"/usr/include/python{python}",
            "Python_LIBRARY": f"/usr/lib/{target.gnu}/libpython{python}.so",
            **options,
        }
        crossed = [item for item in cross_options(target, "/") if "_INSTALL_" not in item]
        return {
            "CMAKE_ARGS": shlex.join([*crossed, *(f"-D{name}={value}" for name, value in settings.items())]),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(compile_jobs(self.config.build)),
            "_PYTHON_HOST_PLATFORM": target.wheel_platform.replace("_", "-"),
            "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{target.gnu}",
            "PYTHONPATH": "/usr/src/tools",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SOURCE_DATE_EPOCH": self.recipe.settings["epoch"],
            "CCACHE_DIR": "/usr/src/ccache",
            "CCACHE_COMPILERCHECK": "content",
            "LC_ALL": "C.UTF-8",
        }


def artefact_key(recipe_key: str, builder: str) -> str:
    """The key in the artefact cache: of the recipe and of the root (its SHA-256) that the compiler is in."""
    return hashlib.sha256(f"{recipe_key}\n{builder}".encode()).hexdigest()


def examine(wheel: Path, target: Architecture, suite: Suite) -> audit.Examined:
    """Audit the wheel as torch's is; it must be stripped, and hold no path of its build.

    Raises WheelUnusable, PlatformMismatch.
    """
    fix = "the recipe is in recipes/tvm_ffi; ./inv build-tvm-ffi builds it anew"
    try:
        seen = audit.examine(wheel, target, suite, flags="")
    except WheelUnusable as fault:
        fault.fix = fix
        raise
    faults = [] if seen.elf_files else ["it has no library at all"]
    with zipfile.ZipFile(wheel) as archive:
        for name, content in wheels.elf_members(archive):
            if ELFFile(content).get_section_by_name(".symtab") is not None:
                faults.append(f"{name} has a symbol table")
            content.seek(0)
            if HOME.encode() in content.read():
                faults.append(f"{name} holds the path of its build")
    if faults:
        raise WheelUnusable(
            f"{wheel.name} is not fit to be used",
            expected="stripped libraries that tell nothing of where they were built",
            found="; ".join(faults),
            fix=fix,
        )
    return seen


def plan(config: Config) -> list[Decision]:
    """Which steps would run, and why."""
    with FfiFlow(config) as made:
        return made.pipeline().plan()


def build_tvm_ffi(config: Config) -> Done:
    """Build the wheel, or find it built, and put it into the first wheelhouse. Raises the step's UserError."""
    began = time.monotonic()
    with FfiFlow(config) as made:
        ensure_running(config)
        with flow.alone(config.target_root):
            pipeline = made.pipeline()
            manifests = tuple(pipeline.execute(pipeline.plan()))
    wheel = manifests[-1].artefact(".whl").path
    wheelhouse = resolve.wheelhouses(config)[0]
    wheelhouse.mkdir(parents=True, exist_ok=True)
    placed, warnings = any_wheel.place(wheel, wheelhouse)
    for warning in warnings:
        progress.warn(warning)
    told = (*all_warnings(manifests), *warnings)
    return Done(Artefact.of(placed), manifests, time.monotonic() - began, told)
