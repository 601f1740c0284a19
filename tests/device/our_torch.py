"""Determine facts about the image's torch from its metadata."""

from __future__ import annotations

import importlib.metadata

import pytest


def has_our_torch() -> bool:
    """Return whether torch was built from this project's recipe, so that its patches and build options are known.

    This project's wheel is tagged for plain Linux and contains libraries. Wheels from package indices are tagged for
    manylinux, and other builds do not contain libraries. importlib.metadata.files() is not used, because checking more
    than 10,000 files takes a minute over NFS.
    """
    for found in importlib.metadata.distributions(name="torch"):
        tags, record = found.read_text("WHEEL") or "", found.read_text("RECORD") or ""
        return "-linux_" in tags and any(line.startswith("torch.libs/") for line in record.splitlines())
    return False


only_our_torch = pytest.mark.skipif(
    not has_our_torch(), reason="torch was not built from this project's recipe, whose patches are tested here"
)
