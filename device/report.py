"""Render the HTML report: one file without external resources, so it can be opened offline and forwarded.

The report contains only data from the evidence document. matplotlib draws the chart as SVG. The chart's colours are
replaced by CSS variables, so the chart follows the reader's light or dark setting.
"""

from __future__ import annotations

import datetime
import io
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device import chain
from toolchain import files, progress, templates

_TEMPLATE = Path(__file__).resolve().parent / "templates" / "report.html.j2"

MARKS = {"passed": "✓", "failed": "✕", "error": "!", "skipped": "–"}


@dataclass(frozen=True)
class Series:
    """A line in the chart. Each point is a pair (width, seconds)."""

    name: str
    css: str
    points: tuple[tuple[int, float], ...]
    dashed: bool = False
    published: bool = False


def execution_label(document: Mapping[str, Any]) -> str:
    """Return a label for the machine that ran the tests. Only the label of real hardware begins with "hardware"."""
    device = document["device"]
    model = device.get("model") or "no model stated"
    if device["execution"] == "hardware":
        return f"hardware: {model}"
    if device["execution"] == "emulation":
        machine = ", ".join(filter(None, ("QEMU", device.get("cpu"), model)))
        return f"emulation ({machine}); not measured on hardware"
    return f"unverified: {device['execution_reason']}; not counted as measured on hardware"


def series_of(timing: Mapping[str, Any]) -> list[Series]:
    """Return the chart's lines, or an empty list if the run has no timing measurements."""
    rows: Sequence[Mapping[str, Any]] = timing.get("rows", ())

    def points(method: str, key: str) -> tuple[tuple[int, float], ...]:
        found = [(row["width"], row[key]) for row in rows if row["method"] == method and row[key]]
        return tuple(sorted(found))

    published = timing.get("published", {}).get("rows", ())
    made = [
        Series("CPU, plain loop", "--cpu", points("cpu", "compute_s")),
        Series("torch, call", "--torch", points("torch", "end_to_end_s")),
        Series("QPU backend, kernel", "--qpu", points("qpu", "compute_s")),
        Series("QPU backend, whole call", "--qpu", points("qpu", "end_to_end_s"), dashed=True),
    ]
    if not any(line.points for line in made):
        return []
    for name, key, css in (("CPU", "cpu_s", "--cpu"), ("QPU", "qpu_s", "--qpu")):
        line = tuple((row["width"], row[key]) for row in published)
        made.append(Series(f"published: Pi 3B, 2021, {name}", css, line, published=True))
    return [line for line in made if line.points]


def chart(timing: Mapping[str, Any], label: str) -> str:
    """Return an SVG chart of the timing on logarithmic axes; an empty string if there are no timing measurements.

    ``label`` names the machine in the picture, because pictures may be copied without the surrounding text.
    """
    lines = series_of(timing)
    return svg({label: lines}, height=timing["height"], legend_columns=3) if lines else ""


_drawing = threading.Lock()
"""A lock for matplotlib's settings, which are global. In a lab, each board has its own thread."""


def svg(charts: Mapping[str, Sequence[Series]], *, height: int, legend_columns: int) -> str:
    """Return one SVG element with a chart for each title.

    Each chart plots time against the number of matrix columns, on logarithmic axes. The charts form two columns.
    ``height`` is the number of rows in the matrix. Lines with the same name share a legend entry.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

    used = dict.fromkeys(["--ink", "--rule", *(line.css for lines in charts.values() for line in lines)])
    placeholders = {css: f"#0101{number:02x}" for number, css in enumerate(used, 1)}
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "pitorch",
        "font.size": 11,
        "font.family": "sans-serif",
        "text.parse_math": False,  # labels contain model names from device trees
        "axes.edgecolor": placeholders["--rule"],
        "axes.labelcolor": placeholders["--ink"],
        "xtick.color": placeholders["--ink"],
        "ytick.color": placeholders["--ink"],
        "text.color": placeholders["--ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    names = {line.name for lines in charts.values() for line in lines}
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    size = (9.2, (4.4 if rows == 1 else 3.4 * rows) + 0.3 * math.ceil(len(names) / legend_columns))
    with _drawing, mpl.rc_context(settings):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
        )
        try:
            for axes, (title, lines) in zip(grid.flat, charts.items(), strict=False):
                for line in lines:
                    widths, times = zip(*line.points, strict=True)
                    axes.loglog(
                        widths,
                        times,
                        color=placeholders[line.css],
                        linestyle=(0, (1, 2)) if line.published else (0, (5, 3)) if line.dashed else "solid",
                        linewidth=1.2 if line.published else 2.2,
                        marker=None if line.published else "o",
                        markersize=5,
                        alpha=0.75 if line.published else 1,
                        label=line.name,
                    )
                # The default tick labels are powers of ten in math text, which the settings above disable.
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
                axes.yaxis.set_minor_formatter(NullFormatter())
                axes.grid(visible=True, which="major", color=placeholders["--rule"], linewidth=0.6)
                axes.tick_params(which="both", length=0)
                axes.set_title(title, loc="left", fontsize=10, style="italic")
            for axes in grid.flat[len(charts) :]:
                axes.set_visible(False)
            figure.supxlabel(f"W, columns of the matrix ({height} rows)", fontsize=11)
            figure.supylabel("time, lower is better", fontsize=11)
            handles = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
            figure.legend(
                handles=handles.values(), frameon=False, fontsize=10, loc="outside upper left", ncols=legend_columns
            )
            sink = io.StringIO()
            figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            pyplot.close(figure)
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    for css, colour in placeholders.items():
        text = text.replace(colour, f"var({css})")
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    return text.replace("<svg ", '<svg role="img" aria-label="time against number of columns, logarithmic axes" ', 1)


def timing_table(timing: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per matrix width, with measured and published times and the QPU kernel's speed-up over the CPU."""
    published = {row["width"]: row for row in timing.get("published", {}).get("rows", ())}
    by_width: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in timing.get("rows", ()):
        by_width.setdefault(row["width"], {})[row["method"]] = row
    made = []
    for width in sorted(by_width):
        cpu, torch, qpu = (by_width[width].get(name, {}) for name in ("cpu", "torch", "qpu"))
        ratio = cpu["compute_s"] / qpu["compute_s"] if cpu.get("compute_s") and qpu.get("compute_s") else None
        reference = published.get(width, {})
        made.append(
            {
                "width": width,
                "cpu": cpu.get("compute_s"),
                "torch": torch.get("end_to_end_s"),
                "qpu": qpu.get("compute_s"),
                "qpu_call": qpu.get("end_to_end_s"),
                "ratio": ratio,
                "published_cpu": reference.get("cpu_s"),
                "published_qpu": reference.get("qpu_s"),
                "published_ratio": reference["cpu_s"] / reference["qpu_s"] if reference else None,
            }
        )
    return made


def grouped(tests: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]], float]]:
    """Return each file's tests and their total duration in seconds. Files with failures come first."""
    by_file: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        by_file.setdefault(test["nodeid"].partition("::")[0], []).append(test)

    def has_fault(item: tuple[str, list[Mapping[str, Any]]]) -> bool:
        return any(test["outcome"] in ("failed", "error") for test in item[1])

    ordered = sorted(by_file.items(), key=lambda item: (not has_fault(item), item[0]))
    return [(name, found, sum(test["seconds"] for test in found)) for name, found in ordered]


def seconds(value: float | None) -> str:
    """Return a duration as text, in a suitable unit."""
    if value is None:
        return "–"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            shown = value * factor
            return f"{shown:.0f} {unit}" if shown >= 100 else f"{shown:.3g} {unit}"
    return f"{value} s"


def short(digest: str) -> str:
    """Return the first twelve digits of a hash."""
    return digest.removeprefix("sha256:")[:12]


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Convert nested mappings and lists to table rows, each of which contains a name and a value."""
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in flat(item, f"{prefix}{key} · ")]
    if isinstance(value, (list, tuple)):
        if all(not isinstance(item, (Mapping, list)) for item in value):
            return [(prefix.removesuffix(" · "), ", ".join(str(item) for item in value))]
        return [row for number, item in enumerate(value, 1) for row in flat(item, f"{prefix}{number} · ")]
    words = {True: "yes", False: "no", None: "–", "": "–"}
    shown = words[value] if value is None or isinstance(value, bool) or value == "" else str(value)
    return [(prefix.removesuffix(" · "), shown)]


def qpu_rows(info: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the output of ``qpu-info --json`` as table rows. Each row is a name and its lines of text."""
    backend, board = info.get("backend") or {}, info.get("board") or {}
    kms, memory = info.get("kms") or {}, info.get("gpu_memory") or {}
    revision = board.get("revision") or {}
    code = revision.get("code") if revision.get("model") else None
    split = f"{memory['mib']} MiB" if memory.get("mib") is not None else ""
    nodes = [
        f"{node['path']}: " + (f"{node['mode']} {node['owner']}, {_access(node)}" if node["present"] else "absent")
        for node in info.get("nodes") or ()
    ]
    obstacles = [f"{item['what']} → {item['fix']}" for item in info.get("obstacles") or ()]
    rows: list[tuple[str, list[Any]]] = [
        ("backend", [backend.get("name"), backend.get("reason")]),
        ("backends", [f"{item['name']}: {item['reason']}" for item in info.get("backends") or ()]),
        ("board", [board.get("model"), code and f"revision {code}", board.get("soc"), board.get("verdict")]),
        ("device nodes", nodes),
        (
            "KMS",
            [
                kms.get("state"),
                kms.get("evidence"),
                *(f"{item['file']}: {item['text']}" for item in kms.get("settings") or ()),
            ],
        ),
        ("memory split", [split, memory.get("source")]),
        ("obstacles", obstacles or ["none"]),
        ("libqpu", [info.get("version")]),
        ("note", [info.get("note")]),
    ]
    shown = [(name, [str(line) for line in lines if line]) for name, lines in rows]
    return [(name, lines) for name, lines in shown if lines]


def _access(node: Mapping[str, Any]) -> str:
    can = [word for key, word in (("readable", "readable"), ("writable", "writable")) if node.get(key)]
    return " and ".join(can) or "not accessible"


def render(document: Mapping[str, Any], *, evidence_name: str, evidence_sha256: str) -> str:
    """Return the report's HTML."""
    counted = document["results"]
    bad = counted["failed"] + counted["errors"]
    broken = chain.broken_links(document, "error")
    made = datetime.datetime.fromisoformat(document["made"])
    label = execution_label(document)
    return templates.render(
        _TEMPLATE,
        {
            "document": document,
            "passed": bool(counted["passed"] and not bad and not broken),
            "bad": bad,
            "broken": broken,
            "label": label,
            "made": f"{made:%d %B %Y, %H:%M} UTC",
            "groups": grouped(counted["tests"]),
            "chart": chart(document["timing"], label),
            "table": timing_table(document["timing"]),
            "marks": MARKS,
            "seconds": seconds,
            "short": short,
            "flat": flat,
            "qpu_rows": qpu_rows,
            "size": progress.human_size,
            "warnings": list(dict.fromkeys(text for step in document["steps"] for text in step["warnings"])),
            "evidence_name": evidence_name,
            "evidence_sha256": evidence_sha256,
        },
        trim_blocks=True,
        html=True,
    )


def write(document: Mapping[str, Any], path: Path, *, evidence_file: Path) -> None:
    """Write the report atomically. The report contains the SHA-256 of ``evidence_file``."""
    digest = files.sha256_of(evidence_file)
    files.write_text_atomically(path, render(document, evidence_name=evidence_file.name, evidence_sha256=digest))
