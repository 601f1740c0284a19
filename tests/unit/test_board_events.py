"""Tests of a board's events: their time stamps, the limit on their size, and their display in chronological order."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from device.lab import log
from toolchain import board_events
from toolchain.board_events import Event
from toolchain.cli import spelt_out
from toolchain.config import Config, load_config
from toolchain.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"build": {"folder": str(tmp_path)}, "lab": {"boards": ["pi3=192.0.2.3", "pi4=192.0.2.4"]}})


def of_run(config: Config, folder: str = "lab") -> Path:
    return config.target_root / folder / "pi3" / "events.jsonl"


def test_events_of_all_sources_are_on_one_time_line(config: Config) -> None:
    paths = [of_run(config), board_events.of_netboot(config, "pi3"), of_run(config, "lab-check")]
    for path, source in zip(paths * 2, ("power", "dhcp", "console", "ssh", "nfs", "tftp"), strict=True):
        board_events.append(path, source, f"from {source}")
        time.sleep(0.002)
    board_events.append(board_events.of_netboot(config, "pi4"), "dhcp", "another board")
    shown = log.lines(config, "pi3")
    assert [line.split("from ")[1] for line in shown] == ["power", "dhcp", "console", "ssh", "nfs", "tftp"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d  power    from power", shown[0])


def test_a_board_without_events_is_an_error(config: Config) -> None:
    with pytest.raises(UserError, match="no events for the board pi5") as caught:
        log.lines(config, "pi5")
    assert caught.value.found == "no recorded events; boards in lab.boards: pi3, pi4"
    assert "./inv test-on-pi --place=pi5" in caught.value.fix
    assert "./inv netboot" in caught.value.fix


@pytest.mark.parametrize("name", ["", "../pi3", "*"])
def test_a_name_that_is_not_a_board_is_an_error(config: Config, name: str) -> None:
    board_events.append(of_run(config), "power", "on")
    with pytest.raises(UserError, match="requires the name of a board"):
        log.lines(config, name)


def test_the_size_of_the_record_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_events, "LIMIT_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    for number in range(100):
        board_events.append(path, "console", f"line {number}")
    assert sum(item.stat().st_size for item in tmp_path.iterdir()) <= 2000
    texts = [event.text for event in board_events.read(path)]
    assert texts == [f"line {number}" for number in range(100 - len(texts), 100)]
    assert len(texts) > 10


def test_an_incomplete_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    board_events.append(path, "power", "on")
    with path.open("a") as stream:
        stream.write('[]\n{"time": 1}\n' + json.dumps({"time": 2.0, "source": "nfs", "text": "x"})[:-3])
    assert [event.text for event in board_events.read(path)] == ["on"]


def test_control_characters_are_not_shown() -> None:
    line = Event(0.0, "console", "\x1b[1;31mred\x1b[0m\x07 a\tb\r").line()
    assert line.endswith("  console  red a b")


def test_lines_of_a_growing_log_are_recorded(tmp_path: Path) -> None:
    log_file, path = tmp_path / "console.log", tmp_path / "events.jsonl"
    log_file.write_text("first\n")
    with board_events.following(log_file, path, "console"), log_file.open("a") as stream:
        stream.write("second\nthi")
        stream.flush()
        time.sleep(0.5)
        stream.write("rd\nno line end")
    assert [event.text for event in board_events.read(path)] == ["first", "second", "third", "no line end"]


def test_events_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for _ in range(3):
        board_events.append(tmp_path / "file" / "events.jsonl", "power", "on")
    assert " ".join(capsys.readouterr().err.split()).count("are not recorded") == 1


def test_the_name_of_lab_log_is_positional() -> None:
    assert spelt_out(["lab", "log", "pi3"]) == ["lab", "log", "--name", "pi3"]
    assert spelt_out(["lab", "log", "--name=pi3"]) == ["lab", "log", "--name=pi3"]
    assert spelt_out(["lab", "up", "bench"]) == ["lab", "up", "bench"]
    assert spelt_out(["-e", "lab", "log", "pi3", "lab", "status"])[-5:] == ["log", "--name", "pi3", "lab", "status"]
    assert spelt_out(["lab", "log", "--name=pi3", "lab", "status"])[-3:] == ["--name=pi3", "lab", "status"]


@pytest.mark.parametrize(
    "words",
    [
        ["lab", "log", "--architecture=arm64", "pi3"],
        ["lab", "log", "--architecture", "arm64", "pi3"],
        ["lab", "--architecture", "arm64", "log", "pi3"],
        ["lab", "log", "-r", "arm64", "pi3"],
    ],
)
def test_the_name_of_lab_log_may_follow_options(words: list[str]) -> None:
    assert spelt_out(words) == [*words[:-1], "--name", "pi3"]
