"""Cross-compile TVM FFI's wheel, or get it from the artefact cache."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from flow.context import Context
from recipes import recipe
from recipes.torch.audit import Examined
from recipes.tvm_ffi import build, locate, source
from toolchain import files, progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step
from wheels import artefacts


def step(context: Context) -> Step:
    """Return the step that builds the wheel. Raises PlatformMismatch or RecipeInvalid for an unsupported target."""
    data = recipe.load(locate.NAME)
    locate.require_target(data, context.target, context.suite)
    key = locate.recipe_key(data, context.target, context.suite)

    def action(needs: Mapping[str, Manifest]) -> Made:
        artefact_key = artefacts.key_of(key, needs["tvm-ffi-builder"].artefact(".tar").sha256)
        if cached := artefacts.get(context.config, data.name, artefact_key):
            (wheel,) = [path for path in cached if path.suffix == ".whl"]
            seen = build.examine(wheel, context.target, context.suite)
            place = context.root / "wheels" / wheel.name
            with files.replacing(place) as aside:
                shutil.copyfile(wheel, aside)
            progress.say(f"    {wheel.name}: copied from the artefact cache")
            return _made(place, seen, {"cache": wheel.parent.name})
        log = context.log("tvm-ffi-wheel")
        folder = context.config.build_root / "sources"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        tools = source.tools(data, context.suite, folder, log)
        archive = source.obtain(data, tools, folder, log)
        with files.scratch_folder(context.root / "work", "tvm-ffi") as scratch:
            reference = context.config.image_reference("tvm-ffi-builder")
            made = build.build(
                context.client, reference, data, context.config, context.suite, archive, tools, scratch, log
            )
            seen = build.examine(made, context.target, context.suite)
            place = context.root / "wheels" / made.name
            place.parent.mkdir(parents=True, exist_ok=True)
            made.replace(place)
        artefacts.put(context.config, data.name, artefact_key, [place], recipe=key)
        return _made(place, seen, {})

    def _made(wheel: Path, seen: Examined, more: Mapping[str, str]) -> Made:
        facts = {
            "key": key,
            "wheel": wheel.name,
            "source": source.identity(data),
            "elf files": seen.elf_files,
            "newest symbols": dict(seen.newest),
        }
        return Made((wheel,), facts={**facts, **more})

    return Step(
        name="tvm-ffi-wheel",
        title="wheel of TVM's FFI",
        code=__name__,
        inputs={"key": key},
        needs=("tvm-ffi-builder",),
        action=action,
    )
