"""``./inv test-on-pi --place|--tag|--all``: run the device suite on boards of the lab.

    reserve → acquire → device.suite → release → merged report

Each board has a report folder of its own, ``lab/NAME`` in the target's folder, and is released on any exit. With
``--all`` all boards run in parallel. A board that fails to boot twice gets the tag ``quarantine=yes``, and the other
boards go on. ``--tag`` and ``--all`` leave it out until it passes a run with ``--place`` or ``./inv lab check``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from device import suite
from device.lab import merge
from device.lab.acquire import acquired
from device.lab.coordinator import Place
from device.lab.merge import Outcome
from device.lab.services import PROJECT, Lab
from device.labgrid_environment import RemoteBoard
from device.suite_result import Paths, SuiteResult
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import BoardSilent, UserError, of_system

_QUARANTINE = "quarantine"
_CHECK = Path(__file__).resolve().parent / "check"


@dataclass(frozen=True, kw_only=True)
class How:
    """How the suite runs on each board."""

    keyword: str | None = None
    timing: bool = True
    suite: Path | None = None
    """A folder of tests to run instead of ``tests/device``."""
    folder: str = "lab"
    """The folder of the reports, in the target's folder."""


def on_place(config: Config, name: str, how: How) -> SuiteResult:
    """Run the suite on one place. Raises the errors of ``acquired`` and of ``device.suite.test_on_pi``."""
    lab = Lab(config)
    with _acquired(lab, {"name": name}) as place:
        return _on_board(lab, place, how)


def on_tagged(config: Config, tag: str, how: How) -> SuiteResult:
    """Run the suite on the first free board with a tag ``NAME=VALUE``. Raises as ``on_place``."""
    if not re.fullmatch(r"[a-z][a-z0-9_]+=[a-z0-9_.-]+", tag):
        raise UserError(
            "--tag is not a tag", expected="NAME=VALUE, such as model=pi3", found=repr(tag), fix="correct it"
        )
    key, _, value = tag.partition("=")
    lab = Lab(config)
    filters = {key: value, "project": PROJECT, _QUARANTINE: "no"}
    if not any(row.virtual for row in lab.rows):
        filters.setdefault("kind", "ssh")  # a virtual machine runs only on its own PC
    with _acquired(lab, filters) as place:
        return _on_board(lab, place, how)


def on_all(config: Config, how: How) -> merge.Merged:
    """Run the suite on all boards of the lab that are not in quarantine, in parallel, and merge the results.

    Virtual machines of other PCs are left out.

    Raises DeviceTestsFailed if a board did not pass, after the merged report has been written, and UserError if no
    board is left.
    """
    lab = Lab(config)
    places = [place for place in lab.coordinator.places().values() if place.tags.get("project") == PROJECT]
    names = []
    for place in sorted(places, key=lambda place: place.name):
        if _runs_elsewhere(lab, place):
            progress.warn(f"{place.name} is left out: it is a virtual machine of another PC")
        elif place.tags.get(_QUARANTINE) == "yes":
            progress.warn(f"{place.name} is in quarantine; to try it again: ./inv test-on-pi --place={place.name}")
        else:
            names.append(place.name)
    if not names:
        raise UserError(
            "the lab has no board to test on",
            expected=f"a place with the tags project={PROJECT} and quarantine=no",
            found=f"{len(places)} in quarantine or left out" if places else "none",
            fix="set lab.boards, then run ./inv lab up",
        )
    return _on_boards(lab, names, how)


def check(config: Config) -> merge.Merged:
    """Prove each board of this PC, also those in quarantine: switch it on, log in, run one trivial test, switch it off.

    Raises as ``on_all``.
    """
    lab = Lab(config)
    names = [row.name for row in lab.rows]
    if not names:
        raise UserError(
            "this PC has no boards", expected="rows in lab.boards", found="none", fix="set lab.boards (docs/lab.md)"
        )
    return _on_boards(lab, names, How(timing=False, suite=_CHECK, folder="lab-check"))


def _on_boards(lab: Lab, names: Sequence[str], how: How) -> merge.Merged:
    merged_paths = Paths(folder=report_folder(lab.config, how))
    for old in (merged_paths.junit, merged_paths.report):
        files.remove(old)  # an interrupted run must not leave those of an earlier run
    running: dict[str, concurrent.futures.Future[Outcome]] = {}
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        try:
            for name in names:
                running[name] = pool.submit(_outcome, lab, name, how)
            concurrent.futures.wait(running.values())
        except KeyboardInterrupt:
            _interrupt(running.values())
            raise
    merged = merge.write(lab.config, [running[name].result() for name in names], report_folder(lab.config, how))
    if not merged.ok:
        raise merged.error()
    return merged


def report_folder(config: Config, how: How) -> Path:
    """The folder of the merged report, and of one folder per board."""
    return config.target_root / how.folder


def _outcome(lab: Lab, name: str, how: How) -> Outcome:
    """The result on one board. An error of one board does not end the run."""
    paths = Paths(folder=report_folder(lab.config, how) / name)
    try:
        with _acquired(lab, {"name": name}) as place:
            for old in paths.results:
                files.remove(old)  # those of an earlier run must not be counted
            error = ""
            try:
                _on_board(lab, place, how)
            except UserError as fault:
                error = str(fault)
                progress.warn(f"{name}: {error}")
            return Outcome.of(name, paths, error)
    except (UserError, OSError) as fault:
        error = str(of_system(fault) if isinstance(fault, OSError) else fault)
        progress.warn(f"{name}: {error}")
        return Outcome(board=name, paths=paths, error=error)


@contextlib.contextmanager
def _acquired(lab: Lab, filters: Mapping[str, str]) -> Iterator[Place]:
    with acquired(lab.coordinator, filters, limit_s=lab.config.lab.queue_limit_s) as place:
        progress.say(f"    acquired {place.name}")
        yield place


def _on_board(lab: Lab, place: Place, how: How) -> SuiteResult:
    """Run the suite on a board that is held, and set or remove its quarantine."""
    try:
        result = _boot_and_run(lab, place, how)
    except BoardSilent:
        _set_quarantine(lab, place.name, "yes")
        raise
    _set_quarantine(lab, place.name, "no")
    return result


def _set_quarantine(lab: Lab, name: str, value: str) -> None:
    """Set the tag. A coordinator that does not respond does not change the result of a run, so it is a warning."""
    try:
        lab.coordinator.tag(name, _QUARANTINE, value)
    except UserError as fault:
        progress.warn(f"{name} does not have the tag {_QUARANTINE}={value}: {fault}")


def _boot_and_run(lab: Lab, place: Place, how: How) -> SuiteResult:
    """Run the suite; a board that does not boot gets a second chance. Raises the errors of the suite."""
    try:
        return _suite(lab, place, how)
    except BoardSilent as fault:
        progress.warn(f"{place.name} did not boot, trying once more: {fault}")
    return _suite(lab, place, how)


def _virtual(place: Place) -> bool:
    return place.tags.get("kind") == "qemu"


def _runs_elsewhere(lab: Lab, place: Place) -> bool:
    """Whether the place is a virtual machine of another PC."""
    return _virtual(place) and place.name not in {row.name for row in lab.rows}


def _suite(lab: Lab, place: Place, how: How) -> SuiteResult:
    if _runs_elsewhere(lab, place):
        raise UserError(
            f"{place.name} is a virtual machine of another PC",
            expected="a board, or a virtual machine in lab.boards of this PC",
            found=", ".join(place.matches),
            fix="choose another place: ./inv lab status lists them",
        )
    board = RemoteBoard(
        name=place.name, coordinator=lab.coordinator.address, switched="NetworkPowerPort" in place.resources
    )
    return suite.test_on_pi(
        lab.config,
        qemu=_virtual(place),
        place=None if _virtual(place) else board,
        keyword=how.keyword,
        timing=how.timing,
        suite=how.suite,
        folder=report_folder(lab.config, how) / place.name,
    )


@contextlib.contextmanager
def host_of(config: Config, name: str) -> Iterator[str]:
    """Hold a place while the block runs, and yield the ``USER@HOST:PORT`` of its board, which must be running.

    Raises the errors of ``acquired``, and UserError for a virtual machine.
    """
    lab = Lab(config)
    with _acquired(lab, {"name": name}):
        described = yaml.safe_load(lab.coordinator.client("-p", name, "env").output)
        offered = described["targets"][name]["resources"]
        for service in (item["NetworkService"] for item in offered if "NetworkService" in item):
            yield _address(service)
            return
        raise UserError(
            f"{name} has no address",
            expected="a board with a NetworkService",
            found=", ".join(key for item in offered for key in item),
            fix="choose a board: a virtual machine runs only during test-on-pi",
        )


def _address(service: Mapping[str, Any]) -> str:
    """``USER@HOST:PORT``. An exporter's file that was written by hand may omit the port."""
    return f"{service['username']}@{service['address']}:{service.get('port', 22)}"


def _interrupt(running: Iterable[concurrent.futures.Future[Any]]) -> None:
    """Stop the programs of all threads, until the threads have released their boards. A second Ctrl-C waits too."""
    left = set(running)
    with process.deferred_signals():
        while left:
            process.interrupt_all()
            left = concurrent.futures.wait(left, timeout=0.1).not_done
