"""Update the figures in docs/cuda.md with those in the JSON file that on_gpu.py wrote on a machine with a GPU.

``python -m benchmarks.cuda.figures [gpu.json]`` writes the page's tables. If ``gpu.json`` is given, the program
first copies it to docs/cuda/h200.json. A test checks that the page is up to date.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from typing import Any

from toolchain import files
from toolchain.config import ROOT

DATA = ROOT / "docs" / "cuda" / "h200.json"
TRACE = ROOT / "docs" / "cuda" / "timeline.json"
PAGE = ROOT / "docs" / "cuda.md"
_PART = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_SKIP = re.compile(r"SKIPPED \[(\d+)\] \S+:\d+: (.*)")


def render(document: dict[str, Any]) -> str:
    """Return the tables, as Markdown."""
    speed, tests = document["speed"], document["tests"]
    device = f"{document['device']} ({document['devices']} in the machine), torch {document['torch']}"
    if "wheel_sha256" in document:
        device += f", with the wheel whose SHA-256 begins with {document['wheel_sha256'][:16]}"
    lines = [
        _paragraph(
            f"Measured on {document['date'][:10]} on {device}. The limit of the memory bandwidth is "
            f"{speed['limit_gb_s']:.0f} GB/s, according to the {speed['limit_from']}. Times are medians in µs; the "
            "implementations in a row were measured alternately."
        ),
        "",
        _paragraph(
            f"Tests: {tests['tests'] - tests['skipped']} passed, {_skipped(tests)}. compute-sanitizer "
            "checked a selection of the tests (`SANITIZED` in `on_gpu.py`): "
            + "; ".join(_watched(tool, item, tests["tests"]) for tool, item in document["sanitizer"].items())
            + "."
        ),
        "",
        *_launches(_chosen(speed, "launch")),
        *_table("Elementwise", _chosen(speed, "add2", "axpy", "exp")),
        *_table("Softmax of rows, in a CUDA graph", _chosen(speed, "softmax")),
        *_table("Matrix-vector multiplication, in a CUDA graph", _chosen(speed, "matvec")),
        "Output of `cuda-timing` on that machine:",
        "",
        "```text",
        *document["timing"]["cuda_timing"]["table"],
        "",
        *textwrap.wrap(document["timing"]["cuda_timing"]["sentence"], 118),
        "```",
        "",
        "Kernels in the [timeline](cuda/timeline.json) of this run:",
        "",
        "```text",
        *document["timing"]["timeline"],
        "```",
        "",
        "Output of `array-exp -l 10000000` on that machine:",
        "",
        "```text",
        *document["timing"]["array_exp"],
        "```",
        "",
    ]
    return "\n".join(lines)


def _paragraph(text: str) -> str:
    """Return Markdown prose, wrapped to fewer than 100 characters per line."""
    return textwrap.fill(text, 99, break_long_words=False, break_on_hyphens=False)


def _skipped(tests: dict[str, Any]) -> str:
    """Return the number of skipped tests and the reasons from pytest's lines ``SKIPPED [COUNT] FILE:LINE: REASON``."""
    reasons = [_SKIP.sub(lambda found: f"{found[1]}: {found[2]}", line) for line in tests["skips"]]
    return f"{tests['skipped']} skipped" + (f" ({'; '.join(reasons)})" if reasons else "")


def _watched(tool: str, item: dict[str, Any], tests: int) -> str:
    """Return the result of a compute-sanitizer tool: how many of the tests it checked, and what it found."""
    watched = sum(int(count) for count in re.findall(r"(\d+) (?:passed|failed|errors?)", item["tests"]))
    return f"{tool} checked {watched} of {tests} tests ({item['summary'].lower()})"


def _chosen(speed: dict[str, Any], *starts: str) -> list[dict[str, Any]]:
    return [item for item in speed["comparisons"] if item["name"].startswith(starts)]


def _others(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["microseconds"] if name != row["ours"]))


def _line(heads: list[str]) -> list[str]:
    return ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]


def _launches(rows: list[dict[str, Any]]) -> list[str]:
    others = _others(rows)
    heads = ["Host time per call", "ours", *others, "ours / torch", "10 % of rounds", "90 %"]
    lines = _line(heads)
    for row in rows:
        times, (low, middle, high) = row["microseconds"], row["ratios"]["torch"]
        cells = [row["name"], f"{times[row['ours']]:.2f}"]
        cells += [f"{times[name]:.2f}" if name in times else "" for name in others]
        lines.append("| " + " | ".join([*cells, f"{middle:.2f}", f"{low:.2f}", f"{high:.2f}"]) + " |")
    return [*lines, ""]


def _table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    others = _others(rows)
    lines = _line([title, "ours", *others, "GB/s", "of the limit", "torch / ours"])
    for row in rows:
        times = row["microseconds"]
        cells = [row["name"], f"{times[row['ours']]:.2f}"]
        cells += [f"{times[name]:.2f}" if name in times else "" for name in others]
        cells += [f"{row['gb_s'][row['ours']]:.0f}", f"{row['percent_of_limit']:.1f} %"]
        lines.append("| " + " | ".join([*cells, f"{row['faster_than']['torch']:.3f}"]) + " |")
    return [*lines, ""]


def page_with(page: str, document: dict[str, Any]) -> str:
    """Return the page's text with these figures inserted."""
    return _PART.sub(lambda found: f"{found[1]}{render(document)}{found[2]}", page)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], DATA)
    files.write_text_atomically(PAGE, page_with(PAGE.read_text(), json.loads(DATA.read_text())))
