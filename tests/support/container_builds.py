"""Builds in the target's container: small programs with both compilers, and the extension wheel with pip."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.connect import connect
from engine.containers import run_in
from flow import main_job, pipelines
from flow.compilers import is_extension_cross_compiled
from flow.context import Context
from flow.native_compiler import native_compiler
from recipes import recipe
from recipes.qpu_ops import target
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
c++ -O1 templates.cpp -o templates
./plain
./templates
./lto
strip plain templates lto
file -L /usr/bin/gcc
"""


def made_workbench(config: Config) -> Mapping[str, Manifest]:
    """Build the development root and the workbench image of a finished build; return all manifests by step.

    If both are up to date, this does not wait for tests that build something else.
    """
    found = _up_to_date(config)
    if "workbench" not in found:
        with files.locked(config.build_root / "for-the-tests"):
            main_job.ready_workbench(config)
        found = _up_to_date(config)
    return found


def _up_to_date(config: Config) -> dict[str, Manifest]:
    """Return the manifests of the steps that would not run, by step."""
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
    assert len(made["native"]) == len(SOURCES) + 7


def container_and_cross_builds_agree(config: Config, workbench: Mapping[str, Manifest], folder: Path) -> None:
    """Assert that pip in the container builds the extension's wheel with the same files as cross-compilation."""
    with Context(config) as context:
        assert is_extension_cross_compiled(context)
        dev = workbench["dev"].facts
        made = target.build(
            context.client,
            target.container(dev["reference"], dev["image"], context.target, native_compiler(context)),
            recipe.load("qpu_ops"),
            replace(config, build=replace(config.build, folder=folder / "build")),
            suite=context.suite,
            torch_site=context.torch_site,
            libqpu=context.libqpu_stage,
            libqpu_prefix=workbench["libqpu"].facts["prefix"],
            folder=folder / "container",
            log=folder / "container.log",
        )
    assert "pip wheel" in (folder / "container.log").read_text()
    crossed = workbench["qpu-ops"].artefact(".whl").path
    assert made.name == crossed.name
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(crossed) as other:
        assert one.namelist() == other.namelist()
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []
