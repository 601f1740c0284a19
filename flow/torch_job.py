"""``build-torch``: build a torch wheel from source."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from engine.start import ensure_running
from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context
from flow.steps import torch_wheel
from recipes.torch import build as building
from recipes.torch import provenance
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged
from toolchain.manifest import Manifest, all_warnings
from toolchain.steps import Decision
from wheels import artefacts

_WHEEL = "torch-wheel"
_CPUS = {"armhf": "cortex-a7", "arm64": "cortex-a53"}
"""The oldest CPU that ``audit-wheel`` supports, for each architecture that the recipe supports."""


@dataclass(frozen=True)
class Done:
    """The steps' manifests, and the duration of the whole job in seconds."""

    manifests: tuple[Manifest, ...]
    seconds: float

    @property
    def wheel(self) -> Manifest:
        """The manifest of the last step, which describes the wheel."""
        return self.manifests[-1]

    @property
    def rows(self) -> list[progress.Row]:
        """Return the rows of the final table."""
        made, notes = self.wheel, {".whl": _note(self.wheel)}
        return [
            progress.row_of(item.path.name, item, made.seconds, notes.get(item.path.suffix, ""))
            for item in made.artefacts
        ]

    def import_check(self, architecture: str) -> str:
        """Return a note that the wheel was not imported, with a command that imports it.

        ``architecture`` is Debian's name.
        """
        path, cpu = shlex.quote(str(_wheel_in(self.wheel))), _CPUS[architecture]
        return f"the wheel was not imported; this command imports and runs it: ./inv audit-wheel {path} --cpu={cpu}"

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of all steps."""
        return all_warnings(self.manifests)


def _wheel_in(made: Manifest) -> Path:
    return next(item.path for item in made.artefacts if item.path.suffix == ".whl")


def _note(made: Manifest) -> str:
    """Return a note: either that the wheel is from the artefact cache, or the build's ccache hit rate."""
    if "cache" in made.facts:
        return "from the artefact cache"
    used = made.facts.get("ccache", {"hits": 0, "calls": 0})
    if not used["calls"]:
        return ""
    percent = 100 * used["hits"] / used["calls"]
    # A rate below 100 % is not rounded up to 100.
    text = f"{min(percent, 99.9):.1f}" if 99 <= percent < 100 else f"{percent:.0f}"
    return f"ccache hits: {used['hits']} of {used['calls']} compiler calls ({text} %)"


def plan(config: Config, *, again: bool = False) -> list[Decision]:
    """Return a decision for each step: whether the step would run, and why.

    ``again`` has the same meaning as in ``build_torch``.
    """
    with Context(config) as context:
        return pipelines.torch_job(context, again=again).plan(force=_forced(again))


def build_torch(config: Config, *, again: bool = False) -> Done:
    """Build the wheel unless it is up to date. If a step fails, raises the step's UserError.

    With ``again``, compile the wheel even if it exists. This creates the build tree that ``verify`` and ``bench`` need.
    """
    began = time.monotonic()
    ensure_running(config)
    with build_lock(config.target_root), Context(config) as context:
        pipeline = pipelines.torch_job(context, again=again)
        manifests = pipeline.execute(pipeline.plan(force=_forced(again)))
        _restore_in_cache(config, manifests[-1])
    return Done(tuple(manifests), time.monotonic() - began)


def _forced(again: bool) -> frozenset[str]:
    return frozenset({_WHEEL} if again else ())


def _restore_in_cache(config: Config, made: Manifest) -> None:
    """Store the products in the artefact cache again if the cache's copies are missing or damaged."""
    wheel = _wheel_in(made)
    key = made.facts["key"]
    artefact_key = made.facts.get("cache") or provenance.artefact_key(key, provenance.versions_of(wheel))
    try:
        if artefacts.get(config, "torch", artefact_key):
            return
    except ArtefactDamaged as fault:
        progress.warn(f"{fault.summary}; replacing the cached copy")
    artefacts.put(config, "torch", artefact_key, [item.path for item in made.artefacts], recipe=key)
    progress.say(f"    {wheel.name}: put into the artefact cache again, without a rebuild")


def ready_builder(context: Context) -> building.Builder:
    """Bring the steps before the wheel up to date and return the builder.

    If a step fails, raises the step's UserError.
    """
    pipeline = pipelines.torch_job(context)
    decisions = pipeline.plan(only=("torch-builder", "torch-source"))
    return torch_wheel.builder_of(context, {item.step: item for item in pipeline.execute(decisions)})
