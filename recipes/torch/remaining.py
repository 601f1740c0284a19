"""How far a compile of torch is, and what is left of it.

ninja counts steps. Nine of ten copy a header, and of the others some take half a second and some a minute: by their
number a build that has just begun is nearly at its end. So every object counts as many seconds as one of its kind took
in the build that docs/torch.md describes; how fast this machine is shows as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_KINDS = (
    # Where an object or its source lies, and the seconds that one took on average; the first that fits.
    (r"torch_python", 10.6),
    (r"/Register[A-Z]|/Operators_", 19.6),
    (r"torch/csrc/autograd/generated|autograd_generated", 40.4),
    (r"\.DEFAULT\.", 8.8),
    (r"torch/csrc/jit|_jit_", 11.6),
    (r"torch/csrc/api|_api_", 10.4),
    (r"native", 1.9),
    (r"", 2.2),
)
_OBJECT = re.compile(r"Building \S+ object (\S+)")


def seconds_of(item: Mapping[str, str]) -> float:
    """What an object of the compilation database took, give or take."""
    words = f"{item['output']} {item['file']}"
    return next(seconds for pattern, seconds in _KINDS if re.search(pattern, words))


class Remaining:
    """Objects that are not there yet, and how many of them have been made since."""

    def __init__(self, commands: Iterable[Mapping[str, str]], made: Path) -> None:
        """``commands`` is CMake's compilation database; ``made`` the folder that its outputs lie in."""
        self._waiting = {item["output"]: seconds_of(item) for item in commands if not (made / item["output"]).exists()}
        self.total = sum(self._waiting.values())
        self.done = 0.0

    @classmethod
    def of(cls, tree: Path) -> Remaining:
        """Of a configured tree; of one without a readable database nothing is known."""
        try:
            commands = json.loads((tree / "compile_commands.json").read_text())
            return cls(commands, tree)
        except (OSError, ValueError, KeyError, TypeError):
            return cls((), tree)

    def finished(self, line: str) -> None:
        """Take in what ninja says of a step that has ended."""
        if found := _OBJECT.search(line):
            self.done += self._waiting.pop(found[1].rstrip(), 0.0)

    def minutes(self, elapsed: float) -> float | None:
        """Minutes that are left at the pace of the first ``elapsed`` seconds; None while that says nothing."""
        if self.done < min(60.0, self.total / 20) or not self.done:
            return None
        return elapsed / self.done * (self.total - self.done) / 60
