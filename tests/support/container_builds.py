"""Builds in the target's container: small programs with both compilers, and the extension wheel with pip."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.connect import connect
from engine.containers import run_in
from flow import main_job, pipelines
from flow.compilers import is_extension_cross_compiled, native_compiler
from flow.context import Context
from flow.steps import qpu_ops
from recipes import recipe
from recipes.qpu_ops import target
from recipes.recipe import Recipe
from toolchain import files
from toolchain.config import Config
from toolchain.manifest import Manifest

SOURCES = {
    "plain.c": '#include <stdio.h>\n#include <math.h>\nint main(void) { printf("%f\\n", sin(1.0)); return 0; }\n',
    "templates.cpp": "#include <map>\n#include <memory>\n#include <string>\n"
    "int main() { std::map<std::string, std::shared_ptr<std::string>> m;"
    ' m.emplace("a", std::make_shared<std::string>("b")); return *m.at("a") == "b" ? 0 : 1; }\n',
}

COMPILE = """
export SOURCE_DATE_EPOCH=1735689600
gcc -O2 -g -c plain.c -o plain.o
gcc -O3 -ffast-math -mcpu=cortex-a53 -c plain.c -o fast.o
gcc -O2 -flto -frandom-seed=1 plain.c -o lto -lm
/usr/bin/gcc -E plain.c -o plain.i
gcc -O2 plain.c -o plain -lm
g++ -O2 -g -ffile-prefix-map=/root/work=. -c templates.cpp -o templates.o
c++ -O1 -x c++ -c plain.c -o cxx.o
c++ templates.o -o templates
./plain
./templates
./lto
strip plain templates lto
file -L /usr/bin/gcc
"""


def made_workbench(config: Config) -> Mapping[str, Manifest]:
    """Build the development root and the workbench image of a finished build; return all manifests by step.

    If both are up to date, this function does not wait for tests that build something else.
    """
    found = _up_to_date(config)
    if "workbench" not in found:
        with files.locked(config.build_root / "for-the-tests"):
            main_job.ready_workbench(config)
        found = _up_to_date(config)
    return found


def _up_to_date(config: Config) -> dict[str, Manifest]:
    """Return the manifests of the steps that are up to date, by step."""
    with Context(config) as context:
        decisions = pipelines.main_job(context, with_workbench=True).plan()
    return {item.step.name: item.previous for item in decisions if item.previous is not None and not item.runs}


def both_compilers_agree(config: Config, workbench: Mapping[str, Manifest], folder: Path) -> None:
    """Assert that the native compiler in the container generates the same bytes as the emulated one."""
    made = {}
    for kind, mounts in (("native", native_compiler(Context(config)).binds()), ("emulated", [])):
        place = folder / kind
        place.mkdir()
        for name, text in SOURCES.items():
            (place / name).write_text(text)
        with contextlib.closing(connect()) as client:
            done = run_in(
                client,
                workbench["dev"].facts["reference"],
                ["sh", "-euc", COMPILE],
                architecture=config.image.target,
                binds=[f"{place}:/root/work:rw", *mounts],
                workdir="/root/work",
            )
        assert "0.841471" in done.output
        assert ("x86-64" in done.output) == (kind == "native")
        made[kind] = {path.name: files.sha256_of(path) for path in sorted(place.iterdir())}
    assert made["native"] == made["emulated"]
    assert len(made["native"]) == len(SOURCES) + 8


SMALL_MODULE = """
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>
#include <qpu/backend.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("version", &qpu::version);
    module.def("device", [] { return c10::Device(c10::kCPU).str(); });
}
"""


def small_recipe(folder: Path) -> Recipe:
    """Copy the extension's recipe, and replace its C++ sources with small ones.

    Each source of a Python module is replaced with a small module, and every other source with one function.
    """
    data = recipe.load("qpu_ops")
    shutil.copytree(data.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for path in (folder / "csrc").rglob("*.cpp"):
        is_module = path.stem in ("bindings", "module")
        path.write_text(SMALL_MODULE if is_module else f"int {path.stem}(int x) {{ return x + 1; }}\n")
    return replace(data, folder=folder)


def container_and_cross_builds_agree(
    config: Config, workbench: Mapping[str, Manifest], folder: Path, *, small: bool = False
) -> None:
    """Assert that pip in the container builds the extension's wheel with the same files as cross-compilation.

    If ``small`` is set, both build ``small_recipe``; otherwise, pip's wheel is compared with that of the main job.
    """
    data = small_recipe(folder / "recipe") if small else recipe.load("qpu_ops")
    with Context(config) as context:
        assert is_extension_cross_compiled(context)

        def build(place: target.Place, name: str) -> Path:
            return target.build(
                context.client,
                place,
                data,
                replace(config, build=replace(config.build, folder=folder / "build")),
                suite=context.suite,
                torch_site=context.torch_site,
                libqpu=context.libqpu_stage,
                libqpu_prefix=workbench["libqpu"].facts["prefix"],
                folder=folder / name,
                log=folder / f"{name}.log",
            )

        dev = workbench["dev"].facts
        made = build(
            target.container(dev["reference"], dev["image"], context.target, native_compiler(context)), "container"
        )
        crossed = workbench["qpu-ops"].artefact(".whl").path
        if small:
            crossed = build(qpu_ops.place(context, workbench), "crossed")
    assert "pip wheel" in (folder / "container.log").read_text()
    assert made.name == crossed.name
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(crossed) as other:
        assert one.namelist() == other.namelist()
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []
