"""Fixtures for registry tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from registry_parts import HTPASSWD, engine_client, need

from registry import local as local_registry
from registry import passwords
from registry.credentials import PASSWORD_VARIABLE
from registry.local import Registry, Settings


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    """Connect to the engine."""
    with engine_client() as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Provide a registry without access control."""
    need("docker-registry")
    with local_registry.serve(Settings(folder=tmp_path_factory.mktemp("plain") / "r")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Provide a registry that requires USER's password."""
    need("docker-registry")
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "htpasswd").write_text(HTPASSWD)
    auth = {"REGISTRY_AUTH_HTPASSWD_REALM": "pitorch", "REGISTRY_AUTH_HTPASSWD_PATH": str(folder / "htpasswd")}
    with local_registry.serve(Settings(folder=folder / "r", variables=auth)) as running:
        yield running


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty folder for the test's credentials."""
    folder = tmp_path / "docker-config"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    monkeypatch.setattr(passwords, "_taken", {})
    return folder
