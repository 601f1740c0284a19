"""Tests of the ``models`` benchmark: its figures and its table, computed from small counts."""

from __future__ import annotations

from benchmarks.cpu.counts import Block, Instruction, Region
from benchmarks.models import compare
from benchmarks.models.compare import Cell


def region(instructions: int) -> Region:
    return Region(0, {Block(0, [Instruction(b"", "nop")]): instructions})


def rows(mode: str) -> list[dict[str, object]]:
    """Return the rows that on_target.py writes for a model that cannot be quantised."""
    counted = mode == "count"
    return [
        {
            "model": "cnn",
            "how": "TVM",
            "region": 1 if counted else 0,
            "seconds": 0.0 if counted else 0.002,
            "reason": "",
        },
        {"model": "cnn", "how": "torch float32", "region": 2 if counted else 0, "seconds": 0.004, "reason": ""},
        {"model": "cnn", "how": "torch int8", "region": 0, "seconds": 0.0, "reason": "built without [qnnpack]"},
    ]


def made() -> dict[str, dict[str, Cell]]:
    return compare.cells(rows("count"), rows("time"), {1: region(2_500_000), 2: region(10_000_000)})


def test_counts_and_times_are_joined_by_model() -> None:
    assert made() == {
        "cnn": {
            "TVM": Cell(2_500_000, 0.002),
            "torch float32": Cell(10_000_000, 0.004),
            "torch int8": Cell(0, 0.0, "built without [qnnpack]"),
        }
    }


def test_ratio_is_a_figure_only_if_both_were_counted() -> None:
    done = compare.result(made(), "torch 2.6.0", "armv7")
    (figure,) = done.figures
    assert (figure.name, figure.value) == ("cnn, armv7: instructions, TVM / torch float32", 0.25)
    assert done.facts["models"]["cnn"]["torch int8"]["reason"] == "built without [qnnpack]"


def test_table_shows_the_reason_of_an_empty_cell() -> None:
    lines = compare.table(made(), "torch 2.6.0", "armv7").splitlines()
    (row,) = (line for line in lines if "cnn" in line and "not run" not in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["cnn", "2.5", "10", "–", "2", "4", "–"]
    assert "not run: cnn, torch int8: built without [qnnpack]" in lines


def test_rule_labels_the_model_and_the_times() -> None:
    for label in ("MODEL", "UNDER EMULATION", "not", "measured on hardware"):
        assert label in compare.RULE
