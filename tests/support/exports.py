"""Make folders that look like an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nfsroot.layout import Layout, identity_of, write_marker
from toolchain.config import Config, load_config
from toolchain.manifest import Manifest

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


def mark_as_export(layout: Layout, **facts: Any) -> None:
    """Write the marker and the manifest of a tree, which is created if it does not exist."""
    layout.tree.mkdir(parents=True, exist_ok=True)
    layout.folder.mkdir(exist_ok=True)
    write_marker(layout, frozenset({identity_of(layout.tree)}))
    Manifest(step="nfsroot", key="k", inputs={}, facts=facts).write(layout.manifest)


def exported_in(folder: Path, **facts: Any) -> Config:
    """Make the parts of an export that the environment needs."""
    made = load_config(
        {"nfs": {"folder": str(folder / "nfsroot"), "address": "127.0.0.1"}, "build": {"folder": str(folder / "b")}}
    )
    layout = Layout.of(made)
    mark_as_export(layout, **facts)
    layout.known_hosts.write_text(f"* {HOST_KEY}\n")
    layout.client_key.write_text("a key\n")
    return made
