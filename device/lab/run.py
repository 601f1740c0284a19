"""``./inv test-on-pi --place|--tag|--all|--shard``: run the device suite on boards of the lab.

    reserve → acquire → device.deploy → device.suite → release → merged report

Files are deployed only to the trees of boards that the run does not boot (device.lab.trees). Each board has a separate
report folder, ``lab/NAME`` in the target's folder, and is always released at the end. With ``--all``, all boards run in
parallel. A board that fails to boot in two attempts gets the tag ``quarantine=yes``, and the run continues on the other
boards. ``--tag`` and ``--all`` skip a board in quarantine until the board passes a run with ``--place`` or
``./inv lab check``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from device import suite
from device.lab import merge, shard
from device.lab.acquire import acquired
from device.lab.coordinator import Place
from device.lab.manual import ask_to_switch
from device.lab.merge import Outcome
from device.lab.services import PROJECT, Lab, target_of
from device.lab.trees import Trees
from device.labgrid_environment import RemoteBoard
from device.suite_result import Paths, SuiteResult
from toolchain import files, lab_boards, process, progress
from toolchain.config import ROOT, Config
from toolchain.errors import BoardSilent, UserError, of_system

_Result = TypeVar("_Result")

_QUARANTINE = "quarantine"
_CHECK = Path(__file__).resolve().parent / "check"
_SWITCHED = {"NetworkPowerPort", "NetworkUSBPowerPort"}
"""The resources that allow a run to boot a board."""
_FREE_LIMIT_S = 10.0
"""The time limit of --shard for acquiring a board that was free when the run started."""


@dataclass(frozen=True, kw_only=True)
class How:
    """The options for running the suite on a board."""

    keyword: str | None = None
    timing: bool = True
    suite: Path | None = None
    """A folder with the tests to run instead of those in ``tests/device``."""
    files: tuple[str, ...] = ()
    """The test files, or tests, to run; empty to run the whole suite."""
    turn: int = 1
    """The turn of ``--shard``. After turn 1, boards run tests that had no result on another board."""
    folder: str = "lab"
    """The name of the report folder in the target's folder."""
    trees: Trees | None = None
    """The object that deploys to the trees of running boards; None if the trees are tested as they are."""


def on_place(config: Config, name: str, how: How) -> SuiteResult:
    """Acquire the place ``name``, and run the suite on its board.

    Raises the same errors as ``acquired``, ``Trees.bring`` and ``device.suite.test_on_pi``.
    """
    lab = Lab(config)
    with _acquired(lab, {"name": name}) as place:
        return _on_board(lab, place, replace(how, trees=Trees()))


def on_tagged(config: Config, tag: str, how: How) -> SuiteResult:
    """Run the suite on the first free board with the tag NAME=VALUE. Raises the same errors as ``on_place``."""
    lab = Lab(config)
    with _acquired(lab, _first_free(lab, _tags(tag))) as place:
        return _on_board(lab, place, replace(how, trees=Trees()))


def _tags(tag: str) -> dict[str, str]:
    """The tags of the boards that ``--tag`` selects. Raises UserError if ``tag`` is not ``NAME=VALUE``."""
    if not re.fullmatch(r"[a-z][a-z0-9_]+=[a-z0-9_.-]+", tag):
        raise UserError(
            "the value of --tag has the wrong form",
            expected="NAME=VALUE",
            found=repr(tag),
            fix="pass, for example, --tag=model=pi3",
        )
    key, _, value = tag.partition("=")
    return {key: value, "project": PROJECT}


def _first_free(lab: Lab, tags: Mapping[str, str]) -> dict[str, str]:
    """The filters for a reservation of the first free board with these tags."""
    filters = {**tags, _QUARANTINE: "no"}
    if not any(row.virtual for row in lab.rows):
        filters.setdefault("kind", "ssh")  # a virtual machine runs only on its own PC
    return filters


def on_all(config: Config, how: How) -> merge.Merged:
    """Run the suite in parallel on all boards of the lab that are not in quarantine, and merge the results.

    Virtual machines on other PCs are left out.

    Writes the merged report, then raises DeviceTestsFailed unless the suite passed on every board. Raises UserError if
    no board is usable.
    """
    lab = Lab(config)
    places = _usable(lab, {"project": PROJECT})
    return _on_boards(lab, [place.name for place in places], replace(how, trees=_trees_of(lab, places)))


def on_shards(config: Config, tag: str, how: How) -> merge.Merged:
    """Split the suite between the free boards with a tag, and merge the results. An empty tag selects all free boards.

    Each test file runs on exactly one board. If no board is free, the function waits until one becomes free, and runs
    all files on it. If a board does not boot or stops responding, its tests without a result are split between the
    other boards.

    Writes the merged report, then raises DeviceTestsFailed if a test failed or did not run. Raises UserError if no
    board is usable, and the same errors as ``acquired``.
    """
    lab = Lab(config)
    tags = _tags(tag) if tag else {"project": PROJECT}
    free = [place.name for place in _usable(lab, tags) if not place.holder]
    test_files = shard.suite_files(how.suite or ROOT / "tests" / "device")
    folder = report_folder(config, how)
    reports = [config.target_root / "report" / "junit.xml"]
    reports += [*folder.glob("*/junit.xml"), *folder.glob("*/turn*/junit.xml")]
    seconds = shard.measured(path for path in reports if path.is_file())
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(_all_acquired(lab, free[: len(test_files)]))
        if not held:
            place = stack.enter_context(_acquired(lab, _first_free(lab, tags)))
            held[place.name] = place
        _remove_results(lab, how)
        how = replace(how, trees=_trees_of(lab, held.values()))
        return _merged(lab, _in_turns(lab, test_files, seconds, how, held), how)


@contextlib.contextmanager
def _all_acquired(lab: Lab, names: Sequence[str]) -> Iterator[dict[str, Place]]:
    """Hold the boards during the ``with`` block. The boards are acquired and released in parallel.

    Boards that cannot be acquired are left out.
    """
    stacks = {name: contextlib.ExitStack() for name in names}

    def acquire(name: str) -> Place | None:
        try:
            return stacks[name].enter_context(_acquired(lab, {"name": name}, limit_s=_FREE_LIMIT_S))
        except UserError as fault:
            progress.warn(f"skipping {name}: {fault}")
            return None

    try:
        yield {name: place for name, place in _in_parallel(names, acquire).items() if place}
    finally:
        with concurrent.futures.ThreadPoolExecutor(max(1, len(names))) as pool:
            list(pool.map(contextlib.ExitStack.close, stacks.values()))  # list() raises exceptions from the threads


def _in_turns(
    lab: Lab, names: Sequence[str], seconds: Mapping[str, float], how: How, held: Mapping[str, Place]
) -> list[Outcome]:
    """Run the test files on the held boards, then the tests without a result on the boards that still respond.

    A board that has left a test without a result is not used again, so there are at most as many turns as boards. The
    test that was running when a board stopped responding counts as an error. This test is not retried, because it may
    have caused the failure.
    """
    boards, turn = list(held), 1
    done: list[Outcome] = []
    while True:
        parts = shard.split(names, seconds, len(boards))
        hows = {
            board: replace(how, files=tuple(part), turn=turn, timing=how.timing and turn == 1)
            for board, part in zip(boards, parts, strict=False)
        }
        for board, part in hows.items():
            progress.say(f"    {board} runs {', '.join(part.files)}")

        def run(board: str, hows: Mapping[str, How] = hows) -> Outcome:
            return _outcome(lab, board, hows[board], held[board])

        last = list(_in_parallel(hows, run).values())
        names = [name for outcome in last for name in outcome.not_run]
        lost = {outcome.board for outcome in last if outcome.not_run}
        boards = [board for board in boards if board not in lost]
        again = bool(names and boards)
        done += [replace(outcome, moved=again and bool(outcome.not_run)) for outcome in last]
        if not again:
            return done
        turn += 1
        progress.say(f"    running the remaining tests on {', '.join(boards)}")


def _usable(lab: Lab, tags: Mapping[str, str]) -> list[Place]:
    """The boards with these tags that are not in quarantine. Raises UserError if there is none."""
    places = [place for place in lab.coordinator.places().values() if tags.items() <= place.tags.items()]
    found = []
    for place in sorted(places, key=lambda place: place.name):
        if _runs_elsewhere(lab, place):
            progress.warn(f"skipping {place.name}: it is a virtual machine on another PC")
        elif place.tags.get(_QUARANTINE) == "yes":
            progress.warn(f"{place.name} is in quarantine; to try it again, run ./inv test-on-pi --place={place.name}")
        else:
            found.append(place)
    if not found:
        shown = ", ".join(f"{key}={value}" for key, value in tags.items())
        raise UserError(
            "the lab has no board to test on",
            expected=f"a place with the tags {shown} and quarantine=no",
            found=f"{len(places)} in quarantine or skipped" if places else "none",
            fix="add boards to lab.boards and run ./inv lab up; to try a board in quarantine again, run "
            "./inv test-on-pi --place=NAME",
        )
    return found


def check(config: Config) -> merge.Merged:
    """Check all boards in lab.boards, including those in quarantine: power on, log in, run a trivial test, power off.

    Raises the same errors as ``on_all``.
    """
    lab = Lab(config)
    names = [row.name for row in lab.rows]
    if not names:
        raise UserError(
            "this PC has no boards",
            expected="rows in lab.boards",
            found="none",
            fix="add boards to lab.boards (docs/lab.md)",
        )
    how = How(timing=False, suite=_CHECK, folder="lab-check")
    return _on_boards(lab, names, how)


def _on_boards(lab: Lab, names: Sequence[str], how: How) -> merge.Merged:
    """Run the suite on each board, in parallel."""
    _remove_results(lab, how)
    return _merged(lab, list(_in_parallel(names, lambda name: _outcome(lab, name, how)).values()), how)


def _in_parallel(names: Collection[str], action: Callable[[str], _Result]) -> dict[str, _Result]:
    """Run an action on all boards in parallel, and return the results by board.

    After Ctrl-C, all actions are stopped before the exception is raised.
    """
    running: dict[str, concurrent.futures.Future[_Result]] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, len(names))) as pool:
        try:
            for name in names:
                running[name] = pool.submit(action, name)
            concurrent.futures.wait(running.values())
        except KeyboardInterrupt:
            _interrupt(running.values())
            raise
    return {name: done.result() for name, done in running.items()}


def _remove_results(lab: Lab, how: How) -> None:
    """Remove the results of an earlier run, so that they do not remain if this run is interrupted."""
    folder = report_folder(lab.config, how)
    for place in (folder, *folder.glob("*/turn*")):
        for old in Paths(folder=place).results:
            files.remove(old)


def _merged(lab: Lab, outcomes: Sequence[Outcome], how: How) -> merge.Merged:
    """Write the merged report. Raises DeviceTestsFailed unless the suite passed on every board."""
    merged = merge.write(lab.config, outcomes, report_folder(lab.config, how))
    if not merged.ok:
        raise merged.error()
    return merged


def report_folder(config: Config, how: How) -> Path:
    """The folder that contains the merged report and one folder per board."""
    return config.target_root / how.folder


def _board_folder(config: Config, name: str, how: How) -> Path:
    return report_folder(config, how) / merge.folder_of(name, how.turn)


def _outcome(lab: Lab, name: str, how: How, held: Place | None = None) -> Outcome:
    """Run the suite on one board, and return the outcome.

    The board is acquired unless it is already ``held``. An error becomes part of the outcome and does not end the runs
    on other boards.
    """
    paths = Paths(folder=_board_folder(lab.config, name, how))
    try:
        with contextlib.nullcontext(held) if held else _acquired(lab, {"name": name}) as place:
            for old in paths.results:
                files.remove(old)  # results of an earlier run must not be counted
            error = ""
            try:
                with progress.about(name):
                    _on_board(lab, place, how)
            except UserError as fault:
                error = str(fault)
                progress.warn(f"{name}: {error}")
            return Outcome.of(name, paths, error, how.files, how.turn)
    except (UserError, OSError) as fault:
        error = str(of_system(fault) if isinstance(fault, OSError) else fault)
        progress.warn(f"{name}: {error}")
        return Outcome(board=name, paths=paths, error=error, files=how.files, turn=how.turn)


@contextlib.contextmanager
def _acquired(lab: Lab, filters: Mapping[str, str], limit_s: float | None = None) -> Iterator[Place]:
    """Wait up to ``limit_s`` seconds (by default ``lab.queue_limit_s``) until a board is free, and hold it."""
    limit_s = lab.config.lab.queue_limit_s if limit_s is None else limit_s
    with acquired(lab.coordinator, filters, limit_s=limit_s) as place:
        progress.say(f"    acquired {place.name}")
        yield place


def _on_board(lab: Lab, place: Place, how: How) -> SuiteResult:
    """Run the suite on a held board, and update the board's quarantine tag."""
    try:
        result = _boot_and_run(lab, place, how)
    except BoardSilent:
        _set_quarantine(lab, place.name, "yes")
        raise
    _set_quarantine(lab, place.name, "no")
    return result


def _set_quarantine(lab: Lab, name: str, value: str) -> None:
    """Set the quarantine tag. If this fails, only a warning is printed, because the run's result is still valid."""
    try:
        lab.coordinator.tag(name, _QUARANTINE, value)
    except UserError as fault:
        progress.warn(f"cannot set the tag {_QUARANTINE}={value} on {name}: {fault}")


def _boot_and_run(lab: Lab, place: Place, how: How) -> SuiteResult:
    """Run the suite, and try once more if the board does not boot. Raises the suite's errors."""
    try:
        return _suite(lab, place, how)
    except BoardSilent as fault:
        progress.warn(f"the board did not boot; trying once more: {fault}")
    return _suite(lab, place, how)


def _virtual(place: Place) -> bool:
    return place.tags.get("kind") == "qemu"


def _trees_of(lab: Lab, places: Iterable[Place]) -> Trees:
    """The exported trees of the boards that must already be running; the run deploys to these trees."""
    offered = lab.coordinator.exported()
    found = []
    for place in places:
        resources = {kind for match in place.matches for kind in offered.get(match.rpartition("/")[0], ())}
        if _running(place, resources):
            found.append(target_of(lab.config, place.tags))
    return Trees(found)


def _running(place: Place, resources: Collection[str]) -> bool:
    """Whether the board must already be running, because its resources do not allow the run to boot it."""
    switched = not _SWITCHED.isdisjoint(resources) or place.tags.get("power") == lab_boards.MANUAL
    return "NetworkService" in resources and not switched


def _runs_elsewhere(lab: Lab, place: Place) -> bool:
    """Whether the place is a virtual machine on another PC."""
    return _virtual(place) and place.name not in {row.name for row in lab.rows}


def _suite(lab: Lab, place: Place, how: How) -> SuiteResult:
    if _runs_elsewhere(lab, place):
        raise UserError(
            f"{place.name} is a virtual machine on another PC",
            expected="a board, or a virtual machine in this PC's lab.boards",
            found=", ".join(place.matches),
            fix="run ./inv lab status to list the places, and choose another one",
        )
    target = target_of(lab.config, place.tags)
    running = _running(place, place.resources)
    deployed = how.trees.bring(target, running=running) if how.trees else None
    if place.tags.get("power") == lab_boards.MANUAL:
        ask_to_switch(place.name)
    board = RemoteBoard(
        name=place.name, coordinator=lab.coordinator.address, resources=place.resources, boots=not running
    )
    return suite.test_on_pi(
        target,
        qemu=_virtual(place),
        place=None if _virtual(place) else board,
        keyword=how.keyword,
        timing=how.timing,
        suite=how.suite,
        folder=_board_folder(lab.config, place.name, how),
        test_files=how.files,
        checksums=deployed.checksums if deployed else "",
    )


@contextlib.contextmanager
def host_of(config: Config, name: str) -> Iterator[str]:
    """Hold a place while the ``with`` block runs, and yield the address of its board, as ``USER@HOST:PORT``.

    The board must already be running. Raises the same errors as ``acquired``, and UserError for a virtual machine.
    """
    lab = Lab(config)
    with _acquired(lab, {"name": name}) as place:
        offered = lab.coordinator.parameters(place)
        if "NetworkService" not in offered:
            raise UserError(
                f"{name} has no address",
                expected="a board with a NetworkService resource",
                found=", ".join(sorted(offered)),
                fix="choose a real board: a virtual machine runs only during ./inv test-on-pi",
            )
        yield _address(offered["NetworkService"])


def _address(service: Mapping[str, Any]) -> str:
    """The address as ``USER@HOST:PORT``. A hand-written exporter configuration may lack the port; the default is 22."""
    host = service["address"]
    host = f"[{host}]" if ":" in host else host
    return f"{service['username']}@{host}:{service.get('port', 22)}"


def _interrupt(running: Iterable[concurrent.futures.Future[Any]]) -> None:
    """Stop all threads' programs. Wait until the threads release their boards, even if Ctrl-C is pressed again."""
    left = set(running)
    with process.deferred_signals():
        while left:
            process.interrupt_all()
            left = concurrent.futures.wait(left, timeout=0.1).not_done
