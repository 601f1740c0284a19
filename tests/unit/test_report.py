"""Tests that the report is one file, labels emulation, and escapes text from the tests."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from device import report, suite_result
from device.record import Record
from toolchain.errors import ChainBroken, DeviceTestsFailed
from toolchain.files import sha256_of

WIDTHS = (1, 10, 100)


def timing() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        for method, factor in (("cpu", 1e-6), ("torch", 2e-7), ("qpu", 5e-5)):
            compute = None if method == "torch" else factor * width
            rows.append({"width": width, "method": method, "compute_s": compute, "end_to_end_s": 2 * factor * width})
    return {
        "what": "matrix-vector multiplication",
        "statistic": "median",
        "height": 100,
        "machine": {"cpu_label": "not measured on a Raspberry Pi", "qpu_label": "model: the interpreter"},
        "rows": rows,
        "left_out": [{"width": 1000, "reason": "would take about 95 s of the 80 s left"}],
        "published": {"what": "Raspberry Pi 3B, 2021", "rows": [{"width": 10, "cpu_s": 23e-6, "qpu_s": 169e-6}]},
    }


def link(name: str, expected: str, found: str, *, severity: str, holds: bool | None = False) -> dict[str, Any]:
    return {"name": name, "expected": expected, "found": found, "holds": holds, "severity": severity}


def document(**changes: Any) -> dict[str, Any]:
    tests = [
        {"nodeid": "test_a.py::test_good", "outcome": "passed", "seconds": 0.25, "text": ""},
        {
            "nodeid": "test_a.py::test_out",
            "outcome": "skipped",
            "seconds": 0.0,
            "text": "the image is built without torch",
        },
    ]
    made: dict[str, Any] = {
        "schema": 1,
        "made": "2026-01-02T03:04:05+00:00",
        "source": {"commit": "0123456789abcdef" * 2 + "01234567", "dirty": False, "changes": []},
        "target": {"label": "trixie-armhf", "flavour": "debian", "suite": "trixie", "architecture": "armhf"},
        "steps": [
            {
                "step": "libqpu",
                "key": "ab" * 32,
                "seconds": 3.5,
                "warnings": ["the security pocket was left out"],
                "artefacts": [{"name": "libqpu.tar", "size": 4096, "sha256": "cd" * 32}],
            }
        ],
        "image": {
            "reference": "pitorch/system:trixie-armhf",
            "id": "sha256:" + "12" * 32,
            "digests": [],
            "source": {"commit": "fedcba9876543210" * 2 + "fedcba98", "dirty": True},
            "left_out": ["trixie-security"],
        },
        "wheels": [{"name": "torch-2.6.0-cp313-cp313-linux_armv7l.whl", "size": None, "sha256": "ef" * 32}],
        "wheels_unknown": "",
        "rootfs": {"path": "/srv/pi", "sha256": "34" * 32, "image_tree_sha256": "", "counts": {}, "findings": []},
        "device": {
            "model": "linux,dummy-virt",
            "kernel": "6.12.1",
            "access": "QEMU",
            "through": "boot",
            "execution": "emulation",
            "execution_reason": "a virtual machine that this run started in QEMU (linux,dummy-virt)",
            "boot_seconds": 21.3,
            "init": "lean",
            "qpu_info": {"absent": "qpu-info is not installed"},
        },
        "tools": {"python": "3.11"},
        "without": ["torch"],
        "links": [link("the image was built from the same commit as the tests", "a", "b", severity="warning")],
        "results": {"passed": 1, "failed": 0, "errors": 0, "skipped": 1, "seconds": 12.0, "tests": tests},
        "timing": {"reason": "no timing was requested"},
    }
    made.update(changes)
    return made


def render(made: dict[str, Any]) -> str:
    return report.render(made, evidence_name="evidence.json", evidence_sha256="56" * 32)


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)))


class Balance(HTMLParser):
    """Checks that every element is closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "use", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Record the opened element."""
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that the last opened element is closed."""
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_report_names_the_emulated_cpu() -> None:
    made = document()
    made["device"]["cpu"] = "cortex-a72"
    label = "emulation (QEMU, cortex-a72, linux,dummy-virt); not measured on hardware"
    assert report.execution_label(made) == label
    assert "cortex-a72" in text_of(render(made))


def test_report_is_one_file_without_external_resources() -> None:
    html = render(document(timing=timing()))
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#]+)""", html) + re.findall(r"url\(([^)#]+)", html)
    assert references == []
    assert "<script" not in html
    assert "@import" not in html


def test_emulation_is_labelled_in_text_and_chart() -> None:
    made = document(timing=timing())
    text = text_of(render(made))
    assert "Emulation: nothing here was measured on hardware" in text
    assert "not measured on hardware" in report.execution_label(made)
    assert "not measured on hardware" in report.chart(timing(), report.execution_label(made))
    assert "model: the interpreter" in text
    assert "not measured here" in text, "the published times must be marked as not measured here"


def test_hardware_and_unverified_have_different_labels() -> None:
    device = {**document()["device"], "model": "Raspberry Pi 3 Model B"}
    on_a_pi = document(device={**device, "execution": "hardware", "execution_reason": "the device tree says so"})
    assert "Ran on hardware" in render(on_a_pi)
    assert report.execution_label(on_a_pi) == "hardware: Raspberry Pi 3 Model B"
    unknown = document(device={**device, "execution": "unverified", "execution_reason": "no model"})
    assert "not counted as measured on hardware" in render(unknown)


def test_report_lists_what_is_missing() -> None:
    text = text_of(render(document()))
    assert "Without torch" in text
    assert "No timing: no timing was requested" in text
    assert "the security pocket was left out" in text
    assert "expected a , found b" in text, "the report must explain a broken link of the chain"
    assert "Without the updates from trixie-security" in text
    assert "built from fedcba987654 with uncommitted changes" in text


def test_broken_chain_does_not_pass() -> None:
    """All tests passed, but the tested files are not those that were built."""
    broken = link("the board loads the tree's libqpu", "cd" * 32, "ef" * 32, severity="error")
    name = "the tree was exported from the same commit as the tests"
    unknown = link(name, "a", "unknown", severity="warning", holds=None)
    made = document(links=[*document()["links"], broken, unknown])
    html = render(made)
    text = text_of(html)
    assert "1 tests passed, but the tested files are not the files that were built" in text
    assert "The chain is broken: the tested files are not the files that were built" in text
    assert f"the board loads the tree's libqpu: expected {'cd' * 6}, found {'ef' * 6}" in text.replace("&#39;", "'")
    assert "commit as the tests: unknown (expected" in text
    assert '<div class="pill bad">not passed</div>' in html
    assert '<div class="pill good">passed</div>' in render(document()), "a warning must not fail the run"


def test_summary_distinguishes_warnings_and_broken_links(tmp_path: Path) -> None:
    broken = link("the board loads the tree's libqpu", "cd" * 32, "ef" * 32, severity="error")
    paths = suite_result.Paths(folder=tmp_path)
    warned = suite_result.result_of(document(), paths, 3.0)
    assert warned.ok
    assert "WARNING:  the image was built from the same commit as the tests: expected a, found b" in warned.summary()
    assert "WITHOUT:  the updates from trixie-security" in warned.summary()
    assert "BROKEN" not in warned.summary()
    failed = suite_result.result_of(document(links=[broken]), paths, 3.0)
    assert not failed.ok
    assert (failed.passed, failed.failed) == (1, 0)
    assert f"BROKEN:   the board loads the tree's libqpu: expected {'cd' * 6}, found {'ef' * 6}" in failed.summary()
    record = Record(facts={}, booted={}, tests=(), timing={}, seconds=1.0, error=None)
    fault = suite_result.error_of(failed, record)
    assert isinstance(fault, ChainBroken)
    assert fault.exit_code == 49
    assert "the board loads the tree's libqpu" in fault.found
    assert "./inv export-nfsroot" in fault.fix


def test_a_run_without_passed_tests_is_an_error(tmp_path: Path) -> None:
    nothing = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "tests": []}
    result = suite_result.result_of(document(results=nothing), suite_result.Paths(folder=tmp_path), 3.0)
    assert not result.ok
    fault = suite_result.error_of(result, Record(facts={}, booted={}, tests=(), timing={}, seconds=1.0, error=None))
    assert isinstance(fault, DeviceTestsFailed)
    assert fault.summary == "no test of the device suite ran"


def test_failures_come_first_and_their_text_is_escaped() -> None:
    tests = [
        {"nodeid": "test_a.py::test_good", "outcome": "passed", "seconds": 0.1, "text": ""},
        {"nodeid": "test_z.py::test_bad[<b>]", "outcome": "failed", "seconds": 0.1, "text": "assert '<script>' & 1"},
    ]
    results = {"passed": 1, "failed": 1, "errors": 0, "skipped": 0, "seconds": 1.0, "tests": tests}
    html = render(document(results=results))
    assert html.index("test_z.py") < html.index("test_a.py")
    assert "assert &#39;&lt;script&gt;&#39; &amp; 1" in html
    assert "<b>]" not in html
    assert "1 of 2 tests did not pass" in html


def test_run_without_tests_does_not_pass() -> None:
    results = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "seconds": 0.0, "tests": []}
    html = render(document(results=results))
    assert "No test ran" in html
    assert "not passed" in html


def test_unknown_wheels_are_not_counted() -> None:
    assert "1 wheel in it" in text_of(render(document()))
    text = text_of(render(document(wheels=[], wheels_unknown="it was not built here")))
    assert "wheels in it unknown" in text
    assert "unknown: it was not built here" in text
    assert "0 wheels" not in text


def test_chart_uses_the_colours_of_the_page() -> None:
    drawn = report.chart(timing(), "emulation")
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own
    assert root.tag.endswith("svg")
    for css in ("--ink", "--rule", "--cpu", "--torch", "--qpu"):
        assert f"var({css})" in drawn
    assert "#0101" not in drawn, "a placeholder colour was not replaced"
    assert drawn == report.chart(timing(), "emulation"), "the chart must be reproducible"
    assert "$" not in drawn, "the labels of the axes must be plain text"
    assert " ms</text>" in drawn
    assert report.chart({"reason": "none"}, "emulation") == ""


def test_timing_table_compares_each_width_with_the_published() -> None:
    rows = report.timing_table(timing())
    assert [row["width"] for row in rows] == list(WIDTHS)
    assert rows[1]["ratio"] == pytest.approx(0.02)
    assert rows[1]["published_ratio"] == pytest.approx(23 / 169)
    assert rows[0]["published_cpu"] is None
    assert "would take about 95 s" in text_of(render(document(timing=timing())))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0 µs"), (3e-6, "3 µs"), (0.00123, "1.23 ms"), (0.5, "500 ms"), (1.0, "1 s"), (123.4, "123 s")],
)
def test_seconds_are_shown_in_a_suitable_unit(value: float | None, shown: str) -> None:
    assert report.seconds(value) == shown


def test_qpu_info_is_shown_with_reason_and_fixes() -> None:
    info = {
        "version": "0.1.0",
        "backend": {"name": "interpreter", "reason": "the only one in this build"},
        "board": {"model": None, "revision": None, "soc": None, "verdict": "no Raspberry Pi"},
        "nodes": [
            {"path": "/dev/vcio", "present": False, "mode": None, "owner": None, "readable": False, "writable": False},
            {"path": "/dev/mem", "present": True, "mode": "0640", "owner": "root", "readable": True, "writable": False},
        ],
        "kms": {"state": "unknown", "evidence": "no device tree", "settings": []},
        "gpu_memory": {"mib": None, "source": "unknown: nobody to ask", "setting": None},
        "obstacles": [{"what": "KMS drives the GPU", "fix": "remove dtoverlay=vc4-kms-v3d"}],
        "note": "not measured on hardware",
    }
    rows = dict(report.qpu_rows(info))
    assert rows["backend"] == ["interpreter", "the only one in this build"]
    assert rows["device nodes"] == ["/dev/vcio: absent", "/dev/mem: 0640 root, readable"]
    assert rows["obstacles"] == ["KMS drives the GPU → remove dtoverlay=vc4-kms-v3d"]
    html = render(document(device={**document()["device"], "qpu_info": info}))
    assert "no Raspberry Pi" in html


def test_report_contains_the_hash_of_its_evidence(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(document()))
    report.write(document(), tmp_path / "index.html", evidence_file=path)
    assert sha256_of(path) in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("written", ["", '<testsuites><testsuite name="device"'])
def test_incomplete_junit_file_is_removed(tmp_path: Path, written: str) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(written)
    suite_result.label_junit(path, document())
    assert not path.exists()


def test_junit_properties_name_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text('<testsuites><testsuite name="device" tests="1"><testcase name="a"/></testsuite></testsuites>')
    suite_result.label_junit(path, document())
    found = {item.get("name"): item.get("value") for item in ElementTree.parse(path).iter("property")}  # noqa: S314
    assert found["execution"] == "emulation"
    assert found["without"] == "torch"
    assert found["image_id"] == "sha256:" + "12" * 32
    assert found["left_out"] == "trixie-security"
    assert found["image_commit"] == "fedcba9876543210" * 2 + "fedcba98"
    assert found["broken"] == ""
