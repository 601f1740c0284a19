"""``build-wheel``: build a wheel of any Python package for the target in the development image."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from engine.connect import connect
from flow import extracted_tools, main_job, pipelines
from flow.compilers import native_compiler
from flow.context import Context
from images import build_tools, rust
from images.recorded_sources import sources_of
from toolchain import files, progress
from toolchain.config import Config
from toolchain.manifest import require
from wheels import build, cargo_settings
from wheels import distribution as distribution_wheels
from wheels.faults import RustMissing
from wheels.request import Options, Wanted


def build_wheel(config: Config, text: str, *, folder: Path, options: Options | None = None) -> build.Done:
    """Build one wheel for the target and put it into the first wheelhouse.

    ``text`` is NAME==VERSION or a path relative to ``folder``. Raises SourceUnavailable if ``text`` is invalid, and
    the exceptions of ``wheels.build.build`` and of the main job.
    """
    wanted = Wanted.parse(text, folder=folder)
    main_job.ready_workbench(config, task="./inv build-wheel")
    context = Context(config)
    mounts = native_compiler(context)
    if mounts.paths:
        mounts = build_tools.together(mounts, build_tools.tool_mounts(context.tools, context.target, context.suite))
    container = build.BuildContainer(
        image=config.image_reference("workbench"),
        mounts=mounts,
        wheels=build_requirements(config),
        sources=sources_of(require(pipelines.main_job(context).manifest_path("mirror"), "build-image")),
    )
    with contextlib.closing(connect()) as client:
        try:
            return build.build(client, container, wanted, options or Options(), config)
        except RustMissing:
            if not mounts.paths:
                raise
            progress.say(f"    {wanted} contains Rust code, so the build is repeated with a Rust toolchain")
        return build.build(client, _with_rust(context, container), wanted, options or Options(), config)


def _with_rust(context: Context, container: build.BuildContainer) -> build.BuildContainer:
    """Return the container with mounts for this PC's Cargo settings and the native Rust toolchain.

    The toolchain is extracted when it is used for the first time.
    """
    settings = cargo_settings.of_this_pc()
    folder = extracted_tools.rust_toolchain(context)
    mounts = build_tools.together(rust.rust_mounts(folder, context.target, context.suite), settings)
    return dataclasses.replace(container, mounts=build_tools.together(container.mounts, mounts))


def build_requirements(config: Config) -> list[Path]:
    """Return wheels that a build may require but the wheelhouses lack.

    These are the wheel of torch and the wheels that are made from packages of the distribution.
    """
    context = Context(config)
    manifests = pipelines.main_job(context, with_workbench=True)
    torch = require(manifests.manifest_path("torch"), "build-image").facts["wheel"]
    root = require(manifests.manifest_path("dev"), "build-image").artefact(".tar")
    folder = config.target_root / "distribution-wheels" / root.sha256[:16]
    with files.locked(config.target_root / "work", lock_file=False):  # the main job has released the build lock
        if not folder.is_dir():
            with progress.step("make wheels from the distribution's numpy, SciPy and pandas"):
                files.remove(folder.parent)
                folder.parent.mkdir(parents=True)
                distribution_wheels.make(root.path, folder, config.image.target, context.suite)
    return [*([Path(torch)] if torch else []), *sorted(folder.glob("*.whl"))]
