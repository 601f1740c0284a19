"""Load a root filesystem into the engine as an image of the right platform.

The engine's own import stamps the host's architecture on what it imports (dockerd 20.10 does so whatever platform
is asked for). A *docker-archive* carries the image's configuration with it, so that is what is loaded: a
``manifest.json``, the configuration, and the root's tar as the one layer, byte for byte. With a fixed creation time
the image id, which is the SHA-256 of the configuration, depends on nothing but the inputs.

Format: docker image specification v1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors

from toolchain import progress
from toolchain.architecture import Architecture
from toolchain.errors import ImageBuildFailed, PlatformMismatch
from toolchain.manifest import Artefact

_BLOCK = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class LoadedImage:
    """An image in the engine."""

    reference: str
    image_id: str
    size: int


def image_config(
    layer: Artefact, architecture: Architecture, *, epoch: int, created_by: str, environment: Mapping[str, str]
) -> bytes:
    """The image's configuration as JSON bytes; its SHA-256 is the image id."""
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    document: dict[str, Any] = {
        "architecture": architecture.oci_architecture,
        "os": "linux",
        "created": created,
        "config": {
            "Env": [f"PATH={_PATH}", *(f"{name}={value}" for name, value in sorted(environment.items()))],
            "Cmd": ["/bin/bash"],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}"]},
        "history": [{"created": created, "created_by": created_by}],
    }
    if architecture.oci_variant:
        document["variant"] = architecture.oci_variant
    return json.dumps(document, sort_keys=True).encode()


def load_root(
    client: docker.DockerClient,
    layer: Artefact,
    reference: str,
    architecture: Architecture,
    *,
    epoch: int,
    created_by: str = "mmdebstrap",
    environment: Mapping[str, str] | None = None,
) -> LoadedImage:
    """Load a root's tar as ``reference`` and verify the platform that the engine then reports.

    ``epoch`` is the creation time in Unix seconds. Raises ImageBuildFailed or PlatformMismatch.
    """
    config = image_config(layer, architecture, epoch=epoch, created_by=created_by, environment=environment or {})
    image_id = "sha256:" + hashlib.sha256(config).hexdigest()
    name = image_id.removeprefix("sha256:") + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]).encode()
    with progress.bar(f"load {reference}", total=layer.size, in_bytes=True) as bar:
        stream = _archive([("manifest.json", manifest), (name, config)], layer, bar)
        try:
            client.images.load(stream)  # type: ignore[arg-type]
        except docker.errors.DockerException as fault:
            raise ImageBuildFailed(
                f"the engine does not load {reference}",
                expected="a loaded image",
                found=str(fault),
                mend="check the engine's free disk space and log: ./inv doctor",
            ) from fault
    return verify(client, reference, architecture, image_id=image_id)


def verify(
    client: docker.DockerClient, reference: str, architecture: Architecture, *, image_id: str = ""
) -> LoadedImage:
    """Compare what the engine says about an image with what was asked for. Raises PlatformMismatch."""
    found = client.images.get(reference)
    seen = (found.attrs["Os"], found.attrs["Architecture"], found.attrs.get("Variant", ""))
    wanted = ("linux", architecture.oci_architecture, architecture.oci_variant)
    if seen != wanted or (image_id and found.id != image_id):
        raise PlatformMismatch(
            f"{reference} is not the image it should be",
            expected=f"platform {'/'.join(filter(None, wanted))}" + (f", id {image_id}" if image_id else ""),
            found=f"platform {'/'.join(filter(None, seen))}, id {found.id}",
            mend="remove the image (docker rmi) and run ./inv build-image again",
        )
    return LoadedImage(reference, str(found.id), int(found.attrs["Size"]))


def _archive(small: Sequence[tuple[str, bytes]], layer: Artefact, bar: progress.Bar) -> Iterator[bytes]:
    """The docker-archive as a stream: nothing but one block of the layer is in memory at a time."""
    for name, content in small:
        yield _header(name, len(content)) + content + _padding(len(content))
    yield _header("layer.tar", layer.size)
    sent = 0
    with layer.path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            sent += len(block)
            bar.update(sent, total=layer.size)
            yield block
    yield _padding(layer.size) + bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
