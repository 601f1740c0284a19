"""What ``upstream-tests`` fetches and unpacks before anything runs, and what it takes for explained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from registry_parts import small_disk
from wheel_parts import make_wheel

from recipes import recipe
from recipes.torch import upstream
from toolchain.errors import DiskFull, NetworkUnreachable, SourceUnavailable


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever pip is set to on this PC, it takes wheels from this folder alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "house"))
    (tmp_path / "house").mkdir()
    return tmp_path / "house"


def test_what_pytest_needs_is_put_into_a_folder(house: Path, tmp_path: Path) -> None:
    make_wheel(house, {"thing.py": "x = 1\n"}, tag="py3-none-any", purelib=True)
    folder = upstream.fetch_packages(["thing==1.0"], tmp_path / "packages", tmp_path / "log")
    assert (folder / "thing.py").read_text() == "x = 1\n"


def test_without_an_index_it_is_the_network(house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(NetworkUnreachable, match="what upstream's tests need cannot be fetched") as caught:
        upstream.fetch_packages(["thing==1.0"], tmp_path / "packages", tmp_path / "log")
    assert caught.value.exit_code == 20
    assert str(tmp_path / "log") in caught.value.found


def test_a_pin_that_the_index_does_not_have_is_named(house: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"does not have thing==1\.0") as caught:
        upstream.fetch_packages(["thing==1.0"], tmp_path / "packages", tmp_path / "log")
    assert "upstream.toml" in caught.value.mend


def test_a_disk_without_room_for_it_is_told_as_one(house: Path, tmp_path: Path) -> None:
    make_wheel(house, {"blob": os.urandom(300_000)}, tag="py3-none-any", purelib=True)
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(DiskFull, match="no room for") as caught:
        upstream.fetch_packages(["thing==1.0"], disk / "packages", tmp_path / "log")
    assert "No space left on device" in caught.value.found


def test_of_the_content_store_the_four_tests_that_compile_are_explained_and_no_other() -> None:
    explained = tomllib.loads((recipe.HERE / "torch" / "upstream.toml").read_text())["explained"]
    four = ["basic", "load_tensor", "repeated_hash", "scalar"]
    failed = [f"test_content_store.py::TestContentStoreCPU::test_{name}_cpu" for name in (*four, "other")]
    lines = [
        json.dumps({"nodeid": name, "when": "call", "outcome": "failed", "$report_type": "TestReport"})
        for name in failed
    ]
    end = json.dumps({"exitstatus": 1, "$report_type": "SessionFinish"})
    told = upstream.tally("test_content_store.py", [*lines, end], upstream.Reasons(explained), seconds=9, limit_s=60)
    assert list(told.explained) == failed[:4]
    assert list(told.failures) == failed[4:]


def run_with_the_plugin(folder: Path, file: str, *options: str) -> list[str]:
    """Run a file as ``upstream-tests`` does, here; the names of its tests that the plugin tells."""
    shutil.copy(Path(upstream.__file__).with_name("upstream_plugin.py"), folder)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    argv += ["-p", "upstream_plugin", f"--tell-collected={folder / 'collected.json'}", *options, file]
    subprocess.run(argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, timeout=60)
    told = json.loads((folder / "collected.json").read_text())
    assert isinstance(told, list)
    return told


def test_what_is_left_out_is_not_run_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_a.py").write_text(
        "from pathlib import Path\n"
        "def test_left(): raise AssertionError\n"
        "def test_leftover(): Path('ran').write_text('')\n"
    )
    tests = run_with_the_plugin(tmp_path, "deep/test_a.py", "--leave-out=deep/test_a.py::test_left")
    assert tests == ["deep/test_a.py::test_left", "deep/test_a.py::test_leftover"]
    assert (tmp_path / "ran").exists()
    lines = [json.dumps({"nodeid": tests[1], "when": "call", "outcome": "passed", "$report_type": "TestReport"})]
    lines += [json.dumps({"exitstatus": 0, "$report_type": "SessionFinish"})]
    reasons = upstream.Reasons({}, {tests[0]: "too long"})
    told = upstream.tally("deep/test_a.py", lines, reasons, tests, seconds=9, limit_s=60)
    assert (told.counts["passed"], told.counts["left out"]) == (1, 1)
    assert (told.record()["left_out"], told.record()["omissions"]) == (1, {tests[0]: "too long"})
    outcome = upstream.Outcome([told], tmp_path)
    assert outcome.summary() == "1 of upstream's test files: 1 passed, 1 left out"
    assert "left out" in outcome.table().splitlines()[0]


def test_a_pattern_that_meets_no_test_of_its_file_is_told() -> None:
    reasons = upstream.Reasons(
        {"t.py::A::test_*": "", "t.py::A::tset_b": "", "t.py::B": "", "u.py::*": ""}, {"t.py::C::*": ""}
    )
    collection = {"nodeid": "t.py::B", "outcome": "failed", "$report_type": "CollectReport"}
    lines = [json.dumps(collection), json.dumps({"exitstatus": 1, "$report_type": "SessionFinish"})]
    told = upstream.tally("t.py", lines, reasons, ["t.py::A::test_b"], seconds=9, limit_s=60)
    assert told.unmet == ["t.py::A::tset_b", "t.py::C::*"]
    assert upstream.tally("t.py", lines, reasons, None, seconds=9, limit_s=60).unmet == []


def test_each_pattern_is_of_a_listed_file_and_has_a_reason() -> None:
    data = tomllib.loads(upstream.LIST.read_text())
    tables = {**data["explained"], **data["left_out"]}
    assert len(tables) == len(data["explained"]) + len(data["left_out"])
    assert {pattern.partition("::")[0] for pattern in tables} <= set(data["files"])
    assert all("::" in pattern and reason for pattern, reason in tables.items())
    assert len(data["files"]) == len(set(data["files"]))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A source with tests, and more."""
    root = tmp_path / "small-1.0"
    (root / "test" / "data").mkdir(parents=True)
    (root / "test" / "test_a.py").write_text("def test_a(): pass\n")
    (root / "test" / "data" / "blob").write_bytes(os.urandom(300_000))
    (root / "setup.py").write_text("no test")
    packed = tmp_path / "small_1.0.orig.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        tar.add(root, root.name)
    return packed


def test_of_a_source_the_tests_alone_are_unpacked(archive: Path, tmp_path: Path) -> None:
    upstream.unpack(archive, tmp_path / "sources" / "tests")
    found = {str(path.relative_to(tmp_path / "sources")) for path in (tmp_path / "sources").rglob("*")}
    assert found == {"tests", "tests/test_a.py", "tests/data", "tests/data/blob"}


def test_a_disk_without_room_for_the_tests_keeps_none_of_them(archive: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(DiskFull, match="no room for upstream's tests") as caught:
            upstream.unpack(archive, disk / "tests")
        assert list(disk.iterdir()) == []
    assert caught.value.found.startswith("tar: ")
