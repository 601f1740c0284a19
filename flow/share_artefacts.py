"""``pull-artefacts``: pull wheels from a team's registry into the artefact cache.

A team's builder images can contain different packages, so there can be several wheels with the same recipe key. If
this machine has a builder image, the complete key of the wheel that the image would build is known, and that wheel is
requested first. If there is no such image, or the registry does not have that wheel, the wheel that was pushed last for
the recipe is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.connect import connect, image_id
from recipes.companions import build as companions
from recipes.companions import locate
from recipes.torch import build as torch_build
from recipes.torch import provenance, resolve
from recipes.tvm_ffi import locate as tvm_ffi
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, RecipeInvalid, ReferenceNotFound, UserError
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX
from wheels import artefacts

_WITHOUT_PROVENANCE = (tvm_ffi.NAME, companions.NAME)
"""Recipes that do not write a provenance statement."""


def wanted(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Yield each artefact's name and key for this configuration, and whether the artefact is required.

    Optional artefacts may be missing from the registry. The key of torchvision and torchaudio depends on the available
    torch wheel. This key is therefore computed last, when the caller may already have pulled that wheel. Raises
    RecipeInvalid if no recipe builds torch.
    """
    key = resolve.key(config)
    if not key:
        raise RecipeInvalid(
            "there is no recipe for this configuration",
            expected="a release and a variant that recipes/torch builds",
            found=f"{config.image.label}, variant {config.torch.variant}, source {config.torch.source}",
            fix="run ./inv build-torch --plan to see the reason",
        )
    yield "torch", key, True
    if ffi := tvm_ffi.key(config):
        yield tvm_ffi.NAME, ffi, config.remote.ffi_in_image
    if matching := locate.key(config):
        yield companions.NAME, matching, False


def pull_artefacts(config: Config) -> list[artefacts.Shared]:
    """Pull the artefacts that ``wanted`` yields; skip optional artefacts that the registry lacks.

    Raises the same exceptions as ``artefacts.pull``.
    """
    pulled = []
    for name, key, is_required in wanted(config):
        try:
            pulled.append(_pull(config, name, key))
        except ReferenceNotFound:
            if is_required:
                raise
    return pulled


def artefact_key(config: Config, name: str, key: str) -> str:
    """Return the key of the artefact that this machine's builder image would produce.

    Returns an empty string if there is no builder image. Prints a warning if the image's contents cannot be read.
    """
    step = {"torch": "torch-builder", tvm_ffi.NAME: "tvm-ffi-builder", companions.NAME: "builder"}[name]
    made = Manifest.read(config.target_root / f"{step}{MANIFEST_SUFFIX}")
    if made is None:
        return ""
    try:
        if name in _WITHOUT_PROVENANCE:
            return artefacts.key_of(key, made.artefact(".tar").sha256)
        return provenance.artefact_key(key, _versions(config, made))
    except UserError as fault:
        progress.warn(f"{fault.summary}: only the recipe key is used to look up {name}")
    return ""


def _versions(config: Config, made: Manifest) -> dict[str, str]:
    """Return the versions of the packages and compilers in torch's builder image.

    Raises EngineUnavailable, ArtefactMissing or CommandFailed.
    """
    reference = config.image_reference(made.step)
    with contextlib.closing(connect()) as client:
        if image_id(client, reference) != made.facts["image"]:
            raise ArtefactMissing(f"the engine no longer has the image {made.step}")
        return torch_build.versions_in(client, reference, config.image.target)


def _pull(config: Config, name: str, key: str) -> artefacts.Shared:
    """Pull the artefact that a build would use.

    If the registry lacks this artefact, pull the artefact that was pushed last for the recipe.
    """
    exact, stated = artefact_key(config, name, key), name not in _WITHOUT_PROVENANCE
    if exact:
        with contextlib.suppress(ReferenceNotFound):
            return artefacts.pull(config, name, exact, stated=stated)
    pulled = artefacts.pull(config, name, key, stated=stated)
    if exact:
        note = "the registry has no artefact for this builder; the recipe's latest artefact was pulled instead"
        progress.say(f"    {name}: {note}")
    return pulled
