"""The targets for kernels, from targets.toml and the table of architectures."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.architecture import ARCHITECTURES, Architecture, host_architecture
from toolchain.errors import UserError

_DATA = Path(__file__).with_name("targets.toml")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target: its architecture, and TVM's target options (empty for kernels without TVM)."""

    name: str
    title: str
    architecture: Architecture
    tvm: Mapping[str, Any]
    transport: str
    default_device: str
    """An address; empty if the user must select a board."""

    def linker(self, configured: str) -> str:
        """The program that links code for the target: ``configured`` or, if that is empty, the GNU C++ compiler."""
        if configured:
            return configured
        return "g++" if self.architecture == host_architecture() else f"{self.architecture.gnu}-g++"


def load(name: str) -> Target:
    """The target with this name. Raises a UserError that suggests the closest name."""
    rows = tomllib.loads(_DATA.read_text())
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1, cutoff=0.4)
        raise UserError(
            f"there is no target {name!r}",
            expected=f"one of {', '.join(rows)}",
            found=repr(name),
            fix=f"pass --target {near[0]}" if near else "choose one of these targets (see docs/remote.md)",
        )
    row = rows[name]
    return Target(
        name=name,
        title=row["title"],
        architecture=ARCHITECTURES[row["debian"]] if "debian" in row else host_architecture(),
        tvm=row.get("tvm", {}),
        transport=row["transport"],
        default_device=row.get("default_device", ""),
    )
