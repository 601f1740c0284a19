"""Tests of registry and engine failures: errors, retries and recovery.

The failures are real: the registry is killed, its disk is full, its certificate is self-signed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from registry_parts import (
    KIB,
    MIB,
    Proxy,
    ask,
    blobs_on_disk,
    config_for,
    engine_client,
    forget,
    image,
    make_certificate,
    need,
    outside_address,
    pull,
    push,
    second_engine,
    small_disk,
    tags_of,
    with_images_on,
    with_tls,
)

from registry import client as registry
from registry import local as local_registry
from registry import retries, transfer, trust
from registry.local import Registry, Settings
from registry.reference import resolve
from toolchain.config import Config
from toolchain.errors import (
    DiskFull,
    EngineUnavailable,
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryFull,
    RegistryHostUnknown,
    RegistryUntrusted,
    UserError,
)
from toolchain.ports import free_port

pytestmark = pytest.mark.engine

TAG = "trixie-armhf"


@pytest.fixture(autouse=True)
def _no_credentials(docker_config: Path) -> None:
    need("docker-registry")


def error_from_the_engine(client: docker.DockerClient, config: Config) -> UserError:
    """Push with the engine, without requests from this project to the registry, and return the error."""
    reference = resolve(config)
    client.api.tag(config.image_reference("system"), reference.name, reference.tag)
    try:
        with pytest.raises(UserError) as caught:
            registry._transfer(client, transfer.Transfer("test"), reference, None)
    finally:
        client.images.remove(str(reference))
    return caught.value


def expect(client: docker.DockerClient, config: Config, kind: type[UserError], exit_code: int) -> UserError:
    """Check that push and pull fail with an error, and that the engine's message is translated into the same error."""
    before = tags_of(client, config)
    with image(client, config.image_reference("system")):
        with pytest.raises(kind) as pushing:
            push(config)
        with pytest.raises(kind):
            pull(config)
        assert type(error_from_the_engine(client, config)) is type(pushing.value)
    assert pushing.value.exit_code == exit_code
    assert pushing.value.fix
    assert tags_of(client, config) == before
    return pushing.value


# --- the wrong address ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nosuch.invalid", "nosuch.invalid:5000"])
def test_unknown_host_is_reported(client: docker.DockerClient, tmp_path: Path, address: str) -> None:
    fault = expect(client, config_for(tmp_path, address), RegistryHostUnknown, 20)
    assert "unknown host nosuch.invalid" in str(fault)


def test_refused_connection_is_reported(client: docker.DockerClient, tmp_path: Path) -> None:
    fault = expect(client, config_for(tmp_path, f"127.0.0.1:{free_port()}"), RegistryConnectionRefused, 20)
    assert "refused" in fault.found
    assert "./inv registry up" in fault.fix


# --- trust ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside_tls(tmp_path: Path) -> Iterator[tuple[Registry, Path]]:
    """Run a registry with a self-signed certificate on an address other than loopback."""
    address = outside_address()
    certificate, key = make_certificate(tmp_path, address)
    settings = Settings(folder=tmp_path / "tls", host=address, variables=with_tls(certificate, key))
    with local_registry.serve(settings) as running:
        yield running, certificate


def test_untrusted_certificate_is_refused(
    client: docker.DockerClient, tmp_path: Path, outside_tls: tuple[Registry, Path]
) -> None:
    running, _ = outside_tls
    fault = expect(client, config_for(tmp_path, running.address), RegistryUntrusted, 30)
    assert f"/etc/docker/certs.d/{running.address}/ca.crt" in fault.fix


def test_suggested_fix_for_an_untrusted_certificate_works(
    client: docker.DockerClient, tmp_path: Path, outside_tls: tuple[Registry, Path]
) -> None:
    running, certificate = outside_tls
    folder = trust.CERTIFICATES / running.address
    if os.geteuid() != 0:
        pytest.skip("needs root, to write to /etc/docker/certs.d")
    made = next(path for path in (folder, *folder.parents) if path.parent.exists())
    folder.mkdir(parents=True)
    try:
        shutil.copy(certificate, folder / "ca.crt")
        config = config_for(tmp_path, running.address)
        with image(client, config.image_reference("system")):
            assert push(config).layers == 1
            assert pull(config).layers == 1
        (folder / "ca.crt").write_text("not a certificate")
        with pytest.raises(RegistryUntrusted, match=r"ca\.crt cannot be used"):
            pull(config)
    finally:
        shutil.rmtree(made)


def test_certificate_for_another_host_is_refused(client: docker.DockerClient, tmp_path: Path) -> None:
    address = outside_address()
    certificate, key = make_certificate(tmp_path, "192.0.2.77")
    settings = Settings(folder=tmp_path / "tls", host=address, variables=with_tls(certificate, key))
    need("docker-registry")
    with pytest.raises(Exception, match="did not start"):
        # The check of whether the registry has started verifies the certificate, and so fails.
        _start_with_short_limit(settings)


def _start_with_short_limit(settings: Settings) -> None:
    before = local_registry._START_LIMIT_S
    local_registry._START_LIMIT_S = 1.0
    try:
        local_registry.start(settings)
    finally:
        local_registry._START_LIMIT_S = before


def test_loopback_accepts_any_certificate(client: docker.DockerClient, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    with local_registry.serve(Settings(folder=tmp_path / "r", variables=with_tls(certificate, key))) as running:
        config = config_for(tmp_path, running.address)
        with image(client, config.image_reference("system")):
            assert push(config).layers == 1
            assert pull(config).layers == 1


def test_plain_http_outside_the_loopback_is_refused(client: docker.DockerClient, tmp_path: Path) -> None:
    with local_registry.serve(Settings(folder=tmp_path / "r", host=outside_address())) as running:
        fault = expect(client, config_for(tmp_path, running.address), RegistryUntrusted, 30)
    assert "plain HTTP" in fault.found
    assert f'"insecure-registries": ["{running.address}"]' in fault.fix


def test_suggested_fix_for_plain_http_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_registry.serve(Settings(folder=tmp_path / "r", host=outside_address())) as running:
        (tmp_path / "daemon.json").write_text(json.dumps({"insecure-registries": [running.address]}))
        with second_engine(tmp_path) as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.host)
            config = config_for(tmp_path, running.address)
            with engine_client() as other, image(other, config.image_reference("system")):
                assert push(config).layers == 1
                assert pull(config).layers == 1


# --- engines -------------------------------------------------------------------------------------------------------


def test_missing_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    for call in (push, pull):
        with pytest.raises(EngineUnavailable) as caught:
            call(config_for(tmp_path, "127.0.0.1:5000"))
        assert caught.value.exit_code == 16


# docker-py does not close its socket if the connection fails (docker.transport.unixconn).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_killed_engine_is_reported_during_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        local_registry.serve(Settings(folder=tmp_path / "r")) as running,
        Proxy(running.address, rate=1 * MIB) as slow,
        second_engine(tmp_path) as daemon,
    ):
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        config = config_for(tmp_path, slow.address)
        with engine_client() as other:
            pid = json.loads(daemon.state.read_text())["pid"]

            def kill(_block: bytes, sent: int) -> bool:
                if sent > MIB:
                    os.kill(pid, signal.SIGKILL)
                return sent > MIB

            summaries: list[str] = []
            # Removing the image fails too, which would mask a failed assertion in the block.
            with contextlib.suppress(OSError), image(other, config.image_reference("system"), (8 * MIB,)):
                slow.watch = kill
                try:
                    push(config)
                except EngineUnavailable as fault:
                    summaries.append(fault.summary)
            assert summaries == ["the Docker engine stopped responding while it pushed the image"]
    gc.collect()


def test_full_disk_of_the_engine_is_reported(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_registry.serve(Settings(folder=tmp_path / "r")) as running, small_disk(tmp_path / "disk", "6m") as disk:
        config = config_for(tmp_path, running.address)
        with image(client, config.image_reference("system"), (8 * MIB,)):
            push(config)
        with second_engine(disk) as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.host)
            with pytest.raises(DiskFull) as caught:
                pull(config)
    assert "docker system prune" in caught.value.fix


def test_full_disk_of_the_engine_is_reported_for_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        local_registry.serve(Settings(folder=tmp_path / "r")) as running,
        small_disk(tmp_path / "disk", "6m") as disk,
        second_engine(disk) as daemon,
    ):
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        config = config_for(tmp_path, running.address)
        with engine_client() as other, image(other, config.image_reference("system")):
            with (disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
                while fill.write(bytes(4 * KIB)):
                    pass
            with pytest.raises(DiskFull) as caught:
                push(config)
            (disk / "fill").unlink()
    assert "docker system prune" in caught.value.fix


def test_hanging_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(pid: int) -> None:
        with registry._engine("pulled the image") as client:
            os.kill(pid, signal.SIGSTOP)
            client.api.timeout = 1
            client.api.images()

    with second_engine(tmp_path) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        pid = json.loads(daemon.state.read_text())["pid"]
        try:
            with pytest.raises(EngineUnavailable, match="stopped responding while it pulled the image"):
                hang(pid)
        finally:
            os.kill(pid, signal.SIGCONT)


# --- full and killed registries ------------------------------------------------------------------------------------


def expected_blobs(running: Registry, repository: str) -> set[str]:
    """Return the blobs that the registry must store for a repository's only image."""
    media = "application/vnd.docker.distribution.manifest.v2+json"
    answer = ask(running, f"/v2/{repository}/manifests/{TAG}", headers={"Accept": media})
    digests = [answer.headers["Docker-Content-Digest"], answer.json()["config"]["digest"]]
    digests += [layer["digest"] for layer in answer.json()["layers"]]
    return {digest.removeprefix("sha256:") for digest in digests}


def assert_held_once(running: Registry, pushed: registry.Pushed) -> None:
    assert pushed.digest.removeprefix("sha256:") in blobs_on_disk(running)
    assert set(blobs_on_disk(running)) == expected_blobs(running, pushed.reference.repository)
    assert ask(running, "/v2/_catalog").json()["repositories"] == [pushed.reference.repository]
    assert ask(running, f"/v2/{pushed.reference.repository}/tags/list").json()["tags"] == [TAG]


def test_full_registry_is_reported_at_once(client: docker.DockerClient, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "2m") as disk,
        local_registry.serve(with_images_on(disk, tmp_path / "r")) as running,
    ):
        config = config_for(tmp_path, running.address)
        with image(client, config.image_reference("system"), (4 * KIB, 4 * MIB)):
            with pytest.raises(RegistryFull) as caught:
                push(config)
            assert caught.value.exit_code == 35
            assert "no space left" in str(caught.value)
            assert TAG not in ask(running, "/v2/pitorch/system/tags/list").text
            subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True, timeout=30)
            pushed = push(config)
        assert pushed.sent in (1, 2), "the small layer may have been pushed before the disk was full"
        assert_held_once(running, pushed)


@contextlib.contextmanager
def killed_once(
    running: Registry, proxy: Proxy, when: Callable[[bytes, int], bool], *, back_after_s: float
) -> Iterator[None]:
    """Kill the registry at the first block that ``when`` accepts, and start it again later."""
    timers: list[threading.Timer] = []

    def watch(block: bytes, sent: int) -> bool:
        if timers or not when(block, sent):
            return False
        os.kill(running.pid, signal.SIGKILL)
        timers.append(threading.Timer(back_after_s, local_registry.start, [running.settings]))
        timers[0].start()
        return True

    proxy.watch = watch
    try:
        yield
        assert timers, "the registry was not killed"
    finally:
        for timer in timers:
            timer.join()


def test_push_survives_a_restart_of_the_registry(
    client: docker.DockerClient, tmp_path: Path, warned: list[str]
) -> None:
    settings = Settings(folder=tmp_path / "r", port=free_port())
    with local_registry.serve(settings) as running, Proxy(running.address, rate=8 * MIB) as proxy:
        config = config_for(tmp_path, proxy.address)
        with (
            image(client, config.image_reference("system"), (4 * KIB, 4 * MIB)),
            killed_once(running, proxy, lambda _block, sent: sent > 2 * MIB, back_after_s=1.0),
        ):
            pushed = push(config)
        assert proxy.cuts == 1
        assert pushed.sent == 2
        assert_held_once(running, pushed)
        assert any("connection to" in line for line in warned)


def is_manifest(block: bytes, _sent: int) -> bool:
    return block.startswith(b"PUT ") and b"/manifests/" in block


def is_layer_request(block: bytes, _sent: int) -> bool:
    """Return whether the engine requests a layer; this project's own requests have another user agent."""
    engines = any(name in block for name in (b"docker/", b"containerd/"))
    return block.startswith(b"GET ") and b"/blobs/" in block and engines


def test_push_is_retried_if_the_manifest_fails(
    client: docker.DockerClient, tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself never retries the upload of a manifest."""
    settings = Settings(folder=tmp_path / "r", port=free_port())

    def delays() -> Iterator[float]:
        """Yield the delays between attempts; start the registry again before the third delay."""
        yield from (0.1, 0.1)
        local_registry.start(settings)
        yield 0.1

    monkeypatch.setattr(retries, "RETRY_DELAYS_S", delays())
    with local_registry.serve(settings) as running, Proxy(running.address) as proxy:
        config = config_for(tmp_path, proxy.address)

        def watch(block: bytes, sent: int) -> bool:
            if proxy.cuts or not is_manifest(block, sent):
                return False
            os.kill(running.pid, signal.SIGKILL)
            return True

        proxy.watch = watch
        with image(client, config.image_reference("system"), (4 * KIB, 256 * KIB)):
            pushed = push(config)
        assert pushed.sent == 2, "each layer must be sent once"
        assert_held_once(running, pushed)
        assert len(warned) == 3


def test_stopped_registry_is_reported(
    client: docker.DockerClient, tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.1, 0.1))
    with local_registry.serve(Settings(folder=tmp_path / "r")) as running, Proxy(running.address) as proxy:
        config = config_for(tmp_path, proxy.address)

        def watch(block: bytes, _sent: int) -> bool:
            if is_manifest(block, 0):
                local_registry.stop(running.settings)
                return True
            return False

        proxy.watch = watch
        before = tags_of(client, config)
        with image(client, config.image_reference("system")), pytest.raises(RegistryBroke) as caught:
            push(config)
    assert caught.value.exit_code == 35
    assert len(warned) == 2
    assert tags_of(client, config) == before


def test_pull_survives_a_restart_of_the_registry(
    client: docker.DockerClient, tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.2, 1.0, 2.0, 5.0, 10.0))
    settings = Settings(folder=tmp_path / "r", port=free_port())
    with local_registry.serve(settings) as running, Proxy(running.address) as proxy:
        config = config_for(tmp_path, proxy.address)
        name = config.image_reference("system")
        with image(client, name, (4 * KIB, 256 * KIB)) as identity:
            pushed = push(config)
        try:
            with killed_once(running, proxy, is_layer_request, back_after_s=0.5):
                pulled = pull(config)
            assert (pulled.image_id, pulled.digest) == (identity, pushed.digest)
        finally:
            forget(client, name)


def test_concurrent_pushes_succeed(client: docker.DockerClient, tmp_path: Path) -> None:
    with local_registry.serve(Settings(folder=tmp_path / "r")) as running:
        config = config_for(tmp_path, running.address)
        found: list[registry.Pushed] = []
        with image(client, config.image_reference("system"), (64 * KIB, 64 * KIB)):
            threads = [threading.Thread(target=lambda: found.append(push(config))) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert len({one.digest for one in found}) == 1
        assert len(found) == 2
        assert_held_once(running, found[0])
