"""Tests of the benchmarks' timing, comparison and output, on small cases. The benchmarks themselves are not run."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import build, device, export, extension, kernels, machine, suite
from benchmarks.measure import (
    Figure,
    Goal,
    Report,
    Result,
    median_of,
    observe,
    quantity,
    ratio,
    timed,
)
from benchmarks.models import compare
from benchmarks.workspace import Workspace, size_of
from recipes.qpu_ops import incremental
from toolchain import files, progress
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactMissing, CommandFailed, InUse, PlatformMismatch, RootNeeded, UserError


def a_machine(*, load: float = 0.0, cores: int = 2) -> machine.Machine:
    return replace(machine.describe(ARCHITECTURES["armhf"]), load=(load, load, load), cores=cores)


def a_report(*figures: Figure, load: float = 0.0) -> Report:
    result = Result(name="trial", title="Trial", rule="once", figures=figures, notes=("a note",))
    return Report(
        result=result,
        machine=a_machine(load=load),
        load_after=(0.1, 0.2, 0.3),
        started=datetime(2025, 1, 2, tzinfo=UTC),
        seconds=1.25,
        commit="c0ffee",
    )


def test_timing_leaves_out_the_warm_up() -> None:
    calls: list[float] = []

    def action() -> None:
        time.sleep(0.2 if not calls else 0.02)
        calls.append(time.monotonic())

    samples = timed(action, times=3, warm_up=1)
    ended = time.monotonic()
    assert len(calls) == 4
    assert len(samples) == 3
    assert all(item >= 0.02 for item in samples)
    assert sum(samples) <= ended - calls[0], "the samples must not contain the first call"


def test_the_value_is_the_median_of_the_samples() -> None:
    figure = median_of("f", [9.0, 1.0, 2.0])
    assert (figure.value, figure.samples, figure.spread) == (2.0, (9.0, 1.0, 2.0), "1.00–9.00 (3)")
    assert median_of("f", [4.0]).spread == ""


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(5), 5.0, True),
        (Goal(5), 5.001, False),
        (Goal(6, False), 6.0, True),
        (Goal(6, False), 5.999, False),
    ],
)
def test_a_goal_is_met_up_to_its_limit(goal: Goal, value: float, met: bool) -> None:
    assert goal.met(value) is met
    assert Figure(name="f", value=value, goal=goal).met is met


def test_a_figure_without_a_goal_is_not_judged() -> None:
    assert Figure(name="f", value=1.0).met is None
    assert "goal" not in Figure(name="f", value=1.0).as_json()


def test_a_ratio_shows_its_operands() -> None:
    slow, fast = Figure(name="a", value=12.0), Figure(name="b", value=2.0)
    found = ratio("a / b", slow, fast, goal=Goal(6, at_most=False))
    assert (found.value, found.unit, found.met, found.note) == (6.0, "×", True, "12 s / 2 s")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.034, "s", "0.03 s"), (2.0, "s", "2 s"), (12.34, "×", "12.3 ×"), (123.4, "MB", "123 MB"), (100.0, "s", "100 s")],
)
def test_quantities_have_three_significant_digits(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_report_shows_which_goals_are_met(tmp_path: Path) -> None:
    kept = Figure(name="kept", value=1.0, goal=Goal(2))
    missed = Figure(name="missed", value=3.0, samples=(2.0, 3.0, 4.0), goal=Goal(2), note="why")
    report = a_report(kept, missed, Figure(name="plain", value=5.0))
    text = report.text()
    lines = {name: next(line for line in text.splitlines() if name in line) for name in ("kept", "missed", "plain")}
    assert "met" in lines["kept"]
    assert "NOT MET" not in lines["kept"]
    assert "NOT MET" in lines["missed"]
    assert "2.00–4.00 (3)" in lines["missed"]
    assert "met" not in lines["plain"].lower()
    assert "rule: once" in text
    assert "a note" in text
    document = json.loads(report.write(tmp_path).read_text())
    assert document["figures"][1] == {
        "name": "missed",
        "value": 3.0,
        "unit": "s",
        "samples": [2.0, 3.0, 4.0],
        "goal": "≤ 2 s",
        "met": False,
        "note": "why",
    }
    assert document["machine"]["cores"] == 2
    assert document["commit"] == "c0ffee"
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]


def test_a_busy_machine_is_reported() -> None:
    assert a_report(Figure(name="f", value=1.0), load=0.5).warnings == ()
    (warning,) = a_report(Figure(name="f", value=1.0), load=3.0).warnings
    assert "BUSY" in warning
    assert "load 3.0 on 2 cores" in warning
    assert "BUSY" in a_report(Figure(name="f", value=1.0), load=3.0).text()


def test_the_machine_is_described() -> None:
    found = machine.describe(ARCHITECTURES["armhf"])
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_mib > 100
    assert found.kernel == os.uname().release
    assert f"{found.cores} cores" in found.lines()[0]
    assert json.loads(json.dumps(found.as_json()))["load"][0] >= 0
    assert machine.processor("processor : 0\nmodel name\t: ARM Cortex  \n") == "ARM Cortex"
    assert machine.processor("nothing") == os.uname().machine


PROGRAM = """
import json, sys
from pathlib import Path
from benchmarks.observed import peak_kib
kept = bytearray(int(sys.argv[2]))
kept[::4096] = b"x" * len(kept[::4096])
Path(sys.argv[1]).write_text(json.dumps({"peak_kib": peak_kib()}))
"""


def test_peak_memory_excludes_the_parent_process(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(PROGRAM)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def peak(size: int) -> float:
        return observe(
            [str(size)], environment=environment, log=tmp_path / "log", cwd=tmp_path, program="hungry"
        ).peak_mb

    ballast = bytearray(300_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    small = peak(1)
    del ballast
    assert small < 200, "the memory of the parent process must not count"
    assert 95 < peak(100_000_000) - small < 110


def test_a_task_is_observed(tmp_path: Path) -> None:
    found = observe(["completion", "bash"], environment={}, log=tmp_path / "log")
    assert "complete" in found.output
    assert 5 < found.peak_mb < 1000
    assert found.seconds > 0
    assert "benchmarks.observed" in (tmp_path / "log").read_text()


def test_a_failed_task_is_not_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        observe(["no-such-task"], environment={}, log=tmp_path / "log")
    assert "no-such-task" in caught.value.tail


def test_a_run_without_a_record_is_not_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("print('done')")
    with pytest.raises(CommandFailed, match="did not record"):
        observe([], environment={}, log=tmp_path / "log", cwd=tmp_path, program="silent")


def workspace_in(folder: Path, **image: str) -> Workspace:
    torch = {"wheelhouse": ["wheelhouse"]}
    return Workspace.of(load_config({"build": {"folder": str(folder)}, "torch": torch, "image": image}))


def test_the_workspace_is_separate_from_the_users_build(tmp_path: Path) -> None:
    user = load_config({"build": {"folder": str(tmp_path)}, "nfs": {"folder": str(tmp_path / "tree")}})
    found = Workspace.of(user).config
    assert found.build_root == tmp_path / "benchmarks" / "work"
    assert found.image.name == "pitorch-benchmark"
    assert found.nfsroot.is_relative_to(found.build_root)
    assert found.image.source_date_epoch != user.image.source_date_epoch
    assert found.torch.wheelhouse == (str(ROOT / "wheelhouse"),)


@pytest.mark.parametrize("measure", [device.measure, compare.measure])
def test_unsupported_target_is_reported_before_a_build(tmp_path: Path, measure: Callable[[Workspace], object]) -> None:
    with pytest.raises(PlatformMismatch) as caught:
        measure(workspace_in(tmp_path, architecture="amd64"))
    assert caught.value.found == "amd64"


def test_a_task_gets_the_callers_configuration(tmp_path: Path) -> None:
    user = load_config(
        {
            "build": {"folder": str(tmp_path), "jobs": 3},
            "image": {"suite": "bookworm", "architecture": "arm64", "mirror": "http://mirror.example/debian"},
            "torch": {"wheelhouse": ["wheelhouse", str(tmp_path / "a, b")], "options": ["CMAKE_X=-Wl,-O1"]},
        }
    )
    workspace = Workspace.of(user)
    script = (
        "import os, tasks; from invoke.context import Context; from toolchain.settings import SettingsFiles; "
        "c = SettingsFiles(defaults=tasks.namespace.configuration()); "
        "c.set_runtime_path(os.environ['INVOKE_RUNTIME_CONFIG']); c.load_runtime(); print(tasks._config(Context(c)))"
    )
    with workspace.exclusive():
        environment = {**os.environ, **workspace.environment(), "PYTHONPATH": str(ROOT)}
        said = subprocess.run(
            [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
        )
        modes = {path.name: path.stat().st_mode & 0o777 for path in workspace.folder.iterdir()}
    assert said.stdout.strip() == str(workspace.config)
    assert modes["settings.json"] == 0o600, "settings can contain passwords"


def test_a_foreign_folder_is_not_deleted(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    workspace.folder.mkdir(parents=True)
    (workspace.folder / "mine").write_text("x")
    with pytest.raises(UserError):
        workspace.clean()
    assert (workspace.folder / "mine").is_file()
    assert not (workspace.folder / files.MARKER).exists()


def test_the_folder_is_owned_without_an_image_build(tmp_path: Path) -> None:
    made = workspace_in(tmp_path)
    with made.exclusive():
        (made.folder / "libqpu").mkdir()
    files.require_owned(made.folder)


def test_only_one_run_at_a_time(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    workspace.results.mkdir(parents=True)
    with (workspace.results / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="other benchmarks are running"), workspace.exclusive():
            pytest.fail("the benchmarks ran while another process held the lock")


def test_sizes_count_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to("a")
    assert size_of(tmp_path) == 1000 + 1


@pytest.mark.parametrize(
    ("name", "near"),
    [("biuld", "run ./inv bench --name=build"), ("qqq", "run ./inv bench without --name to run all benchmarks")],
)
def test_an_unknown_benchmark_gets_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        suite.bench(load_config({}), name)
    assert caught.value.fix == near
    assert "build, extension, export, device" in caught.value.expected


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the benchmarks: without a torch wheel, ``torch`` and ``cpu`` fail. Return the names of those that ran."""
    ran: list[str] = []

    def run_one(_: Workspace, name: str) -> Report:
        ran.append(name)
        if name in ("torch", "cpu"):
            raise ArtefactMissing(f"no wheel for {name}", fix="run ./inv build-torch")
        report = a_report(Figure(name="f", value=1.0))
        return replace(report, result=replace(report.result, name=name, title=f"Title of {name}"))

    monkeypatch.setattr(suite, "ensure_running", lambda _: None)
    monkeypatch.setattr(suite, "run_one", run_one)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return ran


def an_old_tree_of_torch(config: Config) -> None:
    listed = config.target_root / "work/torch-0123456789ab/pytorch/build/compile_commands.json"
    listed.parent.mkdir(parents=True)
    listed.write_text("[]")


def test_a_run_of_all_skips_what_has_no_wheel(
    tmp_path: Path, stubbed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(progress, "warn", warnings.append)
    config = load_config({"build": {"folder": str(tmp_path)}})
    an_old_tree_of_torch(config)
    suite.bench(config, keep=True)
    assert stubbed == list(suite.BENCHMARKS)
    assert warnings == [f"skipping {name}: no wheel for {name}; run ./inv build-torch" for name in ("torch", "cpu")]
    text = capsys.readouterr().out
    assert [name for name in suite.BENCHMARKS if f"Title of {name}" not in text] == ["torch", "cpu"]
    assert f"results: {tmp_path}/benchmarks/lab.json" in text
    with pytest.raises(ArtefactMissing):
        suite.bench(config, "torch", keep=True)


def test_a_report_is_printed_before_the_next_benchmark(
    tmp_path: Path, stubbed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_one = suite.run_one

    def failing(workspace: Workspace, name: str) -> Report:
        if name == "extension":
            raise CommandFailed("the compiler failed")
        return run_one(workspace, name)

    monkeypatch.setattr(suite, "run_one", failing)
    with pytest.raises(CommandFailed):
        suite.bench(load_config({"build": {"folder": str(tmp_path)}}), keep=True)
    text = capsys.readouterr().out
    assert "2 cores" in text
    assert "Title of build" in text


@pytest.mark.parametrize("name", ["", "build", "extension", "torch", "export"])
def test_root_is_required_before_anything_happens(
    tmp_path: Path, name: str, stubbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RootNeeded) as caught:
        suite.bench(load_config({"build": {"folder": str(tmp_path)}}), name, keep=True)
    assert caught.value.fix == ("sudo ./inv bench" + (f" --name={name}" if name else ""))
    assert stubbed == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["kernels", "lab"])
def test_some_benchmarks_do_not_require_root(
    tmp_path: Path, name: str, stubbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    suite.bench(load_config({"build": {"folder": str(tmp_path)}}), name, keep=True)
    assert stubbed == [name]


def test_an_unchanged_run_must_not_run_any_step() -> None:
    build.require_same_stamps({"a": 1, "b": 2}, {"a": 1, "b": 2})
    with pytest.raises(CommandFailed) as caught:
        build.require_same_stamps({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    assert caught.value.found == "b, c"


def test_the_plain_dockerfile_has_the_same_contents(tmp_path: Path) -> None:
    text = build.dockerfile("base:1", ["python3", "udev"])
    assert text.splitlines()[0] == "FROM base:1"
    assert text.splitlines()[-1] == "RUN apt-get install --yes --no-install-recommends python3 udev"
    assert "lean" not in text
    wanted = build.lean_settings()
    assert {"/etc/dpkg/dpkg.cfg.d/lean", "/usr/share/python3/bcep/pitorch-lean"} <= set(wanted), (
        "expected settings for dpkg and py3compile"
    )
    text = build.dockerfile("base:1", ["udev"], {**wanted, "/etc/x/quoted": "what's left out\n"})
    for line in text.splitlines():
        if "printf" in line:
            script = (
                line.removeprefix("RUN ").replace("/etc/", f"{tmp_path}/etc/").replace(" /usr/", f" {tmp_path}/usr/")
            )
            script = script.replace(">/usr/", f">{tmp_path}/usr/")
            subprocess.run(["sh", "-c", script], check=True)
    for path, content in wanted.items():
        assert (tmp_path / path.lstrip("/")).read_text() == content
    assert (tmp_path / "etc/x/quoted").read_text() == "what's left out\n"


def test_quoted_compiler_commands_are_parsed() -> None:
    output = """running build_ext
building 'x' extension
arm-linux-gnueabihf-g++ -O2 "-DTYPE=\\"_gcc\\"" -c a.cpp -o build/temp/a.o
/usr/bin/gcc-14 -c b.c -o build/temp/b.o
  c++ --version
gcc -c 'torn quote -o x
gcc is not a command here
arm-linux-gnueabihf-g++ -shared build/temp/a.o -o build/lib/x.so
"""
    found = incremental.compiler_commands(output)
    assert [words[0] for words in found] == ["arm-linux-gnueabihf-g++", "/usr/bin/gcc-14", "arm-linux-gnueabihf-g++"]
    assert found[0][2] == '-DTYPE="_gcc"'
    assert found[2][1] == "-shared"


def test_compiler_time_is_read_from_the_shell() -> None:
    script = "began=$(date +%s%N); sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; "
    script += "echo took $(( $(date +%s%N) - began )) ns; times"
    said = subprocess.run(["sh", "-euc", script], check=True, capture_output=True, text=True).stdout
    spent = extension.spent_in("a compiler's warning, 3m2s of it\n" + said)
    assert 0 < spent.cpu < spent.seconds + 0.1
    assert extension.cpu_of([extension.Spent(1, 5), extension.Spent(1, 2), extension.Spent(1, 3)]) == 3
    with pytest.raises(CommandFailed, match="does not report the time spent in the compiler"):
        extension.spent_in("took 5 ns\n")


@pytest.mark.parametrize(
    ("path", "change", "line"),
    [
        (device.KERNELS, device.changed_kernel, "return x * y + 101.0f; }"),
        (device.PROGRAM.relative_to(ROOT), device.changed_program, "*p = x + 101.0f;"),
    ],
)
def test_only_the_kernel_is_changed(path: Path, change: Callable[[str, int], str], line: str) -> None:
    source = (ROOT / path).read_text()
    first = change(source, 101)
    assert line in first
    assert change(first, 102) == change(source, 102), "a changed source must accept another change"
    different = [pair for pair in zip(source.splitlines(), first.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(different) == 1
    with pytest.raises(CommandFailed, match="does not match this benchmark"):
        change("int main() {}", 1)


def test_only_the_changed_kernels_result_counts() -> None:
    assert device.imports_in("motd\nimports 2.5 result 116.0\n", 116.0) == 2.5
    assert device.imports_in("result 116.0\n", 116.0) == 0.0
    for output, found in (("result 115.0\n", "115.0"), ("result 15.0 116.0\n", "15.0 116.0"), ("", "no result")):
        with pytest.raises(CommandFailed) as caught:
            device.imports_in(output, 116.0)
        assert caught.value.found == found


def test_a_copied_checkout_is_complete_and_temporary(tmp_path: Path) -> None:
    with device.copied_checkout(tmp_path) as copy:
        assert (copy / "tasks.py").read_bytes() == (ROOT / "tasks.py").read_bytes()
        assert (copy / "inv").stat().st_mode & 0o111
        assert (copy / device.KERNELS).is_file()
        assert not (copy / "build").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_source_archive_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "archive"
    for name in ("two words.txt", "docs/naïve.md", "docs/line\nbreak", "build/product"):
        (archive / name).parent.mkdir(parents=True, exist_ok=True)
        (archive / name).touch()
    (archive / ".gitignore").write_text("/build/\n")
    monkeypatch.setattr(device, "ROOT", archive)
    with device.copied_checkout(tmp_path) as copy:
        found = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert found == {".gitignore", "two words.txt", "docs/naïve.md", "docs/line\nbreak"}


def test_the_plain_export_keeps_owners_and_capabilities() -> None:
    line = export.plain_way("c0ffee", Path("/somewhere/a tree"))
    assert "export c0ffee | tar --extract '--directory=/somewhere/a tree'" in line
    assert "--numeric-owner -p --xattrs '--xattrs-include=*'" in line


def test_kernel_goals_are_read_from_the_output() -> None:
    ends = {"shareLow": 0.25, "shareHigh": 0.985, "secondsLow": 0.004, "secondsHigh": 0.05, "movedBy": "stores"}
    lines: list[dict[str, Any]] = [
        {"kernel": "add", "compileMs": 1.0},
        {"kernel": "matmul", "compileMs": 6.5},
        {"kernel": "relu", "callUs": 9.0},
        {"kernel": "naive add, QPULib's stores", "clocks": 900, "share": 0.2, "seconds": 0.01, "limit": "bus", **ends},
        {
            "kernel": "add, 6 QPUs",
            "clocks": 300,
            "share": 0.93,
            "seconds": 0.009,
            "limit": "bus",
            "timesNaive": 1.5,
            **ends,
        },
        {"kernel": "matvec 100 x 100000, 12 QPUs", "share": 0.98, "seconds": 0.03, "limit": "bus", **ends},
        {"kernel": "matmul 512^3, 12 QPUs", "share": 0.4, "seconds": 0.01, "limit": "pipes", **ends},
        {"kernel": "exp", "share": 0.8, "seconds": 0.01, "limit": "bus", **ends},
    ]
    found = {figure.name: figure for figure in kernels.figures(lines)}
    assert found["elementwise add, share of the bus"].value == pytest.approx(93)
    assert found["elementwise add, share of the bus"].note == (
        "model: 25.0 to 98.5 %, mostly due to stores; 9.00 ms, 4.00 to 50.00 ms"
    )
    assert found[kernels.QPULIB_ADD].value == pytest.approx(3)
    assert found["matrix-vector 100 x 10^5, share of the bus"].met is True
    assert found["matrix-matrix 512^3, share of the pipes"].met is False
    assert found[kernels.NAIVE_ADD].met is False
    assert (found[kernels.COMPILE].value, found[kernels.COMPILE].met) == (6.5, True)
    assert found[kernels.CALL].met is True
    assert found["  exp"].goal is None


def test_a_lab_has_enough_places_on_large_machines() -> None:
    script = "import os; os.cpu_count = lambda: 256; from benchmarks import lab; print(2 * lab._TOGETHER, *lab.SIZES)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout
    boards, *sizes = map(int, said.split())
    assert boards <= min(sizes)
