"""Tests of images that the real engine loads layer by layer."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from engine.connect import connect
from images import archive, system
from images.archive import Layer
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.errors import CommandFailed
from toolchain.manifest import Artefact

pytestmark = pytest.mark.engine

NATIVE = host_architecture()
EPOCH = 1735689600


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """Connect to the engine; remove these tests' images afterwards."""
    with contextlib.closing(connect()) as client:
        yield client
        for image in client.api.images():
            for tag in image["RepoTags"] or []:
                if tag.startswith("pitorch-test-archive/"):
                    client.images.remove(tag, force=True)


def layer(folder: Path, name: str, **contents: str) -> Layer:
    """Make a layer with these files in /data, whose contents are unique to ``folder``."""
    (folder / name / "data").mkdir(parents=True)
    for file, text in contents.items():
        (folder / name / "data" / file).write_text(f"{text} of {folder}")
    files.pack(folder / name, folder / f"{name}.tar", epoch=EPOCH)
    return Layer(Artefact.of(folder / f"{name}.tar"), f"made {name}")


def contents(client: docker.DockerClient, image: str, folder: Path) -> dict[str, str]:
    """Return the files in the image's /data."""
    made = client.containers.create(image, ["/none"])
    try:
        blocks, _ = made.get_archive("/data")
        (folder / "data.tar").write_bytes(b"".join(blocks))
    finally:
        made.remove()
    with tarfile.open(folder / "data.tar") as found:
        members = [(Path(item.name).name, found.extractfile(item)) for item in found if item.isreg()]
        return {name: stream.read().decode().partition(" of ")[0] for name, stream in members if stream}


@pytest.mark.parametrize("whole", [False, True], ids=["the upper layer alone", "all layers"])
def test_layer_extends_those_in_the_engine(
    engine: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """An archive that omits the layers in the engine results in the same image as a complete archive.

    The image's ID is the SHA-256 of its configuration.
    """
    lower, upper = layer(tmp_path, "lower", a="first", b="first"), layer(tmp_path, "upper", b="second", c="second")
    archive.load(engine, [lower], "pitorch-test-archive/lower:1", NATIVE, epoch=EPOCH)
    monkeypatch.setattr(archive, "takes_whole_images", lambda _: whole)
    reference = "pitorch-test-archive/both:1"
    made = archive.load(engine, [lower, upper], reference, NATIVE, epoch=EPOCH)
    found = engine.images.get(reference)
    assert found.id == made.image_id
    assert found.attrs["RootFS"]["Layers"] == [f"sha256:{item.tar.sha256}" for item in (lower, upper)]
    assert [item["CreatedBy"] for item in found.history()] == ["made upper", "made lower"]
    assert found.attrs["Created"].startswith("2025-01-01T00:00:00")
    assert contents(engine, reference, tmp_path) == {"a": "first", "b": "second", "c": "second"}
    again = archive.load(engine, [lower, upper], reference, NATIVE, epoch=EPOCH)
    assert again == made


def test_layers_missing_in_the_engine_are_reported(engine: docker.DockerClient, tmp_path: Path) -> None:
    if archive.takes_whole_images(engine):
        pytest.skip("this engine accepts only archives with all layers")
    lower, upper = layer(tmp_path, "lower", a="first"), layer(tmp_path, "upper", b="second")
    with pytest.raises(CommandFailed, match=r"pitorch-test-archive/both:1") as caught:
        archive.load(engine, [lower, upper], "pitorch-test-archive/both:1", NATIVE, epoch=EPOCH)
    assert lower.tar.sha256 in str(caught.value)
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get("pitorch-test-archive/both:1")


@pytest.mark.parametrize(
    ("errors", "whole"),
    [
        ([["Backing Filesystem", "extfs"], ["Supports d_type", "true"]], False),
        ([["driver-type", "io.containerd.snapshotter.v1"]], True),
        (None, False),
    ],
)
def test_containerds_image_store_is_recognised(errors: list[list[str]] | None, whole: bool) -> None:
    class Client:
        def info(self) -> dict[str, object]:
            return json.loads(json.dumps({"Driver": "overlay2", "DriverStatus": errors}))  # type: ignore[no-any-return]

    assert archive.takes_whole_images(Client()) is whole  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ from a Dockerfile


def labelled(client: docker.DockerClient, folder: Path) -> set[str]:
    """Return the IDs of images with the label of a test's Dockerfile, including intermediate images."""
    label = {"label": f"pitorch-test.folder={folder}"}
    return set(client.api.images(quiet=True, all=True, filters=label))


def test_failed_dockerfile_leaves_no_unnamed_image(engine: docker.DockerClient, tmp_path: Path) -> None:
    """Images from earlier builds remain, even if the failed build shares their first instructions."""
    layers = [system.Layer(f"{name}.tar", layer(tmp_path, name, file=name).tar.path) for name in ("one", "two")]
    lines = [f'FROM scratch\nLABEL pitorch-test.folder="{tmp_path}"', "ADD one.tar /", "ADD two.tar /", 'RUN ["/no"]']

    def build(*wanted: str) -> archive.LoadedImage:
        return system.build(engine, "pitorch-test-archive/lines:1", "\n".join(wanted) + "\n", layers, NATIVE)

    with pytest.raises(CommandFailed, match="the engine did not build"):
        build(*lines)
    assert labelled(engine, tmp_path) == set()
    made = build(*lines[:2])
    before = labelled(engine, tmp_path)
    assert made.image_id in before
    with pytest.raises(CommandFailed, match="the engine did not build"):
        build(*lines)
    assert labelled(engine, tmp_path) == before
