"""Broad tests, which run only on the PC, because they would take hours on an emulated machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import separate


@pytest.fixture(scope="session", autouse=True)
def server_of_separate_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the server in a folder of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("preloaded")))
        separate.start()
        yield
        separate.stop()
