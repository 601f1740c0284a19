"""Make a library in its own installation folder available to the target root's loader, shell and Python."""

from __future__ import annotations

import re
from pathlib import Path

LOADER_CONFIG = "etc/ld.so.conf.d/pitorch.conf"
STATE_CONFIG = "etc/tmpfiles.d/pitorch.conf"
"""The configuration that creates the folder in which processes record which of them uses the QPUs."""
PYTHON_PATH = "usr/lib/python3/dist-packages/pitorch.pth"


def register(stage: Path, installed: Path, prefix: str) -> None:
    """Make the library in the staging folder ``stage`` known to the loader, the shell, Python and pkg-config.

    ``installed`` is the folder that ``prefix`` denotes inside ``stage``. Links in /usr/local/bin point to the
    programs in the folder ``bin`` of ``prefix``. If ``prefix`` contains ``lib/python``, this folder is added to
    Python's path, and boards create /run/qpu at boot.
    """
    loader = stage / LOADER_CONFIG
    loader.parent.mkdir(parents=True, exist_ok=True)
    loader.write_text(f"{prefix}/lib\n")
    programs, pkgconfig = stage / "usr/local/bin", stage / "usr/local/lib/pkgconfig"
    programs.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in installed.glob("bin/*")):
        (programs / name).symlink_to(f"{prefix}/bin/{name}")
    if (installed / "lib/python").is_dir():
        path = stage / PYTHON_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{prefix}/lib/python\n")
        state = stage / STATE_CONFIG
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text("d /run/qpu 2770 root video -\n")
    # A link to qpu.pc would not work, because the file computes its prefix from its own path, and pkg-config would use
    # the link's path instead.
    pkgconfig.mkdir(parents=True, exist_ok=True)
    relocatable = (installed / "lib/pkgconfig/qpu.pc").read_text()
    (pkgconfig / "qpu.pc").write_text(re.sub(r"(?m)^prefix=.*$", f"prefix={prefix}", relocatable))
