"""``./inv lab up|status|down``: manage a coordinator and an exporter, which run in the background on this PC.

``up`` writes the exporter's configuration, starts the programs that are not running, and defines a place for each row
in ``lab.boards``. Each program has a supervisor, a shell that restarts the program when it exits, because labgrid's
exporter exits when the connection to the coordinator is lost. The folder ``lab`` in the build folder contains the logs,
the generated files, and the PID and start time of each supervisor. ``down`` deletes this PC's places and stops both
programs. ``down`` raises InUse while a board is held or other PCs have places on this PC's coordinator.

``up`` starts the coordinator only if ``lab.coordinator`` is an address of this PC and no coordinator responds there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from device.lab.coordinator import Coordinator, Place
from device.labgrid_client import client_environment
from nfsroot.access import parse_host
from nfsroot.layout import Layout
from toolchain import files, lab_boards, process, process_identity, reaper
from toolchain.config import Config
from toolchain.errors import InUse, UserError
from toolchain.lab_boards import BoardRow, parse

DEFAULT = "127.0.0.1:20408"
PROJECT = "pitorch"
"""The value of the tag ``project`` on the places that ``up`` defines."""

_START_LIMIT_S = 60.0
_BAUD = 115200
"""The speed of a Raspberry Pi's serial console, in baud."""
_CARDS = {"usbsdmux": "USBSDMuxDevice", "sdwire": "USBSDWireDevice"}
_TOOLS = {"usbsdmux": "usbsdmux", "sdwire": "sd-mux-ctrl", lab_boards.USB_HUB: "uhubctl"}
"""The program that labgrid runs on this PC for each type of device."""
# $@ contains the program and its arguments. The pause limits the restart rate if the program cannot start.
_SUPERVISE = """
trap 'kill "$child" 2>/dev/null; wait; exit 0' TERM INT HUP
while :; do
  "$@" & child=$!
  wait "$child"
  sleep 2 & child=$!
  wait "$child"
done
"""
_PROGRAMS = ("exporter", "coordinator")
"""The programs, in the order in which they are stopped."""


@dataclass(frozen=True)
class Lab:
    """The lab that a configuration describes."""

    config: Config

    @property
    def folder(self) -> Path:
        """The folder with the logs, the generated files, and the PID and start time of each supervisor."""
        return self.config.build_root / "lab"

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, which runs on this PC or on another PC."""
        return Coordinator(self.config.lab.coordinator or DEFAULT)

    @property
    def rows(self) -> tuple[BoardRow, ...]:
        """The boards in ``lab.boards`` on this PC."""
        return tuple(parse(text) for text in self.config.lab.boards)

    @property
    def exporter_name(self) -> str:
        """The name of this PC's exporter, which must be unique on the coordinator."""
        return socket.gethostname()

    def log(self, name: str) -> Path:
        """The log file of a program."""
        return self.folder / f"{name}.log"

    def state(self, name: str) -> Path:
        """The file with the PID and start time of a program's supervisor."""
        return self.folder / f"{name}.json"


@dataclass(frozen=True, kw_only=True)
class BoardState:
    """A row in the table of boards that ``./inv lab status`` prints."""

    place: Place
    exported: bool


@dataclass(frozen=True, kw_only=True)
class LabState:
    """The state of a lab; ``address`` is empty if no coordinator responds."""

    address: str
    running: Mapping[str, int]
    """The process IDs of the supervisors on this PC, by program."""
    started: tuple[str, ...] = ()
    """The programs that ``up`` has started, and the places that it has defined."""
    boards: tuple[BoardState, ...] = ()
    stopped: tuple[str, ...] = ()
    """The programs that ``down`` has stopped, and the places that it has deleted."""

    def lines(self) -> list[str]:
        """The task's output."""
        if self.stopped:
            return [f"lab: stopped: {', '.join(self.stopped)}"]
        if not self.address:
            return ["lab: no coordinator responds"]
        others = ", ".join(f"{name} (pid {pid})" for name, pid in sorted(self.running.items())) or "nothing"
        new = f"; new: {', '.join(self.started)}" if self.started else ""
        lines = [f"lab: coordinator at {self.address}; running on this PC: {others}{new}"]
        rows = [("place", "tags", "resources", "state")]
        for board in self.boards:
            tags = " ".join(f"{key}={value}" for key, value in sorted(board.place.tags.items()))
            state = board.place.held_text().partition(" is ")[2] if board.place.holder else "free"
            rows.append((board.place.name, tags, "exported" if board.exported else "MISSING", state))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows if self.boards else ():
            padded = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
            lines.append("  ".join(["  ", *padded, row[3]]))
        return lines


def target_of(config: Config, tags: Mapping[str, str]) -> Config:
    """The configuration for a board. The board's tag ``architecture`` overrides ``image.architecture``."""
    architecture = tags.get(lab_boards.ARCHITECTURE, config.image.architecture)
    return replace(config, image=replace(config.image, architecture=architecture))


def resources(config: Config, rows: Sequence[BoardRow]) -> dict[str, dict[str, dict[str, object]]]:
    """The exporter's configuration, with one group of resources per board."""
    groups: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        if row.virtual:
            target = target_of(config, row.tags)
            tree: dict[str, object] = {
                "folder": str(Layout.of(target).tree),
                "architecture": target.image.architecture,
            }
            groups[row.name] = {"ExportedTree": tree}
            continue
        user, address, port = parse_host(row.address)
        groups[row.name] = {"NetworkService": {"address": address, "port": port, "username": user}}
        if row.power and row.power.model == lab_boards.USB_HUB:
            hub = {"match": {"sys_name": f"{row.power.host}:1.0"}, "index": int(row.power.index)}
            groups[row.name]["USBPowerPort"] = hub
        elif row.power:
            switch: dict[str, object] = {"model": row.power.model, "host": row.power.host, "index": row.power.index}
            groups[row.name]["NetworkPowerPort"] = switch
        if row.serial.startswith("/dev/"):
            groups[row.name]["RawSerialPort"] = {"port": row.serial, "speed": _BAUD}
        elif row.serial:
            server, _, number = row.serial.rpartition(":")
            groups[row.name]["NetworkSerialPort"] = {
                "host": server.strip("[]"),
                "port": int(number),
                "speed": _BAUD,
                "protocol": "raw",
            }
        if row.card:
            groups[row.name][_CARDS[row.card.model]] = {"match": {"ID_SERIAL_SHORT": row.card.serial}}
    return groups


def up(config: Config) -> LabState:
    """Start the coordinator and the exporter unless they are running, and define a place for each board.

    Raises UserError if a power model is unknown or a program does not start. Raises ProgramMissing if a row needs a
    program that is not installed. Raises NetworkUnreachable if a coordinator on another PC does not respond.
    """
    lab = Lab(config)
    _require_power_models(lab.rows)
    _require_programs(lab.rows)
    started: list[str] = []
    with files.owned(lab.folder):
        if not lab.coordinator.responds() and _is_here(lab.coordinator.address):
            _stop(lab, "coordinator")  # it does not respond, or has another address
            _start(lab, "coordinator", ["labgrid-coordinator", "--listen", lab.coordinator.address])
            started.append("coordinator")
            _wait(lab, "coordinator", lab.coordinator.responds)
        lab.coordinator.places()  # raises if a coordinator on another PC does not respond
        # The exporter renders the file as a Jinja template, in which ## starts a comment.
        text = f"{{% raw %}}\n{yaml.safe_dump(resources(config, lab.rows), sort_keys=False)}{{% endraw %}}\n"
        command = f"labgrid-exporter -c {lab.coordinator.address} THIS_FILE"
        header = f"## Generated from lab.boards. To start the exporter: {command}\n"
        described = lab.folder / "exporter.yaml"
        changed = not described.is_file() or described.read_text() != header + text
        running = bool(_session(lab, "exporter"))
        if changed and running:
            _stop(lab, "exporter")
        files.write_text_atomically(described, header + text, mode=0o600)  # the URL of a switch may have a password
        if lab.rows and (changed or not running):
            words = ["labgrid-exporter", "-c", lab.coordinator.address, "-n", lab.exporter_name]
            words += ["--hostname", _own_address(lab)]
            _start(lab, "exporter", [*words, str(described)])
            started.append("exporter")
        wanted = {f"{lab.exporter_name}/{row.name}" for row in lab.rows}
        if wanted:
            _wait(lab, "exporter", lambda: wanted <= lab.coordinator.exported().keys())
        for row in lab.rows:
            tags = {**row.tags, "project": PROJECT, "kind": "qemu" if row.virtual else "ssh"}
            if lab.coordinator.define(row.name, tags, f"{lab.exporter_name}/{row.name}/*"):
                started.append(f"place {row.name}")
        for place in _own_places(lab):
            if place.name not in {row.name for row in lab.rows} and not place.holder:
                lab.coordinator.delete(place.name)  # the row has been removed
        return _look(lab, tuple(started))


def status(config: Config) -> LabState:
    """Return the current state of the lab."""
    return _look(Lab(config))


def down(config: Config) -> LabState:
    """Delete this PC's places, and stop the exporter and the coordinator on this PC.

    If one of this PC's places is held, or if other PCs have places on this PC's coordinator, nothing is stopped, and
    InUse is raised.
    """
    lab = Lab(config)
    if not lab.folder.is_dir():
        return LabState(address="", running={})
    stopped: list[str] = []
    with files.owned(lab.folder):
        if lab.coordinator.responds():
            places = _own_places(lab)
            if _session(lab, "coordinator"):
                _require_no_others(lab, places)
            if held := [place for place in places if place.holder]:
                release = f".venv/bin/labgrid-client -x {lab.coordinator.address} -p {held[0].name} release --kick"
                raise InUse(
                    "the lab is in use",
                    expected="free boards",
                    found="; ".join(place.held_text() for place in held),
                    fix=f"wait until the boards are free; to release a board that someone else holds, run {release}",
                )
            for place in places:
                lab.coordinator.delete(place.name)
                stopped.append(f"place {place.name}")
        for name in _PROGRAMS:
            if _stop(lab, name):
                stopped.append(name)
        for name in ("coordinator", "exporter", "exporter.yaml"):
            files.remove(lab.folder / name)
    return LabState(address="", running={}, stopped=tuple(stopped))


def _look(lab: Lab, started: tuple[str, ...] = ()) -> LabState:
    running = {name: session for name in _PROGRAMS if (session := _session(lab, name))}
    if not lab.coordinator.responds():
        return LabState(address="", running=running)
    exported = lab.coordinator.exported()
    boards = [
        BoardState(
            place=place,
            exported=any(match.rpartition("/")[0] in exported for match in place.matches),
        )
        for _, place in sorted(lab.coordinator.places().items())
        if place.tags.get("project") == PROJECT
    ]
    return LabState(address=lab.coordinator.address, running=running, started=started, boards=tuple(boards))


def _own_places(lab: Lab) -> list[Place]:
    """The places that ``up`` has defined for this PC."""
    found = lab.coordinator.places().values()
    return [
        place
        for place in found
        if place.tags.get("project") == PROJECT and place.matches == (f"{lab.exporter_name}/{place.name}/*",)
    ]


def _require_no_others(lab: Lab, own: Sequence[Place]) -> None:
    """Raise InUse if other PCs have places on the coordinator.

    Without the coordinator, these PCs would lose their boards.
    """
    names = {place.name for place in own}
    others = [place for place in lab.coordinator.places().values() if place.name not in names]
    if others:
        delete = f".venv/bin/labgrid-client -x {lab.coordinator.address} -p {others[0].name} delete"
        raise InUse(
            "other PCs use this PC's coordinator",
            expected="no places that belong to other PCs",
            found="; ".join(
                place.held_text() if place.holder else f"{place.name} ({', '.join(place.matches) or 'no resources'})"
                for place in others
            ),
            fix=f"run ./inv lab down on those PCs first; to delete a place whose PC no longer exists, run {delete}",
        )


def _require_power_models(rows: Sequence[BoardRow]) -> None:
    for row in rows:
        if not row.power or row.power.model == lab_boards.USB_HUB:
            continue
        if importlib.util.find_spec(f"labgrid.driver.power.{row.power.model}") is None:
            raise UserError(
                f"the board {row.name} has an unknown power model",
                expected="a module in labgrid.driver.power, such as shelly_gen2, tplink, ubus or simplerest",
                found=row.power.model,
                fix="correct power=MODEL/INDEX/HOST in lab.boards",
            )


def _require_programs(rows: Sequence[BoardRow]) -> None:
    for row in rows:
        if row.serial.startswith("/dev/"):
            process.require_program("ser2net", f"to export the serial port of {row.name}")
        for device in (row.power, row.card):
            if device and device.model in _TOOLS:
                process.require_program(_TOOLS[device.model], f"to control the {device.model} of {row.name}")


def _is_here(address: str) -> bool:
    """Whether this PC has the address."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def _own_address(lab: Lab) -> str:
    """This PC's address as seen from the coordinator.

    Other PCs may be unable to resolve this PC's host name, so the address is used. If the coordinator is reached
    through a tunnel, the address is unknown, and the host name is returned instead.
    """
    host, _, port = lab.coordinator.address.rpartition(":")
    family, _, _, _, destination = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # only selects the route; nothing is sent
        address = str(probe.getsockname()[0])
    tunnel = ipaddress.ip_address(address).is_loopback and not _session(lab, "coordinator")
    return socket.gethostname() if tunnel else address


def program(name: str) -> Path:
    """The path of one of labgrid's programs, which are installed next to the running Python interpreter."""
    return Path(sys.executable).with_name(name)


def _start(lab: Lab, name: str, words: Sequence[str]) -> None:
    folder = lab.folder / name  # labgrid's coordinator stores its places in the current folder
    folder.mkdir(parents=True, exist_ok=True)
    files.remove(lab.log(name))
    lab.log(name).touch(0o600)  # the exporter prints its configuration, which may contain the password of a switch
    with lab.log(name).open("wb") as log:
        child = subprocess.Popen(
            ["sh", "-c", _SUPERVISE, f"pitorch-lab-{name}", str(program(words[0])), *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **client_environment(lab.coordinator.address), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        started = process_identity.find(child.pid)
        if started is None:
            raise _not_up(lab, name)
        files.write_text_atomically(lab.state(name), json.dumps(process_identity.record(started)) + "\n")
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    # The program outlives this process. Setting a return code prevents Popen's ResourceWarning.
    child.returncode = 0


def _wait(lab: Lab, name: str, ready: Callable[[], bool]) -> None:
    """Wait until a program is ready. If the time limit is exceeded, stop the program and raise UserError.

    The error contains the last lines of the program's output.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while not ready():
        if time.monotonic() > deadline:
            fault = _not_up(lab, name)
            _stop(lab, name)
            raise fault
        time.sleep(0.2)


def _not_up(lab: Lab, name: str) -> UserError:
    tail = lab.log(name).read_text(errors="replace").splitlines()[-15:]
    return UserError(
        f"labgrid's {name} did not start",
        expected=f"the {name} to respond within {_START_LIMIT_S:.0f} s",
        found="its last lines:\n" + "\n".join(f"    {line[:300]}" for line in tail),
        fix=f"correct the cause, then run ./inv lab up again; the complete output is in {lab.log(name)}",
    )


def _session(lab: Lab, name: str) -> int:
    """The session ID of a supervisor and its program; 0 if neither is running.

    If only the supervisor was killed, the program is still in the session, so the kernel cannot have reused the
    session ID.
    """
    try:
        identity = json.loads(lab.state(name).read_text())
        pid = int(identity["pid"])
        if process_identity.find(pid) is not None and process_identity.find_recorded(identity) is None:
            return 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0
    return pid if any(session == pid for _, _, session in reaper.running()) else 0


def _stop(lab: Lab, name: str) -> bool:
    """Stop a program and its supervisor. Return whether either of them was running."""
    if session := _session(lab, name):
        reaper.end({session})
        with contextlib.suppress(ChildProcessError):
            os.waitpid(session, os.WNOHANG)
    files.remove(lab.state(name))
    return bool(session)
