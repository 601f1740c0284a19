"""Run a task as ``./inv TASK…`` does, then write this process's peak memory to a file, even after an error.

    python -m benchmarks.observed REPORT.json TASK [OPTIONS]

VmHWM (proc(5)) covers only this program. The maximum from getrusage would also cover the process from which this
process was forked. The maximum from wait4 would also cover the programs that this process started.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from toolchain import cli


def peak_kib() -> int:
    """Return the peak resident memory of this process in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    _, report, *words = sys.argv
    sys.argv = ["inv", *words]
    try:
        cli.main()
    finally:
        Path(report).write_text(json.dumps({"peak_kib": peak_kib()}))
