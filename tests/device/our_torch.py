"""Facts about the image's torch, from its metadata."""

from __future__ import annotations

import importlib.metadata

import pytest


def has_our_torch() -> bool:
    """Whether torch was built from this project's recipe, so that its patches and build options are known.

    Its wheel is tagged for plain Linux; those of package indices are tagged for manylinux.
    """
    found = importlib.metadata.distributions(name="torch")
    return any("-linux_" in (item.read_text("WHEEL") or "") for item in found)


only_our_torch = pytest.mark.skipif(
    not has_our_torch(), reason="torch was not built from this project's recipe, whose patches are tested here"
)
