"""Steps with a memory: each runs when an input has changed, and says which.

A step's *key* is the SHA-256 of its inputs as canonical JSON. Inputs are named texts: settings, fingerprints of
source files, and for every step it needs, the SHA-256 of what that step made. When a step has finished, its manifest
records the key and the inputs; the next run compares, and the difference is the reason that is shown. A step also
runs when its products are gone, which its ``missing`` probe finds out. A step that is made again to the same bytes
wakes none that need it.

Planning touches nothing; what hangs on a step that will run is planned to run too. Executing decides that anew with
what was made, and runs steps whose needs are done side by side (two at once by default: an
emulated step and a compile seldom want the same core). The first failure stops new steps, running ones are waited
for, and the failure is raised.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import checkout, files, process, progress
from toolchain.errors import CommandFailed
from toolchain.manifest import Artefact, Manifest

MANIFEST_SUFFIX = ".manifest.json"
_MOVED_SHOWN = 8


@dataclass(frozen=True)
class Made:
    """What a step's action returns."""

    artefacts: tuple[Path | Artefact, ...] = ()
    """Files, or what was measured of them already."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what goes in, what must be done before, and what to do.

    ``action`` gets the manifests of the steps named in ``needs``. ``missing`` returns what is gone of an earlier
    run's product (or an empty string), given that run's manifest; absent artefacts are always noticed.
    """

    name: str
    title: str
    inputs: Mapping[str, str]
    action: Callable[[Mapping[str, Manifest]], Made]
    needs: tuple[str, ...] = ()
    missing: Callable[[Manifest], str] = lambda _: ""


@dataclass(frozen=True)
class Decision:
    """Whether a step runs, and why."""

    step: Step
    key: str
    runs: bool
    reason: str
    previous: Manifest | None
    forced: bool = False


def key_of(name: str, inputs: Mapping[str, str]) -> str:
    """SHA-256 of a step's name and inputs."""
    text = json.dumps([name, dict(inputs)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Pipeline:
    """Steps in the order of the data flow, with a folder that holds their manifests."""

    def __init__(self, folder: Path, steps: Sequence[Step]) -> None:
        names = [step.name for step in steps]
        for position, step in enumerate(steps):
            unknown = set(step.needs) - set(names[:position])
            if unknown:
                raise ValueError(f"step {step.name} needs {sorted(unknown)}, which do not come before it")
        self.folder = folder
        self.steps = tuple(steps)

    def manifest_path(self, name: str) -> Path:
        """Where a step's manifest is kept."""
        return self.folder / f"{name}{MANIFEST_SUFFIX}"

    def plan(self, *, force: frozenset[str] = frozenset()) -> list[Decision]:
        """Decide for every step; nothing is touched."""
        decisions: dict[str, Decision] = {}
        for step in self.steps:
            made = {name: decisions[name].previous for name in step.needs}
            decision = self._decide(step, made, force)
            again = [name for name in step.needs if decisions[name].runs]
            if again and not decision.runs:
                decision = Decision(
                    step, decision.key, True, f"{', '.join(again)} will be made again", decision.previous
                )
            decisions[step.name] = decision
        return list(decisions.values())

    def _decide(self, step: Step, made: Mapping[str, Manifest | None], force: frozenset[str]) -> Decision:
        inputs = _inputs(step, made)
        key = key_of(step.name, inputs)
        previous = Manifest.read(self.manifest_path(step.name))
        reason = _reason(step, inputs, key, previous, force)
        return Decision(step, key, bool(reason), reason or "inputs unchanged", previous, step.name in force)

    def execute(self, decisions: Sequence[Decision], *, at_once: int = 2) -> list[Manifest]:
        """Run what the plan says and return every step's manifest, in order.

        Of the steps that could start, the one with the longest chain behind it does: what only the last step needs
        does not keep back what many wait for. Ctrl-C ends what running steps have started (toolchain.process), then
        they.
        """
        force = frozenset(decision.step.name for decision in decisions if decision.forced)
        done: dict[str, Manifest] = {}
        behind = _behind([decision.step for decision in decisions])
        waiting = sorted((decision.step for decision in decisions), key=lambda step: -behind[step.name])
        faults: list[BaseException] = []  # in the order in which the steps met them
        # Once for all: their keys are of this moment too, and git reads the whole checkout to say what it is.
        origin = functools.cache(checkout.origin)
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
                            running[pool.submit(self._run, decision, dict(done), origin(), faults)] = step
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
            raise files.belongs_to_another(self.folder, f"it may not be written to, and {step.title} has to be made")
        progress.say(f"    {step.title}: runs ({decision.reason})")
        try:
            with files.room_for(step.title, self.folder):
                return self._act(decision, done, source, began)
        except CommandFailed as fault:
            if full := files.full_disk(fault.tail, step.title, self.folder):
                raise full from fault
            raise

    def _act(
        self, decision: Decision, done: Mapping[str, Manifest], source: Mapping[str, Any], began: float
    ) -> Manifest:
        step = decision.step
        self.manifest_path(step.name).unlink(missing_ok=True)
        needs = {name: done[name] for name in step.needs}
        with progress.step(step.title):
            made = step.action(needs)
        manifest = Manifest(
            step=step.name,
            key=decision.key,
            inputs=_inputs(step, needs),
            artefacts=tuple(item if isinstance(item, Artefact) else Artefact.of(item) for item in made.artefacts),
            facts=made.facts,
            warnings=made.warnings,
            seconds=time.monotonic() - began,
            source=source,
        )
        manifest.write(self.manifest_path(step.name))
        return manifest


def _behind(steps: Sequence[Step]) -> dict[str, int]:
    """How long the longest chain of steps is that waits for each."""
    found: dict[str, int] = {}
    for step in reversed(steps):
        found[step.name] = max((found[other.name] + 1 for other in steps if step.name in other.needs), default=0)
    return found


def _interrupt(running: Iterable[concurrent.futures.Future[Manifest]]) -> None:
    """End what running steps have started, and what they start before they notice."""
    left = set(running)
    while left:
        process.interrupt_all()
        left = concurrent.futures.wait(left, timeout=0.1).not_done


def _inputs(step: Step, made: Mapping[str, Manifest | None]) -> dict[str, str]:
    products = {f"needs:{name}": item.product if item else "absent" for name, item in made.items()}
    return {**step.inputs, **products}


def _reason(step: Step, inputs: Mapping[str, str], key: str, previous: Manifest | None, force: frozenset[str]) -> str:
    if step.name in force:
        return "asked for"
    if previous is None:
        return "never finished before"
    if previous.key != key:
        return "changed: " + "; ".join(_difference(previous.inputs, inputs))
    for artefact in previous.artefacts:
        if not artefact.path.is_file() or artefact.path.stat().st_size != artefact.size:
            return f"product gone or cut short: {artefact.path.name}"
    return step.missing(previous)


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    shown = []
    for name in sorted({*before, *now}):
        old, new = before.get(name, "absent"), now.get(name, "absent")
        if old != new:
            shown.append(f"{name.removeprefix('needs:')} {_change(old, new)}")
    return shown


def _change(old: str, new: str) -> str:
    """From what to what; of lists of words, what came and what went."""
    before, now = set(old.split()), set(new.split())
    moved = [*(f"+{word}" for word in sorted(now - before)), *(f"-{word}" for word in sorted(before - now))]
    if len(before & now) > 1 and len(moved) <= _MOVED_SHOWN:
        return " ".join(moved) or "in another order"
    return f"{_short(old)} → {_short(new)}"


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value if len(value) <= 60 else value[:57] + "…"


def plan_table(decisions: Sequence[Decision]) -> str:
    """A plan as text: a line a step, with what is done and why."""
    width = max(len(item.step.title) for item in decisions)
    return "\n".join(
        f"{item.step.title:{width}}  {'runs   ' if item.runs else 'skipped'}  {item.reason}" for item in decisions
    )
