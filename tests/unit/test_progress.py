"""Tests of progress output: steps, bars and the final table, on a terminal and in a log."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from pathlib import Path

import pytest
from waiting import eventually

from toolchain import progress
from toolchain.manifest import Artefact

ERASED = "\r\x1b[2K\x1b[?25h\r"
"""The end of rich's output when a display ends: it erases its line and shows the cursor."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture the output as it appears in a log."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "console", progress.make_console(file=stream, width=80))
    return stream


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture the output as it appears on a terminal."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "console", progress.make_console(file=stream, force_terminal=True, width=100))
    return stream


def wait_until_shown(terminal: io.StringIO, *texts: str) -> None:
    """Wait until the display, which is updated several times per second, has shown all texts."""
    eventually(lambda: all(text in terminal.getvalue() for text in texts), terminal.getvalue, interval_s=0.02)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.step("a step"):
        progress.say("a line")
        progress.warn("a warning")
    out, err = capsys.readouterr()
    assert out == ""
    assert "a step" in err
    assert "a line" in err
    assert "a warning" in err


def test_a_step_is_named_at_its_start_and_timed_at_its_end(log: io.StringIO) -> None:
    with progress.step("root filesystem"):
        assert log.getvalue() == "==> root filesystem\n"
        time.sleep(0.1)
    name, _, seconds = log.getvalue().splitlines()[1].strip().partition(": ")
    assert name == "root filesystem"
    assert 0.1 <= float(seconds.removesuffix(" s")) < 60


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt()])
def test_a_failed_step_is_reported_and_reraises(log: io.StringIO, fault: BaseException) -> None:
    def fail() -> None:
        with progress.step("root filesystem"):
            raise fault

    with pytest.raises(type(fault)):
        fail()
    assert re.search(r"==> root filesystem: failed after \d+\.\d s$", log.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("text", ["[builder] cmake", "[/bold]", "a [bold]b[/bold] [link=x]", "[", r"\[x]", "-v a:b:ro"])
def test_brackets_are_shown_as_they_are(log: io.StringIO, text: str) -> None:
    progress.say(text)
    progress.warn(text)
    with progress.step(text):
        pass
    assert log.getvalue().splitlines()[:3] == [text, f"WARNING {text}", f"==> {text}"]
    assert log.getvalue().count(text) == 4


def test_lines_of_several_threads_begin_with_their_subject(log: io.StringIO) -> None:
    def run(name: str) -> None:
        with progress.about(name), progress.step("device suite"):
            progress.say("    acquired")
            progress.warn("did not boot")
        progress.say("done")

    run("q1")
    lines = log.getvalue().splitlines()
    assert lines[:3] == ["==> q1: device suite", "    q1: acquired", "WARNING q1: did not boot"]
    assert lines[3].startswith("    q1: device suite: ")
    assert lines[4] == "done"


def test_long_lines_are_not_wrapped(log: io.StringIO) -> None:
    progress.say("x" * 300)
    assert log.getvalue() == "x" * 300 + "\n"


def test_a_bar_in_a_log_prints_at_intervals(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress.bar("copy [a]", total=200) as bar:
        bar.update(10)
        now += 10
        bar.update(50, note="etc/passwd")
        now += 9
        bar.update(60)
        now += 1
        bar.update(200)
    assert log.getvalue() == "    copy [a]: 25 % etc/passwd\n    copy [a]: 100 %\n"


def test_a_bar_without_a_total_prints_the_amount(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress.bar("copy") as bar:
        now = 11
        bar.update(7)
        now = 22
        bar.update(8, total=16)
    assert log.getvalue() == "    copy: 7\n    copy: 50 %\n"


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt])
def test_a_bar_on_a_terminal_is_removed_at_the_end(terminal: io.StringIO, fault: type[BaseException] | None) -> None:
    with pytest.raises(fault) if fault else contextlib.nullcontext(), progress.bar("copy", total=100) as bar:
        bar.update(42, note="etc")
        wait_until_shown(terminal, "copy", "42%")
        if fault:
            raise fault
    assert terminal.getvalue().endswith(ERASED)


def test_brackets_in_a_bar_are_shown_as_they_are(terminal: io.StringIO) -> None:
    with progress.bar("copy [/a]", total=100) as bar:
        bar.update(1, note="[/b]")
        wait_until_shown(terminal, "copy [/a]", "[/b]")


def test_bars_of_several_threads_share_the_display(terminal: io.StringIO) -> None:
    inner_open, outer_may_end, faults = threading.Event(), threading.Event(), []

    def inner() -> None:
        try:
            with progress.bar("second", total=10) as bar:
                inner_open.set()
                assert outer_may_end.wait(60)
                time.sleep(0.05)
                bar.update(10)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=inner)
    with progress.bar("first", total=10) as bar:
        thread.start()
        assert inner_open.wait(60)
        bar.update(5)
        outer_may_end.set()
    thread.join()
    assert faults == []
    with progress.bar("third", total=1) as bar:
        bar.update(1)
    assert "second" in terminal.getvalue()


def test_nested_bars_are_both_shown(terminal: io.StringIO) -> None:
    with progress.bar("steps", total=3), progress.bar("bytes", total=3 << 20, in_bytes=True) as inner:
        inner.update(1 << 20)
        wait_until_shown(terminal, "steps", "bytes")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (1 << 40, "1024.00 GiB"),
    ],
)
def test_sizes(size: int, shown: str) -> None:
    assert progress.human_size(size) == shown


def test_the_table_lists_artefacts_and_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "libqpu.tar"
    path.write_text("x" * 2048)
    artefact = Artefact.of(path)
    rows = [
        progress.row_of("libqpu.tar", artefact, 1.26, "made now"),
        progress.Row("pitorch/system:[x]", 5 << 20, "sha256:" + "ab" * 32, 0.0),
    ]
    progress.summary("built in 1.3 s", rows, warnings=["WITHOUT torch [really]"])
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("built in 1.3 s", "libqpu.tar", "2.0 KiB", artefact.sha256, "1.3", "made now", "5.0 MiB", "ab" * 32):
        assert words in out
    assert "pitorch/system:[x]" in out
    assert "sha256:" not in out
    assert "WARNING WITHOUT torch [really]" in out


def test_a_narrow_terminal_cuts_only_digests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    progress.summary("t", [progress.Row("m" * 30, 1, "ab" * 32, 0.0)])
    out = capsys.readouterr().out
    assert "ab" * 6 in out
    assert "ab" * 9 not in out
    assert out.count("m") == 30
