"""Run steps only when an input has changed, and report which input has changed.

A step's *key* is the SHA-256 of its inputs as canonical JSON. Inputs are strings with names. They include settings,
fingerprints of source files, the SHA-256 of each module of this project that contributes to the product
(toolchain.closure), and the SHA-256 of the products of the steps on which the step depends. A finished step's manifest
records the key and the inputs. The next run compares the recorded inputs with the current ones and shows the difference
as the reason. A step also runs if its products are missing, which the ``missing`` function of the step detects. If a
step produces the same bytes again, the steps that depend on it do not run.

Planning does not change anything. A plan assumes that if a step runs, all steps that depend on it run too. During
execution, each decision is made again from the actual products of the earlier steps.

Steps whose dependencies are complete run concurrently, by default two at a time, because an emulated step and a
compilation rarely compete for a core. After the first failure, no further steps start. The failure is raised when all
running steps have finished.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import checkout, closure, files, process, progress
from toolchain.manifest import Artefact, Manifest

MANIFEST_SUFFIX = ".manifest.json"
_MOVED_SHOWN = 8
_CODE = "code:"


@dataclass(frozen=True)
class Made:
    """The result of a step's action: its products."""

    artefacts: tuple[Path | Artefact, ...] = ()
    """Files, or artefacts whose size and SHA-256 are already known."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: its inputs, the steps that it needs, and its action.

    ``action`` receives the manifests of the steps in ``needs``. ``missing`` receives the previous run's manifest and
    returns a text that states what is missing from the step's product, or an empty string. Missing artefacts are always
    detected.
    """

    name: str
    title: str
    inputs: Mapping[str, str]
    action: Callable[[Mapping[str, Manifest]], Made]
    code: str = ""
    """The name of the module that makes the product. Every module in its import closure is an input.

    If it is empty, no module is an input.
    """
    needs: tuple[str, ...] = ()
    missing: Callable[[Manifest], str] = lambda _: ""


@dataclass(frozen=True)
class Decision:
    """Whether a step runs, and the reason."""

    step: Step
    inputs: Mapping[str, str]
    """The inputs at the time of the decision. The manifest records these, because sources may change during a run."""
    runs: bool
    reason: str
    previous: Manifest | None
    forced: bool = False


def key_of(name: str, inputs: Mapping[str, str]) -> str:
    """Return the SHA-256 of a step's name and inputs."""
    text = json.dumps([name, dict(inputs)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Pipeline:
    """Steps in the order of the data flow, and the folder that contains their manifests."""

    def __init__(self, folder: Path, steps: Sequence[Step]) -> None:
        names = [step.name for step in steps]
        for position, step in enumerate(steps):
            unknown = set(step.needs) - set(names[:position])
            if unknown:
                raise ValueError(f"step {step.name} needs steps that do not come before it: {sorted(unknown)}")
        self.folder = folder
        self.steps = tuple(steps)

    def manifest_path(self, name: str) -> Path:
        """Return the path of a step's manifest."""
        return self.folder / f"{name}{MANIFEST_SUFFIX}"

    def plan(self, *, force: frozenset[str] = frozenset(), only: Sequence[str] = ()) -> list[Decision]:
        """Return a decision for each step, or for the steps in ``only`` and their dependencies. Changes nothing."""
        wanted = set(only) or {step.name for step in self.steps}
        for step in reversed(self.steps):
            wanted |= set(step.needs) if step.name in wanted else set()
        decisions: dict[str, Decision] = {}
        for step in self.steps:
            if step.name not in wanted:
                continue
            made = {name: decisions[name].previous for name in step.needs}
            decision = self._decide(step, made, force)
            again = [name for name in step.needs if decisions[name].runs]
            if again and not decision.runs:
                reason = f"{', '.join(again)} will run again"
                decision = Decision(step, decision.inputs, True, reason, decision.previous)
            decisions[step.name] = decision
        return list(decisions.values())

    def _decide(self, step: Step, made: Mapping[str, Manifest | None], force: frozenset[str]) -> Decision:
        inputs = _inputs(step, made)
        previous = Manifest.read(self.manifest_path(step.name))
        reason = _reason(step, inputs, previous, force)
        return Decision(step, inputs, bool(reason), reason or "inputs unchanged", previous, step.name in force)

    def execute(self, decisions: Sequence[Decision], *, at_once: int = 2) -> list[Manifest]:
        """Run the necessary steps of a plan; return the manifests of all steps in the plan, in order.

        Of the steps that can start, the one with the longest chain of dependent steps starts first. Ctrl-C stops the
        running steps' programs (toolchain.process), and then the steps.
        """
        force = frozenset(decision.step.name for decision in decisions if decision.forced)
        done: dict[str, Manifest] = {}
        chains = _chain_lengths([decision.step for decision in decisions])
        waiting = sorted((decision.step for decision in decisions), key=lambda step: -chains[step.name])
        faults: list[BaseException] = []  # in the order in which they occurred
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            running: dict[concurrent.futures.Future[Manifest], Step] = {}
            try:
                while waiting or running:
                    while not faults and len(running) < at_once:
                        step = next((item for item in waiting if all(name in done for name in item.needs)), None)
                        if step is None:
                            break
                        waiting.remove(step)
                        decision = self._decide(step, {name: done[name] for name in step.needs}, force)
                        if decision.runs or decision.previous is None:
                            source = checkout.origin()
                            # Ctrl-C between these two operations would leave a running step that nobody stops.
                            with process.deferred_signals():
                                running[pool.submit(self._run, decision, dict(done), source, faults)] = step
                        else:
                            progress.say(f"    {step.title}: skipped ({decision.reason})")
                            done[step.name] = decision.previous
                    if not running:
                        break
                    finished, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in finished:
                        step = running.pop(future)
                        if future.exception() is None:
                            done[step.name] = future.result()
            except BaseException:
                _interrupt(running)
                raise
        if faults:
            raise faults[0]
        return [done[decision.step.name] for decision in decisions]

    def _run(
        self, decision: Decision, done: Mapping[str, Manifest], source: Mapping[str, Any], faults: list[BaseException]
    ) -> Manifest:
        try:
            return self._make(decision, done, source)
        except BaseException as fault:
            faults.append(fault)
            raise

    def _make(self, decision: Decision, done: Mapping[str, Manifest], source: Mapping[str, Any]) -> Manifest:
        step = decision.step
        began = time.monotonic()
        if self.folder.exists() and not os.access(self.folder, os.W_OK, effective_ids=True):
            raise files.belongs_to_another(
                self.folder, f"the folder is not writable, and the step {step.title!r} must run"
            )
        progress.say(f"    {step.title}: runs ({decision.reason})")
        with files.room_for_programs(step.title, self.folder):
            self.manifest_path(step.name).unlink(missing_ok=True)
            needs = {name: done[name] for name in step.needs}
            with progress.step(step.title):
                made = step.action(needs)
            manifest = Manifest(
                step=step.name,
                key=key_of(step.name, decision.inputs),
                inputs=decision.inputs,
                artefacts=tuple(item if isinstance(item, Artefact) else Artefact.of(item) for item in made.artefacts),
                facts=made.facts,
                warnings=made.warnings,
                seconds=time.monotonic() - began,
                source=source,
            )
            manifest.write(self.manifest_path(step.name))
        return manifest


def _chain_lengths(steps: Sequence[Step]) -> dict[str, int]:
    """Return, for each step, the length of the longest chain of steps that depend on this step."""
    found: dict[str, int] = {}
    for step in reversed(steps):
        found[step.name] = max((found[other.name] + 1 for other in steps if step.name in other.needs), default=0)
    return found


def _interrupt(running: Iterable[concurrent.futures.Future[Manifest]]) -> None:
    """Stop the programs of running steps, including programs that start before the steps have stopped."""
    left = set(running)
    while left:
        process.interrupt_all()
        left = concurrent.futures.wait(left, timeout=0.1).not_done


def _inputs(step: Step, made: Mapping[str, Manifest | None]) -> dict[str, str]:
    products = {f"needs:{name}": item.product if item else "absent" for name, item in made.items()}
    code = {f"{_CODE}{path}": digest for path, digest in closure.digests(step.code).items()} if step.code else {}
    return {**step.inputs, **code, **products}


def _reason(step: Step, inputs: Mapping[str, str], previous: Manifest | None, force: frozenset[str]) -> str:
    if step.name in force:
        return "requested"
    if previous is None:
        return "never finished before"
    if previous.key != key_of(step.name, inputs):
        return "changed: " + "; ".join(_difference(previous.inputs, inputs))
    for artefact in previous.artefacts:
        if not artefact.path.is_file() or artefact.path.stat().st_size != artefact.size:
            return f"product missing or incomplete: {artefact.path.name}"
    return step.missing(previous)


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changed inputs. If a manifest from an earlier version lists no modules, all modules count as new."""
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    modules = [name for name in changed if name.startswith(_CODE)]
    shown = [
        f"{name.removeprefix('needs:')} {_change(before.get(name, 'absent'), now.get(name, 'absent'))}"
        for name in changed
        if name not in modules
    ]
    names = [name.removeprefix(_CODE) for name in modules]
    more = [f"{len(names) - _MOVED_SHOWN} more"] if len(names) > _MOVED_SHOWN else []
    return [*shown, *([f"code {', '.join([*names[:_MOVED_SHOWN], *more])}"] if names else [])]


def _change(old: str, new: str) -> str:
    """Return the old and the new value or, for lists of words, the added and the removed words."""
    before, now = set(old.split()), set(new.split())
    moved = [*(f"+{word}" for word in sorted(now - before)), *(f"-{word}" for word in sorted(before - now))]
    if len(before & now) > 1 and len(moved) <= _MOVED_SHOWN:
        return " ".join(moved) or "in another order"
    return f"{_short(old)} → {_short(new)}"


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value if len(value) <= 60 else value[:57] + "…"


def plan_table(decisions: Sequence[Decision]) -> str:
    """Return a plan as text: one line per step with the action and its reason."""
    width = max(len(item.step.title) for item in decisions)
    return "\n".join(
        f"{item.step.title:{width}}  {'runs   ' if item.runs else 'skipped'}  {item.reason}" for item in decisions
    )
