"""Unpack packages into one folder without configuring them. The packages contain native programs that tasks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flow import roots
from flow.build_lock import build_lock
from flow.context import Context, for_all_targets
from flow.steps import mirror
from images import rootfs, rust
from images.flavour import packages_for
from toolchain.architecture import Architecture
from toolchain.config import Config
from toolchain.manifest import Manifest
from toolchain.steps import Made, Pipeline, Step

_CPU_SUITE = "bookworm"
"""The suite whose emulator supports plugins. Trixie's emulator is statically linked and cannot load plugins."""


def cpu_tools(config: Config) -> Path:
    """Return the folder with the programs that examine machine code; extract them if necessary.

    The programs are llvm-mca, llvm-objdump, and an emulator that supports plugins. If a step fails, raises the step's
    UserError.
    """
    with Context(for_all_targets(config, _CPU_SUITE)) as context:
        return ready(context, "cpu-tools", "emulator with plugins and LLVM")


def rust_toolchain(context: Context) -> Path:
    """Return the folder with the native Rust toolchain and the scripts that run its programs in a container."""
    return ready(
        context,
        "rust",
        "Rust toolchain",
        foreign=(context.target,),
        finish=lambda folder: rust.add_programs(folder, context.suite),
    )


def ready(
    context: Context,
    name: str,
    title: str,
    *,
    foreign: tuple[Architecture, ...] = (),
    finish: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Return the folder with the unpacked packages of the step ``name``; extract them if necessary.

    packages.toml lists the packages in a table that has the step's name, except that ``_`` replaces ``-``. The packages
    may be for this PC's architecture and those in ``foreign``. ``finish`` is called with the folder after the packages
    have been unpacked. If a step fails, raises the step's UserError.
    """
    packages = packages_for(name.replace("-", "_"), context.image)
    folder = context.root / name

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, name, packages, needs["mirror"], (context.native, *foreign))
        rootfs.build_tools(spec, folder, context.log(name), standing_in=())
        finish(folder)
        return Made(facts={"packages": list(packages)})

    step = Step(
        name=name,
        title=title,
        code=__name__,
        inputs={"packages": " ".join(packages)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder.is_dir() else "its folder is missing",
    )
    with build_lock(context.root):
        pipeline = Pipeline(context.root, [mirror.step(context), step])
        pipeline.execute(pipeline.plan())
    return folder
