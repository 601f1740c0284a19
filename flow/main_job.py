"""``build-image``: plan the flow, say why each step runs, run it, and show what came out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.start import ensure_running
from flow import shell, torch_job
from flow.main_steps import NO_ENGINE, ROOTS, Flow, alone
from images import native
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ConfigError
from toolchain.manifest import Manifest, all_warnings
from toolchain.process import require_root
from toolchain.steps import MANIFEST_SUFFIX, Decision, Pipeline

_STEP_OF_UPDATE = "mirror"


@dataclass(frozen=True)
class Built:
    """What a build did: the manifests of all steps, which of them ran, and the seconds that the whole took."""

    manifests: tuple[Manifest, ...]
    ran: frozenset[str]
    seconds: float

    def manifest(self, step: str) -> Manifest:
        """One step's manifest."""
        return next(item for item in self.manifests if item.step == step)

    @property
    def rows(self) -> list[progress.Row]:
        """Lines of the final table."""
        rows = []
        for item in self.manifests:
            note = "made now" if item.step in self.ran else "unchanged"
            spent = item.seconds if item.step in self.ran else 0.0
            rows += [progress.row_of(made.path.name, made, spent, note) for made in item.artefacts]
            if "image" in item.facts:
                rows.append(progress.Row(item.facts["reference"], item.facts["size"], item.facts["image"], spent, note))
        return rows

    @property
    def warnings(self) -> list[str]:
        """Warnings of all steps, of earlier runs too: they hold as long as their product does."""
        return all_warnings(self.manifests)


def plan(
    config: Config, *, update: bool = False, again: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Decision]:
    """Which steps would run, and why.

    ``update`` asks the mirror anew; ``again`` names steps to run again; ``only`` names the steps that are wanted: they
    and what they need, no others. With ``torch.from_source`` torch's own steps come first.
    """
    # Both have the mirror, and it is the main job's that may be asked anew.
    before = [item for item in torch_job.plan(config) if item.step.name != "mirror"] if config.torch.from_source else []
    with Flow(config) as flow:
        pipeline = _pipeline(flow, again, only)
        again = [*again, *(["torch"] if any(item.runs for item in before) else [])]
        return [*before, *_plan(pipeline, update=update, again=again, only=only)]


def _pipeline(flow: Flow, again: Sequence[str], only: Sequence[str]) -> Pipeline:
    """The main job's steps; those of the workbench too where one of them is named."""
    usual = {step.name for step in flow.pipeline().steps}
    with_workbench = flow.pipeline(workbench=True)
    named = {*again, *only} & ({step.name for step in with_workbench.steps} - usual)
    return with_workbench if named else flow.pipeline()


def _plan(pipeline: Pipeline, *, update: bool, again: Sequence[str], only: Sequence[str]) -> list[Decision]:
    names = [step.name for step in pipeline.steps]
    if unknown := [name for name in (*again, *only) if name not in names]:
        raise ConfigError([f"no step {name!r}; valid: {', '.join(names)}" for name in unknown])
    decisions = pipeline.plan(force=frozenset(again) | ({_STEP_OF_UPDATE} if update else set()))
    wanted = set(only or names)
    for step in reversed(pipeline.steps):
        wanted |= set(step.needs) if step.name in wanted else set()
    return [item for item in decisions if item.step.name in wanted]


def build_image(
    config: Config,
    *,
    update: bool = False,
    again: Sequence[str] = (),
    only: Sequence[str] = (),
    reuse: bool = False,
) -> Built:
    """Bring the system image up to date, or ``only`` these steps; ``reuse`` as in ``Flow``.

    Raises RootNeeded before anything is done, or a UserError of the step that failed.
    """
    began = time.monotonic()
    if os.geteuid() != 0:
        _require_root(plan(config, update=update, again=again, only=only), "./inv build-image")
    ensure_running(config)
    if config.torch.from_source:
        torch_job.build_torch(config)
    with alone(config.target_root), Flow(config, reuse=reuse) as flow:
        pipeline = _pipeline(flow, again, only)
        decisions = _plan(pipeline, update=update, again=again, only=only)
        before = {path: path.stat().st_mtime_ns for path in config.target_root.glob(f"*{MANIFEST_SUFFIX}")}
        # The root is configured on one core, beside two steps that lead to the compiles; these are not to wait for it.
        manifests = pipeline.execute(decisions, at_once=3)
        written = {item.step: pipeline.manifest_path(item.step) for item in manifests}
        ran = frozenset(step for step, path in written.items() if before.get(path) != path.stat().st_mtime_ns)
    return Built(tuple(manifests), ran, time.monotonic() - began)


def _require_root(decisions: Sequence[Decision], task: str) -> None:
    """Raise RootNeeded where a root will be made. One that merely no engine could be asked for may be there."""
    made = [item for item in decisions if item.runs and item.step.name in ROOTS and item.reason != NO_ENGINE]
    if made:
        titles = ", ".join(item.step.title for item in made)
        require_root(f"to give files to their owners ({titles})", task)


def ready_workbench(config: Config, *, task: str = "./inv shell") -> None:
    """Bring the image that shells are opened in up to date, and what it needs, for a task.

    Raises RootNeeded before anything is done, or a UserError of the step that failed.
    """
    if os.geteuid() != 0:
        with Flow(config) as flow:
            _require_root(_for_workbench(flow.pipeline(workbench=True)), task)
    ensure_running(config)
    with alone(config.target_root), Flow(config) as flow:
        pipeline = flow.pipeline(workbench=True)
        pipeline.execute(_for_workbench(pipeline))


def _for_workbench(pipeline: Pipeline) -> list[Decision]:
    return [item for item in pipeline.plan() if item.step.name not in ("archives", "rootfs", "base", "system")]


def open_shell(config: Config, folder: Path, *, command: str, native_compiler: bool, as_root: bool) -> int:
    """Open a shell in the workbench; its exit status."""
    shell.require_folder(folder)  # before the workbench is made, which takes minutes
    ready_workbench(config)
    return shell.open_shell(
        config.image_reference("workbench"),
        config.image.target,
        folder,
        compiler=Flow(config).compiler() if native_compiler else native.Mounts(),
        command=command,
        as_root=as_root,
    )
