"""Tests of board rows, the file generated for labgrid's exporter, and merged results."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from labgrid import Target, target_factory
from labgrid.remote.exporter import exports
from labgrid.resource import NetworkSerialPort
from waiting import LIMIT_S, eventually

import device.target  # noqa: F401 - registers ConsoleRecorder
from device.lab import manual, merge, run, services, shard
from device.lab.coordinator import Coordinator, Place
from device.lab.merge import Outcome
from device.record import BOARD_LOST
from device.suite_result import Paths
from nfsroot import access
from toolchain import files, lab_boards, ports, process
from toolchain.config import ROOT, Config, LabConfig, load_config
from toolchain.errors import CommandFailed, ConfigError, UserError
from toolchain.lab_boards import BoardRow, Card, Power

SWITCH = "http://192.0.2.9/relay/{index}/{value}"


def test_board_row_has_address_tags_and_power() -> None:
    row = lab_boards.parse(f"pi3=root@192.0.2.3:2222 model=pi3 bits=32 power=simplerest/0/{SWITCH}")
    power = Power("simplerest", "0", SWITCH)
    assert row == BoardRow("pi3", "root@192.0.2.3:2222", {"model": "pi3", "bits": "32"}, power)
    assert not row.virtual
    assert lab_boards.parse("one=qemu").virtual


def test_board_row_has_console_and_card() -> None:
    row = lab_boards.parse("pi3=192.0.2.3 serial=/dev/serial/by-id/usb-1 card=usbsdmux/000012 power=uhubctl/2/1-1.4")
    assert (row.serial, row.card, row.tags) == ("/dev/serial/by-id/usb-1", Card("usbsdmux", "000012"), {})
    assert row.power == Power("uhubctl", "2", "1-1.4")
    assert lab_boards.parse("pi3=192.0.2.3 serial=[fd00::1]:4000").serial == "[fd00::1]:4000"
    manual = lab_boards.parse("pi3=192.0.2.3 power=manual")
    assert (manual.power, manual.tags) == (None, {"power": "manual"})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected NAME=ADDRESS"),
        ("pi3", "expected NAME=ADDRESS"),
        ("Pi3=192.0.2.3", "expected NAME=ADDRESS"),
        ("3=192.0.2.3", "expected NAME=ADDRESS"),
        ("pi3=", "expected qemu or"),
        ("pi3=192.0.2.3:0", "expected qemu or"),
        ("pi3=192.0.2.3:65536", "expected qemu or"),
        ("pi3=two words", "found 'words'"),
        ("pi3=h model=", "found 'model='"),
        ("pi3=h Model=pi3", "found 'Model=pi3'"),
        ("pi3=h kind=ssh", "expected a tag other than"),
        ("pi3=h name=other", "expected a tag other than"),
        ("pi3=h power=shelly_gen2", "expected power=manual"),
        ("pi3=h power=../0/h", "expected power=manual"),
        ("one=qemu architecture=mips", "expected architecture=armhf or arm64"),
        ("pi3=h power=shelly_gen2/A/h", "expected the number of an outlet"),
        ("pi3=h power=uhubctl/2/hub", "expected the hub's location"),
        ("pi3=h serial=ttyUSB0", "expected serial=/dev/NAME or serial=HOST:PORT"),
        ("pi3=h serial=h:0", "expected serial=/dev/NAME or serial=HOST:PORT"),
        ("pi3=h card=usbsdmux", "expected card=MODEL/SERIAL"),
        ("pi3=h card=other/1", "expected card=MODEL/SERIAL"),
        ("one=qemu power=shelly_gen2/0/h", "expected no power, serial or card"),
        ("one=qemu power=manual", "expected no power, serial or card"),
        ("one=qemu serial=/dev/ttyUSB0", "expected no power, serial or card"),
    ],
)
def test_an_invalid_row_is_explained(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"lab": {"boards": [text]}})
    assert fault in str(caught.value)


def test_a_name_is_used_once() -> None:
    assert "found pi3 more than once" in lab_boards.check(["pi3=192.0.2.3", "pi3=192.0.2.4"])


@pytest.mark.parametrize("address", ["lab", "lab:", "lab:0", "lab:99999", "a b:1"])
def test_an_invalid_coordinator_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"lab\.coordinator"):
        load_config({"lab": {"coordinator": address}})


def test_the_exporter_offers_a_group_per_board(tmp_path: Path) -> None:
    config = load_config({"nfs": {"folder": str(tmp_path)}})
    texts = ["one=qemu", "pi3=pi@192.0.2.3", f"pi4=192.0.2.4:2222 power=simplerest/1/{SWITCH}"]
    assert services.resources(config, [lab_boards.parse(text) for text in texts]) == {
        "one": {"ExportedTree": {"folder": str(tmp_path / "tree"), "architecture": "armhf"}},
        "pi3": {"NetworkService": {"address": "192.0.2.3", "port": 22, "username": "pi"}},
        "pi4": {
            "NetworkService": {"address": "192.0.2.4", "port": 2222, "username": "root"},
            "NetworkPowerPort": {"model": "simplerest", "host": SWITCH, "index": "1"},
        },
    }


@pytest.mark.parametrize(
    ("words", "resource"),
    [
        ("serial=/dev/ttyUSB0", {"RawSerialPort": {"port": "/dev/ttyUSB0", "speed": 115200}}),
        (
            "serial=[fd00::1]:4000",
            {"NetworkSerialPort": {"host": "fd00::1", "port": 4000, "speed": 115200, "protocol": "raw"}},
        ),
        ("power=uhubctl/2/1-1.4", {"USBPowerPort": {"match": {"sys_name": "1-1.4:1.0"}, "index": 2}}),
        ("power=manual", {}),
        ("card=usbsdmux/000012", {"USBSDMuxDevice": {"match": {"ID_SERIAL_SHORT": "000012"}}}),
        ("card=sdwire/sd-1", {"USBSDWireDevice": {"match": {"ID_SERIAL_SHORT": "sd-1"}}}),
    ],
)
def test_the_exporter_offers_the_devices_of_a_board(words: str, resource: dict[str, Any]) -> None:
    offered = services.resources(Config(), [lab_boards.parse(f"pi3=192.0.2.3 {words}")])["pi3"]
    assert offered.pop("NetworkService") == {"address": "192.0.2.3", "port": 22, "username": "root"}
    assert offered == resource
    for name in offered:
        assert name in exports or name == "NetworkSerialPort", "labgrid's exporter must support the class"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_console_server_is_recorded(tmp_path: Path, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine does not have the address {address}")
    target, log = Target("main"), tmp_path / "console"
    NetworkSerialPort(target, name=None, host=address, port=server.getsockname()[1], protocol="raw")
    recorder = target_factory.make_driver(target, "ConsoleRecorder", None, {"console": str(log)})
    with server:
        server.settimeout(LIMIT_S)
        target.activate(recorder)
        try:
            board, _ = server.accept()
            with board:
                # pyserial discards what it receives before the port is open.
                eventually(lambda: board.send(b"hello\n") and b"hello\n" in log.read_bytes())
        finally:
            target.deactivate(recorder)


def test_a_board_can_have_another_architecture(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    row = lab_boards.parse("one=qemu architecture=arm64")
    assert services.resources(config, [row])["one"]["ExportedTree"] == {
        "folder": str(tmp_path / "trixie-arm64" / "nfsroot" / "tree"),
        "architecture": "arm64",
    }
    assert services.target_of(config, row.tags).image.architecture == "arm64"
    assert services.target_of(config, {}) == config


def test_ctrl_c_ends_a_request_that_gets_no_response() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(Coordinator(f"127.0.0.1:{silent.getsockname()[1]}").reserve, {"name": "pi3"})

        def ends() -> bool:
            process.interrupt_all()
            return request.done()

        connection, _ = silent.accept()
        with connection:
            eventually(ends)
        with pytest.raises(CommandFailed, match="interrupted while waiting for labgrid's coordinator"):
            request.result()


def test_the_default_coordinator_is_on_the_loopback_address() -> None:
    assert services.Lab(Config()).coordinator.address == "127.0.0.1:20408"
    chosen = Config(lab=LabConfig(coordinator="lab.example:20408"))
    assert services.Lab(chosen).coordinator.address == "lab.example:20408"


@pytest.mark.parametrize(
    ("service", "address"),
    [
        ({"username": "pi", "address": "192.0.2.3"}, "pi@192.0.2.3:22"),
        ({"username": "root", "address": "2001:db8::5", "port": 2222}, "root@[2001:db8::5]:2222"),
    ],
)
def test_the_address_of_a_place_can_be_parsed(service: dict[str, Any], address: str) -> None:
    """A hand-written exporter configuration may lack the port."""
    assert run._address(service) == address
    assert access.parse_host(address) == (service["username"], service["address"], service.get("port", 22))


@pytest.mark.parametrize(
    ("tags", "resources", "boots"),
    [
        ({}, ("NetworkService", "NetworkPowerPort"), True),
        ({"power": "manual"}, ("NetworkService",), True),
        ({}, ("NetworkService",), False),
    ],
)
def test_a_board_that_is_switched_on_for_the_run_boots(
    monkeypatch: pytest.MonkeyPatch, tags: dict[str, str], resources: tuple[str, ...], boots: bool
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(run, "ask_to_switch", lambda _name: None)
    monkeypatch.setattr("device.suite.test_on_pi", lambda _config, **how: found.append(how["place"].boots))
    place = Place(name="pi3", tags=tags, matches=(), holder="", since=0.0, resources=resources)
    run._suite(services.Lab(Config()), place, run.How())
    assert found == [boots]


def test_a_second_interrupt_waits_until_all_boards_are_released() -> None:
    released = threading.Event()
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        if len(calls) > 2:
            released.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool, process.on_interrupt(stop):
        board = pool.submit(released.wait)
        try:
            with pytest.raises(KeyboardInterrupt):
                run._interrupt([board])
            assert board.done()
        finally:
            released.set()


def test_a_released_place_is_not_released_again() -> None:
    """No coordinator listens at the address. The process would try to reach it for ten minutes."""
    words = [f"127.0.0.1:{ports.free_port()}", "pi3", "host/user", "TOKEN"]
    done = subprocess.run(
        [sys.executable, "-m", "device.lab.release", *words], input=b"released", cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0


def test_a_quarantine_that_cannot_be_set_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    lab = services.Lab(Config(lab=LabConfig(coordinator=f"127.0.0.1:{ports.free_port()}")))
    run._set_quarantine(lab, "pi3", "no")
    assert "cannot set the tag quarantine=no on pi3" in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------------------------------------ merging


def outcome(folder: Path, board: str, **tests: str) -> Outcome:
    """Return a board's outcome for these tests and their results."""
    found: list[dict[str, Any]] = [
        {"nodeid": f"test_a.py::test_{name}", "outcome": result, "seconds": 0.5, "text": f"<{result}>"}
        for name, result in tests.items()
    ]
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    for test in found:
        counts["errors" if test["outcome"] == "error" else test["outcome"]] += 1
    paths = Paths(folder=folder / board)
    paths.folder.mkdir(parents=True)
    cases = "".join(f'<testcase classname="test_a" name="test_{name}"/>' for name in tests)
    paths.junit.write_text(
        f'<testsuites><testsuite name="device" tests="{len(tests)}">{cases}</testsuite></testsuites>'
    )
    document = {
        "results": {**counts, "seconds": 1.0, "tests": found},
        "device": {"model": "virt", "execution": "emulation", "execution_reason": "QEMU", "kernel": "6.12"},
        "image": {"reference": "pitorch", "id": "sha256:1"},
        "timing": {"reason": "no timing was requested"},
    }
    paths.evidence.write_text(json.dumps(document))
    error = "did not pass" if counts["failed"] or counts["errors"] else ""
    return Outcome.of(board, paths, error)


def test_tests_that_differ_come_first(tmp_path: Path) -> None:
    one = outcome(tmp_path, "one", same="passed", bad="failed", differs="passed", only_here="passed")
    two = outcome(tmp_path, "two", same="passed", bad="failed", differs="failed")
    dead = Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no answer")
    found = merge.rows([one, dead, two])
    assert [row.nodeid.partition("::test_")[2] for row in found] == ["differs", "only_here", "bad", "same"]
    assert [row.differs for row in found] == [True, True, False, False]
    assert found[1].cells[1] is None


def test_junit_counts_each_test_once_per_board(tmp_path: Path) -> None:
    outcomes = [outcome(tmp_path, name, a="passed", b="passed") for name in ("one", "two")]
    dead = Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no answer\nconsole tail")
    top = merge.junit([*outcomes, dead])
    assert [suite.get("name") for suite in top] == ["one", "two", "dead"]
    names = [f"{case.get('classname')}.{case.get('name')}" for case in top.iter("testcase")]
    assert names == ["one.test_a.test_a", "one.test_a.test_b", "two.test_a.test_a", "two.test_a.test_b", "dead.boot"]
    (fault,) = top.iter("error")
    assert (fault.get("message"), fault.text) == ("no answer", "no answer\nconsole tail")


def test_the_page_has_a_column_per_board(tmp_path: Path) -> None:
    one = outcome(tmp_path, "one", same="passed", differs="passed")
    two = outcome(tmp_path, "two", same="passed", differs="failed")
    dead = Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no <answer>")
    merged = merge.write(Config(), [one, two, dead], tmp_path)
    page = merged.paths.report.read_text()
    assert "<tr><th>test</th><th>one</th><th>two</th></tr>" in page
    assert page.index("test_differs") < page.index("test_same")
    assert "1 of 2 tests differ" in page
    assert "no &lt;answer&gt;" in page
    assert "&lt;failed&gt;" in page
    assert not merged.ok
    assert "two: 1 passed, 1 failed, 0 errors, 0 skipped; dead: did not run: no <answer>" in str(merged.error())


def test_an_error_after_the_tests_is_shown(tmp_path: Path) -> None:
    made = outcome(tmp_path, "one", a="passed")
    error = "1 tests passed, but the tested files are not the files that were built\n  found:    tree"
    merged = merge.write(Config(), [replace(made, error=error)], tmp_path)
    first = error.partition("\n")[0]
    assert merged.lines() == [f"one: 1 passed, 0 failed, 0 errors, 0 skipped ({first})"]
    assert first in merged.paths.report.read_text()
    (suite,) = ElementTree.parse(merged.paths.junit).getroot()  # noqa: S314 - our own file
    assert (suite.get("tests"), suite.get("errors")) == ("2", "1")
    (fault,) = suite.iter("error")
    assert (fault.get("message"), fault.text) == (first, error)


def test_a_run_without_a_junit_file_is_a_failed_run(tmp_path: Path) -> None:
    """The board had sent results before pytest was killed."""
    paths = outcome(tmp_path, "one", a="passed").paths
    paths.junit.unlink()
    merged = merge.write(Config(), [Outcome.of("one", paths, "pytest failed on this PC\n  found:    killed")], tmp_path)
    assert merged.lines() == ["one: 1 passed, 0 failed, 0 errors, 0 skipped (pytest failed on this PC)"]
    assert not merged.ok
    (suite,) = ElementTree.parse(merged.paths.junit).getroot()  # noqa: S314 - our own file
    assert (suite.get("name"), suite.get("tests"), suite.get("errors")) == ("one", "1", "1")
    (fault,) = suite.iter("error")
    assert fault.get("message") == "pytest failed on this PC"


def test_junit_with_control_characters_is_well_formed(tmp_path: Path) -> None:
    error = str(CommandFailed("the suite did not start \x07", tail="\x1b[31mbad\x1b[0m \ufffe"))
    dead = Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error=error)
    merged = merge.write(Config(), [dead], tmp_path)
    (fault,) = ElementTree.parse(merged.paths.junit).getroot().iter("error")  # noqa: S314 - our own file
    assert fault.get("message") == r"the suite did not start \x07"
    assert r"\x1b[31mbad\x1b[0m \ufffe" in str(fault.text)


def test_all_boards_passed(tmp_path: Path) -> None:
    merged = merge.write(Config(), [outcome(tmp_path, "one", a="passed")], tmp_path)
    assert merged.ok
    assert "All boards passed" in merged.paths.report.read_text()
    assert "one: 1 passed, 0 failed" in merged.summary()


def test_the_evidence_names_the_board_of_each_result(tmp_path: Path) -> None:
    dead = Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no answer")
    merged = merge.write(Config(), [outcome(tmp_path, "one", a="passed", b="failed"), dead], tmp_path)
    one, other = json.loads(merged.paths.evidence.read_text())["boards"]
    assert (one["board"], one["model"], one["kernel"], one["image"]["id"]) == ("one", "virt", "6.12", "sha256:1")
    assert one["results"] == {"passed": 1, "failed": 1, "errors": 0, "skipped": 0}
    assert one["evidence"]["sha256"] == files.sha256_of(tmp_path / one["evidence"]["path"])
    assert other == {"board": "dead", "error": "no answer"}


def test_the_chart_has_a_line_per_board(tmp_path: Path) -> None:
    rows = [
        {"method": name, "width": width, "compute_s": 0.1, "end_to_end_s": 0.2}
        for name, width in itertools.product(("cpu", "torch", "qpu"), (10, 100))
    ]
    timing = {"rows": rows, "height": 100, "what": "a product", "statistic": "median"}
    boards = []
    for name in ("one", "two", "untimed"):
        made = outcome(tmp_path, name, a="passed")
        boards.append(
            replace(made, document={**made.document, "timing": timing} if name != "untimed" else made.document)
        )
    page = merge.write(Config(), boards, tmp_path).paths.report.read_text()
    drawn = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])  # noqa: S314 - our own
    texts = [text for element in drawn.iter("{http://www.w3.org/2000/svg}text") if (text := element.text)]
    boards_shown = [text.partition(":")[0] for text in texts if "emulation" in text]
    assert boards_shown == ["one", "two"], "the legend must have one entry per board, with its machine"
    assert {"CPU, plain loop", "torch, call", "QPU backend, kernel", "QPU backend, whole call"} <= set(texts)
    assert "no timing" not in page
    assert "<svg" not in merge.write(Config(), boards[2:], tmp_path).paths.report.read_text()


# ------------------------------------------------------------------------------------------------ switched by hand


def test_a_person_is_asked_to_switch_a_board(capsys: pytest.CaptureFixture[str]) -> None:
    """Only one question is asked at a time. If Enter is pressed before a question is shown, it is not the answer."""
    person, terminal = os.openpty()
    os.write(person, b"\n\n")
    shown = ""

    def has_asked(number: int) -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return shown.count("switch the board off and on, then press Enter") >= number

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(manual.ask_to_switch, name, Path(os.ttyname(terminal))) for name in ("pi2", "pi3")]
        for number in (1, 2):
            eventually(functools.partial(has_asked, number))
            assert len(concurrent.futures.wait(asked, 1).done) == number - 1
            os.write(person, b"\n")
    os.close(person)
    os.close(terminal)
    assert "pi2: switch the board off" in shown
    assert "pi3: switch the board off" in shown


def test_a_question_ends_with_the_run() -> None:
    person, terminal = os.openpty()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(manual.ask_to_switch, "pi3", Path(os.ttyname(terminal)))
        while not asked.done():
            process.interrupt_all()
        with pytest.raises(CommandFailed, match="interrupted before pi3"):
            asked.result()
    os.close(person)
    os.close(terminal)


def test_nobody_can_be_asked_without_a_terminal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pi3 must be switched off and on by hand, but there is no terminal"):
        manual.ask_to_switch("pi3", tmp_path / "tty")


# ------------------------------------------------------------------------------------------------ splitting a suite


@pytest.mark.parametrize("boards", [1, 2, 3, 7])
def test_each_file_runs_on_exactly_one_board(boards: int) -> None:
    names = [f"test_{letter}.py" for letter in "abcdefg"]
    parts = shard.split(names, {"test_a.py": 5.0, "test_b.py": 0.0}, boards)
    assert sorted(itertools.chain(*parts)) == names
    assert len(parts) == boards
    assert all(parts), "each board must get at least one file"


def test_the_longest_files_are_distributed_first() -> None:
    seconds = {"a": 8.0, "b": 7.0, "c": 6.0, "d": 5.0, "e": 4.0}
    assert shard.split(list("abcde"), seconds, 2) == [["a", "d", "e"], ["b", "c"]]


def test_a_file_without_a_time_counts_as_the_mean() -> None:
    assert shard.split(["long", "new", "short"], {"long": 9.0, "short": 1.0}, 2) == [["long"], ["new", "short"]]
    assert shard.split(["a", "b", "c"], {}, 2) == [["a", "c"], ["b"]]


def test_tests_of_the_same_file_stay_together() -> None:
    names = ["test_a.py::test_x", "test_b.py", "test_a.py::test_y[1-2]"]
    assert shard.split(names, {"test_b.py": 9.0, "test_a.py": 1.0}, 3) == [
        ["test_b.py"],
        ["test_a.py::test_x", "test_a.py::test_y[1-2]"],
    ]


def test_times_of_several_runs_are_combined_per_test(tmp_path: Path) -> None:
    for name, cases in {
        "one": [("test_a", "test_x", 1.0), ("test_a.TestClass", "test_y", 2.0), ("test_b", "test_z", 4.0)],
        "two": [("test_a", "test_x", 3.0)],
    }.items():
        text = "".join(f'<testcase classname="{module}" name="{test}" time="{time}"/>' for module, test, time in cases)
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    assert shard.measured(tmp_path.glob("*.xml")) == {"test_a.py": 4.0, "test_b.py": 4.0}
    assert shard.measured([]) == {}


def part(made: Outcome, *names: str) -> Outcome:
    """Return the same outcome for a board that had to run only these files."""
    return replace(made, files=names)


def test_a_split_suite_passes_with_a_part_that_is_skipped(tmp_path: Path) -> None:
    one = part(outcome(tmp_path, "one", a="passed"), "test_a.py")
    two = part(outcome(tmp_path, "two", b="skipped"), "test_b.py")
    merged = merge.write(Config(), [one, two], tmp_path)
    assert merged.ok
    assert "split between 2 boards: 1 passed, 0 failed, 0 errors, 1 skipped" in merged.summary()
    assert not any(row.differs for row in merge.rows(merged.outcomes))
    assert "The suite passed" in merged.paths.report.read_text()
    assert not merge.write(Config(), [two], tmp_path).ok, "a suite without a passed test must not pass"


def test_tests_of_a_lost_board_are_counted_where_they_ran(tmp_path: Path) -> None:
    dead = replace(
        part(Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no answer"), "test_c.py"), moved=True
    )
    lost = replace(part(outcome(tmp_path, "lost", a="passed", b="error"), "test_a.py"), moved=True)
    lost.document["results"]["tests"][1]["text"] = BOARD_LOST
    (case,) = lost.suites[0].findall("testcase[@name='test_b']")
    ElementTree.SubElement(case, "error").text = BOARD_LOST
    lost.suites[0].set("errors", "1")
    again = replace(
        part(outcome(tmp_path, "ok/turn2", b="passed", c="passed"), "test_a.py::test_b"), board="ok", turn=2
    )
    merged = merge.write(Config(), [lost, dead, again], tmp_path)
    assert merged.counts == {"passed": 3, "failed": 0, "errors": 0, "skipped": 0}
    cases = [f"{case.get('classname')}.{case.get('name')}" for case in merge.junit(merged.outcomes).iter("testcase")]
    assert cases == ["lost.test_a.test_a", "lost.run", "dead.boot", "ok.test_a.test_b", "ok.test_a.test_c"]
    counts = [(suite.get("name"), suite.get("tests"), suite.get("errors")) for suite in merge.junit(merged.outcomes)]
    assert counts == [("lost", "2", "1"), ("dead", "1", "1"), ("ok, turn 2", "2", None)]
    assert not merged.ok, "a suite must not pass if a board is dead"
    assert "dead: did not run: no answer; run on another board: test_c.py" in merged.error().found
    assert "without a result" not in merged.error().found
    boards = json.loads(merged.paths.evidence.read_text())["boards"]
    assert [board["moved"] for board in boards] == [["test_a.py::test_b"], ["test_c.py"], []]
    assert [board["not_run"] for board in boards] == [[], [], []]
    assert boards[2]["evidence"]["path"] == "ok/turn2/evidence.json"
    assert '<a href="ok/turn2/index.html">ok, turn 2</a>' in merged.paths.report.read_text()


def test_a_split_suite_names_the_tests_that_did_not_run(tmp_path: Path) -> None:
    dead = part(
        Outcome(board="dead", paths=Paths(folder=tmp_path / "dead"), error="no answer"), "test_c.py", "test_d.py"
    )
    lost = part(outcome(tmp_path, "lost", a="passed", b="error"), "test_a.py")
    lost.document["results"]["tests"][1]["text"] = BOARD_LOST
    merged = merge.write(Config(), [lost, dead], tmp_path)
    assert "lost: 1 passed, 0 failed, 1 errors, 0 skipped; without a result: test_a.py::test_b" in merged.error().found
    assert "dead: did not run: no answer; without a result: test_c.py, test_d.py" in merged.error().found
    names = [f"{case.get('classname')}.{case.get('name')}" for case in merge.junit(merged.outcomes).iter("testcase")]
    assert names == ["lost.test_a.test_a", "lost.test_a.test_b", "dead.boot", "dead.test_c.py", "dead.test_d.py"]
    boards = json.loads(merged.paths.evidence.read_text())["boards"]
    assert [board["not_run"] for board in boards] == [["test_a.py::test_b"], ["test_c.py", "test_d.py"]]
    assert "the suite did not run: test_c.py, test_d.py" in merged.paths.report.read_text()
