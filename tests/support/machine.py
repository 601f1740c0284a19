"""Skip tests that this machine cannot run."""

import pytest

from toolchain import checks


def needs_the_machine() -> None:
    """Skip, naming what is missing, where images cannot be built."""
    if lacking := checks.lacking():
        pytest.skip(f"images cannot be built here: {', '.join(lacking)} missing; ./inv installs programs")
