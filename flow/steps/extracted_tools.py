"""Native programs that steps and tasks run: packages that are extracted into one folder and not configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flow import roots
from flow.context import Context
from images import rootfs
from images.flavour import packages_for
from toolchain.architecture import Architecture
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def folder(context: Context, name: str) -> Path:
    """The folder of the packages of the step ``name``."""
    return context.root / name


def step(
    context: Context,
    name: str,
    title: str,
    *,
    code: str = __name__,
    foreign: tuple[Architecture, ...] = (),
    finish: Callable[[Path], None] = lambda _: None,
) -> Step:
    """Extract the packages of the table of packages.toml that has the step's name, with ``_`` for ``-``.

    ``foreign`` are architectures of packages in addition to this PC's. ``finish`` completes the folder, and ``code`` is
    the module that defines it.
    """
    packages = packages_for(name.replace("-", "_"), context.image)

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, name, packages, needs["mirror"], (context.native, *foreign))
        rootfs.build_tools(spec, folder(context, name), context.log(name), standing_in=())
        finish(folder(context, name))
        return Made(facts={"packages": list(packages)})

    return Step(
        name=name,
        title=title,
        code=code,
        inputs={"packages": " ".join(packages)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if folder(context, name).is_dir() else "its folder is missing",
    )
