"""Tests of a lab with labgrid's own coordinator and exporter."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from exports import exported_in
from http_parts import answering
from lab_parts import programs, running, with_boards
from labgrid import Environment
from labgrid.remote.config import ResourceConfig
from labgrid.strategy import StrategyError
from processes import command_lines
from waiting import LIMIT_S, eventually

from device import labgrid_environment, suite
from device.lab import log, release, run, services
from device.lab.acquire import acquired
from device.lab.coordinator import Coordinator, own_name
from device.labgrid_environment import RemoteBoard
from device.strategy import cause_of
from device.suite_result import Paths
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from toolchain import board_events, files, ports, reaper
from toolchain.config import ROOT, Config, LabConfig
from toolchain.errors import BoardSilent, DeviceTestsFailed, InUse, NetworkUnreachable, UserError

BOARDS = ("pi3=pi@192.0.2.3 model=pi3 bits=32", "pi4=192.0.2.4:2222 model=pi4 bits=64")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    made = exported_in(tmp_path_factory.mktemp("lab"))
    with running(replace(made, lab=LabConfig(boards=BOARDS))) as started:
        yield started


@pytest.fixture
def coordinator(config: Config) -> Coordinator:
    return services.Lab(config).coordinator


@pytest.fixture
def far(coordinator: Coordinator) -> Iterator[str]:
    """Define a place for a virtual machine on another PC, and yield its name."""
    coordinator.define("far", {"project": services.PROJECT, "kind": "qemu", "model": "virt"}, "elsewhere/far/*")
    yield "far"
    coordinator.delete("far")


def kill(config: Config, name: str) -> None:
    before = programs(config, name)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(programs(config, name)) - set(before))


# ------------------------------------------------------------------------------------------------ up, status, down


def test_up_starts_only_what_is_missing(config: Config) -> None:
    again = services.up(config)
    assert again.started == ()
    assert set(again.running) == {"coordinator", "exporter"}
    assert [(board.place.name, board.exported) for board in again.boards] == [("pi3", True), ("pi4", True)]
    assert again.boards[0].place.tags == {
        "model": "pi3",
        "bits": "32",
        "kind": "ssh",
        "project": "pitorch",
        "quarantine": "no",
    }


def test_the_exporter_publishes_an_address_that_clients_reach(config: Config) -> None:
    (pid,) = programs(config, "exporter")
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert words[words.index("--hostname") + 1] == "127.0.0.1", (
        "the coordinator's address is the loopback address, so the exporter's must be too"
    )


def test_down_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(replace(exported_in(tmp_path), lab=LabConfig(boards=BOARDS))) as config:
        sessions = set(services.status(config).running.values())
        assert services.down(config).lines() == ["lab: stopped: place pi3, place pi4, exporter, coordinator"]
        assert [pid for pid, _, session in reaper.running() if session in sessions] == []
        assert services.status(config).lines() == ["lab: no coordinator responds"]
        left = {path.name for path in services.Lab(config).folder.iterdir()}
        assert left <= {".pitorch-owned", "lock", "coordinator.log", "exporter.log"}
        assert services.down(config).running == {}, "stopping the lab a second time must not be an error"


def test_a_changed_row_changes_the_place(config: Config, coordinator: Coordinator) -> None:
    changed = services.up(with_boards(config, "pi3=pi@192.0.2.3 model=pi2", "pi5=192.0.2.5"))
    assert changed.started == ("exporter", "place pi3", "place pi5")
    assert "bits" not in coordinator.places()["pi3"].tags
    assert set(coordinator.places()) == {"pi3", "pi5"}, "the place of the removed row must be deleted"
    services.up(config)
    assert set(coordinator.places()) == {"pi3", "pi4"}


def test_other_users_cannot_read_the_password_of_a_switch(config: Config) -> None:
    """The exporter prints its configuration to its log. Earlier versions created both files with mode 0644."""
    lab = services.Lab(config)
    private = (lab.folder / "exporter.yaml", lab.log("exporter"))
    for path in private:
        path.chmod(0o644)
    services.up(with_boards(config, "pi3=192.0.2.3 power=simplerest/1/http://admin:secret@192.0.2.9/{index}/{value}"))
    for path in private:
        assert "admin:secret" in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
    services.up(config)


def test_template_syntax_in_a_row_reaches_the_exporter(config: Config) -> None:
    """The exporter renders its configuration as a Jinja template."""
    host = "http://admin:a##b{{c{%d{#e@192.0.2.9/{index}/{value}"
    services.up(with_boards(config, f"pi3=192.0.2.3 power=simplerest/1/{host}"))
    read = ResourceConfig(str(services.Lab(config).folder / "exporter.yaml")).data
    assert read["pi3"]["NetworkPowerPort"]["host"] == host
    services.up(config)


def test_down_refuses_while_a_board_is_held(config: Config, coordinator: Coordinator) -> None:
    with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S):
        assert f"held by {own_name()} (since 20" in "\n".join(services.status(config).lines())
        with pytest.raises(InUse, match="the lab is in use") as caught:
            services.down(config)
        assert own_name() in caught.value.found
    assert coordinator.responds()


def test_down_keeps_a_coordinator_that_other_pcs_use(config: Config, coordinator: Coordinator, far: str) -> None:
    with pytest.raises(InUse, match="other PCs use this PC's coordinator") as caught:
        services.down(config)
    assert caught.value.found == "far (elsewhere/far/*)"
    assert set(coordinator.places()) == {"pi3", "pi4", far}


def test_a_name_that_another_pc_uses_is_refused(config: Config, coordinator: Coordinator) -> None:
    before = coordinator.places()["pi3"]
    with pytest.raises(UserError, match="pi3 belongs to another PC") as caught:
        coordinator.define("pi3", {"model": "pi5"}, "elsewhere/pi3/*")
    assert f"{services.Lab(config).exporter_name}/pi3/*" in caught.value.found
    assert "choose another name for the row" in caught.value.fix
    assert coordinator.places()["pi3"] == before


def test_an_unknown_power_model_is_refused(config: Config) -> None:
    with pytest.raises(UserError, match="unknown power model"):
        services.up(with_boards(config, "pi3=192.0.2.3 power=lever/0/here"))


def test_a_missing_coordinator_elsewhere_is_an_error(tmp_path: Path) -> None:
    lab = LabConfig(boards=BOARDS, coordinator="lab.invalid:20408")
    config = replace(exported_in(tmp_path), lab=lab)
    with pytest.raises(NetworkUnreachable, match="does not respond"):
        services.up(config)
    assert services.status(config).running == {}, "no exporter must be started"


# ------------------------------------------------------------------------------------------------ acquire, release


def test_a_second_client_is_shown_the_holder(coordinator: Coordinator) -> None:
    with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S) as place:
        assert place.holder == own_name()
        assert place.resources == ("NetworkService",)
        with pytest.raises(InUse) as caught, acquired(coordinator, {"name": "pi3"}, limit_s=1):
            raise AssertionError
        assert place.held_text() in caught.value.found
    assert not coordinator.places()["pi3"].holder


def test_a_waiting_client_gets_the_board_when_it_is_free(coordinator: Coordinator) -> None:
    def wait() -> float:
        with acquired(coordinator, {"model": "pi3"}, limit_s=LIMIT_S) as place:
            assert place.name == "pi3"
            return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S):
            waiting = pool.submit(wait)
            time.sleep(3)
            assert not waiting.done()
            freed = time.monotonic()
        assert waiting.result(LIMIT_S) > freed
    assert not coordinator.places()["pi3"].holder


def test_a_tag_selects_a_free_board(coordinator: Coordinator) -> None:
    project = {"project": "pitorch"}
    with (
        acquired(coordinator, project, limit_s=LIMIT_S) as one,
        acquired(coordinator, project, limit_s=LIMIT_S) as two,
    ):
        assert {one.name, two.name} == {"pi3", "pi4"}


def test_a_tag_without_a_board_is_an_error(coordinator: Coordinator) -> None:
    with pytest.raises(UserError, match="has the tags model=pi9"), acquired(coordinator, {"model": "pi9"}, limit_s=1):
        raise AssertionError


HOLD = """
import signal, sys, time
from device.lab.acquire import acquired
from device.lab.coordinator import Coordinator
signal.signal(signal.SIGINT, signal.default_int_handler)
with acquired(Coordinator(sys.argv[1]), {"name": "pi3"}, limit_s=60):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_client_releases_the_board(coordinator: Coordinator, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, coordinator.address], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"held\n"
            assert coordinator.places()["pi3"].holder == own_name()
            client.send_signal(number)
            client.wait(LIMIT_S)
        finally:
            client.kill()
    eventually(lambda: not coordinator.places()["pi3"].holder)


def test_a_place_is_released_if_its_reservation_has_expired(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under sudo, a place is held by the user who ran sudo."""
    monkeypatch.delenv("LG_USERNAME", raising=False)
    monkeypatch.setenv("SUDO_USER", "alice")
    coordinator.acquire(coordinator.places()["pi3"])
    holder = coordinator.places()["pi3"].holder
    assert holder == own_name()
    assert holder.endswith("/alice")
    assert release.main(coordinator.address, "pi3", holder, "EXPIRED") == 0
    assert not coordinator.places()["pi3"].holder


# ------------------------------------------------------------------------------------------------ faults


def test_a_killed_exporter_is_restarted(config: Config, coordinator: Coordinator) -> None:
    kill(config, "exporter")
    eventually(lambda: all(board.exported for board in services.status(config).boards))
    with acquired(coordinator, {"name": "pi4"}, limit_s=LIMIT_S) as place:
        assert place.resources == ("NetworkService",)


def test_a_board_without_its_exporter_is_refused(config: Config, coordinator: Coordinator) -> None:
    os.killpg(services.status(config).running["exporter"], signal.SIGKILL)
    eventually(lambda: not coordinator.exported())
    assert "MISSING" in "\n".join(services.status(config).lines())
    with (
        pytest.raises(UserError, match="no exported resource matches"),
        acquired(coordinator, {"name": "pi4"}, limit_s=LIMIT_S),
    ):
        raise AssertionError
    assert services.up(config).started == ("exporter",)


def test_a_board_is_released_after_a_coordinator_restart(config: Config, coordinator: Coordinator) -> None:
    """A restarted coordinator has no record of the holder; releasing the place then is not an error.

    The exporter reconnects. The coordinator saves places every 15 s; ``up`` redefines those that were lost.
    """
    with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S):
        kill(config, "coordinator")
        eventually(coordinator.responds)
        services.up(config)
        assert all(board.exported for board in services.status(config).boards)
    assert not coordinator.places()["pi3"].holder
    with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S):
        pass


def test_a_board_is_released_when_the_coordinator_is_back(
    config: Config, coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    (pid,) = programs(config, "coordinator")
    # The time limit of a call is 15 s. The first call is the task's, and the second one is that of device.lab.release.
    again = threading.Timer(33, os.kill, (pid, signal.SIGCONT))
    try:
        with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S):
            os.kill(pid, signal.SIGSTOP)
            again.start()
    finally:
        again.cancel()
        os.kill(pid, signal.SIGCONT)
    assert not coordinator.places()["pi3"].holder
    assert "still" not in capsys.readouterr().err
    # The exporter has lost its connection meanwhile. Other tests need its resources.
    eventually(lambda: all(board.exported for board in services.status(config).boards))


# ------------------------------------------------------------------------------------------------ the suite


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--place=pi3", "--all"], "--place cannot be combined with --all"),
        (["--tag=model=pi3", "--host=pi", "--chroot"], "--tag cannot be combined with --host, --chroot"),
        (["--shard", "--place=pi3"], "--shard requires --tag or --all"),
        (["--shard"], "--shard requires --tag or --all"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: list[str], fault: str) -> None:
    argv = [sys.executable, "-m", "toolchain.cli", "test-on-pi", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 11
    assert fault in done.stderr


def test_an_invalid_tag_is_refused(config: Config) -> None:
    with pytest.raises(UserError, match="--tag has the wrong form"):
        run.on_tagged(config, "pi3", run.How())
    with pytest.raises(UserError, match="--tag has the wrong form"):
        run.on_shards(config, "pi3", run.How())


def test_a_virtual_machine_of_another_pc_is_left_out(
    config: Config, coordinator: Coordinator, far: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no board has the tags model=virt"):
        run.on_tagged(config, "model=virt", run.How())
    for name in ("pi3", "pi4"):
        coordinator.tag(name, "quarantine", "yes")
    try:
        with pytest.raises(UserError, match="no board to test on"):
            run.on_all(config, run.How())
    finally:
        for name in ("pi3", "pi4"):
            coordinator.tag(name, "quarantine", "no")
    shown = " ".join(capsys.readouterr().err.split())
    assert f"skipping {far}: it is a virtual machine on another PC" in shown
    assert "pi3 is in quarantine" in shown


def test_a_board_that_is_not_held_is_an_error(config: Config, coordinator: Coordinator, tmp_path: Path) -> None:
    board = RemoteBoard(name="pi3", coordinator=coordinator.address, resources=())
    with pytest.raises(UserError, match="labgrid does not give this run access to the board") as caught:
        suite.test_on_pi(config, place=board, timing=False, folder=tmp_path)
    assert "pi3 is not acquired" in caught.value.found


@contextlib.contextmanager
def power_switch(status: int = 200, switch: Callable[[bool], None] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Run a power switch for labgrid's driver simplerest; yield its address and the requests that it receives.

    ``switch`` is called with the new state at each request.
    """
    requests: list[str] = []
    turn: Callable[[bool], object] = switch or (lambda _on: None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            turn(self.path.endswith("/1"))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with answering(Handler) as port:
        yield f"127.0.0.1:{port}", requests


def test_a_remote_place_is_switched_on_and_off(config: Config, coordinator: Coordinator, tmp_path: Path) -> None:
    with power_switch() as (address, requests):
        services.up(
            with_boards(config, f"pi3=pi@192.0.2.3:2222 power=simplerest/4/http://{address}/{{index}}/{{value}}")
        )
        with acquired(coordinator, {"name": "pi3"}, limit_s=LIMIT_S) as place:
            assert sorted(place.resources) == ["NetworkPowerPort", "NetworkService"]
            paths = Paths(folder=tmp_path / "report")
            board = RemoteBoard(name="pi3", coordinator=coordinator.address, resources=place.resources)
            labgrid_environment.prepare(config, paths, host=None, chroot=False, timing=False, place=board)
            made = Environment(str(paths.environment))
            strategy = made.get_target("main").get_driver("Strategy", activate=False)
            assert str(strategy.ssh.access) == "pi@192.0.2.3:2222"
            assert strategy.server is None
            strategy.transition("booted")
            assert requests == ["/4/0", "/4/1"]
            strategy.transition("off")
            assert requests[2:] == ["/4/0"]
            made.cleanup()
            switch = f"outlet 4 of the simplerest switch at http://{address}/{{index}}/{{value}}"
            recorded = [(event.source, event.text) for event in board_events.read(paths.events)]
            assert recorded == [("power", f"off and on: {switch}"), ("power", f"off: {switch}")]
    services.up(config)


def switched(folder: Path, address: str, **tools: str) -> Environment:
    """Return the labgrid environment of a board with a power switch, without a coordinator."""
    paths = Paths(folder=folder / "report")
    labgrid_environment.prepare(exported_in(folder), paths, host="pi@127.0.0.1", chroot=False, timing=False)
    described = yaml.safe_load(paths.environment.read_text())
    main = described["targets"]["main"]
    port = {"model": "simplerest", "host": f"http://{address}/{{index}}/{{value}}", "index": "4"}
    main["resources"]["NetworkPowerPort"] = port
    main["drivers"] = {"NetworkPowerDriver": {}, **main["drivers"]}
    paths.environment.write_text(yaml.safe_dump({**described, "tools": tools}, sort_keys=False))
    return Environment(str(paths.environment))


def kernel(text: bytes) -> bytes:
    """Return a kernel for QEMU's virt machine that prints a text and does nothing else."""
    return struct.pack(
        "<9I",
        0xE3A00409,  # mov r0, #0x09000000, the UART of QEMU's virt machine
        0xE28F1018,  # adr r1, text
        0xE4D12001,  # next: ldrb r2, [r1], #1
        0xE3520000,  # cmp r2, #0
        0x0A000001,  # beq end
        0xE5802000,  # str r2, [r0]
        0xEAFFFFFA,  # b next
        0xE320F003,  # end: wfi, which uses no CPU time of the PC
        0xEAFFFFFD,  # b end
    ) + (text + b"\0")


@pytest.mark.machine
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the virtual machine's NFS server")
def test_power_and_console_of_a_virtual_machine_are_recorded(tmp_path: Path) -> None:
    config = exported_in(tmp_path)
    boot = Layout.of(config).tree / "boot"
    boot.mkdir()
    text = b"hello\r\nfrom the kernel\r\nKernel panic - not syncing: no root\r\n"
    (boot / "vmlinuz-1-armmp").write_bytes(kernel(text))
    (boot / "initrd.img-1-armmp").write_bytes(bytes(4096))
    quick = replace(config, device=replace(config.device, boot_timeout_s=LIMIT_S))
    paths = Paths(folder=quick.target_root / "lab" / "vm")
    labgrid_environment.prepare(quick, paths, host=None, chroot=False, timing=False)
    made = Environment(str(paths.environment))
    strategy = made.get_target("main").get_driver("Strategy", activate=False)
    with private_network():
        with pytest.raises(StrategyError):
            strategy.transition("shell")
        strategy.abandon()
    made.cleanup()
    shown = [line.split(maxsplit=2)[2] for line in log.lines(quick, "vm")]
    assert shown[0].startswith("nfs      the server for ")
    assert shown[1:] == [
        "power    on: the virtual machine starts",
        "console  hello",
        "console  from the kernel",
        "console  Kernel panic - not syncing: no root",
        "power    off: the virtual machine has stopped",
        "nfs      the server has stopped",
    ]


def test_a_serial_port_of_this_pc_is_recorded(config: Config, coordinator: Coordinator) -> None:
    """A pseudo-terminal takes the place of the serial port. labgrid's exporter makes it available through ser2net."""
    board, device = os.openpty()
    tty.setraw(device)
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.2):
            os.write(board, b"Uncompressing Linux\r\n")

    quick = replace(config, device=replace(config.device, boot_timeout_s=10.0))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        services.up(with_boards(quick, f"wired=127.0.0.1:{ports.free_port()} serial={os.ttyname(device)}"))
        with pytest.raises(BoardSilent) as caught:
            run.on_place(quick, "wired", run.How(timing=False))
    finally:
        ended.set()
        writer.join()
        os.close(board)
        os.close(device)
    assert "| Uncompressing Linux" in caught.value.found
    console = [event for event in log.lines(quick, "wired") if event.endswith("console  Uncompressing Linux")]
    assert len(console) > 10
    services.up(config)
    assert "wired" not in coordinator.places()


@pytest.mark.machine
def test_a_boot_that_hangs_is_shown_with_its_console(config: Config, coordinator: Coordinator, tmp_path: Path) -> None:
    """The power switch starts and kills the virtual machine, whose serial port is a TCP server."""
    (tmp_path / "vmlinuz").write_bytes(kernel(b"Uncompressing Linux\r\nwaiting for the root device\r\n"))
    console = ports.free_port()
    words = ["qemu-system-arm", "-M", "virt", "-cpu", "cortex-a7", "-m", "128", "-display", "none", "-monitor", "none"]
    words += [
        "-nic",
        "none",
        "-kernel",
        str(tmp_path / "vmlinuz"),
        "-serial",
        f"tcp:127.0.0.1:{console},server=on,wait=on",
    ]
    machines: list[subprocess.Popen[bytes]] = []

    def switch(on: bool) -> None:
        for machine in machines:
            machine.kill()
            machine.wait()
        if on:
            machines.append(subprocess.Popen(words))

    quick = replace(config, device=replace(config.device, boot_timeout_s=10.0))
    try:
        with power_switch(switch=switch) as (address, requests):
            row = f"hung=127.0.0.1:{ports.free_port()} serial=127.0.0.1:{console}"
            services.up(with_boards(quick, f"{row} power=simplerest/4/http://{address}/{{index}}/{{value}}"))
            with pytest.raises(BoardSilent) as caught:
                run.on_place(quick, "hung", run.How(timing=False))
            assert "| waiting for the root device" in caught.value.found
            assert requests == ["/4/0", "/4/1"] * 2, "the board must be switched off and on for each of two attempts"
            assert len(machines) == 2
            place = coordinator.places()["hung"]
            assert (place.holder, place.tags["quarantine"]) == ("", "yes")
            shown = [line.split(maxsplit=3)[2:] for line in log.lines(quick, "hung")]
            assert ["console", "waiting for the root device"] in shown
            assert "power" in {source for source, _ in shown}
    finally:
        switch(False)
        services.up(config)


LOST = """#!/bin/sh
# Replaces an ssh that logs in, creates its control socket, and loses the connection.
while [ $# -gt 0 ]; do [ "$1" = -S ] && : > "$2"; shift; done
exit 0
"""


def test_a_board_that_no_longer_responds_is_switched_off(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(LOST)
    ssh.chmod(0o755)
    with power_switch() as (address, requests):
        made = switched(tmp_path, address, ssh=str(ssh))
        strategy = made.get_target("main").get_driver("Strategy", activate=False)
        strategy.transition("shell")
        strategy.ssh._keepalive.wait(LIMIT_S)
        strategy.transition("off")
        made.cleanup()
    assert requests == ["/4/0", "/4/1", "/4/0"]


@pytest.mark.parametrize("reachable", [True, False])
def test_a_power_switch_that_does_not_work_is_an_error(tmp_path: Path, reachable: bool) -> None:
    with power_switch(500) as (address, _):
        made = switched(tmp_path, address if reachable else f"127.0.0.1:{ports.free_port()}")
        strategy = made.get_target("main").get_driver("Strategy", activate=False)
        with pytest.raises(StrategyError) as caught:
            strategy.transition("booted")
        strategy.abandon()
        made.cleanup()
    fault = cause_of(caught.value)
    assert isinstance(fault, UserError)
    assert fault.summary == "the power switch of the board does not work"
    assert ("500 Server Error" if reachable else "ConnectionError") in fault.found
    assert (
        board_events.read(tmp_path / "report" / "events.jsonl")[-1].text == f"the switch does not work: {fault.found}"
    )


ALL = """
import json, signal, sys
from device.lab import run
from toolchain.config import load_config
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
getattr(run, sys.argv[2])(load_config(json.loads(sys.argv[1])), *sys.argv[3:], run.How())
"""


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["on_all"], signal.SIGKILL),
        (["on_all"], signal.SIGINT),
        (["on_all"], signal.SIGTERM),
        (["on_shards", ""], signal.SIGKILL),
        (["on_shards", ""], signal.SIGINT),
    ],
)
def test_a_stopped_run_releases_all_boards(
    config: Config, coordinator: Coordinator, words: list[str], number: signal.Signals
) -> None:
    """The boards do not respond, so the run is still waiting for a login when it is stopped."""
    settings = {
        "nfs": {"folder": str(config.nfsroot)},
        "build": {"folder": str(config.build.folder)},
        "lab": {"coordinator": coordinator.address, "boards": list(BOARDS)},
    }
    folder = run.report_folder(config, run.How())
    files.remove(folder)
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("an earlier run")
    with subprocess.Popen([sys.executable, "-c", ALL, json.dumps(settings), *words], cwd=ROOT) as task:
        try:
            eventually(lambda: all(place.holder for place in coordinator.places().values()))
            eventually(lambda: all((folder / name / "record.jsonl").is_file() for name in ("pi3", "pi4")))
            task.send_signal(number)
            assert task.wait(LIMIT_S) != 0
        finally:
            task.kill()
    eventually(lambda: not any(place.holder for place in coordinator.places().values()))
    assert not (folder / "index.html").exists()
    eventually(lambda: not any(str(folder) in line for line in command_lines().values()))


def test_a_system_error_of_a_board_is_in_the_merged_report(config: Config) -> None:
    folder = run.report_folder(config, run.How())
    files.remove(folder)
    folder.mkdir(parents=True)
    for name in ("pi3", "pi4"):
        (folder / name).write_text("a file in place of the board's folder")
    try:
        with pytest.raises(DeviceTestsFailed) as caught:
            run.on_all(config, run.How())
        assert "pi4/junit.xml: Not a directory" in caught.value.found
        assert (folder / "index.html").read_text().count("expected: a usable file or folder") == 2
    finally:
        files.remove(folder)


def test_a_board_that_does_not_boot_twice_is_quarantined(
    config: Config, coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = replace(config, device=replace(config.device, boot_timeout_s=2.0))
    quick = with_boards(quick, f"dead=127.0.0.1:{ports.free_port()}")
    services.up(quick)
    with pytest.raises(DeviceTestsFailed, match="not pass on every board") as caught:
        run.on_all(quick, run.How())
    assert "dead: did not run: root@127.0.0.1" in caught.value.found
    assert "dead: the board did not boot; trying once more" in " ".join(capsys.readouterr().err.split())
    assert coordinator.places()["dead"].tags["quarantine"] == "yes"
    assert not coordinator.places()["dead"].holder
    folder = run.report_folder(quick, run.How())
    (case,) = ElementTree.parse(folder / "junit.xml").getroot().iter("testcase")  # noqa: S314 - a file of this program
    assert case.find("error") is not None
    assert "the suite did not run" in (folder / "index.html").read_text()
    services.up(quick)
    assert coordinator.places()["dead"].tags["quarantine"] == "yes", "``up`` must not end the quarantine"
    with pytest.raises(UserError, match="no board to test on"):
        run.on_all(quick, run.How())
    with pytest.raises(DeviceTestsFailed, match="not pass on every board"):
        run.check(quick)
    assert "the suite did not run" in (quick.target_root / "lab-check" / "index.html").read_text()
    services.up(config)


@pytest.fixture
def built_tree(config: Config, tmp_path: Path) -> Config:
    """Return the lab's configuration with another export, whose manifest states that its image was built here."""
    made = exported_in(tmp_path / "export", image_id="1", built_image="1")
    return replace(made, lab=config.lab, build=config.build, device=replace(made.device, boot_timeout_s=2.0))


@pytest.mark.skipif(os.geteuid() != 0, reason="deploy requires root")
def test_a_failed_deployment_does_not_end_other_runs(
    config: Config, built_tree: Config, coordinator: Coordinator
) -> None:
    """The tree's architecture is wrong for the running board.

    Nothing is deployed to the other board, which the run boots.
    """
    library = Layout.of(built_tree).tree / "usr/lib/aarch64-linux-gnu/libc.so.6"
    library.parent.mkdir(parents=True)
    library.touch()
    try:
        with power_switch() as (address, requests):
            switch = f"power=simplerest/4/http://{address}/{{index}}/{{value}}"
            rows = [f"{name}=127.0.0.1:{ports.free_port()}" for name in ("on", "switched")]
            services.up(with_boards(built_tree, rows[0], f"{rows[1]} {switch}"))
            with pytest.raises(DeviceTestsFailed) as caught:
                run.on_all(built_tree, run.How())
        found = caught.value.found
        assert "on: did not run: the exported tree is for another architecture" in found
        assert "switched: did not run: root@127.0.0.1" in found
        assert requests == ["/4/0", "/4/1"] * 2, "the run must try twice to boot the board"
        places = coordinator.places()
        assert [places[name].holder for name in ("on", "switched")] == ["", ""]
        assert [places[name].tags["quarantine"] for name in ("on", "switched")] == ["no", "yes"]
        merged = json.loads((run.report_folder(built_tree, run.How()) / "evidence.json").read_text())
        assert "./inv deploy --architecture=arm64" in merged["boards"][0]["error"]
    finally:
        services.up(config)


@pytest.mark.skipif(os.geteuid() != 0, reason="deploy requires root")
@pytest.mark.parametrize("words", [["on_all"], ["on_place", "pi3"], ["on_shards", ""]])
def test_a_run_that_waits_to_deploy_can_be_stopped(
    built_tree: Config, coordinator: Coordinator, tmp_path: Path, words: list[str]
) -> None:
    settings = {
        "nfs": {"folder": str(built_tree.nfsroot)},
        "build": {"folder": str(built_tree.build.folder)},
        "lab": {"coordinator": coordinator.address, "boards": list(BOARDS)},
    }
    built_tree.target_root.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-c", ALL, json.dumps(settings), *words]
    with (built_tree.target_root / "lab-deploy.lock").open("w") as lock, (tmp_path / "said").open("w") as said:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(argv, cwd=ROOT, stderr=said) as task:
            try:
                eventually(lambda: "waiting for another run that deploys" in (tmp_path / "said").read_text())
                # With on_all, pi4 may be the board that waits, while pi3 is still being acquired.
                eventually(lambda: coordinator.places()["pi3"].holder == own_name())
                task.send_signal(signal.SIGINT)
                assert task.wait(LIMIT_S) != 0
            finally:
                task.kill()
    eventually(lambda: not any(place.holder for place in coordinator.places().values()))


def test_a_place_has_the_address_of_its_board(config: Config, coordinator: Coordinator) -> None:
    with run.host_of(config, "pi4") as host:
        assert host == "root@192.0.2.4:2222"
        assert coordinator.places()["pi4"].holder == own_name()
    services.up(with_boards(config, "one=qemu"))
    with pytest.raises(UserError, match="one has no address"), run.host_of(config, "one"):
        raise AssertionError
    assert not coordinator.places()["one"].holder
    services.up(config)
