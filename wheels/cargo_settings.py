"""Pass this PC's Cargo configuration to build containers, so that builds use the same registries and proxy."""

from __future__ import annotations

import tomllib
from pathlib import Path

from images.native import Mounts
from toolchain import caller
from toolchain.errors import UserError

_HOME = Path("/root")


def of_this_pc() -> Mounts:
    """Return mounts for ``~/.cargo/config.toml`` and the crate folders that it names, or none if there is no such file.

    Raises UserError if the file cannot be read or a folder that it names does not exist.
    """
    path = Path(caller.home()) / ".cargo" / "config.toml"
    if not path.is_file():
        return Mounts()
    try:
        sources = tomllib.loads(path.read_text()).get("source", {}).values()
        named = [Path(row[key]) for row in sources for key in ("directory", "local-registry") if key in row]
    except (OSError, ValueError, AttributeError, TypeError) as fault:
        raise UserError(
            "Cargo's configuration cannot be read",
            expected=f"tables of sources in {path}, as Cargo's documentation describes them",
            found=str(fault),
            fix=f"correct {path}",
        ) from fault
    # Relative paths are relative to the folder that contains .cargo.
    folders = {str(_HOME / name): (Path(caller.home()) / name).resolve() for name in named}
    if absent := [str(folder) for folder in folders.values() if not folder.is_dir()]:
        raise UserError(
            "Cargo's configuration names a folder of crates that does not exist",
            expected=f"every source folder listed in {path} to exist",
            found=f"no folder {', '.join(absent)}",
            fix=f"correct {path}, or create the folder",
        )
    return Mounts({f"{_HOME}/.cargo/config.toml": path.resolve(), **folders})
