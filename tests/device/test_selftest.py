"""Tests of libqpu on the board: which backend it uses and why, and whether it computes correctly."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    "PITORCH_BOARD" not in os.environ, reason="tests the board itself, on which ./inv test-on-pi runs it"
)

LIMIT_S = 1200
"""An emulated board under load is a hundred times slower than a Pi."""

MODELS = ("interpreter", "emulator", "emulation")
"""Backends that compute on the CPU."""


def run(program: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.skip(f"the image is built without libqpu: no {program}")
    environment = {**os.environ, **settings}
    return subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@functools.cache
def qpu_info() -> dict[str, Any]:
    done = run("qpu-info", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("name", ["vc4-registers", "vc4-mailbox", "emulator"])
def test_self_test_passes_on_every_working_backend(name: str) -> None:
    found = {item["name"]: item for item in qpu_info()["backends"]}[name]
    assert found["reason"]
    if not found["usable"]:
        pytest.skip(f"{name}: {found['reason']}")
    done = run("qpu-selftest", QPU_BACKEND=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"backend {name}:" in done.stdout


def test_qpus_are_off_afterwards() -> None:
    assert run("qpu-selftest").returncode == 0
    said = json.loads(run("qpu-info", "--json").stdout)
    assert [user for user in said["state"]["users"] if not user["alive"]] == []


def test_self_test_passes() -> None:
    done = run("qpu-selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "the self-test printed nothing"


def test_qpu_info_reports_all_sections() -> None:
    assert {
        "version",
        "backend",
        "backends",
        "board",
        "v3d",
        "nodes",
        "kms",
        "gpu_memory",
        "state",
        "obstacles",
    } <= set(qpu_info())


def test_backend_is_reported_with_its_reason() -> None:
    backend = qpu_info()["backend"]
    assert backend["name"]
    assert backend["reason"]


def test_board_matches_the_device_tree() -> None:
    board = qpu_info()["board"]
    path = Path("/proc/device-tree/model")
    if not path.is_file():
        assert board["model"] is None
        return
    model = path.read_text().rstrip("\0")
    assert board["model"] == model
    if model.startswith("Raspberry Pi"):
        assert board["suitable"] is not None
    else:
        assert board["suitable"] is not True


def test_device_nodes_match_the_report() -> None:
    nodes = {node["path"]: node for node in qpu_info()["nodes"]}
    assert "/dev/vcio" in nodes
    assert "/dev/mem" in nodes
    for path, node in nodes.items():
        assert node["present"] == Path(path).exists()
        assert node["writable"] == (Path(path).exists() and os.access(path, os.W_OK))


def test_qpus_are_not_used_without_a_suitable_board() -> None:
    document = qpu_info()
    if document["board"]["suitable"] is not True:
        assert document["backend"]["name"] in MODELS


def test_each_obstacle_has_a_fix() -> None:
    for obstacle in qpu_info()["obstacles"]:
        assert obstacle["what"]
        assert obstacle["fix"], obstacle["what"]


def test_memory_split_is_reported_with_its_source() -> None:
    memory = qpu_info()["gpu_memory"]
    assert memory["source"]
    assert memory["mib"] is None or 16 <= memory["mib"] <= 1024


def test_emulator_calibration_is_not_a_measurement() -> None:
    done = run("qpu-calibrate", QPU_BACKEND="emulator")
    assert done.returncode == 0, done.stderr
    assert "source = emulator" in done.stdout
    assert "measured on hardware:" not in done.stdout
    assert "store_ns = " in done.stdout


def test_text_and_json_report_the_same_backend() -> None:
    text = run("qpu-info").stdout
    assert qpu_info()["backend"]["name"] in text


def test_invalid_usage_is_reported() -> None:
    done = run("qpu-info", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_python_reaches_the_library() -> None:
    if shutil.which("qpu-info") is None:
        pytest.skip("the image is built without libqpu: no qpu-info")
    from pitorch import qpu

    assert qpu.backend().name == qpu_info()["backend"]["name"]
    program = qpu.Program.assemble("nop; thrend\nnop\nnop\n")
    assert program.words.size == 3
