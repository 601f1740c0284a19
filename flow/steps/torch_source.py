"""Download and verify torch's source."""

from __future__ import annotations

from collections.abc import Mapping

from flow.context import Context
from images.recorded_sources import sources_of
from recipes import recipe
from recipes.torch import source
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that downloads and verifies the source pinned by the recipe."""
    data, kind = recipe.load("torch"), context.config.torch.source
    folder = context.config.build_root / "sources"

    def action(needs: Mapping[str, Manifest]) -> Made:
        verified = sources_of(needs["mirror"])
        found = source.obtain(data, context.suite, kind, verified, folder, context.log("torch-source"))
        facts = {"kind": found.kind, "folder": found.folder.name, "identity": found.identity, "files": found.files}
        return Made(facts=facts)

    return Step(
        name="torch-source",
        title="torch's source",
        code=__name__,
        inputs={"source": source.identity(data, context.suite, kind)},
        needs=("mirror",),
        action=action,
        missing=lambda made: source.missing(data, context.suite, kind, folder / made.facts["folder"]),
    )
