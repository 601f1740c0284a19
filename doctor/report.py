"""Print the findings as a table, or convert them to JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from doctor.finding import Finding, Verdict


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON, for other programs."""
    healthy = all(item.verdict is not Verdict.FAIL for item in findings)
    document = {"schema": 1, "healthy": healthy, "checks": [asdict(item) for item in findings]}
    return json.dumps(document, indent=2) + "\n"


def print_table(findings: Sequence[Finding], *, console: Console | None = None) -> None:
    """Print the findings on stdout."""
    out = console or Console(highlight=False)
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = Table(title="doctor", title_justify="left", box=None, padding=(0, 1, 1, 0))
    for heading in ("", "check", "what was found"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "")
    for item in findings:
        text = Text(item.found)
        text.append(f"\n{item.done}", style="dim")
        if item.fix:
            text.append(f"\n→ {item.fix}", style="bold")
        table.add_row(Text(item.verdict.value, style=colours[item.verdict]), Text(item.check), text)
    out.print(table)
    counts = {verdict: sum(item.verdict is verdict for item in findings) for verdict in Verdict}
    out.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
