"""Tests of a small root's bill of materials, which the real libraries create and validate."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from packageurl import PackageURL

from images import sbom
from images.system import WHEELS
from nfsroot import export
from nfsroot.unpack import SourceImage
from toolchain.config import load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing
from toolchain.manifest import Artefact, Manifest

STATUS = """Package: dpkg
Essential: yes
Status: install ok installed
Priority: required
Section: admin
Maintainer: Dpkg Developers <dpkg@example.org>
Architecture: armhf
Version: 1.22.22
Homepage: https://example.org/dpkg
Description: Debian package management system

Package: libstdc++6
Status: install ok installed
Priority: optional
Section: libs
Maintainer: GCC Maintainers <gcc@example.org>
Architecture: armhf
Source: gcc-14
Version: 1:14.2.0-19
Depends: dpkg
Description: GNU Standard C++ Library
"""
WHEEL = sbom.Part("torch-2.6.0-cp313-cp313-linux_armv7l.whl", "ab" * 32)
LIBRARY = sbom.Part("libqpu.so.1.0.0", "cd" * 32)
PACKAGES = (f"{'12' * 32}  libstdc++6_1%3a14.2.0-19_armhf.deb",)
SPDX, CYCLONEDX = sbom.NAMES


def root_in(folder: Path) -> Path:
    root = folder / "root"
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").write_text(STATUS)
    return root


def write(root: Path, folder: Path, *, parts: tuple[sbom.Part, ...] = (WHEEL, LIBRARY)) -> tuple[Path, ...]:
    return sbom.write(
        root, folder, label="trixie-armhf", parts=parts, packages=PACKAGES, epoch=1735689600, log=folder / "log"
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sbom")
    write(root_in(folder), folder)
    return folder


def test_spdx_lists_packages_and_wheels(made: Path) -> None:
    document = json.loads((made / SPDX).read_text())
    found = {item["name"]: item for item in document["packages"]}
    assert document["spdxVersion"] == "SPDX-2.3"
    assert document["creationInfo"]["created"] == "2025-01-01T00:00:00Z"
    assert found["dpkg"]["versionInfo"] == "1.22.22"
    assert found["torch"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": WHEEL.sha256}]
    assert found["torch"]["packageFileName"] == WHEEL.file
    assert (found["libqpu"]["versionInfo"], found["libqpu"]["checksums"][0]["checksumValue"]) == ("1.0.0", "cd" * 32)
    assert found["libstdc++6"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": "12" * 32}]


def test_cyclonedx_lists_packages_and_wheels(made: Path) -> None:
    document = json.loads((made / CYCLONEDX).read_text())
    found = {item["name"]: item for item in document["components"]}
    assert document["specVersion"] == "1.6"
    assert found["libqpu"]["hashes"] == [{"alg": "SHA-256", "content": "cd" * 32}]
    assert found["libstdc++6"]["hashes"] == [{"alg": "SHA-256", "content": "12" * 32}]
    system = next(item for item in document["dependencies"] if item["ref"] == "CDXRef-pitorch-system")
    assert {WHEEL.purl, LIBRARY.purl} <= set(system["dependsOn"])


def test_same_root_gives_the_same_bytes_from_a_tar(made: Path, tmp_path: Path) -> None:
    tar = tmp_path / "root.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(root_in(tmp_path), ".")
    again = write(tar, tmp_path / "out")
    assert [path.read_bytes() for path in again] == [(made / path.name).read_bytes() for path in again]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(["log", *sbom.NAMES])


def test_firmware_is_added_to_both_documents(made: Path, tmp_path: Path) -> None:
    documents = [shutil.copyfile(made / name, tmp_path / name) for name in sbom.NAMES]
    sbom.add(tmp_path, [sbom.Part("raspi-firmware_1%3a1.20250430+ds-1_all.deb", "ef" * 32)])
    spdx, cyclonedx = (json.loads(path.read_text()) for path in documents)
    package = next(item for item in spdx["packages"] if item["name"] == "raspi-firmware")
    assert (package["versionInfo"], package["primaryPackagePurpose"]) == ("1:1.20250430+ds-1", "FIRMWARE")
    assert package["checksums"] == [{"algorithm": "SHA256", "checksumValue": "ef" * 32}]
    component = next(item for item in cyclonedx["components"] if item["name"] == "raspi-firmware")
    assert (component["type"], component["version"]) == ("firmware", "1:1.20250430+ds-1")
    assert component["hashes"] == [{"alg": "SHA-256", "content": "ef" * 32}]
    locator = package["externalRefs"][0]["referenceLocator"]
    assert PackageURL.from_string(locator).to_dict()["version"] == "1:1.20250430+ds-1"
    assert component["purl"] == locator
    before = json.loads((made / SPDX).read_text())
    assert len(spdx["packages"]) == len(before["packages"]) + 1
    assert spdx["documentNamespace"] != before["documentNamespace"]


def test_another_wheel_changes_the_identifiers(made: Path, tmp_path: Path) -> None:
    other = sbom.Part(WHEEL.file, "ef" * 32)
    spdx, cyclonedx = (json.loads(path.read_text()) for path in write(root_in(tmp_path), tmp_path, parts=(other,)))
    assert spdx["documentNamespace"] != json.loads((made / SPDX).read_text())["documentNamespace"]
    assert cyclonedx["serialNumber"] != json.loads((made / CYCLONEDX).read_text())["serialNumber"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (SPDX, "documentNamespace", "no URI"),
        (SPDX, "packages", 3),
        (CYCLONEDX, "serialNumber", "7"),
        (CYCLONEDX, "x", 1),
    ],
)
def test_invalid_document_is_refused(made: Path, tmp_path: Path, name: str, key: str, value: object) -> None:
    document = json.loads((made / name).read_text())
    sbom.require_valid(made / name)
    (tmp_path / name).write_text(json.dumps({**document, key: value}))
    with pytest.raises(ArtefactDamaged, match="not a valid bill of materials"):
        sbom.require_valid(tmp_path / name)
    (tmp_path / name).write_text("{")
    with pytest.raises(ArtefactDamaged):
        sbom.require_valid(tmp_path / name)


def test_root_without_packages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(ArtefactMissing, match="no package list"):
        write(tmp_path / "root", tmp_path)


def test_libraries_of_a_layer(tmp_path: Path) -> None:
    (tmp_path / "libqpu.so.1.0.0").write_bytes(b"library")
    (tmp_path / "libqpu.so.1").symlink_to("libqpu.so.1.0.0")
    with tarfile.open(tmp_path / "layer.tar", "w") as archive:
        for name in ("libqpu.so.1.0.0", "libqpu.so.1"):
            archive.add(tmp_path / name, f"opt/pitorch/lib/{name}")
    found = sbom.libraries_in(tmp_path / "layer.tar")
    assert found == [sbom.Part("libqpu.so.1.0.0", hashlib.sha256(b"library").hexdigest())]
    assert found[0].purl == "pkg:generic/libqpu@1.0.0?file_name=libqpu.so.1.0.0"


@pytest.mark.parametrize("built_here", [True, False], ids=["built here", "pulled"])
def test_exported_tree_has_documents(made: Path, tmp_path: Path, built_here: bool) -> None:
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    tree, folder = root_in(tmp_path), tmp_path / "nfsroot.files"
    folder.mkdir()
    (tree / "opt/pitorch/lib").mkdir(parents=True)
    (tree / "opt/pitorch/lib" / LIBRARY.file).write_bytes(b"library")
    needs = {"needs:torch": "1", "needs:rootfs": "2"}
    artefacts = tuple(Artefact.of(made / name) for name in sbom.NAMES)
    manifests = {
        "sbom": Manifest(step="sbom", key="k", inputs={**needs, "needs:archives": "3"}, artefacts=artefacts),
        "system": Manifest(step="system", key="k", inputs=needs, facts={"image": "sha256:1"}),
    }
    for name, manifest in manifests.items():
        manifest.write(config.target_root / f"{name}.manifest.json")
    source = SourceImage(
        reference="image",
        id="sha256:1" if built_here else "sha256:2",
        digests=(),
        size=0,
        layers=(),
        labels={WHEELS: json.dumps({WHEEL.file: WHEEL.sha256})},
    )
    found = export.write_sbom(config, source, tree, folder)
    assert found == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sbom.NAMES}
    assert ((folder / SPDX).read_bytes() == (made / SPDX).read_bytes()) == built_here
    names = {item["name"]: item for item in json.loads((folder / SPDX).read_text())["packages"]}
    assert names["torch"]["checksums"][0]["checksumValue"] == WHEEL.sha256
    library = LIBRARY.sha256 if built_here else hashlib.sha256(b"library").hexdigest()
    assert names["libqpu"]["checksums"][0]["checksumValue"] == library


def test_tree_without_packages_has_no_documents(tmp_path: Path) -> None:
    source = SourceImage(reference="image", id="sha256:1", digests=(), size=0, layers=())
    assert export.write_sbom(load_config({}), source, tmp_path, tmp_path) == {}


def test_links_of_an_image_are_followed_in_the_tree(tmp_path: Path) -> None:
    """The tree's links with absolute targets exist both on the PC, with other content, and in the tree."""
    outside, tree, folder = tmp_path / "outside", tmp_path / "tree", tmp_path / "files"
    folder.mkdir()
    for top, package in ((outside, "of-this-pc"), (tree.joinpath(*outside.parts[1:]), "dpkg")):
        top.mkdir(parents=True)
        (top / "status").write_text(STATUS.replace("Package: dpkg", f"Package: {package}"))
        (top / LIBRARY.file).write_text(package)
    for link in ("var/lib/dpkg", "opt/pitorch/lib"):
        (tree / link).parent.mkdir(parents=True)
        (tree / link).symlink_to(outside)
    source = SourceImage(reference="image", id="sha256:1", digests=(), size=0, layers=())
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    export.write_sbom(config, source, tree, folder)
    names = {item["name"]: item for item in json.loads((folder / SPDX).read_text())["packages"]}
    assert "dpkg" in names
    assert "of-this-pc" not in names
    assert names["libqpu"]["checksums"][0]["checksumValue"] == hashlib.sha256(b"dpkg").hexdigest()
