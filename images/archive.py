"""Load a root filesystem and further layers into the engine as an image for the target platform.

The engine's import always sets the host's architecture, regardless of the requested platform (dockerd 20.10). A
*docker-archive* is loaded instead, because it contains the image's configuration. The archive consists of a
``manifest.json``, the configuration, and each tar as an unchanged layer. The image ID is the configuration's SHA-256;
if the creation time is fixed, this ID depends only on the inputs. Loading a large layer takes a third of the time that
``ADD`` in a Dockerfile takes.

Format: docker image specification v1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors

from engine.connect import ENGINE_ERRORS, engine_lost
from toolchain import progress
from toolchain.architecture import Architecture
from toolchain.errors import CommandFailed, PlatformMismatch
from toolchain.manifest import Artefact

_BLOCK = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class LoadedImage:
    """An image in the engine."""

    reference: str
    image_id: str
    size: int


@dataclass(frozen=True)
class Layer:
    """An image layer: a tar file, and a description for the image's history."""

    tar: Artefact
    created_by: str = "mmdebstrap"


def image_config(
    layers: Sequence[Layer], architecture: Architecture, *, epoch: int, environment: Mapping[str, str]
) -> bytes:
    """Return the image configuration as JSON; its SHA-256 is the image ID."""
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    document: dict[str, Any] = {
        "architecture": architecture.oci_architecture,
        "os": "linux",
        "created": created,
        "config": {
            "Env": [f"PATH={_PATH}", *(f"{name}={value}" for name, value in sorted(environment.items()))],
            "Cmd": ["/bin/bash"],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.tar.sha256}" for layer in layers]},
        "history": [{"created": created, "created_by": layer.created_by} for layer in layers],
    }
    if architecture.oci_variant:
        document["variant"] = architecture.oci_variant
    return json.dumps(document, sort_keys=True).encode()


def load(
    client: docker.DockerClient,
    layers: Sequence[Layer],
    reference: str,
    architecture: Architecture,
    *,
    epoch: int,
    environment: Mapping[str, str] | None = None,
) -> LoadedImage:
    """Load layers (bottom layer first) as the image ``reference``, and verify the platform that the engine reports.

    All layers except the last belong to an image that the engine already has. They are sent again only if the engine
    requires complete images. ``epoch`` is the creation time in Unix seconds. Raises CommandFailed or PlatformMismatch.
    """
    config = image_config(layers, architecture, epoch=epoch, environment=environment or {})
    image_id = "sha256:" + hashlib.sha256(config).hexdigest()
    name = image_id.removeprefix("sha256:") + ".json"
    names = [f"{layer.tar.sha256}.tar" for layer in layers]
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": names}]).encode()
    sent = layers if takes_whole_images(client) else layers[-1:]
    with progress.bar(f"load {reference}", total=sum(layer.tar.size for layer in sent), in_bytes=True) as bar:
        tars = [(f"{layer.tar.sha256}.tar", layer.tar.path) for layer in sent]
        stream = tar_of([("manifest.json", manifest), (name, config)], tars, bar)
        try:
            # Read all events; otherwise the connection stays open. A rejected request is reported under the key
            # "message".
            events: list[dict[str, Any]] = list(client.api.load_image(stream))  # type: ignore[no-untyped-call]
            errors = [str(event[key]) for event in events for key in ("error", "message") if key in event]
        except ENGINE_ERRORS as fault:
            errors = [str(fault)]
    if errors:
        raise CommandFailed(
            f"the engine cannot load {reference}",
            expected="a loaded image",
            found=" ".join(errors),
            fix="run ./inv doctor to check the engine's free disk space, and read the engine's log",
        )
    return verify(client, reference, architecture, image_id=image_id)


def takes_whole_images(client: docker.DockerClient) -> bool:
    """Return whether the engine can load only archives that contain every layer.

    This is the case for containerd's image store, the default of Docker 29. The engine's own storage drivers identify
    existing layers by the configuration and do not need their contents.
    """
    try:
        status = client.info().get("DriverStatus") or []
    except ENGINE_ERRORS as fault:
        raise engine_lost("was asked for its storage driver", fault) from fault
    return any("io.containerd.snapshotter" in str(value) for _, value in status)


def verify(
    client: docker.DockerClient, reference: str, architecture: Architecture, *, image_id: str = ""
) -> LoadedImage:
    """Check an image's platform and ID, and return the image. Raises PlatformMismatch or CommandFailed."""
    try:
        found = client.images.get(reference)
    except docker.errors.ImageNotFound as fault:
        raise CommandFailed(
            f"{reference} is missing from the engine, although it was just created",
            expected="the image",
            found=str(fault.explanation),
            fix="stop any program that removes images, then run ./inv build-image again",
        ) from fault
    except ENGINE_ERRORS as fault:
        raise engine_lost(f"was asked for {reference}", fault) from fault
    seen = (found.attrs["Os"], found.attrs["Architecture"], found.attrs.get("Variant", ""))
    wanted = ("linux", architecture.oci_architecture, architecture.oci_variant)
    if seen != wanted or (image_id and found.id != image_id):
        raise PlatformMismatch(
            f"{reference} is not the expected image",
            expected=f"platform {'/'.join(filter(None, wanted))}" + (f", id {image_id}" if image_id else ""),
            found=f"platform {'/'.join(filter(None, seen))}, id {found.id}",
            fix="remove the image (docker rmi) and run ./inv build-image again",
        )
    return LoadedImage(reference, str(found.id), int(found.attrs["Size"]))


def tar_of(small: Sequence[tuple[str, bytes]], large: Sequence[tuple[str, Path]], bar: progress.Bar) -> Iterator[bytes]:
    """Yield the blocks of a tar archive that contains ``small`` (names and contents) and ``large`` (names and files).

    At most one block of a large file is in memory at a time. The bar shows how many bytes of the files have been read.
    """
    for name, content in small:
        yield _header(name, len(content)) + content + _padding(len(content))
    sent = 0
    for name, path in large:
        size = path.stat().st_size
        yield _header(name, size)
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                sent += len(block)
                bar.update(sent)
                yield block
        yield _padding(size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
