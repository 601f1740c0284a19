"""Tests of a run's record, the runner that writes it, and the classification of the machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from device_parts import write_suite

from device import drive, evidence, onboard, record
from toolchain.config import ROOT


def run_onboard(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    """Unpack the archive and start the runner in a separate process, as the board does."""
    unpacked = folder / "unpacked"
    unpacked.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", "-"], cwd=unpacked, input=drive.archive(folder / "suite"), check=True)
    done = subprocess.run(
        [sys.executable, "onboard.py", *arguments],
        cwd=unpacked,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def outcomes(events: list[dict[str, object]]) -> dict[object, object]:
    return {event["nodeid"]: event["outcome"] for event in events if event["pitorch"] == "result"}


def test_runner_reports_each_event_as_a_json_line(tmp_path: Path) -> None:
    write_suite(
        tmp_path / "suite",
        all="""
            import pytest
            def test_good(): print("this goes to the test's own output")
            def test_bad(): assert 1 == 2, "one is not two"
            def test_left_out(): pytest.skip("no board")
            @pytest.fixture
            def broken(): raise RuntimeError("fixture")
            def test_error(broken): pass
            @pytest.mark.parametrize("n", [1, 2])
            def test_many(n): pass
        """,
    )
    done, events = run_onboard(tmp_path)
    assert done.returncode == 1
    assert [event["pitorch"] for event in events[:2]] == ["facts", "collected"]
    assert events[-1]["pitorch"] == "end"
    assert outcomes(events) == {
        "test_all.py::test_good": "passed",
        "test_all.py::test_bad": "failed",
        "test_all.py::test_left_out": "skipped",
        "test_all.py::test_error": "error",
        "test_all.py::test_many[1]": "passed",
        "test_all.py::test_many[2]": "passed",
    }
    texts = {event["nodeid"]: str(event["text"]) for event in events if event["pitorch"] == "result"}
    assert "one is not two" in texts["test_all.py::test_bad"]
    assert texts["test_all.py::test_left_out"] == "no board"
    starts = [event["nodeid"] for event in events if event["pitorch"] == "start"]
    assert starts == events[1]["nodeids"]


def test_file_with_a_missing_component_is_skipped(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", nets="import dot_cpp\ndef test_x(): dot_cpp.product", plain="def test_y(): pass")
    _, events = run_onboard(tmp_path)
    assert outcomes(events) == {"test_nets.py::all": "skipped", "test_plain.py::test_y": "passed"}
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert record.missing_components(record.Record.read(path).tests) == ["the QPU extension wheel"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "device").glob("test_*.py")), ids=lambda path: path.name)
def test_every_optional_import_of_the_suite_is_a_component(path: Path) -> None:
    """An image may be built without a component: with upstream's QPULib, there is no extension."""
    tree = ast.parse(path.read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    of_the_suite = {item.stem for item in path.parent.glob("*.py")}
    on_every_board = {*sys.stdlib_module_names, *of_the_suite, "pytest", "numpy"}
    assert {name.partition(".")[0] for name in names} - on_every_board <= onboard.COMPONENTS.keys()


def test_import_error_does_not_prevent_the_other_files(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", broken="import no_such_module_at_all", plain="def test_y(): pass")
    done, events = run_onboard(tmp_path)
    assert done.returncode != 0
    assert outcomes(events) == {"test_broken.py::collection": "error", "test_plain.py::test_y": "passed"}


def test_tests_are_selected_by_node_and_keyword(tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", one="def test_a(): pass\ndef test_b(): pass", two="def test_a(): pass")
    _, events = run_onboard(tmp_path, "test_one.py::test_b")
    assert list(outcomes(events)) == ["test_one.py::test_b"]
    _, events = run_onboard(tmp_path, "--keyword=test_a and not two")
    assert list(outcomes(events)) == ["test_one.py::test_a"]


def test_timing_is_a_document_or_the_reason_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert onboard.run_timing(tmp_path, [], 5) == {"reason": "timing.py is not part of this suite"}
    script = tmp_path / "timing.py"
    script.write_text("print('{}')")
    assert "is not installed" in onboard.run_timing(tmp_path, [], 5)["reason"]
    monkeypatch.setattr(onboard, "_version", lambda _: "1.0")
    assert onboard.run_timing(tmp_path, [], 60) == {}
    script.write_text("import sys; sys.exit('no result')")
    assert onboard.run_timing(tmp_path, [], 60)["reason"] == "timing.py failed with status 1: no result"
    script.write_text("print('a table')")
    assert "printed no JSON" in onboard.run_timing(tmp_path, [], 60)["reason"]
    script.write_text("import time; time.sleep(60)")
    assert onboard.run_timing(tmp_path, [], 0.5)["reason"] == "timing.py did not finish within 0 s"


def test_incomplete_record_counts_missing_results_as_errors(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text(
        '{"pitorch": "facts", "model": "linux,dummy-virt"}\n'
        '{"pitorch": "collected", "nodeids": ["t.py::a", "t.py::b"]}\n'
        '{"pitorch": "result", "nodeid": "t.py::a", "outcome": "passed", "seconds": 1.5, "text": ""}\n'
        '{"pitorch": "result", "nodeid": "t.py::b", "outc'
    )
    tests = record.Record.read(path).tests
    assert [(test.nodeid, test.outcome) for test in tests] == [("t.py::a", "passed"), ("t.py::b", "error")]
    assert tests[1].text == record.BOARD_LOST
    assert record.count(tests) == {"passed": 1, "failed": 0, "errors": 1, "skipped": 0}


def test_missing_result_is_an_error_after_a_regular_end(tmp_path: Path) -> None:
    write_suite(
        tmp_path / "suite", a="def test_a(): pass\nimport pytest\ndef test_b(): pytest.exit('enough', returncode=0)"
    )
    done, events = run_onboard(tmp_path)
    assert (done.returncode, events[-1]["status"]) == (0, 0)
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    tests = record.Record.read(path).tests
    assert [test.nodeid.partition("::")[2] for test in tests] == ["test_a", "test_b"]
    assert [test.outcome for test in tests] == ["passed", "error"]
    assert tests[1].text == record.PYTEST_ENDED


def test_missing_record_is_empty(tmp_path: Path) -> None:
    found = record.Record.read(tmp_path / "none")
    assert (found.tests, found.facts, found.error) == ((), {}, None)
    assert evidence.execution_of(found.facts, started_by_us=False)[0] == "unverified"


PI = {
    "model": b"Raspberry Pi 3 Model B Rev 1.2\0",
    "compatible": b"raspberrypi,3-model-b\0brcm,bcm2837\0",
    "system/linux,revision": bytes.fromhex("00a02082"),
    "serial-number": b"00000000a1b2c3d4\0",
}
"""The device tree of a board after its firmware has added its data."""

RASPI2B = {"model": b"Raspberry Pi 2 Model B\0", "compatible": b"raspberrypi,2-model-b\0brcm,bcm2836\0"}
"""The device tree that QEMU's raspi2b passes to the kernel with the kernel's own bcm2836-rpi-2-b.dtb."""

VIRT = {"model": b"linux,dummy-virt\0", "compatible": b"linux,dummy-virt\0"}


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the board's timing script. Empty modules replace the image's modules, which the test does not need."""
    for name in ("cpu_cpp", "matrix_cpp", "qpu_ops", "torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("timing_of_the_board", ROOT / "tests" / "device" / "timing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("tree", "execution", "reason_part"),
    [
        (PI, "hardware", ""),
        (RASPI2B, "unverified", "the revision code and the serial number that a Pi's firmware"),
        ({**RASPI2B, "system/linux,revision": PI["system/linux,revision"]}, "unverified", "the serial number that"),
        ({**PI, "serial-number": b"0000000000000000\0"}, "unverified", "the serial number that"),
        ({**PI, "system/linux,revision": bytes(4)}, "unverified", "the revision code that"),
        (VIRT, "emulation", "linux,dummy-virt"),
        ({**PI, "compatible": b"qemu,raspi3b\0"}, "emulation", ""),
        ({**PI, "model": b"Orange Pi\0"}, "unverified", "does not name a Raspberry Pi"),
        ({}, "unverified", ""),
    ],
    ids=["Pi", "raspi2b", "raspi2b-u-boot", "no-serial", "no-revision", "virt", "names-qemu", "other-pi", "no-tree"],
)
def test_hardware_needs_the_data_of_the_firmware(
    tree: Mapping[str, bytes], execution: str, reason_part: str, tmp_path: Path, timing: ModuleType
) -> None:
    """The evidence and the timing script use the same rule.

    A Pi's model is not enough, because an emulator can report it too.
    """
    for name, content in tree.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    words = {name: tree.get(name, b"").decode() for name in ("model", "compatible")}
    facts = {
        "model": words["model"].rstrip("\0"),
        "compatible": [word for word in words["compatible"].split("\0") if word],
        "firmware": onboard.firmware(tmp_path),
    }
    found, reason = evidence.execution_of(facts, started_by_us=False)
    assert found == execution
    assert reason_part in reason
    assert evidence.execution_of(facts, started_by_us=True)[0] == "emulation"
    model, doubt = timing.board_of(tmp_path)
    assert model == facts["model"]
    assert (doubt == "") == (execution == "hardware")
    if execution == "unverified" and model.startswith("Raspberry Pi"):
        assert doubt.startswith("unverified, not counted as measured")
        assert reason_part in doubt
    elif doubt:
        assert doubt.startswith("not measured on a Raspberry Pi, but on: ")
        assert (model or f"{platform.machine()} machine without a device tree") in doubt


@pytest.mark.parametrize("backend", ["vc4-registers", "interpreter"])
@pytest.mark.parametrize(("tree", "hardware"), [(PI, True), (RASPI2B, False)], ids=["Pi", "raspi2b"])
def test_only_times_from_a_pi_count_as_measured(
    tree: Mapping[str, bytes], hardware: bool, backend: str, tmp_path: Path, timing: ModuleType
) -> None:
    for name, content in tree.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    functions = {"backend": lambda: SimpleNamespace(name=backend, reason="selected"), "settings": lambda: (4,)}
    vars(timing.qpu_ops).update(functions)
    vars(timing.torch).update(__version__="0", get_num_threads=lambda: 1)
    found = timing.machine(tmp_path)
    on_qpus = hardware and backend == "vc4-registers"
    assert (found["cpu_measured_on_hardware"], found["qpu_measured_on_hardware"]) == (hardware, on_qpus)
    assert found["cpu_label"].startswith("measured on Raspberry Pi" if hardware else "unverified, not counted")
    assert found["qpu_label"].startswith("measured on the QPUs") == on_qpus
    if not on_qpus:
        assert "not measured on QPUs" in found["qpu_label"] or "not counted as measured" in found["qpu_label"]


def test_firmware_data_is_reported_unchanged(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "linux,revision").write_bytes(PI["system/linux,revision"])
    (tmp_path / "serial-number").write_bytes(PI["serial-number"])
    assert onboard.firmware(tmp_path) == {"revision": "00a02082", "serial_number": "00000000a1b2c3d4"}
    assert onboard.firmware(tmp_path / "none") == {"revision": "", "serial_number": ""}


def test_only_tests_of_the_suite_can_be_selected(tmp_path: Path) -> None:
    suite = tmp_path / "device"
    arguments = ["device", "device/test_a.py", "device/test_a.py::test_x[1::2]"]
    assert list(drive._targets(suite, arguments, tmp_path)) == ["test_a.py", "test_a.py::test_x[1::2]"]
    with pytest.raises(pytest.UsageError, match="only tests in"):
        list(drive._targets(suite, ["elsewhere/test_b.py"], tmp_path))
