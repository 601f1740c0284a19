"""Skip tests that this machine cannot run."""

import pytest

from toolchain import checks


def needs_the_machine() -> None:
    """Skip the test if images cannot be built here. The reason names what is missing."""
    if missing := checks.missing_for_builds():
        pytest.skip(f"images cannot be built here: {', '.join(missing)} missing (./inv --set-up installs programs)")
