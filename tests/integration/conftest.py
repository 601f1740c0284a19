"""Fixtures for registry tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from machine import OWN_BINFMT, in_user_namespace
from registry_parts import HTPASSWD, engine_client, need

from registry import local as local_registry
from registry import passwords
from registry.credentials import PASSWORD_VARIABLE
from registry.local import Registry, Settings
from toolchain import process


@pytest.fixture(scope="module")
def client(engine_if_root: None) -> Iterator[docker.DockerClient]:
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


@pytest.fixture(scope="session")
def own_binfmt() -> None:
    """Skip the test if a user namespace has no separate binfmt_misc."""
    listed = in_user_namespace(f"{OWN_BINFMT} && ls /proc/sys/fs/binfmt_misc")
    if listed.returncode or "qemu-arm" in listed.stdout:
        pytest.skip("a separate binfmt_misc needs Linux 6.7 and user namespaces")


@pytest.fixture
def qemu_conf(own_binfmt: None) -> Path:
    """Return the file that registers the emulator, for tests with a separate binfmt_misc."""
    conf = Path("/usr/lib/binfmt.d/qemu-arm.conf")
    if not conf.is_file():
        pytest.skip(f"{conf} is missing: install qemu-user-static or qemu-user-binfmt")
    return conf


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the SSH server of the distribution's package, which is unpacked but not installed."""
    folder = tmp_path_factory.mktemp("sshd")
    process.run(["apt-get", "-o", "Acquire::Retries=3", "download", "openssh-server"], cwd=folder, limit_s=300)
    (package,) = folder.glob("openssh-server_*.deb")
    process.run(["dpkg-deb", "--extract", package, folder / "openssh"])
    return folder / "openssh" / "usr" / "sbin" / "sshd"
