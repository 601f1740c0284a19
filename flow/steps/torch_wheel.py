"""Compile the torch wheel from source, or get it from the artefact cache.

The step uses the recipe's key (``Plan.key``). The key does not include this project's code, so that a changed message
does not cause half an hour of compilation. Only the finished and audited wheel and its provenance are stored outside
the target's folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flow.context import Context
from recipes import recipe
from recipes.torch import audit, provenance, resolve
from recipes.torch import build as building
from recipes.torch import source as sources
from toolchain import files, progress
from toolchain.errors import ArtefactDamaged, UserError
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step
from wheels import artefacts


def plan_of(context: Context) -> building.Plan:
    """Return the recipe's plan for this configuration. Raises RecipeInvalid."""
    return building.Plan.of(recipe.load("torch"), context.config, context.suite)


def step(context: Context, *, again: bool = False) -> Step:
    """Return the step that builds the wheel. With ``again``, the step ignores wheels in the artefact cache."""
    plan = plan_of(context)
    key = plan.key(sources.identity(plan.recipe, context.suite, context.config.torch.source))

    def action(needs: Mapping[str, Manifest]) -> Made:
        builder = builder_of(context, needs)
        versions = builder.versions()
        artefact_key = provenance.artefact_key(key, versions)
        if not again and (cached := artefacts.get(context.config, plan.recipe.name, artefact_key)):
            return _from_cache(context, cached, key)
        products, began = resolve.products(context.config), time.time()
        with files.scratch_folder(context.root, "torch-wheel") as scratch:
            built = builder.build(scratch)
            seen = audit.examine(built.wheel, context.target, context.suite, flags=plan.flags)
            statement = provenance.write(
                built,
                plan,
                source_of(context, needs["torch-source"]),
                key=key,
                versions=versions,
                began=began,
                path=provenance.path_for(built.wheel),
            )
            placed = place([built.wheel, built.symbols, statement], products)
        artefacts.put(context.config, plan.recipe.name, artefact_key, placed, recipe=key)
        remove_replaced_trees(builder)
        more = {
            "vendored": [item["name"] for item in built.vendored],
            "ccache": {"hits": built.cache_hits, "calls": built.cache_calls},
        }
        return _made(placed, key, built.wheel, seen, more)

    return Step(
        name="torch-wheel",
        title="torch wheel from source",
        inputs={"key": key},
        needs=("torch-builder", "torch-source"),
        action=action,
        missing=_changed_product,
    )


def _changed_product(made: Manifest) -> str:
    changed = (item.path.name for item in made.artefacts if files.sha256_of(item.path) != item.sha256)
    return next((f"{name} has changed since it was made" for name in changed), "")


def source_of(context: Context, made: Manifest) -> sources.Source:
    """Return the source recorded in the manifest of ``torch-source``."""
    return sources.Source(
        kind=made.facts["kind"],
        folder=context.config.build_root / "sources" / made.facts["folder"],
        identity=made.facts["identity"],
        files=made.facts["files"],
    )


def builder_of(context: Context, needs: Mapping[str, Manifest]) -> building.Builder:
    """Return a builder for the image and the source in the manifests of ``torch-builder`` and ``torch-source``."""
    reference, image_id = context.config.image_reference("torch-builder"), needs["torch-builder"].facts["image"]
    source = source_of(context, needs["torch-source"])
    return building.Builder(context.client, reference, image_id, plan_of(context), source, context.log("torch-wheel"))


def _from_cache(context: Context, cached: Sequence[Path], key: str) -> Made:
    """Audit and copy the cached wheel.

    This wheel was built, here or elsewhere, with the same recipe, compiler and packages.
    """
    (wheel,) = [path for path in cached if path.suffix == ".whl"]
    stated = provenance.read(provenance.path_for(wheel), wheel).get("recipeKey")
    if stated != key:
        raise ArtefactDamaged(
            f"the provenance of the cached {wheel.name} does not contain the recipe key of its folder",
            expected=f"recipeKey {key}",
            found=str(stated or "none"),
            fix=f"delete {wheel.parent} and run the task again",
        )
    seen = audit.examine(wheel, context.target, context.suite, flags=plan_of(context).flags)
    products = resolve.products(context.config)
    with files.room_for(wheel.name, context.root), files.scratch_folder(context.root, "torch-wheel") as scratch:
        for path in cached:
            shutil.copyfile(path, scratch / path.name)
        placed = place([scratch / path.name for path in cached], products)
    progress.say(f"    {wheel.name}: copied from the artefact cache")
    return _made(placed, key, wheel, seen, {"cache": wheel.parent.name})


def _made(placed: tuple[Path, ...], key: str, wheel: Path, seen: audit.Examined, more: Mapping[str, Any]) -> Made:
    facts = {"key": key, "wheel": wheel.name, "elf files": seen.elf_files, "newest symbols": dict(seen.newest)}
    return Made(placed, facts={**facts, **more}, warnings=seen.warnings)


def place(made: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Move a wheel and its accompanying files into a folder on the same disk; return their new paths.

    The old provenance is removed first and the new one is moved last. Therefore, even after an interruption, the
    folder never contains a wheel with the provenance of another wheel. A wheel without provenance is not used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(made, key=lambda path: path.name.endswith(artefacts.PROVENANCE))
    for path in ordered:
        if path.name.endswith(artefacts.PROVENANCE):
            files.remove(folder / path.name)
    for path in ordered:
        path.replace(folder / path.name)
    return tuple(folder / path.name for path in made)


def remove_replaced_trees(builder: building.Builder) -> None:
    """Remove the build trees that a finished build replaces, and list the other trees. A tree may take up to 9 GB."""
    replaced, others = builder.older()
    for tree in replaced:
        size = progress.human_size(files.size_of(tree.home))
        try:
            tree.discard()
            progress.say(f"    removed an older build tree: {tree.home} ({size}); ccache still has its objects")
        except (OSError, UserError) as fault:
            progress.warn(f"cannot remove an older build tree: {tree.home} ({size}): {fault}")
    if others:
        sizes = ", ".join(f"{tree.home.name} ({progress.human_size(files.size_of(tree.home))})" for tree in others)
        progress.say(f"    other build trees of torch in {builder.home.parent}: {sizes}")
        progress.say(f"    to remove one of these build trees, run sudo rm -r {builder.home.parent}/NAME")
