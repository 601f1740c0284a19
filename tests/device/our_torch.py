"""Determine from the metadata of the image's torch whether this project built it."""

from __future__ import annotations

import importlib.metadata

import pytest


def has_our_torch() -> bool:
    """Return whether torch was built from this project's recipe, so that its patches and build options are known.

    This project's wheel has a plain ``linux`` tag and a folder of libraries, ``torch.libs``. Wheels from package
    indices have a ``manylinux`` tag, and other builds lack the folder ``torch.libs``. importlib.metadata.files() is
    not used, because checking more than 10,000 files takes a minute over NFS.
    """
    for found in importlib.metadata.distributions(name="torch"):
        tags, record = found.read_text("WHEEL") or "", found.read_text("RECORD") or ""
        return "-linux_" in tags and any(line.startswith("torch.libs/") for line in record.splitlines())
    return False


only_our_torch = pytest.mark.skipif(
    not has_our_torch(), reason="torch was not built from this project's recipe, whose patches are tested here"
)
