"""Cross-compile torchvision and torchaudio, or get them from the artefact cache or package index, then unpack them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flow.compilers import newer_code_warning
from flow.context import Context
from flow.staging import stage_wheels
from images.recorded_sources import sources_of
from recipes import recipe
from recipes.companions import build
from recipes.torch import published
from toolchain import files, progress
from toolchain.errors import SourceUnavailable
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step
from wheels import artefacts


def step(context: Context) -> Step:
    """Return the step that finds or builds the wheels.

    The wheels are omitted if there is no torch wheel of the version that they require, or if the mirror does not have
    their source. If torch comes from the package index, so do these wheels.
    """
    data = recipe.load(build.NAME)
    tar = context.root / "companions-site.tar"

    def action(needs: Mapping[str, Manifest]) -> Made:
        if wheels := build.published_for(context.config, needs["torch"].facts.get("sha256", "")):
            placed = build.place(wheels, context.root / "wheels", data)
            stage_wheels(context, placed, context.root / "companions-site", tar)
            return Made((*placed, tar), facts={"wheels": [wheel.name for wheel in placed]})
        if reason := build.unfit(needs["torch"].facts["version"]):
            return _left_out(reason)
        torch = needs["torch"].facts
        key = build.recipe_key(data, context.target, context.suite, torch["sha256"])
        finished, origin = build.finished(context.config, key)
        with files.scratch_folder(context.root / "work", data.name) as scratch:
            try:
                made = finished or _build(needs["mirror"], scratch)
            except SourceUnavailable as fault:
                return _left_out(f"{fault.summary} ({fault.found})", is_tried_again=True)
            seen = [build.examine(wheel, context.torch_site, context.target, context.suite) for wheel in made]
            if not finished:
                artefact_key = artefacts.key_of(key, needs["builder"].artefact(".tar").sha256)
                artefacts.put(context.config, data.name, artefact_key, made, recipe=key)
            placed = build.place(made, context.root / "wheels", data)
        for wheel in placed if finished else ():
            progress.say(f"    {wheel.name}: {origin}")
        stage_wheels(context, placed, context.root / "companions-site", tar)
        return Made(
            (*placed, tar),
            facts={
                "key": key,
                "wheels": [wheel.name for wheel in placed],
                "elf files": sum(item.elf_files for item in seen),
            },
            warnings=newer_code_warning(context, data.title),
        )

    def _build(mirror: Manifest, scratch: Path) -> list[Path]:
        log = context.log(data.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        main = next(item for item in sources_of(mirror) if item.pocket.name == "main" and item.archive == "debian")
        archives = build.fetch(data, main, context.config.build_root / "sources", log)
        reference = context.config.image_reference("builder")
        return build.build(
            context.client, reference, data, context.config, context.suite, archives, context.torch_site, scratch, log
        )

    return Step(
        name="companions",
        title=data.title,
        code=__name__,
        inputs={
            "sources": data.fingerprint(),
            "published": " ".join(pin.sha256 for pin in published.pins(context.config)),
            "epoch": str(context.epoch),
            "python": context.suite.python,
        },
        needs=("mirror", "builder", "torch", "torch-site"),
        action=action,
        missing=lambda made: made.facts.get("try again", ""),
    )


def _left_out(reason: str, *, is_tried_again: bool = False) -> Made:
    warning = f"torchvision and torchaudio are NOT in the image: {reason}"
    progress.warn(warning)
    return Made(facts={"wheels": [], **({"try again": reason} if is_tried_again else {})}, warnings=(warning,))
