"""Unpack packages of native programs, which steps and tasks use, into one folder, without configuring them."""

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
    """Return the folder with the unpacked packages of the step ``name``."""
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
    """Return the step that extracts the packages in the packages.toml table with the step's name.

    The table's name has ``_`` where the step's has ``-``. ``foreign`` lists package architectures in addition to this
    PC's. ``finish`` completes the folder; ``code`` is the module that defines ``finish``.
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
