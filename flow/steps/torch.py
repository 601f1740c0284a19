"""Select the image's torch wheel: from a wheelhouse, the artefact cache, a local build, this repository or an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flow.compilers import newer_code_warning
from flow.context import Context
from recipes import recipe
from recipes.torch import resolve
from toolchain import files, progress
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that selects the wheel. Without a wheel, the step fails only if ``torch.required`` is set."""
    config = context.config

    def action(_: Mapping[str, Manifest]) -> Made:
        found = resolve.resolve(config, fetch=True)
        if found.wheel is None:
            if config.torch.source == "distribution":
                progress.say(f"    {found.reason}")
                return Made(facts={"wheel": "", "version": ""})
            warning = f"the image is built WITHOUT torch: {found.reason}"
            progress.warn(warning)
            return Made(facts={"wheel": "", "version": ""}, warnings=(warning,))
        progress.say(f"    torch {found.version}: {found.reason}")
        facts = {
            "wheel": str(found.wheel),
            "version": found.version,
            "sha256": files.sha256_of(found.wheel),
            "from": found.reason,
            "self-contained": found.self_contained,
        }
        return Made(facts=facts, warnings=(*found.warnings, *newer_code_warning(context, "torch's wheel")))

    def missing(made: Manifest) -> str:
        wheel = Path(made.facts["wheel"])
        if not made.facts["wheel"]:
            return ""
        if not wheel.is_file():
            return f"{wheel} is missing"
        return "" if files.sha256_of(wheel) == made.facts["sha256"] else f"{wheel} has changed"

    return Step(
        name="torch",
        title="torch wheel",
        code=__name__,
        inputs={
            "recipe": recipe.load("torch").fingerprint(),
            "wheelhouse": resolve.listing(config),
            "python": context.suite.python,
            "required": str(config.torch.required),
            "from source": str(config.torch.from_source),
            "source": config.torch.source,
        },
        action=action,
        missing=missing,
    )
