"""``push-artefacts`` and ``pull-artefacts``: the team's registry and this machine's artefact cache."""

from __future__ import annotations

from recipes import artefacts
from recipes.torch import resolve
from toolchain.config import Config
from toolchain.errors import RecipeInvalid


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
    return [("torch", key)]


def push_artefacts(config: Config, *, registry: str | None = None, user: str | None = None) -> list[artefacts.Shared]:
    """Send all that is kept here. Raises as ``artefacts.push``."""
    return artefacts.push(config, registry=registry, user=user)


def pull_artefacts(config: Config, *, registry: str | None = None, user: str | None = None) -> list[artefacts.Shared]:
    """Fetch what this checkout would build. Raises as ``artefacts.pull``."""
    return [artefacts.pull(config, name, key, registry=registry, user=user) for name, key in wanted(config)]
