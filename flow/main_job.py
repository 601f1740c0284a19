"""``build-image`` and ``shell``: plan and run the steps of the main job, and collect their products."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.start import ensure_running
from flow import pipelines, shell, torch_job
from flow.build_lock import build_lock
from flow.compilers import native_compiler as compiler_mounts
from flow.context import Context
from flow.engine_images import NO_ENGINE
from images import native
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import ConfigError
from toolchain.manifest import Manifest, all_warnings
from toolchain.process import require_root
from toolchain.steps import MANIFEST_SUFFIX, Decision, Pipeline

_MIRROR = "mirror"
_NEED_ROOT = ("tools", "builder", "dev", "rootfs")
"""Steps that only root can run, because the files in their products have different owners."""


@dataclass(frozen=True)
class Built:
    """The manifests of all steps, the names of the steps that ran, and the duration of the build in seconds."""

    manifests: tuple[Manifest, ...]
    ran: frozenset[str]
    seconds: float

    def manifest(self, step: str) -> Manifest:
        """Return the manifest of one step."""
        return next(item for item in self.manifests if item.step == step)

    @property
    def rows(self) -> list[progress.Row]:
        """Return the rows of the table that the task prints at the end."""
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
        """Return the warnings of all steps.

        Warnings from earlier runs are included, because they apply as long as the product is used.
        """
        return all_warnings(self.manifests)


def plan(
    config: Config, *, update: bool = False, again: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Decision]:
    """Return a decision for each step: whether the step would run, and why.

    ``update`` forces the step that queries the mirror to run; ``again`` names other steps that are forced to run.
    ``only`` restricts the plan to the named steps and their dependencies. With ``torch.from_source``, the plan starts
    with the steps that build torch. Raises ConfigError for an unknown step, or if ``again`` names a step that ``only``
    omits.
    """
    # Both pipelines have a step ``mirror``; ``update`` applies only to the step of the main job.
    before = [item for item in torch_job.plan(config) if item.step.name != _MIRROR] if config.torch.from_source else []
    with Context(config) as context:
        pipeline = _pipeline(context, again, only)
        new_torch = any(item.runs for item in before)
        return [*before, *_plan(pipeline, update=update, again=again, only=only, new_torch=new_torch)]


def _pipeline(context: Context, again: Sequence[str], only: Sequence[str]) -> Pipeline:
    """Return the steps of the main job.

    The workbench's steps are included only if ``only`` or ``again`` names one of them.
    """
    usual = pipelines.main_job(context)
    with_workbench = pipelines.main_job(context, with_workbench=True)
    extra = {step.name for step in with_workbench.steps} - {step.name for step in usual.steps}
    return with_workbench if extra & {*again, *only} else usual


def _plan(
    pipeline: Pipeline, *, update: bool, again: Sequence[str], only: Sequence[str], new_torch: bool = False
) -> list[Decision]:
    names = [step.name for step in pipeline.steps]
    if unknown := [name for name in (*again, *only) if name not in names]:
        raise ConfigError([f"no step {name!r}; valid: {', '.join(names)}" for name in unknown])
    force = {*again, *([_MIRROR] if update else []), *(["torch"] if new_torch else [])}
    decisions = pipeline.plan(force=frozenset(force), only=only)
    planned = {item.step.name for item in decisions}
    if omitted := [name for name in again if name not in planned]:
        raise ConfigError([f"--again={name}: expected a step that --only selects" for name in omitted])
    return decisions


def build_image(
    config: Config,
    *,
    update: bool = False,
    again: Sequence[str] = (),
    only: Sequence[str] = (),
    reuse: bool = False,
) -> Built:
    """Bring the system image, or the steps named in ``only``, up to date; ``reuse`` is described in ``Context``.

    Before anything is changed, raises the same ConfigError as ``plan``, and RootNeeded if a step must make a root
    filesystem and the user is not root. If a step fails, raises the step's UserError.
    """
    began = time.monotonic()
    planned = plan(config, update=update, again=again, only=only)
    if os.geteuid() != 0:
        _require_root(planned, "./inv build-image")
    ensure_running(config)
    if config.torch.from_source:
        torch_job.build_torch(config)
    with build_lock(config.target_root), Context(config, reuse=reuse) as context:
        pipeline = _pipeline(context, again, only)
        decisions = _plan(pipeline, update=update, again=again, only=only)
        before = {path: path.stat().st_mtime_ns for path in config.target_root.glob(f"*{MANIFEST_SUFFIX}")}
        # Configuring the root uses only one core, so two other steps, which prepare the compilers, run meanwhile.
        manifests = pipeline.execute(decisions, at_once=3)
        written = {item.step: pipeline.manifest_path(item.step) for item in manifests}
        ran = frozenset(step for step, path in written.items() if before.get(path) != path.stat().st_mtime_ns)
    return Built(tuple(manifests), ran, time.monotonic() - began)


def _require_root(decisions: Sequence[Decision], task: str) -> None:
    """Raise RootNeeded if a step must make a root filesystem and the user is not root.

    A step is ignored if the only reason to run it is that no engine is running, because the step's image may already
    exist.
    """
    made = [item for item in decisions if item.runs and item.step.name in _NEED_ROOT and item.reason != NO_ENGINE]
    if made:
        titles = ", ".join(item.step.title for item in made)
        require_root(f"to set the owners of files ({titles})", task)


def ready_workbench(config: Config, *, task: str = "./inv shell") -> None:
    """Bring the workbench image up to date for a task.

    Raises RootNeeded, before anything is changed, if a step must make a root filesystem and the user is not root. If a
    step fails, raises the step's UserError.
    """
    if os.geteuid() != 0:
        with Context(config) as context:
            pipeline = pipelines.main_job(context, with_workbench=True)
            _require_root(pipeline.plan(only=("workbench",)), task)
    ensure_running(config)
    with build_lock(config.target_root), Context(config) as context:
        pipeline = pipelines.main_job(context, with_workbench=True)
        pipeline.execute(pipeline.plan(only=("workbench",)))


def open_shell(config: Config, folder: Path, *, command: str, native_compiler: bool, as_root: bool) -> int:
    """Open a shell in the workbench, and return the shell's exit status."""
    shell.require_folder(folder)  # checked first, because making the workbench takes minutes
    ready_workbench(config)
    return shell.open_shell(
        config.image_reference("workbench"),
        config.image.target,
        folder,
        compiler=compiler_mounts(Context(config)) if native_compiler else native.Mounts(),
        command=command,
        as_root=as_root,
    )
