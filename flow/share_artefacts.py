"""``push-artefacts`` and ``pull-artefacts``: the team's registry and this machine's artefact cache.

A team's machines may have builders with other packages, and then keep a wheel each under the same recipe's key. Where
this machine has a builder, the key of what it would build is known whole, and that very wheel is asked for first: the
one that a build takes instead of building. The one that was pushed last is for who has no builder, or is the only one.
"""

from __future__ import annotations

import contextlib

import docker.errors

from engine.connect import connect
from recipes.torch import build as torch_build
from recipes.torch import provenance, resolve
from recipes.tvm_ffi import build as tvm_ffi_build
from recipes.tvm_ffi import kept as tvm_ffi
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, RecipeInvalid, ReferenceNotFound, UserError
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX
from wheels import artefacts

_WITHOUT_PROVENANCE = (tvm_ffi.NAME,)
"""Recipes that write no statement: nobody can ask for one."""


def wanted(config: Config) -> list[tuple[str, str]]:
    """Name and key of every artefact that this checkout, so configured, would build. Raises RecipeInvalid for none."""
    key = resolve.key(config)
    if not key:
        raise RecipeInvalid(
            "no recipe makes an artefact for this configuration",
            expected="a release and a variant that recipes/torch builds",
            found=f"{config.image.label}, variant {config.torch.variant}, source {config.torch.source}",
            fix="./inv build-torch --plan says what is in the way",
        )
    ffi = tvm_ffi.key(config) if config.remote.ffi_in_image else ""
    return [("torch", key), *([(tvm_ffi.NAME, ffi)] if ffi else [])]


def offered(config: Config) -> list[tuple[str, str]]:
    """Name and key of what a team may keep beside those: fetched where it is there, and no fault where it is not."""
    key = tvm_ffi.key(config)
    return [(tvm_ffi.NAME, key)] if key and not config.remote.ffi_in_image else []


def push_artefacts(config: Config, *, registry: str | None = None, user: str | None = None) -> list[artefacts.Shared]:
    """Send all that is kept here. Raises as ``artefacts.push``."""
    return artefacts.push(config, registry=registry, user=user)


def pull_artefacts(config: Config, *, registry: str | None = None, user: str | None = None) -> list[artefacts.Shared]:
    """Fetch what this checkout would build, and what is offered beside. Raises as ``artefacts.pull``."""
    pulled = [_pull(config, name, key, registry=registry, user=user) for name, key in wanted(config)]
    for name, key in offered(config):
        with contextlib.suppress(ReferenceNotFound):
            pulled.append(_pull(config, name, key, registry=registry, user=user))
    return pulled


def whole_key(config: Config, name: str, key: str) -> str:
    """The key of what this machine's builder would make of a recipe's key; empty where there is no builder.

    A builder that cannot be asked for what is in it is told of.
    """
    step = {"torch": "torch-builder", tvm_ffi.NAME: "tvm-ffi-builder"}[name]
    made = Manifest.read(config.target_root / f"{step}{MANIFEST_SUFFIX}")
    if made is None:
        return ""
    try:
        if name == tvm_ffi.NAME:
            return tvm_ffi_build.artefact_key(key, made.artefact(".tar").sha256)
        return provenance.artefact_key(key, _versions(config, made))
    except UserError as fault:
        progress.warn(f"{fault.summary}: {name} is asked for by its recipe alone")
    return ""


def _versions(config: Config, made: Manifest) -> dict[str, str]:
    """What is in torch's builder. Raises EngineUnavailable, ArtefactMissing, CommandFailed."""
    reference = config.image_reference(made.step)
    with contextlib.closing(connect()) as client:
        try:
            found = client.images.get(reference).id
        except (docker.errors.ImageNotFound, docker.errors.NullResource):
            found = None
        if found != made.facts["image"]:
            raise ArtefactMissing(f"the engine no longer has the {made.step} image that was made here")
        return torch_build.versions_in(client, reference, config.image.target)


def _pull(config: Config, name: str, key: str, *, registry: str | None, user: str | None) -> artefacts.Shared:
    """The very one that a build would take, where that is known and there; else the recipe's that was pushed last."""
    whole, stated = whole_key(config, name, key), name not in _WITHOUT_PROVENANCE
    if whole:
        with contextlib.suppress(ReferenceNotFound):
            return artefacts.pull(config, name, whole, registry=registry, user=user, stated=stated)
    pulled = artefacts.pull(config, name, key, registry=registry, user=user, stated=stated)
    if whole:
        progress.say(f"    {name}: none there is of this machine's builder; this one was pushed last of the recipe")
    return pulled
