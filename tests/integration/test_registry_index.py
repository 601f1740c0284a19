"""Tests of a single tag for the images of several architectures, with a real registry and a real engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from registry_parts import ARM, ARM64, ask, config_for, for_arm64, forget, load_image, pull, push

from registry import client as registry
from registry import distribution, oras
from registry.distribution import Blob, RemoteImage
from registry.local import Registry
from registry.reference import resolve, with_options
from toolchain.config import Config
from toolchain.errors import AccessDenied, PlatformMismatch, ReferenceNotFound, RegistryFailed, UserError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("docker_config")]


@pytest.fixture
def configs(client: docker.DockerClient, plain: Registry, tmp_path: Path) -> Iterator[list[Config]]:
    """Return configurations for armhf and arm64; remove their images afterwards."""
    armhf = config_for(tmp_path, plain.address, namespace=f"t{tmp_path.name[-8:].strip('-_').lower()}")
    both = [armhf, for_arm64(armhf)]
    yield both
    forget(client, *(config.image_reference("system") for config in both))


def load(client: docker.DockerClient, config: Config) -> str:
    return load_image(client, config.image_reference("system"), platform=config.image.target.oci_platform)


def index_of(running: Registry, config: Config, tag: str) -> tuple[dict[str, object], str]:
    """Return the index from the registry, and its digest."""
    path = f"/v2/{config.registry.namespace}/system/manifests/{tag}"
    answer = ask(running, path, headers={"Accept": distribution.INDEX_TYPE})
    assert answer.headers["Content-Type"] == distribution.INDEX_TYPE
    return answer.json(), "sha256:" + hashlib.sha256(answer.content).hexdigest()


def test_each_engine_gets_its_own_image_from_one_tag(
    client: docker.DockerClient, plain: Registry, configs: list[Config]
) -> None:
    identities = [load(client, config) for config in configs]
    images, pushed = registry.push(configs)
    assert pushed is not None
    assert [image.reference.tag for image in images] == ["trixie-armhf", "trixie-arm64"]
    body, digest = index_of(plain, configs[0], "trixie")
    assert digest == pushed.digest
    entries = body["manifests"]
    assert isinstance(entries, list)
    assert [(entry["digest"], entry["platform"]) for entry in entries] == [
        (images[0].digest, {"os": "linux", "architecture": "arm", "variant": "v7"}),
        (images[1].digest, {"os": "linux", "architecture": "arm64"}),
    ]
    again, index = registry.push(list(reversed(configs)))
    assert index is not None
    assert (index.digest, [image.sent for image in again]) == (pushed.digest, [0, 0])

    forget(client, *(config.image_reference("system") for config in configs))
    for platform, identity in zip(
        (ARM, ARM64), identities, strict=True
    ):  # the image that `docker pull` selects on a board
        client.api.pull(pushed.reference.name, tag="trixie", platform=platform)
        assert client.images.get(str(pushed.reference)).id in (identity, pushed.digest)
        forget(client, str(pushed.reference))

    assert pull(configs[1], tag="trixie").image_id in (identities[1], images[1].digest)
    pulled = registry.pull(configs)
    assert [(one.platform, one.digest) for one in pulled] == [
        (ARM, images[0].digest),
        (ARM64, images[1].digest),
    ]
    for config, one in zip(configs, pulled, strict=True):
        assert client.images.get(config.image_reference("system")).id == one.image_id


def test_nothing_is_pushed_if_an_image_is_missing(
    client: docker.DockerClient, plain: Registry, configs: list[Config]
) -> None:
    load(client, configs[0])
    with pytest.raises(ReferenceNotFound) as caught:
        registry.push(configs)
    assert configs[1].image_reference("system") in caught.value.expected
    assert caught.value.fix == "run ./inv build-image --architecture=arm64"
    assert ask(plain, f"/v2/{configs[0].registry.namespace}/system/tags/list").status_code == 404


def test_an_index_without_the_architecture_is_not_pulled(client: docker.DockerClient, configs: list[Config]) -> None:
    load(client, configs[0])
    own_tag = push(configs[0]).reference.tag
    with oras.connect(resolve(configs[0], tag="v1"), actions="pull,push", user="") as store:
        held = distribution.read_image(store.connection.at(own_tag), ARM)
        distribution.put_manifest(store.connection, distribution.index([held]), distribution.INDEX_TYPE)
    with pytest.raises(PlatformMismatch) as caught:
        pull(configs[1], tag="v1")
    assert (caught.value.expected, caught.value.found) == (ARM64, ARM)
    with pytest.raises(PlatformMismatch):
        registry.pull([with_options(config, tag="v1") for config in configs])
    assert not client.images.list(configs[1].image_reference("system"))


def test_a_registry_that_refuses_leaves_the_tag_unchanged(
    client: docker.DockerClient, plain: Registry, guarded: Registry, configs: list[Config]
) -> None:
    for config in configs:
        load(client, config)
    _, pushed = registry.push(configs)
    assert pushed is not None
    with pytest.raises(AccessDenied):
        registry.push([with_options(config, registry=guarded.address) for config in configs])
    unknown = Blob(digest="sha256:" + 64 * "0", size=2)
    image = RemoteImage(
        digest=unknown.digest,
        manifest=unknown,
        media_type=oras.MANIFEST_TYPE,
        platform=ARM64,
        config=unknown,
        layers=(),
    )
    with (
        oras.connect(resolve(configs[0], tag="trixie"), actions="pull,push", user="") as store,
        pytest.raises(RegistryFailed, match="unexpected response"),
    ):
        distribution.put_manifest(store.connection, distribution.index([image]), distribution.INDEX_TYPE)
    assert index_of(plain, configs[0], "trixie")[1] == pushed.digest


def test_an_invalid_tag_is_refused_before_the_engine_is_used(configs: list[Config]) -> None:
    with pytest.raises(UserError, match="is not a valid tag"):
        registry.push([with_options(config, tag="t" * 123) for config in configs])
