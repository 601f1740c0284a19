"""Tests of ``upstream-tests``: the files that it fetches and unpacks, and the failures that have an explanation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest
from registry_parts import small_disk
from wheel_parts import make_wheel

from engine.containers import Ran
from flow import upstream_page
from flow import upstream_tests as upstream
from flow.context import Context
from recipes import recipe
from toolchain import process
from toolchain.config import load_config
from toolchain.errors import ArtefactMissing, DiskFull, SourceUnavailable


@pytest.fixture
def house(tmp_path: Path, isolated_pip: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make pip use only the wheels in this folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "house"))
    (tmp_path / "house").mkdir()
    return tmp_path / "house"


def test_pytest_is_installed_into_a_folder(house: Path, tmp_path: Path) -> None:
    make_wheel(house, {"thing.py": "x = 1\n"}, tag="py3-none-any", purelib=True)
    folder = upstream.fetch_packages(["thing==1.0"], tmp_path / "packages", tmp_path / "log")
    assert (folder / "thing.py").read_text() == "x = 1\n"


def test_a_pin_that_the_index_does_not_have_is_named(house: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"does not have thing==1\.0") as caught:
        upstream.fetch_packages(["thing==1.0"], tmp_path / "packages", tmp_path / "log")
    assert "upstream.toml" in caught.value.fix


def test_a_full_disk_while_installing_raises_diskfull(house: Path, tmp_path: Path) -> None:
    make_wheel(house, {"blob": os.urandom(300_000)}, tag="py3-none-any", purelib=True)
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(DiskFull, match="no room for") as caught:
        upstream.fetch_packages(["thing==1.0"], disk / "packages", tmp_path / "log")
    assert "No space left on device" in caught.value.found


def test_only_the_compiling_content_store_tests_are_explained() -> None:
    explained = tomllib.loads((recipe.HERE / "torch" / "upstream.toml").read_text())["explained"]
    four = ["basic", "load_tensor", "repeated_hash", "scalar"]
    failed = [f"test_content_store.py::TestContentStoreCPU::test_{name}_cpu" for name in (*four, "other")]
    lines = [
        json.dumps({"nodeid": name, "when": when, "outcome": outcome, "$report_type": "TestReport"})
        for name in failed
        for when, outcome in (("call", "failed"), ("teardown", "passed"))
    ]
    end = json.dumps({"exitstatus": 1, "$report_type": "SessionFinish"})
    file = upstream.Part("test_content_store.py")
    result = upstream.tally(
        file, [*lines, end], upstream.Reasons(explained), upstream.Collected(failed, failed), seconds=9, limit_s=60
    )
    assert list(result.explained) == failed[:4]
    assert list(result.failures) == failed[4:]


def run_with_the_plugin(folder: Path, file: str, *options: str) -> upstream.Collected:
    """Run a file on this PC as ``upstream-tests`` does; return what pytest's plugin recorded."""
    shutil.copy(recipe.HERE / "torch" / "upstream_plugin.py", folder)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    argv += ["-p", "upstream_plugin", f"--tell-collected={folder / 'collected.json'}", *options, file]
    subprocess.run(argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, timeout=60)
    return upstream.Collected(**json.loads((folder / "collected.json").read_text()))


def test_left_out_tests_are_counted_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_a.py").write_text(
        "from pathlib import Path\n"
        "def test_left(): raise AssertionError\n"
        "def test_leftover(): Path('ran').write_text('')\n"
    )
    tests = run_with_the_plugin(tmp_path, "deep/test_a.py", "--leave-out=deep/test_a.py::test_left")
    left, leftover = tests.whole
    assert (left, leftover) == ("deep/test_a.py::test_left", "deep/test_a.py::test_leftover")
    assert tests.part == tests.whole
    assert (tmp_path / "ran").exists()
    lines = [
        json.dumps({"nodeid": leftover, "when": when, "outcome": "passed", "$report_type": "TestReport"})
        for when in ("call", "teardown")
    ]
    lines += [json.dumps({"exitstatus": 0, "$report_type": "SessionFinish"})]
    reasons = upstream.Reasons({}, {left: "too long"})
    result = upstream.tally(upstream.Part("deep/test_a.py"), lines, reasons, tests, seconds=9, limit_s=60)
    assert (result.counts["passed"], result.counts["left out"], result.ended) == (1, 1, "")
    assert result.left_out == {left: "too long"}
    outcome = upstream.Outcome([result], tmp_path)
    assert outcome.summary() == "1 of upstream's test files: 1 passed, 1 left out"
    assert "left out" in outcome.table().splitlines()[0]


def test_failure_after_the_time_limit_counts_as_not_run() -> None:
    rows = [("a", "call", "failed", 59), ("a", "teardown", "passed", 59)]
    rows += [("b", "call", "failed", 61), ("b", "teardown", "passed", 61)]
    rows += [("c", "call", "passed", 62), ("c", "teardown", "failed", 63)]
    lines = [
        json.dumps({"nodeid": name, "when": when, "outcome": outcome, "stop": stop, "$report_type": "TestReport"})
        for name, when, outcome, stop in rows
    ]
    tests = upstream.Collected([*"abc"], [*"abc"])
    result = upstream.tally(
        upstream.Part("t.py"), lines, upstream.Reasons({}), tests, seconds=121, limit_s=60, signal_at=60
    )
    assert (list(result.failures), result.counts) == (["a"], {"failed": 1, "left out": 0, "not run": 2})
    assert result.ended == "cut off after 60 s: 1 of 3 tests ran"


@pytest.mark.parametrize("wheel", ["same", "other"])
def test_only_results_of_the_same_torch_are_kept(wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = {
        name: upstream.Result(name, {"passed": 3, "failed": failed}, {}, {}, ended, 9.0)
        for name, failed, ended in (("a.py", 0, ""), ("b.py 1/2", 1, ""), ("c.py", 0, "cut off after 60 s"))
    }
    report = upstream.Report(tmp_path / "torch" / "report.json", "same", True, {})
    for result in done.values():
        report.add(result)
    monkeypatch.setattr(Context, "client", None)
    monkeypatch.setattr(upstream, "run_in", lambda *_, **__: Ran(f"a warning\n{wheel}\n", 1.0))
    read = upstream.Report.read(report.path, Context(load_config({})))
    final = [read.is_final(upstream.Part.parse(name), upstream.Reasons({})) for name in done]
    assert final == [wheel == "same", False, False]
    assert [*read.results.values()] == [item for item in done.values() if wheel == "same"]


def test_ctrl_c_keeps_the_results_of_finished_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of files that are running are incomplete, and are discarded."""
    running, stopped = threading.Event(), threading.Event()
    started = []

    def run_in(_client: object, _image: str, argv: list[str], **_options: object) -> None:
        started.append(argv[-1])
        if argv[-1] == "a.py":
            running.wait(20)
        else:
            with process.on_interrupt(stopped.set):
                running.set()
                stopped.wait(20)
        test = {"nodeid": "t", "when": "teardown", "outcome": "passed", "$report_type": "TestReport"}
        end = {"exitstatus": 0, "$report_type": "SessionFinish"}
        (tmp_path / f"{argv[-1]}.jsonl").write_text(f"{json.dumps(test)}\n{json.dumps(end)}\n")
        (tmp_path / f"{argv[-1]}.collected.json").write_text('{"whole": ["t"], "part": ["t"]}')

    def add(result: upstream.Result) -> None:
        report.add(result)
        raise KeyboardInterrupt

    monkeypatch.setattr(Context, "client", None)
    monkeypatch.setattr(upstream, "run_in", run_in)
    monkeypatch.setattr(upstream, "compile_jobs", lambda _: 2)
    report, none = upstream.Report(tmp_path / "report.json", "same", True, {}), upstream.Reasons({})
    wanted = [upstream.Part(name) for name in ("a.py", "b.py", "c.py", "d.py")]
    folders = (tmp_path, tmp_path, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        upstream._run_all(Context(load_config({})), *folders, wanted, none, 60, add)
    kept = upstream.Report.load(report.path)
    assert [*kept.results] == ["a.py"]
    assert kept.is_final(wanted[0], none)
    assert {"a.py", "b.py"} <= {*started} <= {"a.py", "b.py", "c.py"}


def test_removed_reasons_cause_another_run(tmp_path: Path) -> None:
    item = upstream.Part("a.py")
    report = upstream.Report(tmp_path / "report.json", "same", True, {})
    report.add(upstream.Result("a.py", {"passed": 1}, {}, {"a.py::b": "32 bits"}, "", 9.0, {"a.py::c": "too long"}))
    explained, left_out = {"a.py::b": "32 bits"}, {"a.py::c": "too long"}
    assert report.is_final(item, upstream.Reasons(explained, left_out))
    assert not report.is_final(item, upstream.Reasons({}, left_out))
    assert not report.is_final(item, upstream.Reasons(explained))
    report.add(upstream.Result("a.py", {"passed": 1}, {}, {}, "", 9.0, unmet=["a.py::tset"]))
    assert not report.is_final(item, upstream.Reasons({})), "a pattern that matched no test may have been corrected"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"torch": "same", "files": [{}]}'])
def test_a_damaged_report_is_replaced(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.json").write_text(text)
    monkeypatch.setattr(Context, "client", None)
    monkeypatch.setattr(upstream, "run_in", lambda *_, **__: Ran("same\n", 1.0))
    report = upstream.Report.read(tmp_path / "report.json", Context(load_config({})))
    report.add(upstream.Result("a.py", {}, {}, {}, "", 9.0))
    assert [item["file"] for item in json.loads(report.path.read_text())["files"]] == ["a.py"]


def test_installing_a_wheel_does_not_change_its_identity(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"torch/a.py": "x = 1\n"})
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        record = archive.read(name).decode()
    installed = f"../../../bin/torchrun,sha256=a,2\n{name.replace('RECORD', 'INSTALLER')},sha256=b,8\n{record}"
    assert upstream.identity(installed) == upstream_page.identity_of_wheel(wheel)
    assert upstream.identity(f"{record}torch/b.py,sha256=c,3\n") != upstream.identity(record)


def test_page_shows_parts_reasons_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.toml").write_text('files = ["a.py", "b.py 1/2", "b.py 2/2", "c.py"]\n')
    monkeypatch.setattr(upstream_page, "LIST", tmp_path / "list.toml")
    report = upstream.Report(tmp_path / "report.json", "same", True, {})
    report.add(upstream.Result("a.py", {"passed": 1, "failed": 1}, {"a.py::T::t": "wrong sum"}, {}, "", 9.0))
    why = {"b.py::T::u": "32 bits", "b.py::T::v": "32 bits"}
    report.add(upstream.Result("b.py 2/2", {"passed": 3, "explained": 2}, {}, why, "cut off after 9 s", 9.0))
    page = upstream_page.render(upstream.Report.load(report.path))
    assert "2 of the 4 files" in page
    assert "4 passed, 2 explained, 1 failed." in page
    assert "| `b.py` | 3 | 0 | 2 | 0 | 0 | 0 | 1 of 2 parts; b.py 2/2: cut off after 9 s |" in page
    assert "- `a.py::T::t`: wrong sum" in page
    assert "| `b.py` | 2 | `u` … `v` | 32 bits |" in page
    assert page.index("## Not yet run") < page.index("- `b.py 1/2`") < page.index("- `c.py`")


def test_report_on_another_torch_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_page, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(upstream_page, "wheel", lambda: make_wheel(tmp_path, {"torch/a.py": "x = 1\n"}))
    report = upstream.Report(tmp_path / "report.json", "another", True, {})
    report.add(upstream.Result("a.py", {"passed": 1}, {}, {}, "", 9.0))
    with pytest.raises(ArtefactMissing, match="report on another torch"):
        upstream_page.main([str(report.path)])
    assert not (tmp_path / "stored.json").exists()


def test_a_pattern_that_matches_no_test_is_reported() -> None:
    reasons = upstream.Reasons(
        {"t.py::A::test_*": "", "t.py::A::tset_b": "", "t.py::B": "", "u.py::*": ""}, {"t.py::C::*": ""}
    )
    collection = {"nodeid": "t.py::B", "outcome": "failed", "$report_type": "CollectReport"}
    lines = [json.dumps(collection), json.dumps({"exitstatus": 1, "$report_type": "SessionFinish"})]
    file, tests = upstream.Part("t.py", 2, 2), upstream.Collected(["t.py::A::test_b"], [])
    result = upstream.tally(file, lines, reasons, tests, seconds=9, limit_s=60)
    assert result.unmet == ["t.py::A::tset_b", "t.py::C::*"], "tests of other parts must count as found"
    assert upstream.tally(file, lines, reasons, None, seconds=9, limit_s=60).unmet == []


def test_parts_of_a_file_are_disjoint_and_complete(tmp_path: Path) -> None:
    body = "from pathlib import Path\n" + "".join(
        f"def test_{name}(): Path('ran').open('a').write('{name}')\n" for name in "dacbe"
    )
    (tmp_path / "test_a.py").write_text(body)
    parts = [run_with_the_plugin(tmp_path, "test_a.py", f"--part={part}/3") for part in (1, 2, 3)]
    names = [f"test_a.py::test_{name}" for name in "abcde"]
    assert all(found.whole == names for found in parts)
    assert [[*found.part] for found in parts] == [names[0::3], names[1::3], names[2::3]]
    assert (tmp_path / "ran").read_text() == "da" + "be" + "c", "each test must run once, in the order of the file"


@pytest.mark.parametrize("text", ["test_nn.py 2/4", "nn/test_pooling.py", "test_nn.py 1/1"])
def test_names_of_files_and_parts_are_parsed(text: str) -> None:
    assert str(upstream.Part.parse(text)) == text.removesuffix(" 1/1")


@pytest.mark.parametrize("text", ["", "test_nn", "test_nn.py 0/4", "test_nn.py 5/4", "test_nn.py 2", "test_nn.py 2/0"])
def test_an_invalid_part_is_rejected(text: str) -> None:
    with pytest.raises(ArtefactMissing, match="is not the name of a test file") as caught:
        upstream.Part.parse(text)
    assert "'test_nn.py 2/4'" in caught.value.expected


def test_each_pattern_has_a_listed_file_and_a_reason() -> None:
    data = tomllib.loads(upstream.LIST.read_text())
    tables = {**data["explained"], **data["left_out"]}
    assert len(tables) == len(data["explained"]) + len(data["left_out"])
    parts = [upstream.Part.parse(name) for name in data["files"]]
    assert {pattern.partition("::")[0] for pattern in tables} <= {item.file for item in parts}
    assert all("::" in pattern and reason for pattern, reason in tables.items())
    assert len(data["files"]) == len(set(parts))


def test_all_parts_of_each_listed_file_are_listed() -> None:
    parts = [upstream.Part.parse(name) for name in tomllib.loads(upstream.LIST.read_text())["files"]]
    for item in parts:
        mine = [other for other in parts if other.file == item.file]
        assert [other.part for other in mine] == [*range(1, item.parts + 1)], str(item)
        assert {other.parts for other in mine} == {item.parts}, str(item)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Make a source archive with tests and other files."""
    root = tmp_path / "small-1.0"
    (root / "test" / "data").mkdir(parents=True)
    (root / "test" / "test_a.py").write_text("def test_a(): pass\n")
    (root / "test" / "data" / "blob").write_bytes(os.urandom(300_000))
    (root / "setup.py").write_text("not a test")
    packed = tmp_path / "small_1.0.orig.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        tar.add(root, root.name)
    return packed


def test_only_the_tests_of_a_source_are_unpacked(archive: Path, tmp_path: Path) -> None:
    upstream.unpack(archive, tmp_path / "sources" / "tests")
    found = {str(path.relative_to(tmp_path / "sources")) for path in (tmp_path / "sources").rglob("*")}
    assert found == {"tests", "tests/test_a.py", "tests/data", "tests/data/blob"}


def test_a_full_disk_leaves_no_unpacked_tests(archive: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(DiskFull, match="no room for upstream's tests") as caught:
            upstream.unpack(archive, disk / "tests")
        assert list(disk.iterdir()) == []
    assert caught.value.found.startswith("tar: ")
