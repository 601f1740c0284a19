"""``push-artefacts`` and ``pull-artefacts``: the team's registry and this machine's artefact cache."""

from __future__ import annotations

import contextlib

from recipes import artefacts
from recipes.torch import resolve
from recipes.tvm_ffi import kept as tvm_ffi
from toolchain.config import Config
from toolchain.errors import RecipeInvalid, ReferenceNotFound

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
            mend="./inv build-torch --plan says what is in the way",
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

    def pull(name: str, key: str) -> artefacts.Shared:
        stated = name not in _WITHOUT_PROVENANCE
        return artefacts.pull(config, name, key, registry=registry, user=user, stated=stated)

    pulled = [pull(name, key) for name, key in wanted(config)]
    for name, key in offered(config):
        with contextlib.suppress(ReferenceNotFound):
            pulled.append(pull(name, key))
    return pulled
