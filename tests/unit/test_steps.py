"""Tests of steps: when they run, why, and how they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from registry_parts import small_disk
from waiting import eventually

from toolchain import closure, process
from toolchain.config import ROOT
from toolchain.errors import DiskFull, UserError
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import Decision, Made, Pipeline, Step, key_of, plan_table

Runs = list[str]


def writer(
    folder: Path,
    runs: Runs,
    name: str,
    *,
    needs: tuple[str, ...] = (),
    text: Callable[[], str] | None = None,
    missing: Callable[[Manifest], str] = lambda _: "",
    **inputs: str,
) -> Step:
    """Make a step that writes the result of ``text``, or its inputs and the files that it needs, to NAME.txt."""

    def action(made: Mapping[str, Manifest]) -> Made:
        runs.append(name)
        path = folder / f"{name}.txt"
        below = [item.artefact(".txt").path.read_text() for item in made.values()]
        path.write_text(text() if text else json.dumps([inputs, below]))
        return Made((path,))

    return Step(name=name, title=f"the {name}", inputs=inputs, action=action, needs=needs, missing=missing)


def reasons(decisions: list[Decision]) -> dict[str, str]:
    return {item.step.name: item.reason for item in decisions if item.runs}


def execute(folder: Path, *steps: Step, force: frozenset[str] = frozenset()) -> list[Manifest]:
    pipeline = Pipeline(folder, steps)
    return pipeline.execute(pipeline.plan(force=force))


def test_the_first_run_runs_all_steps_and_the_second_none(tmp_path: Path) -> None:
    runs: Runs = []
    steps = (writer(tmp_path, runs, "root", version="1"), writer(tmp_path, runs, "image", needs=("root",)))
    assert reasons(Pipeline(tmp_path, steps).plan()) == {
        "root": "never finished before",
        "image": "never finished before",
    }
    made = execute(tmp_path, *steps)
    assert [item.step for item in made] == ["root", "image"]
    assert runs == ["root", "image"]
    assert reasons(Pipeline(tmp_path, steps).plan()) == {}
    assert [item.reason for item in Pipeline(tmp_path, steps).plan()] == ["inputs unchanged"] * 2
    again = execute(tmp_path, *steps)
    assert runs == ["root", "image"]
    assert [item.product for item in again] == [item.product for item in made]


def test_measured_artefacts_are_not_read_again(tmp_path: Path) -> None:
    tar = tmp_path / "root.tar"
    tar.write_text("x")
    measured = Artefact(tar, 1, "sum of its own")
    (made,) = execute(
        tmp_path, Step(name="root", title="root", inputs={}, action=lambda _: Made((measured, tmp_path / "root.tar")))
    )
    assert [item.sha256 for item in made.artefacts] == ["sum of its own", Artefact.of(tar).sha256]


def test_the_reason_shows_the_changed_inputs(tmp_path: Path) -> None:
    runs: Runs = []
    execute(tmp_path, writer(tmp_path, runs, "root", suite="bookworm", gone="x", same="s"))
    now = writer(tmp_path, runs, "root", suite="trixie", new="y", same="s")
    assert reasons(Pipeline(tmp_path, [now]).plan()) == {
        "root": "changed: gone x → absent; new absent → y; suite bookworm → trixie"
    }


def test_long_values_are_shortened_in_the_reason(tmp_path: Path) -> None:
    runs: Runs = []
    execute(tmp_path, writer(tmp_path, runs, "root", sources="a" * 64, packages="p" * 80))
    (decision,) = Pipeline(tmp_path, [writer(tmp_path, runs, "root", sources="b" * 64, packages="q" * 80)]).plan()
    assert decision.reason == (f"changed: packages {'p' * 57}… → {'q' * 57}…; sources {'a' * 12} → {'b' * 12}")


def test_code_that_changes_during_a_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "ROOT", tmp_path)
    module = tmp_path / "maker.py"
    module.write_text("version = 1")

    def action(_: Mapping[str, Manifest]) -> Made:
        module.write_text("version = 2")
        return Made()

    step = Step(name="root", title="root", inputs={}, action=action, code="maker")
    execute(tmp_path, step)
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {"root": "changed: code maker.py"}
    execute(tmp_path, step)
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {}


def test_missing_or_incomplete_product_is_rebuilt(tmp_path: Path) -> None:
    runs: Runs = []
    step = writer(tmp_path, runs, "root", version="1")
    execute(tmp_path, step)
    (tmp_path / "root.txt").write_text("")
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {"root": "product missing or incomplete: root.txt"}
    execute(tmp_path, step)
    (tmp_path / "root.txt").unlink()
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {"root": "product missing or incomplete: root.txt"}
    execute(tmp_path, step)
    assert runs == ["root"] * 3


def test_the_result_of_missing_is_the_reason(tmp_path: Path) -> None:
    runs: Runs = []
    execute(tmp_path, writer(tmp_path, runs, "image"))
    step = writer(tmp_path, runs, "image", missing=lambda made: f"{made.step} is gone from the engine")
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {"image": "image is gone from the engine"}


def test_missing_is_not_called_for_unfinished_steps(tmp_path: Path) -> None:
    def never(_: Manifest) -> str:
        raise AssertionError("called")

    (decision,) = Pipeline(tmp_path, [writer(tmp_path, [], "image", missing=never)]).plan()
    assert decision.reason == "never finished before"


def test_a_requested_step_runs_once(tmp_path: Path) -> None:
    runs: Runs = []
    steps = (writer(tmp_path, runs, "root"), writer(tmp_path, runs, "image", needs=("root",)))
    execute(tmp_path, *steps)
    assert reasons(Pipeline(tmp_path, steps).plan(force=frozenset({"root"}))) == {
        "root": "requested",
        "image": "root will run again",
    }
    execute(tmp_path, *steps, force=frozenset({"root"}))
    assert runs == ["root", "image", "root"]
    assert reasons(Pipeline(tmp_path, steps).plan()) == {}


def test_an_unchanged_product_runs_no_dependent_step(tmp_path: Path) -> None:
    runs: Runs = []

    def steps(version: str) -> tuple[Step, ...]:
        return (
            writer(tmp_path, runs, "sources", version=version, text=lambda: "the same"),
            writer(tmp_path, runs, "library", needs=("sources",)),
            writer(tmp_path, runs, "image", needs=("library",)),
        )

    execute(tmp_path, *steps("1"))
    planned = Pipeline(tmp_path, steps("2")).plan()
    assert reasons(planned) == {
        "sources": "changed: version 1 → 2",
        "library": "sources will run again",
        "image": "library will run again",
    }
    execute(tmp_path, *steps("2"))
    assert runs == ["sources", "library", "image", "sources"]


def test_changed_products_make_dependent_steps_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: Runs = []

    def steps(version: str) -> tuple[Step, ...]:
        return (
            writer(tmp_path, runs, "library", version=version),
            writer(tmp_path, runs, "other", version="1"),
            writer(tmp_path, runs, "image", needs=("library", "other")),
        )

    first = execute(tmp_path, *steps("1"))
    capsys.readouterr()
    second = execute(tmp_path, *steps("2"))
    assert sorted(runs[:2]) == ["library", "other"]
    assert runs[2:] == ["image", "library", "image"]
    said = capsys.readouterr().err
    assert f"the image: runs (changed: library {first[0].product[:12]} → {second[0].product[:12]})" in said
    assert "the other: skipped (inputs unchanged)" in said


def test_changed_facts_make_dependent_steps_run(tmp_path: Path) -> None:
    value = "one"
    runs: Runs = []

    def steps() -> tuple[Step, ...]:
        def action(_: Mapping[str, Manifest]) -> Made:
            return Made(facts={"image": value}, warnings=("careful",))

        def after(made: Mapping[str, Manifest]) -> Made:
            runs.append(made["image"].facts["image"])
            return Made()

        return (
            Step(name="image", title="image", inputs={"value": value}, action=action),
            Step(name="push", title="push", inputs={}, action=after, needs=("image",)),
        )

    made = execute(tmp_path, *steps())
    assert made[0].warnings == ("careful",)
    execute(tmp_path, *steps())
    value = "two"
    execute(tmp_path, *steps())
    assert runs == ["one", "two"]


def test_skipped_steps_keep_their_warnings(tmp_path: Path) -> None:
    step = Step(name="torch", title="torch", inputs={}, action=lambda _: Made(warnings=("WITHOUT torch",)))
    execute(tmp_path, step)
    (again,) = execute(tmp_path, step)
    assert again.warnings == ("WITHOUT torch",)


def test_a_build_folder_can_be_moved(tmp_path: Path) -> None:
    step = writer(tmp_path / "old", [], "root")
    (tmp_path / "old").mkdir()
    execute(tmp_path / "old", step)
    (tmp_path / "old").rename(tmp_path / "new")
    (decision,) = Pipeline(tmp_path / "new", [writer(tmp_path / "new", [], "root")]).plan()
    assert not decision.runs


def test_keys_depend_on_name_and_inputs() -> None:
    assert key_of("a", {"x": "1", "y": "2"}) == key_of("a", {"y": "2", "x": "1"})
    keys = {key_of("a", {"x": "1"}), key_of("b", {"x": "1"}), key_of("a", {"x": "2"}), key_of("a", {"y": "1"})}
    assert len(keys) == 4


def test_a_need_without_an_earlier_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="image needs"):
        Pipeline(Path("/"), [Step(name="image", title="", inputs={}, action=lambda _: Made(), needs=("root",))])


def test_a_skipped_step_lets_the_next_one_start(tmp_path: Path) -> None:
    done = Step(name="done", title="done", inputs={}, action=lambda _: Made())
    execute(tmp_path, done)
    together = threading.Barrier(2, timeout=60)

    def meet(_: Mapping[str, Manifest]) -> Made:
        together.wait()
        return Made()

    steps = (
        Step(name="slow", title="slow", inputs={}, action=meet),
        done,
        Step(name="next", title="next", inputs={}, action=meet, needs=("done",)),
    )
    assert [item.step for item in execute(tmp_path, *steps)] == ["slow", "done", "next"]


def test_the_step_with_the_longest_chain_starts_first(tmp_path: Path) -> None:
    runs: Runs = []
    steps = (
        writer(tmp_path, runs, "mirror"),
        writer(tmp_path, runs, "rootfs", needs=("mirror",)),
        writer(tmp_path, runs, "library", needs=("mirror",)),
        writer(tmp_path, runs, "wheel", needs=("library",)),
        writer(tmp_path, runs, "image", needs=("rootfs", "wheel")),
    )
    pipeline = Pipeline(tmp_path, steps)
    made = pipeline.execute(pipeline.plan(), at_once=1)
    assert runs == ["mirror", "library", "rootfs", "wheel", "image"]
    assert [item.step for item in made] == ["mirror", "rootfs", "library", "wheel", "image"]


def test_no_more_steps_run_at_once_than_allowed(tmp_path: Path) -> None:
    lock = threading.Lock()
    running: list[str] = []
    most = 0

    def step(name: str) -> Step:
        def action(_: Mapping[str, Manifest]) -> Made:
            nonlocal most
            with lock:
                running.append(name)
                most = max(most, len(running))
            time.sleep(0.05)
            with lock:
                running.remove(name)
            return Made()

        return Step(name=name, title=name, inputs={}, action=action)

    pipeline = Pipeline(tmp_path, [step(str(number)) for number in range(5)])
    assert len(pipeline.execute(pipeline.plan(), at_once=1)) == 5
    assert most == 1


def test_after_a_failure_no_further_step_starts(tmp_path: Path) -> None:
    runs: Runs = []
    both_run = threading.Barrier(2, timeout=60)
    failed = threading.Event()

    class Signalling(Pipeline):
        """Signals when a step has ended."""

        def _run(self, *given: Any) -> Manifest:
            try:
                return super()._run(*given)
            finally:
                failed.set()

    def fail(_: Mapping[str, Manifest]) -> Made:
        both_run.wait()
        raise UserError("the first")

    def fail_later(_: Mapping[str, Manifest]) -> Made:
        runs.append("parallel")
        both_run.wait()
        assert failed.wait(60)
        raise UserError("the second")

    steps = (
        Step(name="parallel", title="parallel", inputs={}, action=fail_later),
        Step(name="broken", title="broken", inputs={}, action=fail),
        writer(tmp_path, runs, "after", needs=("broken",)),
        writer(tmp_path, runs, "free"),
    )
    pipeline = Signalling(tmp_path, steps)
    with pytest.raises(UserError, match="the first"):
        pipeline.execute(pipeline.plan())
    assert runs == ["parallel"]


def test_only_the_failed_step_of_a_plan_runs_again(tmp_path: Path) -> None:
    runs: Runs = []
    broken = False

    def sometimes() -> str:
        if broken:
            raise UserError("broken")
        return "fine"

    steps = (
        writer(tmp_path, runs, "root"),
        writer(tmp_path, runs, "library", needs=("root",), text=sometimes),
    )
    execute(tmp_path, *steps)
    broken = True
    with pytest.raises(UserError, match="broken"):
        execute(tmp_path, *steps, force=frozenset({"root", "library"}))
    assert not Pipeline(tmp_path, steps).manifest_path("library").exists()
    assert reasons(Pipeline(tmp_path, steps).plan()) == {"library": "never finished before"}
    broken = False
    execute(tmp_path, *steps)
    assert runs == ["root", "library"] * 2 + ["library"]


def test_a_step_without_its_artefact_is_not_finished(tmp_path: Path) -> None:
    step = Step(name="root", title="root", inputs={}, action=lambda _: Made((tmp_path / "never made",)))
    with pytest.raises(FileNotFoundError):
        execute(tmp_path, step)
    assert reasons(Pipeline(tmp_path, [step]).plan()) == {"root": "never finished before"}


def test_a_part_of_a_plan_can_be_executed(tmp_path: Path) -> None:
    runs: Runs = []
    pipeline = Pipeline(tmp_path, [writer(tmp_path, runs, name) for name in ("one", "two", "three")])
    wanted = [item for item in pipeline.plan() if item.step.name != "two"]
    assert [item.step for item in pipeline.execute(wanted)] == ["one", "three"]
    assert sorted(runs) == ["one", "three"]


def test_the_plan_table_has_one_line_per_step(tmp_path: Path) -> None:
    runs: Runs = []
    execute(tmp_path, writer(tmp_path, runs, "root"))
    steps = (writer(tmp_path, runs, "root"), writer(tmp_path, runs, "image", needs=("root",)))
    assert plan_table(Pipeline(tmp_path, steps).plan()) == (
        "the root   skipped  inputs unchanged\nthe image  runs     never finished before"
    )


INTERRUPTED = """
import sys
from pathlib import Path
from toolchain import process
from toolchain.steps import Made, Pipeline, Step

folder = Path(sys.argv[1])

def work(number):
    def program():
        with (folder / "begun").open("a") as begun:
            print(number, file=begun)
        return process.run(["sh", "-c", f"echo $$ >> {folder}/pids; exec sleep 600"], check=False).returncode

    def action(_):
        # Steps start several programs. Ctrl-C must not wait for the next ones.
        raise RuntimeError([program() for _ in range(5)])

    return Step(name=f"s{number}", title=f"s{number}", inputs={}, action=action)

pipeline = Pipeline(folder, [work(0), work(1), work(2)])
try:
    pipeline.execute(pipeline.plan())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_running_steps_without_a_manifest(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = tmp_path / "pids"
    eventually(lambda: pids.exists() and len(pids.read_text().split()) >= 2, interval_s=0.02, task=program)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=120)
    assert out == "interrupted\n"
    assert {path.name for path in tmp_path.iterdir()} == {"begun", "pids"}
    begun = (tmp_path / "begun").read_text().split()
    assert sorted(begun) == ["0"] * 5 + ["1"] * 5, (
        "expected two steps with five programs each; the third step must not start"
    )
    for pid in pids.read_text().split():  # Some programs exited before they could write their process ID.
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_ctrl_c_while_a_step_starts_ends_the_step(tmp_path: Path) -> None:
    pool = """
import concurrent.futures, signal, time

class Pool(concurrent.futures.ThreadPoolExecutor):
    def submit(self, *args):
        future = super().submit(*args)
        while not (folder / "pids").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        return future

concurrent.futures.ThreadPoolExecutor = Pool
"""
    program = INTERRUPTED.replace("\npipeline =", f"{pool}\npipeline =")
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "interrupted\n"
    assert (tmp_path / "begun").read_text().split() == ["0"] * 5


# Full disks.


def test_a_program_that_fills_the_disk_raises_diskfull(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "file").write_bytes(os.urandom(1 << 20))

    with small_disk(tmp_path / "disk", "128k") as disk:

        def action(_: Mapping[str, Manifest]) -> Made:
            process.run(["cp", "-r", tmp_path / "large", disk / "copy"])
            return Made()

        with pytest.raises(DiskFull, match="no room for the wheel") as caught:
            execute(disk, Step(name="wheel", title="the wheel", inputs={}, action=action))
        assert str(disk) in caught.value.expected
        assert not (disk / "wheel.manifest.json").exists()


def test_a_manifest_that_does_not_fit_raises_diskfull(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        facts = {"log": os.urandom(100_000).hex()}
        step = Step(name="wheel", title="the wheel", inputs={}, action=lambda _: Made(facts=facts))
        with pytest.raises(DiskFull, match="no room for the wheel"):
            execute(disk, step)
        assert list(disk.iterdir()) == [], "a partial manifest must not remain"
