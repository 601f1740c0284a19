"""Tests of the device in PyTorch's own profilers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity


def a_step() -> None:
    model = nn.Linear(30, 20).to("qpu")
    model(torch.ones(10, 30, device="qpu")).relu().sum().backward()


def test_launches_are_events_below_their_operators(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as seen:
        a_step()
    events = list(seen.events())
    launches = [event for event in events if event.name == "qpu::mm"]
    assert len(launches) >= 2, "expected launches for the forward pass and the gradient of the weights"
    parents = {event.cpu_parent.name for event in launches if event.cpu_parent is not None}
    assert parents <= {"aten::addmm", "aten::mm"}
    assert parents
    assert all(event.time_range.elapsed_us() > 0 for event in launches)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["name"] for row in rows} >= {"qpu::mm", "qpu::relu"}


def test_qpu_time_is_reported_per_operator() -> None:
    with torch.autograd.profiler.profile(use_device="qpu") as seen:
        a_step()
        torch.ones(5).add(1)
    rows = {row.key: row for row in seen.key_averages()}
    assert rows["qpu::mm"].device_time_total > 0
    assert rows["aten::addmm"].device_time_total > 0
    # An operator's time is that of its launches, without the CPU's work.
    assert rows["aten::addmm"].device_time_total <= rows["aten::addmm"].cpu_time_total
    assert rows["aten::ones"].device_time_total == 0
    assert "QPU" in seen.key_averages().table()
