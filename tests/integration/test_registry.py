"""Tests of push and pull with a real engine and a real registry: contents, credentials and secrets."""

from __future__ import annotations

import base64
import getpass
import hashlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest
from http_parts import serving
from registry_parts import (
    AMD64,
    KIB,
    MIB,
    PASSWORD,
    USER,
    Proxy,
    TokenServer,
    ask,
    blob_path,
    blobs_on_disk,
    command_lines_seen,
    config_for,
    forget,
    image,
    load_image,
    make_certificate,
    need,
    pull,
    push,
    tags_of,
)
from rich.console import Console
from waiting import eventually

from registry import local as local_registry
from registry import retries
from registry.credentials import PASSWORD_VARIABLE
from registry.local import Registry, Settings
from registry.reference import resolve
from toolchain import progress
from toolchain.errors import AccessDenied, PlatformMismatch, ReferenceNotFound, RegistryBroke, RegistryFailed

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("docker_config")]

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"


def store_login(folder: Path, address: str, user: str = USER, password: str = PASSWORD) -> None:
    """Store credentials in the format of ``docker login``."""
    proof = base64.b64encode(f"{user}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": proof}}}))


def test_pushed_image_is_in_the_registry(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="a/b", repository="c")
    before = tags_of(client, config)
    with image(client, config.image_reference("system"), (4 * KIB, 3 * MIB, 0)) as identity:
        pushed = push(config, tag="v1")
    answer = ask(plain, "/v2/a/b/c/manifests/v1", headers={"Accept": MANIFEST})
    assert pushed.digest == "sha256:" + hashlib.sha256(answer.content).hexdigest()
    # An image's ID is the digest of its configuration or, in the containerd image store, of its manifest.
    assert identity in (answer.json()["config"]["digest"], pushed.digest)
    assert str(pushed.reference) == f"{plain.address}/a/b/c:v1"
    assert (pushed.layers, pushed.sent) == (3, 3)
    stored = blobs_on_disk(plain)
    parts = [answer.json()["config"], *answer.json()["layers"]]
    assert pushed.size == sum(stored[part["digest"].removeprefix("sha256:")] for part in parts)
    assert tags_of(client, config) == before, "the engine must not have an additional name"


def test_second_push_sends_nothing(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="twice")
    with image(client, config.image_reference("system"), (4 * KIB, 64 * KIB)):
        first = push(config)
        stored = blobs_on_disk(plain)
        second = push(config)
    assert (second.digest, second.sent) == (first.digest, 0)
    assert blobs_on_disk(plain) == stored
    assert ask(plain, "/v2/pitorch/twice/tags/list").json()["tags"] == ["trixie-armhf"]


def test_pulled_image_equals_the_pushed_one(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="back")
    name = config.image_reference("system")
    before = tags_of(client, config)
    try:
        identity = load_image(client, name, (4 * KIB, 2 * MIB))
        pushed = push(config)
        forget(client, name)
        pulled = pull(config)
        assert (pulled.name, pulled.image_id, pulled.digest) == (name, identity, pushed.digest)
        assert (pulled.platform, pulled.size) == ("linux/arm/v7", pushed.size)
        assert (pulled.layers, pulled.received) == (2, 2)
        assert client.images.get(name).id == identity
        assert tags_of(client, config) - before == {name}, "the pulled image must have only the local name"
        digests = client.images.get(name).attrs["RepoDigests"]
        assert not [one for one in digests if one.startswith(plain.address)]
        again = pull(config)
        assert (again.image_id, again.received) == (identity, 0)
    finally:
        forget(client, name)


@pytest.mark.parametrize("exists", [False, True], ids=["new image", "existing image"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, RegistryFailed], ids=["Ctrl-C", "failure"])
def test_interrupted_pull_leaves_no_name(
    client: docker.DockerClient,
    plain: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: type[BaseException],
    exists: bool,
) -> None:
    config = config_for(tmp_path, plain.address, repository="cut-off")
    name = config.image_reference("system")

    def digests() -> list[str]:
        found = [digest for one in client.api.images() for digest in one["RepoDigests"] or []]
        return [digest for digest in found if digest.startswith(plain.address)]

    def interrupt(*_: object) -> None:
        assert digests(), "the interrupt must come after the engine has named the image"
        raise fault("now")

    try:
        identity = load_image(client, name, (4 * KIB,), seed=f"{fault.__name__}{exists}")
        push(config)
        if not exists:
            forget(client, name)
        before = tags_of(client, config)
        with monkeypatch.context() as patched:
            patched.setattr("registry.client._compare", interrupt)
            with pytest.raises(fault):
                pull(config)
        assert digests() == []
        assert tags_of(client, config) == before
        assert pull(config).image_id == identity
    finally:
        forget(client, name)


def test_pull_replaces_the_local_image(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="replaced")
    name = config.image_reference("system")
    try:
        old = load_image(client, name, seed="old")
        push(config)
        new = load_image(client, name, seed="new")
        assert old != new
        assert pull(config).image_id == old == client.images.get(name).id
        client.images.remove(new, force=True)
    finally:
        forget(client, name)


def test_push_restores_an_existing_name(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="kept")
    alias = str(resolve(config))
    with image(client, config.image_reference("system")), image(client, alias, seed="other") as other:
        push(config)
        assert client.images.get(alias).id == other


def test_push_of_a_missing_image_is_refused(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address)
    with pytest.raises(ReferenceNotFound) as caught:
        push(config)
    assert config.image_reference("system") in caught.value.expected
    assert caught.value.fix == "run ./inv build-image"


def test_image_for_another_platform_is_not_pushed(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="foreign")
    with (
        image(client, config.image_reference("system"), platform=AMD64),
        pytest.raises(PlatformMismatch, match="linux/amd64"),
    ):
        push(config)
    assert ask(plain, "/v2/pitorch/foreign/tags/list").status_code == 404


def test_image_for_another_platform_is_not_pulled(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="alien")
    reference = resolve(config)
    with image(client, str(reference), platform=AMD64):
        list(client.api.push(reference.name, reference.tag, stream=True, auth_config={}))
    before = tags_of(client, config)
    with pytest.raises(PlatformMismatch) as caught:
        pull(config)
    assert (caught.value.expected, caught.value.found) == ("linux/arm/v7", "linux/amd64")
    assert tags_of(client, config) == before
    digests = [digest for one in client.api.images() for digest in one["RepoDigests"] or []]
    assert not [digest for digest in digests if digest.startswith(plain.address)], "no image must be transferred"


def test_pull_selects_the_platform_from_an_index(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="many")
    name = config.image_reference("system")
    reference = resolve(config)
    try:
        identity = load_image(client, name)
        push(config, tag="arm")
        with image(client, f"{reference.name}:amd", platform=AMD64):
            list(client.api.push(reference.name, "amd", stream=True, auth_config={}))
        forget(client, name)
        entries = []
        for tag, platform in (("amd", ("amd64", "")), ("arm", ("arm", "v7"))):
            answer = ask(plain, f"/v2/pitorch/many/manifests/{tag}", headers={"Accept": MANIFEST})
            entries.append(
                {
                    "mediaType": MANIFEST,
                    "size": len(answer.content),
                    "digest": "sha256:" + hashlib.sha256(answer.content).hexdigest(),
                    "platform": {"os": "linux", "architecture": platform[0], "variant": platform[1]},
                }
            )
        put_list(plain, "pitorch/many", "both", entries)
        put_list(plain, "pitorch/many", "foreign", entries[:1])
        pulled = pull(config, tag="both")
        assert pulled.image_id in (identity, pulled.digest)
        assert pulled.platform == "linux/arm/v7"
        with pytest.raises(PlatformMismatch, match="linux/amd64"):
            pull(config, tag="foreign")
    finally:
        forget(client, name)


def put_list(running: Registry, repository: str, tag: str, entries: list[dict[str, object]]) -> None:
    import requests

    body = json.dumps({"schemaVersion": 2, "mediaType": LIST, "manifests": entries})
    with requests.Session() as session:
        session.trust_env = False
        url = f"{running.url}/v2/{repository}/manifests/{tag}"
        assert session.put(url, data=body, headers={"Content-Type": LIST}, timeout=20).status_code == 201


def test_missing_tag_is_reported_with_existing_tags(
    client: docker.DockerClient, plain: Registry, tmp_path: Path
) -> None:
    config = config_for(tmp_path, plain.address, repository="tags")
    with image(client, config.image_reference("system")):
        push(config, tag="one")
        push(config, tag="two")
    with pytest.raises(ReferenceNotFound) as caught:
        pull(config, tag="three")
    assert caught.value.exit_code == 34
    assert "one, two" in caught.value.found
    with pytest.raises(ReferenceNotFound, match="no such repository"):
        pull(config, registry=f"{plain.address}/nowhere")


def test_damaged_manifest_is_refused(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="damaged")
    with image(client, config.image_reference("system")):
        pushed = push(config)
    data = blob_path(plain, pushed.digest)
    whole = data.read_bytes()
    try:
        data.write_bytes(whole + b"\n")
        with pytest.raises(RegistryFailed) as caught:
            pull(config)
        assert pushed.digest in caught.value.expected
        assert caught.value.exit_code == 35
    finally:
        data.write_bytes(whole)


def test_missing_layer_is_reported(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.0,))
    config = config_for(tmp_path, plain.address, repository="holey")
    with image(client, config.image_reference("system"), (32 * KIB,)):
        push(config)
        answer = ask(plain, "/v2/pitorch/holey/manifests/trixie-armhf", headers={"Accept": MANIFEST})
        blob_path(plain, answer.json()["layers"][0]["digest"]).unlink()
        with pytest.raises(RegistryBroke, match=r"a part of .* is missing") as caught:
            pull(config)
        assert caught.value.exit_code == 35


# --- credentials ---------------------------------------------------------------------------------------------------


def test_credentials_from_the_store(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, docker_config: Path
) -> None:
    config = config_for(tmp_path, guarded.address, repository="store")
    store_login(docker_config, guarded.address)
    with image(client, config.image_reference("system")):
        assert push(config).layers == 1
        assert pull(config).layers == 1
        assert push(config, user=USER).sent == 0


def test_credentials_from_a_helper(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, docker_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"ServerURL": guarded.address, "Username": USER, "Secret": PASSWORD})
    helper = tmp_path / "bin" / "docker-credential-pitorchtest"
    helper.parent.mkdir()
    helper.write_text(f"#!/bin/sh\n[ \"$1\" = get ] && cat >/dev/null && echo '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    (docker_config / "config.json").write_text(json.dumps({"credHelpers": {guarded.address: "pitorchtest"}}))
    config = config_for(tmp_path, guarded.address, repository="helper")
    with image(client, config.image_reference("system")):
        assert push(config).layers == 1


def test_environment_overrides_the_store(
    client: docker.DockerClient,
    guarded: Registry,
    tmp_path: Path,
    docker_config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_for(tmp_path, guarded.address, repository="environment")
    store_login(docker_config, guarded.address, password="an old one")
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with image(client, config.image_reference("system")):
        assert push(config).layers == 1, "expected the stored user with the password from the environment"
        assert push(config, user=USER).layers == 1


def test_credentials_from_the_prompt(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{USER}\n"))
    monkeypatch.setattr(getpass, "getpass", lambda *_, **__: PASSWORD)
    config = config_for(tmp_path, guarded.address, repository="prompt")
    with image(client, config.image_reference("system")):
        assert push(config).layers == 1
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    with pytest.raises(AccessDenied, match="no input"):
        pull(config)


def test_wrong_password_is_reported_with_its_source(
    client: docker.DockerClient,
    guarded: Registry,
    tmp_path: Path,
    docker_config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_for(tmp_path, guarded.address, repository="wrong")
    with image(client, config.image_reference("system")):
        store_login(docker_config, guarded.address, password="wrong-4711")
        with pytest.raises(AccessDenied, match="Docker's credential store") as caught:
            push(config)
        assert caught.value.exit_code == 30
        monkeypatch.setenv(PASSWORD_VARIABLE, "wrong-4711")
        with pytest.raises(AccessDenied, match=PASSWORD_VARIABLE) as caught:
            push(config)
        assert "wrong-4711" not in str(caught.value)
        with pytest.raises(AccessDenied):
            pull(config)
    assert ask(guarded, "/v2/_catalog", auth=(USER, PASSWORD)).status_code == 200


def test_missing_credentials_are_reported(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, guarded.address)
    with image(client, config.image_reference("system")):
        with pytest.raises(AccessDenied) as caught:
            push(config)
        assert f"docker login {guarded.address}" in caught.value.fix
        monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
        with pytest.raises(AccessDenied, match="without a user name"):
            push(config)


def test_stored_password_is_only_for_its_user(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, docker_config: Path
) -> None:
    config = config_for(tmp_path, guarded.address)
    store_login(docker_config, guarded.address)
    with image(client, config.image_reference("system")), pytest.raises(AccessDenied, match="another-user"):
        push(config, user="another-user")


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '{"auths": {"HOST": {"auth": "%%%"}}}',
        '{"auths": {"HOST": {"auth": "bm9jb2xvbnNlY3JldA=="}}}',
        '{"auths": {"HOST": 3}}',
        '{"auths": {"HOST": {"auth": 3}}}',
        '{"auths": 3}',
    ],
)
def test_invalid_docker_configuration_is_reported(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, docker_config: Path, broken: str
) -> None:
    (docker_config / "config.json").write_text(broken.replace("HOST", plain.address))
    config = config_for(tmp_path, plain.address)
    with image(client, config.image_reference("system")), pytest.raises(AccessDenied) as caught:
        push(config)
    assert str(docker_config / "config.json") in str(caught.value)
    assert "nocolon" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_missing_credential_helper_is_reported(
    client: docker.DockerClient, guarded: Registry, tmp_path: Path, docker_config: Path
) -> None:
    (docker_config / "config.json").write_text('{"credsStore": "nosuchhelper"}')
    config = config_for(tmp_path, guarded.address)
    with image(client, config.image_reference("system")), pytest.raises(AccessDenied) as caught:
        push(config)
    assert "docker-credential-nosuchhelper" in caught.value.found


def test_open_registry_needs_no_credentials(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, docker_config: Path
) -> None:
    (docker_config / "config.json").write_text('{"credsStore": "nosuchhelper"}')
    config = config_for(tmp_path, plain.address, repository="open")
    with image(client, config.image_reference("system")):
        assert push(config).layers == 1


@pytest.mark.parametrize("identity", [False, True], ids=["password", "identity token"])
def test_token_authentication(
    client: docker.DockerClient, tmp_path: Path, docker_config: Path, identity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("docker-registry")
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    with serving(TokenServer(certificate, key)) as server:
        token = {"realm": server.url, "service": "pitorch-test", "issuer": "issuer", "rootcertbundle": str(certificate)}
        variables = {f"REGISTRY_AUTH_TOKEN_{name.upper()}": value for name, value in token.items()}
        with local_registry.serve(Settings(folder=tmp_path / "r", variables=variables)) as running:
            config = config_for(tmp_path, running.address, repository="token")
            with image(client, config.image_reference("system")):
                with pytest.raises(AccessDenied):
                    push(config)
                store_login(docker_config, running.address, password="wrong")
                with pytest.raises(AccessDenied, match="Docker's credential store"):
                    push(config)
                if identity:
                    entry = {"auth": "", "identitytoken": server.refresh_token}
                    (docker_config / "config.json").write_text(json.dumps({"auths": {running.address: entry}}))
                else:
                    store_login(docker_config, running.address)
                assert push(config).sent == 1
                (docker_config / "config.json").unlink()
                assert pull(config).layers == 1, "an anonymous pull must be allowed"
                server.anonymous = False
                with pytest.raises(AccessDenied):
                    pull(config)


# --- secrets and progress ------------------------------------------------------------------------------------------


def secrets_of(password: str) -> list[str]:
    return [
        password,
        base64.b64encode(f"{USER}:{password}".encode()).decode(),
        base64.b64encode(password.encode()).decode(),
    ]


def text_of(fault: BaseException | None) -> str:
    """Collect all text that a traceback of a chain of exceptions could show."""
    found = ""
    while fault is not None:
        found += f"{fault!s} {fault!r} {vars(fault)}"
        fault = fault.__cause__ or fault.__context__
    return found


@pytest.mark.parametrize("password", [PASSWORD, "Wrong_but_secret_42"])
def test_password_is_never_shown(
    client: docker.DockerClient,
    guarded: Registry,
    tmp_path: Path,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, password)
    caplog.set_level(logging.DEBUG)
    config = config_for(tmp_path, guarded.address, repository="hidden")
    fault = None
    with command_lines_seen() as seen, image(client, config.image_reference("system"), (256 * KIB,)):
        try:
            pushed = push(config, user=USER)
        except AccessDenied as caught:
            fault = caught
        else:
            assert password not in repr(pushed)
    captured = capfd.readouterr()
    text = captured.out + captured.err + caplog.text + text_of(fault) + "".join(seen) + repr(config)
    text += guarded.settings.log.read_text()
    assert len(seen) > 1
    assert "hidden" in text, "the collected text must contain the repository's name"
    for secret in secrets_of(password):
        assert secret not in text
    assert (fault is None) == (password == PASSWORD)


def test_terminal_shows_a_bar_for_each_layer(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "console", console)
    with Proxy(plain.address, rate=2 * MIB) as slow:
        config = config_for(tmp_path, slow.address, repository="bars")
        name = config.image_reference("system")
        with image(client, name, (700 * KIB, 900 * KIB)):
            layers = client.images.get(name).attrs["RootFS"]["Layers"]
            pushed = push(config)
    assert len(layers) == 2
    for layer in layers:
        assert layer.removeprefix("sha256:")[:12] in screen.getvalue()
    assert str(pushed.reference) in screen.getvalue()
    assert "MB" in screen.getvalue()
    assert "Pushing" in screen.getvalue()


def test_ctrl_c_stops_the_push(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> None:
    with Proxy(plain.address, rate=1 * MIB) as slow:
        config = config_for(tmp_path, slow.address, repository="interrupted")
        name = config.image_reference("system")
        code = (
            "from toolchain.config import load_config; from registry import client;"
            f"client.push([load_config({{'image': {{'name': {config.image.name!r}}},"
            f"'registry': {{'address': {slow.address!r}, 'repository': 'interrupted'}}}})])"
        )
        with image(client, name, (30 * MIB,)):
            before = tags_of(client, config)
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                eventually(lambda: slow.sent > 1 * MIB)
                child.send_signal(signal.SIGINT)
                output, _ = child.communicate(timeout=20)
            finally:
                child.kill()
                child.wait()
            assert "KeyboardInterrupt" in output, "tasks.py catches KeyboardInterrupt and exits with 130"
            assert tags_of(client, config) == before
            # Data in the kernel's buffers (several MiB) still passes through the slow relay.
            eventually(lambda: is_idle(slow))
            assert slow.sent < 15 * MIB, "the engine must stop the push as well"
    assert ask(plain, "/v2/pitorch/interrupted/tags/list").status_code == 404


def is_idle(proxy: Proxy) -> bool:
    sent = proxy.sent
    time.sleep(0.5)
    return proxy.sent == sent
